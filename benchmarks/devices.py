"""`python -m benchmarks devices`: collectives of `jtile.ops` beside those of XLA over all devices of one host, and
models cut over them beside one device; with `--paper`, what 8, 72 and 1024 cards would take by the rates of a
`Target`."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jtile as jt
from benchmarks import device_models, device_peers
from benchmarks.device_works import JTILE, MOSAIC, ONE, WORKS, XLA, Work, call, drawn, guess, on_one_device

CALLS = 8  # calls in a round of a loop inside jit, in turn: the loop counts in a kernel of its own
LONG = 3e4  # microseconds of a sample, about
MOST = 400  # the most rounds
# Bytes of an array of a device of which a round has one call: each call has memory of its own, but a round copies its
# result, too, to where the next one takes it, which sums of XLA's do not need.
LARGE = 128 << 20
THREADS = 12  # that compile at once
# what a record calls the time of a peer -> the peer
PEERS = {"one_us": "one device, its time divided", "one_step_us": "one device", "plain_us": "plain `jnp`, cut by XLA",
         "xla_us": "XLA"}  # fmt: skip
HOSTS = 50e9  # bytes a second of one card to other hosts: each card has a network adapter of 400 Gb/s
COUNTS = (8, 72, 1024)
MODELS = "models"  # the name of device_models.py for `--only`
SIDES = {"jtile": JTILE, "xla": XLA}  # what a record calls a side -> what `call` does


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


# Programs ----------------------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """A compiled loop over calls of one side, and how many these are."""

    program: Callable[..., Any]
    calls: int


def _over(mesh: Mesh, run: Callable, **specs: Any) -> Any:
    return jax.jit(jax.shard_map(run, mesh=mesh, out_specs=P("x"), check_vma=False, **specs))


def making(work: Work, mesh: Mesh, tiny: bool) -> Callable[[], list[jax.Array]]:
    """A compiled program that makes the arrays of all devices, one behind the other."""
    own = lambda: [x[None] for x in drawn(work, mesh.size, tiny, None, jax.lax.axis_index("x"))]
    return _over(mesh, own, in_specs=()).lower().compile()


def comparing(work: Work, mesh: Mesh, tiny: bool) -> Callable[[], jax.Array]:
    """A compiled program that says how far jtile's result is from XLA's: the largest difference over the largest
    number. It makes arrays of its own, since sums are measured with zeros."""

    def run():
        arrays = drawn(work, mesh.size, tiny, 0.1, jax.lax.axis_index("x"))
        got = jax.tree.leaves(call(work, JTILE, arrays))[0]
        arrays, got = jax.lax.optimization_barrier((arrays, got))  # one behind the other
        want = jax.tree.leaves(call(work, XLA, arrays))[0].astype(jnp.float32)
        most = lambda x: jax.lax.pmax(jnp.abs(x).max(), "x")
        return (most(got.astype(jnp.float32) - want) / most(want))[None]

    return _over(mesh, run, in_specs=()).lower().compile()


def loop(work: Work, side: str, mesh: Mesh, tiny: bool) -> Side:
    """The program of a side, of about as many calls as are long enough to be timed."""
    n, one = mesh.size, side == ONE
    of = jax.eval_shape(lambda: drawn(work, n, tiny))
    large = max(x.size * x.dtype.itemsize for x in of) >= LARGE
    us = guess(work, side, n)
    few = tiny or large or side.startswith(MOSAIC)  # each call of Pallas's kernel is compiled, for long
    calls = 1 if few or us > LONG / CALLS else CALLS
    rounds = 1 if tiny else max(1, min(MOST, int(LONG / us / calls)))
    if one:
        shapes = [jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * n, *x.shape[2:]), x.dtype) for x in of]
        program = jax.jit(lambda a: repeated(lambda a: on_one_device(work, a), a, rounds, calls))
    else:

        def run(parts):
            return [y[None] for y in repeated(lambda a: call(work, side, a), [x[0] for x in parts], rounds, calls)]

        where = jax.NamedSharding(mesh, P("x"))
        shapes = [jax.ShapeDtypeStruct((n, *x.shape), x.dtype, sharding=where) for x in of]
        program = _over(mesh, run, in_specs=P("x"))
    return Side(program.lower(shapes).compile(), rounds * calls)


def sides_of(work: Work, mosaic: bool) -> dict[str, str]:
    """The sides of a line by their names in records. The peer of attention is one device with all of the tokens, its
    time divided by the number of devices: XLA's own keeps all scores."""
    sides = {"jtile": JTILE, ONE: ONE} if work.name == "ring_attention" else dict(SIDES)
    tried = range(len(device_peers.MOSAIC)) if mosaic and work.name == "all_gather_matmul" else ()
    return sides | {f"{MOSAIC}{k}": f"{MOSAIC}{k}" for k in tried}


