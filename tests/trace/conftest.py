"""Runs small kernels through trace, Tile IR and the interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import ir
from jtile.interpret import interpret
from jtile.ir.verifier import verify
from jtile.trace import rewrite_loops, to_tile_ir, trace


def lower(fn, inputs, outputs, scratch=(), grid=(), aliases=(), inits=(), **meta) -> ir.Kernel:
    """The Tile IR of a kernel function for arrays (or types) `inputs`."""
    types = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in inputs]
    jaxpr = trace(
        rewrite_loops(fn), types, outputs, scratch, meta=meta, name=fn.__name__, grid=grid, aliases=aliases, inits=inits
    )
    kernel = to_tile_ir(
        jaxpr, name=fn.__name__, n_in=len(types), n_out=len(outputs), grid=grid, aliases=aliases, inits=inits
    )
    verify(kernel)
    return kernel


def compare(got, want, tol: float) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if jnp.issubdtype(want.dtype, np.floating):
        rtol = max(tol, {4: 1e-6, 8: 1e-6, 2: 1e-2}.get(want.dtype.itemsize, 0.13))
        np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=rtol, atol=tol)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.fixture(name="lower")
def _lower():
    return lower


@pytest.fixture
def run():
    """`run(fn, inputs, outputs, grid=..., **meta)`: the outputs of a kernel in the interpreter."""

    def go(fn, inputs, outputs, **options):
        inputs = [np.asarray(x) for x in inputs]
        outputs = [jax.ShapeDtypeStruct(*o) if isinstance(o, tuple) else o for o in outputs]
        return interpret(lower(fn, inputs, outputs, **options), inputs)

    return go


@pytest.fixture
def check():
    """`check(fn, *arrays)`: inside a kernel, a function of tiles gives what it gives outside of one."""

    def go(fn, *inputs, tol=2e-5):
        inputs = [np.asarray(x) for x in inputs]
        with jax.default_device(jax.devices("cpu")[0]):  # XLA's int8 products are wrong on some GPUs
            want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*inputs))]

        def kernel(*refs):
            tiles = jax.tree.leaves(fn(*[r[...] for r in refs[: len(inputs)]]))
            for r, v in zip(refs[len(inputs) :], tiles, strict=True):
                r[...] = v

        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in want]
        for got, expected in zip(interpret(lower(kernel, inputs, types), inputs), want, strict=True):
            compare(got, expected, tol)

    return go


@pytest.fixture(autouse=True)
def _eager_calls_by_numpy(by_numpy):
    """What tests call around kernels: see `tests/support/eager_calls.py`."""
