"""A back end from outside of jtile: elementwise kernels over one axis, as C that gcc compiles.

What a package needs to bring a platform: a record, and an entry point of the group `jtile.platforms` that names it. Its
kernels run on XLA's CPU through jtile's own handler, whose format of images docs/cpu.md describes; a platform with a
handler of its own would register it in `register`.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import jtile as jt
from jtile import ffi, ir
from jtile.errors import UnsupportedError
from jtile.lowering.artifact import Artifact
from jtile.lowering.platforms import Platform
from jtile.lowering.targets import Scale, Target

TARGET = Target(
    "toy:one",
    "toy",
    "toy1",
    scales=(Scale("thread"), Scale("block"), Scale("device", units=1)),
    dtypes=("float32", "int32"),
)
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
ENTRY = "int jtile_entry(float** bufs, const long* dims, long begin, long end, void* ws, void* host)"


def emit(kernel: ir.Kernel) -> str:
    """C text of a kernel: each tile is an array of floats on the stack."""
    names = {r: f"bufs[{k}]" for k, r in enumerate([*kernel.inputs, *kernel.outputs])}
    lines = []
    for number, op in enumerate(kernel.body.ops):
        match op:
            case ir.ProgramId():
                names[op.result] = "p"
            case ir.Full():
                names[op.result] = f"{op.value}f"
            case ir.Load():
                names[op.result] = f"t{number}[k]"
                lines += [
                    f"float t{number}[{op.index[0].size}];",
                    each(op, f"t{number}[k] = i < n ? {names[op.ref]}[i] : 0;"),
                ]
            case ir.Map() if op.fn in OPERATORS:
                names[op.result] = f"({f' {OPERATORS[op.fn]} '.join(names[a] for a in op.args)})"
            case ir.Store():
                lines.append(each(op, f"if (i < n) {names[op.ref]}[i] = {names[op.value]};"))
            case _:
                raise UnsupportedError(f"kernel {kernel.name}: the toy has no {op.mnemonic}")
    body = "\n    ".join(lines)
    return f"{ENTRY} {{\n  for (long p = begin; p < end; ++p) {{\n    {body}\n  }}\n  return 0;\n}}\n"


def each(op: ir.Load | ir.Store, statement: str) -> str:
    tile, (n,) = op.index[0], op.ref.shape
    return f"for (long k = 0, n = {n}, i = p * {tile.step}; k < {tile.size}; ++k, ++i) {{ {statement} }}"


def compile_kernel(kernel: ir.Kernel, target: Target, options: dict, texts: bool) -> Artifact:
    text = emit(kernel)
    with tempfile.TemporaryDirectory() as folder:
        source, image = Path(folder, "kernel.c"), Path(folder, "kernel.o")
        source.write_text(text)
        flags = ["-O1", "-fPIC", "-ffreestanding", "-fno-stack-protector", "-fno-asynchronous-unwind-tables"]
        subprocess.run(["gcc", "-c", *flags, "-o", image, source], check=True)
        code = image.read_bytes()
    return Artifact(target.name, code, {"c": text} if texts else {}, {"name": kernel.name})


def attributes(artifact: Artifact, kernel: ir.Kernel, values: dict) -> dict:
    numbers = {"programs": math.prod(kernel.grid), "workspace": 64, "cost": 1}
    texts = {"name": artifact.launch["name"], "isa": "x86_64:", "sites": "[]"}
    return {"image": artifact.image} | {k: np.int64(v) for k, v in numbers.items()} | texts


TOY = Platform(
    name="toy",
    hosts=("cpu",),
    call="jtile_cpu",
    compile=compile_kernel,
    attributes=attributes,
    resolve=lambda name: TARGET,
    names=lambda: ["toy:one"],
    here=lambda: TARGET,
    register=lambda: ffi.register("cpu"),
    claims=lambda arch: arch == "toy1",
    literals=True,
    status="a test",
)


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def double(x, o):
    """A kernel that the package brings besides: it is defined while the package is imported."""
    o.tiles(8)[0] = 2.0 * x.tiles(8)[0]
