"""`python -m benchmarks devices --only models`: steps of language models of published shapes with random weights, cut
over all devices by kernels that talk to each other, beside the same step on one of them where the model fits there,
with XLA's collectives (NCCL on GPUs) in place of ours, and, of Llamas, beside a plain decoder that XLA cuts.

The same step in which devices keep to themselves says how much of a step is communication, with the devices' waiting
for each other. Microseconds are those of calls as `LanguageModel.stream` makes them."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jtile as jt
from benchmarks.data import size
from benchmarks.device_parts import made
from benchmarks.device_plain import Plain
from benchmarks.gpu import machine
from benchmarks.gpu.models import DENSE, LARGE, SHAPES, TINY, mixtures, model_state
from jtile import ops
from jtile.models import LanguageModel, parallel, programs
from jtile.models.cache import Entry, KVCache
from jtile.models.generate import CHUNK
from jtile.models.latent import LatentConfig
from jtile.models.mesh import ENTRIES, ROWS, SAME
from jtile.models.programs import Memory
from jtile.models.sampling import Sampling
from jtile.ops import collectives, gpu_tiles, hopper_normed, hopper_wide

CONTEXT, STEPS, REPEATS = 512, 32, 5  # tokens in front of a step, steps of a sample, samples
ROOM = 0.85  # the share of a device's memory that weights may have
ONE, PLAIN = "one_step", "plain"  # what records call the step of one device, and that of the plain decoder


class Work(NamedTuple):
    """What of a model is cut, how many rows its steps have, how its weights are stored, and about how many bytes they
    have."""

    model: str
    role: str
    rows: tuple[int, ...]
    nbytes: float
    stored: str = DENSE


WORKS = (
    Work("Llama-3.1-8B", "tensor", (1, 64), 16e9),
    Work("Llama-3.1-70B", "tensor", (1, 64), 141e9),
    Work("Qwen3-30B-A3B", "expert", (32,), 61e9),
    Work("DeepSeek-V3, 6 layers", "expert", (32,), 42e9, "fp8"),
)
TINY_WORKS = (Work("tiny", "tensor", (2,), 0), Work("tiny mixture", "expert", (4,), 0))


# Sides --------------------------------------------------------------------------------------------------------------


class Alone:
    """Stand-ins for the collectives of a step, of the same shapes, for which no device needs another."""

    @staticmethod
    def all_reduce(x, axis):
        del axis
        return x

    @staticmethod
    def all_reduce_rms_norm(x, weight, axis, *, residual, eps):
        del axis
        return ops.rms_norm(x, weight, eps=eps, residual=residual)

    @staticmethod
    def matmul_all_reduce(x, w, axis, *, transpose_b=False):
        del axis
        return ops.matmul(x, w, transpose_b=transpose_b)

    @staticmethod
    def all_gather(x, axis, *, dim=0):
        """Rows of several devices are made up here, and differ, so that they choose as many experts as real ones."""
        return jnp.concatenate([jnp.roll(x, k, axis=-1) for k in range(jt.axis_size(axis))], dim)

    @staticmethod
    def all_gather_rms_norm(x, weight, axis, *, residual, eps):
        normed, total = ops.rms_norm(x, weight, eps=eps, residual=residual)
        return Alone.all_gather(normed, axis), total

    @staticmethod
    def reduce_scatter(x, axis, *, dim=0):
        return jax.lax.slice_in_dim(x, 0, x.shape[dim] // jt.axis_size(axis), axis=dim)

    @staticmethod
    def chosen_sums(y, places, chosen, weights, axis, *, count):
        """Of the rows that are this device's, those of the first device."""
        del count
        rows = places.shape[0] // jt.axis_size(axis)
        here = (places[:rows] < y.shape[0])[..., None]
        shares = jnp.where(here, y[jnp.minimum(places[:rows], y.shape[0] - 1)], 0).astype(jnp.float32)
        return (shares * weights[:rows, :, None]).sum(1).astype(y.dtype)


# what records call a mesh with some collectives -> how a model finds one of them
SIDES: dict[str, Callable[[str, bool], Callable]] = {
    "jtile": parallel.collective,
    "xla": lambda name, talk: getattr(collectives, f"{name}_reference"),
    "alone": lambda name, talk: getattr(Alone, name),
}


def by_xla(x, w, r, norm, weights, axis, *, eps, activation=None):
    """`hopper_normed_sums.products` with XLA's collective: the sum, its norm and the product behind are apart."""
    total = collectives.all_reduce_reference(ops.matmul(x, w, transpose_b=True), axis)
    normed, y = ops.rms_norm(total, norm, eps=eps, residual=r)
    return y, hopper_wide.product(normed, weights, activation=activation)


def by_itself(x, w, r, norm, weights, axis, **options):
    """`hopper_normed_sums.products` of a device that needs no other."""
    del axis
    return hopper_normed.products(x, w, r, norm, weights, **options)


