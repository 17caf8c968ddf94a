"""Runs a kernel's CPU code on NumPy arrays, beside the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jtile.ffi import run_image
from jtile.interpret import poison
from jtile.ir import DTYPES, Kernel, bind_sizes, concrete, is_dynamic
from jtile.ir.shapes import full_array
from jtile.lowering.artifact import Artifact
from jtile.lowering.cpu import compile_kernel

LAUNCH = ("programs", "workspace", "isa", "sites", "name", "dims")


def packed(x: np.ndarray) -> np.ndarray:
    """An array as it lies in memory: 4-bit elements two a byte, the first in the low half."""
    if DTYPES[x.dtype.name].bits != 4:
        return np.ascontiguousarray(x)
    nibbles = np.append(x.reshape(-1).view(np.uint8) & 15, np.zeros(x.size % 2, np.uint8))
    return nibbles[0::2] | (nibbles[1::2] << 4)


def unpacked(raw: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The array of the shape and dtype of `like` that lies in memory as `raw`."""
    if DTYPES[like.dtype.name].bits != 4:
        return raw
    nibbles = np.stack([raw & 15, raw >> 4], -1).reshape(-1)[: like.size]
    if like.dtype.name == "int4":
        nibbles = np.where(nibbles > 7, nibbles.astype(np.int8) - 16, nibbles.astype(np.int8))
    if DTYPES[like.dtype.name].kind == "f":
        return nibbles.view(like.dtype).reshape(like.shape)
    codes = DTYPES[like.dtype.name].kind == "f"
    return (nibbles.view(like.dtype) if codes else nibbles.astype(like.dtype)).reshape(like.shape)


def starts(kernel: Kernel, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the outputs hold before the kernel runs: the aliased input, the init, or poison."""
    out = []
    for k, v in enumerate(kernel.outputs):
        shared = [inputs[i] for i, o in kernel.aliases if o == k]
        init = kernel.inits[k] if kernel.inits else None
        start = poison(v.shape, v.dtype) if init is None else full_array(init, v.shape, v.dtype)
        out.append(shared[0] if shared else start)
    return out


def run_native(kernel: Kernel, inputs: Sequence[np.ndarray], isa=None) -> list[np.ndarray]:
    """Compile for an instruction set (default: this machine) and run; gives the outputs."""
    artifact = compile_kernel(kernel, isa)
    return run_artifact(artifact, kernel, inputs)


def run_artifact(
    artifact: Artifact, kernel: Kernel, inputs: Sequence[np.ndarray], threads: int = 1
) -> list[np.ndarray]:
    """Run what a kernel was compiled to; gives the outputs."""
    if is_dynamic(kernel):
        kernel = concrete(kernel, bind_sizes(kernel, [x.shape for x in inputs]))
    before = starts(kernel, inputs)
    operands = [packed(x) for x in inputs]
    results = [packed(x).copy() for x in before]
    for i, o in kernel.aliases:
        operands[i] = results[o]
    dims = artifact.launch.get("dims", ())
    sizes = [inputs[k].shape[axis] for k, axis in zip(dims[0::4], dims[1::4], strict=True)]
    run_image(
        artifact.image,
        [*operands, *results],
        sizes=sizes,
        threads=threads,
        **{n: artifact.launch[n] for n in LAUNCH if n in artifact.launch},
    )
    return [unpacked(r, s) for r, s in zip(results, before, strict=True)]
