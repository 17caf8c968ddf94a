"""jax.jvp, jax.vjp, jax.linearize and jax.vmap of functions of tiles, inside of a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile import language as jt
from jtile._errors import TransformError
from jtile.language._primitives import put_p, take_p
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

R = np.random.default_rng(0)
A, B, C = (R.standard_normal(s).astype("f") for s in ((4, 3), (3, 5), (4, 5)))
V, W = R.standard_normal((2, 4, 3)).astype("f")


@pytest.fixture
def inside(run):
    """`inside(fn, *arrays)`: the leaves that a function of tiles gives within a kernel. `like`: their types, where the
    function stands for one that JAX can evaluate outside."""

    def go(fn, *arrays, like=None):
        arrays = [np.asarray(x) for x in arrays]

        def kernel(*refs):
            for r, v in zip(
                refs[len(arrays) :], jax.tree.leaves(fn(*[x[...] for x in refs[: len(arrays)]])), strict=True
            ):
                r[...] = v

        if like is None:
            like = []
            probe = lambda *refs: like.extend(jax.tree.leaves(fn(*[x[...] for x in refs])))
            run(probe, arrays, [])
        return run(kernel, arrays, [(v.shape, v.dtype) for v in jax.tree.leaves(like)])

    return go


def modes(f, n: int, order: int, cts):
    """Value, jvp, linearize, vjp and (`order` 2) a second derivative of a function of n arrays, as one function of
    arrays, tangents and cotangents."""

    def run(*args):
        xs, ts, gs = args[:n], args[n : 2 * n], jax.tree.unflatten(cts, args[2 * n :])
        out = [f(*xs), jax.jvp(f, xs, ts), jax.linearize(f, *xs)[1](*ts), jax.vjp(f, *xs)[1](gs)]
        if order == 2:
            total = lambda *xs: sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(f(*xs)))
            gradients = jax.grad(total, tuple(range(n)))
            out.append(jax.grad(lambda *xs: sum(jnp.sum(v * v) for v in gradients(*xs)), tuple(range(n)))(*xs))
        return out

    return run


@pytest.fixture
def same(inside):
    """`same(fn, ref, *arrays)`: every mode of `fn` within a kernel gives what that of the reference gives outside."""

    def go(fn, ref, *arrays, tol=2e-5, order=2):
        arrays = [jnp.asarray(x) for x in arrays]
        rng = np.random.default_rng(1)
        some = lambda s: jnp.asarray(rng.standard_normal(s.shape), s.dtype)
        cts, tree = jax.tree.flatten(jax.eval_shape(ref, *arrays))
        args = [*arrays, *map(some, arrays), *map(some, cts)]
        want = evaluated(modes(ref, len(arrays), order, tree))(*args)
        close(inside(modes(fn, len(arrays), order, tree), *args, like=want), jax.tree.leaves(want), tol)

    return go


def close(got, want, tol=2e-5):
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        scale = max(np.abs(np.asarray(w, "f8")).max(initial=0), 1)
        np.testing.assert_allclose(np.asarray(g, "f8") / scale, np.asarray(w, "f8") / scale, rtol=tol, atol=tol)


# -- products --------------------------------------------------------------------------------------------------------


def plain_dot(a, b, *acc):
    dtype = jnp.float64 if jnp.float64 in (a.dtype, b.dtype) else jnp.float32
    out = jnp.matmul(a.astype(dtype), b.astype(dtype))
    return out + acc[0] if acc else out


def test_dot(same):
    same(jt.dot, plain_dot, A, B)
    same(jt.dot, plain_dot, A, B, C)
    same(lambda a: jt.dot(a, a.T), lambda a: plain_dot(a, a.T), A)
    same(lambda a, b: jt.dot(a, B, b), lambda a, b: plain_dot(a, B, b), A, C)
    same(jt.dot, plain_dot, np.stack([A, A * 2]), np.stack([B, B - 1]), np.stack([C, C]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_dot_of_narrow_operands(inside, dtype):
    a, b = jnp.asarray(A, dtype), jnp.asarray(B, dtype)
    got = inside(lambda a, b, g: jax.vjp(jt.dot, a, b)[1](g), a, b, C)
    want = [(C @ b.astype("f").T).astype(dtype), (a.astype("f").T @ C).astype(dtype)]  # rounded once
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g.astype("f"), w.astype("f"), rtol=0.13 if "8" in dtype else 1e-2, atol=1e-3)


def test_dot_x64(same):
    with jax.enable_x64(True):
        same(jt.dot, plain_dot, A.astype("f8"), B.astype("f8"), C.astype("f8"), tol=1e-12)
        same(lambda a, b: jt.dot(a, b), plain_dot, A, B.astype("f8"), order=1)


def test_dot_of_ints(inside):
    ints = lambda x: (x * 5).astype("i1")
    f = lambda x, a, b: x * jt.dot(a, b).astype(jnp.float32)
    (got,) = inside(lambda x, a, b: jax.grad(lambda x: f(x, a, b).sum())(x), C, ints(A), ints(B))
    np.testing.assert_allclose(got, ints(A).astype("i4") @ ints(B).astype("i4"))


@pytest.mark.parametrize(
    "axes", [(0, None, None), (None, 0, None), (None, None, 0), (1, 2, 0), (0, None, 1), (1, 1, 1)]
)
def test_dot_batched(inside, axes):
    args = [x if d is None else np.stack([x, x * 2, x - 1], d) for x, d in zip((A, B, C), axes, strict=True)]
    close(inside(jax.vmap(jt.dot, axes), *args), [jax.vmap(plain_dot, axes)(*args)])
    twice = [x if d is None else np.stack([x, x], d) for x, d in zip(args, axes, strict=True)]
    want = np.stack([np.asarray(jax.vmap(plain_dot, axes)(*args))] * 2)
    close(inside(jax.vmap(jax.vmap(jt.dot, axes), axes), *twice), [want])


SA, SB = np.abs(R.standard_normal((4, 2))).astype("f") + 1, np.abs(R.standard_normal((3, 5))).astype("f") + 1
QA, QB = R.standard_normal((4, 6)).astype("f"), R.standard_normal((6, 5)).astype("f")


def plain_scaled(a, sa, b, sb, *acc):
    a = a.astype("f") * jnp.repeat(sa.astype("f"), 3, 1)
    b = b.astype("f") * jnp.repeat(sb.astype("f"), 2, 0)
    return plain_dot(a, b, *acc)


def test_dot_scaled(same, inside):
    same(jt.dot_scaled, plain_scaled, QA, SA, QB, SB, C)
    half = lambda b, acc: jt.dot_scaled(QA, None, b, SB, acc)
    same(half, lambda b, acc: plain_dot(QA, b * jnp.repeat(SB, 2, 0), acc), QB, C)
    stacks = [np.stack([x, x * 2]) for x in (QA, SB)]
    got = inside(jax.vmap(lambda a, sb: jt.dot_scaled(a, SA, QB, sb)), *stacks)
    close(got, [jax.vmap(lambda a, sb: plain_scaled(a, SA, QB, sb))(*stacks)])


def test_dot_scaled_of_what_holds_no_derivative(inside):
    fp4, e8 = jnp.asarray(QA, "float4_e2m1fn"), jnp.asarray(np.ones((4, 2)), "float8_e8m0fnu")
    (got,) = inside(lambda a, s, b: jax.grad(lambda b: jt.dot_scaled(a, s, b, None).sum())(b), fp4, e8, QB)
    np.testing.assert_allclose(got, np.repeat(fp4.astype("f").sum(0)[:, None], 5, 1), rtol=1e-5)
    with pytest.raises(TransformError, match=r"respect to sa would be float8_e8m0fnu[\s\S]*defvjp"):
        inside(lambda a, s, b: jax.grad(lambda s: jt.dot_scaled(a, s, b, None).sum())(s), fp4, e8, QB)
    with pytest.raises(TransformError, match="respect to a would be float4_e2m1fn"):
        inside(lambda a, s, b: jax.grad(lambda a: jt.dot_scaled(a, s, b, None).sum())(a), fp4, e8, QB)


# -- reductions and scans ----------------------------------------------------------------------------------------------


def folded(f, inits, xs, axis=0):
    """The reference: the reduction as a loop of Python."""
    acc = inits
    for k in range(xs[0].shape[axis]):
        acc = f(acc, [jnp.take(x, k, axis) for x in xs])
    return acc


def scanned(f, xs, axis=0, reverse=False):
    order = range(xs[0].shape[axis])
    rows, acc = [], None
    for k in reversed(order) if reverse else order:
        x = [jnp.take(v, k, axis) for v in xs]
        acc = x if acc is None else f(acc, x)
        rows.append(acc)
    rows = rows[::-1] if reverse else rows
    return [jnp.stack(r, axis) for r in zip(*rows, strict=True)]


def soft(a, b):
    """Running maximum and sum of exponentials."""
    (m, s), (n, t) = a, b
    top = jnp.maximum(m, n)
    return [top, s * jnp.exp(m - top) + t * jnp.exp(n - top)]


COMBINERS = {
    "mul": (lambda a, b: [a[0] * b[0]], [1.0]),
    "logaddexp": (lambda a, b: [jnp.logaddexp(a[0], b[0])], [-1e30]),
    "soft": (soft, [-1e30, 0.0]),
    "affine": (lambda a, b: [a[0] * b[0], a[1] * b[0] + b[1]], [1.0, 0.0]),
    "sum": (lambda a, b: [a[0] + b[0], b[1] + a[1]], [0.5, -2.0]),
}


@pytest.mark.parametrize("name", COMBINERS)
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce(same, name, axis):
    f, inits = COMBINERS[name]
    args = [V, W][: len(inits)]
    start = [jnp.float32(i) for i in inits]
    same(
        lambda *xs: jt.reduce(list(xs), axis, f, inits),
        lambda *xs: folded(f, start, xs, axis),
        *args,
        tol=1e-3,
        order=2 - axis,
    )


@pytest.mark.parametrize("name", ["mul", "soft", "affine"])
@pytest.mark.parametrize(("axis", "reverse"), [(0, False), (1, True)])
def test_scan(same, name, axis, reverse):
    f, inits = COMBINERS[name]
    args = [V, W][: len(inits)]
    same(
        lambda *xs: jt.associative_scan(f, list(xs), axis, reverse),
        lambda *xs: scanned(f, xs, axis, reverse),
        *args,
        tol=1e-3,
        order=2 - axis,
    )


def test_all_axes_and_starts(same):
    f = lambda a, b: [a[0] * b[0]]
    flat = lambda x: [x.reshape(-1)]
    same(
        lambda x, i: jt.reduce([x], None, f, [i]),
        lambda x, i: folded(f, [i], flat(x)),
        V[:2],
        np.float32(1.5),
        tol=1e-3,
    )
    same(
        lambda x, i: jt.reduce([x], (0, 1), soft_max, [i]),
        lambda x, i: folded(soft_max, [i], flat(x)),
        V[:2],
        np.float32(0.5),
    )


def soft_max(a, b):
    return [jnp.logaddexp(a[0], b[0])]


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_short_axes(inside, rows):
    x, f = V[:rows], lambda a, b: [a[0] * b[0]]
    start = [jnp.float32(2)]
    loss = lambda f: lambda x, i: jnp.sum(jnp.sin(f(x, i)[0]))
    got = inside(jax.grad(loss(lambda x, i: jt.reduce([x], 0, f, [i])), (0, 1)), x, np.float32(2))
    want = jax.grad(loss(lambda x, i: [jnp.broadcast_to(folded(f, [i], [x])[0], (3,))]), (0, 1))(x, start[0])
    close(got, want)
    if rows:
        got = inside(jax.grad(lambda x: jnp.sin(jt.associative_scan(f, [x], 0)[0]).sum()), x)
        close(got, [jax.grad(lambda x: jnp.sin(scanned(f, [x])[0]).sum())(x)])


def test_constants_of_the_function(same):
    def reduced(c, x):
        return jt.reduce([x], 0, lambda a, b: [a[0] + b[0] * c + a[0] * b[0] * 0.5], [0.0])

    f = lambda c: lambda a, b: [a[0] + b[0] * c + a[0] * b[0] * 0.5]
    same(reduced, lambda c, x: folded(f(c), [jnp.float32(0)], [x]), np.float32(0.7), V, tol=1e-3)
    same(lambda c, x: jt.associative_scan(f(c), [x], 0), lambda c, x: scanned(f(c), [x]), np.float32(0.7), V, tol=1e-3)


def test_ints_beside_floats(same):
    """argmax with its place: the ints have no derivative."""

    def later(a, b):
        keep = a[0] >= b[0]
        return [jnp.where(keep, a[0], b[0]), jnp.where(keep, a[1], b[1])]

    place = np.arange(12, dtype=np.int32).reshape(4, 3)
    start = [jnp.float32(-np.inf), jnp.int32(-1)]
    same(
        lambda x: jt.reduce([x, jnp.asarray(place)], 0, later, [-np.inf, -1])[0],
        lambda x: folded(later, start, [x, place])[0],
        V,
    )
    same(
        lambda x: jt.associative_scan(later, [x, jnp.asarray(place)], 0)[0],
        lambda x: scanned(later, [x, place])[0],
        V,
    )


def test_ties_of_extremes_are_shared_as_jnp_does(inside):
    x = np.asarray([[1, 3, 3], [2, 2, 2]], "f")
    for fn, name, start in ((jnp.maximum, "max", -np.inf), (jnp.minimum, "min", np.inf)):
        (got,) = inside(jax.grad(lambda x: jt.reduce(x, 1, fn, start).sum()), x)  # noqa: B023
        np.testing.assert_allclose(got, jax.grad(lambda x: getattr(jnp, name)(x, 1).sum())(x))  # noqa: B023


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_reductions(inside, dtype):
    f = COMBINERS["soft"][0]
    loss = lambda x, y: jnp.sum(jt.reduce([x, y], 0, f, [-100.0, 0.0])[1])
    x, y = jnp.asarray(V, dtype), jnp.asarray(np.abs(W), dtype)
    got = inside(jax.grad(loss, (0, 1)), x, y)
    wide = [x.astype("f"), y.astype("f")]
    want = jax.grad(lambda x, y: folded(f, [jnp.float32(-100), jnp.float32(0)], [x, y])[1].sum(), (0, 1))(*wide)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(g.astype("f"), w, rtol=0.05, atol=0.05)


def test_reduce_x64(same):
    with jax.enable_x64(True):
        f = lambda a, b: [a[0] * b[0]]
        args = lambda x: folded(f, [jnp.float64(1)], [x])
        same(lambda x: jt.reduce([x], 0, f, [1.0]), args, V.astype("f8"), tol=1e-10)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (2, 0, 0), (1, None, 0)])
def test_batched_reductions(inside, axes):
    """Batched tiles, starts and constants, in every combination."""
    stack = lambda x, d: x if d is None else np.stack([x, x * 2], d)
    args = [stack(x, d) for x, d in zip((V, np.float32(0.5), np.float32(0.7)), axes, strict=True)]
    f = lambda c: lambda a, b: [a[0] + b[0] + a[0] * b[0] * c]
    reduced = lambda x, i, c: jt.reduce([x], 0, f(c), [i])[0]
    close(inside(jax.vmap(reduced, axes), *args), [jax.vmap(lambda x, i, c: folded(f(c), [i], [x])[0], axes)(*args)])
    scan = lambda x, i, c: jt.associative_scan(f(c), [x], 1, reverse=True)[0] + i
    want = jax.vmap(lambda x, i, c: scanned(f(c), [x], 1, True)[0] + i, axes)(*args)
    close(inside(jax.vmap(scan, axes), *args), [want])
    grad = jax.grad(lambda *a: jnp.sin(reduced(*a)).sum(), (0, 1, 2))
    ref = jax.grad(lambda x, i, c: jnp.sin(folded(f(c), [i], [x])[0]).sum(), (0, 1, 2))
    close(inside(jax.vmap(grad, axes), *args), jax.vmap(ref, axes)(*args), tol=1e-3)


# -- gather and scatter of values --------------------------------------------------------------------------------------

X1, I1, U1 = (
    R.standard_normal(6).astype("f"),
    np.asarray([3, 0, 3, 9, -1, 5, 3], "i4"),
    R.standard_normal(7).astype("f"),
)
INSIDE = np.asarray([3, 0, 3, 5], "i4")


def plain_put(x, i, u, fn):
    for k in range(len(i)):
        if 0 <= i[k] < len(x):
            x = x.at[int(i[k])].set(u[k]) if fn == "set" else x.at[int(i[k])].add(u[k])
    return x


def test_take_and_put(same):
    same(lambda x: take_p.bind(x, INSIDE), lambda x: x[INSIDE], X1)
    for fn in ("set", "add"):
        same(lambda x, u: put_p.bind(x, I1, u, fn=fn), lambda x, u: plain_put(x, I1, u, fn), X1, U1)  # noqa: B023


def test_scatter_of_an_extreme_has_no_derivative(inside):
    with pytest.raises(TransformError, match="scatter with max"):
        inside(jax.grad(lambda x: put_p.bind(x, I1, U1, fn="max").sum()), X1)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 1)])
def test_take_batched(inside, axes):
    stack = lambda x, d: x if d is None else np.stack([x, x[::-1]], d)
    args = [stack(x, d) for x, d in zip((X1, INSIDE), axes, strict=True)]
    close(inside(jax.vmap(take_p.bind, axes), *args), [jax.vmap(lambda x, i: jnp.asarray(x)[i], axes)(*args)])


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (1, 0, None)])
@pytest.mark.parametrize("fn", ["set", "add"])
def test_put_batched(inside, axes, fn):
    stack = lambda x, d: x if d is None else np.stack([x, x[::-1]], d)
    args = [stack(x, d) for x, d in zip((X1, I1, U1), axes, strict=True)]
    got = inside(jax.vmap(lambda x, i, u: put_p.bind(x, i, u, fn=fn), axes), *args)
    each = [[np.take(x, k, d) if d is not None else x for x, d in zip(args, axes, strict=True)] for k in range(2)]
    close(got, [np.stack([np.asarray(plain_put(jnp.asarray(x), i, u, fn)) for x, i, u in each])])


# -- Refs under vmap ---------------------------------------------------------------------------------------------------


def test_batched_loads(run):
    x = R.standard_normal((6, 7)).astype("f")
    rows = np.asarray([4, 0, 4], "i4")

    def kernel(x, rows, a, b, c, d, e):
        r = rows[...]
        a[...] = jax.vmap(lambda k: x[k, :])(r)
        b[...] = jax.vmap(lambda k: x[:, k], out_axes=1)(r)
        c[...] = jax.vmap(lambda k: x[jt.ds(k, 3), 1:5:2])(r)  # hangs over the end
        d[...] = jax.vmap(lambda k: x.tiles(2, 4, pad=7)[jt.cdiv(k, 2), 1])(r)
        e[...] = jax.vmap(lambda k, i: x[i[:, None] + k, i[None, :]], in_axes=(0, 1))(r, jnp.arange(6).reshape(2, 3))

    got = run(
        kernel, [x, rows], [((3, 7), "f4"), ((6, 3), "f4"), ((3, 3, 2), "f4"), ((3, 2, 4), "f4"), ((3, 2, 2), "f4")]
    )
    wide = np.pad(x, ((0, 6), (0, 6)))
    tile = np.pad(x, ((0, 2), (0, 1)), constant_values=7)
    i = np.arange(6).reshape(2, 3)
    close(got, [
        x[rows],
        x[:, rows],
        np.stack([wide[k : k + 3, 1:5:2] for k in rows]),
        np.stack([tile[k : k + 2, 4:8] for k in rows]),
        np.stack([wide[i[:, n][:, None] + k, i[:, n][None, :]] for n, k in enumerate(rows)]),
    ])  # fmt: skip


def test_batched_masks(run):
    x = R.standard_normal((3, 4)).astype("f")

    def kernel(x, m, a, b):
        a[...] = jax.vmap(lambda m: jt.load(x, (slice(None), 1), mask=m, other=-1))(m[...])
        b[...] = jax.vmap(lambda k, m: jt.load(x, (k, slice(None)), mask=m, other=9), in_axes=(0, None))(
            jnp.arange(3), jnp.arange(4) > 1
        )

    masks = np.asarray([[True, False, True], [False, False, True]])
    got = run(kernel, [x, masks], [((2, 3), "f4"), ((3, 4), "f4")])
    close(got, [np.where(masks, x[:, 1], -1).astype("f"), np.where(np.arange(4) > 1, x, 9).astype("f")])


def test_batched_stores_and_atomics(run):
    x = R.standard_normal((3, 4)).astype("f")

    def kernel(x, a, b, c, d):
        a[...] = jnp.zeros((3, 8))
        jax.vmap(lambda k, v: jt.store(a, (k, slice(2, 6)), v))(jnp.arange(3), x[...])
        jax.vmap(lambda k: jt.store(b, (slice(None), k), jnp.full(2, 1.0) * k.astype(jnp.float32)))(jnp.arange(3))
        c[...] = jnp.zeros(4)
        jax.vmap(lambda v: jt.atomic_add(c, (slice(None),), v))(x[...])  # every one adds to the same elements
        d[...] = jnp.zeros(5)
        jax.vmap(lambda k, v: jt.atomic_add(d, (k,), v))(jnp.asarray([1, 1, 4]), x[:, 0])

    a, b, c, d = run(kernel, [x], [((3, 8), "f4"), ((2, 3), "f4"), ((4,), "f4"), ((5,), "f4")])
    want = np.zeros((3, 8), "f")
    want[:, 2:6] = x
    np.testing.assert_array_equal(a, want)
    np.testing.assert_array_equal(b, [[0, 1, 2]] * 2)
    np.testing.assert_allclose(c, x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(d, [0, x[0, 0] + x[1, 0], 0, 0, x[2, 0]], rtol=1e-5)


def test_stores_of_a_batch_at_one_place(run):
    def kernel(x, o):
        jax.vmap(lambda v: jt.store(o, (0,), v))(x[...])

    with pytest.raises(TransformError, match=r"batched values at one place[\s\S]*jt.store"):
        run(kernel, [X1], [((3,), "f4")])


def test_prints_and_asserts_of_a_batch(run, capsys):
    def kernel(x, o):
        def f(v):
            jt.print("v {}", v)
            jt.assert_(v < 100, "small")
            return v * 2

        o[...] = jax.vmap(jax.grad(f))(x[...])

    (got,) = run(kernel, [X1[:2]], [((2,), "f4")])
    np.testing.assert_array_equal(got, [2, 2])
    assert "v " in capsys.readouterr().out


# -- stores within what is differentiated ------------------------------------------------------------------------------


def test_stores_within_a_differentiated_function(run):
    def kernel(x, o, p, *, stop):
        def f(v):
            y = jnp.sin(v)
            p[...] = lax.stop_gradient(y) if stop else y
            return jnp.sum(y * x[...])

        o[...] = jax.grad(f)(x[...])

    o, p = run(kernel, [V], [(V.shape, "f4")] * 2, stop=True)
    close([o, p], [np.cos(V) * V, np.sin(V)])
    with pytest.raises(TransformError, match=r"store to a Ref[\s\S]*stop_gradient"):
        run(kernel, [V], [(V.shape, "f4")] * 2, stop=False)
