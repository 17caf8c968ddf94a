"""Perlin's noise in the plane: smooth steps between slopes that a table of permuted numbers chooses."""

import numpy as np


def data(n):
    side = int(n**0.5)
    table = np.random.default_rng(15).permutation(256)
    line = np.linspace(0.3, 20.3, side, endpoint=False)
    return line, np.concatenate((table, table))


def fade(t):
    return t * t * t * (t * (t * 6 - 15) + 10)


def slope(number, x, y):
    angle = number * (2 * np.pi / 256)
    return np.cos(angle) * x + np.sin(angle) * y


def run(line, table):
    x, y = np.meshgrid(line, line)
    column, row = x.astype(int), y.astype(int)
    u, v = x - column, y - row
    at = lambda i, j: table[table[column + i] + row + j]
    low = slope(at(0, 0), u, v) * (1 - fade(u)) + slope(at(1, 0), u - 1, v) * fade(u)
    high = slope(at(0, 1), u, v - 1) * (1 - fade(u)) + slope(at(1, 1), u - 1, v - 1) * fade(u)
    return low * (1 - fade(v)) + high * fade(v)
