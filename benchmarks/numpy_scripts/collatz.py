"""Lengths of Collatz' sequences of all numbers up to n, the first steps of them."""

import numpy as np


def data(n):
    return (np.arange(1, n + 1),)


def run(numbers, rounds=20):
    value, length = numbers.copy(), np.zeros_like(numbers)
    for _ in range(rounds):
        going = value > 1
        value = np.where(going, np.where(value % 2 == 0, value // 2, 3 * value + 1), value)
        length += going
    return length, length.max()
