"""Language models: published shapes with random weights, and SmolLM2-135M where its weights are installed.

Ours is `LanguageModel.stream` as users call it, the host's part included: microseconds of a prompt and of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import llm
from benchmarks.data import normal
from benchmarks.gpu import kernels, models, plain, routed, timing, torch_decoder, torch_peers
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import Options, relative_error, short
from benchmarks.harness import Result, WrongResultError, result
from jtile import ops
from jtile.errors import ModelError
from jtile.models import LanguageModel
from jtile.models.llama import LlamaConfig
from jtile.models.load import default_model

PROMPTS = ((1, 512), (1, 2048), (16, 512), (64, 512), (256, 512))  # rows, tokens
MIXED = ((1, 512), (16, 512), (32, 512), (64, 512), (256, 512))  # rows, tokens for models with mixtures of experts
QUANTISED = ((1, 512), (1, 2048))  # rows, tokens for models with quantised weights
STEPS = 64
PROMPT_TURNS, PROMPT_S = 40, 2.0  # more samples of a prompt, which is short and waits for the host; seconds for them
CHECKED = 32  # tokens of the prompt whose logits are compared
ROUTED = 256  # tokens that are compared for models with mixtures
FAR = 0.5  # the largest error of ours without a peer: in 16 bits some tokens take other experts
SHOWN = 8  # how many kernels of a profile are printed
NEAR = 1.2  # the most that our error over the peer's may be: in both, roundings add up over the blocks


class Runner(NamedTuple):
    """How a decoder is timed. whole: runs the prompt and the steps; returns seconds of the prompt, and of a step.
    prompt: seconds of the prompt, behind which the decoder starts steps as in `whole`, which are over when it returns.
    alone: runs the prompt without steps, for the profiler."""

    whole: Callable[[], tuple[float, float]]
    prompt: Callable[[], float]
    alone: Callable[[], Any]


def results(machine: Machine, options: Options, say: Callable[[str], None], tiny: bool = False) -> Iterator[Result]:
    """A line for the prompt and one for a step of every model and size."""
    steps = 8 if tiny else STEPS
    rate = None
    for name, config in (models.TINY if tiny else models.SHAPES).items():
        dense = None
        for stored in models.ONLY_STORED.get(name, (models.DENSE, *models.STORED)):
            prompts = ((2, 16),) if tiny else _prompts(config, stored)
            asked = [p for p in prompts if any(options.takes(text, stored) for text in _lines(name, *p))]
            if not asked:
                continue
            rate = rate or _read_rate(machine, tiny)
            lm, checked = _made(name, config, stored, say)
            if stored == models.DENSE:
                dense = lm
            elif name not in models.ONLY_STORED:
                dense = dense or models.make(config)
            for rows, tokens in asked:
                beside = None if stored == models.DENSE else dense
                experts = routed.touched(lm, _ids(lm, rows, tokens)) if models.mixtures(lm.model) else 0.0
                work = models.Work(lm, rows, tokens, steps, beside, experts)
                yield from _measured((name, stored), work, machine, rate, checked, options, say)
                torch_peers.free()
            del lm
        del dense
    yield from () if tiny else _smollm2(machine, options, say)


def half_told(config: str) -> bool:
    """Whether the lines behind the one of this size belong to the same measurement."""
    return config.endswith(", prompt") or config in llm.CONFIGS[:-1]


def _prompts(config: dict, stored: str) -> tuple[tuple[int, int], ...]:
    if config["model_type"] != "llama":
        return MIXED
    return PROMPTS if stored == models.DENSE else QUANTISED


def _made(name: str, config: dict, stored: str, say: Callable[[str], None]) -> tuple[LanguageModel, Checked]:
    """A model, and the errors that its check has found."""
    began = time.monotonic()
    lm = models.make(config, stored)
    jax.block_until_ready(jax.tree.leaves(models.model_state(lm.model)))
    checked = _checked(lm)
    peer = "" if checked.peer is None else f", plain jnp {checked.peer:.2e}"
    say(
        f"{name} {stored}: weights made and checked in {time.monotonic() - began:.0f} s, relative errors against "
        f"float32: ours {checked.error:.2e}{peer}"
    )
    return lm, checked


def _lines(name: str, rows: int, tokens: int) -> tuple[str, ...]:
    """The sizes (`config`) that the records of a prompt and of a step have."""
    return tuple(f"{name}, {rows} x {tokens}, {what}" for what in ("prompt", "step"))


class Checked(NamedTuple):
    """Relative errors of our logits and of the peer's, both of 16-bit activations, against float32 logits of the
    same weights; errors grow with the depth of a model."""

    error: float
    peer: float | None = None


def _checked(lm: LanguageModel) -> Checked:
    """Checks a Llama beside the plain decoder, other models, which have no peer, beside our own logits in float32."""
    if not isinstance(lm.config, LlamaConfig):
        ids = _ids(lm, 1, ROUTED)
        exact = routed.logits(lm, ids, "float32")
        error = relative_error(routed.logits(lm, ids, lm.dtype), exact)
        if not error < FAR:
            raise WrongResultError(f"logits of {lm.config.num_layers} layers: relative error {error:.2g} against ours")
        return Checked(error)
    ids, w, s = _ids(lm, 1, CHECKED), plain.weights_of(lm), plain.sizes_of(lm, None)
    exact = plain.exact_logits(w, ids, s=s)
    ours = relative_error(lm.logits(np.asarray(ids)), exact)
    peer = relative_error(plain.logits(plain.dense(w, jnp.bfloat16), ids, s=s), exact)
    return Checked(*near_enough(ours, peer, lm.config.num_layers))


def near_enough(ours: float, peer: float, layers: int) -> tuple[float, float]:
    """The relative errors of our logits and of the peer's.

    Raises:
      WrongResultError: ours is `NEAR` times the peer's, or more.
    """
    if not ours < NEAR * peer:
        raise WrongResultError(f"logits of {layers} layers: relative error {ours:.2g}, and {peer:.2g} of plain jnp's")
    return ours, peer


def _ids(lm: LanguageModel, rows: int, tokens: int) -> jax.Array:
    drawn = np.random.default_rng(0).integers(0, lm.config.vocab_size, (rows, tokens))
    return jnp.asarray(drawn, jnp.int32)


def _read_rate(machine: Machine, tiny: bool) -> float:
    """Bytes a second that a kernel reads: the best of a copy, XLA's sum, and one row times a matrix."""
    shape = (64, 128) if tiny else (1 << 17, 8192)
    x, w = normal(0, 1, shape[1], dtype="bfloat16"), normal(1, *shape, dtype="bfloat16")
    best = machine.copy_rate
    for f in (lambda x, w: w.max(1), lambda x, w: ops.matmul(x, w, transpose_b=True)):
        run = jax.jit(f)
        jax.block_until_ready(run(x, w))
        start = time.perf_counter()
        for _ in range(20):
            y = run(x, w)
        jax.block_until_ready(y)
        best = max(best, 20 * w.nbytes / (time.perf_counter() - start))
    return best


