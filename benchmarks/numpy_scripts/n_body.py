"""Bodies that attract each other: all pairs at once, leapfrog steps."""

import numpy as np


def data(n):
    bodies = int(n**0.5)
    rng = np.random.default_rng(3)
    return rng.normal(size=(bodies, 3)), rng.normal(size=(bodies, 3)) * 0.1, rng.uniform(0.5, 1.5, bodies)


def pull(places, masses, soft=0.05):
    x, y, z = places[:, 0:1], places[:, 1:2], places[:, 2:3]
    dx, dy, dz = x.T - x, y.T - y, z.T - z
    near = (dx**2 + dy**2 + dz**2 + soft**2) ** -1.5
    return np.hstack(((dx * near) @ masses[:, None], (dy * near) @ masses[:, None], (dz * near) @ masses[:, None]))


def run(places, speeds, masses, steps=3, dt=0.01):
    force = pull(places, masses)
    for _ in range(steps):
        speeds = speeds + force * dt / 2
        places = places + speeds * dt
        force = pull(places, masses)
        speeds = speeds + force * dt / 2
    return places, 0.5 * np.sum(masses[:, None] * speeds**2)
