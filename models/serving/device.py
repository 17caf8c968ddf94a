"""The device's side of an engine: the pool of pages, what it keeps for each running sequence, and how a plan becomes
calls of few compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtile.ops import gpu_tiles

from ..adapters import Adapter, stacked
from ..generate import LanguageModel
from ..mesh import ENTRIES, STATE
from . import programs
from .decoding import Rows
from .scheduler import Plan
from .settings import Settings

COPIES = 8  # pages that one program copies


@dataclasses.dataclass(frozen=True)
class Row:
    """How the tokens of one sequence are chosen. level: the first of `LEVELS` that can choose so; options: those
    of `Sampling.rows`, for one row; bias: {token: number}; logprobs: how many of the likeliest tokens are to be
    reported, None for no log-probabilities; prompt: how many tokens belong to the prompt, which penalties of the answer
    do not count."""

    level: int
    options: dict[str, np.ndarray]
    bias: dict[int, float]
    logprobs: int | None
    prompt: int


WHOLE = (0, 0)  # the place of a model's only device
Parts = Mapping[tuple[int, int], Adapter]  # an adapter's parts by places of devices, as in `LanguageModel.shares`

LEVELS = (programs.GREEDY, programs.DRAWS, programs.ALL)


class Rates(NamedTuple):
    """Log-probabilities of a step: those of the chosen tokens [k], those of the likeliest tokens [k, n], and their
    ids."""

    chosen: np.ndarray
    best: np.ndarray
    ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a launch, on the device: tokens int32 [k], or [steps, k], first those of `Plan.samples`, then
    padding."""

    tokens: jax.Array
    rates: tuple[jax.Array, ...] | None

    @property
    def ended(self) -> bool:
        """Whether the device has nothing more to do for it."""
        return self.tokens.is_ready()

    def read(self) -> tuple[np.ndarray, Rates | None]:
        """Waits for the launch; returns its tokens, int32 [steps, k], and log-probabilities on the host."""
        rates = None if self.rates is None else Rates(*(np.asarray(x) for x in self.rates))
        return np.atleast_2d(np.asarray(self.tokens)), rates


