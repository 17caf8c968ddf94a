"""Casts between every pair of dtypes, exhaustive where the source has 16 bits or fewer."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from draws import thorough

from jtile.lowering.cpu.convert import memory_type, register_type
from jtile.lowering.cpu.isa import ISAS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INTS = [f"{u}int{n}" for n in (2, 4, 8, 16, 32, 64) for u in ("", "u")]
FLOATS = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    *(RARE := ["float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"]),
    "float8_e8m0fnu",
    "float4_e2m1fn",
]
DTYPES = ["bool", *INTS, *FLOATS]


@functools.cache
def values(dtype: str, elementwise) -> np.ndarray:
    numpy_dtype = elementwise.numpy_dtype(dtype)
    if dtype == "bool":
        return np.array([False, True])
    if dtype in INTS[:4]:
        n = 1 << int(dtype.lstrip("uint"))
        return np.arange(n, dtype=np.uint8) if dtype.startswith("u") else np.arange(-n // 2, n // 2, dtype=np.int8)
    if dtype == "float4_e2m1fn":
        return np.arange(16, dtype=np.uint8).view(numpy_dtype)
    width = numpy_dtype.itemsize * 8
    if width <= 16:
        return np.arange(2**width, dtype=f"uint{width}").view(numpy_dtype)
    rng = np.random.default_rng(width)
    patterns = rng.integers(0, 2**width, 20000, dtype=f"uint{width}").view(numpy_dtype)
    return np.concatenate([patterns, (_float_edges if dtype in FLOATS else _int_edges)(numpy_dtype, elementwise)])


def _int_edges(numpy_dtype, _) -> np.ndarray:
    info = np.iinfo(numpy_dtype)
    powers = [2**k + d for k in range(info.bits) for d in (-1, 0, 1)]
    ties = [2**k + 2 ** (k - j) + d for k in range(30, info.bits) for j in (8, 9, 11, 24, 25) for d in (-1, 0, 1)]
    edges = [info.min, info.max, *powers, *ties, *(-p for p in powers)]
    return np.array([e for e in edges if info.min <= e <= info.max], numpy_dtype)


def _float_edges(numpy_dtype, elementwise) -> np.ndarray:
    """The midpoints between neighbours of every narrower format, and both sides of them; limits of the integers."""
    parts = []
    for narrow in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", *RARE, "float4_e2m1fn"):
        v = np.unique(values(narrow, elementwise).astype(np.float64))
        v = v[np.isfinite(v)][:: 7 if narrow in ("float16", "bfloat16") else 1]
        middle = ((v[1:] + v[:-1]) / 2).astype(numpy_dtype)
        parts += [v.astype(numpy_dtype), middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    tiny = np.random.default_rng(1).integers(0, 2**24, 5000, dtype=np.uint32).view(np.float32)
    limits = [2.0**k + d for k in (3, 4, 7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, -0.5, -0.25, 0, 0.5)]
    special = [0.0, np.inf, np.nan, 448, 464, 465, 480, 65504, 65519.9, 65520, 3.3961775e38, *limits]
    return np.concatenate([*parts, tiny.astype(numpy_dtype), np.array(special + [-s for s in special], numpy_dtype)])


@functools.cache
def expected(src: str, dst: str, elementwise) -> np.ndarray:
    """What `values(src)` are as `dst`; every instruction set is compared with it."""
    x, target = values(src, elementwise), elementwise.numpy_dtype(dst)
    if dst == "bool":
        return x.astype(np.float64) != 0
    if dst in FLOATS:
        direct = dst == "float64" or src == dst  # what is below 32 bits goes through float32
        return x.astype(target) if direct else x.astype(np.float32).astype(target)
    bits = int(dst.lstrip("uint"))
    lo, hi = (0, 2**bits - 1) if dst.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if src in FLOATS:
        y = np.trunc(x.astype(np.float64))
        beyond = [np.isnan(y), y <= lo, y >= hi]
        inside = np.where(np.any(beyond, 0), 0, y).astype(np.uint64 if lo == 0 else np.int64)
        limits = [np.full(y.shape, v, inside.dtype) for v in (0, lo, hi)]
        return np.select(beyond, limits, inside).astype(target)
    if bits >= 8:
        return x.astype(target)  # C's conversions of integers wrap
    y = x.astype(np.int64) & (2**bits - 1)
    return np.where(y > hi, y - 2**bits, y).astype(target)


def _same_value(got: np.ndarray, want: np.ndarray, dtype: str) -> np.ndarray:
    if dtype not in FLOATS:
        return got == want
    unsigned = f"uint{got.dtype.itemsize * 8}"
    nan = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    return nan | (got.view(unsigned) == want.view(unsigned))


CORE = {"bool", "int32", "int64", "uint64", "float32", "float64"}  # what lies in memory as it does in registers


def targets(src: str, everything: bool) -> list[str]:
    """The dtypes to which casts of `src` are tested. A cast between two others consists of the steps of casts from and
    to these: everything for this machine's own instruction set, the steps on the rest, but in `make test-all`."""
    return [dst for dst in DTYPES if everything or thorough() or src == dst or {src, dst} & CORE]


