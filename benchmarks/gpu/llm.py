"""SmolLM2-135M: prefill and greedy decoding, where its weights are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import llm
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import Options
from benchmarks.harness import Result
from jtile.errors import ModelError
from jtile.models.load import default_model


def results(machine: Machine, options: Options, say: Callable[[str], None], tiny: bool = False) -> Iterator[Result]:
    try:
        default_model()
    except ModelError as missing:
        say(f"llm is left out: {missing}")
        return
    if tiny:
        return
    for got in llm.results(machine, options.repeats):
        r = got.record
        say(f"smollm2 {r.config}: {r.ours_us} us a token ({1e6 / r.ours_us:.0f} tokens/s), peers {r.peers}")
        yield got
