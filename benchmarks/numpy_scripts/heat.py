"""Heat in a plate with a hot edge: explicit steps in place, the edges held."""

import numpy as np


def data(n):
    side = int(n**0.5)
    plate = np.zeros((side, side))
    plate[0, :] = 100.0
    plate[:, 0] = 50.0
    return (plate,)


def run(plate, steps=20, rate=0.2):
    u = plate.copy()
    for _ in range(steps):
        inner = u[1:-1, 1:-1]
        flow = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * inner
        u[1:-1, 1:-1] += rate * flow
    return u, u.mean()
