"""Ring attention where engines copy between devices (`jt.exchange`): in each step attention by an ordinary kernel over
the keys of one device, while these travel on to the next one. Softmaxes are put together by their log-sum-exp.

Which keys a device's queries see is all or none of a step's, or in zigzag order one half, so that masks are those of
plain attention: devices differ in which branch they take, and in nothing else.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import sums_in
from jtile.ops.attention_backward import attention_backward
from jtile.ops.attention_windows import Window
from jtile.ops.dispatch import first_unmet
from jtile.ops.flash_attention import attention_and_sums

ROWS = 64  # queries of a tile of `merge`
FEW = 512  # tokens of a device that are too few for a meeting of the devices


@jt.kernel(
    out_type=lambda o, lse, *_, **__: (jt.like(o), jt.like(lse)),
    grid=lambda o, lse, more, *_, rows, **__: (o.shape[0], o.shape[2], jt.cdiv(more.shape[1], rows)),
    alias={"o": "o_new", "lse": "lse_new"},
)
def merge(o, lse, more, lse_more, o_new, lse_new, *, rows: int, first: int):
    """Attention over two sets of keys from that over each: o [batch, t, heads, d], lse [batch, heads, t], in powers of
    two; more, lse_more: those of the second set, for the queries from tile `first` on."""
    # l = log2(2^l1 + 2^l2)     o = 2^(l1 - l) o1 + 2^(l2 - l) o2
    # O, M, N: tiles of o, more and o_new; L1, L2, L: those of the logarithms; a, c: weights of both sets
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d = o.shape[3]
    O, M, N = (x.tiles(None, rows, None, d) for x in (o, more, o_new))
    L1, L2, L = (x.tiles(None, None, rows) for x in (lse, lse_more, lse_new))
    at = first + i
    l1, l2 = L1[b, h, at], L2[b, h, i]
    top = jnp.maximum(l1, l2)
    a, c = jnp.exp2(l1 - top), jnp.exp2(l2 - top)
    share = a / (a + c)
    both = O[b, at, h, 0].astype(lse.dtype) * share[:, None]
    N[b, at, h, 0] = (both + M[b, i, h, 0].astype(lse.dtype) * (1 - share)[:, None]).astype(o.dtype)
    L[b, h, at] = top + jnp.log2(a + c)


def _pass_on(x, axis: str):
    """Send arrays to the next device: (the arrays, the copies on their way). Copies begin before anything that uses the
    returned arrays runs."""
    begun = [jt.exchange(y, axis, to="next") for y in x]
    x, into = jax.lax.optimization_barrier((tuple(x), tuple(t.into for t in begun)))
    return x, [jt.Travelling(y, t.sent, axis) for y, t in zip(into, begun)]


def _seen(axis: str, s: int, causal: bool) -> jax.Array | None:
    """Whether the keys of step s stand before this device's queries, None where it does not matter."""
    return jax.lax.axis_index(axis) >= s if causal else None


