"""Automatic partitioning on eight devices; run by test_partition.py."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    MESH,
    array,
    check,
    collectives,
    equal,
    grad,
    matmul,
    mesh_of,
    normal,
    put,
    rms_norm,
    scale,
)

import jtile as jt
from jtile import ops
from jtile.errors import KernelValueError
from jtile.primitive.program import Program

SUM, GATHER = {"all-reduce"}, {"all-gather"}
A, B = array(32, 16), array(16, 24, seed=1)
X, W = normal(32, 24), normal(24, seed=1)


# First, since it clears what JAX keeps, and looks through all objects of the process.
def check_what_was_compiled_is_forgotten():
    """A lowering context in what JAX keeps as a key of that context kept both, and the kernel, for ever."""

    def alive() -> int:
        jax.clear_caches()
        for _ in range(3):  # a compiled program goes first, then what its callbacks held
            gc.collect()
        return sum(type(o) is Program for o in gc.get_objects())

    before = alive()
    jax.jit(lambda a, b: grad(matmul, 0, 1)(a, b)).lower(put(A, P("x")), put(B, P())).compile()
    jax.jit(lambda x, w: ROWS(x, w)).lower(put(A, P("x")), put(A, P("x"))).compile()
    assert alive() <= before


def check_data_parallel_product():
    check(matmul, (A, P("x")), (B, P()), out=P("x"))
    check(matmul, (A, P(("x", "y"))), (B, P()), out=P(("x", "y")))
    check(grad(matmul, 0, 1), (A, P("x")), (B, P()), out=(P("x"), P()), allowed=SUM)


def check_model_parallel_product():
    check(matmul, (A, P()), (B, P(None, "x")), out=P(None, "x"))
    check(matmul, (A, P("x")), (B, P(None, "y")), out=P("x", "y"))
    check(grad(matmul, 0, 1), (A, P("x")), (B, P(None, "y")), out=(P("x"), P(None, "y")), allowed=SUM)


def check_contracted_axis():
    check(matmul, (A, P(None, "x")), (B, P("x")), out=P(), allowed=SUM)
    check(matmul, (A, P("x", "y")), (B, P("y")), out=P("x"), allowed=SUM)
    check(grad(matmul, 0, 1), (A, P("x", "y")), (B, P("y")), out=(P("x", "y"), P("y")), allowed=SUM)


def check_two_factors_that_want_one_axis():
    check(matmul, (A, P("x")), (B, P("x")), allowed=GATHER)


def check_library_product():
    a, b = array(32, 16), array(16, 24, seed=1)
    check(ops.matmul, (a, P("x")), (b, P(None, "y")), out=P("x", "y"))
    check(ops.matmul, (a, P(None, "x")), (b, P("x")), allowed=SUM)
    check(
        lambda a, b: ops.matmul(a, b, activation="silu"),
        (a, P("x")),
        (b, P(None, "y")),
        out=P("x", "y"),
        tolerance=1e-5,
    )
    check(grad(ops.matmul, 0, 1), (a, P("x")), (b, P(None, "y")), out=(P("x"), P(None, "y")), allowed=SUM)


def check_product_in_parts_as_on_a_gpu():
    """Split over k by the kernel, and cut over devices along every side."""
    a, b = array(72, 8192, dtype="bfloat16"), array(8192, 80, seed=1, dtype="bfloat16")
    product = lambda a, b: ops.matmul(a, b, out_dtype=jnp.float32)
    with jt.config(arch="sm_90"):
        assert "matmul_parts" in str(jax.make_jaxpr(product)(a, b))
        check(product, (a, P("x")), (b, P(None, "y")), out=P("x", "y"))
        check(product, (a, P(None, "x")), (b, P("x")), allowed=SUM)


def check_quantised_rows_as_on_a_gpu():
    """Cut along the rows of W, whose groups are counted in the grid; one row of x takes several rows of W a program."""
    x = normal(1, 64)
    for kind in ("q4_0", "q4_1", "int8"):
        w = ops.QuantizedTensor.quantize(normal(64, 64, seed=1), kind)
        cut = jax.tree.map(lambda a: put(a, P("x", *[None] * (a.ndim - 1))), w)
        with jt.config(arch="sm_90"):
            f = jax.jit(lambda x, w: ops.quantized_matmul(x, w, activation="silu"))
            compiled = f.lower(put(x, P()), cut).compile()
            got = compiled(put(x, P()), cut)
            equal(got, f(x, w), 1e-6)
        assert not collectives(compiled), (kind, collectives(compiled))
        assert got.sharding.is_equivalent_to(NamedSharding(MESH, P(None, "x")), 2), got.sharding


def check_bfloat16_sums_are_rounded_once():
    a, b = normal(16, 64).astype(jnp.bfloat16), normal(64, 8, seed=1).astype(jnp.bfloat16)
    exact = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    got = jax.jit(matmul)(put(a, P(None, "x")), put(b, P("x")))
    equal(got, jnp.asarray(exact).astype(jnp.bfloat16), 1e-2)
    assert (np.abs(np.asarray(got, np.float32) - exact) <= np.abs(exact) * 2**-8 + 1e-5).all()


def check_gradients_in_bfloat16():
    a, b = (x.astype(jnp.bfloat16) for x in (array(32, 16), array(16, 8, seed=1)))
    f = lambda a, b: matmul(a, b, bk=4)
    check(grad(f, 0, 1), (a, P("x")), (b, P(None, "y")), out=(P("x"), P(None, "y")), allowed=SUM, tolerance=1e-2)


def check_aliased_outputs():
    @jt.kernel(out_type=lambda x, y: jt.like(x), grid=lambda x, y: x.shape[0], alias={"x": "o"})
    def add_to(x, y, o):
        i = jt.program_id(0)
        o[i, :] = o[i, :] + y[i, :]

    check(add_to, (A, P("x")), (A, P("x")), out=P("x"))
    check(lambda x, y: (add_to(x, y), x), (A, P("x", "y")), (A, P("x")), out=(P("x", "y"),) * 2)
    check(grad(add_to, 0, 1), (A, P("x")), (A, P("x")), out=(P("x"),) * 2)


def check_dynamic_sizes_are_gathered():
    rows = matmul.with_options(dynamic={"a": 0})
    check(rows, (A, P("x")), (B, P()), allowed=GATHER)
    check(grad(rows, 0, 1), (A, P("x")), (B, P()), allowed=GATHER | SUM)


def check_rows_of_a_norm():
    check(rms_norm, (X, P("x")), (W, P()), out=P("x"), tolerance=1e-6)
    check(grad(rms_norm, 0, 1), (X, P("x")), (W, P()), out=(P("x"), P()), allowed=SUM, tolerance=1e-4)
    check(ops.rms_norm, (X, P(("x", "y"))), (W, P()), out=P(("x", "y")), tolerance=1e-6)
    check(grad(ops.rms_norm, 0, 1), (X, P("x")), (W, P()), out=(P("x"), P()), allowed=SUM, tolerance=1e-4)


def check_what_cannot_be_cut_is_gathered():
    check(rms_norm, (X, P("x", "y")), (W, P("y")), allowed=GATHER, tolerance=1e-6)
    check(grad(rms_norm, 0, 1), (X, P(None, "y")), (W, P("y")), allowed=GATHER | SUM, tolerance=1e-4)
    check(ops.softmax, (X, P("x", "y")), allowed=GATHER, tolerance=1e-6)


def check_softmax():
    check(ops.softmax, (X, P(("x", "y"))), out=P(("x", "y")), tolerance=1e-6)
    check(grad(ops.softmax, 0), (X, P("x")), out=P("x"), tolerance=1e-5)


def check_attention_over_batch_and_heads():
    q, spec = normal(4, 16, 4, 8), P("x", None, "y")
    for heads, causal in ((4, False), (2, True)):
        k, v = normal(4, 16, heads, 8, seed=1), normal(4, 16, heads, 8, seed=2)
        f = lambda q, k, v, causal=causal: ops.attention(q, k, v, causal=causal)
        check(f, (q, spec), (k, spec), (v, spec), out=spec, tolerance=1e-5)
    check(grad(f, 0, 1, 2), (q, spec), (k, spec), (v, spec), out=(spec,) * 3, tolerance=1e-4)


def check_multi_query_attention():
    q, k, v = normal(4, 16, 4, 8), normal(4, 16, 1, 8, seed=1), normal(4, 16, 1, 8, seed=2)
    check(ops.attention, (q, P("y", None, "x")), (k, P("y")), (v, P("y")), out=P("y", None, "x"), tolerance=1e-5)


def check_vmapped_axes():
    f, a = jax.vmap(matmul, in_axes=(0, None)), array(8, 16, 16)
    check(f, (a, P(("x", "y"))), (B, P()), out=P(("x", "y")))
    check(f, (a, P("x", "y")), (B, P()), out=P("x", "y"))
    check(grad(f, 0, 1), (a, P("x")), (B, P()), out=(P("x"), P()), allowed=SUM)
    both = jax.vmap(matmul)
    check(both, (a, P("x")), (array(8, 16, 8, seed=2), P("x", None, "y")), out=P("x", None, "y"))


def check_forward_mode_and_second_order():
    jvp = lambda a, b: jax.jvp(matmul, (a, b), (a, b))
    check(jvp, (A, P("x")), (B, P(None, "y")), out=(P("x", "y"),) * 2)
    hvp = lambda a, b: jax.jvp(grad(matmul, 0, 1), (a, b), (a, b))[1]
    check(hvp, (A, P("x")), (B, P(None, "y")), out=(P("x"), P(None, "y")), allowed=SUM)


def check_a_network_of_kernels():
    """Megatron's layout: columns of the first weight, rows of the second; one sum per pass."""
    v = array(24, 16, seed=2)

    def mlp(a, b, v):
        return matmul(jnp.maximum(matmul(a, b), 0.0), v)

    check(mlp, (A, P("x")), (B, P(None, "y")), (v, P("y")), out=P("x"), allowed=SUM)
    check(
        grad(mlp, 0, 1, 2), (A, P("x")), (B, P(None, "y")), (v, P("y")),
        out=(P("x"), P(None, "y"), P("y")), allowed=SUM, tolerance=1e-6,
    )  # fmt: skip


