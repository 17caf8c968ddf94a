"""Which kernels only hand an array on, and that their calls are left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_times import programs

import jtile as jt
from jtile.passes.handed_on import handed_on
from jtile.primitive.lowering import pieces_of

X = jax.ShapeDtypeStruct((8, 12), jnp.float32)


def _kernel(body, grid, out=X, inputs=1):
    made = jt.kernel(out_type=lambda *_: out, grid=grid)(body)
    return made.lower(*[X] * inputs).program.kernel


def _tiles(x, o):
    i, j = jt.program_id(0), jt.program_id(1)
    o.tiles(4, 4)[i, j] = x.tiles(4, 4)[i, j]


def _second(x, y, o):
    o[jt.program_id(0), :] = y[jt.program_id(0), :]


def _diagonal(x, o):
    i = jt.program_id(0)
    o.tiles(4, 4)[i, i] = x.tiles(4, 4)[i, i]


def _other_place(x, o):
    i, j = jt.program_id(0), jt.program_id(1)
    o.tiles(4, 4)[i, j] = x.tiles(4, 4)[i, 2 - j]


def _twice(x, o):
    i, j = jt.program_id(0), jt.program_id(1)
    o.tiles(4, 4)[i, j] = x.tiles(4, 4)[i, j] * 2


def _rounded(x, o):
    o[jt.program_id(0), :] = x[jt.program_id(0), :].astype(o.dtype)


@pytest.mark.parametrize(
    ("body", "grid", "out", "inputs", "found"),
    [
        (_tiles, (2, 3), X, 1, 0),
        (_tiles, (3, 4), X, 1, 0),
        (_second, 8, X, 2, 1),
        (_tiles, (2, 2), X, 1, None),  # columns that nobody writes
        (_diagonal, 3, X, 1, None),
        (_other_place, (2, 3), X, 1, None),
        (_twice, (2, 3), X, 1, None),
        (_rounded, 8, jax.ShapeDtypeStruct(X.shape, jnp.float16), 1, None),
    ],
)
def test_kernels(body, grid, out, inputs, found):
    assert handed_on(_kernel(body, grid, out, inputs)) == found


@jt.kernel(out_type=lambda a, b, r: jt.like(r), grid=lambda a, b, r: (2, 2))
def layer(a, b, r, o):
    i, j = jt.program_id(0), jt.program_id(1)
    total = jt.zeros((16, 16), jnp.float32)
    for k in jt.range(a.shape[1] // 16):
        total = jt.dot(a.tiles(16, 16)[i, k], b.tiles(16, 16)[k, j], total)
    o.tiles(16, 16)[i, j] = jnp.tanh(total) + r.tiles(16, 16)[i, j]


def test_the_cotangent_of_a_residual_is_that_of_the_result():
    rng = np.random.default_rng(0)
    a, b, r, ct = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((32, 48), (48, 32), (32, 32), (32, 32)))
    pull = jax.jit(lambda ct, *args: jax.vjp(layer, *args)[1](ct))
    wanted = jax.vjp(lambda a, b, r: jnp.tanh(jnp.dot(a, b, precision="highest")) + r, a, b, r)[1](ct)
    for ours, theirs in zip(pull(ct, a, b, r), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    (program,) = (p for p in programs(jax.make_jaxpr(pull)(ct, a, b, r).jaxpr) if p.name == "layer_vjp")
    names = [k.name for k in pieces_of(program).kernels if handed_on(k) is None]
    assert len(names) == len(pieces_of(program).kernels) - 1
    assert pull.lower(ct, a, b, r).as_text().count("stablehlo.custom_call @jtile") == len(names)
