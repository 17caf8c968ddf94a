"""Types of TTIR values, and the NumPy arrays that stand for them."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import ml_dtypes
import numpy as np

MAX_LANES = 1 << 20  # triton refuses larger tensors


class TtirError(Exception):
    """The text is not TTIR that compiles, or it does what no GPU code may do."""


class Type(NamedTuple):
    """A scalar (shape `()`) or tensor; `elem` as TTIR spells it: `f32`, `!tt.ptr<i8>`, `!tt.tensordesc<64x64xf32>`."""

    shape: tuple[int, ...]
    elem: str

    def __str__(self) -> str:
        return f"tensor<{'x'.join([*map(str, self.shape), self.elem])}>" if self.shape else self.elem

    def of(self, elem: str) -> Type:
        return Type(self.shape, elem)

    def shaped(self, shape) -> Type:
        return Type(tuple(shape), self.elem)

    @property
    def pointee(self) -> str:
        if not self.elem.startswith("!tt.ptr<"):
            raise TtirError(f"{self} is no pointer")
        return self.elem[len("!tt.ptr<") : -1].split(",")[0]

    @property
    def is_float(self) -> bool:
        return self.elem in FLOATS

    @property
    def is_int(self) -> bool:
        return self.elem in INTS

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(np.int64) if self.elem.startswith("!") else numpy_of(self.elem)


FLOATS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn, "f8E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
INTS = {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64}


@functools.cache
def numpy_of(elem: str) -> np.dtype:
    if elem not in FLOATS and elem not in INTS:
        raise TtirError(f"no such element type: {elem}")
    return np.dtype(FLOATS.get(elem) or INTS[elem])


def width(elem: str) -> int:
    """Bits of an element."""
    return 1 if elem == "i1" else 64 if elem.startswith("!") else numpy_of(elem).itemsize * 8


@functools.lru_cache(4096)
def parse_type(text: str) -> Type:
    """The type that a text spells; TtirError where it is none that compiles."""
    text = text.strip()
    if text.startswith("!tt.tensordesc<"):
        inner = text[len("!tt.tensordesc<") : -1]
        return Type((), f"!tt.tensordesc<{inner[7:-1] if inner.startswith('tensor<') else inner}>")
    if text.startswith("!tt.ptr<"):
        numpy_of(Type((), text).pointee)
        return Type((), text)
    if not text.startswith("tensor<"):
        numpy_of(text)
        return Type((), text)
    found = re.fullmatch(r"tensor<((?:\d+x)+)(.+)>", text)
    if not found:
        raise TtirError(f"not a type: {text}")
    shape = tuple(int(n) for n in found[1][:-1].split("x"))
    if any(n < 1 or n & (n - 1) for n in shape) or math.prod(shape) > MAX_LANES:
        raise TtirError(f"{text}: sides must be powers of two, {MAX_LANES} lanes at most")
    return Type(shape, parse_type(found[2]).elem)


def block_of(descriptor: Type) -> Type:
    """The tensor that a descriptor's loads give."""
    return parse_type(f"tensor<{descriptor.elem[len('!tt.tensordesc<') : -1]}>")


def garbage(t: Type, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """What lanes without a defined value hold here: NaN, 0xAA bytes, true."""
    dtype = t.numpy
    shape = t.shape if shape is None else shape
    if t.is_float:
        return np.full(shape, np.nan, np.float32).astype(dtype)
    if t.elem == "i1":
        return np.ones(shape, np.bool_)
    return np.full(shape, int.from_bytes(b"\xaa" * dtype.itemsize, "little", signed=True), dtype)
