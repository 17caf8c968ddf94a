"""Distances along the surface of the Earth, and the nearest pair."""

import numpy as np


def data(n):
    rng = np.random.default_rng(6)
    return tuple(rng.uniform(-limit, limit, n) for limit in (90, 180, 90, 180))


def run(lat1, lon1, lat2, lon2):
    lat1, lon1, lat2, lon2 = map(np.radians, (lat1, lon1, lat2, lon2))
    a = np.sin((lat2 - lat1) / 2) ** 2 + np.cos(lat1) * np.cos(lat2) * np.sin((lon2 - lon1) / 2) ** 2
    distance = 6371 * 2 * np.arcsin(np.sqrt(a))
    return distance, distance.mean(), distance.argmin()
