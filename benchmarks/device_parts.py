"""Random weights for models over several devices, of which each part is drawn on the device that has it."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.data import normal
from benchmarks.gpu.models import DENSE, SCALE, float8, is_table
from jtile.models import LanguageModel
from jtile.models.checkpoint import Checkpoint
from jtile.models.cuts import cut
from jtile.models.families import read_config
from jtile.models.mesh import Devices
from jtile.ops import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Drawn(Checkpoint):
    """A checkpoint of random weights, of which each part is drawn on the device that has it. The parts of one tensor
    do not make a whole that is the same for any cut: only times are measured.

    head: whether it has an output head beside the embedding; stored: "bfloat16", or "fp8" for all matrices but those
    of tables and routers."""

    head: bool = True
    stored: str = DENSE

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

    def weight(self, name: str, shape: tuple[int, ...]) -> jax.Array | QuantizedTensor:
        """The whole tensor."""
        return self._drawn(name, shape, 0)

    def part(self, name: str, shape: tuple[int, ...], cuts: Mapping[int, np.ndarray]) -> jax.Array | QuantizedTensor:
        """Random numbers in the shape of the part; a tensor that is not cut is the same on all devices."""
        if len(shape) == 1:
            return cut(self.weight(name, shape), dict(cuts), name)
        sizes = tuple(len(cuts[d]) if d in cuts else n for d, n in enumerate(shape))
        return self._drawn(name, sizes, sum(int(index[0]) + 1 for index in cuts.values()))

    def _drawn(self, name: str, shape: tuple[int, ...], more: int) -> jax.Array | QuantizedTensor:
        seed = (zlib.crc32(name.encode()) + more) >> 1
        if len(shape) == 1:
            return (jnp.ones if name.endswith("norm.weight") else jnp.zeros)(shape, jnp.float32)
        if self.stored == "fp8" and not is_table(name):
            return float8(seed, *shape)
        return normal(seed, *shape, dtype=DENSE, scale=SCALE)


def made(config: dict, mesh: Mesh | None, role: str, stored: str = DENSE) -> LanguageModel:
    """A model on one device, or cut over those of a mesh."""
    tied = config["tie_word_embeddings"]
    source = Drawn("a shape", read_config(config, "a shape"), {}, None, (), head=not tied, stored=stored)
    devices = None if mesh is None else Devices.of(mesh, {role: mesh.axis_names[0]}, source.config)
    return LanguageModel.from_checkpoint(source, DENSE, devices=devices)
