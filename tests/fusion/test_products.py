"""Products of matrices with the elementwise functions behind them, as one kernel each."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_programs import agree

import jtile as jt
from jtile.fusion import costs
from jtile.fusion.bodies import kernel_of
from jtile.fusion.fused import evaluate
from jtile.fusion.groups import plan_of
from jtile.fusion.steps import program_of
from jtile.fusion.units import Product
from jtile.testing.evaluate import evaluated, walked

pytestmark = pytest.mark.usefixtures("any_size")

rng = np.random.default_rng(0)


def array(*shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


X, W, B, R = array(9, 12), array(12, 10), array(10), array(9, 10)


def linear(x, w, b):
    return jax.nn.gelu(x @ w + b)


def turned(x, w, b, r):
    return r + jnp.tanh(x @ w.T * b)


def gated(x, g, u):
    return jax.nn.silu(x @ g) * (x @ u)


def of_rows(x, w, s):
    return jnp.exp(jnp.einsum("bsk,kn->bsn", x, w) * s[..., None] - 1) * 2


def kept(x, w, b):
    y = x @ w
    return y, jnp.tanh(y + b)


def twice(x, g, u, d):
    return jax.nn.relu(gated(x, g, u) @ d) ** 2


def of_one(x):
    return jnp.sin(x @ x + x)


def longer(x, w, b):
    """The sums of a product are not rounded."""
    return jnp.tanh(jnp.matmul(x.astype("float16"), w.astype("float16"), preferred_element_type="float32") + b)


def dequantised(x, codes, scales):
    return x @ (codes.astype(x.dtype) * scales)


def in_blocks(x, codes, scales, b):
    """Weights of [12, 10] with a scale for each four terms."""
    return jax.nn.relu(x @ (codes.astype(x.dtype) * scales[:, None]).reshape(12, -1) + b)


def turned_blocks(x, codes, scales):
    return jnp.einsum("mk,nk->mn", x, (codes * scales[..., None]).reshape(-1, 12)) * 2


def centred(x, codes, zeros, scales):
    """Two of one computed left operand, the rows of which are those of two axes."""
    x = jnp.tanh(x) * 2
    weights = lambda c: (c.astype(jnp.float32) - zeros) * scales
    return jax.nn.silu(x @ weights(codes)) * (x @ weights(codes + 1))


def bytes_of(x, w, s):
    return jax.lax.dot(x, w, preferred_element_type="int32").astype("float32") * s


def scaled(x, w):
    return jnp.exp(x * 0.5) @ w


def norm(x, g):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def normed(x, g, w):
    return norm(x, g) @ w


def layer_normed(x, g, codes, scales, b):
    """Two products of a layer norm, the rows of which are those of two axes, with computed weights."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * g + g
    weights = lambda c: c.astype(jnp.float32) * scales
    return jax.nn.silu(x @ weights(codes) + b) * (x @ weights(codes + 1))


def softmaxed(x, w, b):
    return jnp.tanh(jax.nn.softmax(x.T, axis=0).T @ w.T + b)


CODES = jnp.asarray(rng.integers(-8, 8, (12, 10)), "int8")
NORMED = {
    normed: (X, array(12), W),
    layer_normed: (X.reshape(3, 3, 12), array(12), CODES, B, B),
    softmaxed: (X, W.T, B),
}
PROLOGUES = {
    dequantised: (X, CODES, B),
    in_blocks: (X, CODES.reshape(3, 4, 10), array(3, 10), B),
    turned_blocks: (X, CODES.reshape(10, 3, 4), array(10, 3)),
    centred: (X.reshape(3, 3, 12), CODES, array(12, 1), B),
    scaled: (X, W),
}
ON_CPUS = NORMED if "warps" not in jt.target().features else {}
PROGRAMS = {
    **PROLOGUES,
    **ON_CPUS,
    longer: (X, W, B),
    bytes_of: (CODES.T, CODES, B),
    linear: (X, W, B),
    turned: (X, W.T, B, R),
    gated: (X, W, W + 1),
    of_rows: (X[:8].reshape(2, 4, 12), W, array(2, 4)),
    kept: (X, W, B),
    twice: (X, W, W + 1, R.T),
    of_one: (X[:, :9],),
}


