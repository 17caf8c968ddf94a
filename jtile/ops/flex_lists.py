"""Attention with functions for scores and masks by lists of blocks: of the keys that a tile of queries sees, those that
all of its queries see come first, without a mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dropouts
from jtile.ops._shapes import sums_in
from jtile.ops.attention_windows import LOG2_E, Window, lacking, scores
from jtile.ops.online_softmax import NOTHING, log_sums, normalised, online

NONE, SOME, ALL = 0, 1, 2  # what the queries of a tile see of a block of keys
BOTH = 1 << 16  # more than there are blocks
FEW = 8  # rows


def seen(b, h, i, j, extras, *, mask, window: Window, s: int, hangs: bool = True):
    """bool [bq, bk]: which keys j [1, bk] the queries i [bq, 1] see; [bk, bq] for j [bk, 1] and i [1, bq]. `hangs`:
    whether j may be behind the s keys."""
    left, right = window
    parts = [j < s] if hangs else []
    parts += [] if right is None else [j <= i + right]
    parts += [] if left is None else [j >= i - left]
    parts += [] if mask is None else [mask(b, h, i, j, *extras)]
    shape = jnp.broadcast_shapes(i.shape, j.shape)
    return jnp.broadcast_to(functools.reduce(lambda x, y: x & y, parts), shape) if parts else jnp.ones(shape, bool)


def _tiles(extras, *, by: tuple[bool, bool], sizes: tuple[int, int, int, int], bq: int, bk: int, **_):
    """The batch rows and heads that have lists of their own, the tiles of queries, and blocks of keys."""
    batch, heads, t, s = sizes
    return batch if by[0] else 1, heads if by[1] else 1, jt.cdiv(t, bq), jt.cdiv(s, bk)


def _lists(*args, chunk: int = 4, **meta):
    del chunk
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    tiles = _tiles(*args, **meta)
    return of(*tiles), of(*tiles), of(*tiles[:3], 2), of(*tiles[:3], 2)


@jt.kernel(
    out_type=_lists,
    grid=lambda *x, chunk=4, **meta: (*_tiles(*x, **meta)[:3], jt.cdiv(_tiles(*x, **meta)[3], chunk)),
)
def mask_lists(
    extras, kinds, lists, counts, ranges,
    *, by: tuple[bool, bool], sizes: tuple[int, int, int, int], bq: int, bk: int, mask, window: Window,
    chunk: int = 4,
):  # fmt: skip
    """For every tile of queries, lists [batch or 1, heads or 1, tiles, blocks]: the blocks of keys that all of its
    queries see, then those that some see any of, then the others; and counts [..., 2]: how many the first are, and the
    first two. ranges [..., 2]: as `mask_ranges` gives them. kinds [..., tiles, blocks]: what the queries see of each
    block.

    sizes: batch, heads, queries and keys; `by`: whether the mask reads the numbers of batch rows and heads;
    `chunk`: blocks of keys that one program looks at.
    """
    b, h, i, part = (jt.program_id(axis) for axis in range(4))
    t, s = sizes[2:]
    blocks = kinds.shape[3]
    few = FEW if bq % FEW == 0 else bq  # rows at a time: a thread has few predicates
    columns, pairs = part * chunk * bk + jt.arange(chunk * bk)[None, :], jt.zeros((few, chunk * bk), jnp.int32)
    for n in jt.range(bq // few):
        rows = i * bq + n * few + jt.arange(few)[:, None]
        found = seen(b, h, rows, columns, extras, mask=mask, window=window, s=s, hangs=s % (chunk * bk) != 0)
        pairs = pairs + (found if t % bq == 0 else found & (rows < t)).astype(jnp.int32)
    pairs = pairs.sum(0).reshape(chunk, bk).sum(1)  # along rows first, which a thread has several of
    every = pairs == jnp.minimum(t - i * bq, bq) * bk
    kinds.tiles(None, None, None, chunk)[b, h, i, part] = jnp.where(every, ALL, jnp.where(pairs > 0, SOME, NONE))
    if jt.arrive(jt.counters("rows", kinds.shape[:3]), (b, h, i), jt.cdiv(blocks, chunk)):
        # Both sums in one: blocks that all queries see count BOTH, blocks that some see count 1.
        kind, n = kinds[b, h, i, :], jt.arange(blocks)
        one = jnp.where(kind == ALL, BOTH, jnp.where(kind == SOME, 1, 0))
        before, total = jnp.cumsum(one) - one, one.sum()
        whole, some = total // BOTH, total % BOTH
        first, second = before // BOTH, before % BOTH
        last = whole + some + n - first - second
        place = jnp.where(kind == ALL, first, jnp.where(kind == SOME, whole + second, last))
        lists[b, h, i, place] = n
        counts[b, h, i, 0] = whole
        counts[b, h, i, 1] = whole + some
        ranges[b, h, i, 0] = jnp.where(kind == NONE, blocks, n).min()
        ranges[b, h, i, 1] = jnp.where(kind == NONE, 0, n + 1).max()


def types(q, *_, save: bool, **__):
    """The types of o and, with `save`, of the log-sum-exp of every query's scores, in powers of two."""
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), sums_in(q))
    return (jt.like(q), lse) if save else jt.like(q)


