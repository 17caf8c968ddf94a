"""Runs a kernel's CPU code on NumPy arrays, beside the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jtile.ffi import run_image
from jtile.interpret import poison
from jtile.ir import BY_NUMPY, Kernel, bind_sizes, concrete, is_dynamic
from jtile.ir.shapes import full_array
from jtile.lowering.artifact import Artifact
from jtile.lowering.cpu import compile_kernel

LAUNCH = ("programs", "workspace", "isa", "sites", "name", "dims")


def packed(x: np.ndarray) -> np.ndarray:
    """An array as it lies in memory: elements of 2 and 4 bits four or two a byte, the first in the low bits."""
    bits = BY_NUMPY[x.dtype].bits
    if bits >= 8:
        return np.ascontiguousarray(x).reshape(x.shape)  # NumPy makes a vector of a scalar
    each = 8 // bits
    codes = np.append(x.reshape(-1).view(np.uint8) & ((1 << bits) - 1), np.zeros(-x.size % each, np.uint8))
    return np.bitwise_or.reduce([codes[k::each] << (k * bits) for k in range(each)]).astype(np.uint8)


def unpacked(raw: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The array of the shape and dtype of `like` that lies in memory as `raw`."""
    info = BY_NUMPY[like.dtype]
    if info.bits >= 8:
        return raw
    ones = (1 << info.bits) - 1
    codes = np.stack([raw >> k & ones for k in range(0, 8, info.bits)], -1).reshape(-1)[: like.size]
    if info.kind == "f":
        return codes.view(like.dtype).reshape(like.shape)
    if info.kind == "i":
        codes = codes.astype(np.int8) - np.where(codes > ones // 2, ones + 1, 0).astype(np.int8)
    return codes.astype(like.dtype).reshape(like.shape)


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
