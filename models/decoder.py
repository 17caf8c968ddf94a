"""The decoder that every model of this package is: an embedding, blocks of attention and MLP, a norm, an output head.

A model's file says which attention and which MLP its blocks have; most have `Attention` and `GatedMLP`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jtile import ops
from jtile.ops import gpu_tiles, hopper_largest

from . import cache as kv
from . import layers
from .config import AttentionConfig, DecoderConfig, WeightSource
from .dtypes import packing, rounding
from .parallel import ALONE, Axes
from .sums import Added, Unmade

IGNORED = -100  # the label of a token that is not to be predicted


class Attention(nnx.Module):
    """Grouped-query self-attention; the query, key and value weights are one matrix, so that one kernel call serves.

    It is used in two steps: `enter` makes the projection, which `prefill` or `step` takes. On several devices each has
    some of the heads, and its output is a `Term`. parts: what is behind it takes `Unmade`."""

    over: Axes = ALONE
    parts: bool = False

    def __init__(self, config: AttentionConfig, hidden: int, weight: WeightSource, prefix: str):
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        shapes = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden), "o": (hidden, q_rows)}
        read = lambda name: weight(f"{prefix}{name}_proj.weight", shapes[name])
        self.config, self.rope, order = config, config.rope, config.rope.order()
        query, *gates = _with_gates(weight(f"{prefix}q_proj.weight", (2 * q_rows, hidden)), config.heads) if (
            config.gated
        ) else [read("q")]  # fmt: skip
        matrices = *(_by_head(w, order) for w in (query, read("k"))), read("v"), *gates
        self.qkv, self.output = nnx.Param(layers.fuse(matrices)), nnx.Param(read("o"))
        bias = lambda name: layers.as_float32(weight(f"{prefix}{name}_proj.bias", shapes[name][:1]))
        self.bias = nnx.Param(jnp.concatenate([bias(name) for name in "qkv"])) if config.biased else None
        self.output_bias = nnx.Param(bias("o")) if config.output_biased else None
        self.sinks = nnx.Param(layers.as_float32(weight(f"{prefix}sinks", (config.heads,)))) if config.sinks else None
        norm = lambda name: nnx.Param(
            _by_head(layers.as_float32(weight(f"{prefix}{name}_norm.weight", (config.head_dim,))), order)
        )
        self.q_norm, self.k_norm = (None, None) if config.norm_eps is None else (norm("q"), norm("k"))

    @property
    def window(self) -> int | None:
        """How many keys a token sees at most, the newest ones or those of its chunk; None: all."""
        return self.config.window if self.config.chunk is None else self.config.chunk

    def _norms(self) -> kv.HeadNorms | None:
        if self.q_norm is None:
            return None
        return kv.HeadNorms(self.q_norm.get_value(), self.k_norm.get_value(), self.config.norm_eps)

    def enter(self, x, delta, norm, eps: float):
        """(x + delta, the projection of its norm [..., (heads + 2 kv_heads) head_dim], with the gates behind it if the
        attention is gated); x, delta [..., hidden]."""
        plain = self.bias is None and not self.config.gated and self.config.rope.tempered is None
        x, qkv = layers.add_norm_linear(x, delta, norm, eps, self.qkv.get_value(), parts=plain and self.parts)
        return x, layers.with_bias(qkv, _value(self.bias))

    def _gates(self, projected):
        """(the projection of queries, keys and values, the gates or None)."""
        if not self.config.gated:
            return projected, None
        return jnp.split(projected, [projected.shape[-1] - self.config.heads * self.config.head_dim], axis=-1)

    def _tempered(self, qkv, cos):
        """(qkv, cos) by `layers.tempered` if the rope is tempered; otherwise both unchanged."""
        c = self.config
        return (qkv, cos) if c.rope.tempered is None else layers.tempered(qkv, cos, c.heads * c.head_dim)

    def _leave(self, mixed, gates):
        if gates is not None:
            wide = jax.nn.sigmoid(gates.astype(jnp.float32)) * mixed.astype(jnp.float32)
            mixed = wide.astype(mixed.dtype)
        if self.output_bias is None:
            return _last(self)(mixed, self.output.get_value())
        return self.over.term(layers.with_bias(layers.linear(mixed, self.output.get_value()), _value(self.output_bias)))

    def prefill(self, qkv, cos, sin, slots: int | None = None):
        """Attention within prompts, from their projection [batch, length, ...]; returns (output [batch, length,
        hidden], (k, v)); if tokens see all keys, these have `slots` positions, zeros behind the length."""
        c, (qkv, gates) = self.config, self._gates(qkv)
        qkv, cos = self._tempered(qkv, cos)
        slots = slots if self.window is None else None
        q, k, v = layers.split_heads(qkv, cos, sin, c.heads, c.kv_heads, self._norms(), slots)
        options = {"scale": c.scale, "softcap": c.softcap, "sinks": _value(self.sinks)}
        options["precision"] = layers.precision(self.qkv.get_value())
        if c.chunk is None:
            mixed = layers.attention(q, k, v, c.window, **options)
        else:
            mixed = layers.chunked_attention(q, k, v, c.chunk, **options)
        return self._leave(mixed.reshape(*qkv.shape[:2], -1), gates), (k, v)

    def step(self, qkv, cos, sin, slots: kv.Slots, x=None):
        """Attention of the next t tokens of each row, from their projection [batch * t, ...], to this layer's part of
        the cache; returns (output [batch * t, hidden], the part of the cache with these tokens). x:
        [batch * t, hidden], which may be added to the output: it is `Added` then."""
        c, (qkv, gates) = self.config, self._gates(qkv)
        qkv, cos = self._tempered(qkv, cos)
        slots = slots if c.chunk is None else slots.of_chunks(c.chunk)
        options = {"window": c.window, "scale": c.scale, "softcap": c.softcap, "sinks": _value(self.sinks)}
        if gates is None and self.output_bias is None:
            residual = x if self.parts and self.over.tensor is None else None
            together = slots.attend_and_multiply(
                qkv, cos, sin, c.heads, c.kv_heads, self.output.get_value(), self._norms(), residual=residual, **options
            )
            if together is not None:
                y, slots = together
                return self.over.term(y) if residual is None else Added(y), slots
        mixed, slots = slots.append_and_attend(qkv, cos, sin, c.heads, c.kv_heads, self._norms(), **options)
        return self._leave(mixed.reshape(qkv.shape[0], -1), gates), slots


def _with_gates(weight, heads: int) -> list:
    """Two matrices, of the queries and of the gates, from one in which the gate rows of a head follow its query
    rows."""
    of_head = np.arange(weight.shape[0]).reshape(heads, 2, -1)
    return [layers.rows(weight, of_head[:, i].reshape(-1)) for i in range(2)]


def _by_head(weight, order):
    """Rows of a matrix, or numbers of a norm, with the features of each head in another order."""
    if order is None:
        return weight
    whole = np.arange(weight.shape[0]).reshape(-1, len(order))[:, order].reshape(-1)
    return layers.rows(weight, whole)


def _value(param: nnx.Param | None):
    return None if param is None else param.get_value()


def _last(module: Attention | GatedMLP) -> Callable:
    """What multiplies by the last matrix of a module: a function of the rows and the matrix."""
    if module.over.tensor is not None:
        return functools.partial(layers.summed, over=module.over, parts=module.parts)
    return layers.linear_or_unmade if module.parts else layers.linear


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)). On several devices each has some of the features. parts: see `Attention`."""

    over: Axes = ALONE
    parts: bool = False

    def __init__(self, hidden: int, features: int, weight: WeightSource, prefix: str, activation: str = "silu"):
        self.activation = activation
        self.gate = nnx.Param(weight(f"{prefix}gate_proj.weight", (features, hidden)))
        self.up = nnx.Param(weight(f"{prefix}up_proj.weight", (features, hidden)))
        self.down = nnx.Param(weight(f"{prefix}down_proj.weight", (hidden, features)))

    def __call__(self, x):
        """x [..., hidden] -> [..., hidden]; on several devices the term of this one."""
        return layers.gated_mlp(x, *self._weights(), self.activation)

    def behind_norm(self, x, delta, norm, eps: float):
        """(x + delta, the output of this MLP for the norm of that sum)."""
        return layers.add_norm_gated_mlp(x, delta, norm, eps, *self._weights(), self.activation, _last(self))

    def _weights(self):
        return self.gate.get_value(), self.up.get_value(), self.down.get_value()