@jt.kernel(
    out_type=types, grid=lambda q, *_, bq, **__: (q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq))
)  # fmt: skip
def listed_attention(
    q, k, v, extras, lists, counts, seeds, o, lse=None,
    *, bq: int, bk: int, scale: float, softcap: float | None, score, mask, window: Window, dropout: float, save: bool,
    precision: str | None = None,
):  # fmt: skip
    """`flex_attention` by the lists and counts of `mask_lists`; all else is as there."""
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, kv, wide = q.shape[3], h // (q.shape[2] // k.shape[2]), sums_in(q)
    Q, K, V, O = (x.tiles(None, n, None, d) for x, n in ((q, bq), (k, bk), (v, bk), (o, bq)))
    q_i, rows = Q[b, i, h, 0], i * bq + jt.arange(bq)[:, None]
    of = (b if lists.shape[0] > 1 else 0), (h if lists.shape[1] > 1 else 0), i
    seed = dropouts.seed_of(seeds, b, h)
    queries = dropouts.places(i * bq, bq, 0)

    def step(n, m, l, acc, masked: bool):
        j = jnp.clip(lists[*of, n], 0, K.shape[1] - 1)
        columns = j * bk + jt.arange(bk)[None, :]
        s = jt.dot(q_i, K[b, j, kv, 0].T, precision=precision)
        if score is None:
            s = scores(s, scale if softcap is not None else scale * LOG2_E, softcap, short=q.dtype.itemsize == 2)
        else:
            s = s * scale if softcap is None else softcap * jnp.tanh(s * (scale / softcap))
            s = score(s, b, h, rows, columns, *extras).astype(wide) * LOG2_E
        if masked:
            keys = k.shape[1]
            visible = seen(b, h, rows, columns, extras, mask=mask, window=window, s=keys, hangs=keys % bk != 0)
            s = jnp.where(visible, s, -jnp.inf)
        keep = seed and dropouts.kept(seed, queries, dropouts.places(j * bk, bk, 1), dropout)
        return online(s, V[b, j, kv, 0], m, l, acc, keep=keep, precision=precision)

    m, l, acc = jt.full((bq,), NOTHING, wide), jt.zeros((bq,), wide), jt.zeros((bq, d), wide)
    whole, end = counts[*of, 0], counts[*of, 1]
    for n in jt.range(whole):
        m, l, acc = step(n, m, l, acc, masked=False)
    for n in jt.range(whole, end):
        m, l, acc = step(n, m, l, acc, masked=True)
    O[b, i, h, 0] = normalised(acc, l, dropouts.factor(dropout)).astype(o.dtype)
    if lse is not None:
        lse.tiles(None, None, bq)[b, h, i] = log_sums(m, l, lacking(softcap, q.dtype.itemsize == 2 and score is None))
