"""The layers of a decoder, as functions over arrays: the one place that chooses the kernel for each step of a model.

Activations are row-major, of one dtype from the embedding to the last norm: float32, bfloat16 or float16. Weights are
dense [out, in] (of these dtypes, too), a `QuantizedTensor`, a tuple of these whose outputs are concatenated, or any of
these with a low-rank update (`Adapted`) or with an update for each row of x (`Routed`). Sums, statistics of norms and
rotations are float32 whatever the dtypes are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile import ops
from jtile.ops import QuantizedTensor, normed_products, rounded_rows
from jtile.ops.quantized_tensor import BLOCKS

from . import kernels
from .cache import HeadNorms
from .parallel import Axes, Term
from .sums import Parts, Product, Unmade, in_parts, parts_of, unmade


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """The weight `base` + scale * b a: base [out, in], a float32 [rank, in], b float32 [out, rank]; see `lora.py`."""

    base: Weight
    a: jax.Array
    b: jax.Array
    scale: float = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """The weight `base` [out, in] with the updates of several adapters, of which each row that is multiplied has its
    own: a [ranks, in] and b [out, ranks] hold the updates of all adapters side by side; owner, int32 [ranks], says
    which adapter each rank belongs to; of, int32 [n], is the adapter of each of the n rows, or a number that owns no
    rank."""

    base: Weight
    a: jax.Array
    b: jax.Array
    owner: jax.Array
    of: jax.Array


Weight = jax.Array | QuantizedTensor | tuple | Adapted | Routed


def rms_norm(x, weight, eps: float):
    """x * weight / sqrt(mean(x^2) + eps) over the last axis; x [..., features], weight [features]."""
    return ops.rms_norm(x, weight, eps=eps)


def add_norm(x, delta, weight, eps: float):
    """(x + delta, its `rms_norm`), in one pass over memory; a delta of None adds nothing."""
    if delta is None:
        return x, rms_norm(x, weight, eps)
    if isinstance(delta, Term | Unmade):
        return delta.add_norm(x, weight, eps)
    normed, x = ops.rms_norm(delta, weight, eps=eps, residual=x)
    return x, normed


def whole(y):
    """The sum if `y` is `Parts` of one, or this device's `Term` of one over devices; otherwise `y`, which is whole
    already."""
    return y.whole() if isinstance(y, Term | Unmade) else y


def add_norm_linear(x, delta, norm, eps: float, weight: Weight, dtype=None, parts: bool = False):
    """(x + delta, `linear` of its `rms_norm` with the weight `norm`): one kernel for one row on some GPUs. parts: the
    product may be `Parts`."""
    if parts and parts_of(x, weight) > 1:
        if isinstance(delta, Product) and delta.reaches(weight):
            return delta.norm_product(x, norm, eps, weight)
        x, normed = add_norm(x, delta, norm, eps)
        return x, in_parts(normed, weight)
    if isinstance(delta, Term | Unmade) or isinstance(weight, tuple | Adapted | Routed):
        x, normed = add_norm(x, delta, norm, eps)
        return x, linear(normed, weight, dtype)
    with _made_before(x, weight):
        first, residual = (x, None) if delta is None else (delta, x)
        y, x = ops.rms_norm_matmul(first, norm, _beside(x, weight), residual=residual, eps=eps, out_dtype=dtype)
    return x, y


def linear_or_unmade(x, weight: Weight) -> jax.Array | Unmade:
    """`linear`, or what is left for the kernel behind it to make."""
    if parts_of(x, weight) == 1:
        return linear(x, weight)
    return unmade(x, weight)


def summed(x, weight: Weight, over: Axes, parts: bool = False) -> Term | Unmade | jax.Array:
    """`linear` of what this device has of x and of the weight, as its `Term` of the sum over devices. parts: what is
    behind it takes `Unmade` terms, too."""
    found = over.unmade(x, weight) if parts else None
    return over.term(linear(x, weight)) if found is None else found


def linear(x, weight: Weight, dtype=None):
    """x [..., in] times the transposed weight: [..., out] in `dtype`, by default x's."""
    dtype = x.dtype if dtype is None else dtype
    if isinstance(weight, Adapted):
        return linear(x, weight.base, dtype) + weight.scale * linear(linear(x, weight.a), weight.b, dtype)
    if isinstance(weight, Routed):
        inner = linear(x, weight.a, jnp.float32)
        own = jnp.where(weight.of[:, None] == weight.owner[None, :], inner, 0.0)
        return linear(x, weight.base, dtype) + linear(own.astype(x.dtype), weight.b, dtype)
    if isinstance(weight, tuple):
        return jnp.concatenate([linear(x, part, dtype) for part in weight], axis=-1)
    if isinstance(weight, QuantizedTensor):
        return ops.quantized_matmul(x, weight, out_dtype=dtype)
    with _made_before(x, weight):
        return ops.matmul(x, _beside(x, weight), transpose_b=True, out_dtype=dtype)


