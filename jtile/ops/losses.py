"""Cross-entropy over a large vocabulary, without an array of probabilities."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops._shapes import PROGRAMS, TILE_ELEMENTS, check_float, check_int, check_shape, fit


@jt.kernel(
    out_type=lambda x, labels, **_: jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
    grid=lambda x, labels, *, br, **_: jt.cdiv(x.shape[0], br),
)
def cross_entropy_rows(x, labels, loss, *, br: int, bv: int, ignore: int | None, smoothing: float):
    """Logits x [rows, vocab], labels int [rows]; `br` rows in a program, the vocabulary in blocks of `bv`."""
    # loss = lse(x) - (1 - a) x_label - a mean(x)     lse(x) = m + log sum_k exp(x_k - m), m and the sum online
    rows, vocab = jt.ds(jt.program_id(0) * br, br), x.shape[1]
    X = x.tiles(br, bv, pad=-math.inf)
    m, total, plain = (jnp.full((br,), v, jnp.float32) for v in (-math.inf, 0, 0))
    for j in jt.range(X.shape[1]):
        t = X[jt.program_id(0), j].astype(jnp.float32)
        top = jnp.maximum(m, t.max(1))
        base = jnp.where(top == -math.inf, 0.0, top)
        total = total * jnp.exp(m - base) + jnp.exp(t - base[:, None]).sum(1)
        m = top
        if smoothing:
            inside = j * bv + jt.arange(bv)[None, :] < vocab
            plain = plain + jnp.where(inside, t, 0.0).sum(1)
    label = labels[rows]
    row = jt.program_id(0) * br + jt.arange(br)
    picked = x[row, label.astype(jnp.int32)].astype(jnp.float32)
    out = m + jnp.log(total) - (1.0 - smoothing) * picked - (smoothing / vocab) * plain
    outside = (label < 0) | (label >= vocab)
    out = jnp.where(outside, math.nan, out)
    loss[rows] = out if ignore is None else jnp.where(label == ignore, 0.0, out)


@functools.partial(jax.jit, static_argnames=("ignore", "label_smoothing"), inline=True)
def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, ignore: int | None = -100, label_smoothing: float = 0.0
) -> jax.Array:
    """`logsumexp(logits) - logits[label]` for each row, computed in float32.

    Args:
      logits: float array [..., vocab].
      labels: int array [...].
      ignore: the label whose rows cost 0; None for none.
      label_smoothing: the part of the target that is spread over the whole vocabulary (Szegedy et al. 2016).
    Returns:
      float32 [...], the loss of each row; NaN where a label is neither `ignore` nor in [0, vocab).
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
        return jnp.zeros(labels.shape, jnp.float32)
    rows, vocab = labels.size, logits.shape[-1]
    bv = fit(vocab, TILE_ELEMENTS // 2)
    br = fit(rows, min(max(1, TILE_ELEMENTS // bv), jt.cdiv(rows, PROGRAMS)))
    x, flat = logits.reshape(rows, vocab), labels.reshape(rows)
    meta = {"br": br, "bv": bv, "ignore": ignore, "smoothing": float(label_smoothing)}
    return cross_entropy_rows(x, flat, **meta).reshape(labels.shape)


def cross_entropy_reference(logits, labels, *, ignore: int | None = -100, label_smoothing: float = 0.0):
    """`cross_entropy` in jnp."""
    x = logits.astype(jnp.float32)
    vocab = x.shape[-1]
    inside = (labels >= 0) & (labels < vocab)
    index = jnp.where(inside, labels, jnp.zeros((), labels.dtype))
    picked = jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(x, -1) - (1 - label_smoothing) * picked - label_smoothing * x.mean(-1)
    loss = jnp.where(inside, loss, jnp.nan)
    return loss if ignore is None else jnp.where(labels == ignore, 0.0, loss)
