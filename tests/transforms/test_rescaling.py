"""Loops whose carries rescale each other: reverse mode saves none and is right; those that only look like that save."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ir, testing
from jtile.testing.evaluate import evaluated

T, D, B = 8, 4, 4  # queries and keys, features, and rows of a tile
SCALE = D**-0.5
f32 = jnp.float32


def attention(update, finish, *, start=0.0, top=(B, 1), scale=SCALE):
    """Attention of T rows: what a round does to (m, l, acc), and what is stored of them in the end."""

    @jt.kernel(out_type=lambda q, k, v: jt.like(q), grid=T // B)
    def kernel(q, k, v, o):
        i = jt.program_id(0)
        Q, K, V, O = (x.tiles(B, D) for x in (q, k, v, o))
        m, l, acc = jnp.full(top, -jnp.inf, f32), jnp.full(top, start, f32), jt.zeros((B, D), f32)
        for j in jt.range(T // B):
            s = jt.dot(Q[i, 0], K[j, 0].T) * scale
            m, l, acc = update(s, V[j, 0], m, l, acc)
        O[i, 0] = finish(m, l, acc)

    return kernel


def plain(s, v, m, l, acc):
    new = jnp.maximum(m, s.max(1, keepdims=True))
    p, c = jnp.exp(s - new), jnp.exp(m - new)
    return new, l * c + p.sum(1, keepdims=True), jt.dot(p, v, acc * c)


def of_vectors(s, v, m, l, acc):
    """As people write it who keep maxima and sums as vectors, and in base 2."""
    new = jnp.maximum(s.max(1), m)
    p, c = jnp.exp2(s - new[:, None]), jnp.exp2(m - new)
    return new, p.sum(1) + c * l, acc * c[:, None] + jt.dot(p, v)


def masked(s, v, m, l, acc):
    s = jnp.where(s > -0.5, s, -jnp.inf)
    return plain(s, v, m, l, acc)


def guarded(s, v, m, l, acc):
    """Rows of some tiles are masked as a whole: what would be no number is 0."""
    s = jnp.where(some(s), s, -jnp.inf)
    new = jnp.maximum(m, s.max(1, keepdims=True))
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    p, c = jnp.exp(s - safe), jnp.exp(m - safe)
    return new, l * c + p.sum(1, keepdims=True), jt.dot(p, v, acc * c)


def some(s):
    return (s > 0.4) | (s < -0.4)


def softmax(q, k, v, allowed=lambda s: True):
    s = q @ k.T * SCALE
    return jax.nn.softmax(jnp.where(allowed(s), s, -jnp.inf)) @ v


def log_sum(q, k, v):
    s = q @ k.T * SCALE
    return jnp.broadcast_to(jax.nn.logsumexp(s, axis=1, keepdims=True), (T, D))


ratio = lambda m, l, acc: acc / l
RESCALED = {
    "softmax": (attention(plain, ratio), softmax),
    "vectors in base 2": (
        attention(of_vectors, lambda m, l, acc: acc / l[:, None], top=(B,), scale=SCALE / np.log(2)), softmax,
    ),
    "masked": (attention(masked, ratio), lambda q, k, v: softmax(q, k, v, lambda s: s > -0.5)),
    "guarded": (
        attention(guarded, lambda m, l, acc: acc / jnp.where(l == 0.0, 1.0, l)), lambda q, k, v: softmax(q, k, v, some),
    ),
    "log of the sum": (attention(plain, lambda m, l, acc: jnp.broadcast_to(m + jnp.log(l), (B, D))), log_sum),
    "both, scaled": (
        attention(plain, lambda m, l, acc: acc / l * jnp.tanh(m + jnp.log(l))),
        lambda q, k, v: softmax(q, k, v) * jnp.tanh(log_sum(q, k, v)),
    ),
}  # fmt: skip


def largest(s, v, m, l, acc):
    """It scales as a sum would."""
    new, _, total = plain(s, v, m, l, acc)
    return new, jnp.maximum(l * jnp.exp(m - new), jnp.exp(s - new).max(1, keepdims=True)), total


def unscaled(q, k, v):
    s = q @ k.T * SCALE
    return jnp.exp(s - s.max(1, keepdims=True)) @ v


SAVED = {
    "depends on the maximum": (attention(plain, lambda m, l, acc: acc), unscaled),
    "no sum": (attention(largest, ratio), unscaled),
    "does not start from zero": (attention(plain, ratio, start=1.0), lambda q, k, v: softmax(q, k, v)),
}


def arrays(n=4):
    return [np.random.default_rng(k).standard_normal((T, D), np.float32) for k in range(n)]


def assert_gradients(kernel, reference):
    *args, ct = arrays()
    pulled = lambda f: evaluated(lambda *args: jax.vjp(f, *args[:3])[1](args[3]))(*args, ct)
    testing.assert_close(pulled(kernel), pulled(reference), tolerance=2e-5)


def saved(kernel):
    """What the programs of its reverse mode keep, and whether they add to memory that others add to."""
    ops = [op for piece in kernel.lower(*arrays(3)).vjp().pieces for op in piece.kernel.body.walk()]
    return [op.result.shape for op in ops if isinstance(op, ir.Alloc)], any(isinstance(op, ir.Atomic) for op in ops)


@pytest.mark.parametrize("name", RESCALED)
def test_no_carry_is_saved(name):
    kernel, reference = RESCALED[name]
    assert_gradients(kernel, reference)
    assert saved(kernel) == ([], False)


@pytest.mark.parametrize("name", SAVED)
def test_what_has_an_effect_is_saved(name):
    kernel, reference = SAVED[name]
    assert_gradients(kernel, reference)
    assert (T // B, B, 1) in saved(kernel)[0]


def test_of_a_loop_whose_rounds_nobody_can_bound():
    """Under a causal mask, whose rows end where they end, keys and values have kernels of their own."""

    @jt.kernel(out_type=lambda q, k, v, n: jt.like(q), grid=T // B)
    def causal(q, k, v, n, o):
        i = jt.program_id(0)
        Q, K, V, O = (x.tiles(B, D) for x in (q, k, v, o))
        rows = i * B + jt.arange(B)[:, None]
        m, l, acc = jnp.full((B, 1), -jnp.inf, f32), jt.zeros((B, 1), f32), jt.zeros((B, D), f32)
        for j in jt.range(jt.cdiv((i + 1) * B, B) + n[()] * 0):
            s = jnp.where(rows >= j * B + jt.arange(B)[None, :], jt.dot(Q[i, 0], K[j, 0].T) * SCALE, -jnp.inf)
            m, l, acc = plain(s, V[j, 0], m, l, acc)
        O[i, 0] = acc / l

    triangle = np.tri(T, dtype=bool)
    kernel = lambda q, k, v: causal(q, k, v, np.int32(0))
    assert_gradients(kernel, lambda q, k, v: softmax(q, k, v, lambda s: triangle))


def test_second_derivatives_and_a_batch():
    kernel, reference = RESCALED["softmax"]
    *args, ct = arrays()
    gradient = lambda f: jax.grad(lambda q: (f(q, *args[1:]) * ct).sum())
    curve = lambda f: jax.grad(lambda q: (gradient(f)(q) ** 2).sum())
    for of in (curve, lambda f: lambda q: jax.jvp(gradient(f), (q,), (ct,))[1]):
        testing.assert_close(evaluated(of(kernel))(args[0]), evaluated(of(reference))(args[0]), tolerance=1e-4)
    many = np.stack([args[0], ct])
    batch = lambda f: evaluated(jax.vmap(gradient(f)))(many)
    testing.assert_close(batch(kernel), batch(reference), tolerance=2e-5)
