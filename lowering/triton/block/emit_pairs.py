"""Arithmetic of 16-bit floats in roles, two at a time.

What warpgroup products take from registers often comes out of few instructions an element: codes of quantised weights
that become numbers. Sums and products of float16 and bfloat16 are rounded once whether they are made in float32 or in
their own type, and neighbours in a register are one instruction.
"""

from __future__ import annotations

import dataclasses

from jtile import ir

from ..ttir import Val
from .emitter import BlockEmitter, emits

_PAIRED = {"add": "add", "sub": "sub", "mul": "mul"}
_TYPES = {"bfloat16": "bf16x2", "float16": "f16x2"}


@emits(ir.Map)
def _map(em: BlockEmitter, op: ir.Map) -> Val:
    dtype = op.args[0].dtype
    if op.fn not in _PAIRED or dtype not in _TYPES or not op.result.shape:
        return em.as_tile(op)
    assert em.homes is not None
    layout = em.homes[op.result]
    a, b = (em.tile(v, layout) for v in op.args)
    name = f"{_PAIRED[op.fn]}.rn.{_TYPES[dtype]}"
    asm = f'"{name} $0, $1, $2;" {{constraints = "=r,r,r", packed_element = 2 : i32, pure = true}}'
    out = dataclasses.replace(a, name=em.code.name(), fill=None, number=None)
    em.code.do(f"{out.name} = tt.elementwise_inline_asm {asm} {a.name}, {b.name} : {a.type}, {b.type} -> {out.type}")
    return out
