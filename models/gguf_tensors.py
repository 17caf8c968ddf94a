"""Tensors of GGUF files by the names and in the shapes of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gguf import dequantize

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor, from_gguf_blocks, quantize

from .experts import out_in, stacked
from .gguf_names import TOP_NAMES, Architecture

# types of blocks that are kept bit for bit; others become q8_0
NATIVE = {kind.upper(): kind for kind in ("q4_0", "q4_1", "q8_0", "mxfp4", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")}
DENSE = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

Read = Callable[[], "jax.Array | QuantizedTensor"]


def readers(infos: Mapping[str, Any], architecture: Architecture, config: Any) -> dict[str, Read]:
    """Functions that read the tensors `infos` (of a `GGUFReader`), by the names of transformers; a tensor without a
    name there keeps its own.

    Raises:
      ModelError: the file has biases that the model would not add.
    """
    found: dict[str, Read] = {}
    for name, info in infos.items():
        found |= _of(name, info, architecture, config)
    for index in range(config.num_layers):  # a file has the expansion of latent vectors in two parts
        parts = [infos.get(f"blk.{index}.attn_{part}_b.weight") for part in "kv"]
        if all(parts):
            found[f"model.layers.{index}.self_attn.kv_b_proj.weight"] = functools.partial(_expansion, *parts)
        found |= _of_delta(infos, index)
        if not architecture.experts[1]:
            found |= _of_gpt_oss(infos, index)
    return found


def _of_gpt_oss(infos: Mapping[str, Any], index: int) -> dict[str, Read]:
    """The readers of what GPT-OSS has beside the names of `Architecture`: sinks, and experts, whose gate and up
    transformers stores as one tensor with their rows in turns."""
    own = f"model.layers.{index}."
    of = lambda part, kind: infos.get(f"blk.{index}.{part}.{kind}")
    found: dict[str, Read] = {}
    if (sinks := of("attn_sinks", "weight")) is not None:
        found[f"{own}self_attn.sinks"] = functools.partial(_read, sinks)
    for kind, ending in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (of(f"ffn_{part}_exps", kind) for part in ("gate", "up", "down"))
        read = _stack if kind == "weight" else _read
        if gate is not None and up is not None:
            found[f"{own}mlp.experts.gate_up_proj{ending}"] = functools.partial(_in_turns, read, gate, up)
        if down is not None:
            whole = functools.partial(_as_in_folders if kind == "weight" else _read, down)
            found[f"{own}mlp.experts.down_proj{ending}"] = whole
    return found


def _stack(info) -> jax.Array | QuantizedTensor:
    """The matrices of all experts, [experts, out, in]."""
    return stacked([_expert(info, e) for e in range(_shape(info)[0])])


def _as_in_folders(info) -> jax.Array | QuantizedTensor:
    """The matrices of all experts as a folder of safetensors has them: floats as [experts, in, out]."""
    return out_in(_stack(info))


def _in_turns(read: Callable, gate, up) -> jax.Array | QuantizedTensor:
    """Two tensors of all experts as one, of which each has every other row; matrices as `_as_in_folders`.

    Raises:
      ModelError: the two are of different sizes, or stored in different ways.
    """
    both = read(gate), read(up)
    alike = [(x.storage if isinstance(x, QuantizedTensor) else x.dtype, x.shape) for x in both]
    if alike[0] != alike[1]:
        raise ModelError(
            f"{gate.name} is {gate.tensor_type.name} of shape {_shape(gate)}, and {up.name} {up.tensor_type.name} of "
            f"shape {_shape(up)}; expected two that are alike"
        )
    turns = lambda a, b: jnp.stack([a, b], axis=2).reshape(a.shape[0], -1, *a.shape[2:])
    whole = jax.tree.map(turns, *both)
    return out_in(whole) if read is _stack else whole


def _of_delta(infos: Mapping[str, Any], index: int) -> dict[str, Read]:
    """The readers of those tensors of a gated DeltaNet and of the gate of a shared expert that transformers stores in
    another way."""
    ours = {
        "linear_attn.A_log": ("ssm_a", lambda x: jnp.log(-x)),
        "linear_attn.dt_bias": ("ssm_dt.bias", lambda x: x),
        "linear_attn.conv1d.weight": ("ssm_conv1d.weight", lambda x: x.reshape(x.shape[0], 1, -1)),
        "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight", lambda x: x.reshape(1, -1)),
    }
    found: dict[str, Read] = {}
    for name, (own, change) in ours.items():
        if (info := infos.get(f"blk.{index}.{own}")) is not None:
            dense = functools.partial(_dense, info)
            found[f"model.layers.{index}.{name}"] = lambda dense=dense, change=change: (
                change(jnp.asarray(dense(), jnp.float32))
            )  # fmt: skip
    parts = [infos.get(f"blk.{index}.attn_{part}.weight") for part in ("qkv", "gate")]
    if all(parts):  # rows stand by parts; in `ssm_in` of older files they stand by heads
        found[f"model.layers.{index}.linear_attn.in_proj_qkvz.weight"] = lambda: tuple(map(_read, parts))
    return found


def _of(name: str, info, architecture: Architecture, config) -> dict[str, Read]:
    """The readers of all that one tensor of the file holds."""
    if name in TOP_NAMES:
        return {TOP_NAMES[name]: _matrix(TOP_NAMES[name], info, architecture)}
    block, _, rest = name.removeprefix("blk.").partition(".")
    if not name.startswith("blk.") or not rest:
        return {name: functools.partial(_read, info)}
    prefix, (part, *tail) = f"model.layers.{block}.", rest.split(".")
    if part == "exp_probs_b":
        return {f"{prefix}mlp.gate.e_score_correction_bias": functools.partial(_read, info)}
    before, projections = architecture.experts
    for projection, own in projections.items():  # a file has one tensor for all experts, or one for each
        expert = lambda e, own=own: f"{prefix}{before.format(expert=e)}{own}.weight"
        if part == f"ffn_{projection}_exps":
            return {expert(e): functools.partial(_expert, info, e) for e in range(int(info.shape[-1]))}
        if part == f"ffn_{projection}" and len(tail) == 2:
            return {expert(tail[0]): functools.partial(_read, info)}
    names = architecture.block_names()
    if part not in names or len(tail) != 1:
        return {name: functools.partial(_read, info)}
    if tail == ["bias"] and part not in architecture.biases:
        raise ModelError(f"this GGUF has the tensor {name}; of its architecture jtile.models adds no biases")
    own = f"{prefix}{names[part]}.{tail[0]}"
    if architecture.interleaved and part in ("attn_q", "attn_k"):
        heads = config.attention.heads if part == "attn_q" else config.attention.kv_heads
        return {own: functools.partial(_read, info, order=_plain_order(int(info.shape[-1]), heads))}
    return {own: _matrix(own, info, architecture)}


def _matrix(name: str, info, architecture: Architecture) -> Read:
    plain = name.endswith(architecture.plain_norms)
    if architecture.norms_of_one and name.endswith("norm.weight") and not plain:
        return lambda: jnp.asarray(_dense(info).astype(np.float32) - 1)
    return functools.partial(_read, info, floats=any(part in name for part in architecture.floats))


def _shape(info) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(info.shape))


def _read(info, order: np.ndarray | None = None, floats: bool = False):
    """The tensor, with its rows in `order` if that is given; `floats`: a quantised tensor becomes bfloat16."""
    shape = _shape(info)
    data = info.data.reshape(shape[0], -1) if len(shape) == 2 else info.data
    return _tensor(info, data if order is None else data[order], shape, floats)


def _expert(info, expert: int) -> jax.Array | QuantizedTensor:
    """The matrix of one expert, out of a tensor with the matrices of all experts."""
    shape = _shape(info)
    return _tensor(info, info.data.reshape(shape[0], shape[1], -1)[expert], shape[1:])


def _tensor(info, data: np.ndarray, shape: tuple[int, ...], floats: bool = False) -> jax.Array | QuantizedTensor:
    """The tensor of this shape that the bytes `data` stand for; `floats`: see `_read`."""
    kind = info.tensor_type.name
    if kind in DENSE:
        return jnp.asarray(data.view(DENSE[kind]).reshape(shape))
    if floats:
        return jnp.asarray(_floats(info, data, shape).astype(ml_dtypes.bfloat16))
    if kind in NATIVE and len(shape) == 2:
        return from_gguf_blocks(data, NATIVE[kind], shape)
    dense = _floats(info, data, shape)
    return quantize(dense, "q8_0") if len(shape) == 2 and shape[1] % 32 == 0 else jnp.asarray(dense)


def _expansion(key, value) -> jax.Array:
    """The matrix [heads (plain + value), rank], joined from its part for keys [heads, rank, plain] and that for values
    [heads, value, rank]."""
    both = np.concatenate([_dense(key).swapaxes(1, 2), _dense(value)], axis=1)
    return jnp.asarray(both.reshape(-1, both.shape[2]))


def _dense(info) -> np.ndarray:
    """The tensor as floats; a quantised tensor becomes bfloat16."""
    shape, kind = _shape(info), info.tensor_type.name
    if kind in DENSE:
        return info.data.view(DENSE[kind]).reshape(shape)
    return _floats(info, info.data, shape).astype(ml_dtypes.bfloat16)


def _floats(info, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of quantised blocks, float32."""
    try:
        return dequantize(data, info.tensor_type).astype(np.float32).reshape(shape)
    except (NotImplementedError, ValueError) as error:
        raise ModelError(
            f"the tensor {info.name} has the type {info.tensor_type.name}, which the gguf package cannot dequantise; "
            "requantise the file to Q8_0, Q4_0 or Q4_1"
        ) from error


def _plain_order(rows: int, heads: int) -> np.ndarray:
    """The order of rows that undoes GGUF's interleaving of the halves of each head: its row 2j + s is row s * half + j
    here."""
    if rows % (2 * heads):
        raise ModelError(f"{rows} rows of a query or key weight do not divide into {heads} heads of an even size")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
