"""The families of the soak that are attention: over sequences, both ways, over caches, of latent vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from soak import LARGEST, Case, Draw, gradients_of, text

from jtile import ops
from jtile.ops import flash_attention, online_softmax
from jtile.ops.latent_attention import mla_decode_reference
from jtile.ops.latent_prefill import mla_attention_reference
from jtile.ops.mixed_attention import mixed_attention, mixed_attention_reference
from jtile.ops.split_attention import decode_attention_reference

WEIGHTS = {"bfloat16": 5e-3, "float16": 1e-3}  # weights of values are rounded too
GRADIENTS = {"bfloat16": 1e-2, "float16": 2e-3}  # and the gradients of scores


def _lines(draw: Draw, batch: int, t: int, s: int) -> dict[str, list[int]]:
    """Lengths and offsets of rows, or neither."""
    found = {}
    if draw.chance(0.3):
        found["lengths"] = [int(draw.of(s, 0, draw.rng.integers(1, s + 1))) for _ in range(batch)]
    if draw.chance(0.2):
        found["offsets"] = [int(draw.rng.integers(0, max(s - t, 1) + 1)) for _ in range(batch)]
    return found


def _modes(draw: Draw) -> dict[str, Any]:
    """Options of attention."""
    causal = draw.chance(0.6)
    options: dict[str, Any] = {"causal": causal}
    if draw.chance(0.3):
        options["window"] = draw.of(1, 50, 300, (100, 20), (None, 70), (64, None))
    return options


def _heads(draw: Draw, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Sizes of one call of attention; the matrix of its scores is not too large for the reference."""
    kv = draw.of(1, 2, 3)
    at = dict(batch=draw.of(1, 2, 3), heads=kv * draw.of(2, 1, 4), kv=kv, d=draw.of(*sizes))
    most = math.isqrt(LARGEST // (at["batch"] * at["heads"]))
    size = lambda: draw.size(64, min(2500, most), small=260)
    t = size()
    return at | dict(t=t, s=t if draw.chance(0.4) else size())


def _loops(t: int, s: int) -> str | None:
    """Where attention of these sizes runs: keys of one or two tiles need no loop, and so no roles."""
    return "block" if min(t, s) > 256 else None


def _qkv(draw: Draw, dtype: str, lines: dict[str, list[int]], *, batch, heads, kv, d, t, s) -> list[Any]:
    """What stands behind a length is NaN. Then lengths and offsets, those there are."""
    q, k, v = (draw.numbers(batch, n, h, d, dtype=dtype) for n, h in ((t, heads), (s, kv), (s, kv)))
    if "lengths" in lines:
        behind = (np.arange(s)[None, :] >= np.asarray(lines["lengths"])[:, None])[:, :, None, None]
        k, v = (jnp.where(behind, jnp.asarray(jnp.nan, x.dtype), x) for x in (k, v))
    return [q, k, v, *(jnp.asarray(n, jnp.int32) for n in lines.values())]


def _of_lines(f: Callable, names: tuple[str, ...], **options: Any) -> Callable:
    """`f(q, k, v, *lines)` of `names`; the reference (`attention_reference`) sees zeros instead of NaN."""

    def run(q, k, v, *lines):
        if f is flash_attention.attention_reference:
            k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
        return f(q, k, v, **dict(zip(names, lines, strict=True)), **options)

    return run


def attention(draw: Draw) -> Case:
    """Forwards, of all sizes of heads, with a softcap too."""
    dtype, sizes, options = draw.of("bfloat16", "float16"), _heads(draw, (64, 80, 96, 128, 256)), _modes(draw)
    lines = _lines(draw, sizes["batch"], sizes["t"], sizes["s"])
    if draw.chance(0.1):
        options["softcap"] = 20.0
    if draw.chance(0.04):
        sizes |= dict(batch=1, heads=2, kv=1, t=4096, s=4096)
        lines = {}
    run, reference = (
        _of_lines(f, tuple(lines), **options) for f in (ops.attention, flash_attention.attention_reference)
    )
    level = _loops(sizes["t"], sizes["s"])
    what = text("attention", dtype=dtype, **sizes, **options, **lines)
    of = lambda: tuple(_qkv(draw, dtype, lines, **sizes))
    return Case(run, reference, of, what, WEIGHTS[dtype], ("flash_attention",), level)


def attention_saved(draw: Draw) -> Case:
    """Forwards with the log-sum-exp of every query, as reverse mode needs it."""
    dtype, sizes, options = draw.of("bfloat16", "float16"), _heads(draw, (64, 128, 256)), _modes(draw)
    bounds = flash_attention.window_of("soak", options.get("window"), options["causal"])
    lines = _lines(draw, sizes["batch"], sizes["t"], sizes["s"])
    scale = sizes["d"] ** -0.5

    def run(q, k, v, *rest):
        given = dict(zip(lines, rest, strict=True))
        tiles = flash_attention._tiles(q.shape[1], k.shape[1], q.shape[3], 2, bounds[1] is not None, "lengths" in given)
        lengths, offsets = map(given.get, ("lengths", "offsets"))
        more = dict(scale=scale, softcap=None, window=bounds, save=True)
        return flash_attention._run(q, k, v, lengths, offsets, None, **more, **tiles)

    def reference(q, k, v, *rest):
        args = jnp.nan_to_num(k), jnp.nan_to_num(v)
        o = flash_attention.attention_reference(q, *args, **dict(zip(lines, rest, strict=True)), **options)
        return o, _log_sums(q, args[0], dict(zip(lines, rest, strict=True)), bounds, scale)

    level = _loops(sizes["t"], sizes["s"])
    what = text("attention, saved", dtype=dtype, **sizes, **options, **lines)
    of = lambda: tuple(_qkv(draw, dtype, lines, **sizes))
    return Case(run, reference, of, what, WEIGHTS[dtype], ("flash_attention",), level)


def _log_sums(q, k, lines: dict[str, Any], window: tuple[int | None, int | None], scale: float):
    """[batch, heads, t]: of the scores in powers of two; `EMPTY` for a query that sees no key."""
    (batch, t, heads, d), (s, kv) = q.shape, k.shape[1:3]
    grouped = q.astype(jnp.float32).reshape(batch, t, kv, heads // kv, d)
    x = jnp.einsum("btghd,bsgd->bghts", grouped, k.astype(jnp.float32), precision="highest") * scale
    at = jnp.arange(t)[None, :, None] + lines.get("offsets", jnp.zeros(batch, jnp.int32))[:, None, None]
    keys = jnp.arange(s)[None, None, :]
    seen = keys < lines.get("lengths", jnp.full(batch, s))[:, None, None]
    seen = seen if window[0] is None else seen & (keys >= at - window[0])
    seen = seen if window[1] is None else seen & (keys <= at + window[1])
    x = jnp.where(seen[:, None, None], x, -jnp.inf)
    sums = jax.scipy.special.logsumexp(x, -1).reshape(batch, heads, t) * math.log2(math.e)
    return jnp.where(jnp.isinf(sums), online_softmax.EMPTY, sums)


def attention_gradients(draw: Draw) -> Case:
    """Backwards. The gradient of q, result 1, is added up by atomics in any order."""
    dtype, sizes, options = draw.of("bfloat16", "float16"), _heads(draw, (64, 80, 96, 128)), _modes(draw)
    lines = _lines(draw, sizes["batch"], sizes["t"], sizes["s"])
    fns = (_of_lines(f, tuple(lines), **options) for f in (ops.attention, flash_attention.attention_reference))
    run, reference = (gradients_of(f, 3) for f in fns)

    def of():
        q, *rest = _qkv(draw, dtype, lines, **sizes)
        return draw.numbers(*q.shape, dtype=dtype), q, *rest

    what = text("gradients of attention", dtype=dtype, **sizes, **options, **lines)
    return Case(run, reference, of, what, GRADIENTS[dtype], ("hopper_attention_backward",), unordered=(1,))


# -- caches -----------------------------------------------------------------------------------------------------------


def _pages(draw: Draw, batch: int, slots: int, page: int) -> np.ndarray:
    """[batch, pages of a row]: all pages in any order."""
    return draw.rng.permutation(batch * slots // page).reshape(batch, -1).astype(np.int32)


def _in_pages(x, table: np.ndarray):
    """[batch, slots, ...] -> [pages, slots of a page, ...] as the table says."""
    cut = x.reshape(table.size, -1, *x.shape[2:])
    return cut[np.argsort(table.reshape(-1))]


def _used(draw: Draw, batch: int, slots: int, t: int) -> np.ndarray:
    """Lengths of rows: full, short, none, any."""
    some = [draw.of(slots, t, 1, 0, *draw.rng.integers(1, slots + 1, 4)) for _ in range(batch)]
    return np.asarray(some, np.int32)


def decode(draw: Draw) -> Case:
    """Newest tokens over caches of keys and values; pages of fewer than 64 slots may stay at tile level."""
    dtype, d, kv = draw.of("bfloat16", "float16"), draw.of(64, 128, 128, 256), draw.of(2, 1, 4, 8)
    page, t = draw.of(64, None, None, 16, 32, 64, 128), draw.of(2, 1, 1, 3, 4)
    group, batch = draw.of(2, 1, 4, 8, 16 // max(t // 2, 1)), draw.of(2, 1, 3, 7, 16)
    slots = draw.size(128, (1 << 22) // (batch * kv * 64), page or 1)
    softcap = 20.0 if draw.chance(0.15) else None
    lengths, table = _used(draw, batch, slots, t), None if page is None else _pages(draw, batch, slots, page)

    def of():
        k, v = (draw.numbers(batch, slots, kv, d, dtype=dtype) for _ in range(2))
        behind = (np.arange(slots)[None, :] >= lengths[:, None])[:, :, None, None]
        k, v = (jnp.where(behind, jnp.asarray(jnp.nan, x.dtype), x) for x in (k, v))
        k, v = (k, v) if table is None else (_in_pages(x, table) for x in (k, v))
        q = draw.numbers(batch, t, kv * group, d, dtype=dtype)
        return q, k, v, jnp.asarray(lengths), *([] if table is None else [jnp.asarray(table)])

    def run(q, k, v, lengths, *pages):
        return ops.decode_attention(q, k, v, lengths, pages=pages[0] if pages else None, softcap=softcap)

    def reference(q, k, v, lengths, *pages):
        args = jnp.nan_to_num(k), jnp.nan_to_num(v), lengths
        return decode_attention_reference(q, *args, pages=pages[0] if pages else None, softcap=softcap)

    what = text("decode", dtype=dtype, batch=batch, t=t, kv=kv, group=group, d=d, slots=slots, page=page,
                softcap=softcap, lengths=lengths.tolist())  # fmt: skip
    small = page is not None and page % 64
    names = ("hopper_decode", "decode_splits") if small else ("hopper_decode",)
    return Case(run, reference, of, what, WEIGHTS[dtype], names, None if small else "block")


def mixed(draw: Draw) -> Case:
    """Tokens that stand alone and tiles of prompts behind them, over caches in pages."""
    dtype, d, kv = draw.of("bfloat16", "float16"), draw.of(128, 128, 64), draw.of(2, 1, 4, 8)
    group, page, alone = draw.of(4, 2, 8, 16), draw.of(64, 64, 128), draw.of(1, 2, 5)
    t = 128 // group
    rows = alone + draw.of(1, 2, 7)
    slots = draw.size(128, (1 << 22) // (rows * kv * 64), page)
    lengths, table = _used(draw, rows, slots, 1), _pages(draw, rows, slots, page)
    counts = np.minimum(draw.rng.integers(1, t + 1, rows), np.maximum(lengths, 1))  # tokens of each tile
    each = np.zeros(alone + -alone % t + (rows - alone) * t, np.int32)
    each[:alone] = lengths[:alone]
    of = np.concatenate([np.arange(alone), np.zeros(-alone % t, np.int64), np.repeat(np.arange(alone, rows), t)])
    for i, row in enumerate(range(alone, rows)):
        end = alone + -alone % t + (i + 1) * t
        each[end - counts[row] : end] = lengths[row] - np.arange(counts[row])[::-1]
    tiles = alone + -alone % t, t

    def arrays():
        k, v = (draw.numbers(rows, slots, kv, d, dtype=dtype) for _ in range(2))
        behind = (np.arange(slots)[None, :] >= lengths[:, None])[:, :, None, None]
        k, v = (_in_pages(jnp.where(behind, jnp.asarray(jnp.nan, x.dtype), x), table) for x in (k, v))
        q = draw.numbers(len(each), kv * group, d, dtype=dtype)
        return q, k, v, jnp.asarray(each), jnp.asarray(table[of])

    real = jnp.asarray(np.maximum(each, 0) > 0)[:, None, None]  # padding of tiles gets anything

    def run(q, k, v, lengths, pages):
        return jnp.where(real, mixed_attention(q, k, v, lengths, pages, tiles=tiles, splits=1), 0)

    def reference(q, k, v, lengths, pages):
        k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
        return jnp.where(real, mixed_attention_reference(q, k, v, lengths, pages, tiles=tiles), 0)

    what = text("mixed", dtype=dtype, kv=kv, group=group, d=d, slots=slots, page=page, lengths=lengths.tolist(),
                counts=counts.tolist(), alone=alone)  # fmt: skip
    return Case(run, reference, arrays, what, WEIGHTS[dtype], ("hopper_decode", "hopper_chunks"))


def latent_decode(draw: Draw) -> Case:
    """Newest tokens over latent caches (MLA)."""
    dtype, rank = draw.of("bfloat16", "float16"), draw.of(128, 512, 512, 512, 256)
    page, t = draw.of(64, None, None, 128), draw.of(1, 1, 2)
    heads, batch = draw.of(16, 32, 64, 128, 128), draw.of(2, 1, 3, 9, 20)
    slots = draw.size(128, min((1 << 23) // (batch * heads), 8192), page or 1)
    lengths, table = _used(draw, batch, slots, t), None if page is None else _pages(draw, batch, slots, page)

    def of():
        cache = draw.numbers(batch, slots, rank + 64, dtype=dtype)
        behind = (np.arange(slots)[None, :] >= lengths[:, None])[:, :, None]
        cache = jnp.where(behind, jnp.asarray(jnp.nan, cache.dtype), cache)
        q = draw.numbers(batch, t, heads, rank + 64, dtype=dtype)
        pages = [] if table is None else [jnp.asarray(table)]
        return q, cache if table is None else _in_pages(cache, table), jnp.asarray(lengths), *pages

    run, reference = (lambda q, c, n, *p, f=f: f(q, c, n, rank=rank, pages=p[0] if p else None)
                      for f in (ops.mla_decode, mla_decode_reference))  # fmt: skip
    what = text("mla_decode", dtype=dtype, batch=batch, t=t, heads=heads, rank=rank, slots=slots, page=page,
                lengths=lengths.tolist())  # fmt: skip
    return Case(run, reference, of, what, WEIGHTS[dtype], ("hopper_mla",))


def _latent(draw: Draw):
    """Sizes, options, lengths and offsets, and the arrays q, k, rope, v of MLA over a prompt."""
    dtype, batch, heads = draw.of("bfloat16", "float16"), draw.of(1, 2, 3), draw.of(2, 1, 4)
    d, r = draw.of((128, 64), (128, 64), (64, 64))
    most = min(2000, math.isqrt(LARGEST // (batch * heads)))
    size = lambda: draw.size(64, most, small=260)
    t = size()
    s = t if draw.chance(0.5) else size()
    lines, causal = _lines(draw, batch, t, s), not draw.chance(0.3)

    def of():
        arrays = ((t, heads, d + r), (s, heads, d), (s, r), (s, heads, d))
        q, k, rope, v = (draw.numbers(batch, *shape, dtype=dtype) for shape in arrays)
        return q, k, rope, v, *(jnp.asarray(n, jnp.int32) for n in lines.values())

    def fn(f):
        return lambda q, k, rope, v, *rest: f(q, k, rope, v, causal=causal, **dict(zip(lines, rest, strict=True)))

    about = dict(dtype=dtype, batch=batch, heads=heads, d=d, r=r, t=t, s=s, causal=causal, **lines)
    return about, of, fn(ops.mla_attention), fn(mla_attention_reference)


def latent_prefill(draw: Draw) -> Case:
    about, of, run, reference = _latent(draw)
    what, level = text("mla_attention", **about), _loops(about["t"], about["s"])
    return Case(run, reference, of, what, WEIGHTS[about["dtype"]], ("latent_prefill",), level)


def latent_gradients(draw: Draw) -> Case:
    about, of, run, reference = _latent(draw)

    def with_ct():
        q, *rest = of()
        return draw.numbers(*q.shape[:3], about["d"], dtype=about["dtype"]), q, *rest

    fns, what = (gradients_of(run, 4), gradients_of(reference, 4)), text("gradients of mla_attention", **about)
    kernels = ("latent_gradient_of_queries",)  # those of keys take too many registers for roles
    return Case(*fns, with_ct, what, GRADIENTS[about["dtype"]], kernels, _loops(about["t"], about["s"]))
