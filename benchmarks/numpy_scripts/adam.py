"""Rosenbrock's function of very many variables, by Adam with its gradient by hand."""

import numpy as np


def data(n):
    return (np.full(n, -1.0) + 0.1 * np.random.default_rng(12).normal(size=n),)


def run(start, rounds=8, rate=0.02):
    x = start.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, rounds + 1):
        miss = x[1:] - x[:-1] ** 2
        slope = np.zeros_like(x)
        slope[1:] += 200 * miss
        slope[:-1] -= 400 * x[:-1] * miss + 2 * (1 - x[:-1])
        m = 0.9 * m + 0.1 * slope
        v = 0.999 * v + 0.001 * slope**2
        x -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return x, (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
