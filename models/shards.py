"""The weights of one device of a mesh: parts of a checkpoint's tensors, cut as they are read.

| what | by axis | how it is cut |
|---|---|---|
| heads: rows of queries, keys, values and sinks, columns of the output | tensor | neighbours, with their keys |
| features of an MLP: rows of gate and up, columns of down | tensor | equal shares, at borders of groups |
| the vocabulary: rows of embedding and output head | tensor | equal shares |
| experts | expert | equal shares |
| biases of sums over devices | tensor | the first device has them |
| everything else | | whole on each device |

Shares have one size. Where devices do not divide a number, the last shares end with zeros, which change no sum.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from .checkpoint import Checkpoint
from .cuts import NONE


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a device stands along an axis of `count` devices."""

    index: int = 0
    count: int = 1

    def share(self, size: int, unit: int = 1) -> np.ndarray:
        """The indices of this device's share of `size` rows, in whole units."""
        each = -(-size // (unit * self.count)) * unit
        found = np.arange(self.index * each, (self.index + 1) * each)
        return np.where(found < size, found, NONE)


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of one device: `queries` and `keys` (of keys and values), indices into those of the model. Every device
    has equally many. Its i-th group of queries attends to its i-th head of keys."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def at(cls, heads: int, kv_heads: int, place: Place) -> Heads:
        """The heads of the device at `place`, for a model with so many heads. With fewer heads of keys than devices,
        several devices have the same one and share its queries."""
        group = heads // kv_heads
        if kv_heads >= place.count:
            keys = place.share(kv_heads)
            queries = np.where(keys[:, None] == NONE, NONE, keys[:, None] * group + np.arange(group)).reshape(-1)
        else:
            sharing = place.count // kv_heads
            key = place.index // sharing
            keys = np.array([key if key < kv_heads else NONE])
            own = Place(place.index % sharing, sharing).share(group)
            queries = np.where((own == NONE) | (keys == NONE), NONE, keys * group + own)
        return cls(tuple(queries.tolist()), tuple(keys.tolist()))


# endings of names of tensors -> what is cut
RULES = tuple(
    (re.compile(rf"\.({names})$"), kind)
    for names, kind in (
        (r"self_attn\.(q|q_b|kv_b)_proj\.(weight|bias)|self_attn\.sinks", "queries"),
        (r"self_attn\.[kv]_proj\.(weight|bias)", "keys"),
        (r"self_attn\.o_proj\.weight", "mixed"),
        (r"self_attn\.o_proj\.bias", "once"),
        (r"(gate_proj|up_proj|w1|w3)\.weight", "features"),
        (r"(down_proj|w2)\.weight", "inner features"),
        (r"feed_forward\.experts\.gate_up_proj", "halves"),
        (r"experts\.gate_up_proj(_bias)?", "pairs"),
        (r"experts\.down_proj", "inner of stacks"),
        (r"experts\.down_proj_bias", "once"),
        (r"(embed_tokens|lm_head)\.weight", "vocabulary"),
    )
)
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Share:
    """What one device has of the weights of a model.

    heads, kv_heads: numbers of heads of the model; of: the heads of this device. tensor, expert: its places along these
    axes. experts: the experts of a mixture of the model. unit: how many features stay together, those of a group of
    quantised matrices.
    """

    heads: int
    kv_heads: int
    of: Heads
    tensor: Place
    expert: Place
    experts: int
    unit: int

    def has(self, name: str) -> bool:
        """Whether this device has the tensor: not if it belongs to an expert of another device."""
        expert = EXPERT.search(name)
        return expert is None or int(expert[1]) in self.expert.share(self.experts)

    def cuts(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, np.ndarray]]:
        """(the shape of the tensor of the model, the index of this device's part along each dimension that is cut).
        `shape` has the heads of this device, and the features, experts and tokens of the model."""
        kind = _kind(name)
        cuts: dict[int, np.ndarray] = {}
        if ".experts." in name and EXPERT.search(name) is None and self.expert.count > 1:
            cuts[0] = self.expert.share(shape[0])
        whole = shape
        if kind in ("queries", "keys", "mixed"):
            dim = 1 if kind == "mixed" else 0
            of, total = (self.of.keys, self.kv_heads) if kind == "keys" else (self.of.queries, self.heads)
            each = shape[dim] // len(of)
            whole = (*shape[:dim], total * each, *shape[dim + 1 :])
            cuts[dim] = _spread(np.array(of), each)
        elif kind in ("features", "vocabulary"):
            cuts[0] = self.tensor.share(shape[0], self.unit if kind == "features" else 1)
        elif kind == "inner features":
            cuts[1] = self.tensor.share(shape[1], self.unit)
        elif kind == "halves":
            half = shape[-1] // 2
            own = self.tensor.share(half, self.unit)
            cuts[len(shape) - 1] = np.concatenate([own, np.where(own == NONE, NONE, own + half)])
        elif kind == "pairs":
            cuts[len(shape) - 1] = _spread(self.tensor.share(shape[-1] // 2, self.unit), 2)
        elif kind == "inner of stacks":
            cuts[1] = self.tensor.share(shape[1], self.unit)
        return whole, _needed(cuts, whole)


@dataclasses.dataclass(frozen=True)
class Part:
    """A source of weights (see `config.WeightSource`) that gives those of one device."""

    checkpoint: Checkpoint
    share: Share

    def __call__(self, name: str, shape: tuple[int, ...]) -> Any:
        """The part of the tensor `name` that a module of this device asks for; `shape`: see `Share.cuts`.

        Raises:
          ModelError: the tensor is missing, has another shape, or cannot be cut so.
        """
        if not self.share.has(name):
            return None
        found = self.checkpoint.part(name, *self.share.cuts(name, shape))
        return jnp.zeros_like(found) if _kind(name) == "once" and self.share.tensor.index else found


def _kind(name: str) -> str:
    return next((kind for pattern, kind in RULES if pattern.search(f".{name}")), "")


def _spread(index: np.ndarray, each: int) -> np.ndarray:
    """The indices of the rows of the heads `index`, which have `each` rows."""
    return np.where(index[:, None] == NONE, NONE, index[:, None] * each + np.arange(each)).reshape(-1)


def _needed(cuts: dict[int, np.ndarray], shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    return {dim: index for dim, index in cuts.items() if not np.array_equal(index, np.arange(shape[dim]))}