def compiling(pool: ThreadPoolExecutor, work: Work, mesh: Mesh, tiny: bool, mosaic: bool) -> dict[str, Future]:
    """All programs of a line, of which several are compiled at once: `arrays`, `error` and those of the sides."""
    sides = sides_of(work, mosaic)
    programs: dict[str, Future[Any]] = {"arrays": pool.submit(making, work, mesh, tiny)}
    programs |= {name: pool.submit(loop, work, side, mesh, tiny) for name, side in sides.items()}
    if "xla" in sides:  # tests compare attention, with fewer tokens
        programs["error"] = pool.submit(comparing, work, mesh, tiny)
    return programs


# Measuring ---------------------------------------------------------------------------------------------------------


def sampled(sides: dict[str, tuple[Side, list[jax.Array]]], repeats: int) -> dict[str, float]:
    """The median of the microseconds of a call of each side; they run in turn, long ones less often."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    turns: dict[str, int] = {}  # of a program in a sample: what was guessed may be wrong

    def run(name: str) -> float:
        side, arrays = sides[name]
        start = time.perf_counter()
        for _ in range(turns.get(name, 1)):
            out = side.program(arrays)
        jax.block_until_ready(out)
        return 1e6 * (time.perf_counter() - start) / turns.get(name, 1)

    for name in sides:
        run(name)  # the first execution makes memory that devices share
        turns[name] = max(1, round(LONG / run(name)))
    for _ in range(repeats):
        for name, (side, _) in sides.items():
            if sum(found[name]) * side.calls < 20 * LONG or len(found[name]) < 3:
                found[name].append(run(name) / side.calls)
    return {name: statistics.median(times) for name, times in found.items()}


def measured(work: Work, programs: dict[str, Future], mesh: Mesh, tiny: bool, repeats: int) -> dict[str, Any]:
    """The record of one line, with the reason in place of a time where a side did not run."""
    record: dict[str, Any] = {"work": work.key, "size": work.label, "devices": mesh.size, "tiny": tiny}
    arrays = programs["arrays"].result()()
    one = lambda: [jnp.concatenate([x] * mesh.size, 1) for x in drawn(work, mesh.size, tiny)]
    ready: dict[str, tuple[Side, list[jax.Array]]] = {}
    for name in programs.keys() - {"arrays", "error"}:
        try:
            given = one() if name == ONE else arrays
            ready[name] = programs[name].result(), given
            jax.block_until_ready(ready[name][0].program(given))
        except Exception as failure:  # a peer may fail in its own way
            if name == "jtile" and not isinstance(failure, (jt.errors.JtileError, jax.errors.JaxRuntimeError)):
                raise
            ready.pop(name, None)
            record[f"{name}_error"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
    times: dict[str, float] = {}
    for name, us in sampled(ready, repeats).items():
        side = MOSAIC if name.startswith(MOSAIC) else name
        times[side] = min(times.get(side, math.inf), us / mesh.size if name == ONE else us)
    record |= {f"{side}_us": round(us, 1) for side, us in sorted(times.items())}
    peers = [us for side, us in times.items() if side != "jtile"]
    if "jtile" in times and peers:
        record["ratio"] = round(min(peers) / times["jtile"], 2)
        if "error" in programs and "xla" in times:
            far = programs["error"].result()()
            record["error"] = float(f"{float(np.asarray(far).max()):.2g}")
    return record


class Records:
    """Records that are printed and written as they come, so that a run that is cut short keeps those that it has."""

    def __init__(self, path: str | None):
        self.found: list[dict[str, Any]] = []
        self.path = Path(path) if path else None

    def add(self, record: dict[str, Any]) -> None:
        """Keeps one more."""
        self.found.append(record)
        device_models.say(record)
        if self.path is not None:
            whole = self.path.with_name(self.path.name + ".new")
            whole.write_text(json.dumps(self.found, indent=1) + "\n")
            os.replace(whole, self.path)


def different(works: Iterable[Work], n: int) -> list[Work]:
    """Lines whose arrays on n devices no line before has."""
    return list({(w.key, *map(tuple, w.shapes(n))): w for w in reversed(list(works))}.values())[::-1]


def measure(works: Iterable[Work], mesh: Mesh, tiny: bool, repeats: int, mosaic: bool, records: Records) -> None:
    """Adds the records of all lines. Everything is compiled first, since that would disturb what is timed."""
    lines, start = different(works, mesh.size), time.perf_counter()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        programs = [compiling(pool, work, mesh, tiny, mosaic) for work in lines]
    print(f"compiled {len(lines)} lines in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    for work in lines:
        records.add(measured(work, programs.pop(0), mesh, tiny, repeats))
        gc.collect()  # programs keep memory that devices share


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
    records = Records(options.json)
    mesh = Mesh(np.array(found[:count]), ("x",))
    measure(works, mesh, options.tiny, options.repeats, options.mosaic, records)
    if options.only is None or MODELS in options.only:
        device_models.measure(count, options.tiny, keep=records.add)
    print(table(records.found))


NAMES = (*dict.fromkeys(work.name for work in WORKS), MODELS)
