"""`python -m benchmarks devices`: collectives of `jtile.ops` beside those of XLA over all devices of one host, and
models cut over them beside one device; with `--paper`, what 8, 72 and 1024 cards would take by the rates of a
`Target`."""

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
from benchmarks import device_models
from jtile import ops
from jtile.ops import collectives

CALLS = 8  # calls in a round of a loop inside jit, in turn: the loop counts in a kernel of its own
LONG, HOST = 0.1, 1e-3  # seconds: the least of the rounds of one program; the start of one
MOST = 2000  # the most rounds
# what a record calls the time of a peer -> the peer
PEERS = {"xla_us": "XLA", "one_us": "one device, its time divided", "one_step_us": "one device"}
HOSTS = 50e9  # bytes a second of one card to other hosts: each card has a network adapter of 400 Gb/s
COUNTS = (8, 72, 1024)
MODELS = "models"  # the name of device_models.py for `--only`


class Work(NamedTuple):
    """One line of the table: the function `name` of `jtile.ops.collectives`, and its arrays on each of n devices."""

    name: str
    label: str
    shapes: Callable[[int], list[tuple[int, ...]]]
    dtype: str = "bfloat16"
    backward: bool = False

    @property
    def key(self) -> str:
        """The name of this line in records."""
        return f"{self.name}, backward" if self.backward else self.name


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
    Work("ring_attention", "32768 tokens a device", lambda n: [(1, 32768, 32, 128), *[(1, 32768, 8, 128)] * 2],
         backward=True),
)  # fmt: skip


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions small enough for a CPU, which devices can still share equally."""
    return tuple(size if size <= 128 else max(8, size // 64) for size in shape)


def call(work: Work, suffix: str, arrays: list[jax.Array]) -> Any:
    """The result of one call on a device."""
    run: Callable = getattr(collectives, work.name + suffix)
    if work.name == "all_reduce_rms_norm":
        y, total = run(*arrays[:2], "x", residual=arrays[2])
        return y, arrays[1], total
    if work.name == "ring_attention":
        return attend(lambda q, k, v: run(q, k, v, "x", causal=True, zigzag=True), work, arrays)
    return run(*arrays, "x")


def attend(run: Callable, work: Work, arrays: list[jax.Array]) -> Any:
    """Attention, or its gradients from the output as a cotangent, whose forward pass counts too."""
    if not work.backward:
        return run(*arrays)
    out, pull = jax.vjp(run, *arrays)
    return pull(out)


def repeated(
    run: Callable[[list[jax.Array]], Any], arrays: list[jax.Array], rounds: int, calls: int
) -> list[jax.Array]:
    """`rounds` times `calls` calls, each of the result of the call before: it is the next operand, or, where shapes
    differ, one number of it replaces one of the operand, which costs a tiny kernel."""

    def step(_, arrays):
        for _ in range(calls):
            given = jax.tree.leaves(run(arrays))
            fits = [y.shape == x.shape for x, y in zip(arrays, given, strict=False)]
            arrays = [y if fit else x for x, y, fit in zip(arrays, given, fits, strict=False)] + arrays[len(given) :]
            if not any(fits):
                arrays[0] = arrays[0].at[(0,) * arrays[0].ndim].set(given[0][(0,) * given[0].ndim])
        return arrays

    return jax.lax.fori_loop(0, rounds, step, arrays)


def drawn(work: Work, n: int, tiny: bool) -> list[jax.Array]:
    """The arrays of one device; arrays that are summed again and again are zero, and stay so."""
    shapes = [small(shape) if tiny else shape for shape in work.shapes(n)]
    scale = 0.0 if work.name == "all_reduce" else 0.1
    return [
        scale * jax.random.normal(jax.random.key(k), shape, jnp.dtype(work.dtype)) for k, shape in enumerate(shapes)
    ]


def timed(make: Callable[[int, int], Callable[[], Any]], tiny: bool, repeats: int) -> list[float]:
    """Microseconds of a call. `make(rounds, calls)`: a program of so many, compiled."""
    calls = 1 if tiny else CALLS
    first = make(1, calls)
    began = time.perf_counter()
    first()
    each = max(time.perf_counter() - began - HOST, 3e-6) / calls
    calls = 1 if each > LONG / CALLS else calls  # long calls need no rounds of several
    rounds = 2 if tiny else max(1, min(MOST, int(LONG / each / calls)))
    program = make(rounds, calls)
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        program()
        found.append(1e6 * (time.perf_counter() - start) / rounds / calls)
    return found


def on_mesh(work: Work, suffix: str, mesh: Mesh, tiny: bool) -> Callable[[int, int], Callable[[], Any]]:
    """What `timed` takes, for a collective on all devices."""
    arrays = jax.jit(jax.shard_map(
        lambda: [x[None] for x in drawn(work, mesh.size, tiny)], mesh=mesh, in_specs=(), out_specs=P("x"),
        check_vma=False,
    ))()  # fmt: skip

    def make(rounds: int, calls: int) -> Callable[[], Any]:
        def run(parts):
            return [y[None] for y in repeated(lambda a: call(work, suffix, a), [x[0] for x in parts], rounds, calls)]

        each = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        return _ready(jax.jit(each), arrays)

    return make


def on_one(work: Work, n: int, tiny: bool) -> Callable[[int, int], Callable[[], Any]]:
    """What `timed` takes, for attention to the tokens of all devices on one device."""
    arrays = [jnp.concatenate([x] * n, 1) for x in drawn(work, n, tiny)]
    run = lambda a: attend(lambda q, k, v: ops.attention(q, k, v, causal=True), work, a)
    return lambda rounds, calls: _ready(jax.jit(lambda a: repeated(run, a, rounds, calls)), arrays)


def _ready(program: Callable, arrays: list[jax.Array]) -> Callable[[], Any]:
    """The program, compiled and run once."""
    go = lambda: jax.block_until_ready(program(arrays))
    go()
    return go


def measure(works: tuple[Work, ...], mesh: Mesh, tiny: bool, repeats: int) -> list[dict[str, Any]]:
    """A record for each line: medians in microseconds, or the reason why jtile's kernel did not run. The peer of
    attention is one device with all of the tokens, divided by the number of devices: XLA's own keeps all scores."""
    records = []
    for work in works:
        record: dict[str, Any] = {"work": work.key, "size": work.label, "devices": mesh.size, "tiny": tiny}
        sides = {"xla": lambda work=work: on_mesh(work, "_reference", mesh, tiny)}
        if work.name == "ring_attention":
            sides = {"one": lambda work=work: on_one(work, mesh.size, tiny)}
        sides["jtile"] = lambda work=work: on_mesh(work, "", mesh, tiny)
        for name, side in sides.items():
            try:
                us = statistics.median(timed(side(), tiny, repeats))
                record[f"{name}_us"] = round(us / mesh.size if name == "one" else us, 1)
            except (jt.errors.JtileError, jax.errors.JaxRuntimeError) as error:
                record[f"{name}_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        peer = record.get("xla_us", record.get("one_us"))
        if "jtile_us" in record and peer is not None:
            record["ratio"] = round(peer / record["jtile_us"], 2)
        print(json.dumps(record), file=sys.stderr, flush=True)
        records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """The table of the records, in Markdown."""
    rows = ["| work | size | peer | its us | jtile us | ratio |", "|---|---|---|---|---|---|"]
    for r in records:
        peer = next((name for name in PEERS if name in r), "xla_us")
        ours, theirs = r.get("jtile_us", r.get("jtile_error", "")), r.get(peer, "-")
        rows.append(f"| `{r['work']}` | {r['size']} | {PEERS[peer]} | {theirs} | {ours} | {r.get('ratio', '-')} |")
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
    """The share of its bytes that a card sends outside of its domain, if it sends equally much to each peer."""
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
    if options.only is None or MODELS in options.only:
        records += device_models.measure(count, options.tiny)
    print(table(records))
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")


NAMES = (*dict.fromkeys(work.name for work in WORKS), MODELS)
