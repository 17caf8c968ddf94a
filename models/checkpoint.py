"""What a model file gives to a model: its configuration, its tensors by name, its tokenizer and its end tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from .config import DecoderConfig
from .tokenizer import Tokenizer


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
        stack = isinstance(tensor, QuantizedTensor) and tensor.ndim == 3
        found = tuple(tensor.shape)
        if found != shape and not (stack and (found[0], found[2], found[1]) == shape):
            raise ModelError(
                f"the tensor {name} of {self.source} has the shape {tuple(tensor.shape)}; "
                f"its configuration asks for {shape}"
            )
        return tensor
