"""What a model file gives to a model: its configuration, its tensors by name, its tokenizer and its end tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from .config import DecoderConfig
from .cuts import border, cut
from .tokenizer import Tokenizer


@runtime_checkable
class Cuttable(Protocol):
    """Reads a tensor, or only a part of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def part(self, cuts: Mapping[int, np.ndarray]) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened model file or folder. `tensors` maps the tensor names of transformers to functions that read them."""

    source: str
    config: DecoderConfig
    tensors: Mapping[str, Callable[[], jax.Array | QuantizedTensor]]
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...] = ()

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output head, too."""
        return "lm_head.weight" not in self.tensors

    def sample(self) -> jax.Array | QuantizedTensor:
        """A matrix that every family has, the output projection of the first attention: stored as the others are."""
        ending = ".self_attn.o_proj.weight"
        found = [name for i in range(self.config.num_layers) if (name := f"model.layers.{i}{ending}") in self.tensors]
        if not found:
            raise self._lacks(f"model.layers.0{ending}")
        return self.tensors[found[0]]()

    def unit(self) -> int:
        """How many columns of a matrix stay together where it is cut: those of a group with one scale, or fewer where
        `cuts.cut` can divide the group."""
        ends = ("self_attn.o_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj")
        first = {end: next((name for name in self.tensors if name.endswith(end)), None) for end in ends}
        found = [self.tensors[name]() for name in first.values() if name is not None]
        quantised = [w for w in found if isinstance(w, QuantizedTensor)]
        return max((border(w) for w in quantised), default=1)

    def _lacks(self, name: str) -> ModelError:
        return ModelError(f"{self.source} lacks the tensor {name}; the file is incomplete, download it again")

    def weight(self, name: str, shape: tuple[int, ...]) -> jax.Array | QuantizedTensor:
        """The tensor `name`. A stack of quantised matrices lies as [experts, out, in] where floats of that name lie as
        [experts, in, out].

        Raises:
          ModelError: the tensor is missing, or its shape is not `shape`.
        """
        if name not in self.tensors:
            raise self._lacks(name)
        tensor = self.tensors[name]()
        self._check(name, tensor, shape)
        return tensor

    def part(self, name: str, shape: tuple[int, ...], cuts: Mapping[int, np.ndarray]) -> jax.Array | QuantizedTensor:
        """The part of the tensor `name`, of the given shape, at an index along some of its dimensions: see `cuts.cut`.
        If the tensor holds floats in a safetensors file, only this part is read.

        Raises:
          ModelError: as `weight`, or a quantised tensor cannot be cut so.
        """
        if name not in self.tensors:
            raise self._lacks(name)
        read = self.tensors[name]
        if isinstance(read, Cuttable) and cuts:
            self._check(name, read, shape)
            return read.part(cuts)
        return cut(self.weight(name, shape), dict(cuts), name, turned=len(shape) == 3)

    def _check(self, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
        stack = isinstance(tensor, QuantizedTensor) and tensor.ndim == 3
        found = tuple(tensor.shape) if not isinstance(tensor, tuple) else (
            sum(part.shape[0] for part in tensor), *tensor[0].shape[1:]
        )  # fmt: skip
        if found != shape and not (stack and (found[0], found[2], found[1]) == shape):
            raise ModelError(
                f"the tensor {name} of {self.source} has the shape {found}; its configuration asks for {shape}"
            )
