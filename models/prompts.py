"""A prompt as several programs, each of some layers, which the device runs one behind the other.

Before the device begins, the host goes through all operands and kernels of a program, some microseconds for each: 2 ms
for Llama-3.1-8B in fp8 on an H200. With several programs the device waits for the first and smallest one only, and is
at work on it while the host launches the next: a prompt of 512 tokens takes 8.2 ms instead of 10.1, in bfloat16 12.0
instead of 13.1. How many layers each program has follows from what a layer takes the host and the device (`cuts`).

The tokens come to the device with the first program, which hands them on to the others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jtile.ops import QuantizedTensor

from . import cache as kv
from . import layers as ops
from . import programs
from .host import on_host

APART = True  # whether prompts on a GPU are several programs, and write what the host reads to its memory
LARGE = 4 << 30  # bytes of a model, at least; of smaller ones, whose layers take the device as long as the host, less
MOST = 4  # programs
# Microseconds: of the host for a program and for each array of weights in it, with the kernels that read it (a host
# beside an H200 needs 150 and 5, another one twice as much); of the device between two programs.
PROGRAM, ARRAY, BETWEEN = 200.0, 7.0, 20.0
# The device by a microsecond, as an H200 has it: bytes, and operations with 8-bit and with wider numbers. A slower one
# takes longer for each layer, and a longer wait for the first program is then the smaller part.
BYTES, EIGHT, WIDE = 4.0e6, 1.4e9, 0.8e9
SMALL = 40.0  # microseconds of a layer's norms, rotation and attention
_PINNED = "pinned_host"  # the kind of memory of the host that a GPU writes to


@functools.cache
def cuts(count: int, host: float, device: float) -> tuple[tuple[int, int], ...]:
    """The layers of each program, where a model has `count`: the first of each, and the one behind its last. host,
    device: microseconds for a layer.

    The device begins a program when the host has launched it and the one in front has ended. Of all ways to have up to
    `MOST` programs, this is the one that ends first."""
    ends: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # layers -> (when they end, the cuts so far)
    found = []
    for launched in range(1, MOST + 1):
        before, ends = ends, {}
        for layers in range(launched, count + 1):
            ready = launched * PROGRAM + layers * host
            ends[layers] = min(
                (max(end, ready) + BETWEEN + (layers - of) * device, (*at, layers))
                for of, (end, at) in before.items()
                if of < layers
            )
        found += [ends[count]] if count in ends else []
    return tuple(itertools.pairwise(min(found)[1]))


@dataclasses.dataclass(frozen=True)
class Layer:
    """What an average layer of a prompt takes, in microseconds. host: the host; read: the device to read its weights;
    token: the device for the products of one token. Of stacks of experts only the bytes count, for a token goes through
    a few of them: a device takes longer than this, not less."""

    host: float
    read: float
    token: float

    @classmethod
    def of(cls, blocks: Sequence[nnx.Module]) -> Layer:
        """The average of these blocks of a model."""
        count, weights = len(blocks), [nnx.to_pure_dict(nnx.state(block)) for block in blocks]
        arrays = jax.tree.leaves(weights)
        matrices = jax.tree.leaves(weights, is_leaf=lambda w: isinstance(w, QuantizedTensor))
        rate = lambda w: EIGHT if isinstance(w, QuantizedTensor) and w.activations else WIDE
        token = sum(2.0 * w.shape[0] * w.shape[1] / rate(w) for w in matrices if w.ndim == 2)
        read = sum(w.nbytes for w in arrays) / BYTES
        return cls(ARRAY * len(arrays) / count, read / count, token / count)

    def device(self, tokens: int) -> float:
        """Microseconds of the device for so many tokens."""
        return max(self.read, tokens * self.token) + SMALL


def shared(lm: Any, tokens: int) -> tuple[tuple[int, int], ...]:
    """The layers of each program of a prompt of so many tokens on a GPU: see `cuts`. One program has all layers of a
    small model."""
    count = lm.config.num_layers
    return ((0, count),) if lm._nbytes < LARGE else cuts(count, lm._layer.host, lm._layer.device(tokens))


def _on_one_gpu(lm: Any) -> bool:
    return APART and lm.devices is None and not on_host()


@functools.partial(jax.jit, static_argnums=0, static_argnames=("held", "layers", "layout", "steps", "logprobs", "host"))
def part(structure, weights, carried, prompt, numbers, ends, *, held, layers, layout, steps, logprobs, host):
    """Some `layers` of `programs.prefill`, the first and the one behind the last: (what the next program takes, the
    entries of these layers for the cache, and of the first ones the prompt as an array of the device, else None), or,
    of the last ones, (what `programs.prefill` gives, with these entries only; its tokens and log-probabilities [batch,
    1] or None, and whether rows have ended, for the host). weights: those that are needed, which have the numbers
    `held` among all. host: the sharding of what is for the host, or None."""
    ids, lengths = programs.unpacked(prompt)
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
        return carried, cache.entries, prompt if begin == 0 else None
    x, delta, _ = carried
    hidden = x + ops.whole(delta)
    out = programs.first_tokens(model, hidden, cache, ids, lengths, numbers, ends, steps, logprobs)
    seen = _seen(out)
    return out, seen if host is None else jax.device_put(seen, host)


@jax.jit
def _seen(out):
    """What the host reads of `programs.prefill`: first tokens, log-probabilities [batch, 1] or None, and whether rows
    have ended, as a copy, since `decode` takes the array itself."""
    tokens, rates, done, _ = out
    return tokens[:, None], None if rates is None else rates[:, None], jnp.copy(done)


def compiled(lm: Any, args: tuple, static: dict) -> tuple[Callable[[], tuple], Any, float]:
    """(a function that runs the prompt, the shapes and dtypes of what it gives, seconds to compile), for the arguments
    of `programs.prefill` behind the weights. It gives two things: what `programs.prefill` does, and its first tokens
    and log-probabilities [batch, 1] or None, and whether rows have ended, for the host."""
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args))
    key = ("prompt", shapes, tuple(static.items()))
    run, found, given, seconds = lm._executables.get(key) or (_parts if _on_one_gpu(lm) else _one)(lm, args, static)
    lm._executables[key] = run, found, given, 0.0  # with its shapes, of which a program takes a millisecond to tell
    return functools.partial(run, found, lm._weights, args), given, seconds


def _one(lm: Any, args: tuple, static: dict) -> tuple[Callable, Any, tuple, float]:
    """(`_run_whole`, the program of a prompt, the shapes and dtypes of what it gives, seconds to compile)."""
    prefill, seconds = lm._compiled(programs.prefill, *args, **static)
    return _run_whole, prefill, _shapes(prefill.out_info), seconds


def _parts(lm: Any, args: tuple, static: dict) -> tuple[Callable, list[tuple], tuple, float]:
    """(`_run`, the programs of a prompt, each with the numbers of its weights; the shapes and dtypes of what they give;
    seconds to compile)."""
    found, carried, entries, seconds = [], None, (), 0.0
    static = static | {"host": _memory_of_host(lm._weights)}
    for layers in shared(lm, math.prod(programs.unpacked(args[0])[0].shape)):
        held = _needed(lm._structure, layers)
        weights = [lm._weights[i] for i in held]
        one, more = lm._compiled(part, carried, *args, weights=weights, held=held, layers=layers, **static)
        found.append((one, held))
        seconds += more
        given = _shapes(one.out_info)
        if layers[1] < lm.config.num_layers:
            carried, of_these, _ = given
            entries += of_these
    return _run, found, _whole(given[0], entries), seconds


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
    carried, entries, (prompt, *rest) = None, (), args
    for one, held in found[:-1]:
        carried, of_these, on_device = one([weights[i] for i in held], carried, prompt, *rest)
        entries += of_these
        prompt = prompt if on_device is None else on_device
    last, held = found[-1]
    given, seen = last([weights[i] for i in held], carried, prompt, *rest)
    return _whole(given, entries), seen


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
