"""Plain Python control flow over traced values: what it means, and what is refused with the line."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.trace import function

F32, I32 = np.dtype("f"), np.dtype("i4")
X = np.arange(24, dtype="f").reshape(6, 4)


# -- loops ---------------------------------------------------------------------------------------------------------


def test_carry(run):
    def kernel(x, o):
        total, count = jnp.zeros(4), 0
        for k in jt.range(x.shape[0]):
            row = x[k]  # only of this round: no carry
            total += row
            count = count + 1
        o[...] = total * count

    (o,) = run(kernel, [X], [((4,), F32)])
    np.testing.assert_array_equal(o, X.sum(0) * 6)


def test_only_what_is_needed_is_carried(lower):
    def kernel(x, o):
        row, acc, dead = x[0], jnp.zeros(4), jnp.zeros(4)  # dead has its value from the loop thrown away
        for k in jt.range(6):
            row = x[k]
            dead = row * 2  # noqa: F841
            acc = acc + row
        o[...] = acc

    (loop,) = [op for op in lower(kernel, [X], [jax.ShapeDtypeStruct((4,), F32)]).body.walk() if op.mnemonic == "for"]
    assert len(loop.inits) == 1


@pytest.mark.parametrize("bounds", [(4,), (1, 4), (0, 6, 2), (5, -1, -2), (3, 3)])
@pytest.mark.parametrize("traced", [False, True])
def test_bounds(run, bounds, traced):
    def kernel(n, o):
        b = bounds
        if traced:
            b = (n[0] + bounds[0], *bounds[1:]) if len(bounds) != 2 else tuple(n[0] + v for v in bounds)
        s = 0
        for k in jt.range(*b):
            s = s * 10 + k
        o[...] = s

    (o,) = run(kernel, [np.zeros(1, "i4")], [((), I32)])
    assert o == functools.reduce(lambda s, k: s * 10 + k, range(*bounds), 0)


def test_nested_loops_stores_and_python_loops(run):
    def kernel(x, o):
        for i in jt.range(6):
            best = -jnp.inf
            for j in jt.range(4):
                best = jnp.maximum(best, x[i, j])
            for j in range(4):  # a Python loop inside
                o[i, j] = best + j
            for j, name in enumerate(["a", "b"]):
                assert name in "ab"
                o[i, j] += 100.0

    (o,) = run(kernel, [X], [(X.shape, F32)])
    np.testing.assert_array_equal(o, X.max(1, keepdims=True) + np.arange(4) + [100, 100, 0, 0])


def test_tuples_pytrees_and_weak_numbers(run):
    def kernel(x, o):
        state = {"m": -jnp.inf, "l": (0.0, 0)}
        a, (b, c) = 0, (1.0, x[0])
        for k in jt.range(6):
            m = jnp.maximum(state["m"], x[k].max())
            state = {"m": m, "l": (state["l"][0] + m, state["l"][1] + 1)}
            a, (b, c) = a + k, (b * 2, c + 1.0)
        o[0], o[1], o[2], o[3], o[4] = state["m"], state["l"][0], state["l"][1].astype(F32), a.astype(F32), b
        o[5] = c[0]

    (o,) = run(kernel, [X], [((6,), F32)])
    assert o.tolist() == [23, X.max(1).sum(), 6, 15, 64, 6]


def test_closures_globals_defaults_and_helpers(run):
    scale = 2.0

    @function
    def power(v, n):
        out = jnp.ones_like(v)
        for _ in jt.range(n):
            out = out * v
        return out

    def kernel(x, o, *, n=3, m=1):
        nonlocal scale
        shift = lambda v: v + scale + GLOBAL
        acc = jnp.zeros(4)
        for k in jt.range(n):
            acc = acc + shift(power(x[k], m))
            scale = scale + 0.0
        o[...] = acc

    (o,) = run(kernel, [X], [((4,), F32)], m=2)
    np.testing.assert_array_equal(o, (X[:3] ** 2).sum(0) + 3 * (2 + GLOBAL))


GLOBAL = 10.0


def test_nonlocal_cells_are_shared(run):
    seen = []
    n = 0

    def kernel(o):
        nonlocal n
        if len(seen) == 0:
            n = n + 1
        seen.append(n)
        o[...] = n

    run(kernel, [], [((), I32)])
    assert n == 1
    assert seen == [1]


def test_loops_in_with_try_and_nested_functions(run):
    def kernel(x, o):
        acc = jnp.zeros(4)
        with jax.named_scope("loop"):
            for k in jt.range(3):
                acc = acc + x[k]
        try:
            for k in jt.range(3, 6):
                acc = acc + x[k]
        finally:
            acc = acc * 2

        def helper(v):
            for k in jt.range(2):
                v = v + x[k]
            return v

        o[...] = helper(acc)

    (o,) = run(kernel, [X], [((4,), F32)])
    np.testing.assert_array_equal(o, X.sum(0) * 2 + X[:2].sum(0))


def test_loop_else_and_python_break(run):
    def kernel(x, o):
        for k in [0, 1, 2]:
            if k == 1:
                break
            o[k] = 1.0
        else:
            o[3] = 9.0
        for k in jt.range(4, 6):
            o[k] = x[k, 0]
        else:
            o[2] = 5.0
        while True:
            o[1] = 3.0
            break

    (o,) = run(kernel, [X], [((6,), F32)], inits=(0,))
    assert o.tolist() == [1, 3, 5, 0, 16, 20]


def test_static_objects_pass_through(run):
    """Views, Refs, strings and functions may be named before, in and after a loop, as long as they stay "
    "what they are."""

    def kernel(x, o):
        view, mode, fn = x.tiles(2, 4), "sum", jnp.sum
        acc = jnp.zeros(())
        for k in jt.range(view.shape[0]):
            t = view[k, 0]
            acc = acc + getattr(jnp, mode)(t) + fn(t)
            view, mode, fn = view, mode, fn
        o[...] = acc + fn(view[0, 0])

    (o,) = run(kernel, [X], [((), F32)])
    assert o == X.sum() * 2 + X[:2].sum()