def products(plan):
    return [unit for unit in plan.units if isinstance(unit, Product)]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_programs(f):
    """By the CPU's kernel and by the interpreter; nothing but products is left, and what they read."""
    args = PROGRAMS[f]
    fused = jt.fuse(f)
    plan = fused.planned(args, {})[0]
    order = [u for u in plan.order if not (isinstance(u, int) and plan.program.nodes[u].free)]
    assert len(products(plan)) == len(order) == (2 if f is twice else 1)
    want = jax.tree.leaves(evaluated(f)(*args))
    inside = evaluate(plan, args, lambda unit, arrays: kernel_of(unit).interpret(arrays))
    for got in (inside, jax.tree.leaves(fused(*args))):
        for x, y in zip(got, want, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(x, y, 2e-5, 2e-5)


def test_a_norm_stays_a_kernel_where_it_is_read_twice_or_has_many_rows(monkeypatch):
    """And on GPUs."""
    more = lambda x, g, w: (normed(x, g, w), normed(x, g, w + 1))
    has = lambda f, *args: any(s.whole for unit in products(jt.fuse(f).planned(args, {})[0]) for s in unit.sources)
    of = lambda m, k, n, t: [jax.ShapeDtypeStruct(shape, t) for shape in ((m, k), (k,), (k, n))]
    shared = lambda x, g, w: (h := norm(x, g), h @ w)
    squared = lambda x, g: (h := norm(x, g)) @ h
    with jt.config(arch=None):
        if "warps" not in jt.target().features:
            assert has(normed, X, array(12), W) and has(more, X, array(12), W)
            assert not has(shared, X, array(12), W) and not has(squared, array(12, 12), array(12))
            monkeypatch.setattr(costs, "PRODUCTS_ANYWHERE", False)
            assert has(normed, *of(4, 2048, 512, "float32"))
            for m, k, t in ((32, 512, "float32"), (4, 8192, "float32"), (4, 512, "float16")):
                assert not has(normed, *of(m, k, 512, t))
    with jt.config(arch="sm_90"):
        assert not has(normed, *of(4, 2048, 512, "bfloat16"))


@pytest.mark.usefixtures("by_numpy")
def test_gradients_and_vmaps():
    loss = lambda f: lambda *args: (f(*args) ** 2).sum()
    fused = jt.fuse(linear)
    slopes = [evaluated(jax.grad(loss(f), (0, 1, 2)))(X, W, B) for f in (fused, linear)]
    whole = jt.fuse(jax.grad(loss(linear), (0, 1, 2)))
    for got in (slopes[0], whole(X, W, B)):
        for x, y in zip(got, slopes[1], strict=True):
            np.testing.assert_allclose(x, y, 2e-4, 2e-4)
    xs, ws = array(3, 9, 12), array(3, 12, 10)
    for axes, args in (((0, None, None), (xs, W, B)), ((0, 0, None), (xs, ws, B))):
        got, want = (evaluated(jax.vmap(f, axes))(*args) for f in (fused, linear))
        np.testing.assert_allclose(got, want, 2e-5, 2e-5)


def test_what_float16_has_no_room_for():
    """A product above 65504 is inf before the functions behind it, as in XLA's program; so is what a function gives."""
    x, w, b = jnp.full((8, 64), 64, "float16"), jnp.full((64, 9), 64, "float16"), jnp.full(9, 0.001, "float16")
    for f in (lambda x, w, b: jnp.tanh(x @ w * b) * b, lambda x, w, b: (jnp.exp(x[:, :2] @ w[:2] * b) * b - 1) * b):
        got, want = jt.fuse(f)(x, w, b), jax.jit(f)(x, w, b)
        assert len(products(jt.fuse(f).planned((x, w, b), {})[0])) == 1
        np.testing.assert_array_equal(got, want)
    assert np.isinf(jt.fuse(lambda x, w, b: jnp.abs(x @ w * b) * b)(x, w, b)).all()


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, b: jnp.tanh(x @ w).sum(0),
        lambda x, w, b: jax.nn.softmax(x @ w),
        lambda x, w, b: jnp.tanh(x @ w).T,
        lambda x, w, b: jnp.tanh(x.T @ R),
        lambda x, w, b: jnp.tanh(jax.lax.dot(x, w, precision="F32_F32_F32")),
        lambda x, w, b: jnp.einsum("bk,bkn->bn", x[:3], jnp.stack([w] * 3)) + 1,
        lambda x, w, b: jnp.sin(x.reshape(3, 3, 12) @ w + jnp.arange(3.0)[:, None, None]),
    ],
    ids=["sums", "softmax", "transposed", "sums_of_rows", "precise", "batched", "numbers"],
)
def test_what_stays_with_xla(f):
    fused = jt.fuse(f)
    assert not products(fused.planned((X, W, B), {})[0])
    np.testing.assert_allclose(fused(X, W, B), f(X, W, B), 2e-5, 2e-5)


