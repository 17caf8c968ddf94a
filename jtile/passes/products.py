"""Matrix products of Tile IR: what they multiply, without transposes."""

from __future__ import annotations

from jtile.ir import Dot, Transpose, Value

BYTE = ("float8_e4m3fn", "float8_e5m2")  # dtypes whose products sum in short accumulators on tensor cores


def untransposed(v: Value) -> tuple[Value, bool]:
    """What a value is the transpose of (of two axes, any number of times), and whether it is."""
    flipped = False
    while isinstance(v.op, Transpose) and v.op.perm == (1, 0):
        v, flipped = v.op.x, not flipped
    return v, flipped


def operand(dot: Dot, right: bool) -> tuple[Value, bool]:
    """The left or right operand of a product, without transposes, and whether it is transposed."""
    v, flipped = untransposed(dot.b if right else dot.a)
    return v, flipped != (dot.trans_b if right else dot.trans_a)


def promoted(dot: Dot) -> bool:
    """Whether the sums of a product go from the tensor cores' short accumulators to others."""
    return dot.a.dtype in BYTE and dot.precision != "fast"
