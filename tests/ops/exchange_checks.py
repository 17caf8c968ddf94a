"""`jt.exchange`, and the collectives that are made of it and of ordinary kernels, forced on host devices, where XLA's
collectives move the parts; run by test_exchanges.py."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import collectives as ops
from jtile.ops import exchanged_parts, exchanged_products, exchanged_ring, gpu_tiles
from jtile.primitive import exchange as primitive

RNG = np.random.default_rng(0)
SIZES = (2, 4, 8)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def on(n, f, *args, vma=True):
    mesh = Mesh(np.array(jax.devices()[:n]), ("x",))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=vma))(*args)


def agree(got, want, tolerance=1e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.abs(w).max())


def exchanges(x):
    """All forms of it, of x [3 n, 5]."""
    n, me = jt.axis_size("x"), jax.lax.axis_index("x").astype(jnp.float32)
    box = jnp.zeros((n, 4, 5)) + me
    travelling = jt.exchange(x[:1], "x", into=box)
    travelling = jt.exchange(2 * x[:2], "x", into=travelling, start=2, own=False)
    mixed, after = jt.exchanged(travelling, after=x + 1)
    return [
        jt.exchanged(jt.exchange(x, "x")),
        jt.exchanged(jt.exchange(x.reshape(n, 3, 5), "x", to="each")),
        jt.exchanged(jt.exchange(x, "x", to="next")),
        jt.exchanged(jt.exchange(None, "x", into=box, start=1, rows=2)),
        mixed,
        after,
    ]


def check_every_form():
    for n in SIZES:
        x = floats(n, 3 * n, 5)
        everyone, each, following, own, mixed, after = (np.asarray(y) for y in on(n, exchanges, x.reshape(-1, 5)))
        np.testing.assert_array_equal(everyone.reshape(n, n, 3 * n, 5), np.broadcast_to(x, (n, *x.shape)))
        np.testing.assert_array_equal(each.reshape(n, n, 3, 5), x.reshape(n, n, 3, 5).swapaxes(0, 1))
        np.testing.assert_array_equal(following.reshape(x.shape), np.roll(x, 1, 0))
        want = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None, None], (n, n, 4, 5)).copy()
        sent = want.copy()
        sent[:, :, 1:3] = np.arange(n)[None, :, None, None]
        np.testing.assert_array_equal(own.reshape(want.shape), sent)
        want[:, :, :1] = x[None, :, :1]
        others = ~np.eye(n, dtype=bool)
        want[:, :, 2:][others] = np.broadcast_to(2 * x[None, :, :2], (n, n, 2, 5))[others]
        np.testing.assert_array_equal(mixed.reshape(want.shape), want)
        np.testing.assert_array_equal(after.reshape(x.shape), x + 1)


def check_lanes():
    x = floats(2, 3, 4 * 12, 5)
    lanes = on(
        4, jax.vmap(jax.vmap(exchanges)), x.reshape(2, 3, 4, 12, 5).transpose(2, 0, 1, 3, 4).reshape(8, 3, 12, 5)
    )
    for a in range(2):
        for b in range(3):
            one = on(4, exchanges, x[a, b])
            for got, want in zip(lanes, one, strict=True):
                got = np.asarray(got).reshape(4, 2, 3, -1)[:, a, b]
                np.testing.assert_array_equal(got.reshape(-1), np.asarray(want).reshape(-1))


def copied(x, into, numbers):
    """What a handler makes of `into` by `pieces`, for arrays with a leading axis of devices."""
    size, count, first, lane, mine, to, target, target_lane, target_mine, receivers, _ = map(int, numbers)
    out, n = into.copy(), len(x)
    for me in range(n):
        for k in range(1, receivers + 1):
            there = (me + k) % n
            for row in range(count):
                a = first + row * lane + me * mine + there * to
                b = target + row * target_lane + me * target_mine
                memory, sent = (y.reshape(-1).view(np.uint8) for y in (out[there], x[me]))
                memory[b : b + size] = sent[a : a + size]
    return out


def check_where_pieces_lie():
    n, rows, size = 3, 2, 4
    parts = {"all": (rows, 5), "each": (n, rows, 5), "own": (n, size, 5), "next": (rows, 5)}
    for mode, part in parts.items():
        for lanes in ((), (2,)):
            x = RNG.integers(0, 99, (n, *lanes, *part)).astype(np.int16)
            into = np.zeros((n, *lanes, *((rows, 5) if mode == "next" else (n, size, 5))), np.int16)
            into = x if mode == "own" else into
            how = dict(n=n, mode=mode, own=False, start=int(mode != "next"), rows=rows, lanes=len(lanes))
            begin = functools.partial(primitive._by_collectives, axis="x", **how)
            operands = (x,) if mode in ("own", "next") else (x, into)
            want = on(n, lambda *v, begin=begin: begin(*(y[0] for y in v))[None], *operands)
            np.testing.assert_array_equal(copied(x, into, primitive.pieces(x[0], into[0], **how)), want)


def check_products_of_shards():
    """In pieces and not, with tiles that hang over and with small ones."""
    gpu_tiles.product, kept = (lambda *_, **__: dict(bm=16, bn=32, bk=16)), gpu_tiles.product
    try:
        for n in SIZES:
            x, w = floats(n * 24, 40), floats(n * 40, 36)
            want = np.concatenate([x @ part for part in w.reshape(n, 40, 36)])
            agree(on(n, lambda x, w: exchanged_products.gathered(x, w, axis="x").reshape(-1, 36), x, w), want)
            x = floats(n * n * 64, 40)
            total = np.einsum("nik,nkj->ij", x.reshape(n, -1, 40), w.reshape(n, 40, 36))
            want = [total, np.tile(total, (n, 1))]
            for pieces in (1, 4):

                def both(x, w, pieces=pieces):
                    shares = x.reshape(jt.axis_size("x"), -1, 40)
                    scattered = exchanged_products.scattered(shares, w, axis="x", pieces=pieces)
                    return scattered, exchanged_products.summed(x, w, axis="x", pieces=pieces)

                agree(on(n, both, x, w, vma=n != 4), want)
    finally:
        gpu_tiles.product = kept


def check_pieces_are_chosen():
    with jt.config(arch="sm_90"):
        for n, m, k, columns in ((2, 4096, 7168, 4096), (8, 1000, 512, 4096), (8, 128, 512, 4096)):
            for everywhere in (False, True):
                found = exchanged_products.pieces_of(n, m, k, columns, 2, everywhere)
                assert found == 1 or m % (128 * found) == 0
        assert exchanged_products.pieces_of(2, 4096, 7168, 4096, 2, False) > 1


def check_attention_in_steps():
    few, more = SIZES[:2]
    for n, cases in ((few, [(False, False), (True, True)]), (more, [(True, False), (True, True)])):
        q, k, v, g = (floats(n, 128, h, 16) for h in (4, 2, 2, 4))
        for causal, zigzag in cases:
            options = dict(axis="x", scale=0.25, softcap=None, window=(None, 0 if causal else None), zigzag=zigzag)

            def ours(q, k, v, g, options=options):
                o, lse = exchanged_ring.forward(q, k, v, **options)
                return o, *exchanged_ring.backward(q, k, v, o, lse, g, **options)

            def theirs(q, k, v, g, causal=causal, zigzag=zigzag):
                run = functools.partial(
                    ops.ring_attention_reference, axis="x", causal=causal, zigzag=zigzag, scale=0.25
                )
                o, pull = jax.vjp(run, q, k, v)
                return o, *pull(g)

            agree(on(n, ours, q, k, v, g), on(n, theirs, q, k, v, g), 1e-4)


def check_large_parts():
    x = floats(4 * 8, 3)
    got = on(4, lambda x: exchanged_parts._added_everywhere(x.reshape(4, -1), axis="x"), x)
    agree(np.asarray(got).reshape(4, -1), np.broadcast_to(x.reshape(4, -1).sum(0), (4, 24)).copy())


def check_what_is_chosen():
    """Large calls on a GPU with warpgroup products, not small ones, nor those of other dtypes."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def chosen(f, *shapes, dtype="bfloat16"):
        run = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        args = [jax.ShapeDtypeStruct((2 * s[0], *s[1:]), jnp.dtype(dtype)) for s in shapes]
        with jt.config(arch="sm_90"):
            return jt.ops.choices(run, *args)[0].implementation

    product = lambda x, w: ops.matmul_reduce_scatter(x, w, "x")
    assert chosen(product, (8192, 7168), (7168, 4096)) == "products of shards beside copies"
    assert chosen(product, (2048, 3584), (3584, 4096)) == "tiles that travel while others are made"
    assert chosen(product, (2048, 3584), (3584, 4160)) == "a product and a collective"
    assert chosen(product, (64, 3584), (3584, 4096)) == "a product and a collective"
    assert chosen(product, (4096, 3584), (3584, 4096), dtype="float32") == "a product and a collective"
    assert chosen(lambda x: ops.all_reduce(x, "x"), (4096, 4096)) == "tiles that are posted in turn"
    assert chosen(lambda x: ops.all_reduce(x, "x"), (8192, 8192)) == "kernels in steps"
    assert chosen(lambda x: ops.all_reduce(x, "x"), (64, 4096)) == "tiles that are posted"
    assert chosen(lambda x: ops.all_gather(x, "x"), (4096, 4096)) == "engines for copies"
    assert chosen(lambda x: ops.all_gather(x, "x"), (64, 4096)) == "tiles that are posted"
    ring = lambda q, k, v: ops.ring_attention(q, k, v, "x", causal=True, zigzag=True)
    assert chosen(ring, (1, 4096, 8, 128), *[(1, 4096, 2, 128)] * 2) == "attention beside copies"
    near = lambda q, k, v: ops.ring_attention(q, k, v, "x", causal=True, window=512)
    assert chosen(near, (1, 4096, 8, 128), *[(1, 4096, 2, 128)] * 2) == "one kernel"


