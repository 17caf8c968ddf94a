"""Reverse mode of attention for Hopper, at the block level, by the roles of `hopper_backward_roles`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dropouts, gpu_tiles, hopper_tiles
from jtile.ops._shapes import tuned
from jtile.ops.attention_windows import LOG2_E, Window
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_backward_roles import KEYS, LEAST, Masks, program
from jtile.ops.online_softmax import EMPTY

SHARED = 2  # turns of programs on all multiprocessors; with fewer, heads that share keys are shared out
TURNS = 5  # of programs of two blocks of keys on all multiprocessors, at least


@jt.kernel(
    out_type=lambda o, g, lse, ct, *, n, **_: (
        *[jax.ShapeDtypeStruct((*lse.shape[:2], jt.cdiv(lse.shape[2], n) * n), jnp.float32) for _ in range(2)],
        jax.ShapeDtypeStruct(o.shape, jnp.float32),
    ),
    grid=lambda o, g, lse, ct, *, n, **_: (*lse.shape[:2], jt.cdiv(lse.shape[2], n)),
)
def attention_backward_start(o, g, lse, ct, s, dp, dq, *, n: int, unit: float, factor: float = 1.0):
    """The numbers that the sums of s and dp start from, [batch, heads, t rounded up to n], so that p = 2^(unit s) and
    ds = factor p dp; and dq = 0.

    o, g [batch, t, heads, d]; lse [batch, heads, t]; ct: its cotangent, or None. Queries behind t get p = 0.
    """
    # s_i = -lse_i / unit     dp_i = (log2(e) ct_i - sum_d g_id o_id) / factor
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    O, G = (x.tiles(None, n, None, o.shape[3])[b, i, h, 0].astype(jnp.float32) for x in (o, g))
    row = -(O * G).sum(1)
    top = jnp.where(i * n + jt.arange(n) < o.shape[1], lse.tiles(None, None, n)[b, h, i], EMPTY)
    s.tiles(None, None, n)[b, h, i] = top * (-1.0 / unit)
    row = row if ct is None else row + LOG2_E * ct.tiles(None, None, n)[b, h, i]
    dp.tiles(None, None, n)[b, h, i] = row if factor == 1 else row * (1.0 / factor)
    dq.tiles(None, n, None, o.shape[3])[b, i, h, 0] = jnp.zeros(O.shape, jnp.float32)


@jt.kernel(
    out_type=lambda q, k, v, *_, **__: (jax.ShapeDtypeStruct(q.shape, jnp.float32), jt.like(k), jt.like(v)),
    grid=lambda q, k, *_, several=1, **__: k.shape[0] * k.shape[2] * jt.cdiv(k.shape[1], 2 * KEYS * several),
    alias={"zeros": "dq"},
    sharding="b _ h n _, b _ h _, b _ h _, b _ h n _, b h n _, b h n _, b, b, b h n _, b _ h n _ "
    "-> b _ h n _, b _ h _, b _ h _",
)
def hopper_attention_backward(
    q, k, v, g, s0, dp0, lengths, offsets, seeds, zeros, dq, dk, dv,
    *, bq: int, scale: float, window: Window, counted: bool, dropout: float, softcap: float | None = None,
    several: int = 1,
):  # fmt: skip
    """A program: `several` times the keys `[j * 128, j * 128 + 128)` of one row and kv head, against all queries that
    see them.

    q, g [batch, t, kv heads, group, d]; k, v [batch, keys, kv heads, d]; s0, dp0 [batch, kv heads, group, t or more]
    and zeros as `attention_backward_start` gives them; lengths, offsets [batch], as in `flash_attention` if `counted`;
    seeds [batch, kv heads, group, 2], those of `dropouts.seeds` if something is dropped. With `softcap`, s0 are the
    negative logarithms of sums themselves. dq is still to be multiplied
    with the scale, and with the factor of the weights that are kept.
    """
    masks = Masks(window=window, counted=counted, softcap=softcap)
    options = {"bq": bq, "scale": scale, "masks": masks, "dropout": dropout, "several": several}
    program(q, k, v, g, s0, dp0, lengths, offsets, seeds, dq, dk, dv, **options)


def misfit(q, k, *_, softcap: float | None, scale: float, **__) -> str | None:
    """Why `gradients` cannot compute the gradients of this call, None where it can."""
    known = all(isinstance(n, int) for n in (*q.shape, *k.shape))
    return first_unmet(
        (known, "sizes are not known"),
        (32 < q.shape[3] <= 128, f"heads have {q.shape[3]} features, not 33 to 128"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"operands are {q.dtype.name}, not 16-bit floats"),
        (softcap is None or softcap >= LEAST, f"scores are capped at {softcap}"),
        (scale > 0, f"the scale is {scale}"),
    )


def gradients(
    q, k, v, o, lse, g, ct, lengths, offsets, seeds=None,
    *, scale: float, softcap: float | None, window: Window, dropout: float = 0.0,
):  # fmt: skip
    """(dq, dk, dv) for the cotangents g of o and ct of lse (or None); arguments as those of `attention_backward`."""
    run = of_rows(of_batch, scale=scale, softcap=softcap, window=window, dropout=dropout)
    return run(q, k, v, o, lse, g, ct, lengths, offsets, seeds)


@functools.lru_cache(maxsize=128)
def of_rows(compute: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that computes gradients of a batch of rows. Batches of vmap become rows: a tensor map has five axes,
    and all are in use."""

    @jax.custom_batching.custom_vmap
    def run(*args):
        return compute(*args, **options)

    @run.def_vmap
    def _(size: int, batched, *args):
        def fold(x, there):
            x = x if there else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        out = run(*jax.tree.map(fold, args, tuple(batched)))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True, True, True)

    return run


