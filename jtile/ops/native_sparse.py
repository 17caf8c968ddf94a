"""Native sparse attention as a whole (Yuan et al. 2025): compressed keys, selected blocks of keys, and a window."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_rank, check_shape, fit, machine, sums_in, wide
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.flash_attention import attention, attention_reference, check_operands
from jtile.ops.online_softmax import NOTHING
from jtile.ops.sparse_attention import block_sparse_attention, block_sparse_attention_reference


def _behind(b, h, i, j, block: int, stride: int):
    """Compressed key j is seen by the queries behind its last key."""
    return j * stride + block <= i + 1


@functools.cache
def _seen(block: int, stride: int) -> Any:
    """The mask of compressed keys: equal sizes give the same function, so that it is traced once."""
    return functools.partial(_behind, block=block, stride=stride)


@jt.kernel(
    out_type=lambda q, k, **_: jax.ShapeDtypeStruct((q.shape[0], k.shape[2], q.shape[1], k.shape[1]), jnp.float32),
    grid=lambda q, k, *, bq, **_: (q.shape[0], k.shape[2], jt.cdiv(q.shape[1], bq)),
)
def importance_tiles(q, k, y, *, bq: int, bk: int, scale: float, block: int, stride: int):
    """q [batch, t, heads, d], compressed k [batch, c, kv heads, d]; y [batch, kv heads, t, c]."""
    # y_ij = sum_h exp(s_hij) / sum_j exp(s_hij)     s_hij = scale q_hi . k_j, over the heads h of a group
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, group = q.shape[3], q.shape[2] // k.shape[2]
    q_i = q.tiles(None, bq, group, d)[b, i, h, 0].reshape(bq * group, d)
    K, Y = k.tiles(None, bk, None, d), y.tiles(None, None, bq, bk)
    rows = i * bq + jt.arange(bq * group)[:, None] // group

    def scores(j):
        columns = j * bk + jt.arange(bk)[None, :]
        seen = (columns * stride + block <= rows + 1) & (columns < k.shape[1])
        s = jt.dot(q_i, K[b, j, h, 0].T).astype(jnp.float32) * (scale * LOG2_E)
        return jnp.where(seen, s, -jnp.inf)

    m, l = jt.full((bq * group,), NOTHING, jnp.float32), jt.zeros((bq * group,), jnp.float32)
    for j in jt.range(K.shape[1]):
        s = scores(j)
        top = jnp.maximum(m, s.max(1))
        l = l * jnp.exp2(m - top) + jnp.exp2(s - top[:, None]).sum(1)
        m = top
    share = jnp.where(l == 0, 0.0, 1.0 / l)
    for j in jt.range(K.shape[1]):
        p = jnp.exp2(scores(j) - m[:, None]) * share[:, None]
        Y[b, h, i, j] = p.reshape(bq, group, bk).sum(1)


def _importance(q, k, *, scale: float, block: int, stride: int):
    group = q.shape[2] // k.shape[2]
    rows, bk = (128, 128) if machine().whole else (64, 64)
    bq = fit(q.shape[1], max(1, rows // group))
    return importance_tiles(q, k, bq=bq, bk=fit(k.shape[1], bk), scale=scale, block=block, stride=stride)


def _compressed(x, block: int, stride: int):
    """[batch, c, kv heads, d]: means of the windows of `block` positions of x that begin at multiples of `stride`."""
    count = max(0, (x.shape[1] - block) // stride + 1)
    pieces = x[:, : (count + block // stride - 1) * stride] if count else x[:, :0]
    pieces = wide(pieces).reshape(x.shape[0], -1, stride, *x.shape[2:]).mean(2)
    per = block // stride
    if count:
        pieces = jnp.stack([pieces[:, p : p + count] for p in range(per)]).mean(0)
    return pieces.astype(x.dtype)


def _selected(weights, t: int, s: int, *, block: int, stride: int, keys: int, count: int):
    """int32 [batch, kv heads, t, n]: the first block, that of the query, the one in front of it, and
    the most important others."""
    blocks = jt.cdiv(s, keys)
    at = np.arange(weights.shape[3])[None, :] * stride  # where windows begin
    first = np.arange(blocks)[:, None] * keys
    shared = np.clip(np.minimum(at + block, first + keys) - np.maximum(at, first), 0, None) / stride
    sums = jnp.einsum("bgtc,nc->bgtn", weights, shared.astype(np.float32), precision="highest")
    own, n = jnp.arange(t)[:, None] // keys, jnp.arange(blocks)[None, :]
    sums = jnp.where((n == 0) | (n == own) | (n == own - 1), jnp.inf, sums)
    sums = jnp.where(n <= own, sums, -1.0)
    best, places = jax.lax.top_k(sums, min(count, blocks))
    return jnp.where(best >= 0, places, -1).astype(jnp.int32)


_STATIC = ("block", "stride", "keys", "count", "window", "scale")


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)
def native_sparse_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, gates: jax.Array, *,
    compressed: tuple[jax.Array, jax.Array] | None = None, block: int = 32, stride: int = 16, keys: int = 64,
    count: int = 16, window: int = 512, scale: float | None = None,
) -> jax.Array:  # fmt: skip
    """Causal attention in three branches, added up with the weights `gates`: to compressed keys, to the `count` blocks
    of keys that matter most to a query and its group of heads, and to the last `window` keys.

    How much a block matters is the sum of the weights of the compressed keys in it, each times what it shares with the
    block in strides (equation 9 of the paper), over the heads of the group (equation 10). The first block, that of the
    query and the one in front of it always belong. Differentiable in q, k, v, gates and compressed; the choice of
    blocks has no derivative.

    Args:
      q: float array [batch, t, heads, d].
      k, v: float arrays [batch, t, kv_heads, d] of q's dtype; kv_heads divides heads.
      gates: float array [batch, t, heads, 3]: of the compressed, the selected and the window's branch.
      compressed: keys and values [batch, c, kv_heads, d] for the c = (t - block) // stride + 1 windows of `block`
        positions that begin at multiples of `stride`, as a layer of the model makes them; default: means.
      block, stride: positions of a window, and from one window to the next; stride divides block.
      keys: keys of a block that can be selected, a power of two. count: how many blocks a query selects, at least 1.
      window: how many keys, that of the query among them. scale: default 1 / sqrt(d).
    Returns:
      An array like `q`.
    Raises:
      KernelTypeError: dtypes or sizes that do not fit. KernelValueError: shapes or sizes that do not fit.
    """
    scale, kc, vc = _checked(q, k, v, gates, compressed, block, stride, keys, count, window, scale)
    options = {"block": block, "stride": stride}
    if q.size == 0:
        return q
    parts = [jnp.zeros_like(q)]
    weights = jnp.zeros((q.shape[0], k.shape[2], q.shape[1], 0), jnp.float32)
    if kc.shape[1]:
        parts = [attention(q, kc, vc, mask=_seen(block, stride), scale=scale)]
        weights = _importance(*map(jax.lax.stop_gradient, (q, kc)), scale=scale, **options)
    blocks = _selected(weights, q.shape[1], k.shape[1], keys=keys, count=count, **options)
    parts.append(block_sparse_attention(q, k, v, blocks, keys=keys, causal=True, scale=scale))
    parts.append(attention(q, k, v, causal=True, window=window - 1, scale=scale))
    return _joined(parts, gates, q.dtype)


def _joined(parts, gates, dtype):
    terms = [wide(x) * wide(gates)[..., n, None].astype(sums_in(x)) for n, x in enumerate(parts)]
    return functools.reduce(jnp.add, terms).astype(dtype)


def _checked(q, k, v, gates, compressed, block, stride, keys, count, window, scale):
    """(scale, compressed keys, compressed values); raises typed errors."""
    op = "native_sparse_attention"
    check_rank(op, "q", q, 4, "[batch, t, heads, d]")
    check_operands(op, q, k, v)
    check_shape(op, "k", k, (q.shape[0], q.shape[1], *k.shape[2:]))
    check_float(op, gates=gates)
    check_shape(op, "gates", gates, (*q.shape[:3], 3))
    sizes = {"block": block, "stride": stride, "keys": keys, "count": count, "window": window}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise KernelTypeError(f"{op}: {name} is an int, got {size!r}")
        if size < 1:
            raise KernelValueError(f"{op}: {name} is at least 1, got {size}")
    if block % stride or keys & (keys - 1):
        raise KernelValueError(f"{op}: stride divides block, and keys is a power of two; got {stride}, {block}, {keys}")
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if compressed is None:
        return scale, _compressed(k, block, stride), _compressed(v, block, stride)
    kc, vc = compressed
    c = max(0, (k.shape[1] - block) // stride + 1)
    for name, x in (("compressed[0]", kc), ("compressed[1]", vc)):
        check_shape(op, name, x, (k.shape[0], c, *k.shape[2:]))
        if x.dtype != k.dtype:
            raise KernelTypeError(f"{op}: {name} has dtype {x.dtype.name}, k {k.dtype.name}")
    return scale, kc, vc


def native_sparse_attention_reference(
    q, k, v, gates, *, compressed=None, block=32, stride=16, keys=64, count=16, window=512, scale=None
):
    """`native_sparse_attention` in jnp, with whole matrices of scores."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    t, groups = q.shape[1], k.shape[2]
    kc, vc = compressed or (_compressed(x, block, stride) for x in (k, v))
    seen = _seen(block, stride)
    if not kc.shape[1]:  # no window fits: one key stands in, which no query sees
        kc, vc = (jnp.zeros((x.shape[0], 1, *x.shape[2:]), x.dtype) for x in (kc, vc))
        seen = lambda b, h, i, j: (i < 0) & (j < 0)
    first = attention_reference(q, kc, vc, mask=seen, scale=scale)
    grouped = wide(q).reshape(*q.shape[:2], groups, -1, q.shape[3])
    x = jnp.einsum("btghd,bcgd->bghtc", grouped, wide(kc), precision="highest") * scale
    behind = seen(0, 0, jnp.arange(t)[:, None], jnp.arange(kc.shape[1])[None, :])
    x = jnp.where(behind[None, None, None], x, -jnp.inf)
    top = x.max(-1, keepdims=True)
    p = jnp.exp(x - jnp.where(jnp.isfinite(top), top, 0.0))
    weights = (p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)).sum(2)
    blocks = _selected(weights, t, t, block=block, stride=stride, keys=keys, count=count)
    blocks = jax.lax.stop_gradient(blocks)
    second = block_sparse_attention_reference(q, k, v, blocks, keys=keys, causal=True, scale=scale)
    third = attention_reference(q, k, v, causal=True, window=window - 1, scale=scale)
    return _joined([first, second, third], gates, q.dtype)
