"""Prices of European options, with the normal distribution by the polynomial of Abramowitz and Stegun, 26.2.17."""

import numpy as np


def data(n):
    rng = np.random.default_rng(1)
    return rng.uniform(50, 150, n), rng.uniform(50, 150, n), rng.uniform(0.1, 2, n)


def normal_cdf(x):
    k = 1 / (1 + 0.2316419 * np.abs(x))
    tail = k * (0.319381530 + k * (-0.356563782 + k * (1.781477937 + k * (-1.821255978 + k * 1.330274429))))
    tail *= np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    return np.where(x > 0, 1 - tail, tail)


def run(price, strike, years, rate=0.03, volatility=0.25):
    spread = volatility * np.sqrt(years)
    d1 = (np.log(price / strike) + (rate + volatility**2 / 2) * years) / spread
    d2 = d1 - spread
    discounted = strike * np.exp(-rate * years)
    call = price * normal_cdf(d1) - discounted * normal_cdf(d2)
    put = call - price + discounted
    return call, put
