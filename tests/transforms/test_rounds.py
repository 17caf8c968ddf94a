"""A loop in shorter rounds does what it did, whatever its bounds are computed from, and wherever its elements stand."""

import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile import ir, passes
from jtile.interpret import interpret
from jtile.primitive.lowering import pieces_of
from jtile.transforms.rounds import round_size, shorter_rounds

T, D, B = 14, 4, 8  # the last tile hangs over
f32 = jnp.float32


@jt.kernel(out_type=lambda q, k, v: jt.like(q), grid=jt.cdiv(T, B))
def causal(q, k, v, o):
    i = jt.program_id(0)
    Q, K, V, O = (x.tiles(B, D) for x in (q, k, v, o))
    rows, acc = i * B + jt.arange(B)[:, None], jt.zeros((B, D), f32)
    for j in jt.range(i + 1):
        s = jnp.where(rows >= j * B + jt.arange(B)[None, :], jnp.tanh(jt.dot(Q[i, 0], K[j, 0].T)), 0.0)
        acc = jt.dot(s, V[j, 0], acc)
    O[i, 0] = acc


def arrays(n):
    return [np.random.default_rng(k).standard_normal((T, D), np.float32) for k in range(n)]


def kernels():
    low = causal.lower(*arrays(3))
    given = arrays(4)
    yield low.program.kernel, given[:3]
    pieces = pieces_of(low.vjp().program)
    for kernel, inputs in zip(pieces.kernels, pieces.inputs, strict=True):
        yield kernel, [given[k] for k in inputs]


def test_rounds_of_a_causal_loop_and_of_its_gradients():
    """Ends that depend on the program, and beginnings, of the cotangents of keys and values."""
    size = 4
    for kernel, inputs in kernels():
        kernel = passes.run_pipeline(kernel, passes.TILE)
        assert round_size(kernel) == B
        new = shorter_rounds(kernel, size)
        assert new is not None and round_size(new) == size
        ir.verify(new, "tile")
        assert [p.name for p in new.params] == [p.name for p in kernel.params]
        for got, want in zip(interpret(new, inputs), interpret(kernel, inputs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_loop_that_is_no_sum_keeps_its_rounds():
    @jt.kernel(out_type=lambda q, k: jt.like(q), grid=jt.cdiv(T, B))
    def largest(q, k, o):
        i = jt.program_id(0)
        m = jnp.zeros((B, 1), f32)
        for j in jt.range(jt.cdiv(T, B)):
            s = jt.dot(q.tiles(B, D)[i, 0], k.tiles(B, D)[j, 0].T)
            m = jnp.maximum(m, s.max(1, keepdims=True))
        o.tiles(B, D)[i, 0] = jnp.broadcast_to(m, (B, D))

    kernel = passes.run_pipeline(largest.lower(*arrays(2)).program.kernel, passes.TILE)
    assert shorter_rounds(kernel, 4) is None
    kernel = passes.run_pipeline(causal.lower(*arrays(3)).program.kernel, passes.TILE)
    assert shorter_rounds(kernel, 3) is None and shorter_rounds(kernel, B) is None
    assert shorter_rounds(kernel, 2) is None  # of 14 keys, the last of 8 such rounds would start outside
