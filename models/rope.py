"""Rotary positions (Su et al. 2021): the frequencies of a model, and how they are stretched for longer contexts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jtile._errors import ModelError
from jtile.models.entries import number


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: "linear" (all by `factor`), "llama3" (low frequencies by `factor`), or
    "factors" (frequency i by `factors[i]`, as GGUF files store it)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotation of the pairs of `size` numbers a head; `theta` is the base of the frequencies."""

    size: int
    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self):
        if self.size % 2:
            raise ModelError(f"rotary positions need an even head size, got {self.size}")

    def frequencies(self) -> np.ndarray:
        """float32 [size / 2]: radians that pair i turns per position: theta^(-2i / size), stretched as asked."""
        base = 1.0 / self.theta ** (np.arange(0, self.size, 2, dtype=np.float64) / self.size)
        return (base if self.scaling is None else _stretched(base, self.scaling)).astype(np.float32)


def _stretched(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "factors":
        return base / np.asarray(scaling.factors)
    if scaling.kind == "linear":
        return base / scaling.factor
    # llama3: keep short wavelengths, divide long ones by the factor, blend linearly in between (in periods per context)
    periods = scaling.original_max_length * base / (2 * math.pi)
    keep = np.clip((periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return base * (keep + (1 - keep) / scaling.factor)


def read_rope(config: Mapping, size: int) -> Rope:
    """From a `config.json` of transformers 5 (`rope_parameters`) or of the hub (`rope_theta`, `rope_scaling`).

    Raises:
      ModelError: an unknown kind of scaling, or one that lacks a number.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = number(config, "rope_theta", 10000.0, float)
    return Rope(size, number(rope, "rope_theta", theta, float), read_scaling(rope, config))


def read_scaling(rope: Mapping, config: Mapping) -> RopeScaling | None:
    """The scaling that the entries `rope` describe; `config` gives the context where they do not."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", number(rope, "factor", kind=float))
    if kind == "llama3":
        factor, low, high = (number(rope, key, kind=float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        longest = number(config, "max_position_embeddings", 8192)
        return RopeScaling(kind, factor, low, high, number(rope, "original_max_position_embeddings", longest))
    raise ModelError(f"unknown rope scaling {kind!r}; jtile.models implements 'default', 'linear' and 'llama3'")
