"""`break`, `continue`, early `return`, traced steps, chains, builtins and `match` over traced values."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.trace import function

F32, I32 = np.dtype("f"), np.dtype("i4")
X = np.arange(24, dtype="f").reshape(6, 4)


# -- jumps ---------------------------------------------------------------------------------------------------------


def test_nothing_happens_after_a_break(run):
    """Neither the loads of later rounds (which would leave the array) nor their stores."""

    def kernel(x, o):
        for k in jt.range(100):
            if k >= x.shape[0]:
                break
            o[k] = x[k, 0]

    (o,) = run(kernel, [X], [((8,), F32)], inits=(0,))
    assert o.tolist() == [*X[:, 0], 0, 0]


def test_names_keep_what_they_had_at_the_break(run):
    def kernel(x, o):
        k, last = 0, -1.0
        for k in jt.range(6):
            last = x[k, 0]
            if last > 9:
                break
            last = last + 0.5
        o[0], o[1] = k.astype(F32), last

    (o,) = run(kernel, [X], [((2,), F32)])
    assert o.tolist() == [3, 12]


@pytest.mark.parametrize(("limit", "want"), [(9.0, 12.0), (99.0, -1.0)])
def test_else_of_a_loop_and_names_that_it_binds(run, limit, want):
    """`found` has a value on every path to its read, and needs none before the loop."""

    def kernel(x, o, *, limit):
        for k in jt.range(6):
            if x[k, 0] > limit:
                found = {"row": x[k], "name": "x"}
                break
        else:
            found = {"row": -jnp.ones(4), "name": "x"}
        o[...] = found["row"][0]

    assert run(kernel, [X], [((), F32)], limit=limit)[0] == want


def test_an_else_that_binds_the_name_of_the_loop(run):
    """The value that the loop leaves in `k` is read by nobody, and inner loops leave none."""

    def kernel(x, o):
        n = 0
        for k in jt.range(3):
            for k in jt.range(2):
                n = n + k
        else:
            k = 5
        o[...] = n + k

    assert run(kernel, [X], [((), I32)])[0] == 8


def test_nested_loops_and_continue(run):
    def kernel(x, o):
        n = 0
        for i in jt.range(6):
            if i % 2 == 1:
                continue
            for j in jt.range(4):
                if x[i, j] > 17:
                    break
                if j == 1:
                    continue
                n = n + 1
            else:
                n = n + 100
            if i == 4:
                continue
            n = n + 10
        o[...] = n

    want = 0
    for i in (0, 2, 4):
        row = [v <= 17 for v in X[i]]
        kept = list(itertools.takewhile(bool, row))
        want += sum(j != 1 for j in range(len(kept))) + 100 * all(row) + 10 * (i != 4)
    assert run(kernel, [X], [((), I32)])[0] == want


def test_python_loops_end_while_tracing_and_go_on_masked(run):
    """A break under a Python condition ends the trace of a Python loop, even of an endless one."""
    rounds = []

    def kernel(x, o):
        for k in itertools.count():
            rounds.append(k)
            if k == 4:
                break
            o[k] = 1.0
        for k in range(6):
            if x[k, 0] > 9:
                break
            o[k] = x[k, 0] + 2.0

    (o,) = run(kernel, [X], [((6,), F32)], inits=(0,))
    assert (rounds, o.tolist()) == ([0, 1, 2, 3, 4], [2, 6, 10, 1, 0, 0])


def test_a_loop_without_a_condition(run):
    """What is assigned before the break needs no value before the loop."""

    def kernel(x, o):
        k = 0
        while True:
            v = x[k, 0]
            if v > 9:
                break
            k += 1
        o[0], o[1] = v, k * 1.0

    assert run(kernel, [X], [((2,), F32)])[0].tolist() == [12, 3]


def test_a_loop_without_a_condition_has_its_work_once(run, lower):
    """A queue of work: what stands behind the way out is not there once more in front of the loop."""

    def kernel(x, o):
        t, n = jt.program_id(0) - 1, 0
        while True:
            t = t + 1
            if t >= x.shape[0]:
                n = n + 100
                break
            elif t == 1:
                continue
            n = n + 1
            o[t] = x[t] * 2
            if t == 4:
                break
            o[t, 0] = n.astype(F32)

    (o,) = run(kernel, [X], [(X.shape, F32)], inits=(0,), grid=(1,))
    want = X * 2 * (np.arange(6) % 4 != 1)[:, None]
    want[:, 0] = [1, 0, 2, 3, 32, 0]
    want[5] = 0
    want[4] = X[4] * 2
    np.testing.assert_array_equal(o, want)
    ops = list(lower(kernel, [X], [jax.ShapeDtypeStruct(X.shape, F32)], inits=(0,), grid=(1,)).body.walk())
    assert sum(op.mnemonic == "store" for op in ops) == 2


def test_code_that_nothing_gets_to(run):
    def kernel(x, o):
        while True:
            if x[0, 0] == 0:
                break
        else:
            return
        for k in jt.range(6):
            if x[k, 0] > 9:
                o[...] = k
                return
                o[...] = 7
        return

    assert run(kernel, [X], [((), I32)])[0] == 3


def test_jumps_in_with_try_and_under_python_conditions(run):
    def kernel(x, o, *, mode):
        for k in jt.range(6):
            with jax.named_scope("round"):
                if mode == "odd" and k % 2 == 0:
                    continue
                try:
                    if x[k, 0] > 12:
                        break
                    o[k] = x[k, 0]
                finally:
                    o[k] = jt.load(o, k) + 1.0
            if mode == "none":
                raise ValueError(mode)

    assert run(kernel, [X], [((6,), F32)], inits=(0,), mode="odd")[0].tolist() == [0, 5, 0, 13, 0, 1]
    assert run(kernel, [X], [((6,), F32)], inits=(0,), mode="all")[0].tolist() == [1, 5, 9, 13, 1, 0]
    with pytest.raises(ValueError, match="none"):
        run(kernel, [X], [((6,), F32)], inits=(0,), mode="none")


def test_early_return_of_a_kernel(run):
    def kernel(x, o):
        """Two ways out."""
        i = jt.program_id(0)
        if i >= x.shape[0]:
            return
        for k in jt.range(4):
            o[i, k] = x[i, k] + 1.0
            if k == i:
                return
        o[i, 3] = 0.0

    (o,) = run(kernel, [X], [(X.shape, F32)], inits=(-1,), grid=(8,))
    want = np.where(np.arange(4) <= np.arange(6)[:, None], X + 1, -1)
    want[4:, 3] = 0
    np.testing.assert_array_equal(o, want)


@function
def _first_above(x, limit, *, strict=False):
    """The first row above a limit, and where it is."""
    if strict:
        return -2, {"row": jnp.zeros(4)}
    for i in jt.range(6):
        for j in jt.range(4):
            if x[i, j] > limit:
                return i, {"row": x[i]}
    return -1, {"row": jnp.zeros(4)}


def test_return_of_a_helper(run):
    def kernel(x, v, at, row):
        i = jt.program_id(0)
        at[i], found = _first_above(x, v[i])
        row[i] = found["row"]
        assert _first_above(x, v[i], strict=True)[0] == -2

    at, row = run(kernel, [X, np.array([-1, 9, 50], "f")], [((3,), I32), ((3, 4), F32)], grid=(3,))
    assert at.tolist() == [0, 2, -1]
    np.testing.assert_array_equal(row, [X[0], X[2], np.zeros(4)])


def test_a_key_that_a_jump_leaves_without_a_value(run):
    def kernel(o):
        for k in jt.range(3):
            key = jax.random.key(k)
            if k == 1:
                break
        else:
            key = jax.random.key(7)
        o[...] = jax.random.bits(key, ())

    assert run(kernel, [], [((), np.dtype("u4"))])[0] == jax.random.bits(jax.random.key(1), ())


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(0, 7, 2), (7, 0, -3), (3, 3, 1), (5, 1, 2), (2, 9, 100), (0, 5, 0)])
def test_traced_steps(run, bounds):
    def kernel(n, o):
        s = 1
        for k in jt.range(n[0], bounds[1], n[2], stages=2):
            s = s * 10 + k
        o[...] = s

    rounds = range(*bounds) if bounds[2] else ()
    want = 1
    for k in rounds:
        want = want * 10 + k
    assert run(kernel, [np.array(bounds, "i4")], [((), I32)])[0] == want


def test_a_traced_step_near_the_end_of_its_dtype(run):
    def kernel(n, o):
        s = 0
        for _ in jt.range(n[0], 2**31 - 1, n[1]):
            s = s + 1
        o[...] = s

    assert run(kernel, [np.array([2**31 - 6, 4], "i4")], [((), I32)])[0] == 2


def test_the_persistent_loop(run):
    def kernel(x, o):
        for i in jt.range(jt.program_id(0), x.shape[0], jt.num_programs(0)):
            o[i] = x[i] * 2

    (o,) = run(kernel, [X], [(X.shape, F32)], grid=(4,))
    np.testing.assert_array_equal(o, X * 2)


# -- expressions ---------------------------------------------------------------------------------------------------


def test_logic_loads_only_what_python_would(run):
    """`x[k]` behind `k < n` is no access out of bounds, and the operands of a chain are evaluated once."""
    seen = []

    def once(v):
        seen.append(v)
        return v

    def kernel(x, o):
        k = 0
        while k < x.shape[0] and x[k, 0] < 100:
            k += 1
        o[0] = k * 1.0
        o[1] = 1.0 if k == 6 or x[k, 0] > 1 else 0.0
        o[2] = 1.0 if k < 6 < x[k, 0] else 0.0
        o[3] = 1.0 if 0 < once(x[1, 0] + x[1, 1]) < 10 else 0.0

    assert run(kernel, [X], [((4,), F32)])[0].tolist() == [6, 1, 0, 1]
    assert len(seen) == 1


def test_chains_of_tiles(run):
    def kernel(o):
        i = jt.arange(8)
        o[0] = (0 <= i - 1 < 6).astype(jnp.int32)
        o[1] = (2 < jt.program_id(0) + 5 < i).astype(jnp.int32)

    (o,) = run(kernel, [], [((2, 8), I32)], grid=(1,))
    assert o.tolist() == [[0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1, 1]]


def test_builtin_functions(run):
    def kernel(x, o):
        a, b = x[1, 0], x[1, 1]
        o[0], o[1], o[2] = max(a, b, 4.5), min([b, a]), abs(a - b)
        o[3], o[4] = max(x[2]), min(max(1, 2), 5.0)
        o[5] = 1.0 if any(v > 4 for v in (a, b)) and not all([True, a > 4]) else 0.0
        o[6:] = max(x[0], 1.5)
        assert max("ab", "c", key=len) == "ab"
        assert min([], default=3) == 3
        assert any([False, True, a > 3]) is True
        assert isinstance(max(2, 3), int)

    (o,) = run(kernel, [X], [((10,), F32)])
    assert o.tolist() == [5, 4, 1, 11, 2, 1, 1.5, 1.5, 2, 3]


def test_match_of_traced_and_of_python_values(run):
    def kernel(x, o, *, mode):
        i = jt.program_id(0)
        match i:
            case 0:
                v = x[0, 0]
            case 1 | 2:
                v = x[i, 1]
            case n if n > 4:
                v = 100.0
            case "text" | None:
                v = 7.0
            case _:
                v = -1.0
        match (i, i > 2, mode):
            case (3, True, "a"):
                v = v - 1
            case (k, False, _) if k != 1:
                v = v + k.astype(F32)
        match mode:
            case "a":
                pass
            case {"scale": s}:
                v = v * s
            case str():
                return
        o[i] = v

    go = lambda mode: run(kernel, [X], [((6,), F32)], grid=(6,), inits=(0,), mode=mode)[0].tolist()
    assert go("a") == [0, 5, 11, -2, -1, 100]
    assert go({"scale": 2.0}) == [0, 10, 22, -2, -2, 200]
    assert go("b") == [0] * 6
