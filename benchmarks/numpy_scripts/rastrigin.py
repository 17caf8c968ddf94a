"""Particles that look for the lowest point of Rastrigin's function, pulled to their own best place and to all's."""

import numpy as np


def data(n):
    rng = np.random.default_rng(16)
    return rng.uniform(-5, 5, (2, n // 2)), rng.uniform(-1, 1, (2, n // 2))


def height(places):
    return 20 + (places**2 - 10 * np.cos(2 * np.pi * places)).sum(axis=0)


def run(places, speeds, rounds=5, inertia=0.7, own=1.2, common=1.4):
    best, lowest = places, height(places)
    for _ in range(rounds):
        leader = best[:, lowest.argmin()]
        speeds = inertia * speeds + own * (best - places) + common * (leader[:, None] - places)
        places = np.clip(places + speeds, -5.12, 5.12)
        now = height(places)
        best = np.where(now < lowest, places, best)
        lowest = np.minimum(now, lowest)
    return best[:, lowest.argmin()], lowest.min()
