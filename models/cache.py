"""The key-value cache of a decoder: donated from step to step, so that it is updated in place.

A layer's `Entry` holds the tokens of each row in slots: side by side, in a ring that keeps the newest ones of a window,
or in pages of a pool. `Slots` is an entry beside what all layers share, the lengths and the table of pages: a layer
appends new tokens to it and attends to it, and knows no form.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jtile as jt
from jtile import ops
from jtile.ops import QuantizedTensor, gpu_tiles
from jtile.ops.hopper_append import hopper_append, shares_of
from jtile.ops.mixed_attention import mixed_attention, run_apart
from jtile.ops.step_attention import attention_product, step_attention

from . import kernels
from .parallel import collective, held, held_part
from .selection import IndexQuery, select
from .sums import Parts

SMALLEST_BUCKET = 16
SCALED = ("float8_e4m3fn", "int8")  # dtypes of a cache with scales


class HeadNorms(NamedTuple):
    """RMS norms of each head's queries and keys before they are rotated: weights float32 [head_dim]."""

    q: jax.Array
    k: jax.Array
    eps: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """What one layer keeps of the tokens.

    arrays: keys and values [batch, slots, kv_heads, head_dim] (two arrays, so that no step copies a layer), or the
    latent vectors [batch, slots, rank + rope], and the keys [batch, slots, size] of an indexer, if there is one; in
    pages [pages, slots of a page, ...]. scales: for keys and values of 8 bits their scales, float32 [batch or pages,
    kv_heads, slots], or those of latent vectors and of an indexer's keys [batch or pages, slots], see
    `kernels.quantized`; otherwise (). ring: the token at position p is in slot p modulo slots, and older ones are gone;
    without a ring the slot is the position, in the row or in its pages.
    """

    arrays: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...] = ()
    ring: bool = dataclasses.field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What a layer of linear attention keeps instead of tokens: inputs [batch, width - 1, channels], the newest of its
    convolution; state float32 [batch, heads, key, value]."""

    inputs: jax.Array
    state: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """What every layer keeps of the tokens; row b holds `lengths[b]` of them.

    lengths: int32 [batch]. table: int32 [batch, n], the pages of each row in order, the same numbers in the pool of
    every layer; None where rows lie in one piece, as rows of rings always do. splits: into how many parts the
    keys of a row are split; by default their number depends on the other rows, and with it the order of sums. tiles:
    (n, t): behind the first n rows, every t rows (a tile) are consecutive tokens of one sequence, which attention takes
    together; a tile may begin with padding, whose length is -1. seen: so many pages tiles see at most, see
    `mixed_attention`, if that is known. context: the axis of a mesh whose devices hold the tokens of a row in turns,
    but for rings, which are whole on each device.
    """

    entries: tuple[Entry | State, ...]
    lengths: jax.Array
    table: jax.Array | None = None
    splits: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    tiles: tuple[int, int] | None = dataclasses.field(default=None, metadata=dict(static=True))
    context: str | None = dataclasses.field(default=None, metadata=dict(static=True))
    seen: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    def layer(self, entry: Entry | State, fresh: bool = False) -> Slots:
        """The slots of one entry, to which tokens can be appended. fresh: see `Slots`."""
        alone = isinstance(entry, State) or entry.ring
        table, context = (None, None) if alone else (self.table, self.context)
        return Slots(entry, self.lengths, table, self.splits, self.tiles, context, fresh, self.seen)

    def longer(self, entries: Sequence[Entry | State], by: int = 1) -> KVCache:
        """The cache behind a step of `by` tokens a row, which has made these entries."""
        return dataclasses.replace(self, entries=tuple(entries), lengths=self.lengths + by)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.entries))


@dataclasses.dataclass(frozen=True)
class Slots:
    """An entry of the cache with `lengths` tokens a row before this step; see `KVCache`. fresh: a kernel right in front
    of attention may have made these lengths, which is not to read them early then."""

    entry: Any  # an `Entry`; a `State` is the layer's own
    lengths: jax.Array
    table: jax.Array | None = None
    splits: int | None = None
    tiles: tuple[int, int] | None = None
    context: str | None = None
    fresh: bool = False
    seen: int | None = None

    def of_chunks(self, size: int) -> Slots:
        """The slots as attention in chunks of `size` positions sees them: a ring of that size holds the newest chunk
        from its first slot on. Other entries have at most `size` slots."""
        return dataclasses.replace(self, lengths=self.lengths % size) if self.entry.ring else self

    def _with(self, arrays, scales=()) -> Slots:
        return dataclasses.replace(self, entry=Entry(tuple(arrays), tuple(scales), self.entry.ring))

    def _tokens(self, x):
        """x [batch * t, ...] as [batch, t, ...]; where each row has one token, x as it is."""
        batch = self.lengths.shape[0]
        return x if x.shape[0] == batch else x.reshape(batch, -1, *x.shape[1:])

    def append(self, qkv, cos, sin, heads: int, kv_heads: int, norms: HeadNorms | None = None):
        """The projection qkv [batch * t, (heads + 2 kv_heads) head_dim] of the next t tokens of each row, with the cos
        and sin [batch * t, head_dim / 2] of their positions: returns the rotated queries [batch * t, heads, head_dim],
        and the slots with keys and values, written in place in the cache's dtype."""
        weights, eps = ((), 0.0) if norms is None else ((norms.q, norms.k), norms.eps)
        options = {"heads": heads, "kv_heads": kv_heads, "eps": eps, "ring": self.entry.ring}
        qkv, options = (qkv.value, options | {"dtype": qkv.dtype}) if isinstance(qkv, Parts) else (qkv, options)
        qkv = qkv.reshape(*qkv.shape[:-1], heads + 2 * kv_heads, -1)
        entry, kernel = self.entry, kernels.rope_append_scaled if self.entry.scales else kernels.rope_append
        held = *entry.arrays, *entry.scales
        if "dtype" in options:
            shares = shares_of(qkv, held[0], weights, self.table, heads=heads, kv_heads=kv_heads)
            kernel = kernel.with_options(num_warps=8) if shares is None else hopper_append  # parts are more to read
            options |= {} if shares is None else {"shares": shares}
        q, *held = kernel(qkv, cos, sin, self._free(), *held, weights, self.table, **options)
        return q, self._with(held[:2], held[2:])

    def _free(self):
        """The slot of the next token. Where devices share the cache, all of them write the token there; a device whose
        turn it is not overwrites it with its own next token."""
        return self.lengths if self.context is None else held(self.lengths, self.context)

    def append_and_attend(
        self, qkv, cos, sin, heads: int, kv_heads: int, norms: HeadNorms | None = None, *, window: int | None = None,
        scale: float | None = None, softcap: float | None = None, sinks=None,
    ):  # fmt: skip
        """`append`, then `attend`: (what the new tokens get [batch * t, heads, head_dim], the slots)."""
        entry, several = self.entry, qkv.shape[0] != self.lengths.shape[0]
        masked = window is not None or softcap is not None or sinks is not None
        alone = self.splits is None and self.tiles is None and self.context is None
        if isinstance(qkv, Parts) and not entry.scales:
            q, slots = self.append(qkv, cos, sin, heads, kv_heads, norms)
            return slots.attend(q, window, scale, softcap, sinks), slots
        qkv = qkv.whole() if isinstance(qkv, Parts) else qkv
        if several or masked or entry.scales or entry.ring or not alone:
            q, slots = self.append(qkv, cos, sin, heads, kv_heads, norms)
            return slots.attend(q, window, scale, softcap, sinks), slots
        qkv = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, -1)
        weights, eps = (None, 0.0) if norms is None else ((norms.q, norms.k), norms.eps)
        options = {"heads": heads, "pages": self.table, "norms": weights, "eps": eps, "scale": scale}
        y, *held = step_attention(qkv, cos, sin, self.lengths, *entry.arrays, **options)
        return y, self._with(held)

    def attend_and_multiply(
        self, qkv, cos, sin, heads: int, kv_heads: int, weight, norms: HeadNorms | None = None, *,
        window: int | None = None, scale: float | None = None, softcap: float | None = None, sinks=None, residual=None,
    ):  # fmt: skip
        """(what `append_and_attend` gives each new token times the transposed weight, [batch, out], plus the residual;
        the slots), where kernels do all of it; else None."""
        entry, plain = self.entry, isinstance(weight, jax.Array | QuantizedTensor)
        extras = norms, window, softcap, sinks, self.splits, self.tiles, self.context, self.table
        if isinstance(qkv, Parts) or not plain or entry.scales or entry.ring or any(x is not None for x in extras):
            return None
        qkv = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, -1)
        (keys, values), more = entry.arrays, {"scale": scale, "residual": residual}
        found = attention_product(qkv, cos, sin, self.lengths, keys, values, weight, heads=heads, **more)
        return None if found is None else (found[0], self._with(found[1:]))

    def attend(
        self, q, window: int | None = None, scale: float | None = None, softcap: float | None = None, sinks=None
    ):
        """Causal attention of the tokens that were appended last, q [batch * t, heads, head_dim], rounded to the
        dtype of a cache of floats; the result has q's shape and dtype. `window`, `scale`, `softcap`,
        `sinks`: see `ops.decode_attention`."""
        (keys, values), scales = self.entry.arrays, self.entry.scales or None
        window = None if self.entry.ring else window  # a ring holds what a token sees, in any order
        options = {"scales": scales, "scale": scale, "softcap": softcap, "sinks": sinks, "splits": self.splits}
        if self.context is None:
            options["window"] = window
        if self.tiles is not None and self.table is not None and self.context is None:
            rounded = q if scales else q.astype(keys.dtype)
            options |= {"tiles": self.tiles, "seen": self.seen}
            return mixed_attention(rounded, keys, values, self._longer(q), self.table, **options).astype(q.dtype)
        decode = self._over_context(ops.decode_attention, "decode_attention")
        run = lambda q, lengths, table: decode(q, keys, values, lengths, pages=table, **options)
        with gpu_tiles.holding() if self.fresh else contextlib.nullcontext():
            return self._attended(run, q if scales else q.astype(keys.dtype)).astype(q.dtype)

    def append_latent(self, q, absorbed, new, norm, cos, sin, eps: float):
        """See `kernels.latent_append`: returns (query [batch * t, heads, rank + rope], the slots)."""
        (latent, *index), scales = self.entry.arrays, self.entry.scales
        kernel = kernels.latent_append_scaled if scales else kernels.latent_append
        query, latent, *new = kernel(
            q, absorbed, new, norm, cos, sin, self._free(), latent, *scales[:1], self.table, eps=eps
        )
        return query, self._with((latent, *index), (*new, *scales[1:]))

    def append_index(self, projected, norm, bias, cos, sin, eps: float) -> Slots:
        """The slots with the keys of an indexer; see `kernels.index_append`."""
        (latent, keys), scales = self.entry.arrays, self.entry.scales
        operands = projected, norm, bias, cos, sin, self._free(), keys
        if not scales:
            return self._with((latent, kernels.index_append(*operands, self.table, eps=eps)))
        keys, units = kernels.index_append_scaled(*operands, scales[1], self.table, eps=eps)
        return self._with((latent, keys), (scales[0], units))

    def query_dtype(self, dtype) -> str:
        """The dtype of queries of activations of a dtype: that of the entries, but for entries of 8 bits."""
        return jnp.dtype(dtype if self.entry.scales else self.entry.arrays[0].dtype).name

    def attend_latent(self, query, rank: int, scale: float):
        """`ops.mla_decode` of queries [batch * t, heads, rank + rope]: [batch * t, heads, rank] of their dtype."""
        latent, scales = self.entry.arrays[0], self.entry.scales
        options = {"scales": scales[0] if scales else None, "rank": rank, "scale": scale, "splits": self.splits}
        decode = self._over_context(ops.mla_decode, "mla_decode")
        return self._attended(lambda q, lengths, table: decode(q, latent, lengths, pages=table, **options), query)

    def attend_selected(self, query, index: IndexQuery, count: int, rank: int, scale: float):
        """`attend_latent` to the `count` tokens of a row with the best scores for `index`, of [batch * t] tokens."""
        (latent, keys), (of_latent, of_keys) = self.entry.arrays, self.entry.scales or (None, None)
        if latent.shape[1] * (1 if self.table is None else self.table.shape[1]) <= count:
            return self.attend_latent(query, rank, scale)
        options = {"scales": of_latent, "rank": rank, "scale": scale, "splits": self.splits}

        def run(of, lengths, table):
            query, index = of if of[0].ndim == 4 else jax.tree.map(lambda y: y[:, None], of)
            places, counts = select(index, keys, lengths, count, table, of_keys)
            y = ops.mla_selected(query, latent, places, counts, pages=table, **options)
            return y if of[0].ndim == 4 else y[:, 0]

        return self._attended(run, (query, index))

    def _over_context(self, alone, name: str):
        """`alone`, a function for attention to a whole cache, or the function `name` for a cache of which each device
        holds a part. A window, if there is one, is wider than the slots."""
        axis = self.context
        if axis is None:
            return alone
        over = collective(name, jt.can_talk())
        return lambda q, *cache, **options: over(q, *cache[:-1], held(cache[-1], axis), axis, **options)

    def _attended(self, run, of):
        """The attention of the new tokens, [batch * t, heads, ...] for q [batch * t, heads, d]; `of` is q, or q and
        further arrays of these tokens. It is computed by run(of, lengths, table), which takes arrays [batch, ...] or
        [batch, t, ...]."""
        first = jax.tree.leaves(of)[0]
        lengths, table = self._longer(first), self.table
        if self.tiles is None or table is None:
            y = run(jax.tree.map(self._tokens, of), lengths, table)
            return y.reshape(len(first), *y.shape[-2:])
        return run_apart(run, of, lengths, table, self.tiles)

    def _longer(self, tokens):
        """The lengths behind a step with these tokens."""
        return self.lengths + tokens.shape[0] // self.lengths.shape[0]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a cache is laid out.

    slots: the slots of each row. dtype: the dtype of the arrays, None for that of what goes into them; dtypes of 8 bits
    have scales. windows: the window of each layer, whose newest tokens a ring keeps if they are fewer than the slots;
    None and `()`: no rings. page: slots of a page, None for rows in one piece. context: see `KVCache`; each device has
    one slot more, into which it writes the tokens that others hold.
    """

    slots: int
    dtype: str | None = None
    windows: tuple[int | None, ...] = ()
    page: int | None = None
    context: str | None = None


def from_prefill(entries, lengths, layout: Layout) -> KVCache:
    """A cache of each layer's arrays [batch, length, ...] with length <= slots, of which `lengths` are real; pages of a
    row lie behind each other in their pools. A `State` stays as it is."""
    windows, slots = layout.windows or (None,) * len(entries), layout.slots
    if layout.context is not None:
        slots = -(-slots // jt.axis_size(layout.context)) + 1
    pages = None if layout.page is None else -(-slots // layout.page)
    table = None
    if pages is not None:
        batch, slots = lengths.shape[0], pages * layout.page
        table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)

    def place(x, ring: int | None):
        if ring is not None:
            return _newest(x, lengths, ring)
        x = x if layout.context is None else held_part(x, layout.context)
        x = jnp.pad(x, ((0, 0), (0, slots - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        return x if pages is None else x.reshape(-1, layout.page, *x.shape[2:])

    def entry(arrays, window):
        if isinstance(arrays, State):
            return arrays
        ring = None if window is None or window >= layout.slots else window
        scales = ()
        if layout.dtype in SCALED:
            arrays, scales = zip(*(kernels.quantized(x, jnp.dtype(layout.dtype)) for x in arrays), strict=True)
        elif layout.dtype is not None:
            arrays = [x.astype(layout.dtype) for x in arrays]
        scales = tuple(jnp.moveaxis(place(x, ring), 1, -1) for x in scales)
        return Entry(tuple(place(x, ring) for x in arrays), scales, ring is not None)

    found = tuple(entry(*of) for of in zip(entries, windows, strict=True))
    return KVCache(found, lengths, table, context=layout.context)


def _newest(x, lengths, slots: int):
    """The ring [batch, slots, ...] of the newest tokens of x [batch, length, ...]."""
    if x.shape[1] <= slots:
        return jnp.pad(x, ((0, 0), (0, slots - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    last = lengths[:, None] - 1
    positions = last - (last - jnp.arange(slots, dtype=jnp.int32)[None, :]) % slots
    positions = jnp.maximum(positions, 0).reshape(*positions.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, positions, axis=1)


def bucket(length: int, limit: int | None = None) -> int:
    """The smallest allowed static size >= length: multiples of an eighth of its power of two, at least 16.

    Few sizes mean few compilations; steps of an eighth waste at most 12.5 percent of the work above 128.
    """
    step = max(SMALLEST_BUCKET, 1 << max(0, (length - 1).bit_length() - 4))
    size = max(SMALLEST_BUCKET, -(-length // step) * step)
    return size if limit is None else max(length, min(size, limit))
