"""Types of Tile IR: dtypes, tiles and Refs."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np

from .extents import Extent, Size


@dataclasses.dataclass(frozen=True)
class DType:
    """One element type: its NumPy name, its short spelling in IR text, its width and kind (`f i u b`)."""

    name: str
    short: str
    bits: int
    kind: str
    numpy: np.dtype


def _dtype(short: str, kind: str, bits: int, np_type) -> DType:
    d = np.dtype(np_type)
    return DType(d.name, short, bits, kind, d)


_ALL = [
    _dtype("bool", "b", 8, np.bool_),
    *[_dtype(f"i{n}", "i", n, f"int{n}") for n in (8, 16, 32, 64)],
    *[_dtype(f"u{n}", "u", n, f"uint{n}") for n in (8, 16, 32, 64)],
    _dtype("i2", "i", 2, ml_dtypes.int2),
    _dtype("u2", "u", 2, ml_dtypes.uint2),
    _dtype("i4", "i", 4, ml_dtypes.int4),
    _dtype("u4", "u", 4, ml_dtypes.uint4),
    _dtype("f16", "f", 16, np.float16),
    _dtype("bf16", "f", 16, ml_dtypes.bfloat16),
    _dtype("f32", "f", 32, np.float32),
    _dtype("f64", "f", 64, np.float64),
    _dtype("f8e4m3fn", "f", 8, ml_dtypes.float8_e4m3fn),
    _dtype("f8e5m2", "f", 8, ml_dtypes.float8_e5m2),
    _dtype("f8e4m3", "f", 8, ml_dtypes.float8_e4m3),
    _dtype("f8e3m4", "f", 8, ml_dtypes.float8_e3m4),
    _dtype("f8e4m3fnuz", "f", 8, ml_dtypes.float8_e4m3fnuz),
    _dtype("f8e5m2fnuz", "f", 8, ml_dtypes.float8_e5m2fnuz),
    _dtype("f8e4m3b11fnuz", "f", 8, ml_dtypes.float8_e4m3b11fnuz),
    _dtype("f8e8m0fnu", "f", 8, ml_dtypes.float8_e8m0fnu),
    _dtype("f4e2m1fn", "f", 4, ml_dtypes.float4_e2m1fn),
]
DTYPES: dict[str, DType] = {d.name: d for d in _ALL}
BY_SHORT: dict[str, DType] = {d.short: d for d in _ALL}
BY_NUMPY: dict[np.dtype, DType] = {d.numpy: d for d in _ALL}  # NumPy makes the text of a dtype's name anew each time

# Floats of 8 bits with one zero, whose sign with nothing behind it is NaN, and without infinities.
FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")


def dtype_info(name) -> DType:
    """The `DType` of a NumPy/JAX dtype or of its name; KeyError for one the language has not."""
    if isinstance(name, str):
        return DTYPES[name]
    dtype = np.dtype(name)
    return BY_NUMPY.get(dtype) or DTYPES[dtype.name]


@dataclasses.dataclass(frozen=True)
class TileType:
    """A tile: a static shape and a dtype name (`"float32"`). Rank 0 is a scalar."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def info(self) -> DType:
        return DTYPES[self.dtype]

    def with_shape(self, shape) -> TileType:
        return TileType(tuple(shape), self.dtype)

    def with_dtype(self, dtype: str) -> TileType:
        return TileType(self.shape, dtype)

    def __str__(self) -> str:
        return self.info.short if not self.shape else f"tile<{spell(self.shape, self.dtype)}>"


ROLES = ("in", "out", "scratch", "symmetric", "signal")


@dataclasses.dataclass(frozen=True)
class RefType:
    """Memory of an array: `role` is `in` (read only unless aliased), `out`, `scratch` (private to one program), or
    `symmetric` or `signal` (of the call, on each of its devices).

    A dimension is an int, or an `Extent` where its size is known when the kernel runs.
    """

    shape: tuple[Size, ...]
    dtype: str
    role: str = "in"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def info(self) -> DType:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"ref<{spell(self.shape, self.dtype)}{'' if self.role == 'in' else ', ' + self.role}>"


@dataclasses.dataclass(frozen=True)
class SharedType:
    """Memory shared by the threads of a block: one buffer, or a ring of `slots` of them."""

    shape: tuple[int, ...]
    dtype: str
    slots: int | None = None

    @property
    def info(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def size(self) -> int:
        """Elements of one buffer."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        ring = "" if self.slots is None else f", slots {self.slots}"
        return f"shared<{spell(self.shape, self.dtype)}{ring}>"


@dataclasses.dataclass(frozen=True)
class BarrierType:
    """`count` barriers, each of which ends a phase after `arrivals` arrivals."""

    count: int
    arrivals: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,)

    @property
    def dtype(self) -> str:
        return "uint64"

    @property
    def info(self) -> DType:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"barrier<{self.count}, arrivals {self.arrivals}>"


Type = TileType | RefType | SharedType | BarrierType
INDEX = TileType((), "int32")
BOOL = TileType((), "bool")


def spell(shape, dtype: str) -> str:
    return "x".join([*map(spell_size, shape), DTYPES[dtype].short])


def spell_size(n: Size) -> str:
    """The text of a size: `128`, or `{cdiv(n, 128)}`."""
    return f"{{{n}}}" if isinstance(n, Extent) else str(n)
