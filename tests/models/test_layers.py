"""The decoder's own kernels and its choice of kernels by storage, against jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ops
from jtile.models import kernels, layers, programs
from jtile.ops import QuantizedTensor, gpu_tiles

pytestmark = pytest.mark.usefixtures("by_numpy")


SPLIT = dict(bt=16, bh=1)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def rotated(x, cos, sin):
    """x [..., heads, head_dim], cos and sin [..., half]."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


@pytest.mark.parametrize(("batch", "length", "heads", "kv_heads", "head_dim"), [(2, 37, 9, 3, 64), (1, 16, 4, 2, 16)])
def test_rope_split(batch, length, heads, kv_heads, head_dim):
    qkv = normal(batch, length, heads + 2 * kv_heads, head_dim)
    cos, sin = normal(length, head_dim // 2, seed=1), normal(length, head_dim // 2, seed=2)
    q, k, v = jax.jit(lambda *a: kernels.rope_split(*a, (), heads=heads, kv_heads=kv_heads, **SPLIT))(qkv, cos, sin)
    expected = rotated(qkv, jnp.stack([cos] * batch), jnp.stack([sin] * batch))
    np.testing.assert_allclose(q, expected[:, :, :heads], atol=2e-6)
    np.testing.assert_allclose(k, expected[:, :, heads : heads + kv_heads], atol=2e-6)
    np.testing.assert_array_equal(v, qkv[:, :, heads + kv_heads :])


def weighted(results, seed=7):
    """A number that depends on every element of the results."""
    return sum((x * normal(*x.shape, seed=seed + k)).sum() for k, x in enumerate(results))


def assert_gradients(kernel, reference, arrays):
    got, expected = (
        jax.jit(jax.grad(lambda *xs, f=f: weighted(f(*xs)), range(len(arrays))))(*arrays) for f in (kernel, reference)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_gradients_of_rope_split():
    heads, kv_heads, length = 4, 2, 21  # the last tile of positions overhangs
    arrays = normal(2, length, 8, 16), normal(length, 8, seed=1), normal(length, 8, seed=2)

    def reference(qkv, cos, sin):
        turned = rotated(qkv, jnp.stack([cos] * 2), jnp.stack([sin] * 2))
        return turned[:, :, :heads], turned[:, :, heads:6], qkv[:, :, 6:]

    assert_gradients(lambda *a: kernels.rope_split(*a, (), heads=heads, kv_heads=kv_heads, **SPLIT), reference, arrays)


def normalised(qkv, norms, heads, kv_heads, eps):
    """qkv [..., heads + 2 kv_heads, head_dim] with each head's queries and keys behind their RMS norm."""
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=-2)
    unit = lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)
    weights = [w.reshape((1,) * (qkv.ndim - 1) + (-1,)) for w in norms]
    return jnp.concatenate([unit(q) * weights[0], unit(k) * weights[1], v], axis=-2)


@pytest.mark.parametrize("head_dim", [16, 24])
def test_rope_split_with_norms_of_heads_and_its_gradients(head_dim):
    sizes, half, eps = dict(heads=4, kv_heads=2), head_dim // 2, 0.1
    arrays = normal(2, 21, 8, head_dim), normal(21, half, seed=1), normal(21, half, seed=2)
    norms = normal(head_dim, seed=3), normal(head_dim, seed=4)

    def kernel(qkv, cos, sin, *norms):
        return kernels.rope_split(qkv, cos, sin, norms, eps=eps, **sizes, **SPLIT)

    def reference(qkv, cos, sin, *norms):
        x = normalised(qkv, norms, eps=eps, **sizes)
        turned = rotated(x, jnp.stack([cos] * 2), jnp.stack([sin] * 2))
        return turned[:, :, :4], turned[:, :, 4:6], x[:, :, 6:]

    for a, b in zip(jax.jit(kernel)(*arrays, *norms), reference(*arrays, *norms), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)
    assert_gradients(kernel, reference, (*arrays, *norms))


