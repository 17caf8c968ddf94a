"""LoRA adapters in files, in the form of the package `peft`: a folder with `adapter_config.json` and
`adapter_model.safetensors`, small updates of a model whose own files stay as they are."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jtile._errors import ModelError

from . import layers
from .cuts import take
from .decoder import Decoder
from .entries import table
from .folder import read_json
from .lora import TARGETS, LoRA, place_of, shape_of
from .mapped import Stored, TensorFile
from .shards import Share
from .whole import whole_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The modules of transformers that adapters change: where they stand in a block, and which of `lora.TARGETS` holds them.
MODULES = {
    "q_proj": ("self_attn", "qkv"), "k_proj": ("self_attn", "qkv"), "v_proj": ("self_attn", "qkv"),
    "o_proj": ("self_attn", "output"),
    "gate_proj": ("mlp", "gate"), "up_proj": ("mlp", "up"), "down_proj": ("mlp", "down"),
}  # fmt: skip
NAME = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d{1,6})\.(self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight"
)
# Entries of the configuration that ask for more than low-rank updates, and the values of those that do not.
PLAIN = {
    "use_dora": (False, None), "bias": ("none", None), "fan_in_fan_out": (False, None), "lora_bias": (False, None),
    "modules_to_save": ([], None), "layer_replication": ([], None), "trainable_token_indices": (None,),
}  # fmt: skip

Pair = tuple[np.ndarray, np.ndarray]  # a [rank, in] and b [out, rank], float32


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Low-rank updates of weights of a model.

    Attributes:
      source: the folder that it was read from.
      updates: {(block, one of `lora.TARGETS`): (a [rank, in], b [out, rank])}, float32. The weight W [out, in] becomes
        W + b a; the adapter's scale is part of b.
    """

    source: str
    updates: Mapping[tuple[int, str], Pair]


def read_adapter(path: str | os.PathLike, model: Decoder, share: Share | None = None) -> Adapter:
    """Reads the adapter in a folder, as `peft` or `save_adapter` wrote it, for a model.

    Args:
      path: the folder.
      model: the model whose weights the adapter changes.
      share: what one device has of a model that is cut over devices; `model` is then the part of that device.
    Returns:
      An `Adapter`.
    Raises:
      ModelError: a file is missing or damaged; the adapter is not a LoRA, or changes more than low-rank updates do
        (DoRA, biases, whole modules); or it belongs to a model with other blocks, shapes or weights.
    """
    path = Path(path)
    if not (path / CONFIG).exists():
        raise ModelError(f"there is no LoRA adapter at {path}; give a folder with {CONFIG} and {WEIGHTS}")
    config = read_json(path / CONFIG)
    _check_kind(config, path / CONFIG)
    pairs: dict[tuple[int, str], dict[str, Pair]] = {}
    for (block, module), halves in _halves(path).items():
        pair = _pair(config, path, f"layers.{block}.{MODULES[module][0]}.{module}", halves)
        pairs.setdefault((block, MODULES[module][1]), {})[module] = pair
    return Adapter(str(path), {place: _joined(model, share, path, place, found) for place, found in pairs.items()})


def _check_kind(config: dict, file: Path) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise ModelError(f"{file} is of the kind {config['peft_type']!r}; jtile reads adapters of the kind 'LORA'")
    for key, plain in PLAIN.items():
        if config.get(key) not in plain:
            raise ModelError(f"{file} has {key} = {config[key]!r}; jtile reads adapters of low-rank updates alone")


def _halves(path: Path) -> dict[tuple[int, str], dict[str, Stored]]:
    """The tensors "A" and "B" of each module of each block."""
    file, found = TensorFile(path / WEIGHTS), {}
    for name in sorted(file.entries):
        match = NAME.fullmatch(name)
        if not match or MODULES.get(match[3], ("",))[0] != match[2]:
            raise ModelError(
                f"{file.path} has the tensor {name}; jtile reads updates of {', '.join(MODULES)} in the model's blocks"
            )
        found.setdefault((int(match[1]), match[3]), {})[match[4]] = Stored(file, name)
    if not found:
        raise ModelError(f"{file.path} has no tensor; train the adapter and save it again")
    return found


