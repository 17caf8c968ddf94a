"""`jt.dot_lanes`: its meaning, by the interpreter, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError, UnsupportedError

DTYPES = {"integers": ("uint8", "int8"), "bfloat16": ("bfloat16",) * 2, "float8_e4m3fn": ("float8_e4m3fn", "float16")}


def kernel(kind, *, warps=4, rows=8, words=4, tiles=None):
    count = {"float8_e4m3fn": 2}.get(kind, 1)
    out = jnp.int32 if kind == "integers" else jnp.float32

    @jt.kernel(out_type=jax.ShapeDtypeStruct((rows, 2, 32), out), grid=1)
    def lanes(a, b, acc, o):
        with jt.role("one", warps=warps):
            terms = a.tiles(rows, 32, words)[0, 0, 0]
            factors = [b.tiles(None, 2, 32, words)[k, 0, 0, 0] for k in range(tiles or count)]
            o.tiles(rows, 2, 32)[0, 0, 0] = jt.dot_lanes([terms], factors, acc.tiles(rows, 2, 32)[0, 0, 0], kind=kind)

    sd = jax.ShapeDtypeStruct
    return lanes, (sd((rows, 32, words), jnp.uint32), sd((count, 2, 32, words), jnp.uint32), sd((rows, 2, 32), out))


@pytest.mark.parametrize("kind", DTYPES)
def test_meaning(kind):
    f, (a, b, acc) = kernel(kind)
    rng, (of_terms, of_factors) = np.random.default_rng(0), map(np.dtype, map(jnp.dtype, DTYPES[kind]))
    draw = lambda dtype, shape: (rng.integers(0, 100, shape) if dtype.kind in "iu" else rng.normal(size=shape)).astype(
        dtype
    )
    numbers = draw(of_terms, (*a.shape, 4 // of_terms.itemsize))
    factors = draw(of_factors, (*b.shape, 4 // of_factors.itemsize))
    start = draw(np.dtype(acc.dtype), acc.shape)
    got = f.interpret(numbers.view(np.uint32)[..., 0], factors.view(np.uint32)[..., 0], start)
    # The halves of a word of 8-bit floats have tiles of factors of their own.
    factors = np.moveaxis(factors, 0, -2).reshape(2, 32, 4, -1)
    want = start + np.einsum("rlwk,plwk->rpl", numbers.astype(np.float64), factors.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(warps=8), UnsupportedError, "four|role of 4 warps, got .* in a role of 8"),
        (dict(rows=4), UnsupportedError, "multiples of eight rows"),
        (dict(words=8), UnsupportedError, "32 lanes of 4 words"),
        (dict(tiles=2), KernelTypeError, "1 of b for each of a"),
        (dict(kind="float4"), KernelValueError, "kind is one of integers, bfloat16, float8_e4m3fn, got 'float4'"),
    ],
)
def test_what_is_refused(options, error, message):
    f, args = kernel(**({"kind": "integers"} | options))
    with pytest.raises(error, match=message):
        f.lower(*args, target="cuda:sm_90").image
