"""Edges of a picture: a blur, Sobel's filters, and a threshold."""

import numpy as np


def data(n):
    side = int(n**0.5)
    x = np.linspace(-1, 1, side)
    disc = (x[:, None] ** 2 + x[None, :] ** 2 < 0.5).astype(float)
    return (disc + 0.1 * np.random.default_rng(8).normal(size=(side, side)),)


def run(picture, threshold=0.6):
    p = np.pad(picture, 1, mode="edge")
    soft = (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] + 4 * p[1:-1, 1:-1]) / 8
    q = np.pad(soft, 1, mode="edge")
    across = q[:-2, 2:] + 2 * q[1:-1, 2:] + q[2:, 2:] - q[:-2, :-2] - 2 * q[1:-1, :-2] - q[2:, :-2]
    down = q[2:, :-2] + 2 * q[2:, 1:-1] + q[2:, 2:] - q[:-2, :-2] - 2 * q[:-2, 1:-1] - q[:-2, 2:]
    strength = np.sqrt(across**2 + down**2)
    return strength, (strength > threshold).mean()
