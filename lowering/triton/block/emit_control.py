"""Loops and branches of a role: carried tiles keep one layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jtile import ir

from ..emit_control import for_loop, opened, range_of, types_of, while_loop, yield_values
from ..emitter import elem_of
from ..ttir import Val
from .emitter import BlockEmitter, emits


@emits(ir.For)
def _for(em: BlockEmitter, op: ir.For) -> list[Val]:
    r, layouts = range_of(em, op), _layouts(em, op.results)
    return for_loop(em, op, r, _in(em, op.inits, layouts), lambda args: em.block(op.body, args, layouts))[0]


@emits(ir.While)
def _while(em: BlockEmitter, op: ir.While) -> list[Val]:
    layouts = _layouts(em, op.results)
    return while_loop(em, op, _in(em, op.inits, layouts), lambda args: em.block(op.body, args, layouts))[0]


@emits(ir.If)
def _if(em: BlockEmitter, op: ir.If) -> list[Val]:
    code = em.code
    layouts = _layouts(em, op.results)
    kinds = [Val("", v.shape, elem_of(v.dtype), layout=h or "") for v, h in zip(op.results, layouts, strict=True)]
    returns = f" -> ({types_of(kinds)})" if kinds else ""
    results = opened(em, f"scf.if {em.env[op.cond].name}{returns} {{", kinds)
    for text, block in (("} else {", op.then), ("}", op.orelse)):
        if block is op.orelse and not (block.ops or kinds):
            break
        with code.region():
            yield_values(em, em.block(block, (), layouts))
        code.do(text if op.orelse.ops or kinds else "}")
    return results


def _layouts(em: BlockEmitter, values: Sequence[ir.Value]) -> list[Any]:
    """The layouts of the values that a region carries; None for scalars."""
    assert em.homes is not None
    return [em.homes[v] if v.shape else None for v in values]


def _in(em: BlockEmitter, values: Sequence[ir.Value], layouts: Sequence[Any]) -> list[Val]:
    return [em.env[v] if h is None else em.tile(v, h) for v, h in zip(values, layouts, strict=True)]
