"""Attention of a server's step over caches of 8 bits on GPUs, whose keys are in no parts: tokens that stand alone, and
tiles of prompts behind them, which two kernels write into one array."""

from __future__ import annotations

import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, machine, tuned
from jtile.ops.dispatch import first_unmet, vector_cores
from jtile.ops.online_softmax import normalised
from jtile.ops.split_attention import as_halves, over_keys

_FEW = 16  # queries of a program that fill no tile of a warpgroup's product


@jt.function
def _attended(q, k, v, lengths, table, scales, o, first, **options):
    """The body of both kernels: the attention of tile `first + program` of q [tiles, t, heads, d]."""
    tile, g = first + jt.program_id(0), jt.program_id(1)
    t, d, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    _, l, acc = over_keys(q, tile, k, v, lengths, table, scales, **options)
    o.tiles(None, t, group, d)[tile, 0, g, 0] = normalised(acc, l).reshape(t, group, d).astype(o.dtype)


def _grid(q, k, v, lengths, *_, **__):
    return lengths.shape[0], k.shape[2]


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid)
def narrow_rows(
    q, k, v, lengths, table, scales, o,
    *, bk: int, scale: float, softcap: float | None, window: int | None, stages: int, half: bool = False,
):  # fmt: skip
    """Attention of the first n tiles of q [tiles, t, heads, d], those of lengths int32 [n]; the others of the output
    are not written. k, v, table, scales, half: see `decode_splits`."""
    options = {"bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": stages, "half": half}
    _attended(q, k, v, lengths, table, scales, o, jnp.int32(0), **options)


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid, alias={"into": "o"})
def narrow_tiles(
    q, k, v, lengths, table, scales, into, o,
    *, bk: int, scale: float, softcap: float | None, window: int | None, stages: int,
):  # fmt: skip
    """Attention of the last n tiles of q, those of lengths int32 [n]; those in front keep what `into` has."""
    options = {"bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": stages}
    _attended(q, k, v, lengths, table, scales, o, jnp.int32(q.shape[0] - lengths.shape[0]), **options)


def misfit(q, k, scales) -> str | None:
    """Why `attention` cannot run this call, None where it can."""
    return first_unmet(
        (not machine().whole and not vector_cores(), "the target is no GPU"),
        (bool(scales), f"the cache is {k.dtype.name}, without scales"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"queries are {q.dtype.name}, not 16-bit floats"),
    )


def attention(q, k, v, lengths, table, scales, into=None, *, scale: float, softcap: float | None, window: int | None):
    """`decode_attention` in pages of the first tiles of q [tiles, t, heads, d] that have lengths, or, with `into`, an
    array like q, of the last ones, in its place.

    An H200 takes for 256 rows of 1152 keys and one token 153 to 164 us with a warp and 5 tiles of 32 keys under way;
    for 8192 tokens of prompts of 1024 in tiles of 32 tokens, and so 128 queries, 305; see docs/notes/attention.md.
    """
    few, page = q.shape[1] * q.shape[2] // k.shape[2] <= _FEW, k.shape[1]
    most = min(fit(page, 32 if few else 64), page)
    bk = max(x for x in range(1, most + 1) if page % x == 0)
    options = {"bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": 5 if few else 2}
    how = {"num_warps": 1} if few else {"num_warps": 4, "specialize": False}
    if into is None:
        half = few and as_halves(q, k)
        return tuned(narrow_rows, **how)(q, k, v, lengths, table, scales, half=half, **options)
    return tuned(narrow_tiles, **how)(q, k, v, lengths, table, scales, into, **options)
