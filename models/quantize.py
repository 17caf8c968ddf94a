"""`jtile quantize`: a folder of safetensors with its layers quantised, in the published form of compressed-tensors.

| `to` | scheme | code |
|---|---|---|
| fp8 | float-quantized, a scale a row | e4m3, of x / scale |
| int8 | int-quantized, a scale a row | round(x / scale), -127 to 127 |
| int4 | pack-quantized, a scale a group | round(x / scale) + 8, 0 to 15, the largest of a group at 7.5 |
| q4_0, q8_0 | pack-quantized, a scale for each 32 | as ggml rounds |

Tensors are read, quantised and written one at a time; the new folder appears when it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jtile._errors import JtileError, ModelError
from jtile.ops import QuantizedTensor

from .entries import table
from .families import read_config
from .float8_formats import SCALES
from .folder import INDEX, read_json, stored_tensors
from .formats import CONFIGURATIONS
from .mapped import DTYPES, Stored
from .whole import whole_folder

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
# The layers that are multiplied quantised. The expansion of latent attention is none: it takes float weights.
LAYERS = re.compile(
    r"\.(self_attn\.([qkvo]|[qo]_[ab]|kv_a)_proj(_with_mqa)?"
    r"|linear_attn\.(in_proj_qkvz|out_proj)"
    r"|(mlp|feed_forward)\.(shared_experts?\.|experts\.\d+\.)?(gate|up|down)_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight$"
)
# Suffixes of tensors in a folder whose weights are quantised, even if its configuration says nothing of it.
QUANTISED = (*(f".weight{end}" for end in SCALES), ".weight_packed", ".qweight")
LARGEST = 448.0  # the largest number of e4m3
CHUNK = 1 << 26  # bytes that are copied at once


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How layers are stored.

    Attributes:
      format: the name that compressed-tensors has for it.
      weights: the entries of `weights` in the configuration.
      group: weights that share a scale, None for a row.
      parts: dtype and shape of each tensor of a layer [out, in], by what follows the name of the layer.
      store: makes these tensors of a float32 matrix, by the same names.
    """

    format: str
    weights: Mapping[str, Any]
    group: int | None
    parts: Callable[[int, int], dict[str, tuple[Any, tuple[int, ...]]]]
    store: Callable[[np.ndarray], dict[str, np.ndarray]]


def _fp8(x: np.ndarray) -> dict[str, np.ndarray]:
    scale = _scale(np.abs(x).max(1, keepdims=True), LARGEST, np.float32)
    return {"weight": np.clip(x / scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), "weight_scale": scale}


def _int8(x: np.ndarray) -> dict[str, np.ndarray]:
    scale = _scale(np.abs(x).max(1, keepdims=True), 127, np.float32)
    return {"weight": np.clip(np.round(x / scale), -127, 127).astype(np.int8), "weight_scale": scale}


def _scale(top: np.ndarray, largest: float, dtype) -> np.ndarray:
    """The scale that brings `top` to the largest code; 1 where it would be zero in that dtype."""
    scale = (top / largest).astype(dtype)
    return np.where(scale == 0, dtype(1), scale)


