"""The jitted programs of a language model: logits of whole sequences, prompts, and loops of steps on the device.

Each takes the `structure` of a model, which is static, and its `weights`: see `merge`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jtile as jt
from jtile.ops import hopper_rows, hopper_wide

from . import cache as kv
from . import next_tokens, sampling
from .decoder import Decoder
from .host import on_host
from .parallel import ALONE, Axes

LONG = 4096  # see `_most_that_overlap`


def merge(structure, weights) -> Decoder:
    """The module of a structure (its graph, and the tree of its weights) over the list of its weights."""
    graph, tree = structure
    return nnx.merge(graph, jax.tree.unflatten(tree, weights))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What a row remembers from step to step, donated to the next one; penalties: the state of `sampling.begin`."""

    cache: kv.KVCache
    penalties: dict[str, jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def logits(structure, weights, ids, slot, mask):
    """Logits float32 [batch, length, vocab] of packed ids int32 [batch, length], taken from `slot` and times `mask`."""
    model = merge(structure, weights)
    hidden, _ = model.prefill(ids)
    hidden = jnp.take_along_axis(hidden, slot[:, :, None], axis=1)
    return model.head(hidden) * mask[:, :, None].astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def embed(structure, weights, ids, lengths):
    """The hidden state behind the final norm of the last of the first `lengths` [batch] tokens of ids int32 [batch,
    length], scaled to length 1: float32 [batch, hidden]."""
    hidden = merge(structure, weights).hidden_states(ids)[-1]
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0].astype(jnp.float32)
    return last / jnp.maximum(jnp.linalg.norm(last, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def packed(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Prompts as one array, int32 [batch, length + 1]: ids int32 [batch, length], and behind them how many tokens each
    row has, int32 [batch]. What comes from the host takes a program 50 us for each array, however small."""
    return np.concatenate([ids, lengths[:, None]], axis=1, dtype=np.int32)


def unpacked(prompt):
    """(ids [batch, length], lengths [batch]) of what `packed` gives."""
    return prompt[:, :-1], prompt[:, -1]


@functools.partial(jax.jit, static_argnums=0, static_argnames=("layout", "steps", "logprobs"))
def prefill(structure, weights, prompt, numbers, ends, *, layout, steps, logprobs):
    """Runs the prompts, an array of `packed`; returns (first new tokens [batch], their log-probabilities or None,
    whether each ends its row, the `Memory`)."""
    model, (ids, lengths) = merge(structure, weights), unpacked(prompt)
    last, entries = model.prefill(ids, lengths, at=lengths - 1, slots=layout.slots if made_at_once(layout) else None)
    cache = kv.from_prefill(entries, lengths, layout)
    return first_tokens(model, last, cache, ids, lengths, numbers, ends, steps, logprobs)


def first_tokens(model: Decoder, last, cache: kv.KVCache, ids, lengths, numbers, ends, steps, logprobs: bool):
    """What `prefill` gives for the hidden states [batch, hidden] of the last tokens of prompts, and their cache."""
    logits = model.head(last)
    penalties = sampling.begin(ids, lengths, logits.shape[1], steps)
    tokens = sampling.choose(logits, jnp.int32(0), steps, numbers, penalties)
    rates = sampling.log_probability(logits, tokens) if logprobs else None
    return tokens, rates, is_end(tokens, ends), Memory(cache, sampling.noted(penalties, tokens))


def made_at_once(layout: kv.Layout) -> bool:
    """Whether a prompt makes keys and values in the size of the cache, so that no copy of them follows."""
    return layout.page is None and layout.context is None and layout.dtype not in kv.SCALED


@contextlib.contextmanager
def overlapping(rows: int, most: int = hopper_rows.FEW):
    """A block whose products of so many rows, if they are not more than `most`, read their weights while the kernels in
    front of them still run, unless `overlap` is False: the weights are operands of the programs here, which no kernel
    writes.

    Where products have no kernel that would read early, all kernels of a step run faster without the promise
    (`Launcher::is_node` in ffi/csrc/gpu.cc): Llama-3.1-8B with 64 rows took 5.94 ms so, and 6.10 with it."""
    with jt.config() as now:
        promise = now.overlap if rows > most else now.overlap is not False
        with jt.config(overlap=promise):
            yield


def _devices(over: Axes) -> int:
    """How many devices share heads and features, if nothing else is cut and the kernels of products may make sums over
    devices; else 0."""
    if over == ALONE:
        return 1
    summed = over.names == (over.tensor,) and over.talk and not over.steady
    return jt.axis_size(over.tensor) if summed else 0


def _most_that_overlap(rows: int, weights, devices: int = 1) -> int:
    """Up to how many rows steps of a model with these weights overlap, where there are `rows`: up to more than a few
    where all of its products are those of 16-bit matrices with rows of `LONG` numbers or more, and in mixtures of
    16-bit experts; others were not measured. devices: see `_devices`."""
    sixteen = lambda w: w.dtype in (jnp.bfloat16, jnp.float16)
    matrices = [w for w in weights if w.ndim > 1]
    small = lambda w: w.ndim == 2 and w.dtype == jnp.float32  # the router of a mixture, biases of its experts
    if any(w.ndim == 3 for w in matrices) and all(sixteen(w) or small(w) for w in matrices):
        return hopper_rows.MOST
    if not all(w.ndim == 2 and sixteen(w) and w.shape[1] * max(devices, 1) >= LONG for w in matrices):
        return hopper_rows.FEW
    return rows if devices and rows in hopper_wide.TAKEN else hopper_rows.MOST


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("chunk", "steps", "logprobs"),
    donate_argnames=("memory", "tokens", "done"),
)  # fmt: skip
def decode(
    structure, weights, memory, tokens, done, made, count, numbers, ends, screen=None, *, chunk, steps, logprobs
):
    """Makes up to `count` <= chunk tokens a row, and stops when every row has ended. screen: see `next_tokens.loop`,
    where that makes these tokens.

    Returns (tokens [batch, chunk], their log-probabilities or None, how many columns are filled, done as int8, the last
    tokens, done, memory). What the next call takes stays in its place of the device's memory, and the rest comes out of
    arrays of other sizes than the loop has: XLA writes the CUDA graph of the loop anew where an array of it has moved,
    which takes the host longer than a step of a small model takes the device."""
    model = merge(structure, weights)
    if next_tokens.fits(model, len(tokens), steps, logprobs):
        return _greedy(model, weights, memory, tokens, done, count, ends, chunk, screen)

    def unfinished(i, carry):
        return (i < count) & ~model.over.all(jnp.all(carry[1]))

    def step(i, carry):
        tokens, done, out, memory, ended = carry
        ended = jax.lax.dynamic_update_slice(ended, jnp.all(done).astype(jnp.int32)[None], (i,))
        with overlapping(len(tokens), _most_that_overlap(len(tokens), weights, _devices(model.over))):
            logits, cache = model.step(tokens, memory.cache, shares=not logprobs)
        tokens = jnp.where(done, tokens, sampling.choose(logits, made + i, steps, numbers, memory.penalties))
        new = [tokens, sampling.log_probability(logits, tokens)] if logprobs else [tokens]
        out = [jax.lax.dynamic_update_slice(x, y[:, None], (jnp.int32(0), i)) for x, y in zip(out, new, strict=True)]
        memory = Memory(cache, sampling.noted(memory.penalties, tokens))
        return tokens, done | is_end(tokens, ends), out, memory, ended

    dtypes = (jnp.int32, jnp.float32) if logprobs else (jnp.int32,)
    carry = tokens, done, [jnp.zeros((tokens.shape[0], chunk + 1), dtype) for dtype in dtypes], memory
    carry = *carry, jnp.ones((chunk + 1,), jnp.int32)  # whether all rows of this device had ended in front of a step
    if on_host():
        more, again = (lambda c: unfinished(*c)), (lambda c: (c[0] + 1, step(*c)))
        _, carry = jax.lax.while_loop(more, again, (jnp.int32(0), carry))
    else:  # a GPU would wait until the host has read a condition: some tokens too many, which nobody reads, cost less
        carry = jax.lax.fori_loop(0, chunk, step, carry)
    tokens, done, out, memory, ended = carry
    out = [x[:, :chunk] for x in out]
    # devices ask each other once, not in each step
    filled = (jnp.arange(chunk) < count) & ~model.over.all(ended[:chunk] > 0)
    filled = filled.sum(dtype=jnp.int32)
    return out[0], out[1] if logprobs else None, filled, done.astype(jnp.int8), tokens, done, memory


def _greedy(model: Decoder, weights, memory: Memory, tokens, done, count, ends, chunk: int, screen):
    """`decode` of greedy tokens by the kernel of `next_tokens`."""

    def run(step, *args):
        with overlapping(len(tokens), _most_that_overlap(len(tokens), weights)):
            return step(*args)

    more = {"chunk": chunk, "run": run, "screen": screen}
    out, tokens, ended, cache = next_tokens.loop(model, memory.cache, tokens, done, ends, count, **more)
    memory = dataclasses.replace(memory, cache=cache)
    column = jnp.arange(chunk, dtype=jnp.int32)
    before = (is_end(out, ends)[:, None, :] & (column[None, :] < column[:, None])[None]).any(-1)
    filled = ((column < count) & ~(before | done[:, None]).all(0)).sum(dtype=jnp.int32)
    return out, None, filled, ended.astype(jnp.int8), tokens, ended, memory


def is_end(tokens, ends):
    """bool, of the shape of tokens: whether each is one of `ends`, int32 [n]."""
    return jnp.any(tokens[..., None] == ends.reshape((1,) * tokens.ndim + (-1,)), axis=-1)
