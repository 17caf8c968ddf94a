"""How long the programs of `benchmarks.fuse` take to trace and compile by `jt.fuse`, beside XLA alone.

Both compile in one process, in turns, with empty caches, at two sizes; a third size before them pays for what is
imported at first. The numbers are CPU seconds of all threads, which tell more than a clock where others use the
machine, too, and the least of a few such processes, one after another. No program runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jtile as jt
from benchmarks import fuse

SIZES = (4, 2, 1)  # divisors of the sides
TURNS = 4  # processes

Took = dict[str, dict[str, list[tuple[float, float]]]]  # by program and side: `_seconds` of each size


def main(options: argparse.Namespace) -> None:
    """Prints a line for each program, and writes all of it to `options.json`."""
    names = [name for name in fuse.programs(256) if not options.only or name in options.only]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        turns = [pool.apply(_turn, (names,)) for _ in range(TURNS)]
    rows = [_row(name, [turn[name] for turn in turns]) for name in names]
    for row in rows:
        print(_line(row))
    ratios = [row["ratio"] for row in rows]
    within = sum(ratio <= 2 for ratio in ratios)
    mean = math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))
    print(f"{within} of {len(rows)} programs take at most twice as long as XLA's; geometric mean {mean:.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def _turn(names: Sequence[str]) -> Took:
    """What programs take in this process, which has compiled none of them."""
    jax.config.update("jax_enable_compilation_cache", False)
    functions = {name: f for name, (f, _) in fuse.programs(256).items()}
    shapes = [jax.eval_shape(lambda n=n: {name: args for name, (_, args) in fuse.programs(n).items()}) for n in SIZES]
    took: Took = {}
    with jt.config(cache_dir=""):
        for name in names:
            f, args = functions[name], [of[name] for of in shapes]
            both = {"ours": lambda *xs, f=f: jt.fuse(lambda *ys: f(*ys))(*xs), "xla": lambda *xs, f=f: f(*xs)}
            took[name] = {key: [_seconds(g, of_size) for of_size in args][1:] for key, g in both.items()}
    return took


def _row(name: str, turns: Sequence[dict[str, list[tuple[float, float]]]]) -> dict[str, Any]:
    least = {k: [min(sizes, key=sum) for sizes in zip(*(turn[k] for turn in turns), strict=True)] for k in turns[0]}
    each = {key: {"trace": sum(a for a, _ in t), "compile": sum(b for _, b in t)} for key, t in least.items()}
    total = {key: t["trace"] + t["compile"] for key, t in each.items()}
    return {"program": name, "ratio": total["ours"] / total["xla"], **each}


def _seconds(f: Callable[..., Any], args: Sequence[Any]) -> tuple[float, float]:
    """CPU seconds to trace and lower a function, and to compile it."""
    jax.clear_caches()
    gc.collect()  # what is left of the turn before is not this one's
    begun = _used()
    lowered = jax.jit(lambda *xs: f(*xs)).lower(*args)
    between = _used()
    lowered.compile()
    return between - begun, _used() - between


def _used() -> float:
    return time.process_time()


def _line(row: dict[str, Any]) -> str:
    parts = [f"{k} {row[k]['trace'] * 500:5.0f} + {row[k]['compile'] * 500:5.0f} ms" for k in ("ours", "xla")]
    return f"{row['program']:22} {', '.join(parts)}, ratio {row['ratio']:.2f}"