def enter(attention, x, delta, norm, eps: float, hold: bool = False):
    """(x + delta, the operand of `attention`): the norm of the sum, or what the attention makes of it in one kernel.

    hold: what is in front of it writes the lengths of the cache, which the attention behind it may read early."""
    with gpu_tiles.holding() if hold else contextlib.nullcontext():
        return getattr(attention, "enter", layers.add_norm)(x, delta, norm.get_value(), eps)


def mlp_behind_norm(mlp, x, delta, norm, eps: float):
    """(x + delta, the output of `mlp` for the norm of that sum)."""
    if hasattr(mlp, "behind_norm"):
        return mlp.behind_norm(x, delta, norm.get_value(), eps)
    x, normed = layers.add_norm(x, delta, norm.get_value(), eps)
    return x, mlp(normed)


def tokens_at(arrays, at):
    """The tokens `at`, int32 [batch], of arrays [batch, length, ...] in a tree: [batch, ...]; None: all tokens."""
    if at is None:
        return arrays
    one = lambda y: jnp.take_along_axis(y, at.reshape(-1, *(1,) * (y.ndim - 1)), axis=1)[:, 0]
    return jax.tree.map(one, arrays)


def rows_of(arrays, of):
    """The rows `of`, int32 [n], of arrays [rows, ...]; None: all rows."""
    if of is None:
        return arrays
    made = tuple(layers.whole(y) if isinstance(y, Unmade) else y for y in arrays)
    return jax.tree.map(lambda y: jnp.take(y, of, axis=0, mode="clip"), made)


