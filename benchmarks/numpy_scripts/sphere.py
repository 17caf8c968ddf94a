"""A ray a pixel against a sphere and a floor, with one light."""

import numpy as np


def data(n):
    side = int(n**0.5)
    return np.meshgrid(np.linspace(-1, 1, side), np.linspace(1, -1, side))


def run(x, y, radius=1.0, far=3.0):
    length = np.sqrt(x**2 + y**2 + 1)
    dx, dy, dz = x / length, y / length, 1 / length
    b = far * dz
    root = b**2 - far**2 + radius**2
    hit = root > 0
    t = b - np.sqrt(np.where(hit, root, 0))
    nx, ny, nz = t * dx / radius, t * dy / radius, (t * dz - far) / radius
    bright = np.maximum(0.57735 * (ny - nx - nz), 0) ** 0.8
    with np.errstate(divide="ignore", invalid="ignore"):
        floor = np.where(dy < 0, -1 / dy, np.inf)
        stripes = np.sin(3 * floor * dx) * np.sin(3 * floor * dz)
    ground = np.where(dy < 0, 0.5 + 0.3 * stripes, 0.5)
    return np.where(hit, 0.1 + 0.9 * bright, ground)
