"""`python -m benchmarks devices --models`: steps of language models of published shapes with random weights, cut over
all devices by kernels that talk to each other, beside the same step on one of them."""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.data import normal
from benchmarks.gpu.models import DENSE, SHAPES, TINY
from jtile.models import LanguageModel
from jtile.models.checkpoint import Checkpoint
from jtile.models.cuts import cut
from jtile.models.families import read_config
from jtile.models.mesh import Devices

PROMPT, STEPS, REPEATS = 16, 64, 3
WORKS = (("Llama-3.1-8B", "tensor", 1), ("Llama-3.1-8B", "tensor", 64), ("Qwen3-30B-A3B", "expert", 32))
TINY_WORKS = (("tiny", "tensor", 2), ("tiny mixture", "expert", 4))
_SCALE = 0.02


@dataclasses.dataclass(frozen=True)
class Drawn(Checkpoint):
    """A checkpoint of random weights, of which each part is drawn on the device that has it. The parts of one tensor
    do not make a whole that is the same for any cut: only times are measured."""

    head: bool = True

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output head, too."""
        return not self.head

    def sample(self) -> jax.Array:
        """An array with the dtype of the weights; no tensor is stored."""
        return jnp.zeros((1, 1), DENSE)

    def unit(self) -> int:
        """One column, since there are no groups."""
        return 1

    def weight(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """The whole tensor."""
        return self._drawn(name, shape, 0)

    def part(self, name: str, shape: tuple[int, ...], cuts: Mapping[int, np.ndarray]) -> jax.Array:
        """Random numbers in the shape of the part; a tensor that is not cut is the same on all devices."""
        if len(shape) == 1:
            found = cut(self.weight(name, shape), dict(cuts), name)
            assert isinstance(found, jax.Array)
            return found
        sizes = tuple(len(cuts[d]) if d in cuts else n for d, n in enumerate(shape))
        return self._drawn(name, sizes, sum(int(index[0]) + 1 for index in cuts.values()))

    def _drawn(self, name: str, shape: tuple[int, ...], seed: int) -> jax.Array:
        if len(shape) == 1:
            return (jnp.ones if name.endswith("norm.weight") else jnp.zeros)(shape, jnp.float32)
        return normal((zlib.crc32(name.encode()) + seed) >> 1, *shape, dtype=DENSE, scale=_SCALE)


def made(config: dict, mesh: Mesh | None, role: str) -> LanguageModel:
    """A model on one device, or cut over those of a mesh."""
    source = Drawn("a shape", read_config(config, "a shape"), {}, None, (), not config["tie_word_embeddings"])
    devices = None if mesh is None else Devices.of(mesh, {role: mesh.axis_names[0]}, source.config)
    return LanguageModel.from_checkpoint(source, DENSE, devices=devices)


def step_us(lm: LanguageModel, rows: int, steps: int) -> float:
    """Microseconds of a step, the median of a few generations."""
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, (rows, PROMPT))

    def run() -> float:
        stream = lm.stream(ids, steps + 1, eos=None)
        for _ in stream:
            pass
        return 1e6 * stream.stats.decode_seconds / steps

    run()
    return statistics.median(run() for _ in range(REPEATS))


def measure(count: int, tiny: bool) -> list[dict[str, Any]]:
    """A record for each line of the table."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    works, shapes, steps = (TINY_WORKS, TINY, 4) if tiny else (WORKS, SHAPES, STEPS)
    records: list[dict[str, Any]] = []
    for name, role, rows in works:
        record: dict[str, Any] = {"work": f"{name}, a step", "size": f"{rows} rows, {role}", "devices": count,
                                  "tiny": tiny}  # fmt: skip
        for side, over in (("one_step", None), ("jtile", mesh)):
            lm = made(shapes[name], over, role)
            record[f"{side}_us"] = round(step_us(lm, rows, steps), 1)
            del lm
            gc.collect()
        record["ratio"] = round(record["one_step_us"] / record["jtile_us"], 2)
        print(json.dumps(record), file=sys.stderr, flush=True)
        records.append(record)
    return records
