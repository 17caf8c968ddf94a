"""Cards that combine elements: reductions, scans, sort, dots."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from .core import Block, Op, Value, check_axes, tile
from .elementwise import ELEMENTWISE, compute
from .types import BY_NUMPY, DTYPES, TileType

REDUCERS = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "and": "and", "or": "or", "xor": "xor"}


def identity(fn: str, dtype: str):
    """The number that does not change a reduction by `fn`."""
    d = DTYPES[dtype]
    if fn in ("sum", "or", "xor"):
        return False if d.kind == "b" else 0
    if fn == "prod":
        return 1
    if fn == "and":
        return True if d.kind == "b" else -1 if d.kind == "i" else (1 << d.bits) - 1
    if d.kind == "b":
        return fn == "min"
    if d.kind == "f":
        return -math.inf if fn == "max" else math.inf
    low = -(1 << (d.bits - 1)) if d.kind == "i" else 0
    high = (1 << (d.bits - (d.kind == "i"))) - 1
    return low if fn == "max" else high


def reducible(fn: str, dtype: str) -> bool:
    """Whether a dtype has a reduction: bools have and, or, xor, max, min, and floats no bit operations."""
    kind = DTYPES[dtype].kind
    return fn not in ("sum", "prod", "logsumexp") if kind == "b" else fn not in ("and", "or", "xor") or kind != "f"


def drop(shape, axes) -> tuple[int, ...]:
    return tuple(n for k, n in enumerate(shape) if k not in axes)


@dataclasses.dataclass(eq=False)
class Reduce(Op):
    """`sum prod max min and or xor` over `axes`. Floats below 32 bits accumulate in f32 and are rounded once; the order
    of a float sum is the back end's, fixed per image. The reference sums in f64 (f32 and narrower)."""

    x: Value
    fn: str
    axes: tuple[int, ...]

    mnemonic = "reduce"

    def infer(self):
        t = tile(self.x)
        if self.fn not in REDUCERS or any(not 0 <= a < t.rank for a in self.axes):
            raise ValueError(f"cannot reduce {t} by {self.fn} over {self.axes}")
        if len(set(self.axes)) != len(self.axes) or not reducible(self.fn, t.dtype):
            raise TypeError(f"reduce {self.fn} over {self.axes} is not defined for {t}")
        return (t.with_shape(drop(t.shape, self.axes)),)

    def reference(self, x):
        return reduce_array(x, self.fn, self.axes)


def reduce_array(x: np.ndarray, fn: str, axes) -> np.ndarray:
    """The reference reduction; an empty axis gives the identity."""
    info = BY_NUMPY[x.dtype]
    axes = tuple(axes)
    with np.errstate(all="ignore"):
        if info.kind == "f" and fn in ("sum", "prod"):
            out = (np.sum if fn == "sum" else np.prod)(x.astype(np.float64), axis=axes)
            return np.asarray(out).astype(np.float32 if info.bits < 64 else np.float64).astype(x.dtype)
        ufunc = (
            ELEMENTWISE[REDUCERS[fn]].numpy
            if info.kind != "b"
            else {"and": np.logical_and, "or": np.logical_or}.get(fn)
        )
        if info.kind == "b" and fn in ("max", "min"):
            ufunc = np.logical_or if fn == "max" else np.logical_and
        if fn in ("and", "or", "xor") and info.kind != "b":
            ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[fn]
        if fn == "xor" and info.kind == "b":
            ufunc = np.logical_xor
        wide = (
            x.astype(np.float32) if info.kind == "f" and info.bits < 32 else x.astype(np.int32) if info.bits < 8 else x
        )
        for a in sorted(axes, reverse=True):
            n = wide.shape[a]
            if n == 0:
                wide = np.full(drop(wide.shape, (a,)), identity(fn, x.dtype.name), wide.dtype)
                continue
            acc = np.take(wide, 0, a)
            for k in range(1, n):
                acc = ufunc(acc, np.take(wide, k, a))
            wide = np.asarray(acc)
        return wide.astype(x.dtype)


@dataclasses.dataclass(eq=False)
class ArgReduce(Op):
    """Index of the first maximum (`fn="max"`) or minimum along `axis`, as `dtype`; a NaN wins."""

    x: Value
    fn: str
    axis: int
    dtype: str

    mnemonic = "arg_reduce"

    def infer(self):
        t = tile(self.x)
        if self.fn not in ("max", "min") or not 0 <= self.axis < t.rank or t.shape[self.axis] == 0:
            raise ValueError(f"cannot take arg{self.fn} of {t} over axis {self.axis}")
        return (TileType(drop(t.shape, (self.axis,)), self.dtype),)

    def reference(self, x):
        info = BY_NUMPY[x.dtype]
        wide = (
            x.astype(np.float32) if info.kind == "f" and info.bits < 32 else x.astype(np.int32) if info.bits < 8 else x
        )
        fn = np.argmax if self.fn == "max" else np.argmin
        return np.asarray(fn(wide, axis=self.axis)).astype(DTYPES[self.dtype].numpy)


