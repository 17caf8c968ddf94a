"""All lanes of a tensor folded into one number, inside emitters."""

from __future__ import annotations

from .ttir import Code, Val


def fold(code: Code, x: Val, op: str, axis: int | None = None) -> Val:
    """`x` reduced over one axis, or over all lanes, by a commutative op: `arith.andi`; bools as i32."""
    if x.elem == "i1":
        return code.to_int(fold(code, code.to_int(x, "i32", signed=False), op, axis), "i1")
    if not x.shape:
        return x
    x, axis = (code.reshape(x, (x.size,)), 0) if axis is None else (x, axis)
    x = code.isolated(x)
    out = code.new((*x.shape[:axis], *x.shape[axis + 1 :]), x.elem)
    a, b, c = (code.name() for _ in range(3))
    code.do(f'{out.name} = "tt.reduce"({x.name}) <{{axis = {axis} : i32}}> ({{')
    code.do(f"^bb0({a}: {x.elem}, {b}: {x.elem}):")
    with code.region():
        code.do(f"{c} = {op} {a}, {b} : {x.elem}")
        code.do(f"tt.reduce.return {c} : {x.elem}")
    code.do(f"}}) : ({x.type}) -> {out.type}")
    return out
