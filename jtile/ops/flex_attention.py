"""Attention whose scores and masks are functions of the caller, traced into the kernel (as FlexAttention, Dong et al.
2024), with blocks of keys that a tile of queries does not see left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_shape, sums_in
from jtile.ops.attention_windows import LOG2_E, Window

NOTHING = -1e30  # the running maximum before the first key: finite, so that no row subtracts infinities
EMPTY = 1e30  # the log-sum-exp of no scores
Function = Callable[..., Any] | None


def _seen(b, h, i, j, extras, *, mask: Function, window: Window, s: int):
    """Which keys j [1, bk] the queries i [bq, 1] see."""
    left, right = window
    seen = jnp.broadcast_to(j < s, (i.shape[0], j.shape[1]))
    seen = seen if right is None else seen & (j <= i + right)
    seen = seen if left is None else seen & (j >= i - left)
    return seen if mask is None else seen & mask(b, h, i, j, *extras)


def kept(key, b, h, i, j, heads: int, t: int, dropout: float):
    """The factors of the weights: 0, or 1 / (1 - dropout), as 32 random bits for each place b, h, i, j decide."""
    uint32 = lambda x: jnp.asarray(x).astype(jnp.uint32)
    row = uint32((b * heads + h) * t + i)
    drawn = threefry(key, *jnp.broadcast_arrays(row, uint32(j)))
    return jnp.where(drawn < jnp.uint32(min(round(dropout * 2**32), 2**32 - 1)), 0.0, 1.0 / (1.0 - dropout)).astype(
        jnp.float32
    )


def threefry(key, x, y):
    """The first word of threefry2x32 (Salmon et al. 2011), the generator of `jax.random`, at the counter (x, y)."""
    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    x, y = x + keys[0], y + keys[1]
    for block in range(5):
        for turn in (13, 15, 26, 6) if block % 2 == 0 else (17, 29, 16, 24):
            x = x + y
            y = x ^ ((y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn)))
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x


def key_words(op: str, key, dropout: float):
    """The two words of a key where something is dropped, else None."""
    if isinstance(dropout, bool) or not isinstance(dropout, float | int | np.floating):
        raise KernelTypeError(f"{op}: dropout is a number of 0 to less than 1, got {dropout!r}")
    if not 0 <= dropout < 1:
        raise KernelValueError(f"{op}: dropout is a share of 0 to less than 1, got {dropout}")
    if dropout == 0:
        return None
    if key is None:
        raise KernelValueError(f"{op}: dropout takes a key: key=jax.random.key(seed)")
    if not hasattr(key, "dtype"):
        raise KernelTypeError(f"{op}: key is an array of two words, got {type(key).__name__}; jax.random.key(seed)")
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if words.shape != (2,) or words.dtype != jnp.uint32:
        raise KernelValueError(f"{op}: key is a key of threefry2x32, two words, got {words.dtype.name}{words.shape}")
    return words


def _types(q, *_, save: bool, **__):
    """The types of o and, with `save`, of the log-sum-exp of every query's scores, in powers of two."""
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), sums_in(q))
    return (jt.like(q), lse) if save else jt.like(q)


@jt.kernel(
    out_type=_types, grid=lambda q, *_, bq, **__: (q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq))
)  # fmt: skip
def flex_attention(
    q, k, v, extras, ranges, key, o, lse=None,
    *, bq: int, bk: int, scale: float, softcap: float | None, score: Function, mask: Function, window: Window,
    dropout: float, save: bool, precision: str | None = None,
):  # fmt: skip
    """q, o [batch, t, heads, d]; k, v [batch, s, kv heads, d]; ranges: see `mask_ranges`; key: uint32 [2] or
    None; lse [batch, heads, t]."""
    # The online softmax of `flash_attention`, with s_ij = score(scale q_i . k_j, b, h, i, j), -inf where masked.
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, kv, wide = q.shape[3], h // (q.shape[2] // k.shape[2]), sums_in(q)
    Q, K, V, O = (x.tiles(None, n, None, d) for x, n in ((q, bq), (k, bk), (v, bk), (o, bq)))
    q_i, rows = Q[b, i, h, 0], i * bq + jt.arange(bq)[:, None]
    of = (b if ranges.shape[0] > 1 else 0), (h if ranges.shape[1] > 1 else 0), i
    m, l, acc = jt.full((bq,), NOTHING, wide), jt.zeros((bq,), wide), jt.zeros((bq, d), wide)
    for j in jt.range(jnp.maximum(ranges[*of, 0], 0), jnp.minimum(ranges[*of, 1], K.shape[1])):
        columns = j * bk + jt.arange(bk)[None, :]
        s = jt.dot(q_i, K[b, j, kv, 0].T, precision=precision) * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        if score is not None:
            s = score(s, b, h, rows, columns, *extras).astype(wide)
        seen = _seen(b, h, rows, columns, extras, mask=mask, window=window, s=k.shape[1])
        s = jnp.where(seen, s * LOG2_E, -jnp.inf)
        top = jnp.maximum(m, s.max(1))
        p, fade = jnp.exp2(s - top[:, None]), jnp.exp2(m - top)
        weights = p
        if key is not None:
            weights = p * kept((key[0], key[1]), b, h, rows, columns, q.shape[2], q.shape[1], dropout).astype(wide)
        acc = jt.dot(weights.astype(v.dtype), V[b, j, kv, 0], acc * fade[:, None], precision=precision)
        l = l * fade + p.sum(1)
        m = top
    O[b, i, h, 0] = (acc * jnp.where(l == 0, 0.0, 1.0 / l)[:, None]).astype(o.dtype)
    if lse is not None:
        lse.tiles(None, None, bq)[b, h, i] = jnp.where(l == 0, EMPTY, m + jnp.log2(jnp.where(l == 0, 1.0, l)))


