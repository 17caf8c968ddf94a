"""Programs of many calls, and samples of them in turns."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile.testing import Timing

# Device time of one program. A device idles 20 to 50 us in front of each program of XLA's, and the host may need 0.5 ms
# for one: results have moved, and its command buffer is recorded again.
_PROGRAM_US = 4_000.0
_SAMPLE_US = 10_000.0  # timed in one sample, or four programs
_FRONT_US = 25_000.0  # device time of the programs that run before the timed ones
# The same where power decides the speed. What draws less than what ran before is slow for 50 ms more, what draws more
# is too fast for 50 and too slow for 100: its own speed comes after 0.2 s, and wavers by some hundredths even then, so
# that a sample is longer.
SETTLING_US, _SETTLED_US = 250_000.0, 80_000.0
_MOST_CALLS = 320  # calls of 12 us each; compiling and recording a program takes longer with each
_MOST_TURNS, _MOST_FRONT = 4, 26  # XLA lets 32 programs be under way
_GRAPH = 5  # xla_gpu_graph_min_graph_size
_MOST_BYTES = 8 << 30  # bytes of the results of one program, all of which are kept


def call_count(estimate_us: float, sets: int, result_bytes: int = 0, most: int | None = None) -> int:
    """Calls in one program of work that takes at least `estimate_us`: whole rounds over the `sets` of arguments, and at
    most `most` calls unless there are more sets than that."""
    room = max(1, _MOST_BYTES // max(result_bytes, 1))
    wanted = min(most or _MOST_CALLS, room, math.ceil(_PROGRAM_US / max(estimate_us, 1e-3)))
    return sets * math.ceil(wanted / sets)


def way(calls: int) -> str:
    """How XLA runs a program of so many calls: five kernels in a row, its own or others', become a command buffer."""
    off = "--xla_gpu_enable_command_buffer=" in os.environ.get("XLA_FLAGS", "").split()
    return f"{calls} calls in a {'command buffer' if calls >= _GRAPH and not off else 'stream'}"


class Repeated:
    """One jitted function of a list of argument sets that calls `function` `calls` times in a row, the sets in turn.

    Every call waits for the one before through a barrier: else XLA may merge equal calls, or fuse neighbours. It is
    traced once, and XLA puts it in place of every call.

    A program takes the results of the run before besides, and puts its own in their places: XLA records a command
    buffer again where arrays have moved, which takes a slow host 10 us a kernel (torch's graphs have such places, too).
    """

    def __init__(self, function: Callable, calls: int):
        function = jax.jit(function)

        def program(sets: Sequence[tuple[Any, ...]], places: Any):
            del places
            out = []
            for i in range(calls):
                args = sets[i % len(sets)]
                if out:  # the barrier's copy of the result is used, too: else XLA drops it, and calls are equal again
                    leaves, tree = jax.tree.flatten(out[-1])
                    args, leaves[0] = lax.optimization_barrier((args, leaves[0]))
                    out[-1] = jax.tree.unflatten(tree, leaves)
                out.append(function(*args))
            return out, jnp.zeros((), jnp.int32)  # which no later run takes the place of: to wait for

        self._of_sets = lambda sets: program(sets, None)[0]
        self._jitted = jax.jit(program, donate_argnums=1, keep_unused=True)

    def __call__(self, sets: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of all calls."""
        return jax.jit(self._of_sets)(sets)

    def lower(self, sets: Sequence[tuple[Any, ...]]) -> Any:
        """The program for such sets, which `JaxRunner` runs when it is compiled."""
        return self._jitted.lower(sets, jax.eval_shape(self._of_sets, sets))


def repeated(function: Callable, calls: int) -> Repeated:
    """`Repeated`, by its shorter name."""
    return Repeated(function, calls)


class JaxRunner:
    """A program of `repeated`, lowered and compiled, for these sets of arguments."""

    def __init__(self, program: Any, sets: Sequence[tuple[Any, ...]], calls: int):
        self.program, self._sets, self.calls = program, sets, calls
        places = program.args_info[0][1]
        self._places = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), places)
        jax.block_until_ready(self._run())
        self.output = jax.tree.map(jnp.copy, self._places[0])  # the result for the first set; its check drops it

    def _run(self) -> Any:
        """Start the program; what is ready when it has ended."""
        self._places, end = self.program(self._sets, self._places)
        return end

    def run(self, turns: int, front: int = 1) -> float:
        """Microseconds of one call, over `turns` programs behind `front` others.

        While those others run, the host gets ahead of the device, so that its time to start a program does not count.
        If the host is behind, its time counts.
        """
        begin = time.perf_counter()
        for _ in range(front):
            end = self._run()
        before = end
        for _ in range(turns):
            end = self._run()
        behind = before.is_ready()
        jax.block_until_ready(before)
        start = time.perf_counter()
        jax.block_until_ready(end)
        stop = time.perf_counter()
        whole = (stop - begin) / (front + turns)  # a little too much: the start of the first program is in it
        seconds = whole if behind else max((stop - start) / turns, 0.9 * whole)  # a late host sees too little
        return 1e6 * seconds / self.calls


def sampler(runner: Any, settling_us: float = 0.0) -> Callable[[], float]:
    """A function that takes one sample, in microseconds a call, after a warm-up that says how long a sample must be;
    the device works `settling_us` for the function before, if that is more than it does anyway."""
    runner.run(1, 1)
    us = max(runner.run(2, 2) * runner.calls, 1e-3)
    turns = max(1, min(_MOST_TURNS, math.ceil(_SAMPLE_US / us)))
    front = max(turns, min(_MOST_FRONT, math.ceil(_FRONT_US / us)))
    if settling_us:
        turns = max(turns, min(_MOST_FRONT - front, math.ceil(_SETTLED_US / us)))

    def sample() -> float:
        left = math.ceil(settling_us / us) - front
        while left > 0:  # the device pauses for a moment between two of these
            runner.run(1, now := min(left, _MOST_FRONT))
            left -= now + 1
        return runner.run(turns, front)

    return sample


def alternate(
    samplers: Mapping[str, Callable[[], float]], *, repeats: int, budget_s: float, clock: Callable = time.monotonic
) -> dict[str, list[float]]:
    """The samples of each function, taken in turns, in an order that is drawn for every round (the same in every run):
    none always follows the same one, since a card is quicker behind what takes less power.

    Stops after `budget_s` seconds, but not before three rounds. The peers are sampled once more at the very end.
    """
    names, start = list(samplers), clock()
    samples: dict[str, list[float]] = {name: [] for name in names}
    lots = random.Random(0)
    for turn in range(repeats):
        for name in lots.sample(names, len(names)):
            samples[name].append(samplers[name]())
        if turn >= 2 and clock() - start > budget_s:
            break
    for name in names:
        if name != "ours":
            samples[name].append(samplers[name]())
    return samples


def timings(samples: Mapping[str, Sequence[float]]) -> dict[str, Timing]:
    """Median and minimum of the samples."""
    return {name: Timing(statistics.median(values), min(values)) for name, values in samples.items()}


def spread(ours: Sequence[float], peer: Sequence[float], draws: int = 500) -> float:
    """By how much the ratio of the medians, the peer's over ours, would change from run to run: the standard deviation
    over `draws` times as many samples, drawn from these with replacement (the same in every run)."""
    lots = np.random.default_rng(0)
    of = lambda samples: np.median(lots.choice(np.asarray(samples, float), (draws, len(samples))), axis=1)
    return float(np.std(of(peer) / of(ours)))
