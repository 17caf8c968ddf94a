"""How long the points of a part of the complex plane stay near the origin under z -> z**2 + c."""

import numpy as np


def data(n):
    side = int(n**0.5)
    return np.linspace(-2, 0.5, side), np.linspace(-1.25, 1.25, side)


def run(xs, ys, rounds=30):
    cx, cy = np.meshgrid(xs, ys)
    x, y = np.zeros_like(cx), np.zeros_like(cy)
    steps = np.zeros(cx.shape, dtype=int)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(rounds):
            x, y = x * x - y * y + cx, 2 * x * y + cy
            steps += x * x + y * y < 4
    return steps