@pytest.mark.parametrize("heads", [32, 96])
def test_models_of_many_heads_fit_a_block_of_a_gpu(heads):
    """16 positions of 32 heads of 128 would take more shared memory than there is."""
    sizes, float32 = dict(heads=heads, kv_heads=8), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    arrays, norms = (float32(1, 64, heads + 16, 128), float32(64, 64), float32(64, 64)), (float32(128), float32(128))
    with jt.config(arch="sm_90"):
        tiles = kernels.tiles_of_split(heads, 8, 128)
    assert kernels.rope_split.lower(*arrays, norms, eps=1e-6, **tiles, **sizes, target="cuda:sm_90").image
    qkv = normal(1, 3, (heads + 16) * 128)
    q, k, v = layers.split_heads(qkv, jnp.ones((3, 64)), jnp.zeros((3, 64)), **sizes)  # a turn by nothing
    np.testing.assert_array_equal(jnp.concatenate([q, k, v], axis=2).reshape(1, 3, -1), qkv)


@pytest.fixture
def step():
    """The arguments of rope_append for three rows of different lengths."""
    heads, kv_heads, head_dim, slots = 4, 2, 16, 20
    arrays = (normal(3, heads + 2 * kv_heads, head_dim), normal(3, head_dim // 2, seed=1), normal(3, 8, seed=2))
    lengths = jnp.array([0, 7, slots - 1], jnp.int32)
    caches = normal(3, slots, kv_heads, head_dim, seed=3), normal(3, slots, kv_heads, head_dim, seed=4)
    return (*arrays, lengths, *caches), dict(heads=heads, kv_heads=kv_heads)


def test_rope_append_writes_one_slot_of_each_row(step):
    (qkv, cos, sin, lengths, keys, values), sizes = step
    q, new_keys, new_values = jax.jit(lambda *a: kernels.rope_append(*a, (), None, **sizes))(*step[0])
    expected, rows = rotated(qkv, cos, sin), jnp.arange(3)
    np.testing.assert_allclose(q, expected[:, :4], atol=2e-6)
    np.testing.assert_allclose(new_keys, keys.at[rows, lengths].set(expected[:, 4:6]), atol=2e-6)
    np.testing.assert_array_equal(new_values, values.at[rows, lengths].set(qkv[:, 6:]))


def test_gradients_of_rope_append(step):
    """A slot that is written anew passes nothing to the cache before."""
    (qkv, cos, sin, lengths, keys, values), sizes = step

    def reference(qkv, cos, sin, keys, values):
        turned, rows = rotated(qkv, cos, sin), jnp.arange(3)
        caches = keys.at[rows, lengths].set(turned[:, 4:6]), values.at[rows, lengths].set(qkv[:, 6:])
        return turned[:, :4], *caches

    kernel = lambda q, c, s, k, v: kernels.rope_append(q, c, s, lengths, k, v, (), None, **sizes)
    assert_gradients(kernel, reference, (qkv, cos, sin, keys, values))


def test_rope_append_with_norms_of_heads(step):
    (qkv, cos, sin, lengths, keys, values), sizes = step
    norms, rows = (normal(16, seed=5), normal(16, seed=6)), jnp.arange(3)
    q, new_keys, new_values = jax.jit(lambda *a: kernels.rope_append(*a, norms, None, eps=0.1, **sizes))(*step[0])
    expected = rotated(normalised(qkv, norms, eps=0.1, **sizes), cos, sin)
    np.testing.assert_allclose(q, expected[:, :4], atol=5e-6)
    np.testing.assert_allclose(new_keys, keys.at[rows, lengths].set(expected[:, 4:6]), atol=5e-6)
    np.testing.assert_array_equal(new_values, values.at[rows, lengths].set(qkv[:, 6:]))
    interpreted = kernels.rope_append.interpret(*step[0], norms, None, eps=0.1, **sizes)
    for a, b in zip((q, new_keys, new_values), interpreted, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_rope_append_means_the_same_in_the_interpreter(step):
    arrays, sizes = step
    native = kernels.rope_append(*arrays, (), None, **sizes)
    for a, b in zip(native, kernels.rope_append.interpret(*arrays, (), None, **sizes), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_the_cache_is_updated_in_place(step):
    arrays, sizes = step

    def loop(qkv, cos, sin, lengths, keys, values):
        def body(carry):
            i, keys, values, total = carry
            q, keys, values = kernels.rope_append(qkv, cos, sin, lengths, keys, values, (), None, **sizes)
            return i + 1, keys, values, total + q.sum()

        return jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, keys, values, 0.0))

    compiled = jax.jit(loop, donate_argnums=(4, 5)).lower(*arrays).compile()
    copies = [
        line for line in compiled.as_text().splitlines() if " copy(" in line and "3,20,2,16" in line.split(" copy(")[0]
    ]
    assert not copies


STORAGES = ["float32", "bfloat16", "float16", "int8", "q8_0", "q4_0", "q4_1"]


def stored(weight, storage):
    """(the weight as it is stored, its values in float32)."""
    if storage in ("float32", "bfloat16", "float16"):
        dense = weight.astype(storage)
        return dense, dense.astype(jnp.float32)
    quantised = QuantizedTensor.quantize(weight, storage)
    return quantised, quantised.dequantize()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_linear(storage, rows):
    weight, values = stored(normal(48, 64), storage)
    x = normal(rows, 64, seed=1)
    np.testing.assert_allclose(layers.linear(x, weight), jnp.matmul(x, values.T, precision="highest"), atol=2e-5)


def test_linear_of_parts_that_are_stored_differently():
    parts, values = zip(
        *(stored(normal(32, 64, seed=i), kind) for i, kind in enumerate(("q4_1", "q8_0", "float32"))), strict=True
    )
    x = normal(2, 64, seed=5)
    expected = jnp.matmul(x, jnp.concatenate(values).T, precision="highest")
    np.testing.assert_allclose(layers.linear(x, tuple(parts)), expected, atol=2e-5)


@pytest.mark.parametrize("storages", [(s, s) for s in STORAGES] + [("q4_0", "q8_0"), ("q8_0", "float32")])
@pytest.mark.parametrize("rows", [1, 40])
def test_gated_mlp(storages, rows):
    gate, G = stored(normal(96, 64) * 0.1, storages[0])
    up, U = stored(normal(96, 64, seed=1) * 0.1, storages[1])
    down, D = stored(normal(64, 96, seed=2) * 0.1, storages[0])
    x = normal(rows, 64, seed=3)
    hidden = jax.nn.silu(jnp.matmul(x, G.T, precision="highest")) * jnp.matmul(x, U.T, precision="highest")
    expected = jnp.matmul(hidden, D.T, precision="highest")
    np.testing.assert_allclose(layers.gated_mlp(x, gate, up, down), expected, atol=2e-5)


def test_products_overlap_where_their_weights_are_operands(monkeypatch):
    """In the loop that makes tokens, unless it is forbidden; never where the weight is rounded in front of the product,
    whose copy may still be written."""
    seen = []
    monkeypatch.setattr(ops, "matmul", lambda x, w, **_: seen.append(gpu_tiles.overlaps()))
    x, weights = jnp.ones((1, 8), jnp.bfloat16), [jnp.ones((4, 8), dtype) for dtype in ("bfloat16", "float32")]
    for forbidden in (None, False):
        with jt.config(overlap=forbidden):
            layers.linear(x, weights[0])
            with programs.overlapping(1):
                for w in weights:
                    layers.linear(x, w)
            with programs.overlapping(64):  # which no kernel reads early
                layers.linear(x, weights[0])
    assert seen == [False, True, False, False, False, False, False, False]
