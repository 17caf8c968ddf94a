"""Attention without the matrix of scores in memory (Dao et al. 2022; online softmax: Milakov and Gimelshein 2018)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import digit_attention, dropouts, flex_attention, gpu_tiles, hopper_tiles, spaces
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, fit, known, machine, sums_in, tuned
from jtile.ops.attention_backward import attention_backward
from jtile.ops.attention_windows import LOG2_E, Window, at_edge, blocks, lacking, scores
from jtile.ops.dispatch import Implementation, Op
from jtile.ops.online_softmax import NOTHING, log_sums, normalised, online


def _grid(q, k, v, lengths, offsets, *, bq, **_):
    return q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq)


def _types(q, *_, save: bool = False, **__):
    """Types of o and, with `save`, of the log-sum-exp of every query's scores, which the backward pass starts from."""
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), sums_in(q))
    return (jt.like(q), lse) if save else jt.like(q)


@jt.autotune(space=spaces.attention, override=True)
@jt.kernel(out_type=_types, grid=_grid)
def flash_attention(
    q, k, v, lengths, offsets, seeds, o, lse=None,
    *, bq: int, bk: int, scale: float, softcap: float | None, window: Window, dropout: float = 0.0, save: bool = False,
    stages: int = 2, side: int | None = None, precision: str | None = None,
):  # fmt: skip
    """q, o [batch, t, heads, d]; k, v [batch, s, kv heads, d]; lengths, offsets: int32 [batch], or None; seeds: those
    of `dropouts.seeds`, or None.

    `side`: the side of tiles along the features, at least d; features behind d read as zeros. `precision`: that of
    `jt.dot`.
    `save`: also lse [batch, heads, t], the log-sum-exp of the scores in powers of two, `EMPTY` for a query that sees
    no key.
    """
    # o_i = sum_j p_ij v_j / l_i     p_ij = exp(s_ij - m_i)     s_ij = scale q_i . k_j     lse_i = m_i + log2 l_i
    # m_i = max_j s_ij     l_i = sum_j p_ij
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, keys, kv = side or q.shape[3], k.shape[1], h // (q.shape[2] // k.shape[2])
    K, V = k.tiles(None, bk, None, d), v.tiles(None, bk, None, d)
    Q, unit = _scaled(q.tiles(None, bq, None, d)[b, i, h, 0], scale, softcap)
    length = keys if lengths is None else jnp.minimum(lengths[b], keys)
    first = i * bq + (0 if offsets is None else offsets[b])  # where this tile's first query stands among the keys
    lo, inner_lo, inner_hi, hi = blocks(first, bq, bk, length, window)
    rows = first + jt.arange(bq)[:, None]
    seed = dropouts.seed_of(seeds, b, h)
    queries = dropouts.places(i * bq, bq, 0)

    def step(j, m, l, acc, edge: bool):
        s = scores(jt.dot(Q, K[b, j, kv, 0].T, precision=precision), unit, softcap, short=q.dtype.itemsize == 2)
        v_j = V[b, j, kv, 0]
        if edge:
            s, v_j = at_edge(s, v_j, j * bk, rows, length, window, cut=lengths is not None)
        keep = seed and dropouts.kept(seed, queries, dropouts.places(j * bk, bk, 1), dropout)
        return online(s, v_j, m, l, acc, keep=keep, precision=precision)

    wide = sums_in(q)
    m, l, acc = jt.full((bq,), NOTHING, wide), jt.zeros((bq,), wide), jt.zeros((bq, d), wide)
    # From the last block of keys to the first. Under a causal mask the last block alone has an edge, if no tile of
    # queries stands beside two: the first round of the loop, which a schedule takes apart anyway.
    one = lengths is None and offsets is None and window == (None, 0) and bk % bq == 0
    edges = jnp.clip(hi - inner_hi, 0, 1 if one else keys)
    inner = hi if window[0] is None else jnp.maximum(edges, hi - inner_lo)
    block = lambda r: jnp.maximum(hi - 1 - r, 0)
    for r in jt.range(edges):
        m, l, acc = step(block(r), m, l, acc, edge=True)
    for r in jt.range(edges, inner, stages=stages):
        m, l, acc = step(block(r), m, l, acc, edge=False)
    if window[0] is not None:
        for r in jt.range(inner, hi - lo):
            m, l, acc = step(block(r), m, l, acc, edge=True)
    o.tiles(None, bq, None, d)[b, i, h, 0] = normalised(acc, l, dropouts.factor(dropout)).astype(o.dtype)
    if lse is not None:
        lse.tiles(None, None, bq)[b, h, i] = log_sums(m, l, lacking(softcap, q.dtype.itemsize == 2))


