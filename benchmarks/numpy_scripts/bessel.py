"""The Bessel function J0 by its series near zero and by Hankel's asymptotic form further out."""

import numpy as np


def data(n):
    return (np.linspace(0.01, 30, n),)


def run(x, terms=20):
    near = np.minimum(x, 10)
    term = np.ones_like(x)
    total = term.copy()
    for k in range(1, terms):
        term = term * -(near**2) / (4 * k**2)
        total += term
    far = np.maximum(x, 10)
    turn = far - np.pi / 4
    wave = np.cos(turn) * (1 - 9 / (128 * far**2)) + np.sin(turn) / (8 * far)
    return np.where(x < 10, total, np.sqrt(2 / (np.pi * far)) * wave)
