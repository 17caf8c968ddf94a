from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.trace import trace

pytestmark = pytest.mark.usefixtures("by_numpy")

OUT = jax.ShapeDtypeStruct((), np.int32)


def test_integers():
    assert [jt.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [jt.next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    with pytest.raises(KernelTypeError, match="Python int"):
        jt.next_power_of_2(2.5)


def test_cdiv_of_traced(run):
    def kernel(n, o):
        o[0] = jt.cdiv(n[...], 4)
        o[1] = jt.cdiv(17, n[...])

    (o,) = run(kernel, [np.int32(9)], [((2,), np.dtype("i4"))])
    assert o.tolist() == [3, 2]


def test_constants():
    assert jt.arange(5).dtype == np.int32
    assert jt.arange(1, 2, 0.25).tolist() == [1, 1.25, 1.5, 1.75]
    assert jt.arange(2.5, dtype=np.float32).tolist() == [0, 1, 2]
    assert jt.zeros((2, 3)).dtype == np.float32
    assert jt.ones(4, jnp.bfloat16).dtype == jnp.bfloat16
    assert [jt.full((2,), v).dtype for v in (1, 1.5, True)] == [np.int32, np.float32, np.bool_]
    with jax.enable_x64(True):
        assert jt.arange(3).dtype == np.int32
        assert jt.zeros(3).dtype == np.float32


def test_like():
    x = np.zeros((2, 3), "f")
    assert jt.like(x) == jax.ShapeDtypeStruct((2, 3), np.float32)
    assert jt.like(x, shape=4, dtype=jnp.bfloat16) == jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    for wrong, message in (
        (lambda: jt.like(3), "takes an array or the type of one, got 3; .* jax.ShapeDtypeStruct"),
        (lambda: jt.like(x, shape=(2, -1)), "-1 is no size of a dimension"),
        (lambda: jt.like(x, shape=2.5), "2.5 is no size of a dimension"),
        (lambda: jt.like(x, shape=True), "True is no size of a dimension"),
        (lambda: jt.like(x, shape=(2, False)), "False is no size of a dimension"),
        (lambda: jt.like(x, dtype="float31"), "'float31' is no dtype"),
    ):
        with pytest.raises(KernelTypeError, match=message):
            wrong()


def test_outside_of_a_kernel():
    with pytest.raises(KernelTypeError, match="only inside of a kernel"):
        jt.program_id(0)


def test_axes(lower):
    for axis, kind in ((-1, KernelValueError), (True, KernelTypeError), (1.0, KernelTypeError)):
        with pytest.raises(kind, match="grid axis"):
            jt.program_id(axis)

    def kernel(o):
        o[...] = jt.program_id(1)

    with pytest.raises(KernelValueError, match=r"grid of 1 axis[\s\S]*test_basics.py"):
        lower(kernel, [], [OUT], grid=(4,))


def test_static_assert(lower):
    def kernel(o, *, n):
        jt.assert_(n % 2 == 0, "n is even")
        o[...] = n

    lower(kernel, [], [OUT], n=2)
    with pytest.raises(KernelValueError, match="n is even"):
        lower(kernel, [], [OUT], n=3)


WRONG = {
    "print holes": (lambda t: jt.print("{} {}", t), KernelValueError, "has 2"),
    "assert dtype": (lambda t: jt.assert_(t, "m"), KernelTypeError, "takes a bool"),
    "arange traced": (lambda t: jt.arange(t[0, 0]), KernelTypeError, "Python numbers"),
    "dot rank": (lambda t: jt.dot(t, t[0]), KernelTypeError, "rank 2"),
    "dot kinds": (lambda t: jt.dot(t, jnp.ones((4, 4))), KernelTypeError, r"two float or two int.*b.astype"),
    "dot sizes": (lambda t: jt.dot(t, t[:3]), KernelTypeError, "cannot contract"),
    "dot batch": (lambda t: jt.dot(jnp.ones((2, 4, 4)), jnp.ones((3, 4, 4))), KernelTypeError, "leading axes"),
    "dot acc": (lambda t: jt.dot(t, t, jnp.ones((4, 4))), KernelTypeError, r"jt.zeros\(\(4, 4\), jnp.int32"),
    "dot precision": (lambda t: jt.dot(t, t, precision="huge"), KernelValueError, "huge"),
    "scales": (lambda t: jt.dot_scaled(t, jnp.ones((4, 3)), t, None), KernelTypeError, "scales sa"),
    "reduce shape": (
        lambda t: jt.reduce(t, 0, lambda a, b: jnp.ones(2, jnp.int32), 0),
        KernelTypeError,
        "maps scalars",
    ),
    "reduce dtype": (lambda t: jt.reduce(t, 0, lambda a, b: a < b, 0), KernelTypeError, "maps scalars to a int32"),
    "reduce tree": (lambda t: jt.reduce((t, t), 0, lambda a, b: a[0], (0, 0)), KernelTypeError, "operands are"),
    "reduce axis": (lambda t: jt.reduce(t, 2, jnp.add, 0), KernelValueError, "axis 2"),
    "reduce tile const": (
        lambda t: jt.reduce(t, 0, lambda a, b: a + t.sum(0)[0] * t[0].sum() + (t * b).sum(), 0),
        KernelTypeError,
        "scalars",
    ),
    "scan shapes": (lambda t: jt.associative_scan(jnp.add, (t, t[0])), KernelTypeError, "one shape"),
    "when value": (lambda t: jt.when(t[0, 0] > 0)(lambda: 1), KernelTypeError, "returns nothing"),
    "when tile": (lambda t: jt.when(t > 0)(lambda: None), KernelTypeError, "takes one bool"),
    "fori carry": (
        lambda t: jt.fori(3, lambda k, c: c[:2], t),
        KernelTypeError,
        r"was int32\[4,4\] and becomes int32\[2,4\]",
    ),
    "fori tree": (lambda t: jt.fori(3, lambda k, c: (c, c), t), KernelTypeError, "the body of jt.fori gives"),
    "range step": (lambda t: jt.fori((0, 4, 0), lambda k, c: c, t), KernelValueError, "cannot be 0"),
    "range traced step": (lambda t: jt.fori((0, 4, t[0]), lambda k, c: c, t), KernelTypeError, "step of jt.range"),
    "range float": (lambda t: jt.fori(2.5, lambda k, c: c, t), KernelTypeError, "integer scalar"),
    "range stages": (lambda t: jt.range(4, stages=0), KernelValueError, "stages"),
    "range bounds": (lambda t: jt.range(), KernelTypeError, "0 bounds"),
    "range iterated": (lambda t: list(jt.range(3)), SyntaxError, r"jt.function[\s\S]*jt.fori"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    fn, kind, message = WRONG[name]

    def kernel(x, o):
        fn(x[...])

    with pytest.raises(kind, match=message) as e:
        trace(kernel, [jax.ShapeDtypeStruct((4, 4), np.int32)], [OUT], [], grid=())
    assert "test_basics.py" in str(e.value)


@pytest.mark.parametrize("bounds", [5, (1, 4), (0, 7, 3), (7, 0, -2), (3, 3), (5, 2)])
@pytest.mark.parametrize("traced", [False, True])
def test_fori_bounds(run, bounds, traced):
    def kernel(n, o):
        b = bounds if isinstance(bounds, tuple) else (0, bounds)
        b = (n[0] + b[0], n[0] + b[1], *b[2:]) if traced else b
        o[...] = jt.fori(b, lambda k, c: c * 10 + k, 0, unroll=2)

    (o,) = run(kernel, [np.zeros(1, "i4")], [((), np.dtype("i4"))])
    want = 0
    for k in range(*bounds) if isinstance(bounds, tuple) else range(bounds):
        want = want * 10 + k
    assert o == want


def test_when_and_cond(run):
    def kernel(o):
        i = jt.program_id(0)
        o[i] = jt.cond(i > 1, lambda a: a * 10, lambda a: a, i)

        @jt.when(i == 0)
        def _():
            o[0] = 7

        @jt.when(False)
        def _():
            o[0] = 8

    (o,) = run(kernel, [], [((4,), np.dtype("i4"))], grid=(4,))
    assert o.tolist() == [7, 1, 20, 30]
