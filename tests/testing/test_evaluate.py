"""What NumPy makes of a traced function, against XLA's result of the same: every rule, and what has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from native_calls import CALLS

from jtile.testing import assert_close
from jtile.testing.evaluate import RULES, evaluated

RNG = np.random.default_rng(0)
X, Y = RNG.uniform(0.1, 0.9, (2, 3, 4)).astype(np.float32)
K, L = RNG.integers(-9, 9, (2, 3, 4), dtype=np.int32)
ODD = np.array([[0.0, -0.0, np.inf, -np.inf], [np.nan, 1e30, -1e30, 1.5], [-1.5, 2.5, -2.5, 0.5]], np.float32)
CLASSES = [np.float32, jnp.bfloat16, np.float16]


def one_by_one(x, y):
    unary = (
        jnp.sin, jnp.cos, jnp.tan, jnp.tanh, jnp.exp, jnp.exp2, jnp.log, jnp.log1p, jnp.expm1, jnp.sqrt, jnp.cbrt,
        lax.rsqrt, jnp.square, jnp.abs, jnp.sign, jnp.floor, jnp.ceil, jnp.isfinite, jax.nn.sigmoid, jnp.sinh,
        jnp.cosh, jnp.arcsinh, jnp.arctan, lax.erf, lax.erfc, lambda x: -x, lambda x: lax.integer_pow(x, -3),
        lambda x: jnp.round(x * 4) / 4, lambda x: lax.round(x * 4 - 2),
    )  # fmt: skip
    binary = (
        jnp.add,
        jnp.subtract,
        jnp.multiply,
        jnp.divide,
        jnp.maximum,
        jnp.minimum,
        jnp.arctan2,
        jnp.power,
        lax.rem,
    )
    compared = (jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal)
    return [f(x) for f in unary] + [f(x, y) for f in binary + compared] + [jnp.where(x < y, x, y), jnp.clip(x, y, 0.8)]


def integers(k, n):
    shifted = [lax.div(k, n), lax.rem(k, n), k & n, k | n, k ^ n, ~k, abs(k), jnp.sign(k), k // 3, k % 5]
    n %= 40  # more than there are bits, too
    shifted += [lax.shift_right_logical(k, n), lax.shift_right_arithmetic(k, n), k.astype(jnp.uint8) >> 3, k >> n]
    u, by = k.astype(jnp.uint8), n.astype(jnp.uint8)
    shifted += [lax.shift_left(u, by), lax.shift_right_arithmetic(u, by), lax.shift_right_logical(u, by)]
    shifted += [lax.cumsum(k, 1), lax.cumprod(k, 0), lax.cummin(k, 0), k.prod(1), lax.cumprod(u, 1)]
    return [*shifted, k * 2**30, lax.shift_left(k, n), lax.population_count(k), k.astype(bool), k.astype(jnp.int8)]


def moved(x, y):
    i, picked = jnp.int32(2), [x[jnp.array([2, 0])], x.at[jnp.array([1, 1])].add(2.0), jnp.sort(x, 0), jnp.argmax(x, 1)]
    return [
        *picked,
        x.T, x[::-1, 1:3], jnp.concatenate([x, y], 1), jnp.pad(x, 2), lax.pad(x, x[0, 0], [(-1, 2, 1), (1, -2, 0)]),
        lax.dynamic_slice(x, (i, i), (2, 2)), lax.dynamic_update_slice(x, y[:2, :2], (i, i)), jnp.split(x, 2, 1),
        lax.reshape(x, (4, 3), (1, 0)), x[:, None] + y[None], lax.broadcasted_iota(jnp.int32, (3, 5), 0), x[..., None],
    ]  # fmt: skip


def gathered(x, y):
    i, far = jnp.array([[2, 0], [1, 1]]), jnp.array([1, 7, -9, 0])
    windows = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(1,))
    clipped = lambda mode: lax.gather(x, far[:, None], windows, (2, 3), mode=mode)
    taken = [x[i], x[:, i], x[i, i], x[1], x[:, 2], x[jnp.zeros(0, jnp.int32)], jnp.take(x, far, 0, mode="fill")]
    taken += [jnp.take(x, far, 1, mode="clip"), clipped("clip"), clipped("fill"), clipped("promise_in_bounds")[:, :1]]
    taken += [
        jnp.take_along_axis(x, jnp.array([[2, 0, -1, 1]]), 0),
        jax.vmap(lambda row, k: row[k])(x, jnp.array([1, 3, 0])),
    ]
    added = [x.at[i].add(y[i]), x.at[far].add(y[0], mode="drop"), x.at[:, far].add(y, mode="drop")]
    added += [
        x.at[far, far].add(y[0], mode="clip"),
        x.at[i].set(y[i]),
        x.at[far[::2], 1].set(y[0, 0], mode="drop"),
        x.at[1].set(y[0, 0]),
        jax.vmap(lambda a, b, k: a.at[k].add(b))(x, y[:, :2], i[jnp.array([0, 1, 0])]),
    ]
    ordered = [
        jnp.sort(x, descending=True),
        jnp.argsort(x, 0),
        lax.sort((x // 0.3, y, x), num_keys=2),
        jnp.argmin(x),
        *jnp.unstack(x),
    ]
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), lax.bitcast_convert_type(x, jnp.uint8)
    return taken, added, ordered, bits, jnp.flip(x, 1), jnp.stack([x, y], 1)


def summed(x, y):
    products = [x @ y.T, jnp.einsum("ij,ik->jk", x, y), jnp.einsum("ij,ij->i", x, y), jnp.vdot(x, y)]
    largest = [x.max(0), x.min(1), jnp.cumsum(x, 0), lax.cumsum(y, 1, reverse=True), (x < y).any(0), (x < y).all(1)]
    running = [lax.cummax(x, 0), lax.cummin(y, 1, reverse=True), lax.cumprod(x, 1), lax.cumlogsumexp(y, 0), x.prod(0)]
    return [x.sum(), x.sum(0), x.mean(1), jnp.var(x), jax.nn.softmax(x), *products, *largest, x[:0].sum(0), *running]


def controlled(x, y):
    many = lax.scan(lambda c, row: (c * row + row, c.sum()), x[0], y)
    back = lax.scan(lambda c, row: (c * row + row, c), x[0], y, reverse=True)
    halve = lambda x: lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x)
    halved = halve(x), jax.vmap(halve)(y)
    chosen = [lax.switch(jnp.int32(k), [jnp.sin, jnp.cos], x) for k in (-1, 1, 5)]
    return many, back, halved, chosen, lax.fori_loop(0, 3, lambda k, c: c + k.astype(c.dtype), x), jax.nn.gelu(x)


def convolutions(x, y):
    """Strides, dilations, paddings below zero, groups of both kinds, orders of axes; one, two and three axes."""
    conv, image, row = lax.conv_general_dilated, jnp.stack([x, y])[None], jnp.concatenate([x, y])[None]
    w, orders = jnp.stack([image[0, :, :2, :3], y[None, :2, :3] * image[0, :, :2, 1:]]), ("NHWC", "HWIO", "HWNC")
    many = jnp.stack([x, y, x * y, x + y])[:, None]
    found = [
        conv(image, w, (1, 1), "SAME"),
        conv(image, w, (2, 1), [(2, 1), (0, 3)], lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        conv(image, w, (1, 2), [(-1, 2), (3, -2)], rhs_dilation=(2, 1)),
        conv(image.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), (1, 1), "VALID", dimension_numbers=orders),
        conv(row, row[0, :, None, :2], (1,), "SAME", feature_group_count=6),
        conv(many, many[:2, :, :2, :2], (1, 1), "VALID", batch_group_count=2),
        conv(image[None], image[None, :, :, :2, :2], (1, 1, 1), [(1, 0), (0, 0), (1, 1)]),
        conv(image, w, (1, 1), [(-1, -1), (0, 0)]),  # nothing, as of no images, and of no features
        conv(image[:0], w, (1, 1), "SAME"),
        conv(image[:, :0], w[:, :0], (1, 1), "SAME"),
    ]
    slopes = jax.grad(lambda x, w: (conv(x, w, (2, 1), "SAME") ** 2).sum(), (0, 1))(image, w)
    return found, slopes


FUNCTIONS = [one_by_one, moved, gathered, summed, controlled, convolutions]


@pytest.mark.parametrize("dtype", CLASSES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_numpy_gives_what_xla_gives(fn, dtype):
    x, y = X.astype(dtype), Y.astype(dtype)
    assert_close(evaluated(fn)(x, y), jax.jit(fn)(x, y))


def test_integers_wrap_and_divide_as_xla_does():
    k, n = np.append(K, [[7, -7, 2**31 - 1, -(2**31)]], 0).astype(np.int32), np.append(L, [[0, 0, -1, 3]], 0)
    assert_close(evaluated(integers)(k, n.astype(np.int32)), jax.jit(integers)(k, n.astype(np.int32)))


@pytest.mark.parametrize("to", ["int8", "uint8", "int32", "bool", "bfloat16", "float8_e4m3fn", "int4", "complex64"])
def test_casts_of_what_does_not_fit(to):
    fn = lambda x: lax.convert_element_type(x, to)
    assert_close(evaluated(fn)(ODD), jax.jit(fn)(ODD))


def test_values_that_are_no_number():
    fn = lambda x: [
        jnp.maximum(x, x.T[:3, :3].sum()),
        x.max(0),
        jnp.sign(x),
        jnp.clip(x, -1, 1),
        x == x,
        jnp.isfinite(x),
        jnp.round(x),
        lax.round(x),
        lax.cummax(x, 1),
        lax.cumprod(x[:, 2:], 0),
    ]
    assert_close(evaluated(fn)(ODD), jax.jit(fn)(ODD))


def test_derivatives_and_batches_are_those_of_jax():
    fn = jax.vmap(jax.grad(lambda x, y: (jax.nn.softmax(jnp.tanh(x) * y) ** 3).sum(), (0, 1)))
    assert_close(evaluated(fn)(X, Y), jax.jit(fn)(X, Y), tolerance=4e-6)


def test_random_keys_and_pytrees_pass():
    fn = lambda tree: {"u": jax.random.uniform(tree["key"], (3,)), "key": jax.random.split(tree["key"])[0]}
    got, want = evaluated(fn)({"key": jax.random.key(1)}), fn({"key": jax.random.key(1)})
    assert_close(got["u"], want["u"])
    assert got["key"] == want["key"]


def test_every_rule_is_taken_here():
    used = set()

    def names(jaxpr):
        for eqn in jaxpr.eqns:
            used.add(eqn.primitive.name)
            for p in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
                if hasattr(p, "eqns") or hasattr(p, "jaxpr"):
                    names(getattr(p, "jaxpr", p))

    for fn in FUNCTIONS:
        names(jax.make_jaxpr(fn)(X, Y).jaxpr)
    names(jax.make_jaxpr(integers)(K, L).jaxpr)
    assert set(RULES) - used <= {
        "copy", "copy_p", "core_call", "closed_call", "checkpoint", "remat2", "custom_vjp_call", "custom_jvp_call",
        "stop_gradient", "one_minus_square", "stack", "unstack",
        "add_any", "real", "imag", "conj", *CALLS,
    }, sorted(set(RULES) - used)  # fmt: skip
