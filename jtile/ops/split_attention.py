"""Attention of the newest tokens over a long key-value cache, its keys split among programs (flash decoding, 2023)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles, halves, hopper_decode, spaces
from jtile.ops._shapes import check_int, check_rank, check_shape, fit, known, machine, sums_in, tuned
from jtile.ops.attention_windows import LOG2_E, floordiv, scores
from jtile.ops.dispatch import BLOCK_LEVEL, WARPS, Implementation, Op
from jtile.ops.flash_attention import attention, attention_reference, check_operands, check_sinks, check_softcap
from jtile.ops.online_softmax import NOTHING, normalised, online

_SHORTEST_SPLIT = 256  # the fewest keys of a program
_FINEST, _FINE = 16, 32  # keys of a block at the end, on CPUs
_FEW = 16  # queries of a program that fill no tile of a warpgroup's product
CACHE_DTYPES = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))  # dtypes of keys and values that have scales


def splits_of(parts: int, slots: int) -> int:
    """The programs that share the keys of one of `parts`: enough for the machine; on a GPU no more than run at once."""
    m, parts, slots = machine(), known(parts), known(slots)
    if m.whole:
        return min(jt.cdiv(m.programs, parts), jt.cdiv(slots, _SHORTEST_SPLIT))
    return min(max(m.programs // 4 // parts, 1), jt.cdiv(slots, 2 * _SHORTEST_SPLIT))


def slots_of(cache, table) -> int:
    """The slots of a row; `table`: the pages of each row, or None."""
    return cache.shape[1] * (1 if table is None else table.shape[1])


def place(b, j, bk: int, cache, table):
    """Where block j of `bk` keys of row b lies in a cache: its row, or its page, and which block that is there."""
    if table is None:
        return b, j
    of_page = jnp.int32(cache.shape[1] // bk)
    return table[b, jax.lax.div(j, of_page)], jax.lax.rem(j, of_page)


@jt.function
def over_keys(
    q, tile, k, v, lengths, table, scales, n=None,
    *, splits: int = 1, bk: int, scale: float, softcap: float | None, window: int | None, stages: int,
    fine: int | None = None, half: bool = False,
):  # fmt: skip
    """Maxima, sums and unnormalised output of tile `tile` of q [tiles, t, heads, d], of the heads of kv head
    `program_id(1)`, over the keys of row `program_id(0)`: all of them, or part n of `splits`. k, v, lengths, table,
    scales, fine, half: see `decode_splits`."""
    # The formulas of flash_attention, for keys [lo, hi); token i's query is at position length - t + i.
    b, g = jt.program_id(0), jt.program_id(1)
    t, d, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    fine = fine if fine is not None and bk % fine == 0 else bk
    Q, back = q.tiles(None, t, group, d)[tile, 0, g, 0].reshape(t * group, d), None
    if half:
        Q, back = halves.halves(Q)
    length = jnp.clip(lengths[b], 0, slots_of(k, table))
    position = length - t + jt.arange(t * group)[:, None] // group
    lo = 0 if window is None else floordiv(jnp.maximum(length - t + 1 - window, 0), bk)
    hi = end = jt.cdiv(length, bk)
    if n is not None:
        share = jt.cdiv(end - lo, splits)
        lo = jnp.minimum(lo + n * share, end)
        hi = jnp.minimum(lo + share, end)
    plain = (
        jnp.clip(floordiv(jnp.maximum(length - t + 1, 0), bk), lo, hi) if window is None else lo
    )  # blocks that every query sees whole

    def step(j, state, edge: bool):
        keys = fine if edge else bk
        K, V = k.tiles(None, keys, None, d), v.tiles(None, keys, None, d)
        units = [x.tiles(None, None, keys) for x in scales]
        row, at = place(b, j, keys, k, table)
        s = jt.dot(Q, K[row, at, g, 0].astype(Q.dtype).T)
        if units:
            of_keys = units[0][row, g, at]
            s = s * (of_keys if back is None else of_keys * back)[None, :]
        s = scores(s, scale if softcap is not None else scale * LOG2_E, softcap)
        v_j = V[row, at, g, 0].astype(Q.dtype)
        of_values = units[1][row, g, at] if units else None
        if edge:
            columns = j * keys + jt.arange(keys)[None, :]
            seen = columns <= position
            seen = seen if window is None else seen & (columns > position - window)
            s = jnp.where(seen, s, -math.inf)
            v_j = jnp.where(length > columns.T, v_j, jnp.zeros((), v_j.dtype))
            of_values = None if of_values is None else jnp.where(length > columns[0], of_values, 0.0)
        return (halves.online if half else online)(s, v_j, *state, of_values)

    rows, wide = t * group, sums_in(q)
    state = jt.full((rows,), NOTHING, wide), jt.zeros((rows,), wide), jt.zeros((rows, d), wide)
    state = (*state, halves.first()) if half else state
    for j in jt.range(lo, plain, stages=stages):
        state = step(j, state, edge=False)
    if fine < bk:
        plain, hi = plain * (bk // fine), jnp.minimum(hi * (bk // fine), jt.cdiv(length, fine))
    for j in jt.range(plain, hi):
        state = step(j, state, edge=True)
    m, l, acc, *top = state
    return m, l, halves.summed(acc, *top) if half else acc


def _types(q, k, v, lengths, table, scales, *, splits, **_):
    """Types of acc, m and l of every split, [batch, kv heads, splits, t, group(, d)]; with one split that of o."""
    batch, t, heads, d = q.shape
    if splits == 1:
        return jt.like(q)
    part = (batch, k.shape[2], splits, t, heads // k.shape[2])
    return tuple(jax.ShapeDtypeStruct(s, sums_in(q)) for s in ((*part, d), part, part))


def _grid(q, k, v, lengths, table, scales, *, splits, **_):
    return q.shape[0], k.shape[2], splits


@jt.autotune(space=spaces.splits, data=spaces.full_cache, override=True)
@jt.kernel(out_type=_types, grid=_grid)
def decode_splits(
    q, k, v, lengths, table, scales, o, m_part=None, l_part=None,
    *, splits: int, bk: int, scale: float, softcap: float | None, window: int | None, stages: int = 3,
    fine: int | None = None, half: bool = False,
):  # fmt: skip
    """q [batch, t, heads, d]; k, v [batch, slots, kv heads, d], or [pages, slots of a page, kv heads, d] and table
    [batch, pages of a row], else None; lengths int32 [batch]; scales: () or those of 8-bit keys and of values, float32
    [batch or pages, kv heads, slots]. Keys come in blocks of `bk`; those that not every query sees whole in blocks of
    `fine`, where these divide the others. half: products of 8-bit keys and values are those of float16, see `halves`.
    Of several splits o is the part of each, unnormalised."""
    b, g, n = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    t, d, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    how = {"bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": stages, "fine": fine, "half": half}
    m, l, acc = over_keys(q, b, k, v, lengths, table, scales, n, splits=splits, **how)
    if m_part is None or l_part is None:
        o.tiles(None, t, group, d)[b, 0, g, 0] = normalised(acc, l).reshape(t, group, d).astype(q.dtype)
    else:
        o[b, g, n] = acc.reshape(t, group, d)
        m_part[b, g, n] = m.reshape(t, group)
        l_part[b, g, n] = l.reshape(t, group)


@jt.kernel(
    out_type=lambda acc, m, l, *, dtype: jax.ShapeDtypeStruct(
        (acc.shape[0], acc.shape[3], acc.shape[1] * acc.shape[4], acc.shape[5]), dtype
    ),
    grid=lambda acc, m, l, **_: acc.shape[:2],
)
def combine_splits(acc, m, l, o, *, dtype: str):
    """o [batch, t, heads, d] from the parts that `decode_splits` gives."""
    # o = sum_n 2^(m_n - M) acc_n / sum_n 2^(m_n - M) l_n     M = max_n m_n
    b, g = jt.program_id(0), jt.program_id(1)
    t, group, d = acc.shape[3:]
    m_n = m[b, g]
    w = jnp.exp2(m_n - m_n.max(0)[None])
    total = (w * l[b, g]).sum(0)
    y = (w[..., None] * acc[b, g]).sum(0) * jnp.where(total == 0, 0.0, 1.0 / total)[..., None]
    o.tiles(None, t, group, d)[b, 0, g, 0] = y.astype(o.dtype)


@jt.kernel(
    out_type=lambda acc, m, l, *, dtype: jax.ShapeDtypeStruct((*acc.shape[:2], *acc.shape[3:]), dtype),
    grid=lambda acc, m, l, **_: (*acc.shape[:2], acc.shape[3] * acc.shape[4]),
)
def combine_splits_of_rows(acc, m, l, o, *, dtype: str):
    """`combine_splits` with a program for each query: o [batch, kv heads, t, group, d]."""
    b, g, row = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    group = jnp.int32(acc.shape[4])
    i, h = jax.lax.div(row, group), jax.lax.rem(row, group)
    m_n = m[b, g, :, i, h]
    w = jnp.exp2(m_n - m_n.max())
    total = (w * l[b, g, :, i, h]).sum()
    y = (w[:, None] * acc[b, g, :, i, h]).sum(0) * jnp.where(total == 0, 0.0, 1.0 / total)
    o[b, g, i, h] = y.astype(o.dtype)


def _by_rows(acc, m, l, *, dtype: str):
    o = tuned(combine_splits_of_rows, num_warps=4)(acc, m, l, dtype=dtype)
    return o.transpose(0, 2, 1, 3, 4).reshape(o.shape[0], o.shape[2], -1, o.shape[4])


# The output o [batch, t, heads, d], from the parts of the splits.
combined = Op(
    "parts of splits",
    Implementation("a program for each query", _by_rows, needs=WARPS),
    Implementation("a program for each head of keys", combine_splits),
)


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "window", "splits"), inline=True)
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    pages: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    splits: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of the newest tokens over a key-value cache that holds them already.

    Differentiable in q, sinks, scales, and k and v that have none, not in lengths and pages. The result is that of
    `attention` over the slots in use.

    Args:
      q: float array [batch, heads, d], one token a row, or [batch, t, heads, d], the last t tokens.
      k, v: the cache, float arrays [batch, slots, kv_heads, d]; with `pages` [pages, slots of a page, kv_heads, d];
        kv_heads divides heads. With `scales` both are int8 or float8_e4m3fn, else of q's dtype.
      lengths: int [batch], slots in use, the new tokens included; token i of t stands in slot lengths - t + i.
        `jt.config(overlap=True)` promises that the kernel in front makes neither these nor older slots than the last.
      pages: int [batch, n], the pages of each row in order; those behind the length may be anything.
      scales: of keys and of values, float32 [batch, kv_heads, slots] each, with `pages` [pages, kv_heads, slots of a
        page]: what a key or value of 8 bits is multiplied with.
      scale: default 1 / sqrt(d).
      softcap: scores become `softcap * tanh(score / softcap)`.
      window: a token sees its `window` newest keys, itself included.
      splits: programs that share the keys of one row and head group; default by shape. With 1 what a row gets depends
        on no other row.
      sinks: float [heads]: see `attention`.
    Returns:
      An array like `q`, computed in float32 (float64 for float64); a token that sees no key gives zeros.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    if q.ndim == 3:
        options = {"scale": scale, "softcap": softcap, "window": window, "splits": splits}
        options |= {"pages": pages, "scales": scales, "sinks": sinks}
        return decode_attention(q[:, None], k, v, lengths, **options)[:, 0]
    check_decode(q, k, v, lengths, pages, scales, softcap, splits)
    if window is not None and window < 1:
        raise KernelValueError(f"decode_attention: a window is at least 1, got {window}")
    if q.size == 0 or k.size == 0 or (pages is not None and pages.size == 0):
        return jnp.zeros(q.shape, q.dtype)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    table = None if pages is None else pages.astype(jnp.int32)
    scales = () if scales is None else tuple(scales)
    if sinks is not None:
        check_sinks("decode_attention", q, sinks)
    return _decode(q, k, v, lengths.astype(jnp.int32), table, scales, sinks, scale, softcap, window, splits)


def check_decode(q, k, v, lengths, pages, scales, softcap: float | None, splits: int | None) -> None:
    """Typed errors for operands of `decode_attention`, of q [batch, t, heads, d]."""
    check_rank("decode_attention", "q", q, 4, "[batch, heads, d] or [batch, t, heads, d]")
    check_shape("decode_attention", "lengths", lengths, q.shape[:1])
    plain = (k, v) if scales is None else _check_scales(q, k, v, scales)
    if pages is None:
        check_operands("decode_attention", q, *plain, lengths=lengths)
    else:
        _check_pages(q, *plain, lengths, pages)
    check_softcap("decode_attention", softcap)
    if splits is not None and splits < 1:
        raise KernelValueError(f"decode_attention: splits is at least 1, got {splits}")


def _check_scales(q, k, v, scales):
    """Typed errors for caches of 8 bits; returns the types of keys and values as they are without scales."""
    check_rank("decode_attention", "k", k, 4, "[batch, slots, kv_heads, d], or with pages [pages, slots, kv_heads, d]")
    if k.dtype not in CACHE_DTYPES or v.dtype != k.dtype:
        raise KernelTypeError(
            f"decode_attention: with scales k and v are both int8 or float8_e4m3fn, got {k.dtype.name} and "
            f"{v.dtype.name}; leave out the scales of others"
        )
    if len(scales) != 2:
        raise KernelValueError(f"decode_attention: scales are those of keys and of values, got {len(scales)} arrays")
    for name, x in zip(("scales of keys", "scales of values"), scales, strict=True):
        check_shape("decode_attention", name, x, (k.shape[0], k.shape[2], k.shape[1]))
        if x.dtype != jnp.float32:
            raise KernelTypeError(f"decode_attention: the {name} are float32, got {x.dtype.name}")
    return [jax.ShapeDtypeStruct(x.shape, q.dtype) for x in (k, v)]


def _check_pages(q, k, v, lengths, pages) -> None:
    check_int("decode_attention", lengths=lengths, pages=pages)
    check_rank("decode_attention", "pages", pages, 2, "[batch, pages of a row]")
    check_rank("decode_attention", "k", k, 4, "[pages, slots of a page, kv_heads, d]")
    check_shape("decode_attention", "pages", pages, (q.shape[0], pages.shape[1]))
    of_row = lambda x: jax.ShapeDtypeStruct((q.shape[0], *x.shape[1:]), x.dtype)
    check_shape("decode_attention", "v", v, k.shape)
    check_operands("decode_attention", q, of_row(k), of_row(v))


@functools.partial(jax.custom_jvp, nondiff_argnums=(7, 8, 9, 10))
def _decode(
    q, k, v, lengths, table, scales, sinks,
    scale: float, softcap: float | None, window: int | None, splits: int | None,
):  # fmt: skip
    options = {"scale": scale, "softcap": softcap, "window": window, "splits": splits}
    if sinks is not None:
        return _in_splits(q, k, v, lengths, table, scales, sinks=sinks, **options)
    return _op(q, k, v, lengths, table, scales, **options)


def _of_all_rows(
    q, k, v, lengths, table, scales, *, scale: float, softcap: float | None, splits: int | None = None, **_
):
    """The result of the kernel whose programs share out the keys of all rows; each device shares out its own."""
    cache, pages = ("b _ h _", "") if table is None else ("_ _ h _", ", b _")
    rule = f"b _ h _ _, {cache}, {cache}, b{pages} -> b _ h _ _"
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    return jt.partitioned(_of_a_device(scale, softcap, splits), rule)(grouped, k, v, lengths, table).reshape(q.shape)


@functools.lru_cache(maxsize=128)
def _of_a_device(scale: float, softcap: float | None, splits: int | None):
    """The function for `jt.partitioned`, which cuts along kv heads, an axis of q [batch, t, kv heads, group, d]."""

    def decode_in_shares(q, k, v, lengths, table):
        flat = q.reshape(*q.shape[:2], -1, q.shape[4])
        options = {"scale": scale, "softcap": softcap, "window": None, "splits": splits}
        return _op_of_a_device(flat, k, v, lengths, table, (), **options).reshape(q.shape)

    return decode_in_shares


def _in_splits(
    q, k, v, lengths, table, scales,
    *, scale: float, softcap: float | None, window: int | None, splits: int | None = None, sinks=None,
):  # fmt: skip
    splits = _splits(q, k, table) if splits is None else splits
    splits = splits if sinks is None else max(splits, 2)  # sinks are added to parts, which one split does not give
    options = {"splits": splits, "softcap": softcap, "window": window, "scale": scale}
    parts = _parts(q, k, v, lengths, table, scales, **options)
    parts = parts if sinks is None else with_sinks(*parts, sinks)
    return parts if splits == 1 else combined(*parts, dtype=q.dtype.name)


def _splits(q, k, table) -> int:
    return splits_of(q.shape[0] * k.shape[2], slots_of(k, table))


def parts_of_keys(q, k, v, lengths, table, scales, *, scale: float, softcap: float | None, splits: int | None = None):
    """acc, m and l of several splits, as `decode_splits` gives them, for callers that put them together with
    others."""
    splits = max(_splits(q, k, table) if splits is None else splits, 2)
    return _parts(q, k, v, lengths, table, scales, splits=splits, scale=scale, softcap=softcap, window=None)


def _parts(
    q, k, v, lengths, table, scales, *, splits: int, scale: float, softcap: float | None, window: int | None
):  # fmt: skip
    slots, page = slots_of(k, table), k.shape[1]
    keys = 128 if machine().whole else gpu_tiles.keys_of_cache(q.shape[3], q.dtype.itemsize)
    kernel, bk, more = decode_splits, fit(page, keys), {}
    if not machine().whole and scales:
        few = q.shape[1] * q.shape[2] // k.shape[2] <= _FEW
        kernel, bk = _of_eight_bits(few, splits), fit(page, 32 if few and splits == 1 else 64)
        more = {"stages": 5 if few else 2, "half": few and as_halves(q, k)} if splits == 1 else {}
    elif not machine().whole and q.dtype.itemsize == 2 and splits > 1:
        bk = fit(page, 32) if known(slots) // splits > 2048 else bk
        kernel = tuned(decode_splits, num_warps=2)
    if table is not None:
        bk = max(x for x in range(1, min(bk, page) + 1) if page % x == 0)
    if machine().whole and window is None:  # all blocks of a window are like those at its ends
        more = {"fine": _finer(bk)}
    options = {"splits": splits, "bk": bk, "softcap": softcap, "window": window, "scale": scale}
    return kernel(q, k, v, lengths, table, scales, **options, **more)


def _finer(bk: int) -> int | None:
    """The keys of a block that hangs over the newest one, on CPUs, where all of a block is read. With 32 instead of all
    128 keys a program with 3 queries takes 3.2 us instead of 7.6 behind 20 tokens whose cache is in memory, 5.5 instead
    of 8.3 behind 48, and 10.9 instead of 10.0 behind 100; behind 4000 both are the same."""
    divisors = [x for x in range(_FINEST, _FINE + 1) if bk % x == 0]
    return max(divisors, default=None)


def as_halves(q, k) -> bool:
    """Whether keys and values become float16 beside queries of bfloat16: of e4m3 where one instruction makes two of
    them. 256 rows of 1216 keys take 164.5 us of an H200 so (with a constant in place of powers of two) if they go on
    for seconds, at the limit of power, and 178 to 181 as bfloat16; in short runs, where they wait for memory, both take
    as long."""
    return gpu_tiles.warpgroups() and q.dtype == jnp.bfloat16 and k.dtype == jnp.float8_e4m3fn


def _of_eight_bits(few: bool, splits: int):
    """The kernel for caches of 8 bits on a GPU; `few` queries in a program.

    An H200 takes for 256 rows of 1152 keys and one token 153 us with a warp and 5 tiles of 32 keys under way, 171 with
    3, 199 with two warps and tiles of 64; for 8192 tokens of prompts of 1024, in tiles of 32 tokens and so 128 queries,
    290 us with four warps and 2 tiles of keys, 347 at the block level; in tiles of 16 tokens 327, 474 there, and 815
    with two warps."""
    if splits > 1:
        return tuned(decode_splits, num_warps=4)
    return tuned(decode_splits, num_warps=1) if few else tuned(decode_splits, num_warps=4, specialize=False)


def with_sinks(acc, m, l, sinks, counts=True):
    """One more part, of keys whose values are zero and whose scores are the sinks, if it `counts`."""
    score = sinks.astype(m.dtype).reshape(m.shape[1], m.shape[4])[None, :, None, None] * LOG2_E
    score = score if counts is True else jnp.where(counts, score, NOTHING)
    of_part = lambda x: jnp.broadcast_to(x, (*m.shape[:2], 1, *m.shape[3:]))
    m = jnp.concatenate([m, of_part(score)], axis=2)
    l = jnp.concatenate([l, of_part(jnp.ones((1, 1, 1, 1, 1), l.dtype))], axis=2)
    return jnp.pad(acc, [(0, 1) if axis == 2 else (0, 0) for axis in range(acc.ndim)]), m, l


_IN_SPLITS = Implementation("splits of each row's keys", _in_splits)
_op = Op(
    "decode_attention",
    Implementation("shares of all keys", _of_all_rows, hopper_decode.misfit, BLOCK_LEVEL),
    _IN_SPLITS,
)
_op_of_a_device = Op(
    "decode_attention on a device",
    Implementation("shares of all keys", hopper_decode.decode, hopper_decode.misfit, BLOCK_LEVEL, portable=False),
    _IN_SPLITS,
)


@_decode.defjvp
def _decode_jvp(scale, softcap, window, splits, primals, tangents):
    """The derivative of the same result by `attention` over the slots in use, whose reverse mode takes any number of
    keys."""
    del splits
    q, k, v, lengths, table, scales, sinks = primals
    slots = slots_of(k, table)
    lengths = jnp.clip(lengths, 0, slots)
    options = {"scale": scale, "softcap": softcap, "window": window, "causal": True}

    def same(q, k, v, *sinks):
        k, v = (in_one_piece(x, table) for x in (k, v))
        more = {"sinks": sinks[0]} if sinks else {}
        return attention(q, k, v, lengths=lengths, offsets=lengths - q.shape[1], **options, **more)

    sunk = () if sinks is None else (sinks,)
    gradients = () if sinks is None else (tangents[6],)
    if scales:
        scaled = lambda q, of_k, of_v, *sinks: same(
            q, *(dequantized(*x, q.dtype) for x in ((k, of_k), (v, of_v))), *sinks
        )
        return jax.jvp(scaled, (q, *scales, *sunk), (tangents[0], *tangents[5], *gradients))
    return jax.jvp(same, (q, k, v, *sunk), (*tangents[:3], *gradients))


def dequantized(cache, scales, dtype):
    """A cache of 8 bits [batch or pages, slots, kv heads, d] times its scales [batch or pages, kv heads, slots]."""
    return (cache.astype(jnp.float32) * scales.swapaxes(1, 2)[..., None]).astype(dtype)


def in_one_piece(cache, table):
    """The cache of each row in one piece: [batch, slots, ...]."""
    if table is None:
        return cache
    pages = jnp.clip(table, 0, cache.shape[0] - 1)
    return cache[pages].reshape(len(pages), -1, *cache.shape[2:])


def decode_attention_reference(
    q, k, v, lengths, *, pages=None, scales=None, scale=None, softcap=None, window=None, splits=None, sinks=None
):
    """`decode_attention` in jnp."""
    del splits
    if scales is not None:
        k, v = (dequantized(x, of, q.dtype) for x, of in zip((k, v), scales, strict=True))
    options = {"scale": scale, "softcap": softcap, "window": window, "sinks": sinks}
    if q.ndim == 3:
        return decode_attention_reference(q[:, None], k, v, lengths, pages=pages, **options)[:, 0]
    k, v = (in_one_piece(x, pages) for x in (k, v))
    lengths = jnp.clip(lengths, 0, k.shape[1]).astype(jnp.int32)
    return attention_reference(q, k, v, causal=True, offsets=lengths - q.shape[1], lengths=lengths, **options)
