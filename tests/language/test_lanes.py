"""`jax.vmap` inside of kernels, of branches and loops whose condition differs by lane: they load, store and add in the
lanes where they run, and have the derivatives of the same function of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ttir import run_ttir

import jtile as jt
from jtile.errors import TransformError

pytestmark = pytest.mark.usefixtures("by_numpy")

ROWS = np.arange(8, dtype=np.int32)
X = jnp.asarray([1.0, 0.5, 1.5, 2.0, 0.25, 3.0, 1.25, 0.75])
N = jnp.asarray([3, 0, 5, 1, 9, 2, 8, 4], jnp.int32)


def of(shape, init=None):
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jt.kernel(out_type=lambda *_: out, init=init)


def each(fn, *args):
    jax.vmap(fn)(ROWS, *args)


@jt.function
def _either(x, o, i):
    if x[i] > 1:
        o[i] = jnp.sqrt(x[i] - 1)
    else:
        o[7 - i] += x[i] * x[7 - i]


@of((8,), init=0)
def either(n, x, o):
    each(lambda i: _either(x, o, i))


def either_reference(n, x):
    o = jnp.zeros(8).at[::-1].add(jnp.where(x > 1, 0, x * x[::-1]))
    return jnp.where(x > 1, jnp.sqrt(jnp.where(x > 1, x - 1, 1)), o)


@of((8,))
def guarded_load(n, x, o):
    """x[9] is outside: the lane whose branch is not taken does not read it."""
    w = x[0]
    o[...] = jax.vmap(lambda k: lax.cond(k < 8, lambda: w / x[k], lambda: x[1]))(n[...])


def guarded_load_reference(n, x):
    return jnp.where(n < 8, x[0] / x[jnp.minimum(n, 7)], x[1])


@jt.function
def _prefixes(x, o, i, n):
    total = jnp.float32(0)
    for k in jt.range(jnp.minimum(n, 8)):
        if x[k] > 0.6:
            o[i, k] = total * x[k]
        total += x[k] / x[i]
    o[i, 8] = total


@of((8, 9), init=0)
def prefixes(n, x, o):
    """Loops of a number of rounds that differs by lane, with a branch inside."""
    each(lambda i, n: _prefixes(x, o, i, n), n[...])


@jax.numpy_rank_promotion("allow")
def prefixes_reference(n, x):
    rounds = jnp.arange(8) < jnp.minimum(n, 8)[:, None]
    parts = jnp.where(rounds, x[None] / x[:, None], 0)
    before = jnp.cumsum(parts, 1) - parts
    return jnp.concatenate([jnp.where(rounds & (x > 0.6), before * x, 0), parts.sum(1, keepdims=True)], 1)


@of((3, 4), init=0)
def one_place(n, x, o):
    """The last lane that stores to a place stays."""

    def lane(i, n, v):
        @jt.when(n > 4)
        def _():
            o[1, :] = jnp.full(4, v * v)
            o[2, :] = jnp.ones(4, jnp.float32)

    each(lane, n[...], x[...])


def one_place_reference(n, x):
    return jnp.stack([jnp.zeros(4), jnp.full(4, x[6] ** 2), jnp.ones(4)])


@of((8,), init=0)
def sums(n, x, o):
    def lane(i, n, v):
        @jt.when(n < 5)
        def _():
            jt.atomic_add(o, n, v * v)
            jt.atomic_add(o, 7, v, mask=v > 1)

    each(lane, n[...], x[...])


def sums_reference(n, x):
    low = n < 5
    o = jnp.zeros(8).at[jnp.where(low, n, 99)].add(x * x, mode="drop")
    return o.at[7].add(jnp.where(low & (x > 1), x, 0).sum())


@of((8, 3), init=0)
def nested(n, x, o):
    """A loop in a branch in two vmaps, and a scan; the loop's condition reads memory."""

    def lane(i, j):
        @jt.when(n[i] > 2 * j)
        def _():
            end = lax.while_loop(lambda k: n[k] < 3 * j, lambda k: k + 1, i * 0)
            o[i, j] = lax.scan(lambda c, _: (c * x[end], None), x[i], None, length=2)[0]

    each(lambda i: jax.vmap(lambda j: lane(i, j))(ROWS[:3]))


@jax.numpy_rank_promotion("allow")
def nested_reference(n, x):
    ends = jnp.asarray([0, 0, 4])
    return jnp.where(n[:, None] > 2 * jnp.arange(3), x[:, None] * x[ends] ** 2, 0)


