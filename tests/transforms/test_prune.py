"""Dead code of kernels: what goes, what stays, and that the meaning stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile import language as jt
from jtile._errors import KernelAssertionError
from jtile.interpret import interpret
from jtile.ir.verifier import verify
from jtile.language._place import place_of
from jtile.trace import rewrite_loops, to_tile_ir, trace
from jtile.trace.tracing import equations
from jtile.transforms.prune import prune

pytestmark = pytest.mark.usefixtures("by_numpy")

F4 = np.dtype("f4")
X = np.random.default_rng(0).standard_normal((6, 4)).astype("f")


def traced(fn, *inputs, out=((6, 4), F4), scratch=(), grid=(), n_out=1):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    outs = [jax.ShapeDtypeStruct(*out)] * n_out
    return trace(rewrite_loops(fn), types, outs, [jax.ShapeDtypeStruct(*s) for s in scratch], grid=grid)


def lowered(closed, n_in, n_out=1, grid=()):
    kernel = to_tile_ir(closed, name="k", n_in=n_in, n_out=n_out, grid=grid)
    verify(kernel)
    return kernel


def pruned(fn, *inputs, **options):
    """The pruned jaxpr, after checking that it is a fixpoint and gives what the whole kernel gives."""
    n_out, grid = options.get("n_out", 1), options.get("grid", ())
    closed = traced(fn, *inputs, **options)
    scratch = frozenset(range(len(inputs) + n_out, len(closed.jaxpr.invars)))
    small = prune(closed, scratch)
    assert [str(v.aval) for v in small.jaxpr.invars] == [str(v.aval) for v in closed.jaxpr.invars]
    again = prune(small, scratch)
    assert str(again) == str(small)
    assert size(small) <= size(closed)
    want = interpret(lowered(closed, len(inputs), n_out, grid), list(inputs))
    for kernel in (small, again):
        for a, b in zip(interpret(lowered(kernel, len(inputs), n_out, grid), list(inputs)), want, strict=True):
            np.testing.assert_array_equal(a, b)
    return small


def names(closed) -> list[str]:
    return [e.primitive.name for e in equations(closed.jaxpr)]


def size(closed) -> int:
    return len([n for n in names(closed) if n not in ("jit", "pjit", "checkpoint", "closed_call")])


def only(closed, name):
    (eqn,) = [e for e in equations(closed.jaxpr) if e.primitive.name == name]
    return eqn


def test_unused_values_go():
    def kernel(x, o):
        a = x[...]
        jnp.sin(jt.load(x, (0, slice(None))))
        jnp.cos(a) + jnp.where(a > 0, a, 0.0)
        o[...] = a * 2

    assert names(pruned(kernel, X)) == ["jtile_load", "mul", "jtile_store"]


def test_calls_are_inlined():
    @jax.jit
    def f(a, b):
        return a * 2, jnp.sin(b)

    def kernel(x, o):
        a, _ = jax.checkpoint(f)(x[...], x[...] + 1)
        o[...] = a

    assert names(pruned(kernel, X)) == ["jtile_load", "mul", "jtile_store"]


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


softsign.defjvp(lambda x, t: (softsign(*x), t[0] * 7))


@jax.custom_vjp
def thrice(x):
    return x * 3


thrice.defvjp(lambda x: (thrice(x), None), lambda _, g: (g * 5,))


def test_custom_derivatives_stay():
    def kernel(x, o):
        softsign(x[0, :])
        o[...] = thrice(softsign(x[...]))

    small = pruned(kernel, X)
    assert names(small).count("custom_jvp_call") == names(small).count("custom_vjp_call") == 1
    outside = prune(jax.make_jaxpr(lambda x: thrice(softsign(x)))(X))
    g = jax.grad(lambda x: jax.core.eval_jaxpr(outside.jaxpr, outside.consts, x)[0].sum())(X)
    np.testing.assert_allclose(g, 35.0)


# -- loops ---------------------------------------------------------------------------------------------------------


def test_carry_that_feeds_itself():
    def kernel(x, o):
        acc, dead, other = x[0, :], x[1, :], x[2, :]
        for k in jt.range(5):
            acc = acc + x[k, :]
            dead = jnp.sin(dead) * other
            other = other + dead
        o[0, :] = acc
        o[1:, :] = x[1:, :]

    small = pruned(kernel, X, out=((6, 4), F4))
    assert "sin" not in names(small)
    assert len(only(small, "scan").outvars) == 2  # the counter and acc


def test_loop_without_a_use_goes():
    def kernel(x, n, o):
        acc = x[...]
        for _ in jt.range(n[...]):
            acc = acc * 2
        for _ in jt.range(3):
            acc = acc + x[...]
        o[...] = x[...]

    assert set(names(pruned(kernel, X, np.int32(3)))) == {"jtile_load", "jtile_store"}


def test_traced_bound_keeps_its_form():
    def kernel(x, n, o):
        acc, dead = x[0, :], x[1, :]
        for k in jt.range(n[...], stages=2, unroll=3):
            acc = acc + jt.load(x, (k, slice(None)))
            dead = dead * acc
        o[0, :] = acc
        o[1:, :] = x[1:, :]

    small = pruned(kernel, X, np.int32(4))
    assert "while" in names(small)
    assert names(small).count("mul") == 0
    (loop,) = [op for op in lowered(small, 2).body.walk() if op.mnemonic in ("for", "while")]
    assert (loop.mnemonic, loop.stages, loop.unroll, len(loop.results)) == ("for", 2, 3, 1)


@pytest.mark.parametrize("bound", [4, None])
def test_hints_survive_without_a_use_of_the_counter(bound):
    def kernel(x, n, o):
        acc = x[...]
        for _ in jt.range(n[...] if bound is None else bound, stages=3, unroll=2):
            acc = acc * 2
        o[...] = acc

    small = pruned(kernel, X, np.int32(4))
    (loop,) = [op for op in lowered(small, 2).body.walk() if op.mnemonic in ("for", "while")]
    assert (loop.mnemonic, loop.stages, loop.unroll) == ("for", 3, 2)


def test_nested_twice():
    def kernel(x, n, o):
        acc, lost = jnp.zeros(4), jnp.zeros(4)
        for i in jt.range(3):
            row, gone = x[i, :], x[i, :]
            for j in jt.range(n[...]):
                for _ in jt.range(2):
                    row = row + x[j, :]
                    gone = jnp.exp(gone) + row
                lost = lost + gone
            acc = acc + row
        o[...] = jnp.broadcast_to(acc[None, :], (6, 4))

    small = pruned(kernel, X, np.int32(3))
    assert "exp" not in names(small)
    loops = [e for e in equations(small.jaxpr) if e.primitive.name in ("scan", "while")]
    assert [len(e.outvars) for e in loops] == [2, 3, 2]  # a counter and row; the traced limit is a carry too


def test_scan_rows_and_stacked_results():
    def kernel(x, o):
        def body(c, row):
            a, b = row
            return (c[0] + a, jnp.sin(c[1])), (c[0], jnp.cos(b), c[1])

        (last, _), (kept, _, _) = lax.scan(body, (x[0, :], x[1, :]), (x[...], x[...] * 2), reverse=True, unroll=2)
        o[...] = kept + last[None]

    small = pruned(kernel, X)
    assert not {"sin", "cos", "mul"} & set(names(small))
    scan = only(small, "scan")
    assert (len(scan.outvars), scan.params["reverse"], scan.params["unroll"]) == (2, True, 2)


def test_while_that_is_no_counted_loop():
    def kernel(x, o):
        def body(c):
            s, t, u = c
            return s * 2, t + s, jnp.sin(u)

        _, t, _ = lax.while_loop(lambda c: jnp.max(c[0]) < 50.0, body, (jnp.abs(x[...]) + 1, x[...], x[...]))
        o[...] = t

    small = pruned(kernel, X)
    assert "sin" not in names(small)
    assert len(only(small, "while").outvars) == 2


def test_a_condition_that_reads_a_ref():
    def kernel(x, o, count):
        count[...] = jnp.int32(0)
        lax.while_loop(lambda _: count[...] < 3, lambda c: (jt.store(count, (), count[...] + 1), c)[1], 0)
        o[...] = x[...] * count[...].astype(F4)

    assert "while" in names(pruned(kernel, X, scratch=[((), np.dtype("i4"))]))


# -- branches ------------------------------------------------------------------------------------------------------


def test_unused_results_of_branches():
    def kernel(x, k, o):
        a = x[...]
        y, _ = lax.cond(k[...] > 1, lambda: (a * 2, jnp.sin(a)), lambda: (a, jnp.cos(a)))
        lax.cond(k[...] > 2, lambda: jnp.tan(a), lambda: a)
        z, _ = lax.switch(k[...], [lambda v: (v, v), lambda v: (v + 1, jnp.tanh(v)), lambda v: (v - 1, v)], a)
        o[...] = y + z

    for k in (-1, 0, 1, 2, 3):
        small = pruned(kernel, X, np.int32(k))
    conds = [e for e in equations(small.jaxpr) if e.primitive.name == "cond"]
    assert [len(e.outvars) for e in conds] == [1, 1]
    assert not {"sin", "cos", "tan", "tanh"} & set(names(small))


def test_branches_that_write():
    def kernel(x, k, o, s):
        o[...] = x[...]

        @jt.when(k[...] > 1)
        def _():
            jnp.sin(x[...])
            o[0, :] = x[1, :]
            s[...] = x[...]

        @jt.when(k[...] > 0)
        def _():
            s[...] = x[...]

    for k in (0, 1, 2):
        small = pruned(kernel, X, np.int32(k), scratch=[((6, 4), F4)])
    assert names(small).count("cond") == 1
    assert names(small).count("jtile_store") == 2
    assert "sin" not in names(small)


def test_platform_branches():
    def kernel(x, o):
        a = x[...]
        o[...] = lax.platform_dependent(a, cuda=lambda v: v * 3, default=lambda v: v * 2)

    assert names(pruned(kernel, X)) == ["jtile_load", "mul", "jtile_store"]


def test_index_that_lax_did_not_make():
    def kernel(x, k, o):
        at = k[...]
        branches = (lambda v: v * 2, lambda v: v + 1)
        o[...] = lax.fori_loop(0, 2, lambda _, c: lax.cond(at > 0, *branches, c), x[...])

    for k in (0, 1):
        pruned(kernel, X, np.int32(k))


# -- Refs ----------------------------------------------------------------------------------------------------------


def test_scratch_that_is_only_written():
    def kernel(x, o, s, t):
        acc = jax.new_ref(jnp.zeros(4))
        buffer = jax.empty_ref(jax.ShapeDtypeStruct((6, 4), F4))
        s[...] = t[...] = x[...]
        for k in jt.range(6):
            acc[...] += jnp.sin(x[k, :])  # reads only for itself
            buffer[k, :] = x[k, :]
            s[k, :] = jnp.cos(x[k, :])
            jt.atomic_add(t, (0, slice(None)), x[k, :])
            o[k, :] = x[k, :] * 2
        s[...] = s[...] + 1

    small = pruned(kernel, X, scratch=[((6, 4), F4)] * 2)
    assert sorted(names(small)) == sorted(["scan", "jtile_load", "mul", "jtile_store", "add"])


def test_scratch_that_is_read_stays():
    def kernel(x, o, s):
        acc = jax.new_ref(jnp.zeros(4))
        never = jax.new_ref(jnp.zeros(4))
        for k in jt.range(6):
            acc[...] += x[k, :]
            never[...] += acc[...]
            s[k, :] = x[k, :]
        old = jt.atomic_add(s, (slice(None), slice(None)), x[...] * 3)
        o[...] = old + jax.freeze(acc)[None]

    small = pruned(kernel, X, scratch=[((6, 4), F4)])
    assert names(small).count("addupdate") + names(small).count("swap") == 1


def test_scratch_read_by_a_branch_in_a_loop():
    def kernel(x, k, o):
        s = jax.empty_ref(jax.ShapeDtypeStruct((4,), F4))
        s[...] = x[0, :]
        for j in jt.range(6):

            @jt.when(j > k[...])
            def _():
                o[j, :] = s[...]  # noqa: B023

            @jt.when(j <= k[...])
            def _():
                s[...] = s[...] * 2
                o[j, :] = x[j, :]  # noqa: B023

    assert names(pruned(kernel, X, np.int32(2))).count("cond") == 2


def test_a_ref_made_in_a_loop():
    def kernel(x, o):
        for k in jt.range(6):
            a, b = jax.new_ref(x[k, :]), jax.new_ref(x[k, :])
            a[...] = jnp.sin(a[...])
            b[...] = jnp.cos(b[...])
            o[k, :] = a[...]

    small = pruned(kernel, X)
    assert names(small).count("new_ref") + names(small).count("ref") == 1
    assert "cos" not in names(small)


def test_stores_to_outputs_and_inputs_stay():
    def kernel(x, o):
        o[...] = x[...]
        jt.atomic_add(o, (0, 0), jnp.float32(1))

    assert names(pruned(kernel, X)).count("jtile_atomic") == 1


def test_prints_and_asserts_stay(capsys):
    def kernel(x, o):
        jt.print("first {}", x[0, 0])
        for k in jt.range(2):
            jt.assert_(k < 5, "small")
        o[...] = x[...]

    small = pruned(kernel, X)
    assert {"jtile_print", "jtile_assert_", "scan"} <= set(names(small))
    assert "first" in capsys.readouterr().out

    def fails(x, o):
        for k in jt.range(2):
            jt.assert_(k < 1, "small")
        o[...] = x[...]

    with pytest.raises(KernelAssertionError, match="small"):
        interpret(lowered(prune(traced(fails, X)), 1), [X])


def test_results_of_a_jaxpr_are_roots():
    closed = jax.make_jaxpr(lambda x: (jnp.sin(x), lax.scan(lambda c, v: (c + v, v), x[0], x)[0]))(X)
    small = prune(closed)
    for a, b in zip(jax.core.eval_jaxpr(small.jaxpr, small.consts, X), (np.sin(X), X[0] + X.sum(0)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert len(only(small, "scan").outvars) == 1


# -- places --------------------------------------------------------------------------------------------------------


def test_equations_keep_their_lines():
    def kernel(x, n, o):
        acc = x[0, :]
        for k in jt.range(3):
            acc = acc + jnp.where(acc > 0, x[k, :], acc)
        for k in jt.range(n[...]):
            acc = lax.cond(k > 1, lambda a: jnp.sin(a), lambda a: a, acc)
        o[...] = jnp.broadcast_to(acc[None], (6, 4))

    closed = traced(kernel, X, np.int32(3))
    small = prune(closed)
    kernels = [lowered(c, 2) for c in (closed, small)]
    lines = [[(op.mnemonic, op.loc.file, op.loc.line) for op in k.body.walk()] for k in kernels]
    assert lines[0] == lines[1]
    assert all(f == __file__ for _, f, _ in lines[1])

    def places(closed):
        return [
            (e.primitive.name, place_of(e.source_info)) for e in equations(closed.jaxpr) if e.primitive.name != "jit"
        ]

    assert [p for p in places(small) if p not in places(closed)] == [("select_n", (__file__, line_of("jnp.where(acc")))]


def line_of(text: str) -> int:
    with open(__file__) as f:
        return next(k for k, line in enumerate(f, 1) if text in line)
