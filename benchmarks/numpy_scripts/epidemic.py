"""An epidemic (susceptible, infected, recovered) for very many rates of contact, by Heun's method, and its peak."""

import numpy as np


def data(n):
    return np.linspace(0.1, 1.5, n), np.full(n, 0.001)


def slope(susceptible, infected, contact, recovery):
    caught = contact * susceptible * infected
    return -caught, caught - recovery * infected


def run(contact, infected, steps=15, dt=0.5, recovery=0.1):
    susceptible = 1 - infected
    peak = infected.copy()
    for _ in range(steps):
        s1, i1 = slope(susceptible, infected, contact, recovery)
        s2, i2 = slope(susceptible + dt * s1, infected + dt * i1, contact, recovery)
        susceptible = susceptible + dt / 2 * (s1 + s2)
        infected = infected + dt / 2 * (i1 + i2)
        peak = np.maximum(peak, infected)
    return peak, 1 - susceptible - infected
