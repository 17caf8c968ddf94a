"""Kernels in other tiles compute what they computed before, and what is none the worse for it alone is cut so."""

import jax.numpy as jnp
import numpy as np
import pytest
from products import tiled_matmul

import jtile as jt
from jtile import ir, passes
from jtile.interpret import interpret
from jtile.primitive.lowering import pieces_of
from jtile.transforms.factors import factors
from jtile.transforms.retile import free, retile

matmul = tiled_matmul(8, 16, 4)


def array(*shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def found_of(kernel, *args, **meta):
    return factors(passes.run_pipeline(kernel.lower(*args, **meta).program.kernel, passes.TILE))


def check(found, sizes, *arrays):
    new = retile(found, sizes)
    assert new is not None
    ir.verify(new, "tile")
    for got, want in zip(interpret(new, arrays), interpret(found.kernel, arrays), strict=True):
        np.testing.assert_array_equal(got, want)
    return new


@pytest.mark.parametrize("sizes", [{"a": 16}, {"a": 32, "b": 12, "c": 8}, {"b": 2}, {"c": 64}, {"a": 7, "c": 5}])
def test_a_product_in_other_tiles(sizes):
    a, b = array(20, 24), array(24, 36, seed=1)  # hang over: rows in tiles of 8, columns in those of 16
    found = found_of(matmul, a, b)
    assert [free(f) for f in found.factors] == [8, 4, 16]
    new = check(found, sizes, a, b)
    (dot,) = (op for op in new.body.walk() if isinstance(op, ir.Dot))
    own = {"a": 8, "b": 4, "c": 16} | sizes
    assert dot.sizes()[1:] == (own["a"], own["c"], own["b"])
    assert new.grid == (-(-20 // own["a"]), -(-36 // own["c"]))


def test_loads_that_hang_over_are_checked_again():
    a, b = array(16, 24), array(24, 32, seed=1)
    found = found_of(matmul, a, b)
    loads = lambda k: {op.checked for op in k.body.walk() if isinstance(op, ir.Load | ir.Store)}
    assert loads(found.kernel) == {False}
    assert loads(check(found, {"a": 12, "c": 12}, a, b)) == {True}
    assert loads(check(found, {"a": 4, "c": 8}, a, b)) == {False}


def test_terms_of_a_sum_hang_over_where_they_are_zero_there():
    a, b = array(16, 24), array(24, 32, seed=1)
    check(found_of(matmul, a, b), {"b": 16}, a, b)

    @jt.kernel(out_type=jt.like(a, shape=(16, 32)), grid=(2, 2))
    def powers(a, b, o):  # of lanes behind the end, which read zeros, each would add a one
        i, j = jt.program_id(0), jt.program_id(1)
        acc = jt.zeros((8, 16), jnp.float32)
        for k in jt.range(6):
            acc = jt.dot(jnp.exp2(a.tiles(8, 4)[i, k]), jnp.exp2(b.tiles(4, 16)[k, j]), acc)
        o.tiles(8, 16)[i, j] = acc

    found = found_of(powers, a, b)
    terms = next(f.name for f in found.factors if f.sizes[0] == 24)
    assert retile(found, {terms: 16}) is None
    check(found, {terms: 12}, a, b)
    assert retile(found, {terms: 4}) is found.kernel


def test_arrays_of_whole_tiles_beside_those_that_hang_over():
    """As what is kept of tiles that hang over: it has the elements outside, too."""

    @jt.kernel(out_type=lambda a, b: jt.like(a, shape=(20, 36)), grid=(3, 3))
    def product(a, b, o):
        i, j = jt.program_id(0), jt.program_id(1)
        o.tiles(8, 16)[i, j] = jt.dot(a.tiles(8, 4)[i, 0], b.tiles(4, 16)[0, j])

    a, b = array(24, 4), array(4, 48, seed=1)  # of 20 and 36
    found = found_of(product, a, b)
    rows = next(f.name for f in found.factors if f.sizes == (24, 20))
    check(found, {rows: 12}, a, b)
    check(found, {rows: 24}, a, b)
    assert retile(found, {rows: 4}) is None  # as many tiles of one array as of the other


def test_what_depends_on_its_place_keeps_its_tiles():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: (2, 2))
    def triangle(x, o):
        i, j = jt.program_id(0), jt.program_id(1)
        above = jnp.arange(8)[:, None] + 8 * i >= jnp.arange(8)[None, :] + 8 * j
        o.tiles(8, 8)[i, j] = jnp.where(above, x.tiles(8, 8)[i, j], 0.0)

    found = found_of(triangle, array(16, 16))
    assert all(free(f) is None for f in found.factors)
    assert all(retile(found, {f.name: 4}) is None for f in found.factors)


def test_the_reverse_mode_of_a_batch_with_an_activation():
    @jt.kernel(out_type=lambda a, b: jt.like(a, shape=(*a.shape[:2], b.shape[2])), grid=lambda a, b: (2, 2, 2))
    def product(a, b, o):
        n, i, j = (jt.program_id(k) for k in range(3))
        left = jnp.tanh(a.tiles(None, 8, 24)[n, i, 0])
        o.tiles(None, 8, 16)[n, i, j] = jt.dot(left, b.tiles(None, 24, 16)[n, 0, j])

    a, b, ct = array(2, 16, 24), array(2, 24, 32, seed=1), array(2, 16, 32, seed=2)
    pieces = pieces_of(product.lower(a, b).vjp(1).program)
    (kernel,), ((*inputs,),) = pieces.kernels, pieces.inputs
    found = factors(passes.run_pipeline(kernel, passes.TILE))
    columns = next(f.name for f in found.factors if f.sizes[0] == 32)
    assert free(found.named(columns)) == 16
    check(found, {columns: 8}, *[(a, b, ct)[k] for k in inputs])
