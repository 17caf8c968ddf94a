"""4-bit weights of safetensors files, as AWQ, GPTQ and compressed-tensors pack them, as `QuantizedTensor`s.

All keep eight codes in an int32, from the low bits on, and a scale (and a zero point) for every group of a row of W:

| format | codes | along | scales | zero points |
|---|---|---|---|---|
| AWQ (gemm) | qweight [in, out/8], in the order 0 2 4 6 1 3 5 7 | out | [groups, out] | qzeros [groups, out/8] |
| GPTQ | qweight [in/8, out] | in | [groups, out] | qzeros [groups, out/8], in the first version less 1 |
| compressed-tensors | weight_packed [out, in/8] | in | [out, groups] | weight_zero_point [out/8, groups] |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from .mapped import SCALES, Stored, expect

AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the places in a word of its eight columns
PER_WORD = 8
WORDS, INTEGERS = ("int32",), ("int32", "int64")


def part(
    tensors: Mapping[str, Stored], name: str, beside: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> Stored:
    """The tensor `name`, which belongs to the tensor `beside`.

    Raises:
      ModelError: it is missing, or has another shape or dtype.
    """
    if name not in tensors:
        raise ModelError(
            f"the quantised tensor {beside} has no {name}; the checkpoint is incomplete, download it again"
        )
    found = tensors[name]
    if found.shape != shape:
        raise ModelError(f"the tensor {name} has the shape {found.shape}; beside {beside} it must be {shape}")
    expect(found, beside, dtypes)
    return found


def groups_of(inner: int, group: int | None, name: str) -> int:
    """How many groups a row of `inner` weights has; a group of None or -1 is the row.

    Raises:
      ModelError: groups that are no multiple of 32, or do not divide the row.
    """
    group = inner if group in (None, -1) else group
    if not isinstance(group, int) or isinstance(group, bool) or group < 1 or group % 32 or inner % group:
        raise ModelError(
            f"{name} has rows of {inner} weights in groups of {group!r}; jtile reads groups of multiples of 32 that "
            "divide a row"
        )
    return inner // group


def in_order(tensors: Mapping[str, Stored], name: str, beside: str, inner: int, groups: int) -> None:
    """Refuses columns that are sorted into groups by activations.

    Raises:
      ModelError: they are.
    """
    if name in tensors:
        index = part(tensors, name, beside, (inner,), INTEGERS).host()
        if not np.array_equal(index, np.arange(inner) // (inner // groups)):
            raise ModelError(
                f"the columns of {beside} are sorted into groups by activations ({name}, desc_act or actorder); jtile "
                "reads groups of neighbours: take a checkpoint without, or with static groups"
            )


def awq(tensors: Mapping[str, Stored], base: str, group: int | None) -> QuantizedTensor:
    """The weight of the layer `base`, as AutoAWQ's "gemm" stores it."""
    name = f"{base}.qweight"
    inner, out = _sides(tensors[name])
    groups = groups_of(inner, group, name)
    zeros = part(tensors, f"{base}.qzeros", name, (groups, out), WORDS)
    scales = part(tensors, f"{base}.scales", name, (groups, out * PER_WORD), SCALES)
    return _awq(tensors[name](), zeros(), scales())