def test_elements_of_lists_and_dicts(run):
    """Setting elements of a Python container in a loop or branch carries the container."""

    def kernel(x, o):
        accs, best = [jnp.zeros(()), 0.0], {"m": -1.0}
        for k in jt.range(6):
            for j in range(2):
                accs[j] = accs[j] + x[k, j]
            if x[k, 0] > best["m"]:
                best["m"] = x[k, 0]
                accs[0] += 100.0
        o[0], o[1], o[2] = accs[0], accs[1], best["m"]

    (o,) = run(kernel, [X], [((3,), F32)])
    assert o.tolist() == [X[:, 0].sum() + 600, X[:, 1].sum(), 20]


def test_functions_under_when_see_names_of_the_round(run):
    def kernel(x, o):
        for k in jt.range(6):
            row = x[k]

            @jt.when(k % 2 == 0)
            def _():
                o[k] = row  # noqa: B023

    (o,) = run(kernel, [X], [(X.shape, F32)], inits=(0,))
    np.testing.assert_array_equal(o[::2], X[::2])
    assert not o[1::2].any()


def test_random_keys_as_carry(run):
    def kernel(o):
        key = jax.random.key(0)
        for k in jt.range(3):
            key, sub = jax.random.split(key)
            o[k] = jax.random.bits(sub, ())

    (o,) = run(kernel, [], [((3,), np.dtype("u4"))])
    key, want = jax.random.key(0), []
    for _ in range(3):
        key, sub = jax.random.split(key)
        want.append(int(jax.random.bits(sub, ())))
    assert o.tolist() == want


# -- while and if --------------------------------------------------------------------------------------------------


def test_while(run):
    def kernel(n, o):
        a, steps = n[...], 0
        while a != 1:
            if a % 2 == 0:
                a = a // 2
            else:
                a = 3 * a + 1
            steps += 1
        o[...] = steps

    (o,) = run(kernel, [np.int32(27)], [((), I32)])
    assert o == 111


def test_while_with_bounds_and_logic(run):
    def kernel(x, o):
        k = 0
        while k < 6 and not x[k, 0] > 9.0:
            k += 1
        o[...] = k

    (o,) = run(kernel, [X], [((), I32)])
    assert o == 3


