"""The weekday of dates by Zeller's congruence, leap years, and how often the 13th is a Friday."""

import numpy as np


def data(n):
    days = np.arange(n)
    return 1600 + days // 336, 1 + days // 28 % 12, 1 + days % 28


def run(year, month, day):
    early = month < 3
    y = np.where(early, year - 1, year)
    m = np.where(early, month + 12, month)
    century, rest = y // 100, y % 100
    weekday = (day + 13 * (m + 1) // 5 + rest + rest // 4 + century // 4 + 5 * century) % 7
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    return weekday, leap.sum(), ((weekday == 6) & (day == 13)).sum()
