"""Rotary positions (Su et al. 2021): the frequencies of a model, and how they are stretched for longer contexts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jtile._errors import ModelError

from .entries import number, table


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: "linear" (all are divided by `factor`), "llama3" (low frequencies are),
    "yarn" (as llama3, with a ramp over pairs between those that turn `beta_fast` and `beta_slow` times in the original
    context, in whole numbers if `whole_pairs`; cos and sin are multiplied by `attention_factor`), or "factors"
    (frequency i is divided by `factors[i]`, as GGUF files store it)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    whole_pairs: bool = True


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotation of the pairs of `size` numbers a head; `theta` is the base of the frequencies. `rotated`: how many of
    these numbers the rotation turns, None for all; the frequencies of the other pairs are 0, see `order`. `adjacent`:
    the pairs of a checkpoint are (2i, 2i + 1). `tempered` belongs to a rope that turns nothing: (a, n), where queries
    at position p are multiplied by 1 + a ln(1 + floor((p + 1) / n))."""

    size: int
    theta: float
    scaling: RopeScaling | None = None
    rotated: int | None = None
    adjacent: bool = False
    tempered: tuple[float, float] | None = None

    def __post_init__(self):
        if self.size % 2:
            raise ModelError(f"rotary positions need an even head size, got {self.size}")
        if self._turned % 2 or not 0 <= self._turned <= self.size:
            raise ModelError(
                f"rotary positions turn an even number of the {self.size} features of a head, got {self._turned}"
            )
        try:
            with np.errstate(all="ignore"):
                finite = np.isfinite(self.frequencies()).all()
        except (ArithmeticError, ValueError):  # YaRN divides and takes logarithms on the host
            finite = False
        if not finite:
            raise ModelError(
                f"rotary positions with the base {self.theta} and the scaling {self.scaling} have no finite "
                "frequencies; correct rope_theta or the scaling in the model's configuration"
            )

    def frequencies(self) -> np.ndarray:
        """float32 [size / 2]: radians that pair i turns per position: theta^(-2i / rotated), stretched as asked, and 0
        for the pairs that are not turned."""
        base = 1.0 / self.theta ** (np.arange(0, self._turned, 2, dtype=np.float64) / max(self._turned, 1))
        found = (base if self.scaling is None else self._stretched(base, self.scaling)).astype(np.float32)
        return np.pad(found, (0, (self.size - self._turned) // 2))

    @property
    def _turned(self) -> int:
        return self.size if self.rotated is None else self.rotated

    def order(self) -> np.ndarray | None:
        """The order in which the features of a head stand, int [size], so that the pairs (i, i + size / 2) are first
        those that a checkpoint turns, (i, i + rotated / 2), and then the others. None: the order of the checkpoint."""
        if self.adjacent:
            return np.arange(self.size).reshape(-1, 2).T.reshape(-1)
        if self.rotated in (None, 0, self.size):
            return None
        low, high = np.split(np.arange(self.rotated), 2)
        rest = np.split(np.arange(self.rotated, self.size), 2)
        return np.concatenate([low, rest[0], high, rest[1]])

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def _stretched(self, base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
        if scaling.kind == "factors":
            return base / np.asarray(scaling.factors)
        if scaling.kind == "linear":
            return base / scaling.factor
        if scaling.kind == "yarn":
            slowed = self._slowed(scaling)
            return base * (1 - slowed) + base / scaling.factor * slowed
        # llama3: keep short wavelengths, divide long ones by the factor, blend between them (in periods per context)
        periods = scaling.original_max_length * base / (2 * math.pi)
        between = scaling.high_freq_factor - scaling.low_freq_factor
        keep = np.clip((periods - scaling.low_freq_factor) / between, 0, 1) if between else (
            (periods > scaling.high_freq_factor).astype(np.float64)
        )  # fmt: skip
        return base * (keep + (1 - keep) / scaling.factor)

    def _slowed(self, scaling: RopeScaling) -> np.ndarray:
        """float64 [rotated / 2] in [0, 1]: how much YaRN slows each pair (Peng et al. 2023)."""
        # pair i turns L theta^(-2i / size) / 2 pi times in L positions
        size = self._turned
        pair = lambda turns: size * math.log(scaling.original_max_length / (turns * 2 * math.pi), self.theta) / 2
        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if scaling.whole_pairs else (low, high)
        low, high = max(low, 0), min(high, size - 1)
        return np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's scale of queries and keys for a context that is `factor` times longer: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def read_rope(config: Mapping, size: int, rotated: int | None = None, adjacent: bool = False) -> Rope:
    """Reads the rope from a `config.json` of transformers 5 (`rope_parameters`) or of the hub (`rope_theta`,
    `rope_scaling`); `rotated`, `adjacent`: see `Rope`.

    Raises:
      ModelError: the kind of scaling is unknown, or lacks a number.
    """
    rope = table(config, "rope_parameters", "rope_scaling")
    theta = number(config, "rope_theta", 10000.0, float)
    return Rope(size, number(rope, "rope_theta", theta, float), read_scaling(rope, config), rotated, adjacent)


def read_scaling(rope: Mapping, config: Mapping) -> RopeScaling | None:
    """The scaling that the entries `rope` describe; `config` gives the original context where they do not."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", number(rope, "factor", kind=float))
    if kind == "llama3":
        factor, low, high = (number(rope, key, kind=float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        longest = number(config, "max_position_embeddings", 8192)
        return RopeScaling(kind, factor, low, high, number(rope, "original_max_position_embeddings", longest))
    if kind == "yarn":
        return _read_yarn(rope, config)
    raise ModelError(f"unknown rope scaling {kind!r}; jtile.models implements 'default', 'linear', 'llama3' and 'yarn'")


def _read_yarn(rope: Mapping, config: Mapping) -> RopeScaling:
    factor = number(rope, "factor", kind=float)
    attention = yarn_scale(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        of_rotated, of_all = (number(rope, key, kind=float) for key in ("mscale", "mscale_all_dim"))
        attention = yarn_scale(factor, of_rotated) / yarn_scale(factor, of_all)
    longest = number(config, "max_position_embeddings", 8192)
    return RopeScaling(
        "yarn",
        factor,
        original_max_length=number(rope, "original_max_position_embeddings", longest),
        beta_fast=number(rope, "beta_fast", 32.0, float),
        beta_slow=number(rope, "beta_slow", 1.0, float),
        attention_factor=number(rope, "attention_factor", attention, float),
        whole_pairs=bool(rope.get("truncate", True)),
    )
