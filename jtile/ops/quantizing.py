"""Makes quantised tensors: of floats, of the codes and scales of files, and of the blocks of GGUF."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import KernelValueError
from jtile.ops import super_blocks
from jtile.ops._shapes import check_float
from jtile.ops.quantized_tensor import K_KINDS, KINDS, QuantizedTensor
from jtile.ops.super_blocks import LAYOUTS, SUPER
from jtile.ops.weight_codes import BLOCK
from jtile.ops.weight_rounding import round_weights

# one GGUF block: f16 scale (of mxfp4 e8m0, one byte), (f16 minimum,) codes
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "mxfp4": 17}


def quantize(x, kind: str, group: int = BLOCK) -> QuantizedTensor:
    """Quantises a float matrix. Groups round as in ggml's reference quantiser (Q4_0: the largest magnitude is code 0).

    Args:
      x: float array [out, in].
      kind: "q4_0", "q4_1", "q8_0", "int8", "fp8" or "mxfp4".
      group: how many weights of a row share a scale; for int8 and fp8 it is always the whole row.

    Returns:
      A `QuantizedTensor` of shape [out, in].

    Raises:
      KernelTypeError: `x` is no float array.
      KernelValueError: unknown kind, `x` is no matrix, the group is not 32 times a power of two, or `in` is no multiple
        of it (int8 and fp8 take any).
    """
    x = x if isinstance(x, (np.ndarray, jax.Array)) else jnp.asarray(x)
    check_float("quantize", x=x)
    _check(kind, x.shape, group)
    if not _on_host(x):
        return QuantizedTensor(*round_weights(jnp, x, kind, group), kind)
    there = x.sharding if isinstance(x, jax.Array) and x.committed else None
    arrays = jax.device_put(round_weights(np, np.asarray(x), kind, group), there)
    return QuantizedTensor(*arrays, kind)


def from_int4(codes, scale, zero=None) -> QuantizedTensor:
    """Checks the shapes; `QuantizedTensor.from_int4` says what arguments and result are."""
    (out, inner), groups = codes.shape, scale.shape[-1]
    if scale.shape != (out, groups) or (zero is not None and zero.shape != scale.shape):
        raise KernelValueError(f"codes {codes.shape} and scales {scale.shape} are not [out, in] and [out, groups]")
    if groups == 0 or inner % (groups * BLOCK):
        raise KernelValueError(f"{groups} groups do not divide a row of {inner} weights into multiples of {BLOCK}")
    return _from_int4(codes, scale, zero)


def from_int8(codes, scale) -> QuantizedTensor:
    """Makes int8 of one scale a row, and q8_0 of more; `QuantizedTensor.from_int8` says what the arguments are."""
    (out, inner), groups = codes.shape, scale.shape[-1]
    if groups == 1 and scale.shape[0] in (1, out):
        return QuantizedTensor(codes, jnp.broadcast_to(scale, (out, 1)).astype(jnp.float32), None, "int8")
    if scale.shape != (out, groups) or groups == 0 or inner % (groups * BLOCK):
        raise KernelValueError(f"scales {scale.shape} do not divide codes {codes.shape} into multiples of {BLOCK}")
    return QuantizedTensor(codes, jnp.repeat(scale, _odd(inner, groups), axis=1), None, "q8_0")


def from_float8(codes, scale) -> QuantizedTensor:
    """Makes fp8 of e4m3 codes; `QuantizedTensor.from_float8` says what the arguments are."""
    (out, inner), groups = codes.shape, scale.shape[-1]
    if scale.shape[0] not in (1, out) or groups == 0 or (groups > 1 and inner % (groups * BLOCK)):
        raise KernelValueError(f"scales {scale.shape} do not divide codes {codes.shape} into multiples of {BLOCK}")
    scale = jnp.broadcast_to(scale.astype(jnp.float32), (out, groups))
    return QuantizedTensor(codes, scale if groups == 1 else jnp.repeat(scale, _odd(inner, groups), axis=1), None, "fp8")


def _odd(inner: int, groups: int) -> int:
    """The number of parts that a group is cut into, so that each has 32 weights times a power of two."""
    blocks = inner // groups // BLOCK
    return blocks // (blocks & -blocks)


@jax.jit
def _from_int4(codes, scale, zero) -> QuantizedTensor:
    (out, inner), odd = codes.shape, _odd(codes.shape[1], scale.shape[1])
    halves = codes.reshape(out, inner // BLOCK, 2, BLOCK // 2)
    stored = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(out, inner // 2)
    scale = jnp.repeat(scale, odd, axis=1)
    if zero is None:
        return QuantizedTensor(stored, scale, None, "q4_0")
    # Minima, up to 15 times a scale, would be wrong by 0.7 % of the scale in float16, which logits show.
    low = -scale.astype(jnp.float32) * jnp.repeat(zero, odd, axis=1).astype(jnp.float32)
    return QuantizedTensor(stored, scale, low, "q4_1")


def _on_host(x) -> bool:
    """Whether the elements of `x` are known, and lie in the host's memory alone."""
    if isinstance(x, np.ndarray):
        return True
    return not isinstance(x, jax.core.Tracer) and [d.platform for d in x.devices()] == ["cpu"]