def _tiles_of_masks(_, q, k, *, by: tuple[bool, bool], bq: int, **__):
    """The batch rows and heads that have ranges of their own, and the tiles of queries."""
    return q.shape[0] if by[0] else 1, q.shape[2] if by[1] else 1, jt.cdiv(q.shape[1], bq)


@jt.kernel(
    out_type=lambda *x, **meta: jax.ShapeDtypeStruct((*_tiles_of_masks(*x, **meta), 2), jnp.int32), grid=_tiles_of_masks
)
def mask_ranges(extras, q, k, ranges, *, by: tuple[bool, bool], bq: int, bk: int, mask: Function, window: Window):
    """ranges [batch or 1, heads or 1, tiles of queries, 2]: the first block of keys that a tile sees any of, and one
    behind the last; of q [batch, t, heads, d] and k [batch, s, kv heads, d] only the shapes are read, and `by` says
    whether the mask reads the numbers of batch rows and heads."""
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    t, s = q.shape[1], k.shape[1]
    rows, count = i * bq + jt.arange(bq)[:, None], jt.cdiv(s, bk)
    first, end = jnp.int32(count), jnp.int32(0)
    for j in jt.range(count):
        seen = _seen(b, h, rows, j * bk + jt.arange(bk)[None, :], extras, mask=mask, window=window, s=s) & (rows < t)
        some = seen.any()
        first = jnp.where(some, jnp.minimum(first, j), first)
        end = jnp.where(some, j + 1, end)
    ranges[b, h, i, 0] = first
    ranges[b, h, i, 1] = end


def run(q, k, v, extras, key, *, tiles: dict[str, int], mask: Function, window: Window, **options):
    """`flex_attention` in tiles of `bq` queries and `bk` keys, with the ranges of its mask."""
    of = {"mask": mask, "window": window, "bq": tiles["bq"], "bk": tiles["bk"]}
    by = _depends("attention", mask, extras, tiles["bq"], tiles["bk"])
    ranges = mask_ranges(*jax.tree.map(jax.lax.stop_gradient, (extras, q, k)), by=by, **of)
    return flex_attention(q, k, v, extras, ranges, key, **of, **options)


def _depends(op: str, mask: Function, extras, bq: int, bk: int) -> tuple[bool, bool]:
    """Whether a mask reads the number of the batch row, and that of the head."""
    if mask is None:
        return False, False
    jaxpr, out = _traced(op, "mask", mask, (), extras, bq, bk)
    if getattr(out, "dtype", None) != jnp.bool:
        raise KernelTypeError(f"{op}: mask gives bools for queries [{bq}, 1] and keys [1, {bk}], got {out}")
    padded = (1,) * (2 - len(out.shape)) + out.shape
    if len(padded) > 2 or any(n not in (1, whole) for n, whole in zip(padded, (bq, bk), strict=True)):
        raise KernelValueError(f"{op}: mask gives bools for queries [{bq}, 1] and keys [1, {bk}], got {out}")
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    return id(jaxpr.jaxpr.invars[0]) in used, id(jaxpr.jaxpr.invars[1]) in used


def check_rows(op: str, lengths, offsets) -> None:
    """A typed error where `lengths` or `offsets` are given: beside functions, a `mask` has to say what they say."""
    if lengths is not None or offsets is not None:
        raise KernelValueError(
            f"{op}: lengths and offsets beside score, mask or dropout; give them as extras, and write what they mean: "
            "mask=lambda b, h, i, j, lengths: j < lengths[b]"
        )


def check_functions(op: str, score: Function, mask: Function, extras) -> None:
    """Typed errors for a score or mask that is no function, and for extras that are no arrays."""
    for name, function in (("score", score), ("mask", mask)):
        if function is not None and not callable(function):
            raise KernelTypeError(f"{op}: {name} is a function of tiles, got {type(function).__name__}")
    if not isinstance(extras, tuple | list):
        raise KernelTypeError(f"{op}: extras is a tuple of arrays, got {type(extras).__name__}; write extras=(...,)")
    if extras and score is None and mask is None:
        raise KernelTypeError(f"{op}: extras are read by score and mask; give one of them")


def check_score(op: str, score: Function, extras, bq: int, bk: int, dtype) -> None:
    """Typed errors for what is no function from a tile of scores to one of the same shape."""
    if score is None:
        return
    _, out = _traced(op, "score", score, (jax.ShapeDtypeStruct((bq, bk), dtype),), extras, bq, bk)
    check_shape(op, "what score gives", out, (bq, bk))
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise KernelTypeError(f"{op}: score gives scores, which are floats, got {out.dtype.name}")


def _traced(op: str, name: str, function: Function, scores: tuple, extras, bq: int, bk: int):
    """(the jaxpr of score or mask, the type of its result) for a tile."""
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    args = (*scores, int32(), int32(), int32(bq, 1), int32(1, bk), *extras)
    called = f"{name}({'s, ' if scores else ''}b, h, i, j, *extras)"
    try:
        inspect.signature(function).bind(*args)  # type: ignore[arg-type]
    except TypeError as error:
        raise KernelTypeError(f"{op}: {name} is called as {called} with {len(extras)} extras: {error}") from error
    except ValueError:  # a function without a signature
        pass
    way = f"give it as one of extras, and read it as an argument: {called}"
    try:
        jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    except jax.errors.TracerArrayConversionError as error:
        raise KernelTypeError(f"{op}: {name} takes elements of a NumPy array by numbers of a tile; {way}") from error
    closed = [x for x in jaxpr.consts if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and x.ndim)]
    if closed:
        raise KernelTypeError(f"{op}: {name} closes over an array ({jax.typeof(closed[0])}); {way}")
    return jaxpr, out