def _check_combiner(body: Block, types: list[TileType], what: str) -> None:
    want = [TileType((), t.dtype) for t in types]
    got = [p.type for p in body.params], [y.type for y in body.yields]
    if got != (want + want, want):
        raise TypeError(
            f"the combiner of {what} maps {len(want)} + {len(want)} scalars to {len(want)}: wanted {want}, got {got}"
        )


@dataclasses.dataclass(eq=False)
class UserReduce(Op):
    """Reduction of tiles of one shape over `axes` by an associative function of scalars: `body(acc..., x...) ->
    acc...`, starting from the scalars `inits`."""

    xs: tuple[Value, ...]
    inits: tuple[Value, ...]
    axes: tuple[int, ...]
    body: Block

    mnemonic = "user_reduce"

    def infer(self):
        types = [tile(x) for x in self.xs]
        if any(t.shape != types[0].shape for t in types) or len(self.inits) != len(types):
            raise TypeError("reduce takes tiles of one shape and one initial scalar for each")
        if [tile(i) for i in self.inits] != [TileType((), t.dtype) for t in types]:
            got = ", ".join(str(i.type) for i in self.inits)
            raise TypeError(f"reduce starts from scalars of the dtypes of its tiles, got {got}")
        check_axes(self.axes, types[0])
        _check_combiner(self.body, types, "reduce")
        return tuple(t.with_shape(drop(t.shape, self.axes)) for t in types)


@dataclasses.dataclass(eq=False)
class Cumulative(Op):
    """Inclusive `sum prod max min logsumexp` along `axis`, from the end if `reverse`."""

    x: Value
    fn: str
    axis: int
    reverse: bool = False

    mnemonic = "cumulative"

    def infer(self):
        t = tile(self.x)
        if self.fn not in ("sum", "prod", "max", "min", "logsumexp") or not 0 <= self.axis < t.rank:
            raise ValueError(f"cannot scan {t} by {self.fn} along axis {self.axis}")
        if not reducible(self.fn, t.dtype) or (self.fn == "logsumexp" and t.info.kind != "f"):
            raise TypeError(f"cumulative {self.fn} is not defined for {t}")
        return (t,)

    def reference(self, x):
        info = BY_NUMPY[x.dtype]
        wide = x.astype(np.float64) if info.kind == "f" else x.astype(np.int32) if info.bits < 8 else x
        ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "logsumexp": np.logaddexp}[
            self.fn
        ]
        if self.reverse:
            wide = np.flip(wide, self.axis)
        with np.errstate(all="ignore"):
            out = ufunc.accumulate(wide, self.axis, dtype=wide.dtype) if x.size else wide
        out = np.flip(out, self.axis) if self.reverse else out
        return out.astype(np.float32).astype(x.dtype) if info.kind == "f" and info.bits < 64 else out.astype(x.dtype)


@dataclasses.dataclass(eq=False)
class UserScan(Op):
    """Inclusive scan of tiles of one shape along `axis` by an associative function of scalars `body(acc..., x...) ->
    acc...`."""

    xs: tuple[Value, ...]
    axis: int
    reverse: bool
    body: Block

    mnemonic = "user_scan"

    def infer(self):
        types = [tile(x) for x in self.xs]
        if any(t.shape != types[0].shape for t in types):
            raise TypeError("associative_scan takes tiles of one shape")
        check_axes((self.axis,), types[0])
        _check_combiner(self.body, types, "associative_scan")
        return tuple(types)


@dataclasses.dataclass(eq=False)
class Sort(Op):
    """Stable sort of `xs[0]` along `axis`, ties broken by the next of the first `keys` operands; the rest follow.
    NaN counts as largest, -0 equals 0."""

    xs: tuple[Value, ...]
    axis: int
    keys: int = 1
    descending: bool = False

    mnemonic = "sort"

    def infer(self):
        types = [tile(x) for x in self.xs]
        if any(t.shape != types[0].shape for t in types) or not 1 <= self.keys <= len(types):
            raise TypeError("sort takes tiles of one shape, and at least one of them as key")
        check_axes((self.axis,), types[0])
        return tuple(types)

    def reference(self, *xs):
        ranks = [self._ranks(x) for x in xs[: self.keys]]
        order = np.lexsort(list(reversed(ranks)), axis=self.axis) if xs[0].size else np.zeros(xs[0].shape, np.int64)
        return tuple(np.take_along_axis(x, order, self.axis) for x in xs)

    def _ranks(self, x: np.ndarray) -> np.ndarray:
        info = BY_NUMPY[x.dtype]
        wide = x.astype(np.float64) + 0.0 if info.kind == "f" else x.astype(np.int32) if info.bits < 8 else x
        _, inverse = np.unique(wide, return_inverse=True, equal_nan=True)
        inverse = inverse.reshape(x.shape)
        return -inverse if self.descending else inverse


