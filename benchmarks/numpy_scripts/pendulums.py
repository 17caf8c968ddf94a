"""Pendulums of all starting angles with friction, by a symplectic method; how far they are apart."""

import numpy as np


def data(n):
    return np.linspace(-3, 3, n), np.zeros(n)


def run(angle, speed, steps=10, dt=0.05, friction=0.02):
    for _ in range(steps):
        speed = speed - dt * (np.sin(angle) + friction * speed)
        angle = angle + dt * speed
    energy = 0.5 * speed**2 + 1 - np.cos(angle)
    return angle, speed, energy.std(), np.ptp(energy)
