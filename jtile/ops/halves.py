"""Numbers of 8 bits as float16, and what is multiplied with them: a GPU of NVIDIA makes two of them by one instruction,
where two of bfloat16 take five. float16 has few exponents, so that powers of two bring the other operand to where its
digits are kept; they come back in float32. Values of a key count with all digits if they are at least 2 ** -28 of the
largest ones of the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt

_EXPONENT, _ONE_TWICE = 0x7F800000, 254 << 23  # the bits of an exponent; what those of x and 1 / x add up to
_LEAST, _MOST = 2.0**-100, 2.0**100
ROOM = 2.0**14  # half of what float16 holds, as its largest power of two


def power(x):
    """The largest power of two that is at most x, a scalar float32 of at least 0; between 2 ** -100 and 2 ** 100."""
    bits = jax.lax.bitcast_convert_type(jnp.clip(x, jnp.float32(_LEAST), jnp.float32(_MOST)), jnp.int32)
    return jax.lax.bitcast_convert_type(bits & jnp.int32(_EXPONENT), jnp.float32)


def inverse(x):
    """1 / x for what `power` gives."""
    bits = jnp.int32(_ONE_TWICE) - jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def halves(x):
    """(a tile x as float16, times a power of two; the float32 that it is to be multiplied with again). Numbers keep
    their digits down to 2 ** -28 of the largest one."""
    x = x.astype(jnp.float32)
    top = power(jnp.max(jnp.abs(x)))
    return (x * (inverse(top) * jnp.float32(ROOM))).astype(jnp.float16), top * jnp.float32(1 / ROOM)


def online(s, v, m, l, acc, top, unit):
    """`online_softmax.online` with values v float16 [bk, d] times unit float32 [bk]: acc is that of `top`, a power of
    two, the largest so far of `power(unit)`. Returns m, l, acc and top; `summed` is what acc stands for."""
    new = jnp.maximum(top, power(jnp.max(jnp.abs(unit))))
    back = inverse(new)
    highest = jnp.maximum(m, s.max(1))
    p = jnp.exp2(s - highest[:, None])
    fade = jnp.exp2(m - highest)
    weights = (p * (unit * (back * jnp.float32(ROOM)))[None, :]).astype(jnp.float16)
    return highest, l * fade + p.sum(1), jt.dot(weights, v, acc * (fade * (top * back))[:, None]), new


def first():
    """The first `top` of `online`."""
    return jnp.float32(_LEAST)


def summed(acc, top):
    """The sums that acc of `online` stands for."""
    return acc * (top * jnp.float32(1 / ROOM))