KERNELS = [either, guarded_load, prefixes, one_place, sums, nested]
REFERENCES = [
    either_reference, guarded_load_reference, prefixes_reference, one_place_reference, sums_reference, nested_reference,
]  # fmt: skip
EACH = pytest.mark.parametrize(("kernel", "reference"), [*zip(KERNELS, REFERENCES)], ids=[k.name for k in KERNELS])


@EACH
def test_values(kernel, reference):
    want = reference(N, X)
    tile_ir = kernel.lower(N, X, target="cuda:sm_90").kernel
    for got in (kernel(N, X), kernel.interpret(N, X), run_ttir(tile_ir, [np.asarray(N), np.asarray(X)])[0]):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@EACH
def test_derivatives(kernel, reference):
    weights = jnp.cos(jnp.arange(reference(N, X).size, dtype=jnp.float32)).reshape(reference(N, X).shape)

    def modes(fn):
        total = lambda x: (fn(N, x) * weights).sum()
        return jax.grad(total)(X), jax.jvp(total, (X,), (jnp.sin(X),))[1], jax.vmap(jax.grad(total))(X[None] * 1.1)

    for got, want in zip(modes(kernel), modes(reference), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx942"])
def test_compiled(target):
    for kernel in (prefixes, one_place):
        assert kernel.lower(N, X, target=target).image


# -- loops of values, whose condition is a tile --------------------------------------------------------------------

INT32 = np.iinfo(np.int32)
BOUNDS = {  # start, limit and step of each lane
    "one": ([0, 3, -2, 5], [4, 3, 2, 1], 1),
    "three": ([-7, -7, 4, 1, 0, -1], [7, 8, 5, 1, -3, 1], 3),
    "edges": ([INT32.min, INT32.max - 3, INT32.min + 2], [INT32.min + 3, INT32.max, INT32.min], 1),
    "long": ([INT32.min, -30000, INT32.max - 70000], [INT32.min + 90000, 30000, INT32.max - 40000], 2**15),
    "int8": (np.asarray([-128, -100, 120], "i1"), np.asarray([127, 100, 127], "i1"), 1),
    "uint32": (np.asarray([5, 0, 2**32 - 5], "u4"), np.asarray([2, 7, 2**32 - 1], "u4"), 2),
}


def rounds(start, limit, step):
    """How often each lane runs, the last index, and a sum of what it saw."""

    def lane(lo, hi):
        def body(c):
            k, hi, n, s = c
            return k + jnp.asarray(step, k.dtype), hi, n + 1, s * 3 + k.astype(jnp.int32)

        k, _, n, s = lax.while_loop(lambda c: c[0] < c[1], body, (lo, hi, jnp.int32(0), jnp.int32(1)))
        return k, n, s

    return jax.vmap(lane)(start, limit)


@pytest.mark.parametrize("case", BOUNDS)
def test_lanes_that_count(case):
    *bounds, step = BOUNDS[case]
    start, limit = (jnp.asarray(b) if hasattr(b, "dtype") else jnp.asarray(b, jnp.int32) for b in bounds)
    want = jax.jit(lambda a, b: rounds(a, b, step))(start, limit)
    types = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in want)

    @jt.kernel(out_type=types)
    def count(start, limit, *outs):
        for o, v in zip(outs, rounds(start[...], limit[...], step), strict=True):
            o[...] = v

    assert "while " not in count.lower(start, limit).texts["tile_ir"]  # a loop that counts
    for got in (count(start, limit), count.interpret(start, limit)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x, dtype=jnp.int32)))
def newton(x, o, n):
    """Square roots: every lane goes on until it has its own."""

    def lane(v):
        far = lambda c: jnp.abs(c[0] * c[0] - v) > 1e-3
        return lax.while_loop(far, lambda c: ((c[0] + v / c[0]) / 2, c[1] + 1), (v, jnp.int32(0)))

    o[...], n[...] = jax.vmap(lane)(x[...])