def _made_before(x, *weights: Weight):
    """A block in which kernels do not overlap, if `_beside` makes one of the weights inside the program."""
    made = any(_beside(x, w) is not w for w in weights)
    return jt.config(overlap=False) if made else contextlib.nullcontext()


def with_bias(y, bias):
    """y [..., features] + bias float32 [features], or None; in y's dtype."""
    if bias is None:
        return y
    return (y.astype(jnp.float32) + bias.reshape((1,) * (y.ndim - 1) + (-1,))).astype(y.dtype)


def _beside(x, weight):
    """A weight for the product with x: tensor cores take operands of one dtype, so that beside 16-bit rows a dense
    weight is rounded to their dtype. Beside float32 rows it stays as it is stored; a quantised weight always does."""
    as_it_is = x.dtype == jnp.float32 or isinstance(weight, QuantizedTensor) or weight.dtype == x.dtype
    return weight if as_it_is else weight.astype(x.dtype)


def rows(weight: jax.Array | QuantizedTensor, order) -> jax.Array | QuantizedTensor:
    """The rows of a matrix in another order, int [out]."""
    if not isinstance(weight, QuantizedTensor):
        return jnp.take(weight, order, axis=0)
    found = weight.rows(order)
    again = weight.is_packed and not found.is_packed and len(order) % 16 == 0
    return found.in_panels() if again else found


def rows_of_heads(weight: jax.Array | QuantizedTensor, order: np.ndarray) -> jax.Array | QuantizedTensor:
    """`rows` in an order that changes places within a head. Products of a matrix whose scales belong to blocks of rows
    stay products of 8-bit numbers where every row stays in its block."""
    found, blocks = rows(weight, order), np.arange(order.size) // BLOCKS
    if not isinstance(found, QuantizedTensor):
        return found
    return found if (order // BLOCKS == blocks).all() else dataclasses.replace(found, activations=None)


def embedding(table: Weight, ids, dtype):
    """Rows `ids` (int, any shape) of the table [vocab, features] as `dtype`."""
    return ops.embedding(table, ids, dtype=dtype)


def rope_angles(positions, inverse_frequencies, factor: float = 1.0, tempered: tuple[float, float] | None = None):
    """cos and sin [..., head_dim / 2] for integer positions [...], times `factor`. A `tempered` rope turns nothing: cos
    is then the factor of the queries, and sin 0."""
    frequencies = inverse_frequencies.reshape((1,) * positions.ndim + (-1,))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if tempered is not None:
        scale, every = tempered
        steps = jnp.floor((positions[..., None].astype(jnp.float32) + 1) / every)
        return cos * (1 + scale * jnp.log1p(steps)), sin
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def split_heads(qkv, cos, sin, heads: int, kv_heads: int, norms: HeadNorms | None = None, slots: int | None = None):
    """Rotated q [batch, length, heads, head_dim], rotated k and v [..., kv_heads, head_dim] of the projection qkv
    [batch, length, (heads + 2 kv_heads) head_dim]; cos and sin [length, head_dim / 2] are those of each position.
    slots: positions of k and v, with zeros behind the length."""
    qkv = qkv.reshape(*qkv.shape[:2], heads + 2 * kv_heads, -1)
    weights, eps = ((), 0.0) if norms is None else ((norms.q, norms.k), norms.eps)
    tiles = kernels.tiles_of_split(heads, kv_heads, qkv.shape[3])
    sizes = {"heads": heads, "kv_heads": kv_heads, "slots": slots}
    return kernels.rope_split(qkv, cos, sin, weights, eps=eps, **sizes, **tiles)


def tempered(qkv, cos, queries: int):
    """(the projection with its first `queries` features, those of queries, multiplied by the factors that a `tempered`
    rope gives as cos, the cos of no rotation)."""
    of = jnp.arange(qkv.shape[-1], dtype=jnp.int32) < queries
    scale = jnp.where(of[None, :], cos[:, :1], 1.0).reshape((1,) * (qkv.ndim - 2) + (-1, qkv.shape[-1]))
    return (qkv.astype(jnp.float32) * scale).astype(qkv.dtype), jnp.ones_like(cos)


def chunked_attention(q, k, v, chunk: int, **options):
    """`attention` in which a token sees the keys of its own chunk only, up to itself; chunks begin every so many
    positions."""
    batch, length = q.shape[:2]
    if length <= chunk:
        return attention(q, k, v, **options)
    more = -length % chunk
    apart = lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))).reshape(-1, chunk, *x.shape[2:])
    return attention(apart(q), apart(k), apart(v), **options).reshape(batch, -1, *q.shape[2:])[:, :length]


