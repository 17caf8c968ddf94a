"""The logistic map for many growth rates at once, with the Lyapunov exponent of each."""

import numpy as np


def data(n):
    return (np.linspace(2.5, 3.9, n),)


def run(rate, rounds=15):
    x = np.full_like(rate, 0.3)
    exponent = np.zeros_like(rate)
    for _ in range(rounds):
        exponent += np.log(np.abs(rate * (1 - 2 * x)) + 1e-12)
        x = rate * x * (1 - x)
    return x, exponent / rounds
