"""Numbers of the grid, sizes, constants."""

from __future__ import annotations

import functools
import math

from jtile import ir
from jtile.passes.order import GROUP, grouped_axes

from .emitter import Emitter, elem_of, emits, padded
from .ttir import Val


@emits(ir.ProgramId)
def _program_id(em: Emitter, op: ir.ProgramId) -> Val:
    return em.program[op.axis]


@emits(ir.NumPrograms)
def _num_programs(em: Emitter, op: ir.NumPrograms) -> Val:
    return emit_size(em, em.kernel.grid[op.axis])


@emits(ir.SizeOf)
def _size_of(em: Emitter, op: ir.SizeOf) -> Val:
    return em.code.to_int(emit_size(em, op.size), elem_of(op.result.dtype))


@emits(ir.Full)
def _full(em: Emitter, op: ir.Full) -> Val:
    return em.code.const(code_of(op.value, op.dtype), elem_of(op.dtype), padded(op.shape))


def code_of(value, dtype: str):
    """A number as registers hold it: floats of 8 and 4 bits as their codes."""
    info = ir.DTYPES[dtype]
    if info.kind == "f" and info.bits <= 8:
        import numpy as np

        return int(np.asarray(value, np.float32).astype(info.numpy).view(np.uint8))
    return value


def emit_size(em: Emitter, n: ir.Size) -> Val:
    """A size as an i32 scalar."""
    if isinstance(n, int):
        return em.code.i32(n)
    total = em.code.i32(0)
    for atoms, k in n.terms:
        factors = [em.symbols[a] if isinstance(a, str) else _call(em, a) for a in atoms]
        total = em.code.add(total, functools.reduce(em.code.mul, factors, em.code.i32(k)))
    return total


def _call(em: Emitter, c) -> Val:
    code = em.code
    a, b = (emit_size(em, x) for x in c.args)
    if c.fn in ("max", "min"):
        return code.op(f"arith.{c.fn}si", a, b)
    name = {"cdiv": "arith.ceildivsi", "floordiv": "arith.floordivsi"}
    if c.fn in name:
        return code.op(name[c.fn], a, b)
    return code.sub(a, code.mul(code.op("arith.floordivsi", a, b), b))


def start_program(em: Emitter, linear: Val, *, plain: bool = False) -> None:
    """Take the ids of a program, i32, from its place in the grid, i32 or i64: the last axis fastest, or bands of a
    matrix product unless the order is to be `plain`."""
    code, rest = em.code, linear
    grid = em.kernel.grid
    banded = None if plain else grouped_axes(em.kernel)
    if banded:
        rest = _banded(em, linear, *banded)
    for axis in reversed(range(len(grid))):
        n = grid[axis]
        if axis in em.program:
            continue
        if n == 1:
            em.program[axis] = code.i32(0)
        elif all(isinstance(g, int) and g == 1 for g in grid[:axis]):
            em.program[axis] = code.to_int(rest, "i32")
        else:
            side = code.to_int(emit_size(em, n), rest.elem)
            em.program[axis] = code.to_int(code.op("arith.remui", rest, side), "i32")
            rest = code.op("arith.divui", rest, side)


def _banded(em: Emitter, linear: Val, i: int, j: int) -> Val:
    """Ids along the axes i and j, whose tiles are taken in bands of `GROUP` rows, column by column inside a band; gives
    the place along the axes before them."""
    code, n_i, n_j = em.code, em.kernel.grid[i], em.kernel.grid[j]
    tiles = code.const(n_i * n_j, linear.elem)
    rest, linear = code.op("arith.divui", linear, tiles), code.op("arith.remui", linear, tiles)
    band = code.const(min(GROUP, n_i) * n_j, linear.elem)
    first = code.scale(code.op("arith.divui", linear, band), GROUP)
    inside = code.op("arith.remui", linear, band)
    left = code.sub(code.const(n_i, first.elem), first)
    rows = code.op("arith.minsi", left, code.const(GROUP, first.elem))
    em.program[i] = code.to_int(code.add(first, code.op("arith.remui", inside, rows)), "i32")
    em.program[j] = code.to_int(code.op("arith.divui", inside, rows), "i32")
    return rest


def static_programs(kernel: ir.Kernel) -> int | None:
    """How many programs there are, where that does not depend on the sizes of a call."""
    return math.prod(kernel.grid) if all(isinstance(n, int) for n in kernel.grid) else None