def attention(q, k, v, window: int | None = None, **options):
    """Causal attention of q [batch, length, heads, head_dim] over k, v [batch, length, kv_heads, head_dim]; with a
    window a token sees its newest `window` keys, itself included; `scale`, `softcap`, `sinks`, `precision`: see
    `ops.attention`."""
    return ops.attention(q, k, v, causal=True, window=window, **options)


def precision(weight: Weight) -> str | None:
    """That of the attention behind a projection by a weight: where its rows may be rounded to integers, those of
    queries, keys and values may be, too."""
    integers = isinstance(weight, QuantizedTensor) and weight.activations == rounded_rows.INTEGERS
    return "fast" if integers else None


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def add_norm_gated_mlp(
    x, delta, norm, eps: float, gate: Weight, up: Weight, down: Weight, activation: str = "silu",
    last: Callable = linear,
):  # fmt: skip
    """(x + delta, `gated_mlp` of its `rms_norm` with the weight `norm`); or (the sum of both, None), where what is
    behind takes `Unmade` and one kernel adds them."""
    if isinstance(delta, Product) and delta.reaches(gate, up):
        x, hidden = delta.norm_product(x, norm, eps, gate, up, activation=activation)
        return x, last(hidden, down)
    if isinstance(delta, Term | Unmade) or _apart(gate, up):
        x, normed = add_norm(x, delta, norm, eps)
        return x, gated_mlp(normed, gate, up, down, activation, last)
    with _made_before(x, gate, up):
        gate, up = _beside(x, gate), _beside(x, up)
        first, residual = (x, None) if delta is None else (delta, x)
        options = {"residual": residual, "eps": eps, "activation": activation}
        hidden, x = ops.rms_norm_gated_mlp(first, norm, gate, up, **options)
    total = product_and_residual(hidden, down, x) if last is linear_or_unmade else None
    return (x, last(hidden, down)) if total is None else (total, None)


def product_and_residual(x, weight: Weight, residual):
    """x times the transposed weight, plus the residual, where one kernel does both; else None."""
    known = isinstance(weight, jax.Array | QuantizedTensor)
    return normed_products.product_and_residual(x, weight, residual) if known else None


def _apart(gate: Weight, up: Weight) -> bool:
    """Whether gate and up cannot be operands of one kernel: they are adapted, or stored in different ways."""
    storages = {w.storage if isinstance(w, QuantizedTensor) else "dense" for w in (gate, up)}
    return len(storages) == 2 or any(isinstance(w, Adapted | Routed) for w in (gate, up))


def gated_mlp(
    x, gate: Weight, up: Weight, down: Weight, activation: str = "silu", last: Callable = linear
) -> jax.Array | Parts | Term:
    """down(activation(gate(x)) * up(x)); `activation` is one of `ACTIVATIONS`; last: makes the last product: `linear`,
    or a function that gives it in parts or as a term."""
    if _apart(gate, up):
        hidden = ACTIVATIONS[activation](linear(x, gate)) * linear(x, up)
    else:
        with _made_before(x, gate, up):
            gate, up = _beside(x, gate), _beside(x, up)
            hidden = ops.gated_mlp(x, gate, up, activation=activation, transpose=True, out_dtype=x.dtype)
    return last(hidden, down)


def as_float32(x):
    """A weight as a dense float32 array."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else jnp.asarray(x, jnp.float32)


def fuse(parts: Sequence) -> Weight:
    """One matrix out of several that share their input, where their storage is alike; otherwise a tuple, in which
    neighbours of equal storage are one matrix: files of K-quants often spend more bits on values than on queries and
    keys."""
    stored = lambda p: p.storage if isinstance(p, QuantizedTensor) else p.dtype.name
    fused = tuple(_stacked(list(alike)) for _, alike in itertools.groupby(parts, stored))
    return fused[0] if len(fused) == 1 else fused


def _stacked(parts: list):
    if len(parts) == 1:
        return parts[0]
    return QuantizedTensor.concatenate(parts) if isinstance(parts[0], QuantizedTensor) else jnp.concatenate(parts)