def _measured(
    model: tuple[str, str], work: models.Work, machine: Machine, rate: float, checked: Checked,
    options: Options, say: Callable,
) -> Iterator[Result]:  # fmt: skip
    """The results of a model; records name it and how its weights are stored."""
    (name, stored), began, lm = model, time.monotonic(), work.lm
    ids = _ids(lm, work.rows, work.tokens)
    runners: dict[str, Runner] = {}
    for peer, make in _RUNNERS.items():
        if _left_out(peer, work, runners, options):
            continue
        try:
            runners[peer] = make(work, ids)
            runners[peer].whole()  # compiles
        except Exception as failed:
            if peer == "ours":
                raise
            say(f"    {name}: peer {peer} is left out: {short(failed)}")
            runners.pop(peer, None)
    ready = time.monotonic()
    samples = _sampled(runners, options)
    measured = time.monotonic()
    steps = {peer: statistics.median(of[1]) for peer, of in samples.items()}
    profiles = _profiles(runners, steps, work.steps, say) if options.profile else None
    took = f"{ready - began:.0f} s to compile, {measured - ready:.0f} s to measure"
    unit = "fp8" if stored == "fp8" else "bf16"
    bounds = machine.bound_us(0, work.prompt_flops(), unit), 1e6 * work.step_bytes() / rate
    for i, (config, bound) in enumerate(zip(_lines(name, work.rows, work.tokens), bounds)):
        times = {p: [1e6 * x for x in of[i]] for p, of in samples.items()}
        of: dict[str, Any] = dict(
            bound_us=bound, error=checked.error, peer_error=checked.peer, kernels=profiles and profiles[i]
        )
        got = result("llm", config, stored, machine.device, timing.timings(times), **of)
        say(_line(got, work, i == 0, took, times))
        yield got


