"""Quantised weights as one pytree: int8 per channel, and codes of 4 and 8 bits in groups with a scale.

A weight of shape (out, in) is kept as codes, scales and (Q4_1 only) minima, all dense and row-major:

| kind | codes            | scale                | minimum           | weight of code q      |
|------|------------------|----------------------|-------------------|-----------------------|
| int8 | int8 [out, in]   | f32 [out, 1]         | -                 | scale * q             |
| q8_0 | int8 [out, in]   | float [out, in/group]| -                 | scale * q             |
| fp8  | e4m3 [out, in]   | f32 [out, 1 or groups]| -                | scale * q             |
| q4_0 | uint8 [out, in/2]| float [out, in/group]| -                 | scale * (q - 8)       |
| q4_1 | uint8 [out, in/2]| float [out, in/group]| float, likewise   | scale * q + minimum   |
| mxfp4| uint8 [out, in/2]| e8m0 [out, in/group] | -                 | scale * e2m1 of q     |

The group of weights that share a scale is 32 times a power of two: 32 in GGUF, whose scales are float16, and mostly 128
in safetensors, where they are float16 or bfloat16. The shapes of the arrays say it.

The K-quants of GGUF (q2_k to q6_k) have more arrays: see super_blocks.py.

Byte j of a 4-bit block of 32 holds weight j in its low nibble and weight j + 16 in its high nibble, as in GGUF;
codes and scales are separate arrays so that both stay aligned for vector loads.

`packed()` gives the same weights with their codes as uint32 words, in the order in which Hopper's tensor cores take
numbers from registers: [out, in/8] for 4 bits, [out, in/4] for 8. With weight 16 s + 8 h + 2 t + e of a block of 32
(t in 0..3, the others 0 or 1): its word of four is t, its bits 4 (2 s + h) + 16 e and on; of 8 bits, its word of eight
is 4 s + t, its bits 8 h + 16 e and on, and what stands there is the code plus 128.

`in_panels()` gives them in the order in which CPUs with vectors of 64 bytes multiply sixteen rows. Their codes are
int32 words of four neighbouring bytes, and each array has of each 16 rows first all first elements, then all second
ones, and so on, in the same shape.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import KernelTypeError, KernelValueError
from jtile.ops import super_blocks
from jtile.ops.operands import Weight
from jtile.ops.super_blocks import LAYOUTS, SUPER, SuperBlocks
from jtile.ops.weight_codes import (
    BLOCK,
    FOUR_BIT,
    PANEL,
    WORDS,
    dequantize_rows,
    in_panels,
    in_rows,
    pack_codes,
    rows_of_panels,
    unpack_codes,
)

KINDS = ("int8", "q8_0", "fp8", "q4_0", "q4_1", "mxfp4")
BLOCKS = 128  # rows that share the scales of fp8 weights whose activations are rounded by "blocks"
K_KINDS = tuple(LAYOUTS)  # kinds that are read from GGUF, and not made here


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A quantised weight [out, in].

    Make one with `quantize`, `from_gguf_blocks`, `from_int4`, `from_int8` or `from_float8`. It is a pytree: it passes
    through `jax.jit`, donation and checkpoints like an array. A stack of such weights, [groups, out, in], has arrays
    with a leading axis: see `stack`. The module's docstring has a table of the arrays of each kind.

    Attributes:
      codes: the codes of the weights, two 4-bit codes to a byte.
      scale: the scales of the groups.
      minimum: for `q4_1`, what is added to each weight of a group; None for other kinds.
      kind: `"int8"`, `"q8_0"`, `"fp8"`, `"q4_0"`, `"q4_1"`, `"mxfp4"` or a K-quant, `"q2_k"` to `"q6_k"`.
      high, steps, lows: further arrays of K-quants.
      activations: for fp8, whether products of many rows may round these rows to e4m3 as well: with a scale for each
        row (`"rows"`), or, if the weight has one for each 128 x 128, for each 128 numbers of a row (`"blocks"`). For
        q4_0, q4_1 and q8_0, whether products on CPUs may round rows to integers of 16 bits (`"int16"`): with a scale
        for each 32 numbers, the largest of which becomes 32767. None: rows stay as they are.
    """

    codes: jax.Array
    scale: jax.Array
    minimum: jax.Array | None
    kind: str = dataclasses.field(metadata=dict(static=True))
    high: jax.Array | None = None  # K-quants alone have these three: see super_blocks.py
    steps: jax.Array | None = None
    lows: jax.Array | None = None
    activations: str | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in), in weights; of a stack (groups, out, in)."""
        if self.is_super:
            return *self.scale.shape[:-1], self.scale.shape[-1] * SUPER
        *lead, stored = self.codes.shape
        return *lead, stored * (4 if self.is_packed else 1) * (2 if self.is_4bit else 1)

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`: 2, or 3 for a stack."""
        return len(self.shape)

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return self.shape[-1] // max(self.scale.shape[-1], 1)

    @property
    def is_4bit(self) -> bool:
        """Whether a byte holds two codes (`q4_0`, `q4_1`, `mxfp4`)."""
        return self.kind in FOUR_BIT

    @property
    def is_super(self) -> bool:
        """Whether this is a K-quant, of super blocks of 256 weights."""
        return self.kind in LAYOUTS

    @property
    def super_blocks(self) -> SuperBlocks:
        """The arrays of a K-quant."""
        return SuperBlocks(self.codes, self.high, self.steps, self.lows, self.scale, self.minimum)

    @property
    def is_packed(self) -> bool:
        """Whether codes are words; see `packed` and `in_panels`."""
        return self.codes.dtype.name in WORDS

    @property
    def _panels(self) -> bool:
        return not self.is_super and self.codes.dtype == jnp.int32

    @property
    def _weight(self) -> Weight:
        return Weight(self.codes, self.scale, self.minimum)

    def _with(self, weight: Weight) -> QuantizedTensor:
        return dataclasses.replace(self, codes=weight.codes, scale=weight.scale, minimum=weight.minimum)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of this tensor."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @classmethod
    def quantize(cls, x, kind: str, group: int = BLOCK) -> QuantizedTensor:
        """Quantise a matrix of floats; `jtile.ops.quantize` is the same function.

        Args:
          x: float [out, in], of any float dtype.
          kind: `"int8"`, `"q8_0"`, `"fp8"`, `"q4_0"`, `"q4_1"` or `"mxfp4"`.
          group: how many weights of a row share a scale: 32 times a power of two that divides `in`. int8 and fp8 have
            one scale for a row, whatever `in` is.
        Returns:
          A `QuantizedTensor` of shape [out, in].
        Raises:
          KernelTypeError: `x` is no float array.
          KernelValueError: an unknown kind, an `x` that is no matrix, or a group that does not fit.
        """
        return _makers().quantize(x, kind, group)

    @classmethod
    def from_int4(cls, codes, scale, zero=None) -> QuantizedTensor:
        """Weights scale * (code - zero) as Q4_0, or as Q4_1 where a zero is given.

        Args:
          codes: uint8 [out, in], from 0 to 15, in a multiple of 32.
          scale: float [out, groups]; a group is a multiple of 32 weights.
          zero: integers of the same shape; None: 8 everywhere.
        Returns:
          A `QuantizedTensor` of shape [out, in].
        Raises:
          KernelValueError: shapes that do not fit.
        """
        return _makers().from_int4(codes, scale, zero)

    @classmethod
    def from_int8(cls, codes, scale) -> QuantizedTensor:
        """Weights scale * code as int8 where a row has one scale, as Q8_0 where groups have.

        Args:
          codes: int8 [out, in].
          scale: float [out, groups], or one for all, [1, 1]; groups are multiples of 32 weights.
        Returns:
          A `QuantizedTensor` of shape [out, in].
        Raises:
          KernelValueError: shapes that do not fit.
        """
        return _makers().from_int8(codes, scale)

    @classmethod
    def from_float8(cls, codes, scale) -> QuantizedTensor:
        """Weights scale * code as fp8.

        Args:
          codes: float8_e4m3fn [out, in].
          scale: float [out, groups], or one for all, [1, 1]; several groups are multiples of 32 weights.
        Returns:
          A `QuantizedTensor` of shape [out, in].
        Raises:
          KernelValueError: shapes that do not fit.
        """
        return _makers().from_float8(codes, scale)

    @classmethod
    def from_gguf_blocks(cls, raw, kind: str, shape: tuple[int, int]) -> QuantizedTensor:
        """Split the blocks of a GGUF file into codes, scales and minima.

        Args:
          raw: uint8, as many bytes as the file has for the matrix.
          kind: `"q4_0"`, `"q4_1"`, `"q8_0"`, `"mxfp4"` or a K-quant, `"q2_k"` to `"q6_k"`.
          shape: (out, in), in weights.
        Returns:
          A `QuantizedTensor` of that shape.
        Raises:
          KernelValueError: a kind without blocks in GGUF, or a number of bytes that does not fit `shape`.
        """
        return _makers().from_gguf_blocks(raw, kind, shape)

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """The weights as floats.

        Args:
          dtype: the float dtype of the result. The weights are computed in float32, and rounded to it once.
        Returns:
          An array of this tensor's `shape`.
        """
        return _dequantized(self, np.dtype(dtype))

    def packed(self) -> QuantizedTensor:
        """The same weights as they are multiplied fastest on GPUs with sm_90; every op takes either form.

        Call it once, when weights are loaded. An op that needs the other form unpacks the weights in each call.
        Groups are halved until each row of scales is made of whole lines of 16 bytes, which is what tensor maps copy.

        The codes of K-quants, which are bytes, are put in words of four, in their order.

        Returns:
          A `QuantizedTensor` of the same shape.
        Raises:
          KernelValueError: `in` is no multiple of 32.
        """
        if self.is_super:
            return dataclasses.replace(
                self, codes=super_blocks.as_words(self.codes), high=super_blocks.as_words(self.high)
            )
        if self.shape[-1] % BLOCK:
            raise KernelValueError(f"packed codes are those of blocks of {BLOCK}, got a tensor of {self.shape}")
        if self._panels:
            return self.unpacked().packed()
        codes = self.codes if self.is_packed else pack_codes(self.codes, self.kind)
        return dataclasses.replace(self._regrouped(), codes=codes)

    def in_panels(self) -> QuantizedTensor:
        """The same weights as CPUs multiply them fastest with rows that are rounded to integers (`activations`).

        Call it once, when weights are loaded. An op that needs the other form unpacks the weights in each call.

        Returns:
          A `QuantizedTensor` of the same shape.
        Raises:
          KernelValueError: a kind other than q4_0, q4_1 and q8_0, a stack, or an `out` that is no multiple of 16.
        """
        if self.kind not in ("q4_0", "q4_1", "q8_0") or self.ndim != 2 or self.shape[0] % PANEL:
            raise KernelValueError(
                f"panels are of {PANEL} rows of q4_0, q4_1 or q8_0, got {self.kind} of {list(self.shape)}; "
                "leave such weights as they are"
            )
        if self._panels:
            return self
        return self._with(_in_panels(self.unpacked()._weight))

    def _regrouped(self) -> QuantizedTensor:
        """The same weights in groups that kernels for sm_90 can copy; this tensor where no size of groups suits."""
        inner, bits = self.shape[-1], 4 if self.is_4bit else 8
        arrays = [a for a in (self.scale, self.minimum) if a is not None]
        size = min(a.dtype.itemsize for a in arrays)

        def copied(group: int) -> bool:  # rows of scales, and the scales of 512 bytes of codes
            return inner // group * size % 16 == 0 and 4096 // bits * size >= 16 * group

        if self.scale.shape[-1] == 1 or copied(self.group):
            return self
        group = next((g for g in (256, 128, 64, 32) if self.group % g == 0 and copied(g)), self.group)
        return self if group == self.group else self.regrouped(group)

    def regrouped(self, group: int) -> QuantizedTensor:
        """The same weights in smaller groups, whose scales (and minima) are repeated; not for int8 and K-quants.

        Args:
          group: the weights of a new group, a divisor of this tensor's `group`.
        Returns:
          A `QuantizedTensor` of the same shape and kind.
        Raises:
          KernelValueError: `group` does not divide this tensor's, or the kind has no groups of a free size.
        """
        if group != self.group and (self.is_super or self.kind == "int8"):
            raise KernelValueError(f"{self.kind} has no groups of another size; quantise the weights as q8_0 or q4_0")
        if self._panels:
            return self.unpacked().regrouped(group).in_panels()
        if self.group % group:
            raise KernelValueError(f"groups of {self.group} weights do not divide into groups of {group}")
        wide = lambda a: None if a is None else jnp.repeat(a, self.group // group, axis=-1)
        return dataclasses.replace(self, scale=wide(self.scale), minimum=wide(self.minimum))

    def with_minima(self) -> QuantizedTensor:
        """Turn a Q4_0 into a Q4_1 of the same weights, so that it can be put together with others of that kind.

        Returns:
          A `QuantizedTensor` of kind `"q4_1"` with minima in float32; a tensor of another kind is returned unchanged.
        """
        if self.kind != "q4_0":
            return self
        return dataclasses.replace(self, minimum=-8 * self.scale.astype(jnp.float32), kind="q4_1")

    def unpacked(self) -> QuantizedTensor:
        """The same weights with their codes as bytes, as `quantize` makes them: this undoes `packed` and `in_panels`.

        Returns:
          A `QuantizedTensor` of the same shape. Groups that `packed` has halved stay so.
        """
        if self.is_super:
            return dataclasses.replace(
                self, codes=super_blocks.as_bytes(self.codes), high=super_blocks.as_bytes(self.high)
            )
        if self._panels:
            return self._with(_in_rows(self._weight, self.kind))
        return dataclasses.replace(self, codes=unpack_codes(self.codes, self.kind))

    def rows(self, index) -> QuantizedTensor:
        """Some rows as a tensor of its own.

        Args:
          index: int [n], rows from 0 to out - 1; negative ones count from the end.
        Returns:
          A `QuantizedTensor` of shape [n, in], with codes in bytes if these are in panels. The weights of a row that
          does not exist are NaN.
        """
        index = jnp.asarray(index)
        if self._panels:
            return self._with(rows_of_panels(self._weight, index, self.kind))
        return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0), self)

    @staticmethod
    def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Put matrices below each other, along `out`.

        Args:
          parts: tensors of one kind and one `in`.
        Returns:
          A `QuantizedTensor` whose `out` is the sum of theirs.
        Raises:
          KernelTypeError: the kinds differ, or only some are packed.
          KernelValueError: `in` or the size of the groups differs.
        """
        form = {"uint32": "packed ", "int32": "panels of "}
        kinds = sorted({form.get(part.codes.dtype.name, "") + part.kind for part in parts})
        if len(kinds) != 1:
            raise KernelTypeError(
                f"cannot concatenate quantised tensors of the kinds {', '.join(kinds)}; requantise them"
            )
        if len({tuple((*a.shape[:-2], a.shape[-1]) for a in jax.tree.leaves(part)) for part in parts}) != 1:
            found = ", ".join(f"{list(part.shape)} in groups of {part.group}" for part in parts)
            raise KernelValueError(
                f"cannot concatenate quantised tensors {found}: expected one `in` and one size of groups; "
                "`regrouped` makes larger groups smaller"
            )
        ways = {part.activations for part in parts}
        blocks_meet = all(part.shape[-2] % BLOCKS == 0 for part in parts[:-1])
        same = len(ways) == 1 and (blocks_meet or ways != {"blocks"})
        parts = parts if same else [dataclasses.replace(part, activations=None) for part in parts]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-2), *parts)

    @staticmethod
    def stack(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Matrices of one shape as one stack, for `grouped_matmul`.

        `grouped_matmul` does not round rows of x to 8 bits, so that `activations` is None in the stack.

        Args:
          parts: tensors of one shape and storage.
        Returns:
          A `QuantizedTensor` of shape [groups, out, in].
        Raises:
          KernelTypeError: they are no quantised tensors, or their shapes or their storage differ.
        """
        if not all(isinstance(part, QuantizedTensor) for part in parts):
            names = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
            raise KernelTypeError(
                f"QuantizedTensor.stack takes quantised tensors, got {names}; stack arrays by jnp.stack"
            )
        if len({(part.shape, part.storage) for part in parts}) != 1:
            raise KernelTypeError("cannot stack quantised tensors of several shapes or kinds; requantise them")
        parts = [dataclasses.replace(part, activations=None) for part in parts]
        parts = [part.unpacked() if part._panels else part for part in parts]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    @property
    def storage(self) -> tuple:
        """The kind, and the last side and dtype of each array: what two weights of one kernel have in common."""
        sides = ((*leaf.shape[:-2], leaf.shape[-1], leaf.dtype.name) for leaf in jax.tree.leaves(self))
        return self.kind, *sides


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantized(tensor: QuantizedTensor, dtype) -> jax.Array:
    """The weights as floats, by one program for each shape; outside of a program there would be a dozen steps."""
    if tensor.is_super:
        return super_blocks.dequantized(tensor.super_blocks, tensor.kind).astype(dtype)
    return dequantize_rows(tensor.kind, *in_rows(tensor._weight, tensor.kind)).astype(dtype)


_in_panels = jax.jit(in_panels)
_in_rows = jax.jit(in_rows, static_argnames="kind")


def _makers():
    from jtile.ops import quantizing  # that module has this class

    return quantizing
