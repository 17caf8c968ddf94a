"""Collectives of the library against those of XLA, on meshes of eight devices; run by test_collectives.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import collectives as ops

DEVICES = np.array(jax.devices())
RNG = np.random.default_rng(0)


def floats(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype))


# name: options, arrays of a device by the number of devices, whether each device gets the same
CASES = {
    "all_reduce": [({}, lambda n: [(3, 5)]), ({"two_shot": True}, lambda n: [(3, 5)])],
    "all_gather": [({"dim": 0}, lambda n: [(3, 5)]), ({"dim": -1}, lambda n: [(2, 3)])],
    "reduce_scatter": [({"dim": 0}, lambda n: [(2 * n, 3)]), ({"dim": 1}, lambda n: [(2, n)])],
    "all_to_all": [({}, lambda n: [(n, 3)]), ({"split": 1, "concat": 0}, lambda n: [(2, 2 * n)])],
    "all_gather_matmul": [({}, lambda n: [(3, 70), (70, 5)])],
    "matmul_reduce_scatter": [({}, lambda n: [(3 * n, 7), (7, 5)])],
    "matmul_all_reduce": [({}, lambda n: [(3, 7), (7, 5)])],
}


def programs(n, dtype="float32"):
    """Ours and XLA's, all collectives in one program each, and their arguments, whose parts are the devices'."""
    calls, args = [], []
    for name, cases in CASES.items():
        for options, shapes in cases:
            arrays = [floats(n * s[0], *s[1:], dtype=dtype) for s in shapes(n)]
            calls.append((name, options, len(args), len(arrays)))
            args += arrays

    def run(suffix, *parts):
        return [
            getattr(ops, name + suffix)(*parts[first : first + count], axis="x", **options)
            for name, options, first, count in calls
        ]

    return functools.partial(run, ""), functools.partial(run, "_reference"), args


def on(n, f, **kw):
    mesh = Mesh(DEVICES[:n], ("x",))
    specs = [P() if kw.pop("same", False) else P("x")]
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=specs[0], **kw))


def agree(got, want, tolerance):
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = (np.asarray(v, np.float32) for v in (g, w))
        error = np.linalg.norm(g - w) / max(np.linalg.norm(w), 1e-30)
        assert error <= tolerance, f"call {k}: relative error {error:.2g}"


def check_values_on_any_number_of_devices():
    for n in (1, 8):
        ours, theirs, args = programs(n)
        agree(on(n, ours)(*args), on(n, theirs)(*args), 1e-6)


def check_values_in_bfloat16():
    ours, theirs, args = programs(3, "bfloat16")
    agree(on(3, ours)(*args), on(3, theirs)(*args), 6e-3)


def check_gradients():
    """Cotangents of every argument, with and without JAX's book of what varies."""
    for n, vma in ((4, True), (2, False)):
        ours, theirs, args = programs(n)
        found = []
        for f in (ours, theirs):
            sharded = jax.shard_map(f, mesh=Mesh(DEVICES[:n], ("x",)), in_specs=P("x"), out_specs=P("x"), check_vma=vma)

            def pulled(*args, sharded=sharded):
                outs, pull = jax.vjp(sharded, *args)
                rng = np.random.default_rng(1)
                return pull([rng.standard_normal(o.shape).astype(o.dtype) for o in outs])

            found.append(jax.jit(pulled)(*args))
        agree(*found, 1e-5)


def check_sums_are_the_same_everywhere():
    """So that they may leave shard_map as replicated, and so are the cotangents that come in."""
    x, w = floats(12, 6), floats(24, 5)

    def loss(sum_of, product_of, x, w):
        def f(x, w):
            return sum_of(x, "x"), product_of(x, w, "x")

        y, z = jax.shard_map(f, mesh=Mesh(DEVICES[:4], ("x",)), in_specs=P("x"), out_specs=P())(x, w)
        return (y * y).sum() + (z * z).sum()

    ours = jax.jit(jax.value_and_grad(functools.partial(loss, ops.all_reduce, ops.matmul_all_reduce), (0, 1)))
    theirs = functools.partial(loss, ops.all_reduce_reference, ops.matmul_all_reduce_reference)
    agree(jax.tree.leaves(ours(x, w)), jax.tree.leaves(jax.jit(jax.value_and_grad(theirs, (0, 1)))(x, w)), 1e-5)


