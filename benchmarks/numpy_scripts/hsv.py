"""A picture's colours to hue, saturation and value, more saturation, and back."""

import numpy as np


def data(n):
    return (np.random.default_rng(9).random((n, 3)),)


def run(rgb, more=1.3):
    r, g, b = rgb[:, 0], rgb[:, 1], rgb[:, 2]
    value = np.maximum(np.maximum(r, g), b)
    spread = value - np.minimum(np.minimum(r, g), b)
    safe = np.where(spread == 0, 1, spread)
    hue = np.where(value == r, (g - b) / safe % 6, np.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4))
    saturation = np.clip(spread / np.where(value == 0, 1, value) * more, 0, 1)
    out = np.empty_like(rgb)
    for channel, n in enumerate((5, 3, 1)):
        k = (n + hue) % 6
        out[:, channel] = value - value * saturation * np.clip(np.minimum(k, 4 - k), 0, 1)
    return out
