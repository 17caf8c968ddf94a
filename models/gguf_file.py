"""GGUF files (through the `gguf` package) of the Llama architecture, checked for size before any weight is read."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from gguf.constants import GGML_QUANT_SIZES

from jtile._errors import JtileError, ModelError
from jtile.ops import from_gguf_blocks, quantize

from .checkpoint import Checkpoint
from .llama import LlamaConfig
from .tokenizer import Tokenizer

# kept bit for bit; other block types become q8_0
NATIVE = {kind.upper(): kind for kind in ("q4_0", "q4_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")}
DENSE = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
HEADER_BYTES = 24  # magic, version, tensor count, metadata count
# what the gguf package raises on bytes that make no sense
READ_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError)
SMALLEST_ENTRY = 13  # bytes of the shortest metadata or tensor entry: lengths, a type, one byte

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class _Reader(GGUFReader):
    """GGUFReader over a plain array: slicing a memmap 100 000 times (once a token) takes 2 s, an array 0.5 s."""

    @property
    def data(self):
        return self._plain

    @data.setter
    def data(self, mapped):
        self._plain = np.asarray(mapped).view(np.ndarray)


def open_gguf(path: str | os.PathLike) -> Checkpoint:
    """Opens a GGUF file of the Llama architecture; the weights are read when a model asks for them.

    F32, F16 and BF16 tensors keep their dtype; Q4_0, Q4_1, Q8_0 and K-quants keep their blocks; any other type is
    dequantised by the gguf package and stored as Q8_0 (half a step of 1/127 of the block's largest weight is the added
    error).

    Raises:
      ModelError: not a GGUF file, truncated, damaged, or of another architecture.
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
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{path} holds a model of the architecture {architecture!r}; jtile runs 'llama' GGUF files")
    infos = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in infos:
        raise ModelError(f"{path} lacks the tensor token_embd.weight; the file is incomplete, download it again")
    factors = infos["rope_freqs.weight"].data.tolist() if "rope_freqs.weight" in infos else ()
    config = LlamaConfig.from_gguf(meta, int(infos["token_embd.weight"].shape[-1]), factors)
    tensors = {_name(n): functools.partial(_tensor, info, config) for n, info in infos.items()}
    return Checkpoint(str(path), config, tensors, _tokenizer(meta, path), _eos_ids(meta))


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


def _name(name: str) -> str:
    """The transformers name of a GGUF tensor; an unknown one stays as it is."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return name


def _tensor(info, config: LlamaConfig):
    kind, shape = info.tensor_type.name, tuple(int(n) for n in reversed(info.shape))
    data = info.data.reshape(shape[0], -1) if len(shape) == 2 else info.data
    for name, heads in (("attn_q.weight", config.attention.heads), ("attn_k.weight", config.attention.kv_heads)):
        if info.name.endswith(name):
            data = data[_plain_order(shape[0], heads)]
    if kind in DENSE:
        return jnp.asarray(data.view(DENSE[kind]).reshape(shape))
    if kind in NATIVE and len(shape) == 2:
        return from_gguf_blocks(data, NATIVE[kind], shape)
    try:
        dense = dequantize(data, info.tensor_type).astype(np.float32).reshape(shape)
    except (NotImplementedError, ValueError) as error:
        raise ModelError(
            f"the tensor {info.name} has the type {kind}, which the gguf package cannot dequantise; "
            "requantise the file to Q8_0, Q4_0 or Q4_1"
        ) from error
    return quantize(dense, "q8_0") if len(shape) == 2 and shape[1] % 32 == 0 else jnp.asarray(dense)


def _plain_order(rows: int, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head: its row 2j + s is row s * half + j here."""
    if rows % (2 * heads):
        raise ModelError(f"{rows} rows of a query or key weight do not divide into {heads} heads of an even size")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _tokenizer(meta: Mapping, path: Path) -> Tokenizer | None:
    if "tokenizer.ggml.tokens" not in meta:
        return None
    try:
        return Tokenizer.from_gguf(meta)
    except JtileError:
        raise
    except Exception as error:  # the tokenizers package raises bare Exception for a vocabulary that does not fit
        raise ModelError(f"the tokenizer of {path} cannot be built ({error}); download the file again") from error


def _eos_ids(meta: Mapping) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(int(meta[key]) for key in keys if meta.get(key) is not None))
