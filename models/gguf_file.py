"""GGUF files (through the `gguf` package), checked for size before any weight is read.

gguf_names.py says what their metadata and names mean, gguf_tensors.py reads their tensors.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES

from jtile._errors import JtileError, ModelError

from .checkpoint import Checkpoint
from .entries import token_ids
from .families import read_config
from .gguf_names import architecture_of
from .gguf_tensors import DENSE, readers
from .rope import RopeScaling
from .tokenizer import Tokenizer

HEADER_BYTES = 24  # magic, version, tensor count, metadata count
# what the gguf package raises on bytes that make no sense
READ_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError)
SMALLEST_ENTRY = 13  # bytes of the shortest metadata or tensor entry: lengths, a type, one byte


class _Reader(GGUFReader):
    """GGUFReader over a plain array: slicing a memmap 100 000 times (once a token) takes 2 s, an array 0.5 s."""

    @property
    def data(self):
        return self._plain

    @data.setter
    def data(self, mapped):
        self._plain = np.asarray(mapped).view(np.ndarray)


def open_gguf(path: str | os.PathLike) -> Checkpoint:
    """Opens a GGUF file of one of `gguf_names.ARCHITECTURES`; the weights are read when a model asks for them.

    F32, F16 and BF16 tensors keep their dtype; Q4_0, Q4_1, Q8_0 and K-quants keep their blocks; any other type is
    dequantised by the gguf package and stored as Q8_0 (half a step of 1/127 of the block's largest weight is the added
    error).

    Raises:
      ModelError: the file is no GGUF file, truncated, damaged, or of another architecture.
    """
    path = Path(path)
    _check_header(path)
    try:
        reader = _Reader(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except READ_ERRORS as error:
        _check_tensor_bytes(path, error)
        raise ModelError(
            f"{path} is truncated or damaged ({type(error).__name__}: {error}); download it again"
        ) from error
    infos = {tensor.name: tensor for tensor in reader.tensors}
    architecture, own = architecture_of(meta, str(path))
    if "token_embd.weight" not in infos:
        raise ModelError(f"{path} lacks the tensor token_embd.weight; the file is incomplete, download it again")
    config = read_config(architecture.config(own, int(infos["token_embd.weight"].shape[-1])), str(path))
    if "rope_freqs.weight" in infos:
        config = _with_factors(config, infos["rope_freqs.weight"])
    tensors = readers(infos, architecture, config)
    return Checkpoint(str(path), config, tensors, _tokenizer(meta, path), _eos_ids(meta, path))


def _with_factors(config: Any, info) -> Any:
    """The configuration with rotations whose frequencies are divided by the numbers of the tensor `info`."""
    rope, kind, shape = config.attention.rope, info.tensor_type.name, [int(n) for n in info.shape]
    if kind not in DENSE or shape != [rope.size // 2]:
        raise ModelError(
            f"rope_freqs.weight is {kind} of shape {shape}; heads of {rope.size} need {rope.size // 2} floats in a row"
        )
    factors = info.data.view(DENSE[kind]).astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"rope_freqs.weight divides frequencies by {factors.min()}; its numbers are positive")
    rope = dataclasses.replace(rope, scaling=RopeScaling("factors", factors=tuple(float(f) for f in factors)))
    return dataclasses.replace(config, attention=dataclasses.replace(config.attention, rope=rope))


def _check_header(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise ModelError(f"cannot read the model file {path}: {error.strerror}") from error
    if head[:4] != b"GGUF":
        raise ModelError(
            f"{path} is no GGUF file (it starts with {head[:4]!r}, not b'GGUF'); "
            "give a .gguf file or a folder with config.json and safetensors"
        )
    if len(head) < HEADER_BYTES:
        raise ModelError(f"{path} is truncated: {size} bytes do not hold a GGUF header; download it again")
    version, tensors, fields = struct.unpack("<IQQ", head[4:])
    if version not in (2, 3):
        raise ModelError(f"{path} has the GGUF version {version}; jtile reads the versions 2 and 3 (little-endian)")
    if (tensors + fields) * SMALLEST_ENTRY > size:
        raise ModelError(
            f"{path} is truncated or damaged: its {size} bytes cannot hold the {tensors} tensors and "
            f"{fields} metadata entries that its header announces; download it again"
        )


def _check_tensor_bytes(path: Path, error: Exception) -> None:
    """When the tensor table itself can be read, says which tensor is cut off and how many bytes are missing."""
    size = path.stat().st_size
    try:
        _TableOnly(path)
    except _TableEndError as cut:
        name, end = cut.args
        if end > size:
            raise ModelError(
                f"{path} is truncated: it has {size} bytes, but its tensor {name} ends at byte {end}; download it again"
            ) from error
    except READ_ERRORS:
        return  # the table is cut off too; the caller says so


class _TableEndError(Exception):
    """Carries (name, end in bytes) of the last tensor of a file."""


class _TableOnly(_Reader):
    def _build_tensors(self, start_offs, fields):
        ends = []
        for field in fields:
            _, name, _, dims, raw_type, offset = field.parts
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type[0])]
            count = int(np.prod(dims.astype(object)))
            ends.append((int(start_offs + int(offset[0])) + count * block_bytes // block, bytes(name).decode()))
        end, name = max(ends, default=(0, ""))
        raise _TableEndError(name, end)


def _tokenizer(meta: Mapping, path: Path) -> Tokenizer | None:
    if "tokenizer.ggml.tokens" not in meta:
        return None
    try:
        return Tokenizer.from_gguf(meta)
    except JtileError:
        raise
    except Exception as error:  # the tokenizers package raises bare Exception for a vocabulary that does not fit
        raise ModelError(f"the tokenizer of {path} cannot be built ({error}); download the file again") from error


def _eos_ids(meta: Mapping, path: Path) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [token_ids([meta[key]], str(path)) for key in keys if meta.get(key) is not None]
    return tuple(dict.fromkeys(token for (token,) in found))