def check_inside_scan_cond_and_remat():
    w = array(16, 16, seed=3, dtype="float32") / 4

    def f(a, w):
        step = jax.checkpoint(lambda c, _: (jnp.tanh(matmul(c, w)), None))
        return jax.lax.scan(step, a, None, length=2)[0]

    check(f, (A, P("x")), (w, P()), out=P("x"), tolerance=1e-6)
    check(grad(f, 0, 1), (A, P("x")), (w, P()), out=(P("x"), P()), allowed=SUM, tolerance=1e-4)
    choose = lambda a, w: jax.lax.cond(a.sum() > 1e9, lambda: a, lambda: matmul(a, w))
    check(choose, (A, P("x")), (w, P()), out=P("x"), allowed=SUM)


def check_eager_calls():
    got = matmul(put(A, P("x")), put(B, P(None, "y")))
    equal(got, A @ B)
    assert got.sharding.spec == P("x", "y")


def check_out_shardings_are_respected():
    want = jax.NamedSharding(MESH, P(None, "y"))
    f = jax.jit(matmul, out_shardings=want)
    got = f(put(A, P()), put(B, P()))
    equal(got, A @ B)
    assert got.sharding.is_equivalent_to(want, 2)
    assert not collectives(f.lower(put(A, P()), put(B, P())).compile())