def check_calls_of_engines():
    """What the lowering for CUDA makes of it: both calls, the array that is received in one place."""
    text = lowered(lambda x: jt.exchanged(jt.exchange(x, "x")))
    assert text.count("@jtile_cuda_exchange(") == text.count("@jtile_cuda_exchanged(") == 1
    assert "groups = dense<[0, 1, 2, 3]>" in text and "devices = 2 : i64" in text


def lowered(run):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("y", "x"))
    f = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(("y", "x")), out_specs=P(("y", "x")), check_vma=False))
    return f.trace(jax.ShapeDtypeStruct((8, 4), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()


def check_no_wait_is_left_out():
    """Where only a part of what a wait gives is used, in loops, too: JAX leaves out calls that nobody uses."""

    def run(x, use):
        coming = [jt.exchange(x, "x", to="next"), jt.exchange(2 * x, "x", to="next")]
        (a, b), after = jt.exchanged(coming, after=x + 1)
        last = jt.exchange(after, "x")
        after, into = jax.lax.optimization_barrier((after, last.into))
        gathered, more = jt.exchanged(jt.Travelling(into, last.sent, "x"), after=(after + 1,))
        return (a, b, gathered.sum(0), more[0])[use]

    for use, count in enumerate((2, 2, 3, 3)):
        loop = lambda x, use=use: jax.lax.fori_loop(0, 3, lambda _, y: run(y, use), x)
        for f in (functools.partial(run, use=use), loop, jax.checkpoint(loop)):
            text = lowered(f)
            assert text.count("@jtile_cuda_exchange(") == text.count("@jtile_cuda_exchanged(") == count


def check_where_xla_moves_the_parts():
    """Both calls, or neither: an export has no devices, arrays without elements have no addresses of their own, and
    `gpu_peers` may forbid GPUs to reach each other."""
    run = lambda x: jt.exchanged(jt.exchange(x, "x"))
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    f = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    exported = jax.export.export(f, platforms=["cuda"])(jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert "all_gather" in exported.mlir_module()
    assert "jtile_cuda" not in exported.mlir_module() and "jtile_cuda" not in lowered(lambda x: run(x[:0]))
    with jt.config(gpu_peers=False):
        assert "jtile_cuda" not in lowered(run)


def check_one_device():
    x = floats(4, 3)
    for to in primitive.MODES:
        give = lambda x, to=to: jt.exchanged(jt.exchange(x[None] if to == "each" else x, "x", to=to))
        np.testing.assert_array_equal(np.asarray(on(1, give, x)).reshape(x.shape), x)
    how = dict(n=1, mode="next", own=True, start=0, rows=4, lanes=0)
    *_, receivers, own = primitive.pieces(x, x, **how)
    assert (receivers, own) == (0, 1)


def check_without_jit():
    """Each operation is a program of its own there: nothing may travel from one to the next."""

    def run(x):
        travelling = jt.exchange(x, "x", to="next")
        lanes = jax.vmap(lambda y: jt.exchanged(jt.exchange(y, "x", to="next")))(x)
        return jt.exchanged(travelling) + lanes

    x = floats(8, 3)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    with pytest.MonkeyPatch.context() as patch:
        for one in (primitive.exchange_p, primitive.exchanged_p):
            patch.setattr(one, "bind", lambda *_, **__: pytest.fail("an exchange was bound"))
        got = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
    np.testing.assert_array_equal(got, 2 * np.roll(x, 2, 0))


def check_gradients_of_gradients():
    """The transposes of collectives have derivatives, too, whoever computes them."""
    small, large = (4 * 8, 3), (4 * 4096, 1024)
    for f in (lambda x: ops.all_gather(x, "x"), lambda x: ops.reduce_scatter(x, "x"), lambda x: ops.all_to_all(x, "x")):
        mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
        run = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        loss = lambda x, run=run: (run(x) ** 3).sum()
        twice = jax.grad(lambda x, loss=loss: (jax.grad(loss)(x) ** 2).sum())
        for shape in (small, large):
            with jt.config(arch="sm_90"):
                assert jax.eval_shape(twice, jax.ShapeDtypeStruct(shape, jnp.float32)).shape == shape


def check_what_is_refused():
    x = floats(8, 3)
    cases = [
        (KernelValueError, "to is one of 'all', 'each', 'next', got 'some'", lambda x: jt.exchange(x, "x", to="some")),
        (KernelValueError, "a part for each of 4 devices", lambda x: jt.exchange(x, "x", to="each")),
        (KernelValueError, "has no axis 'z'", lambda x: jt.exchange(x, "z")),
        (KernelValueError, "leave `into` out", lambda x: jt.exchange(x, "x", to="next", into=x)),
        (KernelValueError, "do not fit into", lambda x: jt.exchange(x, "x", into=jnp.zeros((4, 1, 3)))),
        (KernelValueError, "from row -1 on", lambda x: jt.exchange(x, "x", into=jnp.zeros((4, 2, 3)), start=-1)),
        (KernelValueError, "no rows in front", lambda x: jt.exchange(x, "x", start=1)),
        (KernelValueError, "rows 1 to 3", lambda x: jt.exchange(None, "x", into=jnp.zeros((4, 2, 3)), start=1, rows=2)),
        (KernelValueError, "needs `into` and `rows`", lambda x: jt.exchange(None, "x")),
        (KernelValueError, "jt.exchanged: a step", lambda x: jt.exchanged(jt.exchange(x, "x"), step=4)),
        (KernelTypeError, "waits for what jt.exchange gave", lambda x: jt.exchanged([x])),
        (KernelTypeError, "a dimension is a whole number", lambda x: ops.all_gather(x, "x", dim=1.5)),
        (KernelTypeError, "have one dtype", lambda x: jt.exchange(x, "x", into=jnp.zeros((4, 2, 3), jnp.int32))),
        (KernelTypeError, "elements of whole bytes", lambda x: jt.exchange(x.astype(jnp.int4), "x")),
    ]
    for kind, words, f in cases:
        with pytest.raises(kind, match=words):
            on(4, lambda x, f=f: f(x).into, x)
