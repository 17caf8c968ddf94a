"""Mistral: Llama whose attention sees a window of the newest keys (Jiang et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .entries import number
from .llama import LlamaConfig


def from_hf(config: Mapping) -> LlamaConfig:
    """From a `config.json` of transformers 5 or of the hub; no `sliding_window` (or null): all keys are seen.

    Raises:
      ModelError: a required key is missing, or the model uses a variant that `jtile.models.llama` does not implement.
    """
    plain = LlamaConfig.from_hf(config)
    window = None if config.get("sliding_window") is None else number(config, "sliding_window")
    return dataclasses.replace(plain, attention=dataclasses.replace(plain.attention, window=window))
