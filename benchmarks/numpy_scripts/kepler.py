"""Kepler's equation M = E - e sin E by Newton's method, and where the planets are."""

import numpy as np


def data(n):
    rng = np.random.default_rng(7)
    return rng.uniform(0, 2 * np.pi, n), rng.uniform(0, 0.6, n)


def run(mean, eccentricity, rounds=6):
    anomaly = mean + eccentricity * np.sin(mean)
    for _ in range(rounds):
        error = anomaly - eccentricity * np.sin(anomaly) - mean
        anomaly -= error / (1 - eccentricity * np.cos(anomaly))
    x = np.cos(anomaly) - eccentricity
    y = np.sqrt(1 - eccentricity**2) * np.sin(anomaly)
    return x, y
