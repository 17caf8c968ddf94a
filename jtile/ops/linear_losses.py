"""Cross-entropy of a linear layer whose logits are never in memory as a whole (Wijmans et al. 2024, Hsu et al. 2024).

A tile of logits is made, reduced to two numbers a row, and forgotten. Backwards it is made again, for as many classes
at a time as a fixed amount of memory holds, but for those whose logits the forward pass of a gradient keeps: as many as
another amount holds. What is kept is how far a logit lies below the log-sum-exp of its block, which is all that its
cotangent needs: the larger its weight, the smaller that number, so that half precision says as much as the products
behind it keep.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles
from jtile.ops._shapes import (
    check_float,
    check_int,
    check_rank,
    check_shape,
    known,
    machine,
    sums_in,
    tuned,
)
from jtile.ops.dispatch import small_tiles, vector_cores
from jtile.ops.losses import cross_entropy_reference
from jtile.ops.matmul import tiles
from jtile.ops.parts import BLOCK, summed

# Bytes of cotangents of logits that the backward pass holds at a time; on a GPU a fourth of what x and the weight have,
# where that is more. On a CPU, where a product takes longer than reading what it has given, it holds a fourth of KEPT,
# and the forward pass keeps KEPT bytes for it; on a GPU as many as x and the weight have.
HELD, KEPT = 96 << 20, 64 << 20


def _logits(x, w, bias, i, j, bm: int, bn: int, bk: int):
    """Tile i, j of x w^T + bias, for x [rows, features], w [vocab, features], and which of its columns exist."""
    k, dtype = x.shape[1], sums_in(x)
    X, W = (a.tiles(side, bk or (k if isinstance(k, int) else BLOCK)) for a, side in ((x, bm), (w, bn)))
    z = summed(lambda p: X[i, p], lambda p: W[j, p].T, k, (bm, bn), dtype, bk)
    if bias is not None:
        z = z + bias.tiles(bn)[j].astype(dtype)[None, :]
    return z, (j * bn + jt.arange(bn) < w.shape[0])[None, :]


def _base(top):
    """What logits of a block are exponents above: 0 where all of them are -inf, which have no weight then."""
    return jnp.where(top == -math.inf, 0.0, top)


def _parts_type(x, w, *_, bn: int, kept: int, **__):
    part = jax.ShapeDtypeStruct((jt.cdiv(w.shape[0], bn), x.shape[0]), sums_in(x))
    return (part, part, jax.ShapeDtypeStruct((x.shape[0], kept), _kept_dtype(x))) if kept else (part, part)


def _kept_dtype(x):
    return jnp.dtype(jnp.float16) if x.dtype.itemsize == 2 else sums_in(x)


@jt.kernel(
    out_type=_parts_type,
    grid=lambda x, w, *_, bm, bn, **__: (jt.cdiv(x.shape[0], bm), jt.cdiv(w.shape[0], bn)),
)
def linear_cross_entropy_parts(
    x, w, bias, labels, lse, aim, below=None, *,
    bm: int, bn: int, bk: int, smoothing: float, kept: int, memory: int | None = None,
):  # fmt: skip
    """x [rows, k], w [vocab, k], bias [vocab] or None, labels int32 [rows], -1 for none; lse, aim [blocks of `bn`
    classes, rows]: the log-sum-exp of a row's logits in a block, and their sum weighted by the target; with `kept`
    also how far those of the first classes lie below it, [rows, kept] and not above 0. `memory`: bytes of it that a
    gradient keeps."""
    # z = x w^T + b     lse_ji = log sum_{v in block j} exp z_iv     aim_ji = sum_{v in block j} q_iv z_iv
    # below_iv = z_iv - lse_ji
    # q_iv = (1 - a) [v = label_i] + a / vocab
    i, j = jt.program_id(0), jt.program_id(1)
    z, inside = _logits(x, w, bias, i, j, bm, bn, bk)
    at = jt.arange(bn)[None, :] + j * bn
    aimed = jnp.where(at == labels.tiles(bm)[i][:, None], z, 0.0).sum(1)
    if smoothing:
        aimed = (1.0 - smoothing) * aimed + smoothing / w.shape[0] * jnp.where(inside, z, 0.0).sum(1)
    z = jnp.where(inside, z, -math.inf)
    base = _base(z.max(1))
    here = base + jnp.log(jnp.exp(z - base[:, None]).sum(1))
    if below is not None:
        below.tiles(bm, bn)[i, j] = (z - _base(here)[:, None]).astype(below.dtype)
    lse.tiles(None, bm)[j, i] = here
    aim.tiles(None, bm)[j, i] = aimed


@jt.kernel(
    out_type=lambda x, *_, classes, **__: jt.like(x, shape=(x.shape[0], classes)),
    grid=lambda x, *_, bm, bn, classes, **__: (jt.cdiv(x.shape[0], bm), jt.cdiv(classes, bn)),
)
def linear_cross_entropy_cotangents(
    x, w, bias, labels, below, lse, ct_lse, ct_aim, first, d, *,
    bm: int, bn: int, bk: int, classes: int, smoothing: float,
):  # fmt: skip
    """d [rows, classes], cotangents of the logits of `classes` classes from block `first` on, for those of the
    first two results of `linear_cross_entropy_parts`; below: the third one, or None where these classes have none;
    rows without a label have no cotangents, whatever their logits are."""
    i, j = jt.program_id(0), jt.program_id(1)
    block = first[...] + j
    if below is None:
        z, inside = _logits(x, w, bias, i, block, bm, bn, bk)
        z = z - _base(lse.tiles(None, bm)[block, i])[:, None]
    else:
        z, inside = below.tiles(bm, bn)[i, block], (block * bn + jt.arange(bn) < w.shape[0])[None, :]
    d.tiles(bm, bn)[i, j] = _cotangent(z, inside, labels, ct_lse, ct_aim, i, block, w.shape[0], smoothing).astype(
        d.dtype
    )


def _cotangent(z, inside, labels, ct_lse, ct_aim, i, block, vocab: int, smoothing: float):
    """The cotangents of a tile of logits, which lie by z below the log-sum-exp of their block."""
    # d_iv = exp(z_iv - lse_ji) lse'_ji + q_iv aim'_ji
    bm, bn = z.shape
    of_lse, of_aim = (a.tiles(None, bm)[block, i][:, None] for a in (ct_lse, ct_aim))
    label = labels.tiles(bm, pad=-1)[i]
    target = jnp.where(jt.arange(bn)[None, :] + block * bn == label[:, None], 1.0 - smoothing, 0.0)
    target = target + smoothing / vocab if smoothing else target
    cotangent = jnp.exp(z.astype(of_lse.dtype)) * of_lse + target * of_aim
    return jnp.where(inside & (label >= 0)[:, None], cotangent, 0.0)


@jt.kernel(
    out_type=lambda below, *_, **__: jt.like(below),
    grid=lambda below, *_, bm, bn, **__: (jt.cdiv(below.shape[0], bm), jt.cdiv(below.shape[1], bn)),
    alias={"below": "d"},
)
def linear_cross_entropy_cotangents_in_place(below, labels, ct_lse, ct_aim, d, *, bm: int, bn: int, smoothing: float):
    """`linear_cross_entropy_cotangents` of all classes, in the memory in which their logits are kept."""
    i, j = jt.program_id(0), jt.program_id(1)
    D, inside = d.tiles(bm, bn), (j * bn + jt.arange(bn) < d.shape[1])[None, :]
    D[i, j] = _cotangent(D[i, j], inside, labels, ct_lse, ct_aim, i, j, d.shape[1], smoothing).astype(d.dtype)


@jt.kernel(
    out_type=lambda d, w, *_, **__: jax.ShapeDtypeStruct((d.shape[0], w.shape[1]), sums_in(w)),
    grid=lambda d, w, *_, bm, bn, **__: (jt.cdiv(d.shape[0], bm), jt.cdiv(w.shape[1], bn)),
)
def linear_cross_entropy_dx(d, w, first, total, dx, *, bm: int, bn: int, bk: int):
    """dx [rows, k]: `total`, or nothing for None, and the share of the classes of d [rows, classes], the first of which
    is row `first` of w."""
    # dx_ik = total_ik + sum_v d_iv w_vk
    i, j = jt.program_id(0), jt.program_id(1)
    start, step = first[...], bk or d.shape[1]
    D, columns = d.tiles(bm, step), jt.ds(j * bn, bn)
    W = lambda p: w[jt.ds(start + p * step, step), columns]
    share = summed(lambda p: D[i, p], W, d.shape[1], (bm, bn), dx.dtype, bk)
    dx.tiles(bm, bn)[i, j] = share if total is None else share + total.tiles(bm, bn)[i, j]


def _put(d, x, first, dw, bm: int, bn: int, bk: int) -> None:
    # dw_vk = sum_i d_iv x_ik
    i, j = jt.program_id(0), jt.program_id(1)
    rows = d.shape[0]
    step = bk or (rows if isinstance(rows, int) else BLOCK)
    D, X = d.tiles(step, bm), x.tiles(step, bn)
    share = summed(lambda p: D[p, i].T, lambda p: X[p, j], rows, (bm, bn), sums_in(x), bk).astype(dw.dtype)
    here = jt.ds(first[...] + i * bm, bm), jt.ds(j * bn, bn)
    if d.shape[1] % bm:
        jt.store(dw, here, share, mask=jnp.broadcast_to((i * bm + jt.arange(bm) < d.shape[1])[:, None], (bm, bn)))
    else:
        dw[here] = share


@jt.kernel(
    out_type=lambda d, x, first, total, **_: jt.like(total),
    grid=lambda d, x, first, total, *, bm, bn, **_: (jt.cdiv(d.shape[1], bm), jt.cdiv(x.shape[1], bn)),
    alias={"total": "dw"},
)
def linear_cross_entropy_dw(d, x, first, total, dw, *, bm: int, bn: int, bk: int):
    """dw [vocab, k], `total` with the rows of the classes of d [rows, classes], the first of which is row `first`."""
    _put(d, x, first, dw, bm, bn, bk)


@jt.kernel(
    out_type=lambda d, x, first, *, vocab, **_: jt.like(x, shape=(vocab, x.shape[1])),
    grid=lambda d, x, first, *, bm, bn, **_: (jt.cdiv(d.shape[1], bm), jt.cdiv(x.shape[1], bn)),
)
def linear_cross_entropy_first_dw(d, x, first, dw, *, vocab: int, bm: int, bn: int, bk: int):
    """dw [vocab, k] with these rows alone; the others are undefined, until `linear_cross_entropy_dw` writes them."""
    _put(d, x, first, dw, bm, bn, bk)


def _tuned(kernel: jt.Kernel, itemsize: int, m, n, k, **of):
    """(the kernel, its tiles) for a product of these sides."""
    sides = tiles(known(m), known(n), known(k), itemsize, **(of if small_tiles() else {}))
    if not small_tiles():
        return kernel, sides
    return tuned(kernel, **gpu_tiles.product_options(sides["bm"], sides["bn"], itemsize)), sides


def _forward(x, w, bias, labels, *, kept: int, bm: int, bn: int, memory: int | None = None, **meta):
    keep = kept or _classes_to_keep(x, w, bm, bn, memory)
    found = linear_cross_entropy_parts(x, w, bias, labels, kept=keep, bm=bm, bn=bn, **meta)
    return found if kept else found[:2], (x, w, bias, labels, found[0], found[2] if keep else None)


def _backward(residuals, ct, *, bm: int, bn: int, bk: int, smoothing: float, kept: int, **_):
    x, w, bias, labels, lse, below = residuals
    (rows, k), vocab, itemsize = x.shape, w.shape[0], x.dtype.itemsize
    at_once = below is not None and below.shape[1] == vocab and below.dtype == x.dtype and machine().whole
    blocks = jt.cdiv(vocab, bn)
    per = blocks if at_once else _blocks_at_a_time(x, w, bm, bn)
    make = linear_cross_entropy_cotangents
    make = tuned(make, **gpu_tiles.product_options(bm, bn, itemsize)) if small_tiles() else make
    wide, options = sums_in(x), {"bm": bm, "bn": bn, "bk": bk, "smoothing": smoothing}
    further, of_lse = None, ct[0]
    if kept:  # below_iv = z_iv - lse_ji, so that its cotangents are those of both
        further = jnp.pad(ct[2], ((0, 0), (0, blocks * bn - kept)))
        of_lse -= further.reshape(rows, blocks, bn).sum(2, dtype=wide).T

    def step(block, so_far, blocks, below):
        dx, dw, db = so_far
        classes = min(blocks * bn, vocab)
        again = functools.partial(make, classes=classes, **options)
        if at_once:
            own = {"bm": bm, "bn": bn, "smoothing": smoothing}
            first = lambda *a: linear_cross_entropy_cotangents_in_place(a[4], a[3], *a[6:8], **own)
        else:
            first = again
        d = _by_what_is_kept(first, again, x, w, bias, labels, below, lse, of_lse, ct[1], block)
        if further is not None:
            d += jax.lax.dynamic_slice_in_dim(further, block * bn, classes, 1).astype(d.dtype)
        add, sides = _tuned(linear_cross_entropy_dx, itemsize, rows, k, classes)
        kernel = linear_cross_entropy_first_dw if dw is None else linear_cross_entropy_dw
        put, others = _tuned(kernel, itemsize, classes, k, rows, left=True)
        dx = add(d, w, block * bn, dx, **sides)
        dw = put(d, x, block * bn, vocab=vocab, **others) if dw is None else put(d, x, block * bn, dw, **others)
        if bias is not None:
            db = jax.lax.dynamic_update_slice(db, d.astype(wide).sum(0), (block * bn,))
        return dx, dw, db

    so_far = None, None, None if bias is None else jnp.zeros(blocks * bn, wide)
    for first, times, n, held in _stretches(blocks, per, 0 if below is None else jt.cdiv(below.shape[1], bn)):

        def run(m, so_far, first=first, n=n, there=below if held else None):
            return step(jnp.int32(first) + jnp.asarray(m, jnp.int32) * jnp.int32(n), so_far, n, there)

        so_far = run(0, so_far) if times == 1 else jax.lax.fori_loop(0, times, run, so_far)
    dx, dw, db = so_far
    return dx.astype(x.dtype), dw, None if bias is None else db[:vocab].astype(bias.dtype), None


def _by_what_is_kept(first, again, x, w, bias, labels, below, lse, of_lse, of_aim, block):
    """The cotangents of logits by `first`, whose derivatives are those of `again`, which computes the logits again:
    cotangents of kept ones would be of their dtype, in which float16 loses small ones."""
    if below is None or below.dtype.itemsize > 2:
        return first(x, w, bias, labels, below, lse, of_lse, of_aim, block)

    @jax.custom_jvp
    def run(x, w, bias, lse, of_lse, of_aim, labels, below, block):
        return first(x, w, bias, labels, below, lse, of_lse, of_aim, block)

    @run.defjvp
    def _(primals, tangents):
        *smooth, labels, _, block = primals
        make = lambda x, w, bias, *of: again(x, w, bias, labels, None, *of, block)
        return run(*primals), jax.jvp(make, smooth, list(tangents[:6]))[1]

    return run(x, w, bias, lse, of_lse, of_aim, labels, below, block)


def _stretches(blocks: int, per: int, kept: int) -> list[tuple[int, int, int, bool]]:
    """The steps of the backward pass, `per` blocks each and fewer in the last: (first block, number of steps, blocks of
    a step, whether the logits are kept), for logits of the first `kept` blocks; the first step stands alone."""
    (whole, rest), held = divmod(blocks, per), kept // per
    behind = max(held, 1)
    steps = [
        (0, 1, per, held > 0), (per, held - 1, per, True), (behind * per, whole - behind, per, False),
        (whole * per, int(rest > 0), rest, kept == blocks),
    ]  # fmt: skip
    return [step for step in steps if step[1] > 0]


def _blocks_at_a_time(x, w, bm: int, bn: int) -> int:
    """How many blocks of `bn` classes, with their cotangents for the rows of x, the backward pass takes at a time, as
    far as `HELD` allows: on a CPU a divisor of all, since a smaller number at the end takes further kernels; on a GPU
    as many as keep its processors busy to the end of each step, with a tile of bm x bn logits each."""
    blocks, column = jt.cdiv(w.shape[0], bn), known(x.shape[0]) * x.dtype.itemsize
    held = KEPT // 4 if machine().whole else max(HELD, _own_bytes(x, w) // 4) if small_tiles() else HELD
    most = min(blocks, max(1, held // (bn * column)))
    between = range(most, most // 2, -1)
    if not small_tiles():
        return next((n for n in between if blocks % n == 0), most)
    tiles, processors = jt.cdiv(known(x.shape[0]), bm), gpu_tiles.processors()
    rounds = lambda n: blocks // n * jt.cdiv(n * tiles, processors) + jt.cdiv(blocks % n * tiles, processors)
    return min(between, key=lambda n: (rounds(n), blocks % n > 0))


def _own_bytes(x, w) -> int:
    return (known(x.shape[0]) + w.shape[0]) * w.shape[1] * w.dtype.itemsize


def _classes_to_keep(x, w, bm: int, bn: int, memory: int | None) -> int:
    """Of how many classes the forward pass keeps the logits: whole steps of the backward pass, or all."""
    if memory is None:
        memory = KEPT if machine().whole else _own_bytes(x, w) if small_tiles() else 0
    per, most = _blocks_at_a_time(x, w, bm, bn), memory // (bn * known(x.shape[0]) * _kept_dtype(x).itemsize)
    return w.shape[0] if most * bn >= w.shape[0] else most // per * per * bn


linear_cross_entropy_parts.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("ignore", "label_smoothing", "z_loss", "memory"), inline=True)
def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    ignore: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    memory: int | None = None,
) -> jax.Array:
    """`cross_entropy(x @ weight.T + bias, labels)` of each row, with no array of logits.

    Memory besides the operands: two numbers for each row and block of classes, and backwards the cotangents of 96 MiB
    of logits at a time (16 MiB on CPUs; on GPUs a fourth of what x and weight have, if that is more), which are
    computed again but for those that `memory` keeps. Differentiable in x, weight and bias; a row that is ignored, or
    has no such label, has no gradient. Products of 16-bit operands round the cotangents of logits to their dtype.

    Args:
      x: float array [..., features].
      weight: float array [vocab, features] of x's dtype, as the table of an embedding.
      labels: int array [...].
      bias: None or float [vocab].
      ignore: the label whose rows cost 0; None for none.
      label_smoothing: the part of the target that is spread over the whole vocabulary (Szegedy et al. 2016).
      z_loss: times the squared log-sum-exp of the logits, added to the loss (Chowdhery et al. 2022).
      memory: bytes that the forward pass of a gradient keeps of logits, so that the backward pass does not compute
        them again: with all of them a gradient is three products, with none (0) four. It keeps how far they lie below
        the log-sum-exp of their block, in float16 for operands of 16 bits. None: 64 MiB on CPUs, as many as x and
        weight have together on GPUs (all, where there are no more rows than features), none on others.
    Returns:
      float32 (float64 for float64) [...], the loss of each row; NaN where a label is neither `ignore` nor in
      [0, vocab).
    Raises:
      KernelTypeError: wrong dtypes. KernelValueError: shapes that do not fit, no vocabulary, smoothing outside [0, 1],
        memory that is no number of bytes.
    """
    _check(x, weight, labels, bias, label_smoothing, memory)
    vocab, k = weight.shape
    if labels.size == 0:
        return jnp.zeros(labels.shape, sums_in(x))
    rows, flat = x.reshape(labels.size, k), labels.reshape(labels.size)
    outside = (flat < 0) | (flat >= vocab)
    ignored = jnp.zeros(flat.shape, bool) if ignore is None else flat == ignore
    known_labels = jnp.where(outside | ignored, -1, flat).astype(jnp.int32)
    options: dict[str, Any] = {"smoothing": float(label_smoothing), "kept": 0, "memory": memory}
    kernel, sides = _tuned(linear_cross_entropy_parts, x.dtype.itemsize, labels.size, vocab, k, transposed=True)
    if vector_cores():  # an NPU's memory has to hold the logits of a tile, and what becomes of them
        sides |= {"bm": max(sides["bm"] // 2, 16)}
    parts, aims = kernel(rows, weight, bias, known_labels, **sides, **options)
    lse = jax.nn.logsumexp(parts, 0)
    loss = lse - aims.sum(0)
    loss = loss + z_loss * lse * lse if z_loss else loss
    loss = jnp.where(outside, jnp.full((), math.nan, loss.dtype), loss)
    return jnp.where(ignored, jnp.zeros((), loss.dtype), loss).reshape(labels.shape)


def _check(x, weight, labels, bias, label_smoothing, memory) -> None:
    op = "linear_cross_entropy"
    check_float(op, x=x, weight=weight, bias=bias)
    check_int(op, labels=labels)
    check_rank(op, "weight", weight, 2, "[vocab, features]")
    if x.dtype != weight.dtype:
        raise KernelTypeError(f"{op}: x and weight have one dtype, got {x.dtype.name} and {weight.dtype.name}")
    check_shape(op, "x", x, (*labels.shape, weight.shape[1]))
    if bias is not None:
        check_shape(op, "bias", bias, weight.shape[:1])
    if not 0 <= label_smoothing <= 1:
        raise KernelValueError(f"{op}: label_smoothing is in [0, 1], got {label_smoothing}")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 0):
        raise KernelValueError(f"{op}: memory is a number of bytes, 0 for none, or None, got {memory!r}")
    if 0 in weight.shape:
        raise KernelValueError(f"{op}: the vocabulary, or a row of x, is empty: weight has shape {weight.shape}")


def linear_cross_entropy_reference(
    x, weight, labels, *, bias=None, ignore: int | None = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
):
    """`linear_cross_entropy` in jnp."""
    f = sums_in(x)
    logits = jnp.einsum("...k,vk->...v", x.astype(f), weight.astype(f), precision="highest")
    logits = logits if bias is None else logits + jnp.broadcast_to(bias.astype(f), logits.shape)
    loss = cross_entropy_reference(logits, labels, ignore=ignore, label_smoothing=label_smoothing)
    counts = True if ignore is None else labels != ignore
    return loss + jnp.where(counts, z_loss * jax.nn.logsumexp(logits, -1) ** 2, 0.0)
