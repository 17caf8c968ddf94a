"""Cross-entropy over a large vocabulary, without an array of probabilities."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops._shapes import (
    check_float,
    check_int,
    check_shape,
    fit,
    known,
    machine,
    rows_per_tile,
    sums_in,
    tuned,
    wide,
)
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet

_LONG = 4096  # with as many classes a GPU takes a row in blocks, and each thread has sums of its own
LOG2_E = math.log2(math.e)


def _types(x, labels, *, save: bool = False, **_):
    """Types of the losses and, with `save`, of the log-sum-exp of each row, which the backward pass starts from."""
    rows = jax.ShapeDtypeStruct(x.shape[:1], sums_in(x))
    return (rows, rows) if save else rows


@jt.kernel(out_type=_types, grid=lambda x, labels, *, br, **_: jt.cdiv(x.shape[0], br))
def cross_entropy_rows(
    x, labels, loss, lse=None, *, br: int, bv: int, ignore: int | None, smoothing: float, save: bool = False
):
    """Logits x [rows, vocab], labels int [rows]; `br` rows in a program, the vocabulary in blocks of `bv`."""
    # loss = lse(x) - (1 - a) x_label - a mean(x)     lse(x) = m + log sum_k exp(x_k - m), m and the sum online
    rows, vocab = jt.ds(jt.program_id(0) * br, br), x.shape[1]
    X = x.tiles(br, bv, pad=-math.inf)
    m, total, plain = (jnp.full((br,), v, loss.dtype) for v in (-math.inf, 0, 0))
    for j in jt.range(X.shape[1], stages=3):
        t = wide(X[jt.program_id(0), j])
        top = jnp.maximum(m, t.max(1))
        base = jnp.where(top == -math.inf, 0.0, top)
        total = total * jnp.exp(m - base) + jnp.exp(t - base[:, None]).sum(1)
        m = top
        if smoothing:
            inside = j * bv + jt.arange(bv)[None, :] < vocab
            plain = plain + jnp.where(inside, t, 0.0).sum(1)
    label = labels[rows]
    picked, first = jnp.zeros((br,), loss.dtype), jt.program_id(0) * br
    for r in jt.range(jnp.minimum(x.shape[0] - first, br)):  # row by row, so that rows stay an axis that shards
        at = jnp.clip(labels[first + r].astype(jnp.int32), 0, vocab - 1)
        picked = jnp.where(jt.arange(br) == r, wide(x[first + r, at]), picked)
    whole = m + jnp.log(total)
    out = whole - (1.0 - smoothing) * picked - (smoothing / vocab) * plain
    outside = (label < 0) | (label >= vocab)
    out = jnp.where(outside, math.nan, out)
    if lse is not None:
        lse[rows] = whole
    loss[rows] = out if ignore is None else jnp.where(label == ignore, 0.0, out)


@jt.kernel(out_type=_types, grid=lambda x, labels, **_: x.shape[0])
def cross_entropy_lanes(
    x, labels, loss, lse=None, *, bv: int, lanes: int, ignore: int | None, smoothing: float, save: bool = False
):
    """`cross_entropy_rows` for one long row in a program: threads keep their own maxima and sums to the end."""
    # For the elements of one thread: m = max log2(e) x_k     total = sum_k 2^(log2(e) x_k - m)
    i, vocab = jt.program_id(0), x.shape[1]
    X = x.tiles(None, bv, pad=-math.inf)
    m, total, plain = (jnp.full((lanes,), v, loss.dtype) for v in (-math.inf, 0, 0))

    def step(j, m, total, plain):
        t = wide(X[i, j]).reshape(-1, lanes, 8)  # a thread reads 8 elements at a time
        top = jnp.maximum(m, t.max((0, 2)) * LOG2_E)
        base = jnp.where(top == -math.inf, 0.0, top)
        total = total * jnp.exp2(m - base) + jnp.exp2(t * LOG2_E - base[None, :, None]).sum((0, 2))
        if smoothing:
            inside = (j * bv + jt.arange(bv) < vocab).reshape(t.shape)
            plain = plain + jnp.where(inside, t, 0.0).sum((0, 2))
        return top, total, plain

    for j in jt.range(vocab // bv, stages=3):
        m, total, plain = step(j, m, total, plain)
    if vocab % bv:
        m, total, plain = step(vocab // bv, m, total, plain)
    top = m.max()
    base = jnp.where(top == -math.inf, 0.0, top)
    whole = (top + jnp.log2((total * jnp.exp2(m - base)).sum())) * math.log(2)
    label = labels[i]
    picked = wide(x[i, jnp.clip(label.astype(jnp.int32), 0, vocab - 1)])
    out = whole - (1.0 - smoothing) * picked - (smoothing / vocab) * plain.sum()
    out = jnp.where((label < 0) | (label >= vocab), math.nan, out)
    if lse is not None:
        lse[i] = whole
    loss[i] = out if ignore is None else jnp.where(label == ignore, 0.0, out)


@jt.kernel(
    out_type=lambda x, *_, **__: jt.like(x),
    grid=lambda x, *_, br, bv, **__: (jt.cdiv(x.shape[0], br), jt.cdiv(x.shape[1], bv)),
)
def cross_entropy_backward_tiles(x, labels, lse, g, ct, dx, *, br: int, bv: int, ignore: int | None, smoothing: float):
    """dx [rows, vocab] for the cotangents of the losses, g [rows], and of lse, ct [rows] or None.

    A row whose loss is 0 or NaN, whatever its logits are, has no gradient.
    """
    # dx_j = g (p_j - (1 - a) [j = label] - a / vocab) + ct p_j     p_j = exp(x_j - lse)
    i, j = jt.program_id(0), jt.program_id(1)
    rows, vocab = jt.ds(i * br, br), x.shape[1]
    X, DX = x.tiles(br, bv), dx.tiles(br, bv)
    label = labels[rows].astype(jnp.int32)
    live = (label >= 0) & (label < vocab)
    live = live if ignore is None else live & (label != ignore)
    p = jnp.exp(wide(X[i, j]) - lse[rows][:, None])
    here = j * bv + jt.arange(bv)[None, :] == label[:, None]
    gradient = p - jnp.where(here, 1.0 - smoothing, 0.0)
    gradient = gradient - smoothing / vocab if smoothing else gradient
    gradient = jnp.where(live[:, None], gradient * g[rows][:, None], 0.0)
    DX[i, j] = (gradient if ct is None else gradient + p * ct[rows][:, None]).astype(dx.dtype)


def _forward(kernel, x, labels, *, save: bool, **meta):
    loss, lse = kernel(x, labels, save=True, **meta)
    return (loss, lse) if save else loss, (x, labels, lse)


def _backward(residuals, ct, *, save: bool, bv: int, ignore: int | None, smoothing: float, **_):
    x, labels, lse = residuals
    g, ct_lse = ct if save else (ct, None)
    br = rows_per_tile(x.shape[0], bv, machine().tile)
    options = {"br": br, "bv": bv, "ignore": ignore, "smoothing": smoothing}
    kernel = tuned(cross_entropy_backward_tiles, num_warps=8) if br * bv >= _LONG else cross_entropy_backward_tiles
    return kernel(x, labels, lse, g, ct_lse, **options), None


cross_entropy_rows.defvjp(functools.partial(_forward, cross_entropy_rows), _backward)


def _lanes(x, labels, **meta):
    return tuned(cross_entropy_lanes, num_warps=meta["lanes"] // 32)(x, labels, **meta)


cross_entropy_lanes.defvjp(functools.partial(_forward, _lanes), _backward)


@functools.partial(jax.jit, static_argnames=("ignore", "label_smoothing"), inline=True)
def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, ignore: int | None = -100, label_smoothing: float = 0.0
) -> jax.Array:
    """`logsumexp(logits) - logits[label]` for each row, computed in float32.

    Differentiable in logits, not in labels; a row that is ignored, or has no such label, has no gradient.

    Args:
      logits: float array [..., vocab].
      labels: int array [...].
      ignore: the label whose rows cost 0; None for none.
      label_smoothing: the part of the target that is spread over the whole vocabulary (Szegedy et al. 2016).
    Returns:
      float32 (float64 for float64 logits) [...], the loss of each row; NaN where a label is neither `ignore` nor in
      [0, vocab).
    Raises:
      KernelTypeError: wrong dtypes. KernelValueError: shapes that do not fit, no vocabulary, smoothing outside [0, 1].
    """
    check_float("cross_entropy", logits=logits)
    check_int("cross_entropy", labels=labels)
    check_shape("cross_entropy", "labels", labels, logits.shape[:-1])
    if not 0 <= label_smoothing <= 1:
        raise KernelValueError(f"cross_entropy: label_smoothing is in [0, 1], got {label_smoothing}")
    if logits.shape[-1] == 0:
        raise KernelValueError("cross_entropy: the vocabulary is empty")
    if labels.size == 0:
        return jnp.zeros(labels.shape, sums_in(logits))
    x, flat = logits.reshape(labels.size, logits.shape[-1]), labels.reshape(labels.size)
    return _op(x, flat, ignore=ignore, smoothing=float(label_smoothing)).reshape(labels.shape)


def _in_lanes(x, labels, **meta):
    return _lanes(x, labels, bv=8192, lanes=256, **meta)


def _not_in_lanes(x, *_, **__) -> str | None:
    long = isinstance(x.shape[1], int) and x.shape[1] >= _LONG
    threads = "warps" in jt.target().features
    return first_unmet((threads, "no threads"), (long, f"{x.shape[1]} classes are not known to be {_LONG} or more"))


def _in_rows(x, labels, **meta):
    rows, vocab = x.shape
    bv = fit(vocab, machine().tile // 2)
    br = fit(rows, min(max(1, machine().tile // bv), jt.cdiv(known(rows), machine().programs)))
    return cross_entropy_rows(x, labels, br=br, bv=bv, **meta)


_op = Op(
    "cross_entropy",
    Implementation("sums of each thread", _in_lanes, _not_in_lanes, WARPS),
    Implementation("rows", _in_rows),
)


def cross_entropy_reference(logits, labels, *, ignore: int | None = -100, label_smoothing: float = 0.0):
    """`cross_entropy` in jnp."""
    x = wide(logits)
    vocab = x.shape[-1]
    inside = (labels >= 0) & (labels < vocab)
    index = jnp.where(inside, labels, jnp.zeros((), labels.dtype))
    picked = jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(x, -1) - (1 - label_smoothing) * picked - label_smoothing * x.mean(-1)
    loss = jnp.where(inside, loss, jnp.nan)
    return loss if ignore is None else jnp.where(labels == ignore, 0.0, loss)