def check_sizes_that_do_not_divide():
    a = array(12, 16)  # 12 rows on 8 devices: XLA pads shards, the kernel gathers
    mesh = mesh_of(8)
    f = jax.jit(lambda a, b: matmul(jax.lax.with_sharding_constraint(a, jax.NamedSharding(mesh, P("x"))), b))
    equal(f(a, B), a @ B)


def check_explicit_axes():
    mesh = mesh_of(4, 2, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        for sa, sb, out, allowed in (
            (P("x", None), P(None, "y"), P("x", "y"), set()),
            (P("x", "y"), P("y", None), P("x", None), SUM),
            (P("x", None), P("x", None), P("x", None), GATHER),
        ):
            a, b = put(A, sa, mesh), put(B, sb, mesh)
            for f in (matmul, jax.jit(matmul)):
                got = f(a, b)
                equal(got, A @ B)
                assert jax.typeof(got).sharding.spec == out, jax.typeof(got)
            assert collectives(jax.jit(matmul).lower(a, b).compile()) <= allowed
            back = jax.jit(grad(matmul, 0, 1))(a, b)
            equal(back, grad(lambda a, b: a @ b, 0, 1)(A, B))
            assert [jax.typeof(g).sharding.spec for g in back] == [sa, sb]


def check_explicit_axes_of_norms_and_vmap():
    mesh = mesh_of(4, 2, kind=AxisType.Explicit)
    want = jax.jit(grad(rms_norm, 0, 1))(X, W)
    with jax.set_mesh(mesh):
        for sx, sw in ((P("x", None), P(None)), (P(None, "x"), P("x"))):
            got = jax.jit(grad(rms_norm, 0, 1))(put(X, sx, mesh), put(W, sw, mesh))
            equal(got, want, 1e-4)
            assert [jax.typeof(g).sharding.spec for g in got] == [sx, sw]
        rows = jax.jit(jax.vmap(matmul, in_axes=(0, None)))
        a = put(array(8, 16, 16), P("x", None, None), mesh)
        assert jax.typeof(rows(a, put(B, P(None, None), mesh))).sharding.spec == P("x", None, None)


def masked(rule):
    @jt.kernel(
        out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
        grid=lambda a, b, *, bm, **_: jt.cdiv(a.shape[0], bm),
        sharding=rule,
    )
    def product(a, b, o, *, bm=8):
        """Rows by their positions: the index map says nothing about what may be cut."""
        rows = jt.program_id(0) * bm + jnp.arange(bm)
        k, n = jnp.arange(a.shape[1])[None, :], jnp.arange(o.shape[1])[None, :]
        inside = (rows < a.shape[0])[:, None]
        A = jt.load(a, (rows[:, None], k), mask=jnp.broadcast_to(inside, (bm, a.shape[1])))
        jt.store(o, (rows[:, None], n), jt.dot(A, b[...]), mask=jnp.broadcast_to(inside, (bm, o.shape[1])))

    return product


def check_rules_given_by_hand():
    derived, given = masked(None), masked("m k, k n -> m n")
    assert derived.lower(A, B).texts["sharding"].startswith("_ _, _ _ -> _ _")
    assert given.lower(A, B).texts["sharding"] == "m k, k n -> m n; sum over k\n"
    check(derived, (A, P("x")), (B, P()), allowed=GATHER)
    check(given, (A, P("x")), (B, P(None, "y")), out=P("x", "y"))
    check(given, (A, P("x", "y")), (B, P("y")), out=P("x"), allowed=SUM)
    check(grad(given, 0, 1), (A, P("x", "y")), (B, P("y")), out=(P("x", "y"), P("y")), allowed=SUM)
    check(lambda a, b: jax.jvp(given, (a, b), (a, b))[1], (A, P("x")), (B, P()), out=P("x"))
    a = array(8, 16, 16)
    check(jax.vmap(given, in_axes=(0, None)), (a, P("x", "y")), (B, P()), out=P("x", "y"))
    check(
        grad(jax.vmap(given, in_axes=(0, None)), 0, 1), (a, P("x", "y")), (B, P()), out=(P("x", "y"), P()), allowed=SUM
    )


def check_a_rule_that_is_partly_given():
    rows = masked("m _, _ _ -> m _")
    check(rows, (A, P("x")), (B, P()), out=P("x"))
    check(rows, (A, P("x", "y")), (B, P("y")), allowed=GATHER)


def check_a_rule_that_is_not_true_is_an_error():
    @jt.kernel(out_type=jax.ShapeDtypeStruct((32, 24), jnp.float32), grid=4, sharding="m k, k n -> m n")
    def fixed(a, b, o):
        i = jt.program_id(0)
        o.tiles(8, 24)[i, 0] = jt.dot(a.tiles(8, 16)[i, 0], b[...])

    equal(fixed(A, B), A @ B)
    with pytest.raises(KernelValueError, match=r"with 2 shards along m, output o should have shape \(16, 24\)") as e:
        jax.jit(fixed)(put(A, P("x")), put(B, P()))
    assert "partition_checks.py" in str(e.value)


def check_kernels_that_run_whole():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def asserting(x, o):
        i = jt.program_id(0)
        jt.assert_(x[i, 0] < 9.0, "small")
        o[i, :] = x[i, :] * 2

    check(asserting, (A, P("x")), allowed=GATHER | SUM)
    unused = jax.jit(lambda a: (asserting(a), a)[1])
    jax.block_until_ready(unused(put(A, P("x"))))
    with pytest.raises(jax.errors.JaxRuntimeError, match="assertion failed: small"):
        jax.block_until_ready(unused(put(A + 9, P("x"))))
        jax.effects_barrier()
    check(scale.with_options(interpret=True), (A, P("x")), (B[0, :16], P()), allowed=GATHER | SUM)


def check_export_keeps_kernels_whole():
    pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export needs, is not installed")
    a, b = put(A, P("x")), put(B, P(None, "y"))
    exported = jax.export.export(jax.jit(matmul), disabled_checks=jt.export_checks())(a, b)
    call = jax.jit(jax.export.deserialize(exported.serialize()).call)
    equal(call(a, b), A @ B)


def check_one_device_is_left_alone():
    text = jax.jit(matmul).lower(A, B).as_text()
    assert "CustomSPMDPartitioning" not in text and text.count("jtile_cpu") == 1
    got = jax.jit(matmul)(jax.device_put(A, jax.devices()[3]), jax.device_put(B, jax.devices()[3]))
    assert got.devices() == {jax.devices()[3]}


def check_two_programs_never_share_a_cache_key():
    """JAX may leave the callback out of the key of its compilation cache; the program still stands in the module."""
    texts = set()
    for bk in (4, 8):
        f = jax.jit(lambda a, b, bk=bk: matmul(a, b, bk=bk))
        module = f.lower(put(A, P("x")), put(B, P())).as_text()
        texts.add(module[module.index("jtile_program") :][:100])
    assert len(texts) == 2


# -- functions that are cut as a whole --------------------------------------------------------------------------------


def total(x, w):
    """Rows of x times the sums of w [rows of x, 8]: two kernels, of which the first shares out all rows."""
    rows = scale(w, jnp.ones(w.shape[1])).sum(1)
    return {"y": x * rows[:, None], "rows": rows}


ROWS = jt.partitioned(total, "r _, r _ -> r, r _")  # leaves of a dict stand in the order of its keys


def check_a_function_that_is_cut():
    w = array(32, 8, seed=3)
    check(ROWS, (A, P("x")), (w, P("x")), out=(P("x"), P("x")))
    check(ROWS, (A, P(("x", "y"))), (w, P(("x", "y"))), out=(P(("x", "y")),) * 2)
    check(ROWS, (A, P("x")), (w, P()), out=(P("x"), P("x")))
    check(ROWS, (A, P("x", "y")), (w, P("x")), allowed=GATHER)  # a row is never cut
    check(ROWS, (A[:6], P("y")), (w[:6], P("y")), out=(P("y"), P("y")))


def check_a_function_that_is_cut_under_vmap_and_grad():
    w = array(32, 8, seed=3)
    both, wide = jnp.stack([A, -A, A + 1, A - 1]), P("x", "y")
    check(jax.vmap(ROWS, (0, None)), (both, wide), (w, P("y")), out=(P("x", "y"),) * 2)
    check(jax.vmap(jax.vmap(ROWS, (1, None)), (None, 0)), (both[0, :, None], P("y")), (jnp.stack([w] * 4), P("x", "y")))
    check(grad(ROWS, 0, 1), (A, P("x")), (w, P("x")), out=(P("x"), P("x")))


def check_a_function_inside_of_shard_map():
    w = array(32, 8, seed=3)
    shards = jax.shard_map(ROWS, mesh=MESH, in_specs=(P("x"), P("x")), out_specs={"y": P("x"), "rows": P("x")})
    check(shards, (A, P("x")), (w, P("x")), want=total(A, w), out=(P("x"), P("x")))


def check_explicit_axes_of_a_function():
    mesh = mesh_of(4, 2, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        got = jax.jit(ROWS)(put(A, P("x"), mesh), put(array(32, 8, seed=3), P("x"), mesh))
    assert jax.typeof(got["y"]).sharding.spec == P("x", None)
    equal(got, total(A, array(32, 8, seed=3)))


def check_a_function_on_one_of_several_devices():
    text = jax.jit(ROWS).lower(A, A).as_text()
    assert "CustomSPMDPartitioning" not in text
    equal(ROWS(A, A), total(A, A))
    there = [jax.device_put(x, jax.devices()[5]) for x in (A, A)]
    assert jax.jit(ROWS)(*there)["y"].devices() == {jax.devices()[5]}


def decoding(paged: bool):
    """q, k, v, lengths (and pages) of `ops.decode_attention`, eight rows of up to 256 keys, with their shardings."""
    q, n = normal(8, 8, 64, dtype="bfloat16"), jnp.arange(20, 256, 30, dtype=jnp.int32)
    k, v = (normal(8, 256, 4, 64, seed=s, dtype="bfloat16") for s in (1, 2))
    if not paged:
        return (q, P("x", "y")), (k, P("x", None, "y")), (v, P("x", None, "y")), (n, P("x"))
    k, v = (x.reshape(32, 64, 4, 64) for x in (k, v))
    pages = jnp.arange(32, dtype=jnp.int32).reshape(8, 4)
    return (q, P("x", "y")), (k, P(None, None, "y")), (v, P(None, None, "y")), (n, P("x")), (pages, P("x"))


def check_decoding_as_on_a_gpu():
    """A kernel whose programs share out the keys of all rows: each device those of its own, over batch and heads."""
    with jt.config(arch="sm_90"):
        for paged in (False, True):
            decode = lambda q, k, v, n, *pages: ops.decode_attention(q, k, v, n, pages=pages[0] if pages else None)
            args = decoding(paged)
            assert "hopper_decode" in str(jax.make_jaxpr(decode)(*[a for a, _ in args]))
            check(decode, *args, out=P("x", "y"), tolerance=1e-2)
        q, k, v, n = decoding(False)
        wide = (jnp.stack([q[0], -q[0]]), P(None, "x", "y"))
        check(jax.vmap(decode, (0, None, None, None)), wide, k, v, n, out=P(None, "x", "y"), tolerance=1e-2)


def check_latent_decoding_as_on_a_gpu():
    q, cache = normal(8, 16, 192, dtype="bfloat16"), normal(8, 128, 192, seed=1, dtype="bfloat16")
    n, pages = jnp.arange(16, 128, 14, dtype=jnp.int32), jnp.arange(16, dtype=jnp.int32).reshape(8, 2)
    decode = lambda q, c, n, p=None: ops.mla_decode(q, c, n, rank=128, pages=p)
    with jt.config(arch="sm_90"):
        assert "hopper_mla" in str(jax.make_jaxpr(decode)(q, cache, n))
        rows = (q, P("x", "y")), (cache, P("x")), (n, P("x"))
        check(decode, *rows, out=P("x", "y"), tolerance=1e-2)
        paged = rows[0], (cache.reshape(16, 64, 192), P()), rows[2], (pages, P("x"))
        check(decode, *paged, out=P("x", "y"), tolerance=1e-2)


def check_the_block_level_is_taken_where_several_gpus_are():
    """What is lowered for CUDA on one of several devices, and on all of them, holds the kernel at block level."""
    pytest.importorskip("triton")
    for spec, mesh in ((None, None), (P("x"), MESH)):
        args = [jnp.asarray(a) if mesh is None else put(a, spec) for a, _ in decoding(False)]
        with jt.config(arch="sm_90"):
            text = jax.jit(ops.decode_attention).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert ("CustomSPMDPartitioning" if mesh else "hopper_decode") in text
        assert "decode_splits" not in text
