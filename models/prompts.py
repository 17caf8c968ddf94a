"""A prompt as several programs, each of some layers, which the device runs one behind the other.

Before the device begins, the host goes through all operands and kernels of a program, some microseconds for each: 2 ms
for Llama-3.1-8B in fp8 on an H200. With several programs the device waits for the first and smallest one only, and is
at work on it while the host launches the next: a prompt of 512 tokens takes 8.2 ms instead of 10.1, in bfloat16 12.0
instead of 13.1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from . import cache as kv
from . import layers as ops
from . import programs
from .host import on_host

APART = True  # whether prompts on GPUs are several programs
LARGE = 4 << 30  # bytes of a model, at least; of smaller ones, whose layers take the device as long as the host, less
FIRST, LAST = 4, 8  # layers of the first program; of the last one, at least
_PINNED = "pinned_host"  # the kind of memory of the host that a GPU writes to


def cuts(count: int) -> list[tuple[int, int]]:
    """The layers of each program, where a model has `count`: the first of each, and the one behind its last. Each has
    three times as many as the one in front, since the device takes longer for a layer than the host."""
    found, at, size = [], 0, FIRST
    while count - at - size >= LAST:
        found.append((at, at + size))
        at, size = at + size, 3 * size
    return [*found, (at, count)]


def are_apart(lm: Any) -> bool:
    """Whether prompts of this `LanguageModel` are several programs."""
    there = APART and lm.devices is None and not on_host()
    return there and lm._nbytes >= LARGE and len(cuts(lm.config.num_layers)) > 1


@functools.partial(jax.jit, static_argnums=0, static_argnames=("held", "layers", "layout", "steps", "logprobs", "host"))
def part(structure, weights, carried, ids, lengths, numbers, ends, *, held, layers, layout, steps, logprobs, host):
    """Some `layers` of `programs.prefill`, the first and the one behind the last: (what the next program takes, the
    entries of these layers for the cache), or, of the last ones, (what `programs.prefill` gives, with these entries
    only; its tokens and log-probabilities [batch, 1] or None, and whether rows have ended, for the host). weights:
    those that are needed, which have the numbers `held` among all. host: the sharding of what is for the host, or
    None."""
    given = dict(zip(held, weights, strict=True))
    absent = jax.ShapeDtypeStruct((), jnp.float32)
    model = programs.merge(structure, [given.get(i, absent) for i in range(structure[1].num_leaves)])
    begin, end = layers
    carried = model.begin(ids) if begin == 0 else carried
    slots = layout.slots if programs.made_at_once(layout) else None
    carried, entries = model.through(carried, range(begin, end), lengths, lengths - 1, slots)
    own = dataclasses.replace(layout, windows=tuple(layout.windows)[begin:end])
    cache = kv.from_prefill(entries, lengths, own)
    if end < len(model.blocks):
        return carried, cache.entries
    x, delta, _ = carried
    hidden = x + ops.whole(delta)
    out = programs.first_tokens(model, hidden, cache, ids, lengths, numbers, ends, steps, logprobs)
    seen = _seen(out)
    return out, seen if host is None else jax.device_put(seen, host)


def _seen(out):
    """What the host reads of `programs.prefill`: first tokens, log-probabilities [batch, 1] or None, and whether rows
    have ended, as a copy, since `decode` takes the array itself."""
    tokens, rates, done, _ = out
    return tokens[:, None], None if rates is None else rates[:, None], jnp.copy(done)


def compiled(lm: Any, args: tuple, static: dict) -> tuple[Callable[[], tuple], Any, float]:
    """(a function that runs the prompt, the shapes and dtypes of what it gives, seconds to compile), for the arguments
    of `programs.prefill` behind the weights. It gives two things: what `programs.prefill` does, and its first tokens
    and log-probabilities [batch, 1] or None, and whether rows have ended, for the host."""
    if not are_apart(lm):
        prefill, seconds = lm._compiled(programs.prefill, *args, **static)
        return functools.partial(_run_whole, prefill, lm._weights, args), _shapes(prefill.out_info), seconds
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args))
    key = ("prompt", shapes, tuple(static.items()))
    found, given, seconds = lm._executables.get(key) or _parts(lm, args, static)
    lm._executables[key] = found, given, 0.0
    return functools.partial(_run, found, lm._weights, args), given, seconds


def _parts(lm: Any, args: tuple, static: dict) -> tuple[list[tuple], tuple, float]:
    """(the programs of a prompt, each with the numbers of its weights; the shapes and dtypes of what they give; seconds
    to compile)."""
    found, carried, entries, seconds = [], None, (), 0.0
    static = static | {"host": _memory_of_host(lm._weights)}
    for layers in cuts(lm.config.num_layers):
        held = _needed(lm._structure, layers)
        weights = [lm._weights[i] for i in held]
        one, more = lm._compiled(part, carried, *args, weights=weights, held=held, layers=layers, **static)
        found.append((one, held))
        seconds += more
        given = _shapes(one.out_info)
        if layers[1] < lm.config.num_layers:
            carried, of_these = given
            entries += of_these
    return found, _whole(given[0], entries), seconds


def _memory_of_host(weights: Sequence[jax.Array]) -> SingleDeviceSharding | None:
    """Where a program with these weights writes what the host reads: to memory of the host, if the one device that it
    runs on has such memory. Of what lies on a GPU the host gets a copy 0.35 ms later, since it asks for that when the
    last kernel has ended."""
    found = {d for w in weights if isinstance(w, jax.Array) and w.committed for d in w.devices()}
    device, *more = found or jnp.zeros(()).devices()
    there = not more and any(memory.kind == _PINNED for memory in device.addressable_memories())
    return SingleDeviceSharding(device, memory_kind=_PINNED) if there else None


def _shapes(infos):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), infos)


def _run(found: Sequence[tuple], weights: Sequence[jax.Array], args: tuple):
    given, entries = (None, ()), ()
    for one, held in found:
        entries += given[1]
        given = one([weights[i] for i in held], given[0], *args)
    return _whole(given[0], entries), given[1]


def _run_whole(prefill: Callable, weights: Sequence[jax.Array], args: tuple):
    out = prefill(weights, *args)
    return out, _seen(out)


def _whole(given, entries):
    """What the last program gives, with the entries of those in front of it."""
    *first, memory = given
    cache = dataclasses.replace(memory.cache, entries=(*entries, *memory.cache.entries))
    return *first, dataclasses.replace(memory, cache=cache)


def _needed(structure, layers: tuple[int, int]) -> tuple[int, ...]:
    """The numbers of the weights that some layers need, with the embedding in front of the first one and the head
    behind the last."""
    numbers = [jax.ShapeDtypeStruct((i,), jnp.float32) for i in range(structure[1].num_leaves)]
    model, (begin, end) = programs.merge(structure, numbers), layers
    parts: list = [nnx.state(block) for block in list(model.blocks)[begin:end]]
    parts += [model.embedding.get_value()] if begin == 0 else []
    if end == len(model.blocks):
        parts += [model.norm.get_value(), (model.embedding if model.output is None else model.output).get_value()]
    return tuple(sorted({of.shape[0] for of in jax.tree.leaves(parts)}))