def test_where_they_are_worth_it(monkeypatch):
    """On CPUs whose products of bfloat16 have instructions; on GPUs with warpgroup products from some size on. Not
    where XLA may share an array out among devices."""
    monkeypatch.setattr(costs.gpu_tiles, "on_one_device", lambda: True)
    monkeypatch.setattr(costs, "PRODUCTS_ANYWHERE", False)
    monkeypatch.setattr(costs, "PRODUCTS_ON_GPUS", True)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    call = lambda m, n, k, dtype: (of(dtype, m, k), of(dtype, k, n), of(dtype, n))
    found = lambda *args: len(products(jt.fuse(linear).planned(call(*args), {})[0]))
    with jt.config(arch="sm_90"):
        sizes = [(4096, 4096, 4096), (4096, 4096, 128), (1024, 1024, 1024), (4096, 4100, 4096)]
        assert [found(*size, "bfloat16") for size in sizes] == [1, 0, 0, 0]
        assert not found(4096, 4096, 4096, "float32")
        rest = of("bfloat16", 4096, 4096)
        residual = lambda x, w, b, r: r + linear(x, w, b)
        assert not products(jt.fuse(residual).planned((*call(4096, 4096, 4096, "bfloat16"), rest), {})[0])
    with jt.config(arch="sm_80"):
        assert not found(4096, 4096, 4096, "bfloat16")
    on_cpu = "warps" not in jt.target().features
    has = on_cpu and any(kind == "bfloat16" for *_, kind in jt.target().matrix_shapes)
    assert found(64, 64, 64, "bfloat16") == has
    assert not found(64, 64, 64, "float32")
    monkeypatch.setattr(costs.gpu_tiles, "on_one_device", lambda: False)
    assert not found(64, 64, 64, "bfloat16")


def test_few_rows_are_worth_it_on_cpus(monkeypatch):
    """With functions behind them, of weights that lie transposed, and of those that are computed from fewer bytes."""
    monkeypatch.setattr(costs.gpu_tiles, "on_one_device", lambda: True)
    monkeypatch.setattr(costs, "PRODUCTS_ANYWHERE", False)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    made = lambda f, *args: len(products(jt.fuse(f).planned(args, {})[0]))
    weights = lambda dtype: of(dtype, 512, 512)
    with jax.enable_x64(True):
        few = {
            (m, d): made(linear, of(d, m, 512), weights(d), of(d, 512))
            for d in ("float32", "float64")
            for m in (4, 8, 9)
        }
    over = [made(lambda x, w: x @ w.T, of("float32", m, 512), weights("float32")) for m in (1, 2, 256, 257)]
    read = [made(dequantised, of("float32", m, 512), weights("int8"), of("float32", 512)) for m in (2, 256, 257)]
    cast = made(lambda x, w: x @ w.astype(x.dtype), of("bfloat16", 9, 512), weights("float32"))
    on_cpu = int("warps" not in jt.target().features)
    whole = made(bytes_of, of("int8", 64, 512), weights("int8"), of("float32", 512))
    assert whole == (on_cpu and any(kind == "int8" for *_, kind in jt.target().matrix_shapes))
    assert [*few.values()] == [on_cpu, on_cpu, 0, on_cpu, 0, 0]
    assert (over, read, cast) == ([0, on_cpu, on_cpu, 0], [on_cpu, on_cpu, 0], 0)


