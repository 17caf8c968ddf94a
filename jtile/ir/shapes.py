"""Cards that make constants and move elements without computing on them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from .core import Op, Value, check_axes, tile
from .types import DTYPES, INDEX, TileType


@dataclasses.dataclass(eq=False)
class Full(Op):
    """A tile (or scalar) of one number. Printed as `full 0.0 : tile<8xf32>`."""

    value: float | int | bool
    shape: tuple[int, ...]
    dtype: str

    mnemonic = "full"

    def infer(self):
        return (TileType(self.shape, self.dtype),)

    def reference(self):
        return full_array(self.value, self.shape, self.dtype)


def full_array(value, shape, dtype: str) -> np.ndarray:
    """An array of one number; an int too large for the dtype is an error, a float is rounded once."""
    d = DTYPES[dtype]
    if d.kind == "f" and d.bits < 32:
        return np.full(shape, np.float32(value)).astype(d.numpy)
    if d.bits < 8:
        return np.full(shape, value, np.int32).astype(d.numpy)
    return np.full(shape, value, d.numpy)


@dataclasses.dataclass(eq=False)
class Dense(Op):
    """A literal tile: `data` holds the elements row-major as Python numbers."""

    data: tuple
    shape: tuple[int, ...]
    dtype: str

    mnemonic = "dense"

    def infer(self):
        if len(self.data) != math.prod(self.shape):
            raise ValueError(f"dense {self.shape} takes {math.prod(self.shape)} numbers, got {len(self.data)}")
        return (TileType(self.shape, self.dtype),)

    def reference(self):
        d = DTYPES[self.dtype]
        wide = (
            np.float64
            if d.kind == "f"
            else np.uint64
            if d.name == "uint64"
            else np.int64
            if d.kind != "b"
            else np.bool_
        )
        return np.array(self.data, wide).astype(d.numpy).reshape(self.shape)


@dataclasses.dataclass(eq=False)
class Iota(Op):
    """0, 1, 2, ... along `axis`."""

    shape: tuple[int, ...]
    axis: int
    dtype: str

    mnemonic = "iota"

    def infer(self):
        if not 0 <= self.axis < len(self.shape):
            raise ValueError(f"iota axis {self.axis} is not an axis of {self.shape}")
        return (TileType(self.shape, self.dtype),)

    def reference(self):
        n = np.arange(self.shape[self.axis]).astype(DTYPES[self.dtype].numpy)
        ones = [1] * len(self.shape)
        ones[self.axis] = -1
        return np.broadcast_to(n.reshape(ones), self.shape)


@dataclasses.dataclass(eq=False)
class ProgramId(Op):
    """The index of this program along a grid axis."""

    axis: int

    mnemonic = "program_id"

    def infer(self):
        return (INDEX,)


@dataclasses.dataclass(eq=False)
class NumPrograms(Op):
    """The number of programs along a grid axis."""

    axis: int

    mnemonic = "num_programs"

    def infer(self):
        return (INDEX,)


@dataclasses.dataclass(eq=False)
class Broadcast(Op):
    """Operand axis k becomes result axis `dims[k]`; axes of length 1 are repeated, the other result axes are new."""

    x: Value
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    mnemonic = "broadcast"

    def infer(self):
        t = tile(self.x)
        if len(self.dims) != t.rank or list(self.dims) != sorted(set(self.dims)):
            raise ValueError(f"broadcast dims {self.dims} do not name the {t.rank} axes of {t} in order")
        for n, d in zip(t.shape, self.dims, strict=True):
            if n not in (1, self.shape[d]):
                raise ValueError(f"cannot broadcast {t} to {self.shape} along {self.dims}")
        return (t.with_shape(self.shape),)

    def reference(self, x):
        shape = [1] * len(self.shape)
        for n, d in zip(x.shape, self.dims, strict=True):
            shape[d] = n
        return np.broadcast_to(x.reshape(shape), self.shape)


@dataclasses.dataclass(eq=False)
class Reshape(Op):
    """The same elements in row-major order, another shape."""

    x: Value
    shape: tuple[int, ...]

    mnemonic = "reshape"

    def infer(self):
        t = tile(self.x)
        if t.size != math.prod(self.shape):
            raise ValueError(f"cannot reshape {t} to {self.shape}")
        return (t.with_shape(self.shape),)

    def reference(self, x):
        return x.reshape(self.shape)


@dataclasses.dataclass(eq=False)
class Transpose(Op):
    """Result axis k is operand axis `perm[k]`."""

    x: Value
    perm: tuple[int, ...]

    mnemonic = "transpose"

    def infer(self):
        t = tile(self.x)
        if sorted(self.perm) != list(range(t.rank)):
            raise ValueError(f"{self.perm} is not a permutation of the axes of {t}")
        return (t.with_shape(t.shape[p] for p in self.perm),)

    def reference(self, x):
        return x.transpose(self.perm)


@dataclasses.dataclass(eq=False)
class Concat(Op):
    """Tiles one after the other along `axis`."""

    xs: tuple[Value, ...]
    axis: int

    mnemonic = "concat"

    def infer(self):
        types = [tile(x) for x in self.xs]
        first = types[0]
        check_axes((self.axis,), first)
        for t in types:
            rest = [(n, m) for k, (n, m) in enumerate(zip(t.shape, first.shape, strict=True)) if k != self.axis]
            if t.dtype != first.dtype or any(n != m for n, m in rest):
                raise TypeError(
                    f"concat takes tiles that differ along axis {self.axis} only, got {', '.join(map(str, types))}"
                )
        shape = list(first.shape)
        shape[self.axis] = sum(t.shape[self.axis] for t in types)
        return (first.with_shape(shape),)

    def reference(self, *xs):
        return np.concatenate(xs, self.axis)


@dataclasses.dataclass(eq=False)
class Slice(Op):
    """A static slice: `start : stop : stride` per axis, strides positive."""

    x: Value
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    strides: tuple[int, ...]

    mnemonic = "slice"

    def infer(self):
        t = tile(self.x)
        for n, a, b, s in zip(t.shape, self.starts, self.stops, self.strides, strict=True):
            if not (0 <= a <= b <= n and s >= 1):
                raise ValueError(f"slice {a}:{b}:{s} leaves an axis of {n}")
        return (
            t.with_shape(len(range(a, b, s)) for a, b, s in zip(self.starts, self.stops, self.strides, strict=True)),
        )

    def reference(self, x):
        return x[tuple(slice(a, b, s) for a, b, s in zip(self.starts, self.stops, self.strides, strict=True))]


@dataclasses.dataclass(eq=False)
class Pad(Op):
    """Padding with the scalar `value`: `low` before, `high` after (both >= 0), `interior` between elements."""

    x: Value
    value: Value
    low: tuple[int, ...]
    high: tuple[int, ...]
    interior: tuple[int, ...]

    mnemonic = "pad"

    def infer(self):
        t = tile(self.x)
        if min((*self.low, *self.high, *self.interior, 0)) < 0:
            raise ValueError("negative padding is a slice: the tracer splits it off")
        dims = zip(t.shape, self.low, self.high, self.interior, strict=True)
        return (t.with_shape(lo + n + max(n - 1, 0) * i + hi for n, lo, hi, i in dims),)

    def reference(self, x, value):
        out = np.full(self.infer()[0].shape, value, x.dtype)
        dims = zip(x.shape, self.low, self.interior, strict=True)
        out[tuple(slice(lo, lo + max(n + (n - 1) * i, 0), i + 1) if n else slice(0, 0) for n, lo, i in dims)] = x
        return out


@dataclasses.dataclass(eq=False)
class Reverse(Op):
    """Elements in the opposite order along `axes`."""

    x: Value
    axes: tuple[int, ...]

    mnemonic = "reverse"

    def infer(self):
        check_axes(self.axes, tile(self.x))
        return (tile(self.x),)

    def reference(self, x):
        return np.flip(x, self.axes)


@dataclasses.dataclass(eq=False)
class DynamicSlice(Op):
    """`sizes` elements from traced `starts`, which are clamped so that the slice fits (as `lax.dynamic_slice`)."""

    x: Value
    starts: tuple[Value, ...]
    sizes: tuple[int, ...]

    mnemonic = "dynamic_slice"

    def infer(self):
        t = tile(self.x)
        if len(self.starts) != t.rank or any(s > n for s, n in zip(self.sizes, t.shape, strict=True)):
            raise ValueError(f"dynamic_slice of sizes {self.sizes} does not fit {t}")
        return (t.with_shape(self.sizes),)

    def reference(self, x, *starts):
        return x[clamped(starts, self.sizes, x.shape)]


@dataclasses.dataclass(eq=False)
class DynamicUpdate(Op):
    """`x` with `update` written at traced `starts`, clamped so that it fits."""

    x: Value
    update: Value
    starts: tuple[Value, ...]

    mnemonic = "dynamic_update"

    def infer(self):
        t, u = tile(self.x), tile(self.update)
        if (
            u.dtype != t.dtype
            or len(self.starts) != t.rank
            or any(a > b for a, b in zip(u.shape, t.shape, strict=True))
        ):
            raise TypeError(f"dynamic_update of {u} does not fit {t}")
        return (t,)

    def reference(self, x, update, *starts):
        out = x.copy()
        out[clamped(starts, update.shape, x.shape)] = update
        return out


def clamped(starts, sizes, shape) -> tuple[slice, ...]:
    lows = [min(max(int(s), 0), n - k) for s, k, n in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(lo, lo + k) for lo, k in zip(lows, sizes, strict=True))


@dataclasses.dataclass(eq=False)
class Gather(Op):
    """`take_along_axis`: result[.., i, ..] = x[.., indices[.., i, ..], ..] along `axis`. An index outside is an error
    of the program that made it; the tracer clamps or masks as JAX's mode says."""

    x: Value
    indices: Value
    axis: int

    mnemonic = "gather"

    def infer(self):
        t, i = tile(self.x), tile(self.indices)
        check_axes((self.axis,), t)
        same = all(a == b for k, (a, b) in enumerate(zip(t.shape, i.shape, strict=True)) if k != self.axis)
        if i.info.kind not in "iu" or not same:
            raise TypeError(f"gather along axis {self.axis} takes indices that match {t} elsewhere, got {i}")
        return (t.with_shape(i.shape),)

    def reference(self, x, indices):
        return np.take_along_axis(x, indices.astype(np.int64), self.axis)


SCATTER = {"set": None, "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclasses.dataclass(eq=False)
class Scatter(Op):
    """1-D scatter: `x[indices[i]] fn= updates[i]` in order of i; an index outside is dropped. `fn`: set add mul min
    max."""

    x: Value
    indices: Value
    updates: Value
    fn: str

    mnemonic = "scatter"

    def infer(self):
        t, i, u = tile(self.x), tile(self.indices), tile(self.updates)
        if t.rank != 1 or i.rank != 1 or u.shape != i.shape or u.dtype != t.dtype or self.fn not in SCATTER:
            raise TypeError(f"scatter takes 1-D x, indices and updates of one dtype, got {t}, {i}, {u}, {self.fn}")
        return (t,)

    def reference(self, x, indices, updates):
        out = x.copy()
        for i, u in zip(indices.astype(np.int64), updates, strict=True):
            if 0 <= i < len(out):
                out[i] = u if self.fn == "set" else SCATTER[self.fn](out[i], u)
        return out