def check_a_sum_and_its_norm():
    """The weight and the residual are replicated; all cotangents, with and without JAX's book of what varies."""
    x, residual, weight = floats(3 * 4, 7), floats(3, 7), floats(7)
    for vma, dtype, tolerance in ((True, "bfloat16", 1e-2), (False, "float32", 1e-5)):
        args = [v.astype(jnp.dtype(dtype)) for v in (x, residual, weight)]
        found = []
        for norm in (ops.all_reduce_rms_norm, ops.all_reduce_rms_norm_reference):

            def both(x, r, w, norm=norm):
                return norm(x, w, "x", residual=r)

            specs = dict(in_specs=(P("x"), P(), P()), out_specs=P(), check_vma=vma)
            sharded = jax.shard_map(both, mesh=Mesh(DEVICES[:4], ("x",)), **specs)

            def pulled(*args, sharded=sharded):
                outs, pull = jax.vjp(sharded, *args)
                return outs, pull(tuple((o * o + o).astype(o.dtype) for o in outs))

            found.append(jax.tree.leaves(jax.jit(pulled)(*args)))
        agree(*found, tolerance)


def pulled(f, n, specs, vma):
    """The results of f on n devices and the cotangents of its arguments."""
    sharded = jax.shard_map(f, mesh=Mesh(DEVICES[:n], ("x",)), **specs, check_vma=vma)

    def run(*args):
        outs, pull = jax.vjp(sharded, *args)
        return outs, [g for g in pull(jax.tree.map(lambda o: (o * o + o).astype(o.dtype), outs)) if g.dtype != float0]

    return lambda *args: jax.tree.leaves(jax.jit(run)(*args))


def check_products_with_a_transposed_matrix():
    x, w = floats(2 * 4, 7), floats(5 * 4, 7)
    specs = dict(in_specs=(P("x"), P("x")), out_specs=P())
    for vma in (True, False):
        found = [
            pulled(lambda x, w, f=f: f(x, w, "x", transpose_b=True), 4, specs, vma)(x, w)
            for f in (ops.matmul_all_reduce, ops.matmul_all_reduce_reference)
        ]
        agree(*found, 1e-5)


def check_rows_of_all_and_sums_of_their_experts():
    """What a mixture does with few rows, with gradients; copies that belong to no expert of a device are NaN."""
    n, rows, k, count = 4, 3, 2, 5
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(n * count)[:k] for _ in range(n * rows)]).astype(np.int32)
    x, residual, weight, weights = floats(n * rows, 6), floats(n * rows, 6), floats(6), floats(n * rows, k)

    def both(suffix, x, residual, weight, weights, chosen):
        normed, total = getattr(ops, "all_gather_rms_norm" + suffix)(x, weight, "x", residual=residual)
        me = jax.lax.axis_index("x")
        own = chosen // count == me
        copies = jnp.where(own.reshape(-1, 1), jnp.repeat(normed, k, 0) * (me + 1).astype(normed.dtype), jnp.nan)
        places = jnp.arange(n * rows * k, dtype=jnp.int32).reshape(n * rows, k)
        y = getattr(ops, "chosen_sums" + suffix)(copies, places, chosen, weights, "x", count=count)
        return y, total

    specs = dict(in_specs=(P("x"), P("x"), P(), P(), P()), out_specs=(P("x"), P("x")))
    for vma in (True, False):
        found = [
            pulled(functools.partial(both, s), n, specs, vma)(x, residual, weight, weights, chosen)
            for s in ("", "_reference")
        ]
        agree(*found, 1e-5)


