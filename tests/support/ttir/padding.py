"""Lanes beyond the shape of a tile: garbage after every op, and what emitters say of them (`Val.fill`) is checked."""

from __future__ import annotations

import contextlib
import math
from unittest import mock

from jtile.ir import DTYPES, FNUZ, Op, TileType, Value
from jtile.lowering.triton.emitter import Emitter
from jtile.lowering.triton.ttir import Val


@contextlib.contextmanager
def spoiled_padding(seed: int = 0):
    """Kernels that are emitted inside hold garbage in the lanes beyond their tiles; a `fill` is asserted in the text,
    and then forgotten: with seed 0 always, else for every other value."""
    plain = Emitter.op

    def op(em: Emitter, op: Op) -> None:
        plain(em, op)
        for r in op.results:
            if isinstance(r.type, TileType) and r in em.env:
                em.env[r] = _spoiled(em, r, em.env[r], seed == 0 or (len(em.env) + seed) % 2 == 0)

    with mock.patch.object(Emitter, "op", op):
        yield


def _spoiled(em: Emitter, r: Value, v: Val, forget: bool) -> Val:
    own = em.valid(r.shape)
    if own is None:
        return v
    code = em.code
    if v.fill is not None:
        _assert_fill(em, own, v)
    if v.fill is None or forget:
        return code.select(own, v, code.const(_garbage(r.dtype), v.elem, v.shape))
    return v


def _assert_fill(em: Emitter, own: Val, v: Val) -> None:
    code = em.code
    assert v.fill is not None
    number = code.const(v.fill, v.elem, v.shape)
    if v.is_float:
        same = code.cmp("uno", v, v) if math.isnan(v.fill) else code.cmp("oeq", v, number)
    else:
        same = code.cmp("eq", v, number)
    right = code.op("arith.ori", own, same)
    code.do(f'tt.assert {right.name}, "fill of a result" : {right.type}')


def _garbage(dtype: str) -> float | int:
    """A number that spoils sums, products and maxima; types of 2 and 4 bits stay in their range, as every op leaves
    them."""
    info = DTYPES[dtype]
    if info.kind == "b":
        return True
    if info.kind == "f":
        return math.nan if info.bits > 8 else 0x80 if dtype in FNUZ else 0x7F if info.bits == 8 else 0x0F
    if info.bits < 8:
        return {"uint2": 3, "int2": -1, "uint4": 13, "int4": -7}[dtype]
    return -7 if info.kind == "i" else (1 << info.bits) - 7