@pytest.mark.parametrize("src", DTYPES)
def test_casts(elementwise, native_isa, src):
    x = values(src, elementwise)
    dsts = targets(src, everything=native_isa == "host")
    elementwise.prepare(native_isa, [("cast", (src,), dst) for dst in dsts])
    for dst in dsts:
        got = elementwise.run(native_isa, "cast", (src,), dst, x)
        want = expected(src, dst, elementwise)
        ok = _same_value(got, want, dst)
        assert ok.all(), f"{src} -> {dst}: {(~ok).sum()} wrong, {x[~ok][:3]} gave {got[~ok][:3]}, not {want[~ok][:3]}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_round_trip_keeps_every_value(elementwise, native_isa, dtype):
    x = values(dtype, elementwise)
    got = elementwise.run(native_isa, "cast", (dtype,), dtype, x)
    assert _same_value(got, x, dtype).all()


def test_casts_agree_with_xla(elementwise):
    import jax
    import jax.numpy as jnp

    x = np.array([np.nan, np.inf, -np.inf, 1e20, -1e20, 300.7, -1.5, -0.5, 200.0, 448.0, 464.0, 465.0], np.float32)
    dtypes = ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool", "float16", "bfloat16",
              "float8_e4m3fn", "float8_e5m2", *RARE]  # fmt: skip
    for dst, want in zip(dtypes, jax.jit(lambda v: [v.astype(d) for d in dtypes])(jnp.asarray(x)), strict=True):
        want = np.asarray(want)
        got = elementwise.run("host", "cast", ("float32",), dst, x)
        assert np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True), dst


@pytest.mark.parametrize("any_isa", sorted(ISAS))
def test_objects_have_no_undefined_symbols(elementwise, any_isa, compiled_isas):
    """In scalar code too; vectors of an instruction set that runs here have been looked at by `test_casts`."""
    isa = ISAS[any_isa]
    casts = [(src, dst) for src in DTYPES for dst in targets(src, everything=False)]
    for lanes in (1,) if any_isa in compiled_isas else (1, isa.lanes(32)):
        module = elementwise.module(isa)
        for src, dst in casts:
            elementwise.emit(module, isa, f"k_{src}_{dst}", "cast", (src,), dst, lanes)
        elementwise.compile(module, isa, optimise=False)


def test_types():
    assert register_type("bfloat16", 8) == "<8 x float>"
    assert register_type("bool", 4) == "<4 x i1>"
    assert register_type("uint4", 1) == "i8"
    assert [memory_type(d) for d in ("bool", "float16", "float8_e5m2", "int64", "float32")] == [
        "i8", "i16", "i8", "i64", "float",
    ]  # fmt: skip
