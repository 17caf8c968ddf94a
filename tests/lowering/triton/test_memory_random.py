"""Loads and stores with random indices of every kind: the TTIR text against the interpreter, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ttir import run_ttir

from jtile import ir, passes
from jtile.interpret import interpret
from jtile.ir.types import spell

INDEX_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FAR = (0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**32, 2**32 + 1, 2**32 - 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)


class Access:
    """A random access as text: its index, the ops that its numbers come from, and the arrays that hold them."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...]):
        self.rng, self.shape = rng, shape
        self.lines: list[str] = []
        self.inputs: list[np.ndarray] = []
        self.gather = tuple(int(n) for n in rng.integers(1, 5, rng.integers(0, 3)))
        self.tile: list[int] = []
        self.taken = False
        self.index = ", ".join(self.dim(n) for n in shape)
        self.tile_type = lambda dtype: f"tile<{spell(self.tile, dtype)}>" if self.tile else ir.DTYPES[dtype].short

    def number(self, n: int, shape: tuple[int, ...] = ()) -> str:
        """A value of a random integer dtype, mostly near the array of n elements, sometimes far away."""
        rng = self.rng
        dtype = str(rng.choice(INDEX_DTYPES))
        info = np.iinfo(dtype)
        near = rng.integers(-2, n + 2, shape)
        fits = [f for f in FAR if info.min <= f <= info.max]
        far = [fits[k] for k in rng.integers(0, len(fits), math.prod(shape))]
        x = np.where(near < info.min, 0, near).astype(dtype)
        if rng.random() < 0.4:
            x = np.where(rng.random(shape) < 0.3, np.array(far, dtype).reshape(shape), x).astype(dtype)
        k = len(self.inputs)
        self.inputs.append(x)
        kind = f"tile<{spell(shape, dtype)}>" if shape else ir.DTYPES[dtype].short
        self.lines.append(f"%i{k} = load %n{k}[{', '.join(f'%c0:+{s}' for s in shape)}] : {kind}")
        return f"%i{k}"

    def dim(self, n: int) -> str:
        rng = self.rng
        kind = rng.choice(["at", "span", "tile", "take"], p=[0.2, 0.3, 0.3, 0.2])
        if kind == "at":
            return self.number(n)
        if kind == "take":
            self.tile += [] if self.taken else self.gather
            self.taken = True
            return f"take({self.number(n, self.gather)})"
        size = int(rng.integers(1, 7)) * int(rng.random() < 0.97)
        self.tile.append(size)
        start = "%p" if rng.random() < 0.3 else "%c0" if rng.random() < 0.3 else self.number(n)
        if kind == "span":
            return f"{start}:+{size}:{rng.choice([1, 1, 2, 3])}"
        return f"tile({start}, {size}, step={rng.integers(1, 6)})"

    def refs(self) -> str:
        return "".join(f", %n{k}: ref<{spell(x.shape, x.dtype.name)}>" for k, x in enumerate(self.inputs))

    def mask(self) -> str:
        """A mask of the tile, or nothing."""
        if self.rng.random() < 0.6:
            return ""
        k = len(self.inputs)
        self.inputs.append(self.rng.random(self.tile) < 0.6)
        where = ", ".join(f"%c0:+{n}" for n in self.tile)
        self.lines.append(f"%m = load %n{k}[{where}] : {self.tile_type('bool')}")
        return " mask=%m"


def elements(rng: np.random.Generator, shape, dtype: str) -> np.ndarray:
    d = ir.DTYPES[dtype]
    if d.bits == 4:
        return rng.integers(0, 8, shape).astype(np.float32).astype(d.numpy)
    return rng.integers(0, 2 if d.kind == "b" else 100, shape).astype(d.numpy)


def agrees(text: str, inputs, seed: int) -> None:
    kernel = passes.run_pipeline(ir.parse_kernel(text), passes.TILE)
    for got, want in zip(run_ttir(kernel, inputs, seed=seed), interpret(kernel, inputs, check=False), strict=True):
        assert got.tobytes() == want.tobytes(), text


def sides(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(rng.choice([0, 1, 2, 4, 5, 8, 12], p=[0.02, *[0.98 / 6] * 6])) for _ in range(rng.integers(0, 6)))


DTYPES = ("float32", "int4", "uint4", "float4_e2m1fn", "bool", "bfloat16", "int64", "float8_e4m3fn")


@pytest.mark.parametrize("seed", range(60))
def test_loads(seed):
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(DTYPES))
    a = Access(rng, sides(rng))
    mask = a.mask()
    pad = "" if dtype == "bool" else f" pad={rng.integers(0, 4)}"
    out = ", ".join(["%p", *(f"%c0:+{n}" for n in a.tile)])
    ops = "\n  ".join(["%p = program_id 0", "%c0 = full 0 : i32", *a.lines])
    agrees(
        f"""kernel @load(%x: ref<{spell(a.shape, dtype)}>{a.refs()},
    %o: ref<{spell((2, *a.tile), dtype)}, out>) grid(2) {{
  {ops}
  %v = load %x[{a.index}]{mask}{pad} : {a.tile_type(dtype)}
  store %o[{out}], %v
}}""",
        [elements(rng, a.shape, dtype), *a.inputs],
        seed,
    )


@pytest.mark.parametrize("seed", range(60))
def test_stores(seed):
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(DTYPES))
    a = Access(rng, sides(rng))
    mask = a.mask()
    value = elements(rng, tuple(a.tile), dtype)
    ops = "\n  ".join(["%p = program_id 0", "%c0 = full 0 : i32", *a.lines])
    own = ", ".join(f"%c0:+{n}" for n in a.tile)
    agrees(
        f"""kernel @store(%v: ref<{spell(a.tile, dtype)}>{a.refs()},
    %o: ref<{spell(a.shape, dtype)}, out>) grid(1) init(%o=0) {{
  {ops}
  %t = load %v[{own}] : {a.tile_type(dtype)}
  store %o[{a.index}], %t{mask}
}}""",
        [value, *a.inputs],
        seed,
    )
