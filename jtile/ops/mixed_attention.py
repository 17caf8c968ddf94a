"""Attention of a server's step over a cache in pages: of tokens that stand alone, and of chunks of prompts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import gpu_tiles, hopper_chunks, hopper_decode, narrow_caches, shown_pages
from jtile.ops._shapes import check_int, check_rank, check_shape
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, first_unmet
from jtile.ops.hopper_shares import by_the_last
from jtile.ops.split_attention import decode_attention, decode_attention_reference


def mixed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    pages: jax.Array,
    *,
    tiles: tuple[int, int],
    scales: tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    splits: int | None = None,
    sinks: jax.Array | None = None,
    seen: int | None = None,
) -> jax.Array:
    """`decode_attention` of tokens of many rows, of which those behind the first ones come in tiles.

    Args:
      q: float array [tokens, heads, d].
      k, v: the cache in pages, [pages, slots of a page, kv_heads, d].
      lengths: int [tokens], slots that each token sees, itself included; less than 1 for padding.
      pages: int [tokens, n], the pages of the row of each token in order.
      tiles: (n, t): the first n tokens stand alone; each t tokens behind them are consecutive tokens of one row, a
        tile, which may begin with padding.
      scales, scale, softcap, window, splits, sinks: see `decode_attention`.
      seen: a number of pages, which is not less than those that the rows of tiles see, each row's counted for itself,
        where tiles of a row follow each other and no two rows have the same pages; None: nothing is known. With it,
        Hopper converts pages of 8 bits once for all tiles that see them.
    Returns:
      An array like `q`; a token that sees no key gives zeros.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    check_rank("mixed_attention", "q", q, 3, "[tokens, heads, d]")
    n, t = tiles
    if t < 1 or not 0 <= n <= len(q) or (len(q) - n) % t:
        raise KernelValueError(
            f"mixed_attention: {len(q)} tokens are not {n} and whole tiles of {t}; tiles is (tokens in front, tokens "
            "of a tile)"
        )
    check_int("mixed_attention", lengths=lengths, pages=pages)
    check_shape("mixed_attention", "lengths", lengths, q.shape[:1])
    check_rank("mixed_attention", "pages", pages, 2, "[tokens, pages of a row]")
    check_shape("mixed_attention", "pages", pages, (q.shape[0], pages.shape[1]))
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    if seen is not None and seen < 1:
        raise KernelValueError(f"mixed_attention: seen is a number of pages, at least 1, or None; got {seen}")
    options = {"tiles": (n, t), "scale": scale, "softcap": softcap, "window": window, "splits": splits, "seen": seen}
    scales = () if scales is None else tuple(scales)
    return _op(q, k, v, lengths.astype(jnp.int32), pages.astype(jnp.int32), scales, sinks, **options)


def _apart(
    q, k, v, lengths, table, scales, sinks, *, tiles: tuple[int, int], seen: int | None = None, **options
):  # fmt: skip
    """The attention of both in calls of their own, put together."""
    del seen
    options |= {"scales": scales or None, "sinks": sinks}
    run = lambda q, lengths, table: decode_attention(q, k, v, lengths, pages=table, **options)
    return run_apart(run, q, lengths, table, tiles)


def run_apart(run, of, lengths, table, tiles: tuple[int, int]):
    """What run(of, lengths, table) gives tokens that stand alone, [n, heads, d], and behind it what it gives tiles, [m,
    t, heads, d], as one array. `of`: arrays [tokens, ...] as a pytree, which a tile has as [m, t, ...]; lengths, table,
    tiles: see `mixed_attention`."""
    n, t = tiles
    last = slice(n + t - 1, None, t)
    one = run(jax.tree.map(lambda x: x[:n], of), lengths[:n], table[:n])
    many = run(jax.tree.map(lambda x: x[n:].reshape(-1, t, *x.shape[1:]), of), lengths[last], table[last])
    many = many.reshape(-1, *many.shape[2:])
    # two copies: as one concatenation XLA made a kernel that took 14 times the time of its bytes on an H200
    whole = jnp.pad(one, ((0, many.shape[0]), (0, 0), (0, 0)))
    return jax.lax.dynamic_update_slice_in_dim(whole, many, one.shape[0], 0)