def from_gguf_blocks(raw, kind: str, shape: tuple[int, int]) -> QuantizedTensor:
    """Splits the blocks of a GGUF tensor into the arrays of a `QuantizedTensor`; every bit is kept.

    Args:
      raw: uint8 array of any shape with the bytes of `out * in / 32` blocks, row-major over (out, block); of K-quants
        those of `out * in / 256` super blocks.
      kind: "q4_0", "q4_1", "q8_0", "mxfp4", "q2_k", "q3_k", "q4_k", "q5_k" or "q6_k".
      shape: (out, in) in weights.

    Returns:
      A `QuantizedTensor`.

    Raises:
      KernelValueError: a kind without GGUF blocks, or a number of bytes that does not fit `shape`.
    """
    _check(kind, shape, SUPER if kind in LAYOUTS else BLOCK, (*KINDS, *K_KINDS))
    sizes = BLOCK_BYTES | super_blocks.GGUF_BYTES
    if kind not in sizes:
        raise KernelValueError(f"{kind} has no GGUF block layout; expected one of {', '.join(sizes)}")
    out, inner = shape
    raw = np.asarray(raw, dtype=np.uint8)
    expected = out * (inner // (SUPER if kind in LAYOUTS else BLOCK)) * sizes[kind]
    if raw.size != expected:
        raise KernelValueError(f"{kind} blocks of shape {tuple(shape)} take {expected} bytes, got {raw.size}")
    if kind in LAYOUTS:
        arrays = super_blocks.of_blocks(raw, kind, shape)._asdict()
        return jax.device_put(QuantizedTensor(**arrays, kind=kind))
    blocks = raw.reshape(out, inner // BLOCK, BLOCK_BYTES[kind])
    head = {"q4_1": 4, "mxfp4": 1}.get(kind, 2)
    codes = np.ascontiguousarray(blocks[..., head:]).reshape(out, -1)
    if kind == "q8_0":
        codes = codes.view(np.int8)
    if kind == "mxfp4":
        scale = np.ascontiguousarray(blocks[..., 0]).view(jnp.float8_e8m0fnu)
        return jax.device_put(QuantizedTensor(codes, scale, None, kind))
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    minimum = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0] if kind == "q4_1" else None
    return jax.device_put(QuantizedTensor(codes, scale, minimum, kind))  # jnp.asarray compiles a copy for each shape


def _check(kind: str, shape: Sequence[int], group: int = BLOCK, kinds: Sequence[str] = KINDS) -> None:
    if kind not in kinds:
        raise KernelValueError(f"unknown kind of quantisation {kind!r}; expected one of {', '.join(kinds)}")
    if len(shape) != 2:
        raise KernelValueError(f"a quantised tensor has the shape (out, in), got {tuple(shape)}")
    if not isinstance(group, int) or group < BLOCK or group % BLOCK or group // BLOCK & (group // BLOCK - 1):
        raise KernelValueError(f"a group has {BLOCK} weights times a power of two, got {group!r}")
    if kind not in ("int8", "fp8") and shape[1] % group:
        raise KernelValueError(
            f"{kind} needs `in` to be a multiple of {group}, got {tuple(shape)}; int8 and fp8 take any size"
        )
