"""The numbers of digamma, which no vendor has: both back ends compute it themselves.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 6.3.5 and 6.3.18.
"""

from __future__ import annotations

SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)
"""Coefficients of 1/x^2, 1/x^4, ... in the asymptotic series: B(2k) / (2k)."""

SHIFT = 10
"""The argument from which the series is used; smaller ones are raised to it by the recurrence."""

ROOT = (float.fromhex("0x1.762d86356be3fp+0"), float.fromhex("0x1.b86a722197829p-54"))
"""The root between 1 and 2, in two words."""

MIDDLE = (
    0.9510558760318328932, -0.4236274212814607058, 0.2405424842407738995, -0.1484049230538497879,
    0.09498872445498365892, -0.06192213327817977623, 0.0407608338102334965, -0.02697579655310841057,
    0.01790725249659973765, -0.01190822242978821126, 0.007926943789685051116, -0.005279906829281406708,
    0.003519014214410111162, -0.002345744420565322087, 0.001556587672402181731, -0.001035164788877504666,
    0.0007234768265550733193, -0.0004900600188349981691, 0.0002269498692380313052, -0.0001375001025654785631,
    0.0002599118665233225094, -0.0001837857729487465746,
)  # fmt: skip
"""digamma(x) / (x - ROOT) as a polynomial in x - 3/2 for x from 1 to 2, lowest power first: minimax, error 1.4e-17."""
