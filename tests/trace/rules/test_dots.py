from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile import language as jt
from jtile.errors import UnsupportedError

RNG = np.random.default_rng(0)


def f(*shape):
    return RNG.standard_normal(shape).astype("f")


def i8(*shape):
    return RNG.integers(-128, 128, shape).astype("i1")


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("ij,jk->ik", [(4, 5), (5, 6)]),
        ("ij,kj->ki", [(4, 5), (6, 5)]),
        ("ji,jk->ik", [(5, 4), (5, 6)]),
        ("ij,ij->", [(4, 5), (4, 5)]),
        ("i,i->", [(5,), (5,)]),
        ("ij,j->i", [(4, 5), (5,)]),
        ("i,j->ij", [(3,), (4,)]),
        ("bij,bjk->bik", [(3, 4, 5), (3, 5, 6)]),
        ("bhqd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 3, 5)]),
        ("abcd,cdef->abef", [(2, 3, 4, 5), (4, 5, 2, 3)]),
        ("ib,jb->bij", [(3, 2), (4, 2)]),
        ("ij,jk->ik", [(3, 0), (0, 2)]),
    ],
)
def test_einsum(check, spec, shapes):
    check(lambda x, y: jnp.einsum(spec, x, y), *[f(*s) for s in shapes])


def test_dtypes(check):
    bf = [f(4, 5).astype(jnp.bfloat16), f(5, 6).astype(jnp.bfloat16)]
    check(lambda x, y: (x @ y, lax.dot(x, y, preferred_element_type=jnp.float32)), *bf)
    check(lambda x, y: (lax.dot(x, y, preferred_element_type=jnp.int32), lax.dot(x, y)), i8(4, 9), i8(9, 4))
    check(jnp.dot, i8(3, 4).astype("i4"), i8(4, 2).astype("i4"))
    check(lambda x, y: jnp.dot(x, y, precision="highest"), f(3, 4), f(4, 2))


def test_transposed_operands_are_folded(lower):
    def kernel(a, b, o):
        o[...] = jt.dot(a[...].T, b[...].T) + jnp.einsum("ji,kj->ik", a[...], b[...])

    k = lower(kernel, [f(5, 4), f(6, 5)], [jax.ShapeDtypeStruct((4, 6), np.float32)])
    dots = [op for op in k.body.walk() if op.mnemonic == "dot"]
    assert [(d.trans_a, d.trans_b) for d in dots] == [(True, True)] * 2


def test_jt_dot(run):
    def kernel(a, b, c, o):
        o[...] = jt.dot(a[...], b[...], c[...], precision="highest")

    a, b, c = f(3, 4, 5), f(5, 6), f(3, 4, 6)
    (got,) = run(kernel, [a, b, c], [((3, 4, 6), c.dtype)])
    np.testing.assert_allclose(got, a @ b + c, rtol=1e-5, atol=1e-5)


def test_dot_scaled(run):
    def kernel(a, sa, b, sb, o):
        o[...] = jt.dot_scaled(a[...], sa[...], b[...], sb[...], jt.ones((4, 6))) + jt.dot_scaled(
            a[...], None, b[...], None
        )

    a = np.clip(f(4, 64) * 2, -6, 6).astype(jnp.float4_e2m1fn)
    b = f(64, 6).astype(jnp.float8_e4m3fn)
    sa, sb = (2.0 ** RNG.integers(-3, 3, s) for s in ((4, 2), (4, 6)))
    sa, sb = sa.astype(jnp.float8_e8m0fnu), sb.astype("f")
    (got,) = run(kernel, [a, sa, b, sb], [((4, 6), np.dtype("f"))])
    wide = lambda x: x.astype("f8")
    scaled = (wide(a) * np.repeat(wide(sa), 32, 1)) @ (wide(b) * np.repeat(wide(sb), 16, 0))
    np.testing.assert_allclose(got, scaled + 1 + wide(a) @ wide(b), rtol=1e-5)


def test_convolutions(check):
    conv = lax.conv_general_dilated
    check(lambda x, w: conv(x, w, (2, 1), "SAME", rhs_dilation=(1, 2)), f(2, 3, 9, 8), f(4, 3, 3, 3), tol=1e-4)
    nhwc = ("NHWC", "HWIO", "NHWC")
    check(
        lambda x, w: conv(x, w, (1, 1), ((1, 0), (2, -1)), (2, 1), dimension_numbers=nhwc),
        f(2, 9, 8, 3),
        f(3, 2, 3, 4),
        tol=1e-4,
    )
    check(jnp.convolve, f(9), f(3))


def test_grouped_convolutions(check):
    conv = lax.conv_general_dilated
    check(lambda x, w: conv(x, w, (1, 2), "SAME", feature_group_count=2), f(2, 4, 5, 6), f(6, 2, 3, 2), tol=1e-4)
    check(lambda x, w: conv(x, w, (1, 1), "SAME", batch_group_count=2), f(4, 3, 5, 5), f(6, 3, 3, 2), tol=1e-4)
    depthwise = ("NWC", "WIO", "NWC")
    check(
        lambda x, w: conv(x, w, (1,), "SAME", feature_group_count=4, dimension_numbers=depthwise),
        f(2, 7, 4),
        f(3, 1, 4),
        tol=1e-4,
    )


def test_convolutions_with_a_large_window(check, lower):
    """The result is small then, as in the derivative with respect to weights."""
    conv = lax.conv_general_dilated
    check(lambda x, w: conv(x, w, (1, 2), "VALID", rhs_dilation=(2, 1)), f(2, 3, 25, 14), f(4, 3, 12, 12), tol=1e-4)
    check(lambda x, w: conv(x, w, (1,), "VALID"), f(1, 2, 3), f(2, 2, 200))  # no result at all

    def kernel(x, w, o):
        o[...] = conv(x[...], w[...], (1,), "SAME")

    with pytest.raises(UnsupportedError, match="more than 128 elements"):
        lower(kernel, [f(1, 1, 200), f(1, 1, 130)], [jax.ShapeDtypeStruct((1, 1, 200), np.float32)])
