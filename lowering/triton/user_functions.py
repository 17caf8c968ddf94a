"""Finds out properties of a combiner that a kernel gives, by running it on samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jtile import ir
from jtile.ir.elementwise import convert
from jtile.ir.shapes import full_array

SAMPLES = 2048
CLOSE = 1e-3  # how close results of combiners that differ by rounding only are, for floats of 32 bits and more


def commutes(body: ir.Block) -> bool:
    """Whether `body(a, b)` gives what `body(b, a)` gives, on samples with ties, zeros, infinities and NaN."""
    k = len(body.yields)
    outer = _Outer(_constants(body))
    draws = _samples([p.dtype for p in body.params], 1, outer.numbers)
    one, two = (_run(body, args, outer) for args in (draws, [*draws[k:], *draws[:k]]))
    return all(_agree(x, y) for x, y in zip(one, two, strict=True))


def neutral(op: ir.UserReduce) -> bool:
    """Whether the initial values change nothing, on either side; False where they are not constants."""
    if not all(isinstance(i.op, ir.Full) for i in op.inits):
        return False
    starts = [i.op.value for i in op.inits]  # type: ignore[union-attr]
    outer = _Outer([*_constants(op.body), *starts])
    draws = _samples([x.dtype for x in op.xs], 2, outer.numbers)
    inits = [full_array(n, (SAMPLES,), i.dtype) for n, i in zip(starts, op.inits, strict=True)]
    for args in ([*inits, *draws], [*draws, *inits]):
        if not all(_equal(x, y) for x, y in zip(_run(op.body, args, outer), draws, strict=True)):
            return False
    return True


def _constants(body: ir.Block) -> list[float]:
    return [op.value for op in body.ops if isinstance(op, ir.Full)]


class _Outer(dict):
    """Scalars from outside of a block, whose values are not known here: each is drawn, and the same in every run."""

    def __init__(self, numbers: Sequence[float]):
        super().__init__()
        self.numbers = numbers

    def __missing__(self, v: ir.Value) -> np.ndarray:
        self[v] = _samples([v.dtype], 3 + len(self), self.numbers)[0]
        return self[v]


def _run(body: ir.Block, args: Sequence[np.ndarray], outer: _Outer) -> list[np.ndarray]:
    env = dict(zip(body.params, args, strict=True))
    read = lambda v: env[v] if v in env else outer[v]
    with np.errstate(all="ignore"):
        for op in body.ops:
            out = op.reference(*(read(v) for v in op.operands()))
            env[op.results[0]] = np.broadcast_to(out, (SAMPLES,))
    return [read(y) for y in body.yields]


def _samples(dtypes: Sequence[str], seed: int, numbers: Sequence[float]) -> list[np.ndarray]:
    """Samples with a few values often, so that ties are common, and many others. `numbers` and their neighbours are
    among the few."""
    rng = np.random.default_rng(seed)
    return [np.where(rng.random(SAMPLES) < 0.7, rng.choice(_few(d, numbers), SAMPLES), _many(d, rng)) for d in dtypes]


def _few(dtype: str, numbers: Sequence[float]) -> np.ndarray:
    """Small numbers, the ends of the range, special values, and the numbers that the function compares with or starts
    from."""
    info = ir.DTYPES[dtype]
    if info.kind == "b":
        return np.array([False, True])
    given = [x for n in numbers for x in (n, n - 1, n + 1)]
    if info.kind == "f":
        values = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -7.5, 1e4, math.inf, -math.inf, math.nan, *given]
        with np.errstate(all="ignore"):
            return np.array(values, np.float64).astype(info.numpy)
    low, high = ir.identity("max", dtype), ir.identity("min", dtype)
    inside = [int(x) for x in given if math.isfinite(x) and low <= x <= high]
    return np.array([0, 1, 2, 3, low, low + 1, high, high - 1, *inside], object).astype(info.numpy)


def _many(dtype: str, rng: np.random.Generator) -> np.ndarray:
    info = ir.DTYPES[dtype]
    if info.kind == "b":
        return rng.random(SAMPLES) < 0.5
    x = rng.normal(size=SAMPLES) * 8 if info.kind == "f" else rng.integers(-(2**62), 2**62, SAMPLES)
    with np.errstate(all="ignore"):
        return convert(x, dtype)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether samples agree: NaN equals NaN, and -0 equals 0."""
    if ir.DTYPES[a.dtype.name].kind != "f":
        return bool((a == b).all())
    return bool(np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True))


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    info = ir.DTYPES[a.dtype.name]
    if info.kind != "f":
        return _equal(a, b)
    close = CLOSE if info.bits >= 32 else 0.05
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=close, atol=1e-6, equal_nan=True))