class Device:
    """The device of an engine, for a model, with the sizes of `settings`. Programs run in the order of the calls; no
    call waits for one.

    Attributes:
      ahead: whether what ordinary requests need is compiled.
    """

    def __init__(self, lm: LanguageModel, settings: Settings, adapters: Sequence[Parts] = ()):
        self._lm, self._settings = lm, settings
        self._adapters = _stacks(lm, adapters)
        entries = programs.pool_of(lm, settings.pages, settings.page, lm.cache_dtype)
        self._entries = jax.tree.map(lambda x: self._zeros(x.shape, x.dtype, ENTRIES), entries)
        slots = settings.rows + 1  # the last slot is for padding
        self._last = self._zeros((slots,), jnp.int32)
        self._table = np.full((slots, settings.width), -1, np.int32)
        # What a row of the table holds of the sequence that runs there: how many pages, behind so many exchanges.
        self._written = [(0, 0)] * slots
        # The options of sampling of every slot, and those that the device has, which are sent anew once a step if some
        # have changed: one transfer for each sequence that begins kept the host from launching the step.
        self._chosen = {name: np.zeros((slots, *x.shape[1:]), x.dtype) for name, x in settings.options.items()}
        self._options = self._sent(self._chosen)
        self._changed = False
        self._penalties: dict[str, jax.Array] = {}
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self.ahead = False

    def _zeros(self, shape: tuple[int, ...], dtype, lies: str = STATE) -> jax.Array:
        devices = self._lm.devices
        return jnp.zeros(shape, dtype, device=None if devices is None else devices.lies(lies))

    def _sent(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Copies of the arrays on the device, or on each of them."""
        devices = self._lm.devices
        copies = {name: x.copy() for name, x in arrays.items()}
        return jax.device_put(copies) if devices is None else jax.device_put(copies, devices.lies(STATE))

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles what ordinary requests need; `progress(programs done, of how many)`."""
        samples = sorted({self._settings.samples(n) for n in self._settings.shapes})
        todo = [lambda n=n: self._step(n) for n in self._settings.shapes]
        if (seen := self._settings.seen(n := self._settings.shapes[-1])) is not None:
            todo.append(lambda: self._step(n, seen))
        todo += [lambda k=k, level=level: self._choose(k, level, False, False) for k in samples for level in (0, 1)]
        alone = [n for n in self._settings.shapes if n == self._settings.samples(n)]
        for of in itertools.product(alone, (0, 1), self._settings.launch_steps):
            todo.append(lambda of=of: self._several(*of))
        todo.append(self._copy)
        for done, make in enumerate(todo):
            progress(done, len(todo))
            make()
        progress(len(todo), len(todo))
        self.ahead = True

    def release(self) -> None:
        """Gives the memory of the cache back, whoever still has this object; nothing may run afterwards."""
        for x in jax.tree.leaves((self._entries, self._last, self._options, self._penalties)):
            x.delete()

    def seat(self, slot: int, row: Row, tokens: Sequence[int]) -> None:
        """Writes the state of a sequence with these tokens into its slot."""
        self._written[slot] = 0, 0
        for name, x in row.options.items():
            self._chosen[name][slot] = x[0]
        self._changed = True
        if LEVELS[row.level].counts:
            vocab, answer = self._lm.config.vocab_size, np.asarray(tokens[row.prompt :], np.int64)
            bias = np.zeros((vocab,), np.float32)
            bias[list(row.bias)] = list(row.bias.values())
            seen = np.zeros((vocab,), bool)
            seen[np.asarray(tokens)] = True
            counts = np.bincount(answer, minlength=vocab).astype(np.int32)
            self._make_penalties()
            rows = {"seen": seen, "counts": counts, "bias": bias}
            self._penalties = self._put(self._penalties, np.int32(slot), rows)

    def run(self, plan: Plan, level: int, logprobs: bool, masks: Mapping[int, np.ndarray] | None = None) -> Result:
        """Runs a step; `level`, `logprobs`: what some of the sequences that choose a token need; `masks`: by
        i, the tokens that may be chosen for `plan.samples[i]`, as `Guide.allowed` gives them."""
        self._copy_pages(plan.copies)
        if self._changed:
            self._options, self._changed = self._sent(self._chosen), False
        if plan.rows is not None:
            batch, of, which = self._columns(plan.rows)
        else:
            batch, of, which = self._arrays(plan, *self._settings.layout([segment.count for segment in plan.segments]))
        table = self._table.copy()  # the device may read it later than the next plan is written here
        if plan.steps > 1:
            return self._run_several(plan, level, table, batch, which)
        run = self._step(batch.shape[1], self._seen(plan, batch.shape[1]))
        logits, self._entries = run(self._lm._weights, self._entries, self._last, table, batch, of, self._adapters)
        penalties = self._penalties if LEVELS[level].counts else {}
        choose, allowed = self._choose(len(of), level, logprobs, bool(masks)), None
        if masks:
            allowed = self._all_allowed(len(of))
            for i, mask in masks.items():
                allowed[i] = mask
        tokens, rates, self._last, penalties = choose(logits, self._last, penalties, self._options, which, allowed)
        self._penalties = penalties or self._penalties
        return Result(tokens, rates)

    def _seen(self, plan: Plan, n: int) -> int | None:
        """How many pages tiles may see in the program that suits a plan, None for the program of any number."""
        most, page = self._settings.seen(n), self._settings.page
        if most is None or plan.rows is not None:
            return None
        pages = sum(-(-(one.start + one.count) // page) for one in plan.segments if one.count > 1)
        return most if pages <= most else None

    def _run_several(self, plan: Plan, level: int, table: np.ndarray, batch: np.ndarray, which: np.ndarray) -> Result:
        """Runs a launch of several steps; the arguments are those of its first one."""
        assert plan.rows is not None
        numbers = np.zeros((7, batch.shape[1]), np.int32)
        numbers[:5], numbers[5, : len(plan.rows.chosen)], numbers[6] = batch, plan.rows.chosen, which[1]
        run = self._several(batch.shape[1], level, plan.steps)
        args = self._entries, self._last, self._options, table, numbers, self._adapters
        tokens, self._entries, self._last = run(self._lm._weights, *args)
        return Result(tokens, None)

    def _columns(self, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What `_arrays` returns, for sequences that all decode."""
        count = len(rows.sequences)
        n, slots = self._settings.shape(count), self._settings.rows
        batch, of, which = np.zeros((5, n), np.int32), np.zeros((n,), np.int32), np.zeros((2, n), np.int32)
        batch[1, count:], batch[2, count:], which[0, count:] = -1, slots, slots
        batch[1, :count], batch[2, :count] = rows.start, rows.slots
        batch[3, :count], batch[4, :count] = rows.pending, rows.adapters
        of[:count], which[0, :count], which[1, :count] = np.arange(count), rows.slots, rows.made
        if not rows.pending.all():
            for i in np.flatnonzero(~rows.pending).tolist():
                batch[0, i] = rows.sequences[i].tokens[rows.start[i]]
        for sequence in rows.changed:
            assert sequence.slot is not None
            self._write_pages(sequence.slot, sequence.pages, sequence.exchanged)
        return batch, of, which

    def _arrays(self, plan: Plan, n: int, singles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arguments of `programs.step` and `programs.choose` for a plan; brings the table up to date, too. If a
        sequence takes tiles, the padding stands at the beginning of its first one."""
        slots, k, tile = self._settings.rows, self._settings.samples(n), self._settings.tile
        batch = np.zeros((5, n), np.int32)
        batch[1], batch[2] = -1, slots
        of, which = np.zeros((k,), np.int32), np.zeros((2, k), np.int32)
        which[0] = slots
        if singles == n:  # no tiles: sequences stand side by side
            tile, singles = 1, sum(segment.count == 1 for segment in plan.segments)
        alone, behind, samples = [], singles, []
        for segment in plan.segments:
            sequence, start, count, slot = segment.sequence, segment.start, segment.count, segment.slot
            if count == 1:  # most sequences have one token; all of these are written at once
                end = len(alone) + 1
                token = sequence.tokens[start] if start < len(sequence.tokens) else 0
                alone.append((token, start, slot, segment.pending, sequence.adapter))
            else:
                at = behind + -count % tile
                behind = end = at + count
                known = sequence.tokens[start : start + count]
                batch[0, at : at + len(known)] = known
                batch[1, at:end] = np.arange(start, start + count)
                batch[2, at:end], batch[4, at:end] = slot, sequence.adapter
                batch[3, end - 1] = segment.pending
            self._write_pages(slot, sequence.pages, sequence.exchanged)
            if segment.samples:
                samples.append((end - 1, slot, segment.made))
        if alone:
            batch[:, : len(alone)] = np.array(alone, np.int32).T
        if samples:
            of[: len(samples)], *which[:, : len(samples)] = np.array(samples, np.int32).T
        return batch, of, which

    def _write_pages(self, slot: int, pages: list[int], exchanged: int) -> None:
        """Brings a row of the table up to date. While a sequence runs, pages are added to its list, or exchanged."""
        if self._written[slot] != (now := (len(pages), exchanged)):
            self._table[slot, : len(pages)] = pages
            self._table[slot, len(pages) :] = -1
            self._written[slot] = now

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copies pages, (from, to), in groups. No group reads what another one has written, since the scheduler makes
        no page both a source and a target."""
        for first in range(0, len(copies), COPIES):
            group = copies[first : first + COPIES]
            sources = np.zeros((COPIES,), np.int32)
            targets = np.full((COPIES,), self._settings.pages, np.int32)
            sources[: len(group)], targets[: len(group)] = zip(*group, strict=True)
            self._entries = self._copy()(self._entries, sources, targets)

    def _make_penalties(self) -> None:
        shape = (self._settings.rows + 1, self._lm.config.vocab_size)
        dtypes = {"seen": jnp.bool_, "counts": jnp.int32, "bias": jnp.float32}
        self._penalties = self._penalties or {name: self._zeros(shape, dtype) for name, dtype in dtypes.items()}

    # -- compiled programs ---------------------------------------------------------------------------------------------

    def _get(self, key: tuple, function: Callable, *args, **static) -> jax.stages.Compiled:
        """A function of `programs`, compiled for arguments like these over the devices of the model."""
        if key not in self._compiled:
            devices = self._lm.devices
            lower = function.lower if devices is None else functools.partial(devices.lower, function)
            with gpu_tiles.beside(self._lm._weights):
                self._compiled[key] = lower(*args, **static).compile()
        return self._compiled[key]

    def _step(self, n: int, seen: int | None = None) -> jax.stages.Compiled:
        lm, of = self._lm, np.zeros((self._settings.samples(n),), np.int32)
        args = self._entries, self._last, self._table, np.zeros((5, n), np.int32), of, self._adapters
        singles, tile = self._settings.singles, self._settings.tile
        tiles = (singles, tile) if 0 < singles < n else None
        options = {"splits": self._settings.splits, "tiles": tiles, "seen": seen}
        return self._get(("step", n, seen), programs.step, lm._structure, lm._weights, *args, **options)

    def _several(self, n: int, level: int, count: int) -> jax.stages.Compiled:
        lm = self._lm
        args = self._entries, self._last, self._options, self._table, np.zeros((7, n), np.int32), self._adapters
        options = {"splits": self._settings.splits, "steps": LEVELS[level], "count": count}
        return self._get(("several", n, level, count), programs.several, lm._structure, lm._weights, *args, **options)

    def _all_allowed(self, k: int) -> np.ndarray:
        return np.full((k, -(-self._lm.config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)

    def _choose(self, k: int, level: int, logprobs: bool, masked: bool) -> jax.stages.Compiled:
        steps = LEVELS[level]
        if steps.counts:
            self._make_penalties()
        logits = jax.ShapeDtypeStruct((k, self._lm.config.vocab_size), jnp.float32)
        args = logits, self._last, self._penalties if steps.counts else {}, self._options, np.zeros((2, k), np.int32)
        args = *args, self._all_allowed(k) if masked else None
        key = "choose", k, level, logprobs, masked
        return self._get(key, programs.choose, *args, steps=steps, logprobs=logprobs)

    def _copy(self) -> jax.stages.Compiled:
        numbers = np.zeros((COPIES,), np.int32)
        return self._get(("copy",), programs.copy, self._entries, numbers, numbers)

    def _put(self, arrays: dict[str, jax.Array], slot: np.int32, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        args = arrays, slot, rows
        return (programs.put if self._lm.devices is None else self._get(("put", *arrays), programs.put, *args))(*args)


def _stacks(lm: LanguageModel, adapters: Sequence[Parts]):
    """The updates of adapters for `programs.step`, None for no adapters; over a mesh they are arrays of each device's
    updates, as weights are."""
    parts = {at: stacked([adapter[at] for adapter in adapters], lm.dtype) for at in (lm.shares or (WHOLE,))}
    if lm.devices is None:
        return parts[WHOLE] or None
    together = lm.devices.together
    return jax.tree.map(lambda *leaves: together(dict(zip(parts, leaves, strict=True))), *parts.values()) or None