def _run(q, *args, **meta):
    """Run the kernel with the warps that suit its tiles."""
    return tuned(flash_attention, **gpu_tiles.attention_options(q.shape[3], q.dtype.itemsize))(q, *args, **meta)


def _forward(q, k, v, lengths, offsets, seeds, *, save: bool, **meta):
    o, lse = _run(q, k, v, lengths, offsets, seeds, save=True, **meta)
    return (o, lse) if save else o, (q, k, v, lengths, offsets, seeds, o, lse)


def _backward(
    residuals, ct, *, save: bool, scale: float, softcap: float | None, window: Window, dropout: float = 0.0, **_
):
    q, k, v, lengths, offsets, seeds, o, lse = residuals
    g, ct_lse = ct if save else (ct, None)
    options = {"scale": scale, "softcap": softcap, "window": window, "dropout": dropout}
    return *attention_backward(q, k, v, o, lse, g, ct_lse, lengths, offsets, seeds, **options), None, None, None


flash_attention.defvjp(_forward, _backward)


def _scaled(q, scale: float, softcap: float | None):
    """The query tile, and the factor that a score still needs to be an exponent of two.

    Scaling the queries is cheaper than scaling the scores, but would round 16-bit ones.
    """
    if softcap is None and q.dtype == sums_in(q):
        return q * (scale * LOG2_E), 1.0
    return q, scale if softcap is not None else scale * LOG2_E


