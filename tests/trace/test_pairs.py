"""Complex tiles in kernel bodies: values and derivatives are those of jnp; what complex numbers have not is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jtile as jt
from jtile.errors import KernelTypeError, TransformError, UnsupportedError
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

RNG = np.random.default_rng(5)


def draw(*shape, scale=1.0):
    return (scale * (RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape))).astype(np.complex64)


A, B = draw(4, 4), draw(4, 4)
R = RNG.standard_normal((4, 4)).astype(np.float32)


def close(got, want, limit=2e-6):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert relative_error(*[np.stack([x.real, x.imag]) for x in (g, w)]) < limit


def kernel_of(fn, *types, out=None):
    """A kernel that computes `fn` of whole arrays."""
    out = jax.eval_shape(fn, *types) if out is None else out

    def body(*refs):
        values = jax.tree.leaves(fn(*[r[...] for r in refs[: len(types)]]))
        for ref, value in zip(refs[len(types) :], values, strict=True):
            ref[...] = value

    return jt.call(body, out_type=out)


# -- elementary functions ------------------------------------------------------------------------------------------

FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "arcsin", "arccos",
    "arctan", "arcsinh", "arccosh", "arctanh", "square", "reciprocal", "conj", "sign", "negative", "abs",
)  # fmt: skip
EDGES = [0, 1, -1, 1j, -1j, 2, -2, 1e-20 + 1e-20j, 1e18 - 1e18j, -0.0 + 1j, 0.5, -0.5, 1e-4j + 1, 1e30 + 1e30j]
HUGE = {  # of 1e30, these are numbers; the other functions overflow as NumPy's do in complex64
    "log", "log1p", "sqrt", "arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh", "reciprocal", "conj", "sign",
    "negative", "abs", "tanh", "tan",
}  # fmt: skip


def test_functions_are_those_of_numpy():
    """All values to 1e-6 of NumPy's in complex128, relative to their size, those near branch points and zeros too."""
    z = np.concatenate([EDGES, draw(50, scale=2)]).astype(np.complex64)
    of = lambda names: kernel_of(lambda z: [getattr(jnp, name)(z) for name in names], z)
    native = ("exp", "log", "sqrt", "tanh")  # the others compile for seconds
    for names, found in ((FUNCTIONS, of(FUNCTIONS).interpret(z)), (native, of(native)(z))):
        for name, got in zip(names, found, strict=True):
            with np.errstate(all="ignore"):
                want = getattr(np, name)(z.astype(np.complex128))
                off = np.abs(np.asarray(got) - want) / np.maximum(np.abs(want), 1e-37)
            known = np.isfinite(want) & (np.abs(want) < 1e37) & (np.abs(want) > 1e-37)
            known &= (np.abs(z) < 1e17) | (name in HUGE)
            if name == "log1p":  # XLA's and NumPy's part ways where |z| squared is lost beside 1
                known &= np.abs(z) > 1e-19
            assert known.sum() > 50, name
            assert np.max(off[known]) < 1e-6, (name, z[known][np.argmax(off[known])])


def test_quotients_and_powers_of_zero_and_infinity():
    top = np.array([1 + 1j, 0, 1e30 + 1e30j, 1e-30j, 1 + 1j], np.complex64)
    bottom = np.array([0, 2j, 1e30 - 1e30j, 1e-30 + 1e-30j, np.inf], np.complex64)
    exponent = np.array([0, 2, 1j, 0.5, -1], np.complex64)
    k = kernel_of(lambda a, b, w: (a / b, jnp.power(a, w)), top, bottom, exponent)
    quotient, power = k.interpret(top, bottom, exponent)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(quotient, (top.astype(complex) / bottom).astype(np.complex64), rtol=1e-6)
        want = top.astype(complex) ** exponent
    np.testing.assert_allclose(power[:2], [1, 0], atol=1e-7)
    np.testing.assert_allclose(power[2:], want[2:].astype(np.complex64), rtol=3e-5)


# -- bodies --------------------------------------------------------------------------------------------------------


def arithmetic(a, b, r):
    c = r.astype(a.dtype)
    return (
        a * b - a / b + (-a) + b * c + 2j * a + a * 2 + c / b + a / c,
        a**3 + b**-2 + a**0.5 + a**b,
        jnp.abs(a) + jnp.real(b) * jnp.imag(a) + jnp.angle(b),
        lax.complex(r, jnp.abs(b)) * jnp.conj(a) + lax.conj(r),
        jnp.exp(a) + jnp.log(b) + jnp.sqrt(a) + jnp.tanh(b) * jnp.sin(a) + jax.nn.sigmoid(a) * jax.nn.silu(b),
        jnp.sign(a) + jnp.where(a == b, 1j, 0j) + jnp.where(a != b, jnp.where(r > 0, a, b), 2.0),
    )


class Outside:
    """What the language's own functions mean, in functions that run outside of kernels too."""

    dot = staticmethod(lambda a, b, acc=0: a @ b + acc)
    product = staticmethod(jnp.prod)
    products = staticmethod(lambda x: jnp.flip(jnp.cumprod(jnp.flip(x, 0), 0), 0))


