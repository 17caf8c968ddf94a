"""Tiles of derivatives: best for what the derivative multiplies, on each target; and what keeps its own."""

import jax.numpy as jnp
import pytest
from auto_kernels import attention, spec
from products import tiled_matmul

import jtile as jt
from jtile.ir import parse_kernel
from jtile.lowering import targets
from jtile.ops.sparse_attention import block_sparse_tiles
from jtile.primitive.lowering import pieces_of
from jtile.tune import nature, warpgroups
from jtile.tune.derived_tiles import tiled

HOPPER, CPU = targets.resolve("cuda:sm_90"), targets.resolve("cpu")
matmul = tiled_matmul(128, 256, 64)


def dots_of(kernel):
    return [nature.sizes(op) for op in nature.products_of(kernel)]


def test_the_gradient_of_a_product_is_two_products_in_tiles_of_their_own():
    program = matmul.lower(spec(4096, 4096), spec(4096, 4096)).vjp().program
    own, there = pieces_of(program), pieces_of(program, HOPPER)
    assert [dots_of(k) for k in own.kernels] == [[(128, 64, 256)], [(64, 256, 128)]]
    assert [dots_of(k) for k in there.kernels] == [[(128, 256, 64)]] * 2
    assert (own.inputs, own.results) == (there.inputs, there.results)
    assert all("the model of time expects" in why for why in there.why) and own.why == ()
    low = matmul.lower(spec(4096, 4096), spec(4096, 4096), target=HOPPER).vjp()
    assert low.kernel.grid == (32, 16)


def test_what_a_user_wrote_keeps_its_tiles():
    program = matmul.lower(spec(4096, 4096), spec(4096, 4096), bm=64, bn=64).program
    assert pieces_of(program, HOPPER).kernels == pieces_of(program).kernels


@pytest.mark.parametrize("sizes", [(300, 2048, 1024), (8192, 1024, 512)])
def test_tiles_are_those_of_the_shortest_predicted_time(sizes):
    m, n, k = sizes
    for kernel in pieces_of(matmul.lower(spec(m, k), spec(k, n), bm=64, bn=64, bk=64).vjp().program).kernels:
        new = tiled(kernel, HOPPER, {})
        assert new is not None
        whole, on = nature.whole_product(new.kernel), warpgroups.gpu(HOPPER)
        times = {s: warpgroups.predicted_us(whole.product, warpgroups.Form(1, *s), on)
                 for s in warpgroups.candidates(whole.product)}  # fmt: skip
        assert times[whole.tile[:2]] <= 1.05 * min(times.values()), new.why


def test_tiles_that_are_as_good_stay():
    program = matmul.lower(spec(4096, 4096), spec(4096, 4096), bm=128, bn=128, bk=128).vjp(0).program
    (kernel,) = pieces_of(program, HOPPER).kernels  # 194 us in these tiles and in those of 128 x 256, on an H200
    assert dots_of(kernel) == [(128, 128, 128)]
    assert tiled(kernel, HOPPER, {}) is None


@jt.kernel(out_type=lambda x, g, u, **_: jt.like(x, shape=(x.shape[0], g.shape[1])),
           grid=lambda x, g, u, *, bm, bn, **_: (jt.cdiv(x.shape[0], bm), jt.cdiv(g.shape[1], bn)))  # fmt: skip
def gated(x, g, u, o, *, bm=128, bn=128, bk=64):
    i, j = jt.program_id(0), jt.program_id(1)
    gates = ups = jt.zeros((bm, bn), jnp.float32)
    for k in jt.range(jt.cdiv(x.shape[1], bk)):
        part = x.tiles(bm, bk)[i, k]
        gates, ups = jt.dot(part, g.tiles(bk, bn)[k, j], gates), jt.dot(part, u.tiles(bk, bn)[k, j], ups)
    o.tiles(bm, bn)[i, j] = (gates * ups).astype(o.dtype)