def drawn(seed):
    """A function of x [m, k], two matrices and some arrays that broadcast against their products; its arguments."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    m, n, k = (draw.randint(1, 9) for _ in "mnk")
    dtype = draw.choice(["float32", "float32", "bfloat16", "float16"])
    flip, lead = draw.random() < 0.4, draw.random() < 0.3
    shape = lambda *s: np.asarray(np.clip(rng.standard_normal(s), -3, 3), jnp.dtype(dtype))
    x = shape(*((2, m) if lead else (m,)), k)
    ws = [shape(*((n, k) if flip else (k, n))) for _ in range(draw.randint(1, 2))]
    sides = (*x.shape[:-1], n)
    extras = [shape(*(s if draw.random() < 0.6 else 1 for s in sides[draw.randint(0, 1) :])) for _ in range(2)]

    def f(x, ws, extras):
        draw = random.Random(seed + 1)
        values = [x @ (w.T if flip else w) for w in ws]
        out = [*values] if draw.random() < 0.2 else []
        values += extras
        for _ in range(draw.randint(1, 6)):
            a, b = draw.choice(values), draw.choice(values)
            one = draw.choice([jnp.tanh, jnp.sin, jax.nn.sigmoid, jnp.abs, lambda v: v * 0.5 + 1])
            both = draw.choice([jnp.add, jnp.subtract, jnp.maximum, lambda p, q: p * jnp.tanh(q)])
            values.append(one(a) if draw.random() < 0.5 else both(a, b))
        return [*out, *values[-draw.randint(1, 2) :]]

    return f, (x, ws, extras)


@pytest.mark.usefixtures("by_numpy")
def test_random_programs():
    """Eighty by the interpreter against NumPy, a step at a time, and eight of them by the CPU's kernels, too."""
    made = 0
    some = []
    for seed in range(80):
        f, args = drawn(seed)
        arrays = jax.tree.leaves(args)
        closed = jax.make_jaxpr(f)(*args)
        plan = plan_of(program_of(closed))
        made += len(products(plan))
        want = walked(closed, arrays)
        agree(seed, closed, evaluate(plan, arrays, lambda unit, xs: kernel_of(unit).interpret(xs)), want)
        if seed % 10 == 0:
            some.append((f, args, closed, want))
    ours = evaluated(lambda all: [jt.fuse(f)(*args) for (f, *_), args in zip(some, all)])(
        [args for _, args, *_ in some]
    )
    for seed, ((_, _, closed, want), got) in enumerate(zip(some, ours, strict=True)):
        agree(10 * seed, closed, jax.tree.leaves(got), want)
    assert made > 30


def test_what_cpus_gain_is_not_asked_of_npus(monkeypatch):
    """Products of few rows, transposed or computed weights were timed on CPUs, and are XLA's on an NPU."""
    monkeypatch.setattr(costs, "PRODUCTS_ANYWHERE", False)
    f32, rows = np.dtype("float32"), {"gates": 1, "transposed": True}
    worth = lambda: (costs.prologue_worth(4, 4096, 512, f32, 1), costs.product_worth(4, 4096, 512, f32, [], **rows))
    with jt.config(arch="910b1"):
        assert worth() == (False, False)
    if jax.default_backend() == "cpu" and jax.device_count() == 1:
        assert worth() == (True, True)
