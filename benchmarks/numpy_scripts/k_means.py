"""Lloyd's k-means of points in the plane."""

import numpy as np


def data(n):
    rng = np.random.default_rng(4)
    corners = rng.uniform(-5, 5, (8, 2))
    points = corners[rng.integers(0, 8, n // 8)] + rng.normal(size=(n // 8, 2))
    return points, points[:8].copy()


def run(points, centres, rounds=5):
    for _ in range(rounds):
        away = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2)
        label = away.argmin(axis=1)
        mine = (label[:, None] == np.arange(len(centres))[None, :]).astype(float)
        centres = (mine.T @ points) / mine.sum(axis=0)[:, None]
    return centres, label
