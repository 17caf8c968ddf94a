"""Mistral: Llama whose attention sees a window of the newest keys (Jiang et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .entries import number
from .llama import LlamaConfig


def from_hf(config: Mapping) -> LlamaConfig:
    """Reads the sizes from a `config.json` of transformers 5 or of the hub; without `sliding_window` (or with null) a
    token sees all keys.

    Raises:
      ModelError: a required key is missing, or the model uses a variant that `jtile.models.llama` does not implement.
    """
    plain = LlamaConfig.from_hf(config)
    window = None if config.get("sliding_window") is None else number(config, "sliding_window")
    return dataclasses.replace(plain, attention=dataclasses.replace(plain.attention, window=window))