def _pair(config: dict, path: Path, module: str, halves: Mapping[str, Stored]) -> Pair:
    """The update of one module; `module` is its name from `layers` on."""
    if halves.keys() != {"A", "B"}:
        raise ModelError(f"{path / WEIGHTS} has one half of the update of {module}; it is damaged, save it again")
    for half in halves.values():
        if half.dtype.name not in ("float32", "bfloat16", "float16") or len(half.shape) != 2:
            raise ModelError(f"the tensor {half.name} of {half.file.path} is {half.dtype}{half.shape}, no float matrix")
    a, b = (np.array(halves[half].host(), np.float32) for half in "AB")
    rank = a.shape[0]
    if b.shape[1] != rank or rank == 0:
        raise ModelError(f"{halves['B'].name} of {path / WEIGHTS} is {b.shape} beside a lora_A of {a.shape}")
    alpha = _alpha(config, module, rank, path / CONFIG)
    return a, b * np.float32(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _alpha(config: dict, module: str, rank: int, file: Path) -> float:
    """The alpha of a module: that of the pattern with which its name ends, or else the one for all modules."""
    alpha = config.get("lora_alpha", rank)
    for pattern, value in table(config, "alpha_pattern").items():
        if not re.fullmatch(r"[\w.]+", pattern):
            raise ModelError(f"{file} has the alpha_pattern {pattern!r}; jtile reads ends of names, as 'q_proj'")
        alpha = value if f".{module}".endswith(f".{pattern}") else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise ModelError(f"{file} has the alpha {alpha!r} for {module}; it is a number")
    return float(alpha)


def _joined(model: Decoder, share: Share | None, path: Path, place: tuple[int, str], found: Mapping[str, Pair]) -> Pair:
    """The update of one of the model's weights, put together from the updates of the modules that it holds."""
    block, target = place
    if block >= len(model.blocks):
        raise ModelError(f"{path} changes block {block} of a model; this one has {len(model.blocks)} blocks")
    out, inner = shape_of(getattr(place_of(model, block, target), target).get_value())
    rows = _rows(model, block, target, out)
    placed = []
    for module, pair in found.items():
        a, b = _part(share, path, block, module, pair, (len(range(out)[rows[module]]), inner))
        placed.append((a, _among(b, out, rows[module])))
    first = placed[0][0]
    if all(np.array_equal(a, first) for a, _ in placed):  # `save_adapter` writes the modules so
        return first, sum(b for _, b in placed)
    return np.concatenate([a for a, _ in placed]), np.concatenate([b for _, b in placed], axis=1)


def _part(share: Share | None, path: Path, block: int, module: str, pair: Pair, expected: tuple[int, int]) -> Pair:
    """The part of a module's update that a device has, where the module's matrix has the shape `expected`; the whole
    update if there is no share."""
    (a, b), of = pair, MODULES[module][0]
    given = whole = b.shape[0], a.shape[1]
    if share is None:
        whole = expected
    else:  # a device does not know how many features the model has
        asked = expected if of == "self_attn" else given
        whole, cuts = share.cuts(f"layers.{block}.{of}.{module}.weight", asked)
        a, b = (take(np, x, cuts[dim], dim) if dim in cuts else x for dim, x in ((1, a), (0, b)))
    if given != whole or (b.shape[0], a.shape[1]) != expected:
        size = f"{whole}" if given != whole else f"{expected} on each device"
        raise ModelError(
            f"{path} changes {module} of block {block} as a matrix of {given}; in this model it is {size}, so that the "
            "adapter is of another one"
        )
    return a, b


def _rows(model: Decoder, block: int, target: str, out: int) -> dict[str, slice]:
    """The modules that a weight of `out` rows holds, and which of its rows belong to each."""
    modules, attention = [module for module, (_, of) in MODULES.items() if of == target], model.blocks[block].attention
    if target in ("qkv", "output") and (getattr(attention, "recurrent", False) or attention.rope.order() is not None):
        raise ModelError(
            f"adapters do not fit the attention of block {block}, whose features stand in an order of their own; "
            "take one that changes MLPs alone"
        )
    if target != "qkv":
        return {modules[0]: slice(0, out)}
    config = attention.config
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    ends = [0, queries, queries + keys, out]
    return {module: slice(*ends[i : i + 2]) for i, module in enumerate(modules)}


def _among(b: np.ndarray, out: int, rows: slice) -> np.ndarray:
    """An array [out, rank] with b [rows, rank] in the given rows and zeros in the others."""
    whole = np.zeros((out, b.shape[1]), np.float32)
    whole[rows] = b
    return whole


def apply_adapter(model: Decoder, adapter: Adapter) -> Decoder:
    """Gives the weights of a model the updates of an adapter, as `lora.add_lora` does: they can be trained further.
    Changes the model in place, and returns it.

    Raises:
      ModelError: a weight has an update already.
    """
    for block, target in adapter.updates:
        place_of(model, block, target, free=True)
    for (block, target), (a, b) in adapter.updates.items():
        holder = place_of(model, block, target)
        setattr(holder, target, LoRA(getattr(holder, target), jnp.asarray(a), jnp.asarray(b), 1.0))
    return model


def save_adapter(model: Decoder, path: str | os.PathLike) -> Path:
    """Writes the low-rank updates that `lora.add_lora` gave a model: a folder that `peft`, `read_adapter` and
    `jtile serve --adapter` read. It appears when it is whole.

    Args:
      path: the new folder.
    Returns:
      The path.
    Raises:
      ModelError: the model has no updates, or the folder exists.
    """
    path, tensors, ranks = Path(path), {}, {}
    if path.exists():
        raise ModelError(f"{path} exists; give a new folder, or remove it")
    for block, target, update in _updates(model):
        a, b = np.asarray(update.a.get_value(), np.float32), np.asarray(update.b.get_value(), np.float32)
        for module, rows in _rows(model, block, target, b.shape[0]).items():
            name = f"layers.{block}.{MODULES[module][0]}.{module}"
            ranks[name] = a.shape[0]
            tensors[f"base_model.model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.model.{name}.lora_B.weight"] = np.float32(update.scale) * b[rows]
    if not tensors:
        raise ModelError("the model has no low-rank updates; jtile.models.lora.add_lora gives it some")
    most = max(ranks.values())
    other = {name: rank for name, rank in ranks.items() if rank != most}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True, "lora_dropout": 0.0,
        "target_modules": sorted({name.rsplit(".", 1)[1] for name in ranks}),
        "r": most, "lora_alpha": most, "rank_pattern": other, "alpha_pattern": other,  # the scale is in lora_B
    }  # fmt: skip
    with whole_folder(path) as made:
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, made / WEIGHTS)
    return path


