"""Complex arrays as arguments, results and scratch of kernels, under every transformation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ttir import run_ttir

import jtile as jt
from jtile import ops
from jtile.calls.arguments import key_of
from jtile.errors import KernelTypeError, KernelValueError
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated
from jtile.tune.measure import argument_sets, difference

pytestmark = pytest.mark.usefixtures("by_numpy")

RNG = np.random.default_rng(11)


def draw(*shape):
    return (RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)).astype(np.complex64)


def close(got, want, limit=2e-6):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if w.size:
            assert relative_error(*[np.stack([x.real, x.imag]) for x in (g, w)]) < limit


@jt.kernel(
    out_type=lambda a, b: (jt.like(a), jax.ShapeDtypeStruct(a.shape, jnp.float32)),
    grid=lambda a, b: jt.cdiv(a.shape[0], 4),
)
def product(a, b, o, size):
    """`a b` and its absolute value."""
    i = jt.program_id(0)
    c = a.tiles(4)[i] * b.tiles(4)[i]
    o.tiles(4)[i] = c
    size.tiles(4)[i] = jnp.abs(c)


def product_reference(a, b):
    return a * b, jnp.abs(a * b)


X, Y = draw(10), draw(10)
MANY = draw(3, 10)


@pytest.mark.parametrize("n", [0, 1, 3, 10])
def test_odd_lengths_and_none(n):
    want = X[:n] * Y[:n], np.abs(X[:n] * Y[:n])
    close(product.interpret(X[:n], Y[:n]), want)
    assert all(isinstance(x, np.ndarray) for x in product.interpret(X[:n], Y[:n]))
    close(product(X[:n], jnp.asarray(Y[:n])), want)


def test_scalars_and_wide_arrays_of_numpy():
    k = jt.call(lambda a, b, o: jt.store(o, ..., a[...] * b[...]), out_type=lambda a, b: jt.like(a))
    close([k(1 + 2j, 3j), k(np.complex128(1 + 2j), np.complex64(3j))], [np.complex64((1 + 2j) * 3j)] * 2)
    close(k(X.astype(np.complex128)[::2], Y[1::2]), X[::2] * Y[1::2])
    close(jt.call(lambda o: jt.store(o, ..., 2 - 1j), out_type=jt.like(X))(), np.full(10, 2 - 1j, np.complex64))


def test_complex_meta_parameters():
    def body(a, o, *, by):
        o[...] = a[...] * by

    k = jt.call(body, out_type=lambda a: jt.like(a))
    for by in (1j, -1j, 2.0, complex(1, -0.0)):
        close(k.interpret(X, by=by), X * np.complex64(by))
    assert key_of({"by": complex(1, 0.0)}) != key_of({"by": complex(1, -0.0)})


def _loss(f):
    return lambda a, b: jnp.sum(jnp.abs(f(a, b)[0] - 1) ** 2) + f(a, b)[1].sum()


def _modes(f):
    """Every transformation of a function of two complex vectors, in one function."""

    def run(many, x, y, ct):
        square = lambda a: jnp.sum(f(a, y)[0] ** 2)
        return [
            jax.vmap(f, (0, None))(many, y),
            jax.vmap(f, (1, None))(many.T, y),
            jax.vmap(jax.grad(_loss(f), (0, 1)), (0, None))(many, y),
            jax.vmap(jax.vmap(f, (0, None)), (None, 0))(many, jnp.stack([x, y])),
            jax.grad(square, holomorphic=True)(x),
            jax.grad(jax.checkpoint(_loss(f)), (0, 1))(x, y),
            jax.vjp(f, x, y)[1]((ct, jnp.real(ct))),
            jax.jvp(f, (x, y), (ct, x)),
            jax.linearize(lambda a: f(a, y), x)[1](ct),
            jax.jacfwd(lambda a: f(a, y)[0], holomorphic=True)(x),
            lax.scan(lambda c, _: (f(c, y)[0], None), x, None, length=3)[0],
            lax.cond(x[0].real > 0, f, lambda a, b: f(b, a), x, y),
        ]

    return run


def test_transformations():
    args = jnp.asarray(MANY), jnp.asarray(X), jnp.asarray(Y), jnp.asarray(draw(10))
    close(jax.jit(_modes(product))(*args), evaluated(_modes(product_reference))(*args))


def test_eager_interpreted_and_without_jit():
    want = product_reference(X, Y)
    with jt.config(interpret=True):
        close([product(X, Y), jax.jit(product)(X, Y)], [want, want])
    with jax.disable_jit():
        close(product(X, Y), want)
    jt.testing.check_kernel(
        product, product_reference, (X, Y), only=("value", "jit", "poison", "jvp", "vjp", "numeric", "grad of vmap")
    )


def test_nothing_is_copied_on_the_way_in_and_out():
    @jt.kernel(out_type=lambda a: jt.like(a), alias={"a": "o"})
    def turn(a, o):
        o[...] = o[...] * 1j

    with jt.config(poison=False):
        text = jax.jit(lambda a, b: product(product(a, b)[0], b)).lower(X, Y).compile().as_text()
        kept = [line for line in text.splitlines() if " = " in line]
        assert not [line for line in kept if "fusion" in line or " copy(" in line or " real(" in line], text
        donated = jax.jit(turn, donate_argnums=0)
        assert " copy(" not in donated.lower(X).compile().as_text()
    x = jnp.array(X)
    close(donated(x), 1j * X)
    assert x.is_deleted()
    close([turn(X), turn.interpret(X)], [1j * X] * 2)
    close(jax.grad(lambda a: jnp.sum(jnp.abs(turn(a)) ** 2))(X), 2 * X.conj())


def test_sums_by_atomics():
    @jt.kernel(
        out_type=lambda a: jax.ShapeDtypeStruct((2,), jnp.complex64), init=0, grid=lambda a: jt.cdiv(a.shape[0], 4)
    )
    def total(a, o):
        tile = a.tiles(4)[jt.program_id(0)]
        jt.atomic_add(o, 0, tile.sum())
        o.at[jt.ds(1, 1)].add(1j, mask=jnp.full(1, jnp.abs(tile[0]) >= 0))

    want = np.array([X.sum(), 3j], np.complex64)
    close([total.interpret(X), total(X)], [want, want])
    close(jax.grad(lambda a: jnp.abs(total(a)[0]))(X), jax.grad(lambda a: jnp.abs(a.sum()))(X))
    close(jax.vmap(total)(MANY)[:, 0], MANY.sum(1))


@jt.kernel(out_type=lambda a, i: [jt.like(a, n) for n in (4, 6, 3, 12, 12, 2)], scratch=lambda a, i: jt.like(a, (4,)))
def indexed(a, i, p, q, r, s, t, u, own):
    own[...] = a[:4]
    p[...] = own[::-1]
    jt.store(p, jt.ds(2, 2), jnp.full(2, 1j, jnp.complex64), mask=jnp.array([True, False]))
    q[...] = jt.load(a, jt.ds(6, 6), mask=jnp.arange(6) < 5, other=1j)
    r[...] = a[i[...]]
    s[...] = a.tiles(12, pad=2 - 1j)[0]
    t[...] = a.tiles(12, pad=float("nan"))[0]
    u[...] = jnp.squeeze(a[None, 8:10], 0)


def test_every_index():
    i = np.array([3, 0, 9], np.int32)
    wide = np.concatenate([X, [2 - 1j] * 2]).astype(np.complex64)
    p = X[3::-1].copy()
    p[2] = 1j
    want = [p, np.concatenate([X[6:], [1j] * 2]).astype(np.complex64), X[i], wide, X, X[8:10]]
    for run in (indexed, indexed.interpret):
        found = [np.asarray(x) for x in run(X, i)]
        assert np.isnan(found[4][10:].real).all()
        found[4] = found[4][:10]
        close(found, want)


@jt.kernel(
    out_type=lambda a, b: jt.like(a, (a.shape[0], b.shape[1])),
    grid=lambda a, b: (jt.cdiv(a.shape[0], 16), jt.cdiv(b.shape[1], 16)),
)
def matmul(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(16, 16), b.tiles(16, 16)
    acc = jt.zeros((16, 16), jnp.complex64)
    for k in jt.range(A.shape[1]):
        acc = jt.dot(A[i, k], B[k, j], acc)
    o.tiles(16, 16)[i, j] = acc


def test_products_and_their_code_for_gpus():
    a, b, g = draw(20, 40), draw(40, 18), draw(20, 18)
    close([matmul(a, b), matmul.interpret(a, b)], [a @ b] * 2)
    close(jax.vjp(matmul, a, b)[1](g), (g @ b.T, a.T @ g))
    lowered = matmul.lower(a, b, target="cuda:sm_90")
    assert "shared memory" in lowered.texts["resources"]
    (got,) = run_ttir(lowered.kernel, [x.view(np.float32).reshape(*x.shape, 2) for x in (a, b)])
    close(np.ascontiguousarray(got).view(np.complex64)[..., 0], a @ b)
    assert matmul.lower(a, b, target="rocm:gfx942").image


def test_gpus_load_a_number_at_once_and_split_it_in_registers():
    types = [jax.ShapeDtypeStruct((4096,), jnp.complex64)] * 2
    wide = jt.call(
        lambda a, b, o: jt.store(o.tiles(1024), jt.program_id(0), a.tiles(1024)[jt.program_id(0)] * b[jt.ds(0, 1024)]),
        out_type=types[0], grid=4,
    )  # fmt: skip
    ptx = wide.lower(*types, target="cuda:sm_90").texts["ptx"]
    assert "ld.global.v2" in ptx
    assert "st.global.v2" in ptx
    assert ".shared" not in ptx


def test_dynamic_sizes_exports_and_costs():
    k = product.with_options(dynamic={"a": 0, "b": 0})
    for n in (10, 7):
        close(k(X[:n], Y[:n]), product_reference(X[:n], Y[:n]))
    close(jax.grad(_loss(k), (0, 1))(X, Y), jax.grad(_loss(product_reference), (0, 1))(X, Y))
    stored = jax.export.export(jax.jit(product), disabled_checks=jt.export_checks())(X, Y).serialize()
    close(jax.export.deserialize(stored).call(X, Y), product_reference(X, Y))
    assert "product" in str(jt.cost(product, X, Y))
    assert "product" in str(jt.explain(product, X, Y))


def test_a_rule_of_the_users_gets_complex_cotangents():
    k = jt.call(lambda a, b, o: jt.store(o, ..., a[...] * b[...]), out_type=lambda a, b: jt.like(a))
    k.defvjp(lambda a, b: (k(a, b), (a, b)), lambda kept, g: (2 * g * kept[1], 3 * g * kept[0]))
    g = draw(10)
    close(jax.vjp(k, X, Y)[1](g), (2 * g * Y, 3 * g * X))
    close(jax.vmap(lambda x: jax.vjp(k, x, Y)[1](g)[0])(MANY), np.broadcast_to(2 * g * Y, (3, 10)))


def test_the_library_moves_and_sums_complex_numbers_and_refuses_the_rest():
    x = MANY[:, :8]
    close([ops.cumsum(x), ops.transpose(x)], [np.cumsum(x, -1), x.T])
    close(jax.vjp(ops.cumsum, x)[1](x)[0], np.cumsum(x[:, ::-1], -1)[:, ::-1])
    for match, call in {
        "matmul takes float or integer arrays": lambda: ops.matmul(x, x.T),
        "embedding: table is a real array": lambda: ops.embedding(x, np.array([1], np.int32)),
        "softmax: x is a float array": lambda: ops.softmax(x),
    }.items():
        with pytest.raises(KernelTypeError, match=match):
            call()


def test_the_tuner_draws_complex_arguments():
    (x,) = argument_sets([jax.ShapeDtypeStruct((3,), jnp.complex64)], [], 0)[0]
    assert x.dtype == jnp.complex64
    assert (x.imag != 0).all()
    assert difference([x], [x * (1 + 1e-7)]) < 1 < difference([x], [x.conj()])


# -- errors --------------------------------------------------------------------------------------------------------


def _body(fn, *, like=X, **spec):
    return lambda: jt.call(fn, out_type=jt.like(like), **spec)(X)


FLOATS = np.ones(10, np.float32)
TYPE_ERRORS = {
    "o has dtype float32, but this store has a complex64 value; store jnp.real": _body(
        lambda a, o: jt.store(o, ..., a[...]), like=FLOATS
    ),
    "the value of this store to o=1j is complex, and cannot be a float32": _body(
        lambda a, o: jt.store(o, ..., 1j), like=FLOATS
    ),
    "o has dtype complex64, but this store has a float32 value; convert it": _body(
        lambda a, o: jt.store(o, ..., jnp.real(a[...]))
    ),
    "other has dtype complex64, but": _body(
        lambda a, o: jt.store(o, ..., jt.load(o, ..., jnp.abs(a[...]) > 0, a[...])), like=FLOATS
    ),
    "atomic_max is not defined for complex numbers.*atomic_add adds both parts": _body(
        lambda a, o: jt.atomic_max(o, ..., a[...])
    ),
    "atomic_cas is not defined for complex": _body(lambda a, o: o.at[...].cas(a[...], a[...])),
    "dtype complex128, which the tile language does not have; convert it": _body(
        lambda a, o: None, like=jax.ShapeDtypeStruct((10,), np.complex128)
    ),
    "jt.alloc: no buffer of the block level holds complex numbers": _body(
        lambda a, o: (jt.alloc(4, jnp.complex64), jt.role("load", warps=1).__enter__())
    ),
}


@pytest.mark.parametrize("match", TYPE_ERRORS)
def test_what_complex_numbers_are_not(match):
    with pytest.raises(KernelTypeError, match=match) as e:
        TYPE_ERRORS[match]()
    assert "test_complex.py" in str(e.value)


@pytest.mark.parametrize("value", [1, 1j])
def test_complex_outputs_start_from_zero(value):
    with pytest.raises(KernelValueError, match=r"start from 0 or nan, not from 1j?: alias the output"):
        _body(lambda a, o: None, init=value)()
    with pytest.raises(KernelValueError, match=r"init=1j does not fit output 'o' .* which is float32"):
        _body(lambda a, o: None, init=1j, like=FLOATS)()


def test_complex128_is_refused_where_jax_has_it():
    with jax.enable_x64(True):
        for wide in (X.astype(np.complex128), jnp.asarray(X, np.complex128), 1j):
            with pytest.raises(KernelTypeError, match=r"dtype complex128, .*; convert it, x\.astype\(jnp\.complex64\)"):
                product(wide, wide)
        close(product(X, jnp.asarray(Y))[0], X * Y)
