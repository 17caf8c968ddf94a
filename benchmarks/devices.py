"""`python -m benchmarks devices`: collectives of `jtile.ops` beside those of XLA over all devices of one host; with
`--paper`, what 8, 72 and 1024 cards would take by the rates of a `Target`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile.ops import collectives

ROUNDS = 20  # of a loop inside jit: one call of a program over several devices takes the host longer than a small sum
HOSTS = 50e9  # bytes a second of one card to other hosts: a network adapter of 400 Gb/s for each
COUNTS = (8, 72, 1024)


class Work(NamedTuple):
    """One line: `name` of `jtile.ops.collectives`, its arrays on each of n devices, and how one round becomes the
    arguments of the next."""

    name: str
    label: str
    shapes: Callable[[int], list[tuple[int, ...]]]
    dtype: str = "bfloat16"


WORKS = (
    Work("all_reduce", "8 KiB", lambda n: [(4, 1024)]),
    Work("all_reduce_rms_norm", "32 KiB", lambda n: [(4, 4096), (4096,), (4, 4096)]),
    Work("all_reduce", "512 KiB", lambda n: [(64, 4096)]),
    Work("all_gather_matmul", "8192x4096x14336", lambda n: [(8192 // n, 4096), (4096, 14336 // n)]),
    Work("all_gather_matmul", "4096x7168x4096", lambda n: [(4096 // n, 7168), (7168, 4096 // n)]),
    Work("matmul_reduce_scatter", "4096x7168x4096", lambda n: [(4096, 7168 // n), (7168 // n, 4096)]),
    Work("matmul_reduce_scatter", "8192x14336x4096", lambda n: [(8192, 14336 // n), (14336 // n, 4096)]),
    Work("matmul_all_reduce", "8192x14336x4096", lambda n: [(8192, 14336 // n), (14336 // n, 4096)]),
    Work("matmul_all_reduce", "64x14336x4096", lambda n: [(64, 14336 // n), (14336 // n, 4096)]),
    Work("all_to_all", "128x7168", lambda n: [(128 // n * n, 7168)]),
    Work("all_to_all", "4096x7168", lambda n: [(4096 // n * n, 7168)]),
    Work("ring_attention", "32768 tokens a device", lambda n: [(1, 32768, 32, 128), *[(1, 32768, 8, 128)] * 2]),
)  # fmt: skip


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions that a CPU gets through; those that devices share out stay so."""
    return tuple(size if size <= 128 else max(8, size // 64) for size in shape)


def call(work: Work, suffix: str, arrays: list[jax.Array]) -> jax.Array:
    """One call on a device."""
    run = getattr(collectives, work.name + suffix)
    if work.name == "all_reduce_rms_norm":
        return run(*arrays[:2], "x", residual=arrays[2])[0]
    return run(*arrays, "x", **({"causal": True} if work.name == "ring_attention" else {}))


def timed(work: Work, suffix: str, mesh: Mesh, tiny: bool, repeats: int) -> list[float]:
    """Microseconds of a call, in rounds of a loop on the devices; each round depends on the one before."""
    n = mesh.size
    shapes = [small(shape) if tiny else shape for shape in work.shapes(n)]

    def rounds(index):
        del index
        dtype = jnp.dtype(work.dtype)
        arrays = [0.1 * jax.random.normal(jax.random.key(k), shape, dtype) for k, shape in enumerate(shapes)]

        def step(_, carry):
            first, total = carry
            y = call(work, suffix, [first, *arrays[1:]])
            probe = y.reshape(-1)[0].astype(jnp.float32)
            return first.at[(0,) * first.ndim].set((probe * 1e-3).astype(first.dtype)), total + probe

        return jax.lax.fori_loop(0, ROUNDS, step, (arrays[0], jnp.float32(0)))[1][None]

    program = jax.jit(jax.shard_map(rounds, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    index = jnp.arange(n)
    jax.block_until_ready(program(index))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(index))
        found.append(1e6 * (time.perf_counter() - start) / ROUNDS)
    return found


def measure(works: tuple[Work, ...], mesh: Mesh, tiny: bool, repeats: int) -> list[dict[str, Any]]:
    """A record of each line: medians in microseconds, and why jtile's kernel did not run where it did not."""
    records = []
    for work in works:
        record = {"work": work.name, "size": work.label, "devices": mesh.size, "tiny": tiny}
        for name, suffix in (("xla", "_reference"), ("jtile", "")):
            try:
                record[f"{name}_us"] = round(statistics.median(timed(work, suffix, mesh, tiny, repeats)), 1)
            except (jt.errors.JtileError, jax.errors.JaxRuntimeError) as error:
                record[f"{name}_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        if "jtile_us" in record and "xla_us" in record:
            record["ratio"] = round(record["xla_us"] / record["jtile_us"], 2)
        print(json.dumps(record), file=sys.stderr, flush=True)
        records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Of the records, in Markdown."""
    rows = ["| work | size | XLA us | jtile us | ratio |", "|---|---|---|---|---|"]
    for r in records:
        ours = r.get("jtile_us", r.get("jtile_error", ""))
        rows.append(f"| `{r['work']}` | {r['size']} | {r.get('xla_us', '-')} | {ours} | {r.get('ratio', '-')} |")
    return "\n".join(rows)


# On paper ----------------------------------------------------------------------------------------------------------


class Paper(NamedTuple):
    """A work in numbers of one card of n: operations of bf16, and bytes that it sends to cards of its domain and of
    others (n cards: n - 1 peers, of which those behind the domain are reached through the network)."""

    label: str
    flops: Callable[[int], float]
    sent: Callable[[int], float]


PAPER = (
    Paper("sum of 512 KiB, each sums all", lambda n: 0.0, lambda n: (n - 1) * 512 * 2**10),
    Paper("sum of 512 KiB, in two turns", lambda n: 0.0, lambda n: 2 * (n - 1) / n * 512 * 2**10),
    Paper("sum of 32 MiB, in two turns", lambda n: 0.0, lambda n: 2 * (n - 1) / n * 32 * 2**20),
    Paper(
        "rows gathered, product of 65536x8192x28672",
        lambda n: 2 * 65536 * 8192 * 28672 / n,
        lambda n: (n - 1) * 65536 * 8192 * 2 / n,
    ),
    Paper("128 rows of 7168 a card to 8 experts each", lambda n: 0.0, lambda n: 128 * 8 * 7168 * 2 * (n - 1) / n),
    Paper(
        "ring attention, 32768 tokens a card",
        lambda n: 2 * 32768 * 32768 * n * 32 * 128,  # causal, half of four
        lambda n: (n - 1) * 32768 * 8 * 128 * 2 * 2,
    ),
)  # fmt: skip


def share_outside(n: int, domain: int) -> float:
    """Of what a card sends to each peer alike, the part for those behind its domain."""
    return max(n - domain, 0) / (n - 1)


def microseconds(work: Paper, n: int, target: Any, domain: int) -> float:
    """The longest of the product, of the links of the domain, and of the network: they run at once."""
    link = next(s.link for s in target.scales if s.name == "node")
    assert link is not None
    outside = 1.0 if work.label.startswith("ring") and n > domain else share_outside(n, domain)
    rate, sent = dict(target.rates)["bfloat16"], work.sent(n)
    return 1e6 * max(work.flops(n) / rate, sent * (1 - outside) / link, sent * outside / HOSTS)


def _target(arch: str) -> Any:
    with jt.config(arch=arch):
        return jt.target()


def paper() -> str:
    """The table of docs/sharding.md: domains of 8 cards of sm_90, and of 72 of sm_100."""
    rows = ["| work | cards | MiB that a card sends | sm_90, us | sm_100, us |", "|---|---|---|---|---|"]
    domains = ((_target("sm_90"), 8), (_target("sm_100"), 72))
    for work in PAPER:
        for n in COUNTS:
            times = " | ".join(f"{microseconds(work, n, target, domain):,.1f}" for target, domain in domains)
            rows.append(f"| {work.label} | {n} | {work.sent(n) / 2**20:,.1f} | {times} |")
    return "\n".join(rows)


def main(options: argparse.Namespace) -> None:
    if options.paper:
        print(paper())
        return
    found = jax.devices()
    count = options.devices or len(found)
    if not 2 <= count <= len(found):
        sys.exit(f"the benchmarks of devices take 2 or more of one host, and there are {len(found)} for {count}")
    works = tuple(w for w in WORKS if options.only is None or w.name in options.only)
    records = measure(works, Mesh(np.array(found[:count]), ("x",)), options.tiny, options.repeats)
    print(table(records))
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")


NAMES = tuple(dict.fromkeys(work.name for work in WORKS))