def _updates(model: Decoder) -> Iterator[tuple[int, str, LoRA]]:
    """Yields each update of a model, after its block and its target."""
    for block, module in enumerate(model.blocks):
        for target in TARGETS:
            for holder in (module.attention, module.mlp):
                if isinstance(update := getattr(holder, target, None), LoRA):
                    yield block, target, update


class Stack(NamedTuple):
    """The updates of one weight by several adapters, side by side: see `layers.Routed`."""

    a: jax.Array
    b: jax.Array
    owner: jax.Array


def stacked(adapters: Sequence[Adapter], dtype: str) -> dict[str, Stack]:
    """The updates of adapters for `route`, in the dtype of activations; the numbers of adapters begin with 1."""
    found: dict[str, list[tuple[int, Pair]]] = {}
    for number, adapter in enumerate(adapters, 1):
        for (block, target), pair in adapter.updates.items():
            found.setdefault(f"{block}.{target}", []).append((number, pair))
    stacks = {}
    for place, updates in found.items():
        a = np.concatenate([a for _, (a, _) in updates])
        b = np.concatenate([b for _, (_, b) in updates], axis=1)
        owner = np.concatenate([np.full(a.shape[0], number, np.int32) for number, (a, _) in updates])
        stacks[place] = Stack(jnp.asarray(a, dtype), jnp.asarray(b, dtype), jnp.asarray(owner))
    return stacks


def route(model: Decoder, stacks: Mapping[str, Stack], of: jax.Array) -> Decoder:
    """Gives each row of a step the update of its adapter: `of`, int32 [rows], holds the number of each row's adapter, 0
    for the model itself. Changes the model in place, and returns it."""
    for place, stack in stacks.items():
        block, target = place.split(".")
        holder = place_of(model, int(block), target)
        setattr(holder, target, nnx.Param(layers.Routed(getattr(holder, target).get_value(), *stack, of)))
    return model
