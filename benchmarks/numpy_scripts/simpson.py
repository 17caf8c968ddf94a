"""Simpson's rule and Richardson's improvement of the trapezoids, for an integral with an oscillating tail."""

import numpy as np


def data(n):
    return (np.linspace(0, 20, n // 2 * 2 + 1),)


def run(x):
    y = np.exp(-x / 5) * np.sin(3 * x) ** 2 / (1 + np.sqrt(x))
    h = x[1] - x[0]
    simpson = h / 3 * (y[0] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum() + y[-1])
    coarse = 2 * h * (y[0::2].sum() - (y[0] + y[-1]) / 2)
    fine = h * (y.sum() - (y[0] + y[-1]) / 2)
    return simpson, fine + (fine - coarse) / 3