def _misfit(
    q, k, v, lengths, table, scales, sinks,
    *, tiles: tuple[int, int], scale: float, softcap: float | None, window: int | None, splits: int | None,
    seen: int | None = None,
) -> str | None:  # fmt: skip
    """Why `_in_one` cannot run this call, None where it can."""
    del softcap, seen
    arrays = (q, k, table)
    if not all(isinstance(size, int) for x in arrays for size in x.shape):
        return "sizes are not known"
    queries = jax.ShapeDtypeStruct((q.shape[0], 1, *q.shape[1:]), q.dtype)
    rows, group = tiles[0] * k.shape[2], q.shape[1] // k.shape[2]
    parts = gpu_tiles.processors()
    return first_unmet(
        (0 < tiles[0] < len(q), "there are no tiles, or tiles alone"),
        (sinks is None, "there are sinks"),
        (splits == 1 or by_the_last(rows, group, q.shape[2], parts), "rows in parts take a kernel of their own"),
    ) or (
        hopper_decode.misfit(queries, k, v, lengths, table, scales, scale=scale, window=window, splits=splits)
        or hopper_chunks.misfit(q, k, v, lengths, table, tiles=tiles)
    )


def _in_one(q, k, v, lengths, table, scales, sinks, *, window, seen=None, **options):
    """The attention of both in one array, which two kernels write; each device takes its heads."""
    del scales, window, sinks, seen
    return _by_devices(of_batch, q, (k, v, lengths, table), "_ _ h _, _ _ h _, _, _ _", **options)


def of_batch(
    q, k, v, lengths, table, *, tiles: tuple[int, int], scale: float, softcap: float | None, splits: int | None
):  # fmt: skip
    """The result of the two kernels, without a rule for vmap. The second one writes behind what the first has
    written."""
    (n, t), options = tiles, {"scale": scale, "softcap": softcap}
    last = slice(n + t - 1, None, t)
    into = hopper_decode.of_batch(q[:, None], k, v, lengths[:n], table[:n], whole=splits == 1, **options)
    return hopper_chunks.chunks(q, k, v, lengths[last], table[last], into[:, 0], t=t, **options)


def _narrow_misfit(q, k, v, lengths, table, scales, sinks, *, tiles: tuple[int, int], splits: int | None, **_):
    """Why `_in_one_of_eight_bits` cannot run this call, None where it can."""
    del v, lengths
    sizes = all(isinstance(size, int) for x in (q, k, table) for size in x.shape)
    return first_unmet(
        (sizes, "sizes are not known"),
        (0 < tiles[0] < len(q), "there are no tiles, or tiles alone"),
        (sinks is None, "there are sinks"),
        (splits == 1, "rows are in parts"),
        (tiles[0] % tiles[1] == 0, f"{tiles[0]} tokens in front of the tiles are no multiple of {tiles[1]}"),
    ) or narrow_caches.misfit(q, k, scales)


def _in_one_of_eight_bits(q, k, v, lengths, table, scales, sinks, *, seen=None, **options):
    """`_in_one` of caches of 8 bits."""
    del sinks, seen
    rule = "_ _ h _, _ _ h _, _, _ _, _ h _, _ h _"
    return _by_devices(of_batch_of_eight_bits, q, (k, v, lengths, table, *scales), rule, **options)


def of_batch_of_eight_bits(q, k, v, lengths, table, *scales, tiles: tuple[int, int], splits: int | None, **options):
    """`of_batch` of caches of 8 bits."""
    del splits
    (n, t), shape = tiles, q.shape
    last = slice(n + t - 1, None, t)
    into = narrow_caches.attention(q[:, None], k, v, lengths[:n], table[:n], scales, **options)
    q, into = (x.reshape(-1, t, *shape[1:]) for x in (q, into))
    return narrow_caches.attention(q, k, v, lengths[last], table[last], scales, into, **options).reshape(shape)