def _routed(module) -> bool:
    """Whether the rows of a module's operand have adapters of their own."""
    is_routed = lambda x: isinstance(x, layers.Routed)
    return any(map(is_routed, jax.tree.leaves(nnx.state(module), is_leaf=is_routed)))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    attention: a module with `rope`, `window`, `prefill` and `step` as `Attention` has, which take what
    `enter` gives; what it keeps of each token, a tuple of arrays [batch, length, ...], is this layer's entry of the
    cache. mlp: a module that is called as `GatedMLP` is.

    A block takes x as the sum of two arrays, and gives it so: the norm behind the sum is one kernel with it. The second
    array may be None, a `Term`, or `Unmade`: their sums are in the same kernel, too.
    """

    def __init__(self, config: DecoderConfig, weight: WeightSource, prefix: str, attention: Any, mlp: Any):
        norm = lambda name: nnx.Param(layers.as_float32(weight(f"{prefix}{name}.weight", (config.hidden_size,))))
        self.eps, self.rope = config.norm_eps, attention.rope
        self.recurrent = getattr(attention, "recurrent", False)
        self.attention_norm, self.attention = norm("input_layernorm"), attention
        self.mlp_norm, self.mlp = norm("post_attention_layernorm"), mlp
        if isinstance(mlp, GatedMLP):  # a mixture has kernels for its norm that take whole sums
            mlp.parts = True
            if isinstance(attention, Attention):
                attention.parts = True

    def _run(self, x, delta, attend, at=None, hold: bool = False, of=None):
        """((x, delta) behind this block, the entry of the cache) for x + delta in front of it; `attend(entered, x)`
        runs the attention, which may give its output `Added` to that sum; at: see `prefill`; hold: see `enter`; of:
        see `step`."""
        x, entered = enter(self.attention, x, delta, self.attention_norm, self.eps, hold)
        attended, entry = attend(entered, x)
        x, attended = (attended.total, None) if isinstance(attended, Added) else (x, attended)
        x, attended = rows_of(tokens_at((x, attended), at), of)
        return mlp_behind_norm(self.mlp, x, attended, self.mlp_norm, self.eps), entry

    def prefill(self, x, delta, cos, sin, lengths=None, at=None, slots=None):
        """x, delta [batch, length, hidden]; returns (both behind this block, what the cache keeps of these tokens).
        Where that is a state, only the first `lengths` [batch] tokens of each row count. at, int32 [batch]: of each row
        only this token goes through the MLP, and x and delta behind the block are [batch, hidden]. slots: the size that
        keys and values may be made in at once, see `Attention.prefill`."""
        more = {"lengths": lengths} if self.recurrent else {}
        more |= {"slots": slots} if isinstance(self.attention, Attention) else {}
        return self._run(x, delta, lambda entered, _: self.attention.prefill(entered, cos, sin, **more), at)

    def step(self, x, delta, cos, sin, slots: kv.Slots, hold: bool = False, of=None):
        """x, delta [batch * t, hidden], the next t tokens of each row; returns (both behind this block, this layer's
        longer part of the cache). hold: see `enter`; of, int32 [n]: only these tokens go through the MLP, and x and
        delta behind the block are [n, hidden]."""
        added = (lambda x: {"x": x}) if type(self.attention) is Attention else (lambda x: {})
        attend = lambda entered, x: self.attention.step(entered, cos, sin, slots, **added(x))
        return self._run(x, delta, attend, hold=hold, of=of)


class Decoder(nnx.Module):
    """A language model. Rows of a batch are right-padded: row b holds `lengths[b]` tokens from position 0 on.

    Causality keeps the padding out of every real position, so no mask travels through the layers.

    On several devices each has an equal part of the rows of the tables of the vocabulary.

    Activations have the dtype `dtype`. Sums of products, scores, statistics of norms, rotations and routers, which need
    more precision, are computed in float32 and then rounded. Logits stay float32.
    """

    over: Axes = ALONE

    def __init__(self, config: DecoderConfig, weight: WeightSource, tied: bool, dtype: str = "float32"):
        """`weight(name, shape)` gives the checkpoint's tensor of that (transformers) name, checked against `shape`;
        `tied`: the embedding serves as the output head; `dtype`: see above, and `dtypes.rounding`."""
        table = (config.vocab_size, config.hidden_size)
        self.config, self.dtype, plain = config, dtype, rounding(config.stored(weight), dtype)
        weight = packing(plain, dtype)
        # a table that no product reads stays as it is stored: its rows are read sooner so
        self.embedding = nnx.Param((weight if tied else plain)("model.embed_tokens.weight", table))
        self.blocks = nnx.List([config.block(i, weight) for i in range(config.num_layers)])
        self.norm = nnx.Param(layers.as_float32(weight("model.norm.weight", (config.hidden_size,))))
        self.output = None if tied else nnx.Param(weight("lm_head.weight", table))

    @property
    def ropes(self) -> tuple:
        """The ropes that blocks have, each once."""
        return tuple(dict.fromkeys(block.rope for block in self.blocks))

    def enter(self, ids, positions):
        """What goes into the blocks.

        Args:
          ids, positions: int32 of one shape.
        Returns:
          The embeddings of the ids, and the cos and sin of the positions for each of `ropes`.
        """
        x = self.over.embedding(self.embedding.get_value(), ids, self.dtype) * self.config.embedding_scale
        angles = lambda rope: layers.rope_angles(
            positions, jnp.asarray(rope.frequencies()), rope.attention_factor, rope.tempered
        )
        return x, {rope: angles(rope) for rope in self.ropes}

    def _norm(self, x, delta=None):
        return layers.add_norm(x, delta, self.norm.get_value(), self.config.norm_eps)[1]

    def head_table(self):
        """The weight [vocab, hidden] of the head."""
        return (self.embedding if self.output is None else self.output).get_value()

    def _logits(self, normed):
        return self._capped(layers.linear(normed, self.head_table(), jnp.float32))

    def _finds_largest(self, x) -> bool:
        """Whether the largest logits behind x [rows, hidden] are found soonest without the others."""
        plain = self.config.softcap is None and isinstance(self.head_table(), jax.Array)
        return plain and hopper_largest.misfit(x, self.head_table()) is None

    def _capped(self, logits, shares: bool = False):
        cap = self.config.softcap
        capped = logits if cap is None else cap * jnp.tanh(logits / cap)
        return self.over.gathered(capped, self.config.vocab_size, shares)

    def head(self, hidden):
        """The logits behind hidden states.

        Args:
          hidden: [..., hidden], before the final norm.
        Returns:
          float32 [..., vocab].
        """
        return self._logits(self._norm(hidden))

    def prefill(self, ids, lengths=None, at=None, slots=None):
        """Runs whole prompts.

        Args:
          ids: int32 [batch, length].
          lengths: int32 [batch], how many ids of each row are tokens; None: all.
          at: int32 [batch], the one token of each row whose hidden state is asked for; None: all tokens. The others
            have no use for the MLP of the last block, which is left out for them.
          slots: positions that the cache is going to have, which keys and values that all tokens see may have at once.
        Returns:
          Hidden states [batch, length, hidden], or [batch, hidden] of the tokens `at`, before the final norm, and the
          entry of each layer for the cache.
        """
        (x, delta, _), entries = self.through(self.begin(ids), range(len(self.blocks)), lengths, at, slots)
        return x + layers.whole(delta), entries

    def begin(self, ids) -> tuple:
        """What `through` takes in front of the first block, for ids int32 [batch, length]."""
        x, angles = self.enter(ids, _positions(ids))
        return x, None, [angles[rope] for rope in self.ropes]

    def through(self, carried: tuple, some: range, lengths=None, at=None, slots=None) -> tuple[tuple, list]:
        """Runs prompts through `some` of the blocks.

        Args:
          carried: (x, delta, for each of `ropes` cos and sin of the positions): x + delta goes into the first of them.
          lengths, at, slots: as in `prefill`; of `at` behind the last block of all.
        Returns:
          What is carried on behind them, and the entry of each of these layers for the cache.
        """
        (x, delta, turns), entries = carried, []
        angles = dict(zip(self.ropes, turns, strict=True))
        for i in some:
            block: Any = self.blocks[i]
            more = {"lengths": lengths} if getattr(block, "recurrent", False) else {}
            more |= {"at": at if i == len(self.blocks) - 1 else None, "slots": slots}
            (x, delta), entry = block.prefill(x, delta, *angles[block.rope], **more)
            entries.append(entry)
        return (x, delta, turns), entries

    def __call__(self, ids, *, remat: bool = False):
        """Logits float32 [batch, length, vocab] after every token of ids int32 [batch, length], without a cache.

        `remat`: reverse mode keeps only the input of each block, and computes the block again (`jax.checkpoint`).
        """
        return self._logits(self.hidden_states(ids, remat=remat)[-1])

    def hidden_states(self, ids, *, remat: bool = False) -> list[jax.Array]:
        """The hidden states between all blocks.

        Args:
          ids: int32 [batch, length].
          remat: see `__call__`.
        Returns:
          num_layers + 1 arrays [batch, length, hidden], namely the embeddings, then what each block but the last gives,
          then the last block's output behind the final norm.
        """
        x, angles = self.enter(ids, _positions(ids))
        states = [x]
        for block in self.blocks:
            run = lambda x, block=block: jnp.add(*map(layers.whole, block.prefill(x, None, *angles[block.rope])[0]))
            states.append((jax.checkpoint(run) if remat else run)(states[-1]))
        return [*states[:-1], self._norm(states[-1])]

    def loss(self, ids, lengths=None, remat: bool = False):
        """The mean loss of the next token, in nats.

        Args:
          ids: int32 [batch, length], rows padded on the right.
          lengths: int [batch], the number of tokens in each row; None: all.
          remat: keep only the input of each block for the backward pass.

        Returns:
          A float32 scalar, over `lengths[b] - 1` predictions of each row b.
        """
        targets = ids[:, 1:]
        if lengths is not None:
            real = jnp.arange(1, ids.shape[1], dtype=lengths.dtype)[None, :] < lengths[:, None]
            targets = jnp.where(real, targets, IGNORED)
        losses = ops.cross_entropy(self(ids[:, :-1], remat=remat), targets, ignore=IGNORED)
        return losses.sum() / (targets != IGNORED).sum().astype(losses.dtype)

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state instead of tokens: no token can be taken back out of a state."""
        return any(getattr(block, "recurrent", False) for block in self.blocks)

    @property
    def chunk(self) -> int | None:
        """The positions of a chunk of the layers whose tokens see their own chunk only; None: no layer has chunks."""
        found = [getattr(block.attention.config, "chunk", None) for block in self.blocks]
        return min((size for size in found if size is not None), default=None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer; None where it sees all keys."""
        return tuple(block.attention.window for block in self.blocks)

    def step(
        self, tokens, cache: kv.KVCache, of=None, shares: bool = False, entered=None, largest: bool = False, head=None
    ):  # fmt: skip
        """The logits behind the next tokens of each row, which the cache takes in.

        Args:
          tokens: int32 [batch] or [batch, t]. A cache with rings (see `cache.Layout`) takes only one.
          cache: the cache of the tokens before.
          of: int32 [n], numbers of some of the batch * t tokens; only their logits are computed, and the others have
            no use for the MLP of the last block.
          shares: logits of one token a row may stay cut over devices, as `parallel.Shares`.
          entered: (x, delta, angles) where something else has done what `enter` does: x + delta are the embeddings.
            It may have written the lengths of the cache, too.
          largest: what `hopper_largest.largest` gives is wanted in place of logits, where that is quicker.
          head: a table [vocab, hidden] to be taken in place of the head, for one token a row. Then three things are
            given in place of logits: these logits, and two [batch, hidden] whose sum goes into the norm in front of
            them, or one and None.
        Returns:
          Logits, float32 [batch, vocab], [batch, t, vocab] or [n, vocab], and the longer cache.
        """
        t = 1 if tokens.ndim == 1 else tokens.shape[1]
        positions = cache.lengths
        if tokens.ndim > 1:
            positions = (positions[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]).reshape(-1)
        x, delta, angles = entered or (None, None, None)
        if entered is None:
            x, angles = self.enter(tokens.reshape(-1), positions)
        entries, hold = [], entered is not None
        early = of is not None and type(self.blocks[-1]) is Block and not _routed(self.blocks[-1].mlp)
        for block, entry in zip(self.blocks, cache.entries, strict=True):
            more = {"of": of} if early and block is self.blocks[-1] else {}
            slots = cache.layer(entry, fresh=block is self.blocks[0])
            (x, delta), slots = block.step(x, delta, *angles[block.rope], slots, hold=hold, **more)
            hold = False  # what is behind the first kernel starts when those in front of it have ended
            entries.append(slots.entry)
        norm, eps = self.norm.get_value(), self.config.norm_eps
        x, delta = (x, delta) if early else rows_of((x, delta), of)
        if head is not None:
            assert delta is None or isinstance(delta, jax.Array), "a sum in parts is of several rows"
            logits = layers.add_norm_linear(x, delta, norm, eps, head, jnp.float32)[1]
            return (logits, x, delta), cache.longer(entries, t)
        if largest and self._finds_largest(x):
            return hopper_largest.largest(self._norm(x, delta), self.head_table()), cache.longer(entries, t)
        _, logits = layers.add_norm_linear(x, delta, norm, eps, self.head_table(), jnp.float32)
        logits, cache = self._capped(logits, shares and tokens.ndim == 1), cache.longer(entries, t)
        alone = of is not None or tokens.ndim == 1
        return logits if alone else logits.reshape(*tokens.shape, -1), cache


def _positions(ids):
    return jnp.arange(ids.shape[1], dtype=jnp.int32)
