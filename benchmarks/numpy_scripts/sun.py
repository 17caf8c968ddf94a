"""How high the sun stands above places at given times, and from where it shines, by a low-precision almanac."""

import numpy as np


def data(n):
    rng = np.random.default_rng(13)
    return rng.uniform(0, 366, n), rng.uniform(-66, 66, n), rng.uniform(-180, 180, n)


def run(days, latitude, longitude):
    anomaly = np.radians((357.528 + 0.9856003 * days) % 360)
    mean = (280.460 + 0.9856474 * days) % 360
    ecliptic = np.radians(mean + 1.915 * np.sin(anomaly) + 0.020 * np.sin(2 * anomaly))
    tilt = np.radians(23.439 - 4e-7 * days)
    ascension = np.arctan2(np.cos(tilt) * np.sin(ecliptic), np.cos(ecliptic))
    declination = np.arcsin(np.sin(tilt) * np.sin(ecliptic))
    sidereal = np.radians((280.46062 + 360.98564737 * days + longitude) % 360)
    hour = sidereal - ascension
    place = np.radians(latitude)
    height = np.arcsin(np.sin(place) * np.sin(declination) + np.cos(place) * np.cos(declination) * np.cos(hour))
    towards = np.arctan2(-np.sin(hour), np.tan(declination) * np.cos(place) - np.sin(place) * np.cos(hour))
    return np.degrees(height), np.degrees(towards) % 360, (height > 0).mean()
