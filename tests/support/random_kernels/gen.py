"""The state of a kernel that grows: its block, the values in scope, Refs, grid."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jtile.ir import (
    At,
    Builder,
    If,
    Iota,
    Kernel,
    Load,
    ProgramId,
    RefType,
    Span,
    Store,
    Take,
    Tile,
    Value,
    print_kernel,
)
from jtile.ir.types import DTYPES

SIDES = (1, 2, 3, 4, 5, 8, 13, 16, 17, 33)
MAX_SIZE = 1500  # elements of a tile
DTYPE_NAMES = (
    "float32", "int32", "bool", "bfloat16", "float16", "int8", "uint8", "uint32", "int16", "float64", "int64", "uint16",
    "uint64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
)  # fmt: skip
LIMIT = {"float8_e4m3fn": 100.0, "float8_e5m2": 1e3, "float16": 1e4}  # keeps clear of overflow
SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
TINY = {"float16": 6e-5, "float8_e4m3fn": 2e-2, "float8_e5m2": 6e-5}  # below: fixed, not relative steps
MAX_ERROR = 0.02  # of the bound


@dataclasses.dataclass(frozen=True)
class Out:
    """An output Ref, how far its elements may be off, and whether several programs add to it."""

    ref: Value
    error: float


@dataclasses.dataclass(frozen=True)
class Case:
    kernel: Kernel
    inputs: list[np.ndarray]
    errors: list[float]  # per output: absolute

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print the fields

    def __repr__(self) -> str:
        arrays = "\n".join(f"  {v.name} = {a.tolist()}" for v, a in zip(self.kernel.inputs, self.inputs))
        arrays = arrays if len(arrays) < 2000 else "  (inputs left out)"
        return f"\n{print_kernel(self.kernel)}{arrays}\n  errors {self.errors}"


@dataclasses.dataclass(frozen=True)
class V:
    """A value: |x| <= bound, off by at most `err`; all elements are multiples of `grain` (0: unknown)."""

    value: Value
    bound: float = 0.0
    err: float = 0.0
    grain: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> str:
        return self.value.dtype

    @property
    def kind(self) -> str:
        return DTYPES[self.dtype].kind

    @property
    def exact(self) -> bool:
        return self.err == 0


@dataclasses.dataclass(frozen=True)
class Scalar:
    """An int32 scalar that lies in [0, hi]: an index."""

    value: Value
    hi: int


def step_of(dtype: str) -> float:
    """Relative distance of neighbouring numbers."""
    return 2.0 ** (1 - SIGNIFICAND[dtype])


def int_bound(dtype: str) -> int:
    """No number of an integer dtype is larger in magnitude."""
    d = DTYPES[dtype]
    return 1 << (d.bits - (d.kind == "i"))


def limit(dtype: str) -> float:
    return LIMIT.get(dtype, 1e5)


class Gen:
    """Grows one kernel; `pool` holds the values in scope."""

    def __init__(self, choices: bytes):
        self.choices = iter(choices)
        self.b = Builder()
        self.pool: list[V] = []
        self.inputs: list[tuple[Value, np.ndarray]] = []
        self.outputs: list[Out] = []
        self.scratch: list[Value] = []
        self.inits: list[Any] = []
        self.aliases: list[tuple[int, int]] = []
        self.rng = np.random.default_rng(self.number(0, 7))
        self.sides = [self.choose(SIDES) for _ in range(self.number(2, 3))]
        self.dtypes = [self.choose(DTYPE_NAMES) for _ in range(self.number(1, 3))]
        self.grid = tuple(self.number(1, 3) for _ in range(self.number(0, 3)))
        self.pids = [Scalar(self.b.value(ProgramId(k)), n - 1) for k, n in enumerate(self.grid)]
        self.scalars = list(self.pids)
        self.depth = 0

    # -- choices ------------------------------------------------------------------------------------------------
    def choose(self, options) -> Any:
        options = list(options)
        return options[self.number(0, len(options) - 1)]

    def number(self, lo: int, hi: int) -> int:
        """The next choice; the smallest where there are no more."""
        return lo + next(self.choices, 0) % (hi - lo + 1)

    def chance(self) -> bool:
        return bool(self.number(0, 1))

    def pick(self, fits: Callable[[V], bool] = lambda v: True) -> V | None:
        """The newest values come first, so that kernels shrink to short chains."""
        options = [v for v in reversed(self.pool) if fits(v)]
        return options[self.number(0, min(len(options) - 1, 6))] if options else None

    def permutation(self, n: int) -> tuple[int, ...]:
        left = list(range(n))
        return tuple(left.pop(self.number(0, len(left) - 1)) for _ in range(n))

    def find(self, fits: Callable[[V], bool], dtypes: Sequence[str], rank: int = 1) -> V:
        """A value in scope, else a new tile from memory: of `dtypes`, at least of this rank."""
        v = self.pick(fits)
        if v is not None:
            return v
        dtype = self.choose([d for d in self.dtypes if d in dtypes] or dtypes)
        shape = (self.choose(self.sides), *self.shape((1, 0, 2) if rank < 2 else (1,)))
        return self.load(shape if math.prod(shape) <= MAX_SIZE else shape[:rank], dtype)

    def load(self, shape: tuple[int, ...], dtype: str) -> V:
        """A tile of a new input."""
        dims, sides = self.access(shape)
        ref, bound, grain = self.new_input(sides, dtype)
        kind = DTYPES[dtype].kind
        pad = self.choose((0, 1, 3) if kind in "ui" else (0.0, 1.0, -2.0) if kind == "f" else (False, True))
        op = Load(ref, tuple(dims), self.mask(shape), pad)
        return self.put(self.b.value(op), max(bound, abs(float(pad))), 0, grain)

    def shape(self, ranks=(1, 2, 0, 3)) -> tuple[int, ...]:
        rank = self.choose(ranks)
        shape = tuple(self.choose(self.sides) for _ in range(rank))
        return shape if math.prod(shape) <= MAX_SIZE else shape[:1]

    def put(self, value: Value, bound: float = 0, err: float = 0, grain: float = 0) -> V:
        v = V(value, bound, err, grain)
        self.pool.append(v)
        return v

    @contextlib.contextmanager
    def region(self, types=()):
        """A nested block; what it defines is out of scope afterwards."""
        kept, scalars = len(self.pool), len(self.scalars)
        self.depth += 1
        with self.b.region(types) as block:
            yield block
        self.depth -= 1
        del self.pool[kept:], self.scalars[scalars:]

    # -- numbers and indices ------------------------------------------------------------------------------------
    def index(self, n: int) -> Value:
        return self.b.full(n, (), "int32")

    def scalar(self) -> Scalar:
        """An index: a program id, a loop index, a constant, or a number from memory."""
        if self.scalars and self.chance():
            return self.choose(self.scalars[::-1])
        hi = self.number(0, 3)
        ints = [v for v in self.pool if v.shape == () and v.dtype == "int32"]
        if not ints or self.chance():
            return Scalar(self.index(hi), hi)
        clamped = self.b.map("clamp", self.index(0), self.choose(ints).value, self.index(hi))
        self.scalars.append(Scalar(clamped, hi))
        return self.scalars[-1]

    def data(self, shape, dtype: str) -> tuple[np.ndarray, float, float]:
        """Random elements, their bound and grain."""
        d = DTYPES[dtype]
        if d.kind == "b":
            return self.rng.random(shape) < 0.5, 0, 0
        if d.kind == "f":
            grain = 0.5 if dtype == "float8_e5m2" else 0.25
            return (self.rng.integers(-4 / grain, 4 / grain + 1, shape) * grain).astype(d.numpy), 4.0, grain
        wide = self.choose((False, True))
        hi = int_bound(dtype) - 1 if wide else min(20, int_bound(dtype) - 1)
        lo = 0 if d.kind == "u" else -hi - wide
        x = self.rng.integers(lo, hi, shape, np.uint64 if d.kind == "u" else np.int64, endpoint=True)
        return x.astype(d.numpy), int_bound(dtype) if wide else hi, 0

    def new_input(self, shape, dtype: str) -> tuple[Value, float, float]:
        x, bound, grain = self.data(shape, dtype)
        ref = Value(RefType(tuple(shape), dtype), f"x{len(self.inputs)}")
        self.inputs.append((ref, x))
        return ref, bound, grain

    def access(self, shape, takes: bool = True) -> tuple[list, list[int]]:
        """An index that names a tile of `shape`, and the sides of a Ref that it fits (parts may hang over)."""
        dims: list = []
        sides: list[int] = []
        take = takes and bool(shape) and self.number(0, 5) == 5
        for axis, n in enumerate(shape):
            kind = "take" if take and axis == 0 else self.choose(("tile", "span", "span"))
            if kind == "take":
                dims.append(Take(self.take_indices(n)))
                sides.append(self.number(1, 2 * n))
                continue
            s = self.scalar()
            if kind == "tile":
                step = self.choose((n, n, n + 1, max(1, n - 1)))
                dims.append(Tile(s.value, n, step))
                sides.append(s.hi * step + self.number(1, n + 1))
                continue
            stride, scale = self.choose((1, 1, 2, 3)), self.choose((1, n))
            start = s.value if scale == 1 else self.b.map("mul", s.value, self.index(scale))
            dims.append(Span(start, n, stride))
            sides.append(max(1, s.hi * scale + self.number(0, n * stride + 1)))
        if self.number(0, 3) == 3:
            s = self.scalar()
            at = self.number(0, len(dims))
            dims.insert(at, At(s.value))
            sides.insert(at, s.hi + self.number(1, 3))
        return dims, sides

    def take_indices(self, n: int) -> Value:
        v = self.pick(lambda v: v.shape == (n,) and v.dtype in ("int32", "int64", "uint8", "int8"))
        if v is not None and self.chance():
            return v.value
        ref, _, _ = self.new_input((n,), "int32")
        return self.b.value(Load(ref, (Span(self.index(0), n),)))

    def mask(self, shape) -> Value | None:
        """A bool tile of this shape, or None."""
        if self.number(0, 2) < 2:
            return None
        v = self.pick(lambda v: v.shape == tuple(shape) and v.dtype == "bool")
        if v is not None:
            return v.value
        if not shape:
            s = self.scalar()
            return self.b.map("lt", s.value, self.index(self.number(0, 2)))
        axis = self.number(0, len(shape) - 1)
        lanes = self.b.value(Iota(tuple(shape), axis, "int32"))
        edge = self.b.full(self.number(0, shape[axis]), tuple(shape), "int32")
        return self.b.map("lt", lanes, edge)

    # -- finishing ----------------------------------------------------------------------------------------------
    def store(self, v: V) -> None:
        """Write a value to an output of its own: every program to elements of its own, the rest of the output stays."""
        free = [k for k, n in enumerate(self.grid) if n > 1]
        dims: list = []
        sides: list[int] = []
        for n in v.shape:
            if free and n and self.chance():
                k = free.pop(self.number(0, len(free) - 1))
                dims.append(Tile(self.pids[k].value, n, n))
                sides.append(self.pids[k].hi * n + self.number(1, n))
            else:
                start, stride = self.number(0, 2), self.choose((1, 1, 2))
                dims.append(Span(self.index(start), n, stride))
                sides.append(start + max(1, (n - 1) * stride + 1 - self.number(0, 2)))
        for k in free:
            at = self.number(0, len(dims))
            dims.insert(at, At(self.pids[k].value))
            sides.insert(at, self.grid[k])
        ref = self.new_output(sides, v.dtype, None, v.err)
        mask = self.mask(v.shape)
        op = Store(ref, tuple(dims), v.value, mask)
        if self.number(0, 5) < 5:
            self.b.add(op)
        else:
            cond = self.b.map("le", self.scalar().value, self.index(1))
            with self.region() as then:
                self.b.add(op)
            self.b.add(If(cond, then, type(then)()))

    def new_output(self, shape, dtype: str, init: Any, err: float) -> Value:
        ref = Value(RefType(tuple(shape), dtype, "out"), f"o{len(self.outputs)}")
        self.outputs.append(Out(ref, err))
        self.inits.append(init)
        return ref

    def case(self) -> Case:
        params = (*(r for r, _ in self.inputs), *(o.ref for o in self.outputs), *self.scratch)
        kernel = Kernel("random", params, self.grid, self.b.block, tuple(self.aliases), tuple(self.inits))
        return Case(kernel, [x for _, x in self.inputs], [o.error for o in self.outputs])