def _shown_misfit(q, k, v, lengths, table, scales, sinks, *, window: int | None, seen: int | None = None, **options):
    """Why `_in_one_of_shown` cannot run this call, None where it can."""
    of = lambda x: jax.ShapeDtypeStruct(x.shape, q.dtype)
    return first_unmet(
        (seen is not None, "how many pages tiles see is not known"),
        (window is None, "there is a window"),
    ) or (
        _narrow_misfit(q, k, v, lengths, table, scales, sinks, **options)
        or hopper_chunks.misfit(q, of(k), of(v), lengths, table, tiles=options["tiles"])
    )


def _in_one_of_shown(q, k, v, lengths, table, scales, sinks, *, window, **options):
    """`_in_one` of caches of 8 bits, of which tiles see 16."""
    del window, sinks
    rule = "_ _ h _, _ _ h _, _, _ _, _ h _, _ h _"
    return _by_devices(of_shown_batch, q, (k, v, lengths, table, *scales), rule, **options)


def of_shown_batch(
    q, k, v, lengths, table, *scales,
    tiles: tuple[int, int], scale: float, softcap: float | None, splits: int | None, seen: int,
):  # fmt: skip
    """`of_batch` of caches of 8 bits, of whose pages tiles see at most `seen`."""
    del splits
    (n, t), options = tiles, {"scale": scale, "softcap": softcap}
    last = slice(n + t - 1, None, t)
    into = narrow_caches.attention(q[:, None], k, v, lengths[:n], table[:n], scales, window=None, **options)
    ends = lengths[last]
    k, v, places = shown_pages.pages(k, v, ends, table[last], scales, most=seen, dtype=q.dtype)
    return hopper_chunks.chunks(q, k, v, ends, places, into[:, 0], t=t, **options)


def _by_devices(run, q, operands, rule: str, **options):
    """run(q, *operands), whose operands are cut as `rule` says; each device has its heads."""
    grouped = q.reshape(q.shape[0], operands[0].shape[2], -1, q.shape[2])
    fixed = tuple(sorted(options.items()))
    return jt.partitioned(_of_a_device(run, fixed), f"_ h _ _, {rule} -> _ h _ _")(grouped, *operands).reshape(q.shape)


@functools.lru_cache(maxsize=128)
def _of_a_device(run, options: tuple[tuple[str, Any], ...]):
    """The function for `jt.partitioned`, of q [tokens, kv heads, group, d]; under vmap it is the one with two calls."""
    fixed = dict(options)

    def flat(run):
        return lambda q, *others: run(q.reshape(q.shape[0], -1, q.shape[3]), *others).reshape(q.shape)

    def attend_in_tiles(q, *others):
        return flat(functools.partial(run, **fixed))(q, *others)

    batched_run = jax.custom_batching.custom_vmap(attend_in_tiles)

    @batched_run.def_vmap
    def _(size: int, batched, *operands):
        apart = lambda q, k, v, lengths, table, *scales: _apart(
            q, k, v, lengths, table, scales, None, **({"window": None} | fixed)
        )
        axes = [0 if there else None for there in batched]
        return jax.vmap(flat(apart), axes, axis_size=size)(*operands), True

    return batched_run


_op = Op(
    "mixed_attention",
    Implementation("two kernels for one array", _in_one, _misfit, BLOCK_LEVEL, portable=False),
    Implementation(
        "two kernels for one array, of 8 bits shown as 16", _in_one_of_shown, _shown_misfit, BLOCK_LEVEL, portable=False
    ),
    Implementation("two kernels for one array, of 8 bits", _in_one_of_eight_bits, _narrow_misfit, portable=False),
    Implementation("apart, then together", _apart),
)


def mixed_attention_reference(q, k, v, lengths, pages, *, tiles, scales=None, scale=None, seen=None, **options):
    """`mixed_attention` in jnp: each token is a row of its own."""
    del tiles, seen
    return decode_attention_reference(q, k, v, lengths, pages=pages, scales=scales, scale=scale, **options)
