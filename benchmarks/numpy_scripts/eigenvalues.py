"""The eigenvalues of very many symmetric matrices of three rows, by the trigonometric solution of a cubic equation."""

import numpy as np


def data(n):
    return tuple(np.random.default_rng(14).normal(size=(6, n)))


def run(a, b, c, d, e, f):
    # | a d f |
    # | d b e |
    # | f e c |
    mean = (a + b + c) / 3
    x, y, z = a - mean, b - mean, c - mean
    spread = np.sqrt((x**2 + y**2 + z**2 + 2 * (d**2 + e**2 + f**2)) / 6)
    half = (x * (y * z - e**2) - d * (d * z - e * f) + f * (d * e - y * f)) / (2 * spread**3)
    angle = np.arccos(np.clip(half, -1, 1)) / 3
    first = mean + 2 * spread * np.cos(angle)
    third = mean + 2 * spread * np.cos(angle + 2 * np.pi / 3)
    return first, 3 * mean - first - third, third
