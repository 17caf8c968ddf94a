"""What an output holds before the first program runs: made explicit as operands that share the output's buffer.

A back end sees no `inits` this way, only aliases, and XLA fills the buffer in place.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jtile import ir

# One byte, repeated: a number that no kernel computes by accident; the interpreter's memory starts with the same.
PATTERN = 0xAA


@dataclasses.dataclass(frozen=True)
class Start:
    """An operand to add to the call: an array of `shape` and `dtype`, every element of it `value`.

    Attributes:
      poison: nothing is meant to read it, so that some elements may be other poison.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    value: np.generic
    poison: bool = False


def with_starts(kernel: ir.Kernel, *, poison: bool) -> tuple[ir.Kernel, tuple[Start, ...]]:
    """The kernel with a further input, aliased to it, for each output that has an `init`, and what to pass for these.

    With `poison`, outputs that would start undefined get NaN (integers: a pattern). Aliased outputs keep their operand.
    """
    taken = {o for _, o in kernel.aliases}
    inits = kernel.inits or (None,) * len(kernel.outputs)
    params, starts, aliases = [], [], list(kernel.aliases)
    for k, (out, init) in enumerate(zip(kernel.outputs, inits, strict=True)):
        if k in taken or 0 in out.shape or (init is None and not poison):
            continue
        dtype = out.type.info.numpy
        value = poison_value(dtype) if init is None else np.asarray(init).astype(dtype)[()]
        aliases.append((len(kernel.inputs) + len(starts), k))
        params.append(ir.Value(ir.RefType(out.shape, out.dtype, "in"), f"{out.name or 'out'}_start"))
        starts.append(Start(out.shape, dtype, value, init is None))
    if not starts:
        return kernel, ()
    inputs, rest = kernel.inputs, [p for p in kernel.params if p.type.role != "in"]
    new = dataclasses.replace(kernel, params=(*inputs, *params, *rest), aliases=tuple(aliases))
    return new, tuple(starts)


def poison_bytes(kernel: ir.Kernel) -> list[int] | None:
    """For each output the byte that poison fills it with, or -1 where it starts from something; None: all of them do.

    For platforms whose calls fill their results themselves, and that take a kernel as it is.
    """
    taken = {o for _, o in kernel.aliases}
    inits = kernel.inits or (None,) * len(kernel.outputs)
    undefined = [k not in taken and init is None for k, init in enumerate(inits)]
    if not any(undefined):
        return None
    outs = zip(kernel.outputs, undefined, strict=True)
    return [poison_byte(v.type.info.numpy) if free else -1 for v, free in outs]


def poison_byte(dtype: np.dtype) -> int:
    """The byte that makes `poison_value(dtype)`, or another NaN, where it is repeated."""
    kind = ir.dtype_info(dtype).kind
    if kind != "f":
        return 1 if kind == "b" else PATTERN
    # In most dtypes a NaN is all ones; those without infinities and without a negative zero have only that zero's bits.
    all_ones = np.full(dtype.itemsize, 0xFF, np.uint8).view(dtype)[0]
    return 0xFF if np.isnan(all_ones) or not np.isnan(poison_value(dtype)) else 0x80


def without_idle_aliases(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel without the aliases of inputs that it never touches: these cannot conflict with anything, and a back
    end that knows of no alias may assume that its buffers are apart."""
    used = {v for op in kernel.body.walk() for v in op.operands()}
    live = tuple((i, o) for i, o in kernel.aliases if kernel.inputs[i] in used)
    return kernel if live == kernel.aliases else dataclasses.replace(kernel, aliases=live)


def poison_value(dtype: np.dtype) -> np.generic:
    """NaN where the dtype has one, else the pattern 0xAA in every byte; True for bool."""
    info = ir.dtype_info(dtype)
    if info.kind == "b":
        return np.True_
    if info.name == "float4_e2m1fn":
        return np.asarray(-6.0).astype(dtype)[()]  # its least number: it has neither NaN nor infinity
    if info.kind == "f":
        return np.asarray(np.nan).astype(dtype)[()]
    pattern = int.from_bytes(bytes([PATTERN]) * max(1, info.bits // 8)) & ((1 << info.bits) - 1)
    if info.kind == "i" and pattern >> (info.bits - 1):
        pattern -= 1 << info.bits
    return np.asarray(pattern, np.uint64 if info.kind == "u" else np.int64).astype(dtype)[()]
