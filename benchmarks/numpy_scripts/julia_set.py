"""A Julia set by complex numbers, coloured smoothly; points that have left stay where they are."""

import numpy as np


def data(n):
    side = int(n**0.5)
    x = np.linspace(-1.5, 1.5, side)
    return (x + 1j * x[:, None],)


def run(z, c=-0.8 + 0.156j, rounds=20):
    shade = np.zeros(z.shape)
    for _ in range(rounds):
        near = z.real**2 + z.imag**2 < 4
        z = np.where(near, z * z + c, z)
        shade += near
    return shade / rounds
