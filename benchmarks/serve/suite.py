"""The runs: SmolLM2 on a CPU, over HTTP beside its peers; on a GPU an engine with a model of published shape."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.serve import gpu, targets
from benchmarks.serve.load import Answer, Goal, Lengths, Load, run, summary
from jtile.models import LanguageModel
from jtile.models.load import default_model, load

RECORDS = Path(__file__).resolve().parents[1] / "records"
ROWS, CONTEXT = 16, 1024
LONGEST = 40.0  # seconds after which a load is cut off: a peer that takes minutes would leave no time for the others
GOAL = Goal(first_ms=2000, between_ms=150)
SHORT = Lengths(20)
LONG = Load("busy", 10_000, Lengths(64), Lengths(256), clients=8)
FIRST = Load("", 2, Lengths(20), Lengths(4))  # after which a server has done everything once
LOADS = (
    Load("1 client", 6, Lengths(32), Lengths(48), clients=1),
    Load("16 clients", 48, Lengths(32), Lengths(48), clients=16),
    Load("20-token prompts, idle", 10, SHORT, Lengths(8), clients=1),
    Load("20-token prompts beside 8 clients", 10, SHORT, Lengths(8), clients=1, beside=LONG),
    Load("fixed 1.5/s", 30, Lengths(64), Lengths(32), "fixed", 1.5),
    Load("poisson 1.5/s", 30, Lengths(64, 0.8, 400), Lengths(32, 0.6, 128), "poisson", 1.5),
    Load("400 tokens shared, 16 at once", 16, Lengths(420), Lengths(8), shared=400),
)


def main(options: argparse.Namespace) -> None:
    """Runs what the command line asks for; each record is written as it comes."""
    began, say = time.monotonic(), lambda text: print(text, file=sys.stderr, flush=True)
    deadline = began + (options.limit or (100 if options.gpu else 530))
    if options.gpu:
        from benchmarks.gpu.machine import device_name

        device, found = device_name(), gpu.records(options, deadline, say)
    else:
        from jtile.tune import host

        device, found = host.measure().device, _on_cpu(options, deadline, say)
    kept = options.json or (None if options.tiny or options.only else RECORDS / device / "serve.json")
    rows = []
    for row in found:
        rows.append({"workload": "serve", "device": device, **row})
        say(f"{row['config']} {row['dtype']}")
        for name, numbers in row["runs"].items():
            say(f"    {name}: {_line(numbers)}")
        if kept:
            report.merge_rows(rows[-1:], kept)
    for fact in _facts(rows):
        say(fact)
    say(f"{len(rows)} records in {time.monotonic() - began:.0f} s, {kept or 'not kept'}")


def _line(numbers: dict) -> str:
    if "tokens_per_s" not in numbers:
        return ", ".join(f"{key} {value}" for key, value in numbers.items())
    n = numbers
    if "overhead" in n:
        return (
            f"a step of the engine {n['step_ms']:.2f} ms, of the bare loop {n['bare_step_ms']:.2f} ms: overhead "
            f"{100 * n['overhead']:.1f} %, {n['decode_tokens_per_s']:.0f} tokens/s"
        )
    failed = f", {n['failed']} FAILED ({n.get('error')})" if n["failed"] else ""
    failed += f", {n['unfinished']} UNFINISHED" if "unfinished" in n else ""
    return (
        f"{n['tokens_per_s']:.1f} tokens/s, first token {n['first_ms_p50']:.0f} ms (p99 {n['first_ms_p99']:.0f}), "
        f"between {n['between_ms_p50']:.1f} ms (p99 {n['between_ms_p99']:.1f}), goodput {n['goodput_per_s']:.2f}/s "
        f"[{n['requests']} requests, {n['seconds']:.1f} s{failed}]"
    )


def _facts(rows: list[dict]) -> Iterator[str]:
    """What the CPU's loads say together, of ours."""
    runs = {row["config"].split(", ", 1)[-1]: row["runs"].get("ours", {}) for row in rows}
    rate = lambda name: runs.get(name, {}).get("tokens_per_s")
    first = lambda name: runs.get(name, {}).get("first_ms_p50")
    if rate("1 client") and rate("16 clients"):
        yield f"16 clients over one: {rate('16 clients') / rate('1 client'):.2f} times the tokens a second"
    idle, busy = first("20-token prompts, idle"), first("20-token prompts beside 8 clients")
    if idle and busy:
        yield f"first token of 20-token prompts beside 8 clients: {busy / idle:.2f} times that of idle"


# -- on a CPU ----------------------------------------------------------------------------------------------------------


def _on_cpu(options: argparse.Namespace, deadline: float, say: Callable[[str], None]) -> Iterator[dict]:
    loads = [one for one in LOADS if not options.only or any(text in one.name for text in options.only)]
    if not loads:
        sys.exit(f"no load has a name with {' or '.join(options.only)}; there are: {'; '.join(l.name for l in LOADS)}")
    path = default_model()
    lm = load(path)
    found: dict[str, dict] = {one.name: {} for one in loads}
    for name, on in _targets(path, lm):
        if any(name.startswith(left) for left in options.without):
            continue
        with on() as answer_to:
            if answer_to is None:
                say(f"{name} is left out: it is not installed")
                continue
            for one in loads:
                if time.monotonic() > deadline:
                    say(f"left out, no time: {name}, {one.name}")
                elif (answer := answer_to(one)) is not None:
                    seen = asyncio.run(run(one, answer, lm.config.vocab_size, LONGEST))
                    found[one.name][name] = summary(seen, GOAL)
                    say(f"{name}, {one.name}: {_line(found[one.name][name])}")
                    if any(call.cut is not None for call in seen):  # until the server has noticed
                        asyncio.run(run(FIRST, answer, lm.config.vocab_size, LONGEST))
    for one in loads:
        if found[one.name]:
            yield {"config": f"smollm2, {one.name}", "dtype": "q4_1", "runs": found[one.name]}


AnswerTo = Callable[[Load], Answer | None]


def _targets(path: Path, lm: LanguageModel) -> Iterator[tuple[str, Callable]]:
    """(name, what opens it: a context that gives what answers to a load, or None where it is not installed)."""
    threads, sizes = os.cpu_count() or 1, ("--max-length", str(CONTEXT))
    plain, bias = {"ignore_eos": True}, {"logit_bias": {str(i): -100 for i in lm.eos_ids}}
    ours = targets.jtile_serve(ROWS, *sizes)
    yield "ours", lambda: _served(lm, ours, "/health", plain)
    yield "ours, no prefix cache", lambda: _served(lm, [*ours, "--no-prefix-cache"], "/health", plain)
    yield "llama.cpp", lambda: _served(lm, targets.llama_cpp(path, threads, CONTEXT), "/v1/models", bias)

    def in_batches(load: Load) -> Answer | None:
        """More than one request at a time, of like lengths."""
        alike = load.clients != 1 and not (load.prompt.spread or load.answer.spread)
        return targets.of_batches(lm, ROWS, load) if alike else None

    yield "static batch", lambda: contextlib.nullcontext(in_batches)


@contextlib.contextmanager
def _served(lm: LanguageModel, command: list[str] | None, ready: str, more: dict) -> Iterator[AnswerTo | None]:
    if command is None:
        yield None
        return
    assert lm.tokenizer is not None
    spell, vocab = lm.tokenizer.decode, lm.config.vocab_size
    with targets.server(command, ready) as url:
        asyncio.run(run(FIRST, targets.of_server(url, spell, **more), vocab))
        yield lambda load: targets.of_server(url, spell, **more)
