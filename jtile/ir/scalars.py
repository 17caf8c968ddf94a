"""Scalars along one path through a kernel: numbers where they are known, terms over what is not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .core import Kernel, Op, Value, dim_value
from .dynamic import SizeOf
from .elementwise import Cast, Map, Select
from .extents import Extent, UndecidedError, evaluate
from .memory import Load
from .shapes import Full, NumPrograms, ProgramId
from .types import DTYPES, TileType


def _div(a: int, b: int) -> int | None:
    """Division as in C, which truncates; None for a division by zero."""
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _rem(a: int, b: int) -> int | None:
    return None if b == 0 else a - b * (_div(a, b) or 0)


def _shift(a: int, n: int) -> int | None:
    return a << n if 0 <= n < 64 else None


_INTS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _div,
    "rem": _rem,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": _shift,
    "shr": lambda a, n: a >> n if 0 <= n < 64 else None,
    "shr_logical": lambda a, n: a >> n if a >= 0 and 0 <= n < 64 else None,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "neg": lambda a: -a,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "clamp": lambda lo, x, hi: min(max(x, lo), hi),
}


class Scalars:
    """What integer scalars are on the way of one program: an int or bool, or a term over unknowns. Equal terms are
    equal numbers; different ones may be equal too.

    `pid`: the program's id; `sizes`: values of the kernel's symbols, where they are assumed; `loaded`: numbers that the
    kernel loads are assumed to be smaller than this, each element of an array always the same.
    """

    def __init__(
        self,
        kernel: Kernel,
        pid: tuple[Hashable, ...],
        sizes: Mapping[str, int] | None = None,
        loaded: int | None = None,
    ):
        self.kernel, self.pid, self.sizes, self.loaded = kernel, pid, sizes, loaded
        self.env: dict[Value, Hashable] = {}
        self.terms: dict[Hashable, Hashable] = {}
        self.unknowns = 0

    @classmethod
    def in_roles(cls, kernel: Kernel, pid: tuple[int, ...] | None = None) -> Scalars:
        """What program `pid` (None: any) of a block-level kernel knows when its roles begin."""
        out = cls(kernel, pid or ())
        if pid is None:
            out.pid = tuple(out.fresh() for _ in kernel.grid)
        for op in kernel.body.ops:
            out.run(op)
        return out

    def of(self, v: Value) -> Hashable:
        """The number or term of a scalar; whatever has none becomes an unknown of its own."""
        return self.env[v] if v in self.env else self.env.setdefault(v, self.fresh())

    def known(self, v: Value | None, default: bool = True) -> int | bool | None:
        """The number of a scalar, None where it is not known; `default` stands for no value at all."""
        if v is None:
            return default
        x = self.of(v)
        return x if isinstance(x, int) else None

    def fresh(self) -> Hashable:
        self.unknowns += 1
        return ("?", self.unknowns)

    def bind(self, values, to) -> None:
        self.env.update(zip(values, to, strict=True))

    def forget(self, values) -> None:
        """Make values unknown: each becomes a new unknown."""
        for v in values:
            self.env[v] = self.fresh()

    def run(self, op: Op) -> None:
        """Note the results of an op without regions."""
        rule = _RULES.get(type(op))
        for v in op.results:
            t = v.type
            scalar = rule is not None and isinstance(t, TileType) and not t.shape and DTYPES[t.dtype].kind in "iub"
            self.env[v] = rule(self, op) if rule is not None and scalar else self.fresh()

    def _full(self, op: Full) -> Hashable:
        return bool(op.value) if op.dtype == "bool" else int(op.value)

    def _program_id(self, op: ProgramId) -> Hashable:
        return self.pid[op.axis] if op.axis < len(self.pid) else 0

    def _num_programs(self, op: NumPrograms) -> Hashable:
        return self._size(self.kernel.grid[op.axis] if op.axis < len(self.kernel.grid) else 1)

    def _size_of(self, op: SizeOf) -> Hashable:
        return self._size(op.size)

    def _select(self, op: Select) -> Hashable:
        cond = self.of(op.cond)
        if isinstance(cond, int):
            return self.of(op.a if cond else op.b)
        return self._term("select", op.result.dtype, cond, self.of(op.a), self.of(op.b))

    def _load(self, op: Load) -> Hashable:
        if self.loaded is None:
            return self.fresh()
        where = [self.known(dim_value(d)) for d in op.index]
        if None in where or op.mask is not None or op.ref not in self.kernel.params:
            return self.fresh()
        text = f"{self.kernel.params.index(op.ref)} {[int(n) for n in where if n is not None]}"
        n = zlib.crc32(text.encode()) % self.loaded
        return bool(n & 1) if op.result.dtype == "bool" else n

    def _size(self, n: int | Extent) -> Hashable:
        if not isinstance(n, Extent):
            return n
        try:
            return self._term("size", n) if self.sizes is None else evaluate(n, self.sizes)
        except (KeyError, UndecidedError):
            return self._term("size", n)

    def _term(self, *key: Hashable) -> Hashable:
        """The term of an expression, a number for each: so terms have no depth, however long the path."""
        return self.terms.setdefault(key, ("term", len(self.terms)))

    def _cast(self, op: Cast) -> Hashable:
        x = self.of(op.x)
        if DTYPES[op.x.dtype].kind == "f":
            return self.fresh()
        if not isinstance(x, int):
            return self._term("cast", op.dtype, x)
        return bool(x) if op.dtype == "bool" else self._fits(int(x), op.dtype)

    def _map(self, op: Map) -> Hashable:
        args = [self.of(a) for a in op.args]
        fn = _INTS.get(op.fn)
        if fn is None or not all(isinstance(a, int) for a in args):
            if any(DTYPES[a.dtype].kind == "f" for a in op.args):
                return self.fresh()
            return self._term(op.fn, op.args[0].dtype, *args)
        out = fn(*args)
        if out is None or op.result.dtype == "bool":
            return self.fresh() if out is None else bool(out)
        return self._fits(int(out), op.result.dtype)

    def _fits(self, x: int, dtype: str) -> Hashable:
        """A number that its dtype holds; what would wrap is an unknown."""
        d = DTYPES[dtype]
        low = -(1 << (d.bits - 1)) if d.kind == "i" else 0
        return x if low <= x < low + (1 << d.bits) else self.fresh()


# Rules for ops with one scalar result: each gives the number or the term.
_RULES: dict[type[Op], Callable[[Scalars, Any], Hashable]] = {
    Full: Scalars._full,
    ProgramId: Scalars._program_id,
    NumPrograms: Scalars._num_programs,
    SizeOf: Scalars._size_of,
    Select: Scalars._select,
    Cast: Scalars._cast,
    Map: Scalars._map,
    Load: Scalars._load,
}
