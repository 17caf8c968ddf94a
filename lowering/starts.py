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