class Inside:
    dot = staticmethod(jt.dot)
    product = staticmethod(lambda x, axis: jt.reduce(x, axis, lambda p, q: p * q, 1))
    products = staticmethod(lambda x: jt.associative_scan(lambda p, q: p * q, x, 0, reverse=True))


def products(a, b, r, of=Outside):
    c = r.astype(a.dtype)
    return (
        a @ b + c @ b + a @ c + c @ c,
        of.dot(a, b, of.dot(c, a)),
        jnp.einsum("ij,kj->ki", a, b) + jnp.outer(a[0], b[0]) * jnp.vdot(a, b),
        jnp.stack([jnp.convolve(a[0], b[1], mode="same")] * 4),
        a.sum(0, keepdims=True) + b.mean(1, keepdims=True) + jnp.cumsum(a, 1) + jnp.linalg.norm(a).astype(a.dtype),
        jnp.prod(a, 0)[:, None] + jnp.cumprod(b, 1),
        of.product(a, 1)[:, None] + of.products(b),
    )


CAPTURED = draw(4, 4)


def moves(a, b, r):
    top = jnp.concatenate([a[:2], b[2:][::-1]]) + jnp.broadcast_to(a[0], (4, 4))
    picked = a[jnp.array([3, 1, 1, 0])] + b.at[1].set(2j).at[jnp.array([0, 0])].add(a[:2])
    return (
        top + a.reshape(2, 8).T.reshape(4, 4) + jnp.roll(b, 1, 0) + jnp.pad(a[1:3, 1:3], 1, constant_values=1j),
        picked + jnp.take_along_axis(a, jnp.array([[0, 2, 2, 3]] * 4), 1) * CAPTURED + jnp.eye(4, dtype=a.dtype),
        jnp.take(a, jnp.array([1, 9]), 0, mode="fill", fill_value=1 - 2j) + jnp.arange(4, dtype=a.dtype)[None],
        lax.dynamic_update_slice(a, b[:2], (jnp.int32(r[0, 0] * 0 + 1), 0)) + jt.full((4, 4), 2j),
        jax.vmap(lambda u, v: u * v.sum(), (0, 1), 1)(a, b) + jnp.split(b, 2, 1)[1].sum(),
        jnp.triu(b) + jnp.flip(jnp.tile(a[:1], (4, 1)), 1),
    )


def loops(a, b, r):
    def scanned(carry, x):
        return carry * x + 1j, carry

    last, rows = lax.scan(scanned, a[0], b)
    turned = jnp.where(r > 0, a, 1j * b)
    return (
        last[None] + rows,
        lax.fori_loop(0, 3, lambda i, c: c * b + a, a),
        lax.cond(r[0, 0] > 0, lambda: a * b, lambda: a + b) + lax.switch(jnp.int32(1), [lambda: a, lambda: b * a]),
        jax.grad(lambda u: jnp.sum(jnp.abs(u * b) ** 2))(turned),
        jnp.exp(a - jnp.max(jnp.abs(a)).astype(a.dtype)) / jnp.sum(jnp.exp(jnp.real(a))).astype(a.dtype),
    )


@pytest.mark.parametrize("fn", [arithmetic, products, moves, loops])
def test_bodies_and_their_derivatives(fn):
    args = A, B, R
    k = kernel_of(functools.partial(fn, of=Inside) if fn is products else fn, *args, out=jax.eval_shape(fn, *args))
    dots = draw(4, 4), draw(4, 4), R[::-1]
    cts = [draw(*o.shape) if o.dtype == np.complex64 else R for o in jax.eval_shape(fn, *args)]

    def modes(f):
        values, tangents = jax.jvp(f, args, dots)
        return values, tangents, jax.vjp(f, *args)[1](type(values)(cts))

    want = evaluated(lambda: modes(fn))()
    with jt.config(interpret=True):
        close(modes(lambda *xs: tuple(k(*xs))), want)
    if fn is not arithmetic:  # compiles for seconds
        close(k(*args), want[0])


def test_loops_of_the_language_carry_complex_values():
    @jt.kernel(out_type=lambda a: (jt.like(a), jt.like(a, ())), grid=lambda a: 1)
    def k(a, o, total):
        acc, z = 0j, a[0]
        for i in jt.range(4):
            acc = acc + a[i].sum()
            if jnp.real(acc) > 0:
                z = z * 1j
            else:
                z = z + acc
        while jnp.abs(acc) < 20:
            acc = acc * 2
        o[...] = jnp.broadcast_to(z, (4, 4))
        total[...] = jt.fori(3, lambda i, c: c * 1j, acc)

    acc, z = 0j, A[0]
    for row in A:
        acc = acc + row.sum()
        z = z * 1j if acc.real > 0 else z + acc
    while abs(acc) < 20:
        acc = acc * 2
    want = [np.broadcast_to(z, (4, 4)).astype(np.complex64), np.complex64(acc * -1j)]
    close(k.interpret(A), want)
    close(k(A), want)