@dataclasses.dataclass(eq=False)
class Dot(Op):
    """Batched matrix product plus accumulator: `acc + a @ b` over equal leading axes; `trans_a`/`trans_b` swap the
    operand's last two axes first. Floats accumulate in f32 (f64 operands: f64), ints in i32; operands may have
    different dtypes of one kind."""

    a: Value
    b: Value
    acc: Value | None
    trans_a: bool = False
    trans_b: bool = False
    precision: str = "default"

    mnemonic = "dot"
    level = "tile"

    def sizes(self) -> tuple[tuple[int, ...], int, int, int]:
        """The sizes of the product: (batch axes, m, n, k)."""
        a, b = tile(self.a).shape, tile(self.b).shape
        m, k = (a[-1], a[-2]) if self.trans_a else a[-2:]
        k2, n = (b[-1], b[-2]) if self.trans_b else b[-2:]
        if len(a) != len(b) or a[:-2] != b[:-2] or k != k2:
            raise TypeError(f"dot cannot contract {tile(self.a)} with {tile(self.b)}")
        return a[:-2], m, n, k

    def infer(self):
        a, b = tile(self.a), tile(self.b)
        if a.rank < 2 or b.rank < 2:
            raise TypeError(f"dot takes tiles of rank 2 or more, got {a} and {b}")
        batch, m, n, _ = self.sizes()
        kinds = {a.info.kind, b.info.kind}
        if "b" in kinds or ("f" in kinds and kinds != {"f"}):
            raise TypeError(f"dot takes two float or two int tiles, got {a} and {b}")
        out = TileType((*batch, m, n), accumulator_dtype(a.dtype, b.dtype))
        if self.acc is not None and tile(self.acc) != out:
            raise TypeError(f"the accumulator of this dot is {out}, got {tile(self.acc)}")
        return (out,)

    def reference(self, a, b, acc=None):
        a = a.swapaxes(-1, -2) if self.trans_a else a
        b = b.swapaxes(-1, -2) if self.trans_b else b
        out = DTYPES[self.infer()[0].dtype].numpy
        wide = np.float64 if out.kind == "f" else np.int64
        with np.errstate(all="ignore"):
            r = np.matmul(a.astype(wide), b.astype(wide))
            r = r if acc is None else r + acc.astype(wide)
            return r.astype(out)


def accumulator_dtype(a: str, b: str) -> str:
    if DTYPES[a].kind == "f":
        return "float64" if "float64" in (a, b) else "float32"
    return "int64" if "int64" in (a, b) or "uint64" in (a, b) else "int32"


@dataclasses.dataclass(eq=False)
class DotScaled(Op):
    """Block-scaled product: `a` [m, k] with scales `sa` [m, k / block_a], `b` [k, n] with scales `sb` [k / block_b, n];
    each element is its value times its block's scale, accumulated in f32. A missing scale counts as one."""

    a: Value
    sa: Value | None
    b: Value
    sb: Value | None
    acc: Value | None

    mnemonic = "dot_scaled"
    level = "tile"

    def infer(self):
        a, b = tile(self.a), tile(self.b)
        if a.rank != 2 or b.rank != 2 or a.shape[1] != b.shape[0]:
            raise TypeError(f"dot_scaled cannot contract {a} with {b}")
        (m, k), n = a.shape, b.shape[1]
        if self.sa is not None:
            s = tile(self.sa).shape
            if s[0] != m or s[1] == 0 or k % s[1]:
                raise TypeError(f"the scales of a {a} are [{m}, {k} / block], got {s}")
        if self.sb is not None:
            s = tile(self.sb).shape
            if s[1] != n or s[0] == 0 or k % s[0]:
                raise TypeError(f"the scales of b {b} are [{k} / block, {n}], got {s}")
        out = TileType((m, n), "float32")
        if self.acc is not None and tile(self.acc) != out:
            raise TypeError(f"the accumulator of this dot_scaled is {out}, got {tile(self.acc)}")
        return (out,)

    def reference(self, *arrays):
        given = iter(arrays)
        a = next(given).astype(np.float64)
        if self.sa is not None:
            s = next(given).astype(np.float64)
            a = a * np.repeat(s, a.shape[1] // s.shape[1], axis=1)
        b = next(given).astype(np.float64)
        if self.sb is not None:
            s = next(given).astype(np.float64)
            b = b * np.repeat(s, b.shape[0] // s.shape[0], axis=0)
        with np.errstate(all="ignore"):
            out = a @ b
            out = out if self.acc is None else out + next(given).astype(np.float64)
            return out.astype(np.float32)


def combine(fn: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One step of a built-in reduction on arrays."""
    return compute(ELEMENTWISE[REDUCERS[fn]], [a, b])
