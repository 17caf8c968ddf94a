"""Attention whose scores and masks are functions of the caller, traced into the kernel (as FlexAttention, Dong et al.
2024), with blocks of keys that a tile of queries does not see left out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import dropouts, gpu_tiles, hopper_flex_backward
from jtile.ops._shapes import check_shape, sums_in, tuned
from jtile.ops.attention_windows import LOG2_E, Window
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, derivative
from jtile.ops.flex_lists import BOTH, listed_attention, seen, types
from jtile.ops.flex_shards import lists_of_mask, numbered
from jtile.ops.online_softmax import NOTHING, log_sums, normalised, online

Function = Callable[..., Any] | None


@jt.kernel(
    out_type=types, grid=lambda q, *_, bq, **__: (q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq))
)  # fmt: skip
def flex_attention(
    q, k, v, extras, ranges, seeds, o, lse=None,
    *, bq: int, bk: int, scale: float, softcap: float | None, score: Function, mask: Function, window: Window,
    dropout: float, save: bool, precision: str | None = None,
):  # fmt: skip
    """q, o [batch, t, heads, d]; k, v [batch, s, kv heads, d]; ranges: see `mask_ranges`; seeds: those of
    `dropouts.seeds`, or None; lse [batch, heads, t]."""
    # The online softmax of `flash_attention`, with s_ij = score(scale q_i . k_j, b, h, i, j), -inf where masked.
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, kv, wide = q.shape[3], h // (q.shape[2] // k.shape[2]), sums_in(q)
    Q, K, V, O = (x.tiles(None, n, None, d) for x, n in ((q, bq), (k, bk), (v, bk), (o, bq)))
    q_i, rows = Q[b, i, h, 0], i * bq + jt.arange(bq)[:, None]
    of = (b if ranges.shape[0] > 1 else 0), (h if ranges.shape[1] > 1 else 0), i
    seed = dropouts.seed_of(seeds, b, h)
    queries = dropouts.places(i * bq, bq, 0)
    m, l, acc = jt.full((bq,), NOTHING, wide), jt.zeros((bq,), wide), jt.zeros((bq, d), wide)
    for j in jt.range(jnp.maximum(ranges[*of, 0], 0), jnp.minimum(ranges[*of, 1], K.shape[1])):
        columns = j * bk + jt.arange(bk)[None, :]
        s = jt.dot(q_i, K[b, j, kv, 0].T, precision=precision) * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        if score is not None:
            s = score(s, b, h, rows, columns, *extras).astype(wide)
        visible = seen(b, h, rows, columns, extras, mask=mask, window=window, s=k.shape[1])
        s = jnp.where(visible, s * LOG2_E, -jnp.inf)
        keep = seed and dropouts.kept(seed, queries, dropouts.places(j * bk, bk, 1), dropout)
        m, l, acc = online(s, V[b, j, kv, 0], m, l, acc, keep=keep, precision=precision)
    O[b, i, h, 0] = normalised(acc, l, dropouts.factor(dropout)).astype(o.dtype)
    if lse is not None:
        lse.tiles(None, None, bq)[b, h, i] = log_sums(m, l)


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
        visible = seen(b, h, rows, j * bk + jt.arange(bk)[None, :], extras, mask=mask, window=window, s=s)
        some = (visible & (rows < t)).any()
        first = jnp.where(some, jnp.minimum(first, j), first)
        end = jnp.where(some, j + 1, end)
    ranges[b, h, i, 0] = first
    ranges[b, h, i, 1] = end


def run(
    q, k, v, extras, seeds, *, tiles: dict[str, int], score: Function, mask: Function, window: Window, **options
):  # fmt: skip
    """Attention in tiles of `bq` queries and `bk` keys, with what its mask says of them: in lists on a GPU with
    warpgroup products, in ranges elsewhere."""
    score, mask, extras = numbered(score, mask, extras, q.shape[0], q.shape[2])
    options["score"] = score
    of = {"mask": mask, "window": window, "bq": tiles["bq"], "bk": tiles["bk"]}
    of["by"] = _depends("attention", mask, extras, tiles["bq"], tiles["bk"])
    known = all(isinstance(n, int) for n in (*q.shape, *k.shape)) and k.shape[1] < BOTH
    listed = known and gpu_tiles.warpgroups() and q.dtype.itemsize == 2
    return (_by_lists if listed else _by_ranges)(tuple(sorted({**of, **options}.items())), (q, k, v, extras, seeds))


def _by_ranges(options: tuple[tuple[str, Any], ...], operands, listed: bool = False):
    """`flex_attention` with the ranges of its mask; `listed`: by the kernel that makes lists, which is quicker."""
    q, k, v, extras, seeds = operands
    if listed:
        ranges = _lists(options, operands)[3]
    else:
        ranges = mask_ranges(*jax.tree.map(jax.lax.stop_gradient, (extras, q, k)), **_of_mask(options))
    return flex_attention(q, k, v, extras, ranges, seeds, **{n: x for n, x in options if n != "by"})


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_lists(options: tuple[tuple[str, Any], ...], operands):
    """The same with lists of its mask."""
    return _listed(options, operands)


@functools.partial(_by_lists.defjvp, symbolic_zeros=True)
def _by_lists_jvp(options, primals, tangents):
    """By lists, too, where gradients are: else their kernels add up over ranges."""
    q, k, v, extras, _ = primals[0]
    moved = any(_moves(x) for x in jax.tree.leaves(tangents[0][3], is_leaf=lambda x: isinstance(x, SymbolicZero)))
    listed = not moved and hopper_flex_backward.misfit(q, k, v, extras, **dict(options)) is None
    way = _listed if listed else functools.partial(_by_ranges, listed=True)
    return derivative(functools.partial(way, options), primals[0], tangents[0])


def _moves(tangent) -> bool:
    return not isinstance(tangent, SymbolicZero) and jnp.issubdtype(tangent.dtype, jnp.inexact)


def _listed(options: tuple[tuple[str, Any], ...], operands):
    q, k, v, extras, seeds = operands
    _, lists, counts, _ = _lists(options, operands)
    return _run_listed(q, k, v, extras, lists, counts, seeds, **{n: x for n, x in options if n != "by"})


def _run_listed(*args, **meta):
    return tuned(listed_attention, persistent=True)(*args, **meta)


def _forward(q, k, v, extras, lists, counts, seeds, *, save: bool, **meta):
    o, lse = _run_listed(q, k, v, extras, lists, counts, seeds, save=True, **meta)
    return (o, lse) if save else o, (q, k, v, extras, seeds, o, lse)


def _backward(residuals, ct, *, save: bool, **meta):
    q, k, v, extras, seeds, o, lse = residuals
    g, ct_lse = ct if save else (ct, None)
    by = _depends("attention", meta["mask"], extras, meta["bq"], meta["bk"])
    found = flex_backward(q, k, v, extras, seeds, o, lse, g, ct_lse, by=by, **meta)
    return *found, None, None, None, None


listed_attention.defvjp(_forward, _backward)


def _gradients_by_ranges(q, k, v, extras, seeds, o, lse, g, ct, **options):
    """(dq, dk, dv) for the cotangents g of o and ct of its logarithms of sums (or None)."""
    del o, lse
    options = tuple(sorted({**options, "save": ct is not None}.items()))
    run = lambda *x: _by_ranges(options, (*x, extras, seeds))
    return jax.vjp(run, q, k, v)[1](g if ct is None else (g, ct))


flex_backward = Op(
    "flex attention backward",
    Implementation("roles", hopper_flex_backward.gradients, hopper_flex_backward.misfit, BLOCK_LEVEL, portable=False),
    Implementation("by ranges", _gradients_by_ranges),
)


def _lists(options: tuple[tuple[str, Any], ...], operands):
    q, k, _, extras, _ = operands
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    return lists_of_mask(jax.tree.map(jax.lax.stop_gradient, extras), sizes=sizes, **_of_mask(options))


def _of_mask(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {n: x for n, x in options if n in ("by", "mask", "window", "bq", "bk")}


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