def _int4(x: np.ndarray, group: int) -> dict[str, np.ndarray]:
    parts = x.reshape(x.shape[0], -1, group)
    scale = _scale(np.abs(parts).max(2), 7.5, np.float16)
    codes = np.clip(np.round(parts / scale[..., None].astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    return _packed(codes.reshape(x.shape), scale, 4)


def _as_ggml(x: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    tensor = QuantizedTensor.quantize(x, kind)
    codes, scale = np.asarray(tensor.codes), np.asarray(tensor.scale)
    if kind == "q8_0":
        return _packed(codes.view(np.uint8) ^ np.uint8(128), scale, 8)
    halves = codes.reshape(x.shape[0], -1, 1, 16)
    return _packed(np.concatenate([halves & 15, halves >> 4], axis=2).reshape(x.shape), scale, 4)


def _packed(codes: np.ndarray, scale: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """The codes packed into int32, as many as fit into each, from the low bits on."""
    out, inner = codes.shape
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    words = np.ascontiguousarray(codes).view("<i4")
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": np.array([out, inner], np.int64)}


def _in_words(bits: int, group: int):
    return lambda out, inner: {
        "weight_packed": (np.int32, (out, inner * bits // 32)),
        "weight_scale": (np.float16, (out, inner // group)),
        "weight_shape": (np.int64, (2,)),
    }


def _a_row(dtype):
    return lambda out, inner: {"weight": (dtype, (out, inner)), "weight_scale": (np.float32, (out, 1))}


def _scheme(to: str, group: int) -> Scheme:
    """The scheme by which `to` stores layers.

    Raises:
      ModelError: the way of quantising is unknown, or kernels do not have the group.
    """
    rows = {"strategy": "channel", "symmetric": True, "dynamic": False}
    groups = lambda bits, n: {"type": "int", "num_bits": bits, "group_size": n, **rows, "strategy": "group"}
    if not isinstance(group, int) or group < 32 or group & (group - 1):
        raise ModelError(f"a group has 32 weights times a power of two, got {group!r}")
    ways: dict[str, Callable[[], Scheme]] = {
        "fp8": lambda: Scheme("float-quantized", {"type": "float", "num_bits": 8, **rows}, None,
                              _a_row(jnp.float8_e4m3fn), _fp8),
        "int4": lambda: Scheme("pack-quantized", groups(4, group), group, _in_words(4, group),
                               lambda x: _int4(x, group)),
        "q4_0": lambda: Scheme("pack-quantized", groups(4, 32), 32, _in_words(4, 32), lambda x: _as_ggml(x, "q4_0")),
        "q8_0": lambda: Scheme("pack-quantized", groups(8, 32), 32, _in_words(8, 32), lambda x: _as_ggml(x, "q8_0")),
        "int8": lambda: Scheme("int-quantized", {"type": "int", "num_bits": 8, **rows}, None, _a_row(np.int8), _int8),
    }  # fmt: skip
    if to not in ways:
        raise ModelError(f"--to is one of {', '.join(ways)}; got {to!r}")
    return ways[to]()


def quantize_folder(
    folder: str | os.PathLike, to: str, *, group: int = 128, out: str | os.PathLike | None = None,
    dynamic: bool = False,
) -> Path:  # fmt: skip
    """Writes a copy of a folder with its attention and MLP layers and its experts quantised; `load` reads it.

    Embeddings, the output head, norms and routers stay as they are, and so do the expansion of latent attention,
    experts that are stored in one tensor (GPT-OSS, Llama 4) and layers whose rows no group divides. It takes a few
    times the memory of the largest tensor.

    Args:
      folder: `config.json` and safetensors of one of `families`, of floats.
      to: "fp8", "int4", "q4_0", "q8_0" or "int8"; see the head of this file.
      group: for "int4", the number of weights that share a scale: 32 times a power of two.
      out: the new folder; by default beside the old one, with `-{to}` behind its name. It must not exist.
      dynamic: for "fp8": the configuration asks for activations in 8 bits, too.

    Returns:
      The new folder.

    Raises:
      ModelError: the folder is no model of floats, an argument is wrong, or the new folder exists; the sentence says
        which.
    """
    if dynamic and to != "fp8":
        raise ModelError(f"activations in 8 bits belong to weights in fp8, not in {to}")
    source, scheme = Path(folder), _scheme(to, group)
    try:
        return _quantized(source, None if out is None else Path(out), to, scheme, dynamic)
    except OSError as error:
        raise ModelError(f"cannot quantise {source}: {error}; give an --out that can be written") from error


def _quantized(source: Path, out: Path | None, to: str, scheme: Scheme, dynamic: bool) -> Path:
    """Checks the arguments of `quantize_folder`, writes the new folder and returns it."""
    out = source.resolve().with_name(f"{source.resolve().name}-{to}") if out is None else out
    if not source.is_dir():
        raise ModelError(f"there is no folder {source}; give one with config.json and safetensors")
    if out.exists():
        raise ModelError(f"{out} exists; give another --out, or remove it")
    config = read_json(source / "config.json")
    read_config(config, str(source))
    tensors = stored_tensors(source)
    scaled = [name for name in tensors if name.endswith(QUANTISED)]
    if table(config, *CONFIGURATIONS) or scaled:
        which = f" (the tensor {scaled[0]})" if scaled else ""
        raise ModelError(f"the weights of {source} are quantised already{which}; start from floats")
    chosen = {name for name, tensor in tensors.items() if _is_layer(name, tensor, scheme)}
    if not chosen:
        raise ModelError(f"{source} has no layer that --to {to} quantises; see docs/models.md")
    plain = {key: value for key, value in config.items() if key not in CONFIGURATIONS}
    with whole_folder(out) as made:
        _write_folder(source, made, tensors, chosen, scheme)
        entries = _entries(scheme, tensors, chosen, dynamic)
        (made / "config.json").write_text(json.dumps(plain | {"quantization_config": entries}, indent=2) + "\n")
    return out


def _is_layer(name: str, tensor: Stored, scheme: Scheme) -> bool:
    """Whether a tensor is to be quantised.

    Raises:
      ModelError: the tensor is a layer, but no matrix of numbers.
    """
    if not LAYERS.search(name) or len(tensor.shape) != 2:
        return False
    if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize == 1 or 0 in tensor.shape:
        raise ModelError(
            f"the tensor {name} of {tensor.file.path} is {tensor.dtype.name} {tensor.shape}; jtile quantises matrices "
            "of floats of 16, 32 or 64 bits: start from such a checkpoint"
        )
    return tensor.shape[1] % (scheme.group or 32) == 0


def _entries(scheme: Scheme, tensors: Mapping[str, Stored], chosen: set[str], dynamic: bool) -> dict[str, Any]:
    """The `quantization_config` of the new folder; `ignore` names the layers that stay floats."""
    plain = [n.removesuffix(".weight") for n, t in tensors.items() if n not in chosen and len(t.shape) == 2]
    inputs = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": dict(scheme.weights), "input_activations": inputs if dynamic else None}
    return {
        "quant_method": "compressed-tensors", "format": scheme.format, "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": [n for n in plain if not n.endswith("embed_tokens")], "kv_cache_scheme": None,
    }  # fmt: skip


def _write_folder(source: Path, made: Path, tensors: Mapping[str, Stored], chosen: set[str], scheme: Scheme) -> None:
    """Writes the safetensors files, their index, and copies of the other files of the folder."""
    weight_map, total = {}, 0
    files = _names(source, sorted({tensor.file.path for tensor in tensors.values()}))
    for path, file in files.items():
        mine = {name: tensor for name, tensor in tensors.items() if tensor.file.path == path}
        (made / file).parent.mkdir(parents=True, exist_ok=True)
        names, size = _write_file(made / file, mine, chosen, scheme)
        weight_map |= dict.fromkeys(names, file)
        total += size
    if (source / INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (made / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    read = set(map(os.path.realpath, files))  # the index may name files of any suffix
    for other in source.iterdir():
        weights = other.suffix in (".safetensors", ".gguf", ".bin", ".pth") or os.path.realpath(other) in read
        if other.is_file() and not weights and other.name != INDEX:
            shutil.copyfile(other, made / other.name)


def _names(source: Path, paths: list[Path]) -> dict[Path, str]:
    """The name of the new file for each file: its place in the folder, or a number where the index names files outside
    the folder."""
    inside = [path.relative_to(source).as_posix() for path in paths if path.is_relative_to(source)]
    if len(inside) < len(paths) or any(".." in Path(name).parts for name in inside):
        inside = [f"model-{k:05}-of-{len(paths):05}.safetensors" for k in range(1, len(paths) + 1)]
    return dict(zip(paths, inside, strict=True))


def _write_file(path: Path, tensors: Mapping[str, Stored], chosen: set[str], scheme: Scheme) -> tuple[list[str], int]:
    """Writes one file, a tensor at a time; gives the names in it, and the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        base = name.removesuffix("weight")
        parts = {base + part: entry for part, entry in scheme.parts(*tensor.shape).items()} if name in chosen else {}
        for part, (dtype, shape) in (parts or {name: (tensor.dtype, tensor.shape)}).items():
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            entry = {"dtype": NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [at, at + size]}
            header[part] = entry
            at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            content, begin = tensor.file.view(name)
            if name in chosen:
                for part in _stored(tensor, scheme).values():
                    handle.write(np.ascontiguousarray(part).view(np.uint8).data)
            else:
                for start in range(0, content.size, CHUNK):
                    handle.write(content[start : start + CHUNK].data)
            tensor.file.release(begin, content.size)
    return [name for name in header if name != "__metadata__"], at


def _stored(tensor: Stored, scheme: Scheme) -> dict[str, np.ndarray]:
    """The tensors that `scheme` makes of a matrix.

    Raises:
      ModelError: some weights are no numbers, or too large for their scale.
    """
    with np.errstate(over="ignore"):
        x = tensor.host().astype(np.float32)
        found = scheme.store(x) if np.isfinite(x).all() else {}
    if not found or not np.isfinite(found["weight_scale"]).all():
        raise ModelError(
            f"the tensor {tensor.name} of {tensor.file.path} has weights that are not finite, or too large for a scale "
            "in float16; the file is damaged, or of a training that diverged: download it again"
        )
    return found


def run_quantize(folder: str, to: str, group: int = 128, out: str | None = None, dynamic: bool = False) -> int:
    """Runs `quantize_folder` for the terminal: prints the new folder, or an error in one sentence.

    Args:
      folder, to, group, out, dynamic: as in `quantize_folder`.

    Returns:
      The exit code: 0, 1 after an error, 130 after Ctrl-C.
    """
    try:
        made = quantize_folder(folder, to, group=group, out=out, dynamic=dynamic)
    except JtileError as error:
        print(f"jtile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    print(made)
    return 0
