"""A cloud of states of Lorenz' system, by the classical Runge-Kutta method."""

import numpy as np


def data(n):
    rng = np.random.default_rng(5)
    return tuple(rng.normal(size=n) + start for start in (1.0, 1.0, 25.0))


def slope(x, y, z):
    return 10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z


def run(x, y, z, steps=5, dt=0.01):
    for _ in range(steps):
        a1, b1, c1 = slope(x, y, z)
        a2, b2, c2 = slope(x + dt / 2 * a1, y + dt / 2 * b1, z + dt / 2 * c1)
        a3, b3, c3 = slope(x + dt / 2 * a2, y + dt / 2 * b2, z + dt / 2 * c2)
        a4, b4, c4 = slope(x + dt * a3, y + dt * b3, z + dt * c3)
        x = x + dt / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        y = y + dt / 6 * (b1 + 2 * b2 + 2 * b3 + b4)
        z = z + dt / 6 * (c1 + 2 * c2 + 2 * c3 + c4)
    return x, y, z
