"""The families of the soak: `FAMILIES[name](draw)` is one random call of an op whose kernels run at the block level on
Hopper, now and then one that has to stay at tile level."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from library import ROUGH
from soak import Case, Draw

from jtile import ops
from jtile.ops import flash_attention, quantized
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.grouped_matmul import grouped_matmul_reference
from jtile.ops.latent_attention import mla_decode_reference
from jtile.ops.latent_prefill import mla_attention_reference
from jtile.ops.matmul import matmul_reference
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.scaled_matmul import scaled_matmul_reference
from jtile.ops.split_attention import decode_attention_reference

ROUNDED = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 3e-5, "int32": 0.0}  # sums of a tensor core
CODES = {"bfloat16": 1e-2, "float16": 1.5e-3}  # quantised weights are rounded to the dtype of many rows
WEIGHTS = {"bfloat16": 5e-3, "float16": 1e-3}  # weights of values are rounded too
SLOPES = {"bfloat16": 1e-2, "float16": 2e-3}  # and the slopes of scores
SCORES = 1 << 25  # elements of the largest matrix of scores of a reference
ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")


def text(op: str, **of: Any) -> str:
    return f"{op} " + ", ".join(f"{k} {v}" for k, v in of.items())


def operands(draw: Draw, m: int, n: int, k: int, dtype: str, ta: bool, tb: bool, batch: tuple[int, ...] = ()):
    """[m, k] and [k, n], transposed where asked for."""
    shapes = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    return [draw.numbers(*batch, *s, dtype=dtype) for s in shapes]


def both(op: Callable, reference: Callable, **options: Any) -> tuple[Callable, Callable]:
    return functools.partial(op, **options), functools.partial(reference, **options)


# -- products ---------------------------------------------------------------------------------------------------------

FULL = ((512, 2048, 8192), (2048, 2048, 2048), (4096, 4096, 4096), (256, 1024, 16384), (8192, 8192, 8192))
PRODUCTS = ("matmul", "matmul_parts")


def products(draw: Draw) -> Case:
    """16-bit floats in every order of the operands, with what follows; some sums in parts; odd sizes."""
    dtype, ta, tb = draw.of("bfloat16", "float16"), draw.of(False, True), draw.of(False, True)
    if draw.chance(0.15):
        (m, n, k), batch = draw.of(*FULL), ()
    else:
        batch = draw.of((), (), (), (), (3,))
        step = draw.of(8, 8, 8, 8, 8, 1)
        m, n, k = (
            draw.size(65, 3000, 8 if ta and step == 8 else 1),
            draw.size(64, 3000, step),
            draw.size(72, 4096, step),
        )
    activation, bias, wide = draw.of(*ACTIVATIONS), draw.chance(0.5), draw.chance(0.2)
    options = dict(transpose_a=ta, transpose_b=tb, activation=activation, out_dtype="float32" if wide else dtype)
    run, reference = (lambda a, b, *c, f=f: f(a, b, bias=c[0] if c else None, **options)
                      for f in (ops.matmul, matmul_reference))  # fmt: skip
    of = lambda: (*operands(draw, m, n, k, dtype, ta, tb, batch), *([draw.numbers(n, dtype=dtype)] if bias else []))
    whole = n % 8 == 0 and k % 8 == 0 and (not ta or m % 8 == 0)
    level = "block" if whole else None  # what tensor maps do not take is padded, or stays at tile level
    what = text("matmul", m=m, n=n, k=k, dtype=dtype, batch=batch, bias=bias, **options)
    return Case(run, reference, of, what, ROUNDED[options["out_dtype"]], PRODUCTS, level)


def long_sums(draw: Draw) -> Case:
    """Few tiles and many terms: sums in parts, where that is predicted to be quicker."""
    dtype, ta, tb = draw.of("bfloat16", "float16"), draw.of(False, True), draw.of(False, True)
    m, n, k = draw.size(72, 400, 8), draw.size(64, 400, 8), draw.size(8192, 40000, 8, small=16384)
    activation, bias = draw.of(*ACTIVATIONS), draw.chance(0.5)
    options = dict(transpose_a=ta, transpose_b=tb, activation=activation)
    run, reference = (lambda a, b, *c, f=f: f(a, b, bias=c[0] if c else None, **options)
                      for f in (ops.matmul, matmul_reference))  # fmt: skip
    of = lambda: (*operands(draw, m, n, k, dtype, ta, tb), *([draw.numbers(n, dtype=dtype)] if bias else []))
    what = text("matmul", m=m, n=n, k=k, dtype=dtype, bias=bias, **options)
    return Case(run, reference, of, what, ROUNDED[dtype], PRODUCTS)


def products_of_bytes(draw: Draw) -> Case:
    """int8 and 8-bit floats: at the block level where both operands lie along k."""
    dtype = draw.of("float8_e4m3fn", "int8", "float8_e5m2")
    ta, tb = draw.chance(0.08), not draw.chance(0.12)
    step = draw.of(16, 16, 16, 16, 1)
    m, n, k = draw.size(65, 3000, 16 if ta else 1), draw.size(64, 3000, step), draw.size(144, 6000, step)
    if draw.chance(0.08):
        m, n, k = draw.of(*FULL[1:3])
    out = "int32" if dtype == "int8" else draw.of("bfloat16", "float32")
    activation = None if dtype == "int8" else draw.of(*ACTIVATIONS)
    options = dict(transpose_a=ta, transpose_b=tb, activation=activation, out_dtype=out)
    run, reference = both(ops.matmul, matmul_reference, **options)
    if dtype == "int8":
        reference = functools.partial(_whole_products, ta=ta, tb=tb)
    level = "tile" if ta or not tb else "block" if n % 16 == 0 and k % 16 == 0 else None
    return Case(
        run, reference, lambda: tuple(operands(draw, m, n, k, dtype, ta, tb)),
        text("matmul", m=m, n=n, k=k, dtype=dtype, **options), max(ROUNDED[out], ROUGH * (out == "float32")), PRODUCTS,
        level,
    )  # fmt: skip


def _whole_products(a, b, *, ta: bool, tb: bool):
    """Exact sums of int8: XLA's int32 product of a GPU takes no transposes and few sizes, sums of float32 of up to 512
    terms are exact."""
    a, b = (x.T if t else x for x, t in ((a, ta), (b, tb)))
    pad = -a.shape[1] % 512
    A = jnp.pad(a, ((0, 0), (0, pad))).astype(jnp.float32).reshape(a.shape[0], -1, 512)
    B = jnp.pad(b, ((0, pad), (0, 0))).astype(jnp.float32).reshape(-1, 512, b.shape[1])
    return sum(jnp.matmul(A[:, p], B[p], precision="highest").astype(jnp.int32) for p in range(A.shape[1]))


def scaled_products(draw: Draw) -> Case:
    """Narrow operands with one scale, or with scales of blocks."""
    dtype = draw.of("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", "bfloat16")
    blocks, tb, fast = not draw.chance(0.3), not draw.chance(0.1), draw.chance(0.25)
    m, n, k = draw.size(65, 3000), draw.size(64, 3000, 16), draw.size(144, 5000, 16)
    if draw.chance(0.08):
        m, n, k = 4096, 4096, 4096
    out = draw.of("bfloat16", "float32")
    options = dict(transpose_b=tb, out_dtype=out)
    run = functools.partial(ops.scaled_matmul, precision="fast" if fast else None, **options)

    def of():
        parts, columns = -(-k // 128), -(-n // 128)
        sides = (columns, parts) if tb else (parts, columns)
        shapes = ((m, parts), sides) if blocks else ((), ())
        return *operands(draw, m, n, k, dtype, False, tb), *(jnp.exp(draw.numbers(*s)) for s in shapes)

    narrow = fast and dtype != "bfloat16"
    return Case(
        run, functools.partial(scaled_matmul_reference, **options), of,
        text("scaled_matmul", m=m, n=n, k=k, dtype=dtype, blocks=blocks, fast=fast, **options),
        max(ROUNDED[out], 3e-3 if narrow else ROUGH), ("scaled_products", "products_times"),
        "block" if tb or dtype == "bfloat16" else "tile",
    )  # fmt: skip


def few_rows(draw: Draw) -> Case:
    """Products that read a matrix for 1 to 64 rows: one or two at the block level, and 64."""
    dtype = draw.of("bfloat16", "float16")
    m, tb = draw.of(1, 2, 1, 2, 16, 64, draw.size(3, 63)), not draw.chance(0.2)
    n, k = draw.size(64, 6000, 8), draw.size(136, 8192, 8)
    activation, bias = draw.of(*ACTIVATIONS), draw.chance(0.3)
    options = dict(transpose_b=tb, activation=activation)
    run, reference = (lambda a, b, *c, f=f: f(a, b, bias=c[0] if c else None, **options)
                      for f in (ops.matmul, matmul_reference))  # fmt: skip
    of = lambda: (*operands(draw, m, n, k, dtype, False, tb), *([draw.numbers(n, dtype=dtype)] if bias else []))
    what = text("matmul", m=m, n=n, k=k, dtype=dtype, bias=bias, **options)
    streamed = tb and m <= 2
    kernels, level = (("hopper_gemv",), "block") if streamed else (PRODUCTS, None)
    return Case(run, reference, of, what, ROUNDED[dtype], kernels, level)


def gated(draw: Draw) -> Case:
    dtype, tb, activation = draw.of("bfloat16", "float16"), draw.chance(0.5), draw.of(*ACTIVATIONS[1:])
    m, n, k = draw.size(65, 2500), draw.size(64, 3000, 8), draw.size(72, 3000, 8)
    options = dict(transpose=tb, activation=activation)

    def of():
        x, gate = operands(draw, m, n, k, dtype, False, tb)
        x = x * jnp.asarray(k**-0.5, x.dtype)  # products of two sums stay in float16
        return x, gate, draw.numbers(*gate.shape, dtype=dtype)

    what = text("gated_mlp", m=m, n=n, k=k, dtype=dtype, **options)
    return Case(*both(ops.gated_mlp, gated_mlp_reference, **options), of, what, ROUNDED[dtype], ("gated_mlp",))


# -- groups -----------------------------------------------------------------------------------------------------------


def _groups(draw: Draw) -> tuple[dict[str, Any], Callable[[], tuple[Any, ...]]]:
    """Uneven groups, some of them empty, and rows behind them."""
    dtype, tw = draw.of("bfloat16", "float16"), draw.of(False, True)
    groups = draw.of(3, 1, 5, 8, 16, 33, 64)
    n, k = draw.size(64, 1500, 8), draw.size(72, 1500, 8)
    rows = draw.size(100, min(4000, SCORES // (groups * max(n, k))))
    shares = draw.rng.exponential(size=groups) ** 2 * (draw.rng.random(groups) > 0.2)
    total = rows - draw.of(7, 0, rows // 5)
    sizes = np.floor(shares / max(shares.sum(), 1e-9) * total).astype(np.int32)

    def of():
        x = draw.numbers(rows, k, dtype=dtype)
        w = draw.numbers(groups, *((n, k) if tw else (k, n)), dtype=dtype)
        return x, w, jnp.asarray(sizes)

    return dict(rows=rows, n=n, k=k, dtype=dtype, transpose_w=tw, sizes=sizes.tolist()), of


def grouped(draw: Draw) -> Case:
    about, of = _groups(draw)
    fns = both(ops.grouped_matmul, grouped_matmul_reference, transpose_w=about["transpose_w"])
    return Case(*fns, of, text("grouped_matmul", **about), ROUNDED[about["dtype"]], ("grouped_rows",))


def slopes_of(f: Callable, moved: int) -> Callable:
    """The result of `f` and its slopes by the first arguments, for a cotangent that stands in front of them."""

    def run(ct, *args):
        y, back = jax.vjp(lambda *x: f(*x, *args[moved:]), *args[:moved])
        return y, *back(ct)

    return run


def grouped_slopes(draw: Draw) -> Case:
    about, of = _groups(draw)
    fns = both(ops.grouped_matmul, grouped_matmul_reference, transpose_w=about["transpose_w"])
    with_ct = lambda: (draw.numbers(about["rows"], about["n"], dtype=about["dtype"]), *of())
    run, reference = (slopes_of(f, 2) for f in fns)
    kernels = "grouped_rows", "grouped_outer"
    return Case(run, reference, with_ct, text("slopes of groups", **about), ROUNDED[about["dtype"]], kernels)


# -- attention --------------------------------------------------------------------------------------------------------


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
    most = math.isqrt(SCORES // (at["batch"] * at["heads"]))
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
        lengths, offsets = (() if x not in given else (given[x],) for x in ("lengths", "offsets"))
        more = dict(scale=scale, softcap=None, window=bounds, save=True)
        return flash_attention._run(q, k, v, lengths, offsets, **more, **tiles)

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
    return jnp.where(jnp.isinf(sums), flash_attention.EMPTY, sums)


def attention_slopes(draw: Draw) -> Case:
    """Backwards. The slope of q, result 1, is added up by atomics in any order."""
    dtype, sizes, options = draw.of("bfloat16", "float16"), _heads(draw, (64, 80, 96, 128)), _modes(draw)
    lines = _lines(draw, sizes["batch"], sizes["t"], sizes["s"])
    fns = (_of_lines(f, tuple(lines), **options) for f in (ops.attention, flash_attention.attention_reference))
    run, reference = (slopes_of(f, 3) for f in fns)

    def of():
        q, *rest = _qkv(draw, dtype, lines, **sizes)
        return draw.numbers(*q.shape, dtype=dtype), q, *rest

    what = text("slopes of attention", dtype=dtype, **sizes, **options, **lines)
    return Case(run, reference, of, what, SLOPES[dtype], ("hopper_attention_backward",), unordered=(1,))


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
    most = min(2000, math.isqrt(SCORES // (batch * heads)))
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


def latent_slopes(draw: Draw) -> Case:
    about, of, run, reference = _latent(draw)

    def with_ct():
        q, *rest = of()
        return draw.numbers(*q.shape[:3], about["d"], dtype=about["dtype"]), q, *rest

    fns, what = (slopes_of(run, 4), slopes_of(reference, 4)), text("slopes of mla_attention", **about)
    kernels = ("latent_slopes_of_queries",)  # those of keys take too many registers for roles
    return Case(*fns, with_ct, what, SLOPES[about["dtype"]], kernels, _loops(about["t"], about["s"]))


# -- quantised weights ------------------------------------------------------------------------------------------------


def _weights(draw: Draw, kind: str, out: int, inner: int) -> QuantizedTensor:
    """Packed weights of any codes; scales near those of normal weights."""
    four = kind in ("q4_0", "q4_1")
    codes = draw.numbers(out, inner // (8 if four else 4), dtype="uint32")
    blocks, dtype = (1, "float32") if kind == "int8" else (inner // 32, "float16")
    positive = lambda: jnp.abs(draw.numbers(out, blocks, dtype=dtype)) * jnp.asarray(1 / (8 if four else 128), dtype)
    return QuantizedTensor(codes, positive(), -8 * positive() if kind == "q4_1" else None, kind)


def _packed(draw: Draw, rows: int, kernels: tuple[str, ...]) -> Case:
    kind, gate = draw.of("q4_0", "int8", "q8_0", "q4_1"), draw.chance(0.25)
    dtype = draw.of("bfloat16", "float16", *["float32"] * (rows <= 2))
    out, inner = draw.size(64, 4000), draw.size(256, 8192, 32 if kind == "int8" else 256)
    activation, bias = draw.of(*ACTIVATIONS[gate:]), draw.chance(0.3) and not gate
    residual = draw.chance(0.3) and not gate

    def of():
        weights = [_weights(draw, kind, out, inner) for _ in range(1 + gate)]
        more = [draw.numbers(out)] * bias + [draw.numbers(rows, out)] * residual
        return draw.numbers(rows, inner, dtype=dtype), *weights, *more

    def fn(product, gated):
        def run(x, *rest):
            if gate:
                return gated(x, *rest, activation=activation).astype(jnp.float32)
            weight, *more = rest
            named = dict(bias=more[0] if bias else None, residual=more[-1] if residual else None)
            return product(x, weight, activation=activation, **named)

        return run

    tolerance = ROUNDED["float32"] if rows == 1 or dtype == "float32" else CODES[dtype]
    wide = lambda x, *rest, **options: gated_mlp_reference(x.astype(jnp.float32), *rest, **options)
    about = dict(rows=rows, out=out, inner=inner, kind=kind, dtype=dtype, gated=gate, bias=bias, residual=residual)
    return Case(
        fn(ops.quantized_matmul, ops.gated_mlp), fn(quantized.quantized_matmul_reference, wide), of,
        text("quantised", activation=activation, **about), tolerance, kernels,
    )  # fmt: skip


def quantized_rows(draw: Draw) -> Case:
    """One or two rows of x."""
    return _packed(draw, draw.of(1, 2), ("hopper_gemv", "hopper_quantized_product"))


def quantized_products(draw: Draw) -> Case:
    """Many rows of x."""
    return _packed(draw, draw.of(16, 64, 256, draw.size(3, 600)), ("hopper_quantized_product",))


# New ones go to the end: a family's number is the seed of its shapes.
FAMILIES: dict[str, Callable[[Draw], Case]] = {
    f.__name__: f
    for f in (
        products, products_of_bytes, scaled_products, few_rows, gated, grouped, grouped_slopes, attention,
        attention_saved, attention_slopes, decode, latent_decode, latent_prefill, latent_slopes, quantized_rows,
        quantized_products, long_sums,
    )
}  # fmt: skip
