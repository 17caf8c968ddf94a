"""Two substances that react and diffuse, and make spots: Gray and Scott's model on a torus."""

import numpy as np


def data(n):
    side = int(n**0.5)
    u, v = np.ones((side, side)), np.zeros((side, side))
    middle = slice(side // 2 - side // 8, side // 2 + side // 8)
    u[middle, middle], v[middle, middle] = 0.5, 0.25
    return u, v


def laplacian(a):
    return np.roll(a, 1, 0) + np.roll(a, -1, 0) + np.roll(a, 1, 1) + np.roll(a, -1, 1) - 4 * a


def run(u, v, steps=10, feed=0.055, kill=0.062):
    for _ in range(steps):
        reaction = u * v**2
        u, v = (
            u + 0.16 * laplacian(u) - reaction + feed * (1 - u),
            v + 0.08 * laplacian(v) + reaction - (feed + kill) * v,
        )
    return u, v
