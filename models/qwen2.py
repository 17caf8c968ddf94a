"""Qwen2 and Qwen2.5: Llama's decoder with biases of queries, keys and values, and windows from some layer on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .qwen3 import Qwen3Config


def from_hf(config: Mapping) -> Qwen3Config:
    """Reads the sizes from a `config.json` of transformers 5 or of the hub.

    Raises:
      ModelError: a required key is missing, or the model uses a variant that `jtile.models` does not implement.
    """
    found = Qwen3Config.from_hf(config)  # Qwen3's attention has norms where that of Qwen2 has biases
    return dataclasses.replace(found, attention=dataclasses.replace(found.attention, norm_eps=None, biased=True))