def _sampled(runners: Mapping[str, Runner], options: Options) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of prompts, and of steps, of every decoder, in turns. A sample of a step is the mean of `STEPS`, one of a
    prompt is a single one: of these there are more."""
    pairs: dict[str, list[tuple[float, float]]] = {peer: [] for peer in runners}
    for _ in range(min(max(3, options.repeats // 5), 5)):
        for peer, run in runners.items():
            pairs[peer].append(run.whole())
    more = {peer: run.prompt for peer, run in runners.items()}
    turns = min(3 * options.repeats, PROMPT_TURNS)
    prompts = timing.alternate(more, repeats=turns, budget_s=min(options.budget_s, PROMPT_S))
    return {peer: ([p for p, _ in of] + prompts[peer], [s for _, s in of]) for peer, of in pairs.items()}


def _profiles(runners: Mapping[str, Runner], median: Mapping[str, float], steps: int, say: Callable) -> list[dict]:
    """The time of each kernel in the prompt and in a step, as records keep it, for ours and for the best peer of a
    step, whose seconds are `median`; `say` gets a summary of both."""
    peers = sorted((p for p in runners if p != "ours"), key=median.__getitem__)
    kept: list[dict] = [{}, {}]
    for name in ("ours", *peers[:1]):
        prompt = kernels.by_kernel(runners[name].alone)
        step = kernels.difference(kernels.by_kernel(runners[name].whole), prompt, steps)
        for i, (what, found) in enumerate((("the prompt", prompt), ("a step", step))):
            kept[i][name] = kernels.rows(found)
            say(f"    {name}, {what}:\n{kernels.table(found, SHOWN)}")
    return kept


def _line(got: Result, work: models.Work, prompt: bool, took: str, times: Mapping[str, list[float]]) -> str:
    r, tokens = got.record, work.rows * (work.tokens if prompt else 1)
    rate = lambda us: f"{1e6 * tokens / us:.0f} tokens/s"
    peers = ", ".join(f"{name} {us:.0f} us ({rate(us)})" for name, us in r.peers.items())
    text = (
        f"llm {r.config} {r.dtype}: {r.ours_us:.0f} us, {rate(r.ours_us)}, {100 * (r.bound_frac or 0):.0f} % of bound"
    )
    if peers:
        spread = timing.spread(times["ours"], times[min(r.peers, key=r.peers.__getitem__)])
        text += f"; {peers}; ratio {r.ratio:.3f} (spread {spread:.3f}, {len(times['ours'])} samples)"
    return f"{text} [{took}]"


def _ours(work: models.Work, ids: jax.Array) -> Runner:
    rows = np.asarray(ids)

    def whole():
        stream = work.lm.stream(rows, work.steps + 1, eos=None)
        for _ in stream:
            pass
        return stream.stats.prefill_seconds, stream.stats.decode_seconds / work.steps

    def prompt():
        before = _bytes_in_use()
        stream = work.lm.stream(rows, work.steps + 1, eos=None)
        next(stream)
        seconds = stream.stats.prefill_seconds
        del stream
        jax.block_until_ready(ids + 0)  # behind the steps that are under way
        _given_back(before)
        return seconds

    return Runner(whole, prompt, lambda: list(work.lm.stream(rows, 1, eos=None)))


def _bytes_in_use() -> int:
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


def _given_back(before: int) -> None:
    """Waits until no more bytes are in use than before. What an unfinished stream held is given back a moment after its
    steps have ended; until then the next prompt would get other places in memory than the ones that its program has a
    graph for, and make that anew, which no stream does that follows a finished one."""
    until = time.monotonic() + 0.2
    while _bytes_in_use() > before and time.monotonic() < until:
        time.sleep(1e-4)


def _plain(work: models.Work, ids: jax.Array, attention: plain.Attention = None) -> Runner:
    lm, count = work.dense or work.lm, work.steps
    w, s = plain.dense(plain.weights_of(lm), jnp.bfloat16), plain.sizes_of(lm, attention)

    def begun():
        start = time.perf_counter()
        out = jax.block_until_ready(plain.prefill(w, ids, s=s, slots=work.tokens + count))
        return time.perf_counter() - start, out

    def whole():
        seconds, (tokens, caches) = begun()
        start = time.perf_counter()
        jax.block_until_ready(plain.steps(w, tokens, caches, s=s, length=work.tokens, count=count))
        return seconds, (time.perf_counter() - start) / count

    return Runner(whole, lambda: begun()[0], begun)


def _torch(work: models.Work, ids: jax.Array) -> Runner:
    w = plain.dense(plain.weights_of(work.lm), jnp.bfloat16)
    decoder = torch_decoder.TorchDecoder(w, plain.sizes_of(work.lm, None), ids, work.steps)
    prompt, step = torch_decoder.Graph(decoder.prompt), torch_decoder.Graph(decoder.step)
    alone = functools.partial(prompt.seconds, 1)
    return Runner(lambda: (alone(), step.seconds(work.steps)), alone, alone)


def _ours_dense(work: models.Work, ids: jax.Array) -> Runner:
    assert work.dense is not None
    return _ours(dataclasses.replace(work, lm=work.dense), ids)


_RUNNERS: dict[str, Callable[[models.Work, jax.Array], Runner]] = {
    "ours": _ours,
    "ours, dense": _ours_dense,
    "plain jnp": functools.partial(_plain, attention="cudnn"),
    "plain jnp, XLA's attention": _plain,
    "torch": _torch,
}


def _left_out(peer: str, work: models.Work, others: Mapping[str, Runner], options: Options) -> bool:
    """Whether this run goes without a peer, because it is asked to, or it cannot run or need not."""
    needless = peer.startswith("plain jnp,") and "plain jnp" in others
    needless |= (peer == "torch" and work.dense is not None) or (peer == "ours, dense" and work.dense is None)
    needless |= not peer.startswith("ours") and not isinstance(work.lm.config, LlamaConfig)
    missing = (peer == "torch" and torch_peers.why_not()) or (peer == "plain jnp" and jax.default_backend() != "gpu")
    return bool(peer.startswith(options.without or ("\0",)) or needless or missing)


def _smollm2(machine: Any, options: Options, say: Callable[[str], None]) -> Iterator[Result]:
    try:
        default_model()
    except ModelError as missing:
        say(f"smollm2 is left out: {missing}")
        return
    if not any(options.takes(text, "q4_1") for text in llm.CONFIGS):
        return
    for got in llm.results(machine, options.repeats):
        r = got.record
        say(f"smollm2 {r.config}: {r.ours_us} us a token ({1e6 / r.ours_us:.0f} tokens/s), peers {r.peers}")
        yield got