def test_lanes_with_rounds_of_their_own():
    """A `while` whose condition differs by lane, and a `fori` whose bound does."""
    turn = lambda c: c * (1 + 1j)
    rounds = np.array([1, 2, 0, 3], np.int32)
    fn = lambda a, n: (
        jax.vmap(lambda row: lax.while_loop(lambda c: jnp.abs(c).sum() < 30, turn, row))(a),
        jax.vmap(lambda row, n: lax.fori_loop(0, n, lambda _, c: turn(c), row))(a, n),
    )
    close(kernel_of(fn, A, rounds).interpret(A, rounds), jax.jit(fn)(A, rounds))


def test_functions_with_derivatives_of_their_own():
    @jax.custom_jvp
    def thrice(a):
        return a * a

    @jax.custom_vjp
    def backwards(a):
        return a * a + 1

    thrice.defjvp(lambda primals, dots: (thrice(*primals), 3 * dots[0]))
    backwards.defvjp(lambda a: (backwards(a), a), lambda a, g: (3 * g,))
    with jt.config(interpret=True):
        close(jax.vjp(kernel_of(thrice, A), A)[1](B)[0], 3 * B)
        close(jax.jvp(kernel_of(thrice, A), (A,), (B,))[1], 3 * B)
        close(kernel_of(backwards, A)(A), A * A + 1)
        with pytest.raises(TransformError, match=r"jax\.custom_vjp that takes or gives complex numbers"):
            jax.vjp(kernel_of(backwards, A), A)[1](B)


def test_memory_that_the_body_makes():
    @jt.kernel(out_type=lambda a: [jt.like(a)] * 2)
    def k(a, o, p):
        own = jax.new_ref(a[...])
        own[...] = own[...] * 2
        own[0] = own[0] + 1j
        o[...] = jax.freeze(own)
        mine = jt.alloc(a.shape, jnp.complex64)
        mine[...] = a[...]
        mine[1:2] = jt.load(mine, jt.ds(3, 1)) * 1j
        jt.atomic_add(mine, 0, jnp.ones(4, jnp.complex64))
        p[...] = jt.load(mine, slice(None), mask=jnp.arange(4) < 3, other=5 - 1j)

    first, second = 2 * A, A.copy()
    first[0] += 1j
    second[1] = A[3] * 1j
    second[0] += 1
    second[:, 3] = 5 - 1j
    close(k.interpret(A), [first, second])
    close(k(A), [first, second])


def test_prints_show_both_parts(capfd):
    @jt.kernel(out_type=lambda a: jt.like(a))
    def k(a, o):
        jt.print("{{x}} is {}, {} rows", a[0], jnp.int32(2))
        o[...] = a[...]

    jax.block_until_ready(k(np.array([1 + 2j, 3], np.complex64)))
    assert "{x} is (1.0 + 1j * 2.0), 2 rows" in capfd.readouterr().out


# -- what complex numbers have not ---------------------------------------------------------------------------------

NO_ORDER = "complex numbers have no order; compare jnp.abs"
REFUSED = {
    "max": (lambda a: jnp.maximum(a, a), UnsupportedError, f"^max: {NO_ORDER}"),
    "reduce": (lambda a: a + jnp.max(a), UnsupportedError, f"^reduce_max: {NO_ORDER}"),
    "sort": (lambda a: jnp.sort(a), UnsupportedError, f"^sort: {NO_ORDER}"),
    "argmax": (lambda a: a[jnp.argmax(a, 0)], UnsupportedError, f"^argmax: {NO_ORDER}"),
    "fft": (lambda a: jnp.fft.fft(a), UnsupportedError, "^fft: .*or outside of the kernel"),
    "dot": (lambda a: jt.dot(a, jnp.real(a)), KernelTypeError, "of floats, of ints or of complex numbers, got c"),
    "inner": (
        lambda a: jax.grad(lambda u: jnp.abs(jt.reduce(u, (0, 1), lambda p, q: p * q, 1)))(a),
        TransformError, "of a reduction or scan of complex numbers by a function: give it the real and",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_are_refused(name):
    fn, kind, match = REFUSED[name]

    def body(a, o):
        o[...] = fn(a[...])

    with pytest.raises(kind, match=match) as e:
        jt.call(body, out_type=jt.like(A))(A)
    assert "test_pairs.py" in str(e.value)


def test_wide_complex_numbers_are_refused():
    with jax.enable_x64(True):
        k = jt.call(lambda a, o: jt.store(o, ..., a[...].astype(jnp.complex128).astype(a.dtype)), out_type=jt.like(A))
        with pytest.raises(UnsupportedError, match="has no complex128; compute in complex64"):
            k(A)
        fn = lambda a: jnp.where(jnp.real(a) > 0, a, 1j) * 2j + jt.full((4, 4), 1j)
        close(kernel_of(fn, A).interpret(A), (np.where(A.real > 0, A, 1j) * 2j + 1j).astype(np.complex64))
