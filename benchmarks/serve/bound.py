"""What no engine can exceed on the GPU at hand: how long a load's products and its reads of keys and values take, at
rates that are measured in the same run."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.gpu import models
from benchmarks.serve.load import Load
from jtile.models import LanguageModel
from jtile.models.layers import linear
from jtile.ops import QuantizedTensor

# Seconds of products before the clock starts, and behind that: a card runs faster until it has drawn its full power
# for a while.
WARM, LONG = 1.0, 1.5
FIELDS = {"watts": "power.draw", "limit_watts": "power.limit", "mhz": "clocks.sm", "top_mhz": "clocks.max.sm"}


def of_load(lm: LanguageModel, load: Load, rows: int) -> dict:
    """The bounds of a load, whose requests come at once, on a dense or fp8 model that attends to all tokens.

    Args:
      lm: the model, of `benchmarks.gpu.models`. load: the load. rows: how many rows its products are measured with.
    Returns:
      New tokens a second at most if reads and products follow each other (`apart_tokens_per_s`) and if they hide each
      other wholly (`beside_tokens_per_s`), and what that follows from: operations, bytes, the rates that were measured,
      and what the card drew meanwhile.
    """
    tiny = rows < 1024  # only to try the code
    warm, long = (0.0, 0.01) if tiny else (WARM, LONG)
    found: dict = {"product_rows": rows}
    for name, product in _products(lm):
        meter = _Meter()
        rate = _rate(*_pass_of(lm, product, rows), warm, long, meter)
        found |= {f"{name}_tflops": rate / 1e12, **{f"{name}_{key}": value for key, value in meter.read.items()}}
    rate = 1e12 * max(value for key, value in found.items() if key.endswith("_tflops"))
    read = _read_rate(1 << (20 if tiny else 31), long)
    operations, moved = work_of(lm, load)
    products, reads = operations / rate, moved / read
    new = load.requests * load.answer.median
    found |= {"read_tb_per_s": read / 1e12, "operations": operations, "kv_bytes": moved}
    found |= {"products_s": products, "reads_s": reads}
    found |= {"apart_tokens_per_s": new / (products + reads), "beside_tokens_per_s": new / max(products, reads)}
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def work_of(lm: LanguageModel, load: Load) -> tuple[int, int]:
    """(operations of all products, attention of prompts among them; bytes of keys and values that the steps of answers
    read) of a load. Each token goes through the weights of the blocks once, each new one through the output's, too."""
    prompt, answer, requests = load.prompt.median, load.answer.median, load.requests
    blocks = sum(math.prod(w.shape) for w in _weights(lm, lm.config.num_layers))
    head = lm.config.vocab_size * lm.config.hidden_size
    c = models.attention_of(lm)
    scores = prompt * (prompt + 1) // 2 * c.heads * lm.config.num_layers
    operations = 2 * (prompt + answer - 1) * blocks + 2 * answer * head + 4 * scores * c.head_dim
    width = jnp.dtype(lm.cache_dtype or lm.dtype).itemsize * lm.config.num_layers * models.entry_of(c)
    behind = sum(range(prompt + 1, prompt + answer))  # the first new token comes with the prompt
    return requests * operations, requests * behind * width


def _weights(lm: LanguageModel, blocks: int) -> list:
    return [w for block in list(lm.model.blocks)[:blocks] for w in models.matrices(block)]


def _products(lm: LanguageModel) -> list[tuple[str, Callable]]:
    """The products to be measured by name: the model's own, and those of XLA where the weights are dense, which it
    takes from cuBLAS."""
    dense = not any(isinstance(w, QuantizedTensor) for w in _weights(lm, 1))
    xla = lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
    return [("ours", linear), *([("xla", xla)] if dense else [])]


def _pass_of(lm: LanguageModel, product: Callable, rows: int) -> tuple[Callable[[], jax.Array], int]:
    """(a call of all products of four blocks with so many random rows each, its operations)."""
    weights = _weights(lm, 4)
    xs = {width: normal(width, rows, width, dtype="bfloat16") for width in {w.shape[1] for w in weights}}

    @jax.jit
    def go(weights, xs):
        total = jnp.zeros((), jnp.float32)
        for w in weights:  # the barrier keeps the whole product, of which one number is needed
            total += jax.lax.optimization_barrier(product(xs[w.shape[1]], w))[0, 0].astype(jnp.float32)
        return total

    return lambda: go(weights, xs), 2 * rows * sum(math.prod(w.shape) for w in weights)


def _rate(call: Callable[[], jax.Array], work: int, warm: float, long: float, meter: _Meter | None = None) -> float:
    """`work` of a call a second, while calls follow each other for `long` seconds, behind `warm` ones; the meter reads
    in the middle."""

    def run(seconds: float) -> float:
        began, count, took = time.perf_counter(), 0, 0.0
        while took < seconds:
            jax.block_until_ready([call() for _ in range(4)])
            count, took = count + 4, time.perf_counter() - began
        return count / max(took, 1e-9)

    jax.block_until_ready(call())
    run(warm)
    if meter is not None:
        meter.start(long / 2)
    return work * run(long)


def _read_rate(size: int, long: float) -> float:
    """Bytes a second that a sum over an array of so many bytes reads."""
    x = jnp.ones((size // 2,), jnp.bfloat16)
    add = jax.jit(lambda x: jnp.sum(x.astype(jnp.float32)))
    return _rate(lambda: add(x), size, 0.0, long / 3)


class _Meter:
    """What nvidia-smi says of the GPU in the middle of a measurement."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._found: dict[str, float] = {}

    def start(self, seconds: float) -> None:
        """Reads in so many seconds, in a thread."""
        if shutil.which("nvidia-smi"):
            self._thread = threading.Thread(target=self._ask, args=(seconds,), daemon=True)
            self._thread.start()

    def _ask(self, seconds: float) -> None:
        time.sleep(seconds)
        of = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
        said = subprocess.run([*query, "-i", of], capture_output=True, text=True).stdout
        for name, value in zip(FIELDS, said.split(","), strict=False):
            try:
                self._found[name] = float(value)
            except ValueError:  # a field that this driver does not tell
                continue

    @property
    def read(self) -> dict[str, float]:
        """The numbers by name; empty where there are none."""
        if self._thread is not None:
            self._thread.join(20)
        return self._found
