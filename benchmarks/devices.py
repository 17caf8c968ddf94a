"""`python -m benchmarks devices`: collectives of `jtile.ops` beside those of XLA over all devices of one host, and
models cut over them beside one device; with `--paper`, what 8, 72 and 1024 cards would take by the rates of a
`Target`."""

from __future__ import annotations

import argparse
import json
import math
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
from benchmarks import device_models, device_peers
from benchmarks.device_works import JTILE, MOSAIC, WORKS, XLA, Work, call, drawn, on_one_device

CALLS = 8  # calls in a round of a loop inside jit, in turn: the loop counts in a kernel of its own
LONG, HOST = 0.1, 1e-3  # seconds: the least of the rounds of one program; the start of one
MOST = 2000  # the most rounds
LARGE = 32 << 20  # bytes of an array of a device of which a round has one call
# what a record calls the time of a peer -> the peer
PEERS = {"one_us": "one device, its time divided", "one_step_us": "one device", "plain_us": "plain `jnp`, cut by XLA",
         "xla_us": "XLA"}  # fmt: skip
HOSTS = 50e9  # bytes a second of one card to other hosts: each card has a network adapter of 400 Gb/s
COUNTS = (8, 72, 1024)
MODELS = "models"  # the name of device_models.py for `--only`


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


Program = Callable[[], Any]
Maker = Callable[[int, int], Program]  # of rounds and calls in each: a program of so many, compiled and run once


def prepared(make: Maker, several: bool, tiny: bool) -> tuple[Program, int]:
    """A program that runs long enough to be timed, and its calls, of which a round has one or several."""
    calls = CALLS if several else 1
    first = make(1, calls)
    began = time.perf_counter()
    first()
    each = max(time.perf_counter() - began - HOST, 3e-6) / calls
    calls = 1 if each > LONG / CALLS else calls  # long calls need no rounds of several
    rounds = 2 if tiny else max(1, min(MOST, int(LONG / each / calls)))
    return make(rounds, calls), rounds * calls


