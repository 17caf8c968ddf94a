"""New tokens of steps whose projection comes in parts, on their way to the cache: the kernel whose launch overlaps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.models import cache, sums
from jtile.ops.cache_appends import rope_append
from jtile.ops.hopper_append import hopper_append, shares_of

HEADS, KVS, D, SLOTS = 8, 4, 64, 9


def operands(tokens: int, heads: int = HEADS, kvs: int = KVS, slots: int = SLOTS, d: int = D):
    rng = np.random.default_rng(tokens)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    lengths = rng.integers(0, slots, tokens).astype(np.int32)
    caches = [jnp.asarray(draw(tokens, slots, kvs, d), jnp.bfloat16) for _ in range(2)]
    return draw(2, tokens, heads + 2 * kvs, d), draw(tokens, d // 2), draw(tokens, d // 2), lengths, *caches, (), None


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_it_gives_what_the_kernel_of_one_program_a_token_gives(shares):
    sizes = dict(heads=HEADS, kv_heads=KVS, dtype="bfloat16")
    found = hopper_append.interpret(*operands(5), shares=shares, seed=shares, **sizes)
    for a, b in zip(found, rope_append.interpret(*operands(5), **sizes), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_which_calls_it_takes():
    qkv, *_, keys, _, _, _ = operands(3)
    asked = lambda qkv=qkv, keys=keys, norms=(), table=None, kvs=KVS: shares_of(
        qkv, keys, norms, table, heads=HEADS, kv_heads=kvs
    )
    with jt.config(arch="sm_90", overlap=True):
        assert asked(kvs=8) == 8 and asked() == 4 and asked(kvs=2) == 2 and asked(kvs=1) == 1
        assert asked(qkv=qkv[0]) is None and asked(keys=keys.astype(jnp.float32)) is None
        assert asked(norms=(1, 2)) is None and asked(table=jnp.zeros((3, 1), jnp.int32)) is None
    assert asked() is None


def test_steps_whose_projection_comes_in_parts_take_it():
    qkv, cos, sin, lengths, *caches, _, _ = operands(5)
    slots = cache.Slots(cache.Entry(tuple(caches), (), False), jnp.asarray(lengths))
    append = lambda x: slots.append(sums.Parts(x, "bfloat16"), cos, sin, HEADS, KVS)[0]
    with jt.config(arch="sm_90", overlap=True):
        assert "hopper_append" in str(jax.make_jaxpr(append)(qkv.reshape(2, 5, -1)))
    with jt.config(arch="sm_90"):
        assert "rope_append" in str(jax.make_jaxpr(append)(qkv.reshape(2, 5, -1)))


@pytest.mark.gpu
def test_on_the_gpu():
    """In a chain of kernels that overlap: what the projection in front leaves late, and the same bits in every run."""
    sizes = dict(heads=32, kv_heads=8, dtype="bfloat16")
    qkv, *others = operands(64, 32, 8, 704, 128)

    def chain(qkv):
        for _ in range(3):
            qkv = jnp.sort(qkv, axis=-1) * 1.5  # takes a while
        return hopper_append(qkv, *others, shares=4, **sizes)

    with jt.config(overlap=True):
        run = jax.jit(chain)
        found = run(qkv)
        for _ in range(5):
            for a, b in zip(run(qkv), found, strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    late = np.sort(qkv, axis=-1) * np.float32(1.5**3)
    for a, b in zip(found, rope_append(late, *others, **sizes), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=0.01 * np.abs(b).max())
