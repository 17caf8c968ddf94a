"""How long the programs of `benchmarks.fuse` take to trace and compile by `jt.fuse`, beside XLA alone.

Each side has processes of its own with empty caches: what XLA finds out about a product, and keeps, is found out by
both. A program compiles at two sizes, after a third one that pays for what is imported at first. The numbers are CPU
seconds of all threads and of the children that a process starts (an assembler), and those of a clock; of a few such
processes, one after another, the least. No program runs, but for candidates that XLA tries on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jtile as jt
from benchmarks import fuse
from benchmarks.gpu.programs import without_names

SIZES = (4, 2, 1)  # divisors of the sides
PARTS = ("trace", "compile", "clock to trace", "clock to compile")  # of what `_seconds` gives

Took = dict[str, list[tuple[float, ...]]]  # by program: `_seconds` of each size


def main(options: argparse.Namespace) -> None:
    """Prints a line for each program, and writes all of it to `options.json`."""
    names = [name for name in fuse.programs(256) if not options.only or name in options.only]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        of = lambda side: pool.apply(_turn, (side, names))
        turns = [{side: of(side) for side in ("ours", "xla")} for _ in range(options.turns)]
        device, same = pool.apply(_equal, (names,))
    rows = [_row(name, [{side: took[name] for side, took in turn.items()} for turn in turns], same) for name in names]
    for row in rows:
        print(_line(row))
    for key, what in (("ratio", "CPU time"), ("clock ratio", "a clock")):
        ratios = [row[key] for row in rows]
        within = sum(ratio <= 2 for ratio in ratios)
        mean = math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))
        print(f"by {what} {within} of {len(rows)} take at most twice as long as XLA's; geometric mean {mean:.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([{**row, "device": device} for row in rows], file, indent=1)


def _sides(f: Callable) -> dict[str, Callable]:
    return {"ours": lambda *xs: jt.fuse(lambda *ys: f(*ys))(*xs), "xla": lambda *xs: f(*xs)}


def _turn(side: str, names: Sequence[str]) -> Took:
    """What programs take on one side in this process, which has compiled none of them."""
    jax.config.update("jax_enable_compilation_cache", False)
    functions = {name: f for name, (f, _) in fuse.programs(256).items()}
    shapes = [jax.eval_shape(lambda n=n: {name: args for name, (_, args) in fuse.programs(n).items()}) for n in SIZES]
    took = {}
    with jt.config(cache_dir=""):
        for name in names:
            of_sizes = [_seconds(_sides(functions[name])[side], args[name]) for args in shapes]
            took[name] = of_sizes[1:]
    return took


def _equal(names: Sequence[str]) -> tuple[str, list[str]]:
    """The kind of device, and the programs which `jt.fuse` leaves to XLA as they are, at the largest size."""
    functions = {name: f for name, (f, _) in fuse.programs(256).items()}
    shapes = jax.eval_shape(lambda: {name: args for name, (_, args) in fuse.programs().items()})

    def text(f, name):
        return without_names(jax.jit(lambda *xs: f(*xs)).lower(*shapes[name]).as_text())

    same = [name for name in names if len({text(f, name) for f in _sides(functions[name]).values()}) == 1]
    return jax.devices()[0].device_kind, same


def _row(name: str, turns: Sequence[dict[str, list[tuple[float, ...]]]], same: Sequence[str]) -> dict[str, Any]:
    """The least of each side, CPU time and clock apart; an equal program is as quick."""
    each = {}
    for key in turns[0]:
        sizes = [*zip(*(turn[key] for turn in turns), strict=True)]
        least = [[min((took[k : k + 2] for took in of), key=sum) for of in sizes] for k in (0, 2)]
        each[key] = dict(zip(PARTS, (sum(part) for of in least for part in zip(*of, strict=True)), strict=True))
    total = {key: (t["trace"] + t["compile"], t["clock to trace"] + t["clock to compile"]) for key, t in each.items()}
    equal = name in same
    cpu, clock = (1.0 if equal else a / b for a, b in zip(total["ours"], total["xla"], strict=True))
    return {"program": name, "ratio": cpu, "clock ratio": clock, "ours is the program of xla": equal, **each}


def _seconds(f: Callable[..., Any], args: Sequence[Any]) -> tuple[float, float, float, float]:
    """CPU seconds to trace and lower a function, and to compile it; the same by the clock."""
    jax.clear_caches()
    gc.collect()  # what is left of the turn before is not this one's
    begun = _used(), time.perf_counter()
    lowered = jax.jit(lambda *xs: f(*xs)).lower(*args)
    between = _used(), time.perf_counter()
    lowered.compile()
    end = _used(), time.perf_counter()
    (a, c), (b, d) = (([y - x for x, y in zip(*pair, strict=True)]) for pair in ((begun, between), (between, end)))
    return a, b, c, d


def _used() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _line(row: dict[str, Any]) -> str:
    if row["ours is the program of xla"]:
        return f"{row['program']:22} ours is the program of xla"
    ms = lambda took, *parts: " + ".join(f"{took[part] * 500:5.0f}" for part in parts)
    parts = [f"{k} {ms(row[k], *PARTS[:2])} ms (clock {ms(row[k], *PARTS[2:])})" for k in ("ours", "xla")]
    return f"{row['program']:22} {', '.join(parts)}, ratio {row['ratio']:.2f} (clock {row['clock ratio']:.2f})"
