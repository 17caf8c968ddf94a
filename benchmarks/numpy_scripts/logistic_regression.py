"""Logistic regression of two features and their products, by gradient descent with momentum."""

import numpy as np


def data(n):
    rng = np.random.default_rng(11)
    a, b = rng.normal(size=n), rng.normal(size=n)
    return a, b, (a * b + 0.3 * rng.normal(size=n) > 0).astype(float)


def run(a, b, label, rounds=5, rate=1.0):
    weights, momentum = np.zeros(4), np.zeros(4)
    for _ in range(rounds):
        score = weights[0] + weights[1] * a + weights[2] * b + weights[3] * a * b
        error = 1 / (1 + np.exp(-score)) - label
        slope = np.array([error.mean(), (error * a).mean(), (error * b).mean(), (error * a * b).mean()])
        momentum = 0.9 * momentum - rate * slope
        weights = weights + momentum
    return weights
