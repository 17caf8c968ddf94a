from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

RNG = np.random.default_rng(0)
F = RNG.standard_normal((5, 7)).astype("f")
G = RNG.standard_normal((5, 7)).astype("f")
POS = np.abs(F) + np.float32(0.1)
UNIT = np.tanh(F)
I = RNG.integers(-50, 50, (5, 7)).astype("i4")
J = np.abs(I) + 1
U = RNG.integers(0, 2**32, (5, 7), dtype=np.uint32)
B = F > 0
ODD = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 65504.0, 65520.0, 6e-5, 6.2e-5, 1e-45, 3.4e38], "f")

UNARY = """exp exp2 expm1 sin cos tan tanh sinh cosh arctan arcsinh cbrt floor ceil round square abs sign trunc
    isfinite isnan
    isinf negative positive signbit sinc degrees rint nan_to_num"""


@pytest.mark.parametrize("name", UNARY.split())
def test_unary(check, name):
    check(getattr(jnp, name), F)


@pytest.mark.parametrize("name", ["log", "log2", "log10", "log1p", "sqrt", "reciprocal"])
def test_positive(check, name):
    check(getattr(jnp, name), POS)


@pytest.mark.parametrize("name", ["arcsin", "arccos", "arctanh"])
def test_unit(check, name):
    check(getattr(jnp, name), UNIT)


@pytest.mark.parametrize("name", ["erf", "erfc", "erf_inv", "lgamma", "digamma", "rsqrt", "logistic", "acosh"])
def test_lax_unary(check, name):
    x = POS + 1 if name == "acosh" else np.tanh(POS)
    check(getattr(lax, name), x, tol=1e-4)


BINARY = """add subtract multiply divide maximum minimum arctan2 hypot logaddexp
    floor_divide remainder fmod copysign nextafter
    equal not_equal less less_equal greater greater_equal heaviside"""


@pytest.mark.parametrize("name", BINARY.split())
def test_binary(check, name):
    check(getattr(jnp, name), F, G, tol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "subtract",
        "multiply",
        "floor_divide",
        "remainder",
        "maximum",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "gcd",
    ],
)
def test_int(check, name):
    check(getattr(jnp, name), I, J)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
@pytest.mark.parametrize("name", ["left_shift", "right_shift"])
def test_shifts(check, name, dtype):
    bits = np.dtype(dtype).itemsize * 8
    check(getattr(jnp, name), I.astype(dtype), (J % bits).astype(dtype))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_shifts_of_lax_up_to_and_past_the_width(check, dtype):
    big = np.array([-1, -2, 3, 100, -128], np.int64).astype(dtype)[:, None]
    by = np.array([0, 1, 7, 8, 31, 32, 33, 100], np.int64).astype(dtype)[None]
    big, by = np.broadcast_arrays(big, by)
    for fn in (lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical):
        check(fn, big.copy(), by.copy())


def test_int_unary(check):
    check(lambda x: (~x, abs(x), -x, jnp.sign(x), jnp.bitwise_count(x), lax.clz(x)), I)
    check(lambda x: (~x, -x, jnp.sign(x), abs(x), lax.population_count(x), lax.clz(x)), U)


def test_bool(check):
    check(lambda a, b: (a & b, a | b, a ^ b, ~a, jnp.logical_xor(a, b), jnp.logical_not(a)), B, ~B[::-1])


def test_powers(check):
    check(lambda x: (x**3, lax.integer_pow(x, 0), x**7), F, tol=1e-4)
    check(lambda x: (x**-3, x**0.5, jnp.power(x, x)), POS, tol=1e-4)
    check(lambda x, y: x**y, I % 7, J % 4)
    check(lambda x, y: lax.pow(x, y), F, J % 4, tol=1e-4)


def test_choices(check):
    check(lambda c, x, y: jnp.where(c, x, y), B, F, G)
    check(lambda c, x: jnp.where(c, x, 0.0), B, F)
    check(lambda c, x, y: lax.select_n(jnp.abs(c) % 3, x, y, x + y), I, F, G)
    check(lambda x: jnp.clip(x, -0.5, 0.5), F)
    check(lambda lo, x, hi: lax.clamp(lo, x, hi), np.float32(-0.1), F, np.float32(0.3))
    check(lambda x: jnp.select([x < 0, x > 1], [x * 2, x * 3], x), F)


# newer than jax 0.11
POLYNOMIAL = getattr(lax, "polynomial", lambda x, c: jnp.polyval(np.array(c[::-1], "f"), x))


def test_polynomial_and_total_order(check):
    check(lambda x: (jnp.polyval(np.array([1.0, 2, 3], "f"), x), POLYNOMIAL(x, [1.0, 5.0, 2.0])), F, tol=1e-4)
    check(
        lambda x, y: jnp.searchsorted(jnp.sort(x), y), np.concatenate([F[0], ODD[:5]]), np.concatenate([G[0], ODD[:5]])
    )


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float16",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
        "int4",
        "uint4",
    ],
)
def test_casts(check, dtype):
    low = 0 if dtype.startswith("u") else -7
    x = np.clip(F * 5, low, 7)
    check(lambda v: (v.astype(dtype), v.astype(dtype).astype(jnp.float32)), x)


def test_bitcasts(check):
    check(lambda x: (lax.bitcast_convert_type(x, jnp.uint32), lax.bitcast_convert_type(x, jnp.uint8)), F)
    check(lambda x: (lax.bitcast_convert_type(x, jnp.bfloat16), lax.bitcast_convert_type(x, jnp.float32)), F)
    check(lambda x: lax.bitcast_convert_type(x, jnp.float32), RNG.integers(0, 120, (5, 4)).astype("u1"))


@pytest.mark.parametrize("bits", [(8, 7), (5, 10), (8, 3), (4, 3), (5, 2)])
def test_reduce_precision(check, bits):
    x = np.concatenate([F[0] * 10 ** RNG.uniform(-9, 9, 7).astype("f"), ODD])
    check(lambda v: lax.reduce_precision(v, *bits), x, tol=0)


def test_rounding(check):
    x = np.array([0.5, 1.5, -0.5, -2.5, 0.2, 2.5], "f")
    check(
        lambda v: (lax.round(v, lax.RoundingMethod.AWAY_FROM_ZERO), lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN)), x
    )
    check(lambda v: (jnp.modf(v), jnp.frexp(v), jnp.round(v, 1)), x)


@pytest.mark.parametrize(
    "name",
    [
        "relu",
        "sigmoid",
        "softplus",
        "silu",
        "gelu",
        "elu",
        "leaky_relu",
        "log_sigmoid",
        "mish",
        "softmax",
        "log_softmax",
        "standardize",
        "glu",
    ],
)
def test_nn(check, name):
    check(getattr(jax.nn, name), F[:, :6], tol=1e-4)


def test_gelu_exact_and_attention(check):
    check(lambda x: jax.nn.gelu(x, approximate=False), F)
    q = RNG.standard_normal((2, 4, 2, 8)).astype("f")
    check(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), q)


def test_scalars_beside_tiles(check):
    check(lambda x: (x + x.sum(), x * 2, 1 - x, x / x.max(1, keepdims=True)), F, tol=1e-4)


def test_x64(check):
    with jax.enable_x64(True):
        x = F.astype("f8")
        check(lambda v: (jnp.exp(v), v.astype(jnp.float32), v.astype(jnp.int64), v.sum(), v @ v.T, jnp.sort(v)), x)
        check(lambda v: (v * v, v // 3, v.sum(), v @ v.T), I.astype("i8"))
