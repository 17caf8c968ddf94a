"""Loops and branches of a role: carried tiles keep one layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jtile import ir
from jtile.lowering.triton.block.emitter import BlockEmitter, emits
from jtile.lowering.triton.emit_control import end_of_test, fresh, index_of, opened, range_of, types_of, yield_values
from jtile.lowering.triton.emitter import elem_of
from jtile.lowering.triton.ttir import Val


@emits(ir.For)
def _for(em: BlockEmitter, op: ir.For) -> list[Val]:
    code = em.code
    r = range_of(em, op)
    layouts = _layouts(em, op.results)
    inits = _in(em, op.inits, layouts)
    counter, params = Val(code.name(), (), r.elem), [fresh(em, v) for v in inits]
    carry = ", ".join(f"{p.name} = {v.name}" for p, v in zip(params, inits, strict=True))
    carry = f" iter_args({carry}) -> ({types_of(inits)})" if inits else ""
    head = f"scf.for {counter.name} = {r.lo.name} to {r.hi.name} step {r.step.name}{carry} : {r.elem} {{"
    results = opened(em, head, inits)
    with code.region():
        index = index_of(em, op, r, counter)
        yield_values(em, em.block(op.body, [index, *params], layouts))
    code.do("}")
    return results


@emits(ir.While)
def _while(em: BlockEmitter, op: ir.While) -> list[Val]:
    code = em.code
    layouts = _layouts(em, op.results)
    inits = _in(em, op.inits, layouts)
    tested, params = [[fresh(em, v) for v in inits] for _ in range(2)]
    carry = ", ".join(f"{p.name} = {v.name}" for p, v in zip(tested, inits, strict=True))
    carry, kinds = f" ({carry})" if inits else "", types_of(inits)
    results = opened(em, f"scf.while{carry} : ({kinds}) -> ({kinds}) {{", inits)
    with code.region():
        (go,) = em.block(op.cond, tested)
        end_of_test(em, go, tested)
    code.do("} do {")
    if inits:
        code.do(f"^bb0({', '.join(f'{p.name}: {p.type}' for p in params)}):")
    with code.region():
        yield_values(em, em.block(op.body, params, layouts), always=True)
    code.do("}")
    return results


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
    """Of the tiles among values that a region carries; None of scalars."""
    assert em.homes is not None
    return [em.homes[v] if v.shape else None for v in values]


def _in(em: BlockEmitter, values: Sequence[ir.Value], layouts: Sequence[Any]) -> list[Val]:
    return [em.env[v] if h is None else em.tile(v, h) for v, h in zip(values, layouts, strict=True)]
