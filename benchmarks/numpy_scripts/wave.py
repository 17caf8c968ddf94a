"""A drop on a pond: the wave equation with leapfrog steps, walls that reflect and some damping."""

import numpy as np


def data(n):
    side = int(n**0.5)
    x = np.linspace(-1, 1, side)
    return (np.exp(-100 * ((x[:, None] - 0.2) ** 2 + (x[None, :] + 0.1) ** 2)),)


def run(now, steps=20, speed=0.25, damping=0.001):
    before = now.copy()
    for _ in range(steps):
        bend = np.zeros_like(now)
        bend[1:-1, 1:-1] = now[2:, 1:-1] + now[:-2, 1:-1] + now[1:-1, 2:] + now[1:-1, :-2] - 4 * now[1:-1, 1:-1]
        after = (2 - damping) * now - (1 - damping) * before + speed * bend
        before, now = now, after
    return now, (now**2).sum()