def test_lanes_that_end_by_themselves():
    want = [1, 1.5, 3, 0.1]
    x = jnp.asarray(np.square(want), jnp.float32)
    tile_ir = newton.lower(x, target="rocm:gfx942").kernel
    for got, count in (newton(x), newton.interpret(x), run_ttir(tile_ir, [np.asarray(x)], "gfx942")):
        np.testing.assert_allclose(got, want, atol=1e-2)
        assert len(set(np.asarray(count).tolist())) > 2
    gradient = jax.jvp(lambda x: newton(x)[0], (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(gradient[1:3], 0.5 / np.asarray(want[1:3]), rtol=1e-2)
    gradient = jax.grad(lambda x: newton(x)[0].sum())(x)  # each lane by its own rounds, which are counted
    np.testing.assert_allclose(gradient[1:3], 0.5 / np.asarray(want[1:3]), rtol=1e-2)


def test_the_reverse_mode_of_lanes_that_count():
    def powers(x):
        rounds = lambda v: jnp.minimum(jnp.floor(2 * v).astype(jnp.int32), 6)
        return jax.vmap(lambda v: lax.fori_loop(-1, rounds(v), lambda _, c: c * v + 1, v))(x)

    @jt.kernel(out_type=lambda x: jt.like(x))
    def kernel(x, o):
        o[...] = powers(x[...])

    def unrolled(x):
        out, n = x, jnp.minimum(jnp.floor(2 * x), 6)
        for k in range(-1, 6):
            out = jnp.where(k < n, out * x + 1, out)
        return out

    np.testing.assert_allclose(jax.grad(lambda x: kernel(x).sum())(X), jax.grad(lambda x: unrolled(x).sum())(X), 1e-5)


def test_rounds_that_a_lane_does_not_run_have_no_derivative():
    """Not even where it would be infinite: of a root of 0 in a lane without rounds, of a number over those left in a
    lane that has ended. What all lanes share has the sum of the others."""

    @jt.kernel(out_type=lambda n, x, w: jt.like(x))
    def roots(n, x, w, o):
        shared = w[0]

        def lane(n, v):
            left = lambda k: (n - k).astype(jnp.float32)
            return lax.fori_loop(0, jnp.minimum(n, 4), lambda k, c: jnp.sqrt(c) * v + shared / left(k), v)

        o[...] = jax.vmap(jax.vmap(lane))(n[...], x[...])

    n, x, w = np.asarray([[0, 1], [3, 2]], np.int32), np.asarray([[0, 4], [9, 1]], np.float32), 2.0
    want, shared = np.ones((2, 2)), 0.0
    for at in np.ndindex(2, 2):
        c, by_w = x[at], 0.0
        for k in range(n[at]):
            root = np.sqrt(c)
            gradient = x[at] / (2 * root)
            want[at], by_w = want[at] * gradient + root, by_w * gradient + 1 / (n[at] - k)
            c = root * x[at] + w / (n[at] - k)
        shared += by_w
    got = jax.grad(lambda x, w: roots(n, x, w).sum(), (0, 1))(x, np.full(1, w, np.float32))
    np.testing.assert_allclose(got[0], want, rtol=1e-5)
    np.testing.assert_allclose(got[1], [shared], rtol=1e-5)


# -- prints, asserts, and what cannot be -----------------------------------------------------------------------------


def test_prints_and_asserts_of_lanes(capfd):
    @of((8,), init=0)
    def speaks(n, x, o):
        def lane(i, n):
            @jt.when(n > 7)
            def _():
                jt.print("large {}", n)
                jt.assert_(n > 7, "not large")
                o[i] = x[i]

            @jt.when(n > 99)
            def _():
                jt.print("huge {}", n)

        each(lane, n[...])

    np.testing.assert_array_equal(speaks.interpret(N, X), jnp.where(N > 7, X, 0))
    said = capfd.readouterr()
    said = said.out + said.err
    assert said.count("large") == 1 and "huge" not in said


def _refuse(body, match):
    @of((8,), init=0)
    def bad(n, x, o):
        def lane(i, n):
            lax.cond(n > 3, lambda: body(x, o, i), lambda: None)

        each(lane, n[...])

    with pytest.raises(TransformError, match=match) as e:
        bad(N, X)
    assert __file__ in str(e.value)


def test_what_cannot_differ_by_lane():
    def swaps(x, o, i):
        ref = jax.new_ref(jnp.zeros(()))
        ref[...] = x[i]
        o[i] = ref[...]

    _refuse(swaps, "swap under a condition .* differs by lane .* jt.alloc")

    def arrives(x, o, i):
        jt.arrive(jt.counters("c", 1), 0, 1)

    def stores(x, o, i):
        fn = jax.custom_jvp(lambda v: jt.store(o, i, v))
        fn.defjvp(lambda xs, ts: (fn(*xs), None))
        fn(x[i])

    _refuse(arrives, "last_arrival under a condition")
    _refuse(stores, "custom_jvp_call under a condition")