PRODUCTS = {"jtile": parallel.norm_products, "xla": by_xla, "alone": by_itself}  # the products around a norm, by side


@contextlib.contextmanager
def collectives_of(side: str) -> Iterator[None]:
    """A block in which models are traced with the collectives of a side."""
    usual = parallel.collective, parallel.norm_products
    parallel.collective, parallel.norm_products = SIDES[side], PRODUCTS[side]
    try:
        yield
    finally:
        parallel.collective, parallel.norm_products = usual


# Steps --------------------------------------------------------------------------------------------------------------


def entry_of(lm: LanguageModel) -> list[tuple[int, ...]]:
    """The shapes of what a device keeps of a token in each layer."""
    blocks: Any = lm.part.blocks
    c = blocks[0].attention.config
    return [(c.rank + c.rope.size,)] if isinstance(c, LatentConfig) else [(c.kv_heads, c.head_dim)] * 2


class Steps:
    """The program of a model for `CHUNK` steps of so many rows, with the collectives of a side, and what it takes."""

    def __init__(self, lm: LanguageModel, rows: int, side: str, steps: int):
        self.lm, self.rows, self.steps, self.slots = lm, rows, steps, CONTEXT + (REPEATS + 2) * steps
        static = {"chunk": CHUNK, "steps": Sampling().static, "logprobs": False}
        decode: Any = programs.decode
        lower = decode.lower if lm.devices is None else functools.partial(lm.devices.lower, decode)
        self.numbers = self._put(np.int32(1)), self._put(np.int32(CHUNK)), {}, self._put(np.full(1, -1, np.int32))
        with collectives_of(side), gpu_tiles.beside(lm._weights):
            self.lowered: Any = lower(lm._structure, lm._weights, *self._begin(), *self.numbers, **static)
        self.program: Any = None

    def _put(self, x: np.ndarray | np.int32, kind: str = SAME) -> jax.Array:
        return jax.device_put(x, None if self.lm.devices is None else self.lm.devices.lies(kind))

    def _begin(self) -> tuple[Memory, jax.Array, jax.Array]:
        """The memory of rows of `CONTEXT` random tokens, the last tokens, and which rows have ended."""
        devices, layers = self.lm.devices, self.lm.config.num_layers
        count = 1 if devices is None else devices.mesh.size // devices.size("expert")
        draw = jax.jit(
            lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.dtype(DENSE)),
            static_argnums=1, out_shardings=None if devices is None else devices.lies(ENTRIES),
        )  # fmt: skip
        shapes = [(count * self.rows, self.slots, *shape) for shape in entry_of(self.lm)]
        entries = tuple(Entry(tuple(draw(i, shape) for shape in shapes)) for i in range(layers))
        ids = np.random.default_rng(0).integers(0, self.lm.config.vocab_size, self.rows).astype(np.int32)
        lengths, last, done = np.full(self.rows, CONTEXT, np.int32), ids, np.zeros(self.rows, bool)
        lengths, last, done = (self._put(x, ROWS) for x in (lengths, last, done))
        return Memory(KVCache(entries, lengths), {}), last, done

    def compile(self) -> None:
        """Compiles the program; several may be compiled at once."""
        self.program, self.lowered = self.lowered.compile(), None

    def sampler(self) -> Callable[[], float]:
        """A function that runs steps, those behind the ones of the last call, and gives the microseconds of one; at
        most `REPEATS` + 2 calls. Arrays of cached tokens last as long as it does."""
        state = list(self._begin())

        def sample() -> float:
            memory, tokens, done = state
            start, chunks = time.perf_counter(), max(self.steps // CHUNK, 1)
            state.clear()  # the memory is given away
            for _ in range(chunks):
                *_, tokens, done, memory = self.program(self.lm._weights, memory, tokens, done, *self.numbers)
            jax.block_until_ready(tokens)
            state[:] = memory, tokens, done
            return 1e6 * (time.perf_counter() - start) / (chunks * CHUNK)

        return sample


def bytes_read(lm: LanguageModel, rows: int) -> int:
    """Bytes that a device reads in a step at least: its weights but rows of the embedding and experts that no row goes
    through, if rows choose them at random, and the keys and values of its rows."""
    part, devices = lm.part, lm.devices
    unread = 0.0 if part.output is None else float(size(part.embedding.get_value()))
    for mixture in mixtures(part):
        experts = mixture.router.weight.get_value().shape[0]
        unread += size(model_state(mixture.experts)) * (1 - mixture.router.config.chosen / experts) ** rows
    numbers = sum(int(np.prod(shape)) for shape in entry_of(lm)) * lm.config.num_layers
    own = rows // (1 if devices is None else devices.size("expert"))
    return int(size(model_state(part)) - unread) + own * CONTEXT * numbers * jnp.dtype(DENSE).itemsize


# Records ------------------------------------------------------------------------------------------------------------


def room() -> float:
    """Bytes of a device's memory that weights may have."""
    stats = jax.devices()[0].memory_stats() or {}
    return ROOM * stats.get("bytes_limit", float("inf"))


def compiled(models: dict[str, LanguageModel], rows: Sequence[int], steps: int) -> dict[tuple[str, int], Steps]:
    """The programs of all sides, each with its model, for all numbers of rows: traced one after the other, compiled at
    once."""
    found = {
        (side, m): Steps(lm, m, "jtile" if side == ONE else side, steps) for m in rows for side, lm in models.items()
    }
    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(Steps.compile, found.values()))
    return found