def check_bits_are_the_same_on_all_devices_and_in_all_runs():
    x = floats(8 * 64, 33)
    f = jax.jit(
        jax.shard_map(
            lambda x: jnp.stack([ops.all_reduce(x, "x"), ops.all_reduce(x, "x", two_shot=True)])[None],
            mesh=Mesh(DEVICES, ("x",)), in_specs=P("x"), out_specs=P("x"), check_vma=False,
        )
    )  # fmt: skip
    first = np.asarray(f(x))
    assert (first == first[:1]).all() and (first[:, 0] == first[:, 1]).all()
    for _ in range(20):
        assert (np.asarray(f(x)) == first).all()


def check_lanes_two_axes_and_loops():
    mesh = Mesh(DEVICES.reshape(4, 2), ("x", "y"))
    x = floats(8, 6, 4)

    def ours(x):
        y = jax.vmap(lambda row: ops.all_reduce(row, "y"))(x)
        return jax.lax.fori_loop(0, 3, lambda _, v: ops.all_to_all(v, "x", split=1, concat=1), y[:, :4])

    def theirs(x):
        y = jax.vmap(lambda row: jax.lax.psum(row, "y"))(x)
        step = lambda _, v: jax.lax.all_to_all(v, "x", 1, 1, tiled=True)
        return jax.lax.fori_loop(0, 3, step, jax.lax.pcast(y[:, :4], "y", to="varying"))

    spec = dict(mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=False)
    got, want = (jax.jit(jax.shard_map(f, **spec))(x) for f in (ours, theirs))
    agree([got], [want], 1e-6)


def check_more_lanes_than_programs_run_at_once():
    """They are called one after the other: a product with a matrix that all lanes share, and its gradients."""
    lanes, n = 40, 4
    x, w, g = floats(n * lanes, 8, 6), floats(6, 4), floats(n * lanes, 2, 4)

    def pulled(product):
        def f(x, w, g):
            y, pull = jax.vjp(lambda x, w: jax.vmap(lambda row: product(row, w, "x"))(x), x, w)
            return y, *pull(g)

        specs = dict(in_specs=(P("x"), P(), P("x")), out_specs=(P("x"), P("x"), P()))
        return jax.jit(jax.shard_map(f, mesh=Mesh(DEVICES[:n], ("x",)), **specs))

    ours, theirs = map(pulled, (ops.matmul_reduce_scatter, ops.matmul_reduce_scatter_reference))
    assert " scan[" in str(jax.make_jaxpr(ours)(x, w, g))
    agree(ours(x, w, g), theirs(x, w, g), 1e-6)


def check_integers():
    x = np.arange(16, dtype=np.int32).reshape(8, 2)
    got = on(4, lambda x: ops.all_reduce(x, "x"), check_vma=False)(x)
    np.testing.assert_array_equal(got, np.tile(x.reshape(4, 2, 2).sum(0), (4, 1)))


def check_what_is_refused():
    x, w = floats(8, 3), floats(12, 5)
    cases = [
        (KernelValueError, "no multiple of that; pad it to 4", lambda x, w: ops.reduce_scatter(x[:, :3], "x", dim=1)),
        (KernelValueError, "there is no dimension 2", lambda x, w: ops.all_gather(x, "x", dim=2)),
        (KernelValueError, "has no axis 'z'", lambda x, w: ops.all_reduce(x, "z")),
        (KernelTypeError, "all_reduce sums real numbers, got bool", lambda x, w: ops.all_reduce(x > 0, "x")),
        (KernelTypeError, "two matrices of one float dtype", lambda x, w: ops.matmul_all_reduce(x, w > 0, "x")),
        (
            KernelValueError,
            r"cannot multiply \(2, 3\) with \(2, 5\)",
            lambda x, w: ops.all_gather_matmul(x, w[:2], "x"),
        ),
        (KernelValueError, "2 rows are shared out to 4 devices", lambda x, w: ops.matmul_reduce_scatter(x, w, "x")),
    ]
    for kind, words, f in cases:
        with pytest.raises(kind, match=words):
            on(4, f)(x, w)
    with pytest.raises(KernelValueError, match=r"outside of jax\.shard_map"):
        ops.all_reduce(x, "x")
