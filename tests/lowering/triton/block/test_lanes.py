"""`jt.dot_quads`: its meaning, by the interpreter, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError, UnsupportedError

FACTORS = {"int4": (2, np.int8), "uint4": (2, np.int8), "int8": (1, np.int8), "float8_e4m3fn": (2, np.float16)}


def kernel(kind, *, warps=4, rows=8, tiles=None):
    count = FACTORS.get(kind, (1,))[0]

    @jt.kernel(out_type=jax.ShapeDtypeStruct((16, 2, 16), jnp.float32), grid=1)
    def quads(a, b, o):
        with jt.role("one", warps=warps):
            terms = [a.tiles(None, rows, 32, 4)[k, 0, 0, 0] for k in range(2)]
            factors = [b.tiles(None, 2, 32, 4)[k, 0, 0, 0] for k in range(tiles or count)]
            o.tiles(16, 2, 16)[0, 0, 0] = jt.dot_quads(*terms, factors, kind=kind)

    sd = jax.ShapeDtypeStruct
    return quads, (sd((2, rows, 32, 4), jnp.uint32), sd((count, 2, 32, 4), jnp.uint32))


def numbers_of(words: np.ndarray, kind: str) -> np.ndarray:
    """The numbers that words [rows, lanes, 4] stand for, [rows, lanes, part, codes of a part]."""
    bytes_ = np.ascontiguousarray(words)[..., None].view(np.uint8)
    if kind == "int8":
        return bytes_.reshape(*words.shape[:2], 2, 8) - 128.0
    if kind == "float8_e4m3fn":
        parts = bytes_.view(jnp.dtype(kind)).reshape(*words.shape, 2, 2)
    else:
        parts = np.stack([bytes_ & 15, bytes_ >> 4], -2) - (8.0 if kind == "int4" else 0.0)
    return np.moveaxis(parts, -2, 2).reshape(*words.shape[:2], 2, -1).astype(np.float64)


@pytest.mark.parametrize("kind", FACTORS)
def test_meaning(kind):
    f, (a, b) = kernel(kind)
    rng, dtype = np.random.default_rng(0), np.dtype(FACTORS[kind][1])
    words = rng.integers(0, 2**32, a.shape, np.uint32) & np.uint32(0xB7B7B7B7 if "float" in kind else 0xFFFFFFFF)
    shape = (*b.shape, 4 // dtype.itemsize)
    factors = (rng.integers(-128, 128, shape) if dtype.kind == "i" else rng.normal(size=shape)).astype(dtype)
    of_parts = np.moveaxis(factors, 0, 2) if len(factors) == 2 else factors[0].reshape(2, 32, 2, 2, 4)
    of_parts = of_parts.reshape(2, 8, 4, 2, -1).astype(np.float64)
    terms = numbers_of(words.reshape(16, 32, 4), kind).reshape(16, 8, 4, 2, -1)
    want = np.einsum("rqlpn,dqlpn->rdqp", terms, of_parts).reshape(16, 2, 16)
    got = f.interpret(words, factors.view(np.uint32)[..., 0])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    if jax.default_backend() == "gpu":
        np.testing.assert_allclose(f(words, factors.view(np.uint32)[..., 0]), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(warps=8), UnsupportedError, "role of 4 warps, got one of 8"),
        (dict(rows=4), KernelTypeError, "uint32 8x32x4 and 2x32x4, got tile<4x32x4xu32>"),
        (dict(tiles=2), KernelTypeError, "takes 1 tiles of factors for int8"),
        (dict(kind="float4"), KernelValueError, "kind is one of int4, uint4, int8, float8_e4m3fn, got 'float4'"),
    ],
)
def test_what_is_refused(options, error, message):
    f, args = kernel(**({"kind": "int8"} | options))
    with pytest.raises(error, match=message):
        f.lower(*args, target="cuda:sm_90").image
