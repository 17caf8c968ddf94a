"""A decoding step's attention of one new token a row, with what stands between the projection and it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import hopper_parts, hopper_spread, hopper_step
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape
from jtile.ops.cache_appends import heads_of, rope_append, rotated
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, has
from jtile.ops.matmul import matmul
from jtile.ops.operands import Weight
from jtile.ops.quantized import quantized_matmul
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.split_attention import decode_attention, decode_attention_reference

PRODUCTS = True  # whether `attention_product` has kernels
PACKED = ("q4_0", "q4_1", "q8_0", "int8", "fp8")  # quantised weights that its product takes


def step_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    heads: int,
    pages: jax.Array | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates the queries and keys of a new token a row, appends it to the cache, and attends to that.

    On Hopper it is one kernel where keys are few and `jt.config(overlap=True)` is set. That promises here that the
    kernel in front makes none of the older slots of this cache, of `lengths` and of `pages`: these are read while it
    still runs.

    Args:
      qkv: float [batch, heads + 2 kv_heads, d], d even: queries, keys and values of the new tokens.
      cos, sin: float32 [batch, d / 2], for the positions of the new tokens: the pairs (i, i + d / 2) are turned.
      lengths: int [batch], tokens that the cache holds of each row; the new one goes to the slot behind them.
      keys, values: the cache [batch, slots, kv_heads, d], or [pages, slots of a page, kv_heads, d]; donate them, and
        they are written in place.
      heads: heads of queries, a multiple of kv_heads.
      pages: int [batch, n], the pages of each row in order, or None.
      norms: weights float32 [d] of RMS norms of queries and of keys, before they are turned, or None.
      eps: added to the mean square in the norms.
      scale: factor of the scores; 1 / sqrt(d) by default.
    Returns:
      The mixed values [batch, heads, d] of qkv's dtype, keys and values.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    _check(qkv, cos, sin, lengths, keys, values, heads, pages, norms)
    table = None if pages is None else pages.astype(jnp.int32)
    scale = qkv.shape[2] ** -0.5 if scale is None else float(scale)
    options = {"heads": heads, "eps": float(eps), "scale": scale}
    return _step(qkv, cos, sin, lengths.astype(jnp.int32), keys, values, tuple(norms or ()), table, **options)


def attention_product(
    qkv, cos, sin, lengths, keys, values, weight, *, heads: int, scale: float | None = None, residual=None
) -> tuple[jax.Array, jax.Array, jax.Array] | None:  # fmt: skip
    """`step_attention`, and its output times the transposed `weight`, where kernels for few keys of one row do both.
    `jt.config(overlap=True)` promises the same as there, and that no kernel in front makes cos, sin or the weight.

    Args:
      qkv, cos, sin, lengths, keys, values, heads, scale: see `step_attention`.
      weight: float [out, heads * d] of qkv's dtype, or a `QuantizedTensor`.
      residual: [batch, out] of qkv's dtype, which is added to the product, or None.
    Returns:
      The product [batch, out] of qkv's dtype, keys and values; None where there are no such kernels for the call.
    """
    kind, stored = _stored(weight)
    scale = qkv.shape[2] ** -0.5 if scale is None else float(scale)
    alike = stored.codes.dtype == jnp.uint32 if kind in PACKED else kind == qkv.dtype.name
    alike = alike and has(jt.target(), *BLOCK_LEVEL)
    operands = qkv, lengths, keys, stored, kind, heads, scale
    forms = ((name, form.choice(*operands)) for name, form in _FORMS.items()) if PRODUCTS and alike else ()
    name, found = next(((name, found) for name, found in forms if found is not None), (None, None))
    if found is None:
        return None
    options = {"form": name, "heads": heads, "scale": scale, "kind": kind} | found
    return _product(**options)(qkv, cos, sin, lengths.astype(jnp.int32), keys, values, stored, residual)


def _stored(weight) -> tuple[str, Weight]:
    if isinstance(weight, QuantizedTensor):
        return weight.kind, Weight(weight.codes, weight.scale, weight.minimum)
    return weight.dtype.name, Weight(weight)


_FORMS = {"small": hopper_parts, "streamed": hopper_spread}  # how the products behind attention take their matrices


@functools.lru_cache(maxsize=128)
def _product(form: str, **options):
    """The `step` of a form, in whose place other kernels stand under vmap, as in `_mapped`."""
    run = jax.custom_batching.custom_vmap(functools.partial(_FORMS[form].step, **options))

    def apart(qkv, cos, sin, lengths, keys, values, weight, residual):
        given = {"heads": options["heads"], "eps": 0.0, "scale": options["scale"]}
        y, keys, values = _apart(qkv, cos, sin, lengths, keys, values, (), None, **given)
        y = y.reshape(y.shape[0], -1)
        if options["kind"] == y.dtype.name:
            y = matmul(y, weight.codes, transpose_b=True)
        else:
            matrix = QuantizedTensor(weight.codes, weight.scale, weight.minimum, options["kind"])
            y = quantized_matmul(y, matrix, out_dtype=y.dtype)
        return y if residual is None else y + residual, keys, values

    @run.def_vmap
    def _(size: int, batched, *operands):
        axes = [jax.tree.map(lambda b: 0 if b else None, there) for there in batched]
        return jax.vmap(apart, axes, axis_size=size)(*operands), (True,) * 3

    return run


def step_attention_reference(
    qkv, cos, sin, lengths, keys, values, *, heads: int, pages=None, norms=None, eps: float = 1e-6, scale=None
):
    """`step_attention` in jnp."""
    kvs, page = keys.shape[2], keys.shape[1]
    turned = rotated(heads_of(qkv, norms or (), heads, kvs, eps), cos[:, None], sin[:, None])
    row, at = jnp.arange(lengths.shape[0]), lengths
    if pages is not None:
        row, at = jnp.take_along_axis(pages, (lengths // page)[:, None], axis=1)[:, 0], lengths % page
    keys = keys.at[row, at].set(turned[:, heads:].astype(keys.dtype), mode="drop")
    values = values.at[row, at].set(qkv[:, heads + kvs :].astype(values.dtype), mode="drop")
    q = turned[:, :heads].astype(qkv.dtype)
    return decode_attention_reference(q, keys, values, lengths + 1, pages=pages, scale=scale), keys, values


def _check(qkv, cos, sin, lengths, keys, values, heads: int, pages, norms) -> None:
    name = "step_attention"
    check_float(name, qkv=qkv, keys=keys, values=values)
    check_int(name, lengths=lengths)
    check_rank(name, "qkv", qkv, 3, "[batch, heads + 2 kv_heads, d]")
    check_rank(name, "keys", keys, 4, "[batch, slots, kv_heads, d], or with pages [pages, slots of a page, ...]")
    check_shape(name, "values", values, keys.shape)
    (batch, count, d), kvs = qkv.shape, keys.shape[2]
    if heads < 1 or kvs < 1 or heads % kvs or count != heads + 2 * kvs or keys.shape[3] != d or d % 2:
        raise KernelValueError(
            f"{name}: qkv {qkv.shape} with {heads} heads does not fit a cache {keys.shape}: expected [batch, heads + 2 "
            "kv_heads, d] of an even d, and heads a multiple of kv_heads"
        )
    check_shape(name, "lengths", lengths, (batch,))
    for what, x in (("cos", cos), ("sin", sin)):
        check_shape(name, what, x, (batch, d // 2))
    for x in norms or ():
        check_shape(name, "norms", x, (d,))
    for what, x in (("cos", cos), ("sin", sin), *(("norms", x) for x in norms or ())):
        if x.dtype != jnp.float32:
            raise KernelTypeError(f"{name}: {what} is float32, got {x.dtype.name}")
    if pages is None:
        check_shape(name, "keys", keys, (batch, *keys.shape[1:]))
        return
    check_int(name, pages=pages)
    check_rank(name, "pages", pages, 2, "[batch, pages of a row]")
    check_shape(name, "pages", pages, (batch, pages.shape[1]))


def _apart(qkv, cos, sin, lengths, keys, values, norms, table, *, heads: int, eps: float, scale: float):
    """The step by two kernels: one appends, and one attends."""
    options = {"heads": heads, "kv_heads": keys.shape[2], "eps": eps}
    q, keys, values = rope_append(qkv, cos, sin, lengths, keys, values, norms, table, **options)
    y = decode_attention(q.astype(keys.dtype), keys, values, lengths + 1, pages=table, scale=scale)
    return y.astype(qkv.dtype), keys, values


@functools.lru_cache(maxsize=128)
def _mapped(**options):
    """`hopper_step.step`, whose place takes `_apart` under vmap: counters and caches in place are those of one call."""
    run = jax.custom_batching.custom_vmap(functools.partial(hopper_step.step, **options))

    @run.def_vmap
    def _(size: int, batched, *operands):
        axes = [jax.tree.map(lambda b: 0 if b else None, there) for there in batched]
        out = jax.vmap(functools.partial(_apart, **options), axes, axis_size=size)(*operands)
        return out, (True,) * 3

    return run


def _in_one(*operands, **options):
    return _mapped(**options)(*operands)


# From qkv [batch, heads + 2 kv heads, d] and a cache: the mixed values of its queries, and the longer cache.
_step = Op(
    "step_attention",
    Implementation("one kernel beside the products", _in_one, hopper_step.misfit, BLOCK_LEVEL, portable=False),
    Implementation("append, then attend", _apart),
)