def alternating(programs: dict[str, tuple[Program, int]], repeats: int) -> dict[str, float]:
    """The median of the microseconds of a call of each program; they run in turn."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, (program, calls) in programs.items():
            start = time.perf_counter()
            program()
            found[name].append(1e6 * (time.perf_counter() - start) / calls)
    return {name: statistics.median(times) for name, times in found.items()}


def _over(mesh: Mesh, run: Callable, **specs: Any) -> Callable:
    return jax.jit(jax.shard_map(run, mesh=mesh, out_specs=P("x"), check_vma=False, **specs))


def parts(work: Work, mesh: Mesh, tiny: bool, scale: float | None = None) -> list[jax.Array]:
    """The arrays of all devices, one behind the other."""

    def own():
        return [x[None] for x in drawn(work, mesh.size, tiny, scale, jax.lax.axis_index("x"))]

    return _over(mesh, own, in_specs=())()


def on_mesh(work: Work, side: str, mesh: Mesh, arrays: list[jax.Array]) -> Maker:
    """Programs of a collective on all devices."""

    def make(rounds: int, calls: int) -> Program:
        def run(parts):
            return [y[None] for y in repeated(lambda a: call(work, side, a), [x[0] for x in parts], rounds, calls)]

        return _ready(_over(mesh, run, in_specs=P("x")), arrays)

    return make


def on_one(work: Work, n: int, tiny: bool) -> Maker:
    """Programs of attention to the tokens of all devices on one device."""
    arrays = [jnp.concatenate([x] * n, 1) for x in drawn(work, n, tiny)]
    run = lambda a: on_one_device(work, a)
    return lambda rounds, calls: _ready(jax.jit(lambda a: repeated(run, a, rounds, calls)), arrays)


def _ready(program: Callable, arrays: list[jax.Array]) -> Program:
    go = lambda: jax.block_until_ready(program(arrays))
    go()
    return go


def error(work: Work, mesh: Mesh, tiny: bool) -> float:
    """How far jtile's result is from the peer's: the largest difference over the largest number."""
    arrays = parts(work, mesh, tiny, scale=0.1)
    first = lambda side: _over(
        mesh, lambda given: jax.tree.leaves(call(work, side, [x[0] for x in given]))[0][None], in_specs=P("x")
    )(arrays)
    got, want = (np.asarray(first(side)).astype(np.float32) for side in (JTILE, XLA))
    return float(np.abs(got - want).max() / np.abs(want).max())


def measured(work: Work, mesh: Mesh, tiny: bool, repeats: int, mosaic: bool) -> dict[str, Any]:
    """The record of one line, with the reason in place of a time where a side did not run. The peer of attention is
    one device with all of the tokens, its time divided by the number of devices: XLA's own keeps all scores."""
    record: dict[str, Any] = {"work": work.key, "size": work.label, "devices": mesh.size, "tiny": tiny}
    arrays = parts(work, mesh, tiny)
    ring = work.name == "ring_attention"
    makers = {"jtile": on_mesh(work, JTILE, mesh, arrays)}
    makers |= {"one": on_one(work, mesh.size, tiny)} if ring else {"xla": on_mesh(work, XLA, mesh, arrays)}
    if mosaic and work.name == "all_gather_matmul":
        tried = [f"{MOSAIC}{k}" for k in range(len(device_peers.MOSAIC))]
        makers |= {side: on_mesh(work, side, mesh, arrays) for side in tried}
    programs = {}
    # each call of a program has memory of its own on all devices, and large ones are long enough alone
    several = not tiny and max(x.nbytes // mesh.size for x in arrays) < LARGE
    for name, make in makers.items():
        try:
            programs[name] = prepared(make, several, tiny)
        except Exception as failure:  # a peer may fail in its own way
            if name == "jtile" and not isinstance(failure, (jt.errors.JtileError, jax.errors.JaxRuntimeError)):
                raise
            record[f"{name}_error"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
    times: dict[str, float] = {}
    for name, us in alternating(programs, repeats).items():
        side = MOSAIC if name.startswith(MOSAIC) else name
        times[side] = min(times.get(side, math.inf), us / mesh.size if name == "one" else us)
    record |= {f"{side}_us": round(us, 1) for side, us in times.items()}
    peers = [us for side, us in times.items() if side != "jtile"]
    if "jtile" in times and peers:
        record["ratio"] = round(min(peers) / times["jtile"], 2)
        if "xla" in times:  # tests compare attention, with fewer tokens
            record["error"] = float(f"{error(work, mesh, tiny):.2g}")
    return record


def measure(works: tuple[Work, ...], mesh: Mesh, tiny: bool, repeats: int, mosaic: bool) -> list[dict[str, Any]]:
    """The records of all lines."""
    records = []
    for work in works:
        records.append(measured(work, mesh, tiny, repeats, mosaic))
        print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """The table of the records, in Markdown."""
    rows = ["| work | size | peer | its us | jtile us | ratio | error |", "|---|---|---|---|---|---|---|"]
    for r in records:
        peer = min((name for name in PEERS if name in r), key=lambda name: r[name], default="xla_us")
        ours, theirs = r.get("jtile_us", r.get("jtile_error", "")), r.get(peer, "-")
        last = " | ".join(str(r.get(name, "-")) for name in ("ratio", "error"))
        rows.append(f"| `{r['work']}` | {r['size']} | {PEERS[peer]} | {theirs} | {ours} | {last} |")
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
    records = measure(works, Mesh(np.array(found[:count]), ("x",)), options.tiny, options.repeats, options.mosaic)
    if options.only is None or MODELS in options.only:
        records += device_models.measure(count, options.tiny)
    print(table(records))
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")


NAMES = (*dict.fromkeys(work.name for work in WORKS), MODELS)