def test_while_starts_in_python(run):
    """Rounds with a Python condition run while tracing; the loop goes on on the device when the condition is traced."""

    def kernel(x, o):
        k, n = 0, 2
        while k < n:
            k = k + 1 if k < 1 else k + x[0].astype(jnp.int32)
            n = 5
        o[...] = k

    (o,) = run(kernel, [np.array([2], "f")], [((), I32)])
    assert o == 5


def test_if_elif_else(run):
    def kernel(x, o):
        for k in jt.range(6):
            v = x[k, 0]
            if v < 5:
                r, tag = v, 1
            elif v < 15:
                r = v * 2
                tag = 2.5
            else:
                r, tag = 0.0, 3
            if k == 2:
                o[k, 1] = 77.0
            o[k, 0] = r + tag

    (o,) = run(kernel, [X], [((6, 2), F32)], inits=(0,))
    assert o[:, 0].tolist() == [1, 5, 18.5, 26.5, 3, 3]
    assert o[:, 1].tolist() == [0, 0, 77, 0, 0, 0]


def test_python_conditions_run_while_tracing(run):
    def kernel(x, o, *, causal, mode):
        if causal:
            limit = 3
        else:
            limit = 6
        if mode == "none":
            return
        acc = 0.0
        for k in jt.range(limit):
            if mode is not None and (mode == "double" or causal):
                extra = x[k, 0]
                acc = acc + extra
            acc = acc + x[k, 0]
        o[...] = acc

    (o,) = run(kernel, [X], [((), F32)], causal=True, mode="double")
    assert o == 2 * X[:3, 0].sum()
    (o,) = run(kernel, [X], [((), F32)], causal=False, mode="single")
    assert o == X[:, 0].sum()
    (o,) = run(kernel, [X], [((), F32)], causal=False, mode="none", inits=(4,))
    assert o == 4


def test_numbers_take_the_other_branch_s_dtype(run):
    def kernel(x, o):
        c = x[0, 1] > 0
        if c:
            a, b = 1, x[0]
        else:
            a, b = x[1, 1], x[1]
        if c:
            d = x[1, 1]
        else:
            d = 0
        o[...] = a + b[0] + d

    (o,) = run(kernel, [X], [((), F32)])
    assert o == 1 + 0 + 5


def test_expressions(run):
    def kernel(x, o):
        for k in jt.range(6):
            v = x[k, 1]
            o[k] = v if 4 <= v < 12 or v > 20 else -1.0
            inside = not (v < 3)
            o[k] += 100.0 if inside and True else 0
        o[0] += 1 if GLOBAL > 3 and "text" else 2

    (o,) = run(kernel, [X], [((6,), F32)])
    v = X[:, 1]
    want = np.where(((v >= 4) & (v < 12)) | (v > 20), v, -1) + 100 * ~(v < 3)
    want[0] += 1
    np.testing.assert_array_equal(o, want)


def test_early_names_of_python_branches(run):
    """A name that a Python branch leaves unbound stays unbound, as in Python."""

    def kernel(o, *, flag):
        if flag:
            y = 3
        o[...] = y

    assert run(kernel, [], [((), I32)], flag=True)[0] == 3
    with pytest.raises(NameError):
        run(kernel, [], [((), I32)], flag=False)


def test_strict_promotion_and_x64(run):
    def kernel(x, o):
        acc, n = jnp.zeros(4, x.dtype), 0
        for k in jt.range(x.shape[0], unroll=2):
            acc = acc + x[k] * 2
            n = n + k
        while n > 3:
            n = n - 4
        if n == 3:
            acc = acc + 1
        o[...] = acc

    with jax.enable_x64(True):
        (o,) = run(kernel, [X.astype("f8")], [((4,), np.dtype("f8"))])
    np.testing.assert_array_equal(o, X.sum(0) * 2 + 1)


def test_differentiable(run):
    def kernel(x, o):
        def f(v):
            out = v
            for _ in jt.range(3):
                out = jnp.sin(out) * v
            return out.sum()

        o[...] = jax.grad(f)(x[0])

    (o,) = run(kernel, [X], [((4,), F32)])

    def outer(v):
        out = v
        for _ in range(3):
            out = jnp.sin(out) * v
        return out.sum()

    np.testing.assert_allclose(o, jax.grad(outer)(X[0]), rtol=1e-5)