def forward(q, k, v, *, axis: str, scale: float, softcap: float | None, window: Window, zigzag: bool):
    """o and lse of q [batch, t, heads, d], k, v [batch, t, kv heads, d], whole rows in each device's order."""
    n, t, causal = jt.axis_size(axis), q.shape[1], window[1] is not None
    of = functools.partial(attention_and_sums, scale=scale, softcap=softcap)
    whole = (None, None)
    add = lambda o, lse, part, first=0: merge(o, lse, *part, rows=rows, first=first // rows)
    rows = min(ROWS, jt.next_power_of_2(t) if not zigzag else t // 2)
    (k, v), coming = _pass_on((k, v), axis)
    o, lse = of(q, k, v, window=window)
    o = o if n == 2 else o.astype(lse.dtype)  # in the dtype of the sums, so that the result is rounded once
    for s in range(1, n):
        (k, v), (q, o, lse) = jt.exchanged(coming, after=(q, o, lse))
        if s + 1 < n:
            (k, v), coming = _pass_on((k, v), axis)

        def all_keys(q, k, v, o, lse):
            return add(o, lse, of(q, k, v, window=whole))

        def first_keys(q, k, v, o, lse):
            return add(o, lse, of(q, k[:, : t // 2], v[:, : t // 2], window=whole))

        def last_queries(q, k, v, o, lse):
            return add(o, lse, of(q[:, t // 2 :], k, v, window=whole), t // 2)

        o, lse = _branch(_seen(axis, s, causal), zigzag, all_keys, first_keys, last_queries, lambda *x: x[3:])(
            q, k, v, o, lse
        )
    return o.astype(q.dtype), lse


def _branch(seen, zigzag: bool, all_keys, first_keys, last_queries, nothing):
    """The branch that a device takes in a step, by whether it sees the step's keys; see `_seen`."""
    if seen is None:
        return all_keys
    here, there = (first_keys, last_queries) if zigzag else (all_keys, nothing)
    return lambda *x: jax.lax.cond(seen, here, there, *x)


def backward(q, k, v, o, lse, g, *, axis: str, scale: float, softcap: float | None, window: Window, zigzag: bool):
    """(dq, dk, dv) for the cotangent g of o. Gradients of keys travel along with them, and at last come home."""
    n, t, causal, wide = jt.axis_size(axis), q.shape[1], window[1] is not None, sums_in(q)
    half, dtype = t // 2, q.dtype if n == 2 else wide

    def of(q, k, v, o, lse, g, window=(None, None)):
        found = attention_backward(q, k, v, o, lse, g, None, None, None, scale=scale, softcap=softcap, window=window)
        return tuple(x.astype(dtype) for x in found)

    def all_keys(k, v):
        return of(q, k, v, o, lse, g)

    def first_keys(k, v):
        dq, dk, dv = of(q, k[:, :half], v[:, :half], o, lse, g)
        return dq, *(jnp.pad(x, ((0, 0), (0, t - half), (0, 0), (0, 0))) for x in (dk, dv))

    def last_queries(k, v):
        dq, dk, dv = of(q[:, half:], k, v, o[:, half:], lse[:, :, half:], g[:, half:])
        return jnp.pad(dq, ((0, 0), (half, 0), (0, 0), (0, 0))), dk, dv

    nothing = lambda k, v: tuple(jnp.zeros_like(x, dtype=dtype) for x in (q, k, v))
    (k, v), coming = _pass_on((k, v), axis)
    dq, dk, dv = of(q, k, v, o, lse, g, window)
    along: jt.Travelling | None = None
    for s in range(1, n):
        (k, v), (dq, dk, dv) = jt.exchanged(coming, after=(dq, dk, dv))
        if s + 1 < n:
            (k, v), coming = _pass_on((k, v), axis)
        more = _branch(_seen(axis, s, causal), zigzag, all_keys, first_keys, last_queries, nothing)(k, v)
        dq = _sum(dq, more[0])
        if along is None:
            more = more[1:]
        else:
            came, more = jt.exchanged(along, after=more[1:])
            more = tuple(map(_sum, came, more))
        _, along = _pass_on(more, axis)
    came, (dq, dk, dv) = jt.exchanged(along, after=(dq, dk, dv))
    return tuple(x.astype(q.dtype) for x in (dq, *map(_sum, came, (dk, dv))))


def _sum(a, b):
    wide = sums_in(a)
    return (a.astype(wide) + b.astype(wide)).astype(a.dtype)


def misfit(q, k, *_: Any, window: Window, zigzag: bool, **__: Any) -> str | None:
    """Why steps of plain attention do not suit this call, None where they do."""
    t, d = q.shape[1], q.shape[3]
    return first_unmet(
        (all(isinstance(x, int) for x in (*q.shape, *k.shape)), "sizes are not known"),
        (q.dtype.itemsize == 2, "operands have no two bytes"),
        (window[0] is None and window[1] in (None, 0), "there is a window"),
        (not zigzag or window[1] is not None, "in zigzag order all queries see all keys"),
        (t >= FEW and t % (2 * ROWS) == 0, f"{t} tokens a device are few, or no multiple of {2 * ROWS}"),
        (32 < d <= 256, f"heads have {d} features"),
    )
