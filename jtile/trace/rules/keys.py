"""Random numbers: keys are tiles of uint32 words, and every generator function expands to arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jtile import _compat, ir
from jtile.trace.lower import Keys, Lowering, rule
from jtile.trace.rules.calls import _takes_keys
from jtile.trace.rules.shapes import slice_


def join(c: Lowering, keys: Keys) -> ir.Value:
    """The words of keys [...] as one uint32 tile [..., words]."""
    wide = [c.b.reshape(w, (*w.type.shape, 1)) for w in keys.words]
    return wide[0] if len(wide) == 1 else c.add(ir.Concat(tuple(wide), wide[0].type.rank - 1))


def cut(c: Lowering, x: ir.Value) -> Keys:
    """Keys made from one tile of their words: the inverse of `join`."""
    *shape, words = x.type.shape
    zeros = [0] * len(shape)
    return Keys(tuple(c.b.reshape(slice_(c, x, [*zeros, k], [*shape, k + 1]), shape) for k in range(words)))


def _generator(c: Lowering, impl):
    if impl.tag != "fry":
        raise c.unsupported(f"keys of the generator {impl.name!r}; use jax.random.key(seed, impl='threefry2x32')")
    return impl


def _each(fn, ndim: int):
    """`fn` of one key's words, mapped over `ndim` leading axes of keys."""
    for _ in range(ndim):
        fn = jax.vmap(fn)
    return fn


@rule("random_wrap")
@_takes_keys
def _(c: Lowering, x, *, impl, **_):
    _generator(c, impl)
    return cut(c, x)


@rule("random_unwrap")
@_takes_keys
def _(c: Lowering, keys, **_):
    return join(c, keys)


@rule("random_seed")
def _(c: Lowering, seeds, *, impl, **_):
    _generator(c, impl)
    (out,) = c.call(_each(impl.seed, seeds.type.rank), seeds)
    return cut(c, out)


@rule("random_split")
@_takes_keys
def _(c: Lowering, keys, *, shape, **_):
    impl = _impl(c)
    (out,) = c.call(_each(lambda k: impl.split(k, tuple(shape)), keys.words[0].type.rank), join(c, keys))
    return cut(c, out)


@rule("random_fold_in")
@_takes_keys
def _(c: Lowering, keys, data, **_):
    impl = _impl(c)
    fold = lambda k, d: impl.fold_in(k, d.astype(np.uint32))
    (out,) = c.call(_each(fold, keys.words[0].type.rank), join(c, keys), data)
    return cut(c, out)


@rule("random_bits")
@_takes_keys
def _(c: Lowering, keys, *, bit_width, shape, **_):
    impl = _impl(c)
    (out,) = c.call(
        _each(lambda k: impl.random_bits(k, bit_width, tuple(shape)), keys.words[0].type.rank), join(c, keys)
    )
    return out


@rule("random_gamma")
@_takes_keys
def _(c: Lowering, keys, a, *, log_space):
    name = _impl(c).name
    gamma = lambda words, a: _compat.random_gamma(jax.random.wrap_key_data(words, impl=name), a, log_space)
    (out,) = c.call(gamma, join(c, keys), a)
    return out


@rule("random_clone")
@_takes_keys
def _(c: Lowering, keys, **_):
    return keys


def _impl(c: Lowering):
    return _generator(c, c.aval(0).dtype._impl)


ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@rule("threefry2x32")
def _(c: Lowering, k1, k2, x1, x2, **_):
    shape = c.out.shape
    return c.call(lambda *a: threefry2x32(*(jnp.broadcast_to(v, shape) for v in a)), k1, k2, x1, x2)


def threefry2x32(k1, k2, x1, x2):
    """Threefry-2x32 with 20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011), on uint32
    tiles."""
    u = np.uint32
    keys = (k1, k2, k1 ^ k2 ^ u(0x1BD11BDA))
    x1, x2 = x1 + keys[0], x2 + keys[1]
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            x1 = x1 + x2
            x2 = ((x2 << u(r)) | (x2 >> u(32 - r))) ^ x1
        x1, x2 = x1 + keys[(group + 1) % 3], x2 + keys[(group + 2) % 3] + u(group + 1)
    return x1, x2


@rule("rng_bit_generator", "rng_uniform")
def _(c: Lowering, *_, **__):
    raise c.unsupported("the hardware generator has no fixed bits; use jax.random with threefry keys")
