"""Measures the error of every math function on the GPU of this machine: `python tests/lowering/triton/gpu_math.py`.

Prints the largest error of each in units in the last place, over 2^20 arguments of all magnitudes and 2^20 of the size
of 1, beside the bound of `lowering.triton.math.ULP_BOUNDS`, and that of the short forms whose results are rounded to
float16; ends with 1 where one is exceeded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from device import run_device
from sharp import sharp

from jtile import ir
from jtile.ir.elementwise import ELEMENTWISE
from jtile.lowering.triton.math import ULP_BOUNDS

N, TILE = 1 << 21, 1024
ROUNDED, SHORT = ("erfc", "logistic", "exp", "tanh"), 0.54  # functions with short forms, and their bound in float16
NEAR_ZEROS = ("lgamma", "digamma")  # the error is absolute there, as is that of SciPy


def arguments(dtype: str, seed: int) -> np.ndarray:
    """Half of them random bits without subnormal numbers, half normal numbers of deviation 4."""
    rng = np.random.default_rng(seed)
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    bits = rng.integers(0, np.iinfo(unsigned).max, N // 2, unsigned, endpoint=True).view(dtype)
    with np.errstate(all="ignore"):
        bits = np.where(np.isfinite(bits) & (np.abs(bits) >= np.finfo(dtype).tiny), bits, 1).astype(dtype)
    return np.concatenate([bits, rng.normal(0, 4, N // 2).astype(dtype)])


def kernel(fn: str, dtype: str, out: str) -> ir.Kernel:
    """`fn` over vectors of N numbers of dtype, rounded to `out`."""
    short, last = ir.DTYPES[dtype].short, ir.DTYPES[out].short
    names = [f"%x{k}" for k in range(ELEMENTWISE[fn].arity)]
    refs = ", ".join(f"{n}: ref<{N}x{short}>" for n in names)
    lines = [f"  %a{k} = load {n}[tile(%i, {TILE})] : tile<{TILE}x{short}>" for k, n in enumerate(names)]
    args = ", ".join(f"%a{k}" for k in range(len(names)))
    lines = ["  %i = program_id 0", *lines, f"  %y = {fn} {args}"]
    lines += [] if out == dtype else [f"  %z = cast %y : tile<{TILE}x{last}>"]
    body = "\n".join([*lines, f"  store %o[tile(%i, {TILE})], {'%y' if out == dtype else '%z'}"])
    return ir.parse_kernel(f"kernel @{fn}({refs}, %o: ref<{N}x{last}, out>) grid({N // TILE}) {{\n{body}\n}}")


def wanted(fn: str, xs: list[np.ndarray]) -> np.ndarray:
    """In f64 of f32 arguments; of f64 in 80 bits where NumPy has the function."""
    wide = np.float64 if xs[0].dtype == np.float32 else np.longdouble
    numpy = ELEMENTWISE[fn].numpy
    with np.errstate(all="ignore"):
        try:
            return numpy(*(x.astype(wide) for x in xs))
        except TypeError:  # of scipy
            xs = [x.astype(np.float64) for x in xs]
            return sharp(fn, xs[0], numpy(*xs))


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Errors in units in the last place of the exact result; what neither has as a number counts as right."""
    info = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        rounded = want.astype(got.dtype)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        unit = np.maximum(np.spacing(np.abs(rounded)), info.tiny * info.eps)
        small = (np.abs(got) <= info.tiny) & (np.abs(rounded) <= info.tiny)  # flushed to zero, or nearly
        return np.where(same | small, 0, np.abs(got.astype(want.dtype) - want) / unit).astype(np.float64)


def measure(fn: str, dtype: str, out: str = "") -> tuple[float, float]:
    """(the largest error, where)."""
    xs = [arguments(dtype, k) for k in range(ELEMENTWISE[fn].arity)]
    (got,) = run_device(kernel(fn, dtype, out or dtype), xs, {"num_warps": 4})
    want = wanted(fn, xs)
    error = np.nan_to_num(ulps(got, want), nan=np.inf)
    if fn in NEAR_ZEROS:
        with np.errstate(all="ignore"):
            close = np.abs(got - want) <= (2e-6 if dtype == "float32" else 2e-14) * np.maximum(1, np.abs(want))
        error = np.where(close, 0, error)
    worst = int(np.argmax(error))
    return float(error[worst]), float(xs[0][worst])


def main() -> int:
    bad = 0
    for fn, bounds in ULP_BOUNDS.items():
        parts = []
        for dtype, bound in zip(("float32", "float64"), bounds, strict=True):
            error, place = measure(fn, dtype)
            bad += error > bound
            parts.append(f"{dtype} {error:9.3g} of {bound:4} at {place:12.5g}{' !!' if error > bound else ''}")
        print(f"{fn:10} " + "   ".join(parts), flush=True)
    for fn in ROUNDED:
        error, place = measure(fn, "float32", "float16")
        bad += error > SHORT
        print(f"{fn:10} float16 {error:9.3g} of {SHORT:4} at {place:12.5g}{' !!' if error > SHORT else ''}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