@functools.partial(
    jax.jit,
    static_argnames=("causal", "window", "scale", "softcap", "score", "mask", "dropout", "precision"),
    inline=True,
)
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    lengths: jax.Array | None = None,
    offsets: jax.Array | None = None,
    sinks: jax.Array | None = None,
    score: Callable[..., jax.Array] | None = None,
    mask: Callable[..., jax.Array] | None = None,
    extras: Sequence[Any] = (),
    dropout: float = 0.0,
    key: jax.Array | None = None,
    precision: str | None = None,
) -> jax.Array:
    """`softmax(scale q k^T) v` per head; blocks of keys that no query of a block sees are skipped.

    `score(s, b, h, i, j, *extras)` and `mask(b, h, i, j, *extras)` are functions of tiles, traced into the kernel: s
    [m, n] are scaled scores, b and h the numbers of the batch row and the head, i [m, 1] and j [1, n] those of queries
    and keys. `score` gives other scores, `mask` is true for keys that a query sees. They read `extras` by index,
    `slopes[h]`, `bias[h, i - j + n]`, `factor[...]`, and close over no arrays. A function that each call makes anew is
    traced anew, too.

    Differentiable in q, k, v, sinks and extras, not in lengths and offsets. Backwards, the scores are computed again
    from the saved log-sum-exp of each query: memory grows with the sequence, not with its square. On Hopper (16-bit
    floats, heads of 33 to 128) the gradient of q is added up in float32 in any order: its last bits differ
    from run to run.

    Args:
      q: float array [batch, t, heads, d].
      k, v: float arrays [batch, s, kv_heads, d] of q's dtype; kv_heads divides heads (grouped queries).
      causal: query i sees the keys j <= i (plus `offsets`, if given).
      window: with `causal` an int n: query i sees the n keys i - n < j <= i; without: |i - j| < n. Or (left, right):
        i - left <= j <= i + right, None for no bound.
      scale: default 1 / sqrt(d).
      softcap: scores become `softcap * tanh(score / softcap)`.
      lengths: int [batch], keys of each batch row that count; default all.
      offsets: int [batch], the position of query 0 among the keys (chunked prefill); default 0.
      sinks: float [heads], a score of each head, neither scaled nor bounded, that takes part in the softmax like that
        of a key which every query sees and whose value is zero.
      score, mask: functions as above; gradients are automatic then. With `causal` or `window`, both have to hold.
      extras: arrays, or pytrees of them, for score and mask.
      dropout: the share of the weights that are zero by chance, the others being larger for it; from 0 to less than 1.
      key: for `dropout`, a key of `jax.random` (threefry2x32). What is dropped depends on it and on the place alone:
        Philox2x32 of 7 rounds gives 64 bits for 2 x 2 weights, so that two of them share a word, and the share that is
        dropped is right to 2^-32.
      precision: that of the products, as for `jt.dot`: "fast" takes one tf32 product for float32 on GPUs, and on CPUs
        with tile registers of bytes integers of 16 bits (errors of 1.5e-4 of a result's norm) where there are neither
        lengths, offsets, softcap, sinks, dropout nor functions. There all values of a block of 64 or 128 keys, also
        those that a query does not see, share one scale: one that is 1000 times as large as the others leaves these an
        error of some percent, and one that is not finite makes the results of all queries whose tile meets it NaN. The
        gradient of a call without score and mask is computed in float32 either way.
    Returns:
      An array like `q`, computed in float32 (float64 for float64); a query that sees no key gives zeros.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    check_rank("attention", "q", q, 4, "[batch, t, heads, d]")
    check_operands("attention", q, k, v, lengths=lengths, offsets=offsets)
    check_softcap("attention", softcap)
    flex_attention.check_functions("attention", score, mask, extras)
    bounds = window_of("attention", window, causal)
    if q.size == 0 or k.size == 0:
        return jnp.zeros(q.shape, q.dtype)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    sizes = known(q.shape[1]), known(k.shape[1]), q.shape[3], q.dtype.itemsize
    tiles = _tiles(*sizes, bounds[1] is not None, lengths is not None)
    lengths, offsets = (None if x is None else x.astype(jnp.int32) for x in (lengths, offsets))
    options = {"scale": scale, "softcap": softcap, "window": bounds}
    if precision is not None:
        options["precision"] = precision
    words = dropouts.words("attention", key, dropout)
    if precision == "fast" and score is None and mask is None and words is None and sinks is None:
        return _fast(q, k, v, lengths, offsets, **options, **tiles)
    seeds = None if words is None else dropouts.seeds(words, q.shape[0], q.shape[2])
    options["dropout"] = 0.0 if words is None else float(dropout)
    if score is None and mask is None:
        run = functools.partial(_run, q, k, v, lengths, offsets, seeds, **options, **tiles)
    else:
        flex_attention.check_rows("attention", lengths, offsets)
        flex_attention.check_score("attention", score, tuple(extras), tiles["bq"], tiles["bk"], sums_in(q))
        run = functools.partial(
            flex_attention.run, q, k, v, tuple(extras), seeds, tiles=tiles, score=score, mask=mask, **options
        )
    if sinks is None:
        return run(save=False)
    check_sinks("attention", q, sinks)
    o, lse = run(save=True)
    # The keys' share of all weights, those of the sinks included, is 2^lse / (2^lse + e^sink).
    share = jax.nn.sigmoid((lse - sinks.astype(lse.dtype)[None, :, None] * LOG2_E) * math.log(2.0))
    return (o.astype(lse.dtype) * share.swapaxes(1, 2)[..., None]).astype(o.dtype)


def _as_they_are(*operands, **meta):
    return _run(*operands, None, save=False, **meta)


# `attention` that leaves the precision to the target.
_fast = Op(
    "attention whose precision is left to the target",
    Implementation("rows in bytes", digit_attention.attention, digit_attention.misfit, ("byte tiles",), portable=False),
    Implementation("rows as they are", _as_they_are),
)


def attention_and_sums(q, k, v, *, window: Window, scale: float, softcap: float | None):
    """`attention`, and the log-sum-exp of the scores of each query in powers of two, [batch, heads, t]; unchecked."""
    sizes = known(q.shape[1]), known(k.shape[1]), q.shape[3], q.dtype.itemsize
    options = {"scale": scale, "softcap": softcap, "window": window}
    return _run(q, k, v, None, None, None, save=True, **options, **_tiles(*sizes, window[1] is not None, False))


def check_sinks(op: str, q, sinks) -> None:
    """Typed errors for sinks that do not fit the queries [batch, t, heads, d]."""
    check_float(op, sinks=sinks)
    check_shape(op, "sinks", sinks, q.shape[2:3])


def _tiles(t: int, s: int, d: int, itemsize: int, causal: bool, lengths: bool) -> dict[str, int]:
    """Queries and keys of a tile, on the platform at hand."""
    if not machine().whole:
        side = hopper_tiles.head(d)
        if side != d and d > 32 and d % 8 == 0 and gpu_tiles.warpgroups():
            wide = hopper_tiles.attention(t, s, side, itemsize, causal, lengths)
            if wide is not None:
                return wide | {"side": side}
        return gpu_tiles.attention(t, s, d, itemsize, causal, gpu_tiles.little_memory(), lengths)
    if causal:  # small tiles compute fewer scores that the mask drops
        return {"bq": fit(t, 64), "bk": fit(s, 64)}
    return {"bq": fit(t, 128), "bk": fit(s, 256)}


def check_operands(op: str, q, k, v, **per_row) -> None:
    """Typed errors for operands of attention that do not fit each other; `per_row`: int arrays [batch] or None."""
    check_float(op, q=q, k=k, v=v)
    check_int(op, **per_row)
    if not q.dtype == k.dtype == v.dtype:
        raise KernelTypeError(f"{op}: q, k and v have one dtype, got {q.dtype.name}, {k.dtype.name} and {v.dtype.name}")
    check_rank(op, "k", k, 4, "[batch, s, kv_heads, d]")
    check_shape(op, "v", v, k.shape)
    check_shape(op, "k", k, (q.shape[0], *k.shape[1:3], q.shape[-1]))
    if k.shape[2] == 0 or q.shape[-2] % k.shape[2]:
        raise KernelValueError(f"{op}: {q.shape[-2]} query heads do not divide into {k.shape[2]} key-value heads")
    for name, x in per_row.items():
        if x is not None:
            check_shape(op, name, x, q.shape[:1])


def check_softcap(op: str, softcap: float | None) -> None:
    if softcap is not None and not 0 < softcap < math.inf:
        raise KernelValueError(f"{op}: softcap is a positive number, got {softcap}; None leaves scores as they are")


def window_of(op: str, window, causal: bool) -> Window:
    """(left, right): how many keys a query sees on either side, None for all."""
    given, whole = window, lambda n: isinstance(n, int) and not isinstance(n, bool)
    if whole(window):
        window = (window - 1, 0 if causal else window - 1)
    pair = (None, None) if window is None else window
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(n is None or whole(n) for n in pair):
        raise KernelTypeError(f"{op}: a window is an int, or a pair of ints or None, got {window!r}")
    left, right = pair
    if causal:
        right = 0 if right is None else min(right, 0)
    if any(n is not None and n < 0 for n in (left, right)):
        raise KernelValueError(f"{op}: a window holds at least the query's own position, got window={given}")
    return left, right


def attention_reference(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, lengths=None, offsets=None, sinks=None,
    score=None, mask=None, extras=(), dropout=0.0, key=None, precision=None,
):  # fmt: skip
    """`attention` in jnp, with the whole matrix of scores; its products are exact whatever `precision` says."""
    del precision
    (batch, t, heads, d), (s, groups) = q.shape, k.shape[1:3]
    left, right = window_of("attention", window, causal)
    extras = jax.tree.map(jnp.asarray, extras)
    q, k, v, dtype = *(x.astype(sums_in(q)) for x in (q, k, v)), q.dtype
    grouped = q.reshape(batch, t, groups, heads // groups, d)
    x = jnp.einsum("btghd,bsgd->bghts", grouped, k, precision="highest") * (d**-0.5 if scale is None else scale)
    x = x if softcap is None else softcap * jnp.tanh(x / softcap)
    zero, full = jnp.zeros((batch,), jnp.int32), jnp.full((batch,), s, jnp.int32)
    rows = (zero if offsets is None else offsets)[:, None, None] + jnp.arange(t, dtype=jnp.int32)[None, :, None]
    columns = jnp.arange(s, dtype=jnp.int32)[None, None, :]
    seen = columns < (full if lengths is None else lengths)[:, None, None]
    seen = seen if right is None else seen & (columns <= rows + right)
    seen = seen if left is None else seen & (columns >= rows - left)
    seen = jnp.broadcast_to(seen, (batch, t, s))
    seen = jnp.broadcast_to(seen[:, None], (batch, heads, t, s))
    shape = seen.shape
    iota = lambda k: jax.lax.broadcasted_iota(jnp.int32, [n if a == k else 1 for a, n in enumerate(shape)], k)
    places = iota(0), iota(1), iota(2), iota(3)
    if score is not None:
        x = score(x.reshape(seen.shape), *places, *extras).reshape(x.shape)
    seen = seen if mask is None else seen & mask(*places, *extras)
    x = jnp.where(seen.reshape(x.shape), x, -jnp.inf)
    if sinks is not None:  # the sink is the last column
        sunk = sinks.astype(x.dtype).reshape(1, groups, -1, 1, 1)
        x = jnp.concatenate([x, jnp.broadcast_to(sunk, (*x.shape[:-1], 1))], axis=-1)
    p = jnp.nan_to_num(jax.nn.softmax(x, -1))[..., :s]  # the row of a query without keys is NaN
    words = dropouts.words("attention", key, dropout)
    if words is not None:
        sides = dropouts.places(0, t, 0), dropouts.places(0, s, 1)
        kept = jax.vmap(jax.vmap(lambda seed: dropouts.kept(seed, *sides, dropout)))(
            dropouts.seeds(words, batch, heads)
        )
        p = jnp.where(kept.reshape(p.shape), p * dropouts.factor(dropout), 0)
    return jnp.einsum("bghts,bsgd->btghd", p, v, precision="highest").reshape(batch, t, heads, d).astype(dtype)