def test_products_that_are_added_up_are_one():
    """The gradient of x of a gated layer is a sum over the columns of two matrices; those of the matrices share x."""
    program = gated.lower(spec(4096, 4096), *[spec(4096, 14336)] * 2).vjp().program
    first, of_x, of_matrices = pieces_of(program).kernels
    assert dots_of(first) == [(128, 128, 64)] * 2 and dots_of(of_matrices) == [(64, 128, 128)] * 2
    assert tiled(first, HOPPER, {}) is None
    assert dots_of(tiled(of_x, HOPPER, {}).kernel) == [(128, 256, 64)] * 2
    assert dots_of(tiled(of_matrices, HOPPER, {}).kernel) == [(128, 128, 64)] * 2


def test_additions_are_atomic_where_a_gpu_would_have_few_programs():
    """Lists of blocks say which keys a block of queries reads, so that only the heads tell programs apart."""
    lists = spec(2, 16, 64, 8, dtype="int32")
    low = block_sparse_tiles.lower(*[spec(2, 4096, 16, 128)] * 3, lists, bq=64, bk=64, scale=1.0, causal=False)
    program = low.vjp((0, 1, 2)).program
    assert [k.grid for k in pieces_of(program, CPU).kernels] == [(2, 16)]
    assert [k.grid for k in pieces_of(program, HOPPER).kernels] == [(2, 16, 64)]


def test_a_cpu_has_tiles_of_its_own():
    (kernel,) = pieces_of(matmul.lower(spec(512, 512, dtype="float32"), spec(512, 512, dtype="float32")).vjp(0).program,
                          CPU).kernels  # fmt: skip
    ((_, _, terms),) = dots_of(kernel)
    assert terms == 512


def test_small_ones_and_those_whose_rows_depend_on_their_place_stay():
    @jt.kernel(out_type=lambda a, b: jt.like(a), grid=4)
    def masked(a, b, o):
        i = jt.program_id(0)
        rows = jnp.arange(128)[:, None] + 128 * i
        x = jnp.where(rows >= jnp.arange(512)[None, :], a.tiles(128, 512)[i, 0], 0)
        o.tiles(128, 512)[i, 0] = jt.dot(x, b[...]).astype(o.dtype)

    for kernel, n in ((matmul, 128), (masked, 512)):
        for piece in pieces_of(kernel.lower(spec(n, n), spec(n, n)).vjp(0).program).kernels:
            assert tiled(piece, HOPPER, {}) is None


def test_chains_of_products_take_rounds_that_registers_hold():
    """Of attention's gradient: the half of the forward pass, that of keys and values, and that of queries."""
    low = attention.lower(*[spec(1, 1024, 128)] * 3, bq=128, bk=128, causal=True).vjp()
    there = pieces_of(low.program, HOPPER)
    assert [max(terms for *_, terms in dots_of(k)) for k in pieces_of(low.program).kernels] == [128] * 3
    assert [dots_of(k)[-1] for k in there.kernels] == [(128, 128, 128), (128, 128, 64), (128, 128, 64)]
    assert [dict(o) for o in there.options] == [{}, {}, {}]
    assert ["rounds" in why for why in there.why] == [False, True, True]
    older = pieces_of(low.program, targets.resolve("cuda:sm_80"))
    assert [dots_of(k)[-1][2] for k in older.kernels] == [128, 64, 64]


def test_a_product_of_a_number_of_rounds_on_average_has_whole_terms():
    """Rounds that differ by program, of which there is an average; a side is what powers of two are taken of."""
    kernel = parse_kernel("""
        kernel @k(%a: ref<64x64xf32>, %b: ref<64x64xf32>, %o: ref<64x64xf32, out>) grid(4, 4) {
          %i = program_id 0
          %j = program_id 1
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %z = full 0.0 : tile<16x16xf32>
          %n = add %i, %c1
          %s = for %k in %c0..%n step %c1 carry (%acc = %z) {
            %x = load %a[tile(%i, 16), tile(%k, 16)]
            %y = load %b[tile(%k, 16), tile(%j, 16)]
            %d = dot %x, %y acc=%acc
            yield %d
          }
          store %o[tile(%i, 16), tile(%j, 16)], %s
        }
    """)
    whole = nature.whole_product(kernel)
    assert whole is not None and whole.product.k == 40 and isinstance(whole.product.k, int)
