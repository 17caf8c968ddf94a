"""Builds Tile IR: appends ops to the current block, infers result types, keeps the source location."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jtile._errors import VerificationError

from .control import For, If, While
from .core import NOWHERE, Block, Loc, Op, Value
from .elementwise import Cast, Map
from .shapes import Broadcast, Full, Reshape
from .types import INDEX, TileType, Type


def build(op: Op, loc: Loc = NOWHERE, names: tuple[str, ...] = ()) -> Op:
    """Set the op's location and results; a card that does not fit raises `VerificationError` with the place."""
    op.loc = loc
    try:
        types = op.infer()
    except (TypeError, ValueError) as e:
        raise VerificationError(f"{op.mnemonic}: {e}", (loc.file, loc.line) if loc.file else None) from e
    names = names or ("",) * len(types)
    op.results = tuple(Value(t, n, op) for t, n in zip(types, names, strict=True))
    return op


class Builder:
    """Appends to `self.block`; `with b.region(types) as params:` opens a nested block."""

    def __init__(self, block: Block | None = None):
        self.block = block if block is not None else Block()
        self.loc = NOWHERE

    def add(self, op: Op, *names: str) -> Op:
        self.block.ops.append(build(op, self.loc, names))
        return op

    def value(self, op: Op, name: str = "") -> Value:
        """Add an op with one result."""
        return self.add(op, name).result

    @contextlib.contextmanager
    def at(self, loc: Loc) -> Iterator[None]:
        old, self.loc = self.loc, loc
        yield
        self.loc = old

    @contextlib.contextmanager
    def region(self, types: list[Type] = (), names: tuple[str, ...] = ()) -> Iterator[Block]:
        """A new block with parameters of `types`; the caller sets `.yields` and puts it into an op."""
        names = names or ("",) * len(types)
        block = Block(tuple(Value(t, n) for t, n in zip(types, names, strict=True)))
        outer, self.block = self.block, block
        try:
            yield block
        finally:
            self.block = outer

    # -- shorthands ---------------------------------------------------------------------------------------------
    def full(self, value: Any, shape=(), dtype: str = "int32") -> Value:
        return self.value(Full(value, tuple(shape), dtype))

    def index(self, value: int) -> Value:
        return self.full(int(value), (), INDEX.dtype)

    def map(self, fn: str, *args: Value) -> Value:
        return self.value(Map(fn, args))

    def cast(self, x: Value, dtype: str) -> Value:
        return x if x.type.dtype == dtype else self.value(Cast(x, dtype))

    def splat(self, x: Value, shape) -> Value:
        """A scalar repeated to `shape`."""
        return x if tuple(shape) == x.type.shape else self.value(Broadcast(x, tuple(shape), ()))

    def reshape(self, x: Value, shape) -> Value:
        return x if tuple(shape) == x.type.shape else self.value(Reshape(x, tuple(shape)))


__all__ = ["Builder", "For", "If", "TileType", "While", "build"]
