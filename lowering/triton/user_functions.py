"""What can be found out about a combiner that a kernel gives, by running it on samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jtile import ir
from jtile.ir.elementwise import convert
from jtile.ir.shapes import full_array

SAMPLES = 512
CLOSE = 1e-3  # of two floats: combiners that differ by rounding only


def commutes(body: ir.Block) -> bool:
    """Does `body(a, b)` give what `body(b, a)` gives, on samples with ties, zeros, infinities and NaN?"""
    k = len(body.yields)
    draws = _samples([p.dtype for p in body.params], 1)
    outer = _Outer()
    one, two = (_run(body, args, outer) for args in (draws, [*draws[k:], *draws[:k]]))
    return all(_agree(x, y) for x, y in zip(one, two, strict=True))


def neutral(op: ir.UserReduce) -> bool:
    """Do the initial values change nothing, on either side? False where they are not constants."""
    if not all(isinstance(i.op, ir.Full) for i in op.inits):
        return False
    draws = _samples([x.dtype for x in op.xs], 2)
    inits = [full_array(i.op.value, (SAMPLES,), i.dtype) for i in op.inits]  # type: ignore[union-attr]
    outer = _Outer()
    for args in ([*inits, *draws], [*draws, *inits]):
        if not all(_equal(x, y) for x, y in zip(_run(op.body, args, outer), draws, strict=True)):
            return False
    return True


class _Outer(dict):
    """Scalars from outside of a block, whose values nobody knows here: anything, the same in every run."""

    def __missing__(self, v: ir.Value) -> np.ndarray:
        self[v] = _samples([v.dtype], 3 + len(self))[0]
        return self[v]


def _run(body: ir.Block, args: Sequence[np.ndarray], outer: _Outer) -> list[np.ndarray]:
    env = dict(zip(body.params, args, strict=True))
    read = lambda v: env[v] if v in env else outer[v]
    with np.errstate(all="ignore"):
        for op in body.ops:
            out = op.reference(*(read(v) for v in op.operands()))
            env[op.results[0]] = np.broadcast_to(out, (SAMPLES,))
    return [read(y) for y in body.yields]


_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, -7.5, 1e4, math.inf, -math.inf, math.nan]


def _samples(dtypes: Sequence[str], seed: int) -> list[np.ndarray]:
    """Few values often, so that ties are common, and many others."""
    rng = np.random.default_rng(seed)
    out = []
    for dtype in dtypes:
        info = ir.DTYPES[dtype]
        if info.kind == "b":
            out.append(rng.integers(0, 2, SAMPLES) > 0)
            continue
        few = np.asarray(_FLOATS if info.kind == "f" else [0, 1, 2, 3, 5, 7, -1, -2])
        some = rng.choice(few, SAMPLES)
        many = rng.normal(size=SAMPLES) * 8 if info.kind == "f" else rng.integers(-(2**62), 2**62, SAMPLES)
        x = np.where(rng.random(SAMPLES) < 0.6, some, many)
        with np.errstate(all="ignore"):
            out.append(convert(x if info.kind == "f" else x.astype(np.int64), dtype))
    return out


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """NaN equals NaN, and -0 equals 0."""
    if ir.DTYPES[a.dtype.name].kind != "f":
        return bool((a == b).all())
    return bool(np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True))


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    info = ir.DTYPES[a.dtype.name]
    if info.kind != "f":
        return _equal(a, b)
    close = CLOSE if info.bits >= 32 else 0.05
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=close, atol=1e-6, equal_nan=True))