def in_turns(steps: dict[tuple[str, int], Steps]) -> Iterator[tuple[str, int, float]]:
    """(side, rows, microseconds of a step, the median of samples behind a first one) for all programs. Those of as many
    rows run in turns."""
    for m in dict.fromkeys(rows for _, rows in steps):
        runs = {side: run.sampler() for (side, rows), run in steps.items() if rows == m}
        found = [{side: run() for side, run in runs.items()} for _ in range(REPEATS + 1)][1:]
        yield from ((side, m, statistics.median(turn[side] for turn in found)) for side in runs)


def timed(config: dict, work: Work, mesh: Mesh, sides: Sequence[str], steps: int) -> Iterator[tuple[str, int, float]]:
    """As `in_turns`, for models that are made here: that on one device beside that over the mesh where both have room,
    else one is gone before the other is made; behind them (`bytes`, rows, bytes that a device of the mesh reads)."""
    alone, over = [side for side in sides if side == ONE], [side for side in sides if side in SIDES]
    together = work.nbytes * (1 + 1 / mesh.size) < room()
    for models in [alone + over] if together else [alone, over]:
        lm = {side: made(config, None, work.role, work.stored) for side in models if side == ONE}
        if set(models) & set(over):
            lm |= dict.fromkeys(over, made(config, mesh, work.role, work.stored))
        if lm:
            yield from in_turns(compiled(lm, work.rows, steps))
        yield from (("bytes", m, bytes_read(lm[over[0]], m)) for m in work.rows if over and over[0] in lm)
        del lm
        gc.collect()
    if PLAIN in sides:
        plain = Plain(config, mesh)
        for m in work.rows:
            run = plain.stepper(m, CONTEXT, CONTEXT + (REPEATS + 2) * steps)
            yield PLAIN, m, statistics.median([run(steps) for _ in range(REPEATS + 1)][1:]) / steps * 1e6


def sides_of(work: Work, config: dict, count: int) -> list[str]:
    """The sides that have room for a model; none, if the mesh has no room. The plain decoder wants heads that devices
    can share equally."""
    if work.nbytes / count > room():
        return []
    plain = work.role == "tensor" and config["num_key_value_heads"] % count == 0
    return [ONE] * (work.nbytes < room()) + [*SIDES] + [PLAIN] * plain


def record(work: Work, rows: int, found: dict[str, float], rate: float, count: int, tiny: bool) -> dict[str, Any]:
    """The record of a line: times, tokens a second, and shares of the step; the bound is the time in which a device
    reads its bytes at `rate` bytes a second."""
    out: dict[str, Any] = {"work": f"{work.model}, a step", "size": f"{rows} rows, {work.role}", "devices": count,
                           "tiny": tiny, "stored": work.stored}  # fmt: skip
    out |= {f"{side}_us": round(us, 1) for side, us in found.items() if side != "bytes"}
    ours, bound = found["jtile"], 1e6 * found["bytes"] / rate
    out |= {"tokens_per_second": round(1e6 * rows / ours), "bound_us": round(bound, 1)}
    out |= {"of_bound": round(bound / ours, 3), "communication": round(1 - found["alone"] / ours, 3)}
    return out | {"ratio": round(found[ONE] / ours, 2)} if ONE in found else out


def say(record: dict[str, Any]) -> None:
    """Prints a record."""
    print(json.dumps(record), file=sys.stderr, flush=True)


def measure(
    count: int, tiny: bool, match: Sequence[str] = ("",), keep: Callable[[dict[str, Any]], object] = say
) -> list[dict[str, Any]]:
    """A record for each line of the table whose model has room; match: only models with one of these in their names;
    keep: is called with each record as it comes."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    works, shapes, steps = (TINY_WORKS, TINY, CHUNK) if tiny else (WORKS, SHAPES | LARGE, STEPS)
    rate = machine.measure(tiny).copy_rate
    records: list[dict[str, Any]] = []
    for work in works:
        sides = sides_of(work, shapes[work.model], count)
        if not sides or not any(text in work.model for text in match):
            continue
        found: dict[int, dict[str, float]] = {rows: {} for rows in work.rows}
        for side, rows, us in timed(shapes[work.model], work, mesh, sides, steps):
            found[rows][side] = us
        for rows, of in found.items():
            records.append(record(work, rows, of, rate, count, tiny))
            keep(records[-1])
    return records
