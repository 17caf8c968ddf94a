"""SmolLM2-135M: prefill of 512 tokens and greedy decoding, against llama.cpp where its Python package is installed; and
steps of several rows, against those of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Result, result
from jtile.errors import ModelError
from jtile.models import LanguageModel
from jtile.models.load import default_model, load
from jtile.testing import Timing

PREFILL, DECODE = 512, 128
CONFIGS = ("prefill 512", "decode 128 after 16", "decode 128 after 512")  # one measurement gives all three
ROWS = 8


def results(roofline: Any, repeats: int) -> Iterator[Result]:
    """Microseconds a token: for a 512-token prompt, for 128 tokens after a short and after that long prompt, and for 64
    tokens in each of several rows."""
    try:
        path = default_model()
    except ModelError as missing:
        print(f"llm: left out, {missing}")
        return
    ids = np.random.default_rng(0).integers(100, 40000, PREFILL).tolist()
    lm = load(path)
    runners: dict[str, Callable] = {"ours": _ours(lm)}
    if (peer := _llama_cpp(path, roofline.threads)) is not None:
        runners["llama.cpp"] = peer
    rounds = max(3, repeats // 6)
    together = f"decode {DECODE // 2} after 16, {ROWS} rows"
    samples: dict[str, dict[str, list[float]]] = {config: {} for config in (*CONFIGS, together)}
    for turn in range(rounds + 1):
        for name, run in runners.items():
            prefill, late = run(ids, DECODE)
            _, early = run(ids[:16], DECODE)
            if turn:  # the first round compiles and warms up
                for config, value in zip(samples, (prefill, early, late)):
                    samples[config].setdefault(name, []).append(value)
        for name, rows in (("ours", ROWS), ("one row", 1)):
            taken = _step(lm, np.tile(ids[:16], (rows, 1))) / rows
            if turn:
                samples[together].setdefault(name, []).append(taken)
    weights = path.stat().st_size
    for config, of_runner in samples.items():
        times = {name: Timing(float(np.median(v)), min(v)) for name, v in of_runner.items()}
        alone = config.startswith("decode") and config != together
        bound = 1e6 * weights / roofline.bandwidth(weights) if alone else None
        yield result("smollm2", config, "q4_1, us/token", roofline.device, times, bound_us=bound)


def _ours(lm: LanguageModel) -> Callable:
    def run(ids, new_tokens):
        stream = lm.stream(ids, new_tokens + 1, eos=None)
        for _ in stream:
            pass
        return 1e6 / stream.stats.prefill_rate, 1e6 / stream.stats.decode_rate

    return run


def _step(lm: LanguageModel, ids: np.ndarray) -> float:
    """Microseconds of a step of the rows of ids."""
    stream = lm.stream(ids, DECODE // 2 + 1, eos=None)
    for _ in stream:
        pass
    return 1e6 * stream.stats.decode_seconds / (DECODE // 2)


def _llama_cpp(path, threads: int) -> Callable | None:
    try:
        import llama_cpp
    except ImportError:
        return None
    lm = llama_cpp.Llama(
        str(path),
        n_ctx=1024,
        n_batch=PREFILL,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )

    def run(ids, new_tokens):
        lm.reset()
        start = time.perf_counter()
        lm.eval(ids)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(new_tokens):
            lm.eval([lm.sample(temp=0.0)])
        return 1e6 * prefill / len(ids), 1e6 * (time.perf_counter() - start) / new_tokens

    return run