def _several(rows: int, t: int, keys: int, window: Window, counted: bool) -> int:
    """How many blocks of keys a program takes, one behind the other, of all `rows` of all heads of keys: two where some
    queries see each block, and programs remain for some turns of all multiprocessors. The keys of the second come while
    the gradients of the first leave."""
    blocks, at_once = jt.cdiv(keys, 2 * KEYS), gpu_tiles.processors()
    seen = t >= keys and (window[0] is None or window[0] >= 0) and window[1] in (None, 0)
    turns = lambda count: count * jt.cdiv(rows * blocks // count, at_once)
    many = rows * blocks >= 2 * TURNS * at_once and (window[1] is not None or turns(2) <= turns(1))
    return 2 if seen and many and not counted and blocks % 2 == 0 else 1


def shares(q, k, side: int = 2 * KEYS) -> int:
    """In how many parts the heads that share keys are taken, as if each part had keys of its own: programs of `side`
    keys are too few else. (16 heads that share one, 2 x 4096 positions, causal: 64 programs of 128 keys, and twice the
    time of cuDNN on an H200.)"""
    (batch, keys, groups), group = k.shape[:3], q.shape[2] // k.shape[2]
    programs, wanted = batch * groups * jt.cdiv(keys, side), SHARED * gpu_tiles.processors()
    enough = [n for n in range(1, group + 1) if group % n == 0 and programs * n >= wanted]
    return min(enough, default=group)


def in_shares(parts: int, compute: Callable[..., Any], q, k, v, *rest, **options):
    """The gradients that `compute` gives for heads that share keys in so many parts."""
    (batch, keys, groups), k, v = k.shape[:3], *(jnp.repeat(x, parts, axis=2) for x in (k, v))
    dq, *of_keys = compute(q, k, v, *rest, **options)
    whole = lambda x: x.reshape(batch, keys, groups, parts, -1).astype(jnp.float32).sum(3).astype(x.dtype)
    return dq, *map(whole, of_keys)


def operands(q, k, v, o, lse, g, ct, seeds, *, unit: float, dropout: float):
    """(q, k, v, g, s0, dp0, seeds, zeros) as the kernels take them, and the queries of a block. Heads are extended to
    the next power of two, since zeros add nothing; `unit`: see `attention_backward_start`."""
    (batch, t, heads, d), groups = q.shape, k.shape[2]
    whole = hopper_tiles.head(d)
    if d != whole:
        q, k, v, o, g = (jnp.pad(x, ((0, 0),) * 3 + ((0, whole - d),)) for x in (q, k, v, o, g))
    bq = 64 if whole == 128 else 128
    start = tuned(attention_backward_start, num_warps=8)
    s0, dp0, zeros = start(o, g, lse, ct, n=bq, unit=unit, factor=dropouts.factor(dropout))
    seeds = jnp.zeros((batch, heads, 2), jnp.uint32) if seeds is None else seeds
    of_group = lambda x: x.reshape(batch, t, groups, heads // groups, whole)
    s0, dp0, seeds = (x.reshape(batch, groups, heads // groups, -1) for x in (s0, dp0, seeds))
    return (of_group(q), k, v, of_group(g), s0, dp0, seeds, of_group(zeros)), bq


def finished(dq, dk, dv, q, *, scale: float, dropout: float):
    """The gradients of q [batch, t, heads, d], whose heads the kernels may have extended, of its keys and values."""
    (batch, t, heads, d), whole = q.shape, dk.shape[3]
    dq = (dq.reshape(batch, t, heads, whole) * (scale * dropouts.factor(dropout))).astype(q.dtype)
    return tuple(x if d == whole else x[..., :d] for x in (dq, dk, dv))


def of_batch(
    q, k, v, o, lse, g, ct, lengths, offsets, seeds=None,
    *, scale: float, softcap: float | None = None, window: Window, dropout: float = 0.0,
):  # fmt: skip
    """The result of `gradients` by `hopper_attention_backward`, without a rule for vmap."""
    (batch, t), (keys, groups) = q.shape[:2], k.shape[1:3]
    if (parts := shares(q, k)) > 1:
        rest = o, lse, g, ct, lengths, offsets, seeds
        options = {"scale": scale, "softcap": softcap, "window": window, "dropout": dropout}
        return in_shares(parts, of_batch, q, k, v, *rest, **options)
    unit = scale * LOG2_E if softcap is None else 1.0
    given, bq = operands(q, k, v, o, lse, g, ct, seeds, unit=unit, dropout=dropout)
    *args, seeds, zeros = given
    counted = lengths is not None or offsets is not None
    lengths = jnp.full((batch,), keys, jnp.int32) if lengths is None else lengths
    offsets = jnp.zeros((batch,), jnp.int32) if offsets is None else offsets
    several = _several(batch * groups, t, keys, window, counted)
    options = {"bq": bq, "scale": scale, "window": window, "counted": counted, "dropout": dropout, "several": several}
    options["softcap"] = softcap
    found = hopper_attention_backward(*args, lengths, offsets, seeds, zeros, **options)
    return finished(*found, q, scale=scale, dropout=dropout)
