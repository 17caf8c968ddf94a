"""What functions are worth where SciPy's are less exact than a GPU's: its erfc far from 0, its digamma near poles."""

from __future__ import annotations

import math

import numpy as np

from jtile.ir.elementwise import ELEMENTWISE


def sharp(fn: str, x: np.ndarray, want: np.ndarray) -> np.ndarray:
    """`want`, what the reference says of `fn` of float64 numbers, or something better."""
    if fn == "erfc":  # that of libm is within a unit in the last place
        return np.fromiter(map(math.erfc, x.reshape(-1).tolist()), np.float64, x.size).reshape(x.shape)
    if fn == "digamma":  # reflection, with the distance to the pole, which is exact
        pi = np.longdouble("3.14159265358979323846")
        with np.errstate(all="ignore"):
            wide = x.astype(np.longdouble)
            f = wide - np.rint(wide)
            y = ELEMENTWISE[fn].numpy(1 - x) - pi / np.tan(pi * f)
        return np.where((x < 0) & (f != 0) & np.isfinite(x), y, want)
    return want