def gptq(tensors: Mapping[str, Stored], base: str, group: int | None, less_one: bool) -> QuantizedTensor:
    """The weight of the layer `base`; `less_one`: zero points are stored less 1."""
    name = f"{base}.qweight"
    rows, out = _sides(tensors[name])
    groups = groups_of(rows * PER_WORD, group, name)
    if out % PER_WORD:
        raise ModelError(f"the tensor {name} has {out} columns, not a multiple of {PER_WORD}")
    zeros = part(tensors, f"{base}.qzeros", name, (groups, out // PER_WORD), WORDS)
    scales = part(tensors, f"{base}.scales", name, (groups, out), SCALES)
    in_order(tensors, f"{base}.g_idx", name, rows * PER_WORD, groups)
    pairs = np.ascontiguousarray(zeros.host()).view(np.uint8)
    zero = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(groups, out) + np.uint8(less_one)
    return _gptq(tensors[name](), None if (zero == 8).all() else zero, scales())


def packed(tensors: Mapping[str, Stored], base: str, group: int | None, bits: int, symmetric: bool) -> QuantizedTensor:
    """The weight of the layer `base`, as compressed-tensors packs it; with 8 bits it has no zero points.

    Raises:
      ModelError: parts are missing, or do not fit; so are zero points where the weights are not `symmetric`.
    """
    name, each = f"{base}.weight_packed", 32 // bits
    out, words = _sides(tensors[name])
    shape = tuple(part(tensors, f"{base}.weight_shape", name, (2,), INTEGERS).host().tolist())
    if shape != (out, words * each):
        raise ModelError(f"the tensor {name} has the shape {(out, words)}, which does not hold a matrix of {shape}")
    groups = groups_of(words * each, group, name)
    scales = part(tensors, f"{base}.weight_scale", name, (out, groups), SCALES)
    in_order(tensors, f"{base}.weight_g_idx", name, words * each, groups)
    zeros = f"{base}.weight_zero_point"
    if bits == 8:
        refuse_zeros(tensors, base, name, symmetric)
        return QuantizedTensor.from_int8(_bytes(tensors[name]()), scales())
    zero = None
    if zeros in tensors or not symmetric:
        zero = part(tensors, zeros, name, (-(-out // PER_WORD), groups), WORDS)
    return _packed(tensors[name](), None if zero is None else zero(), scales())


def refuse_zeros(tensors: Mapping[str, Stored], base: str, name: str, symmetric: bool) -> None:
    """Refuses zero points of weights of 8 bits.

    Raises:
      ModelError: they have zero points, or the configuration says that they have.
    """
    if f"{base}.weight_zero_point" in tensors or not symmetric:
        raise ModelError(f"{name} has 8 bits and zero points; jtile reads symmetric weights of 8 bits")


def _sides(stored: Stored) -> tuple[int, int]:
    if len(stored.shape) != 2 or 0 in stored.shape or stored.dtype != np.int32:
        raise ModelError(f"the tensor {stored.name} is {stored.dtype.name} {stored.shape}; expected a matrix of int32")
    return stored.shape[0], stored.shape[1]


def _codes(words, axis: int, places=None):
    """The codes, uint8, of int32 words [rows, columns]: each word gives eight codes along `axis`."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32) if places is None else jnp.asarray(places * 4, jnp.int32)
    shape = (words.shape[0], 1, words.shape[1]) if axis == 0 else (*words.shape, 1)
    parts = (words.reshape(shape) >> shifts.reshape((1, PER_WORD, 1) if axis == 0 else (1, 1, PER_WORD))) & 15
    sides = [n * (PER_WORD if k == axis else 1) for k, n in enumerate(words.shape)]
    return parts.astype(jnp.uint8).reshape(sides)


@jax.jit
def _awq(words, zeros, scales):
    codes, zero = (_codes(w, 1, AWQ_PLACES).T for w in (words, zeros))
    return QuantizedTensor.from_int4(codes, scales.T, zero)


@jax.jit
def _gptq(words, zero, scales):
    return QuantizedTensor.from_int4(_codes(words, 0).T, scales.T, None if zero is None else zero.T)


@jax.jit
def _packed(words, zeros, scales):
    zero = None if zeros is None else _codes(zeros, 0)[: words.shape[0]]
    return QuantizedTensor.from_int4(_codes(words, 1), scales, zero)


@functools.partial(jax.jit)
def _bytes(words):
    """Codes int8 [out, in] of words [out, in / 4] that hold them plus 128."""
    numbers = jax.lax.bitcast_convert_type(words, jnp.uint8) ^ np.uint8(128)
    return jax.lax.bitcast_convert_type(numbers, jnp.int8).reshape(words.shape[0], -1)
