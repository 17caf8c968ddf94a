"""Ascend targets as data: the NPUs of the series 910B (A2) and 910_93 (A3), by the names of the vendor's compiler.

Sources: the target descriptions of AscendNPU-IR 1.2.0 (Apache-2.0), which it also writes into what it compiles, where
`tests/lowering/ascend` reads them again. Bandwidths and rates are not known to jtile, and no model of time uses them.
"""

from __future__ import annotations

import functools

from jtile import ir
from jtile._errors import KernelValueError, UnsupportedError

from ..targets import Gap, Memory, Scale, Target, without_devices
from ..triton.features import Features
from ..triton.ttir import MAX_TILE

KIB = 1 << 10
UB, L1, L0A, L0B, L0C = 192 * KIB, 512 * KIB, 64 * KIB, 64 * KIB, 128 * KIB
VECTORS = 2  # vector cores beside each cube core

# name of a target -> name for `bishengir-compile --target`, cube cores
ARCHS = {
    "910b1": ("Ascend910B1", 24),
    "910b2": ("Ascend910B2", 24),
    "910b2c": ("Ascend910B2C", 24),
    "910b3": ("Ascend910B3", 20),
    "910b4": ("Ascend910B4", 20),
    "9362": ("Ascend910_9362", 20),
    "9372": ("Ascend910_9372", 20),
    "9381": ("Ascend910_9381", 24),
    "9382": ("Ascend910_9382", 24),
    "9391": ("Ascend910_9391", 24),
    "9392": ("Ascend910_9392", 24),
}
_MISSING = ("float64",)


@functools.cache
def ascend_target(arch: str) -> Target:
    """The target of an NPU, `"910b1"` or `"9382"`; KernelValueError for one that is not known."""
    if arch.lower() not in ARCHS:
        raise KernelValueError(f"unknown Ascend NPU {arch!r}: jtile knows {', '.join(ARCHS)}")
    name = arch.lower()
    cores = ARCHS[name][1]
    return Target(
        name=f"ascend:{name}",
        platform="ascend",
        arch=ARCHS[name][0],
        scales=(
            Scale("thread"),
            Scale("block", memory="ub"),
            Scale("cluster", units=VECTORS, memory="l1"),
            Scale("device", units=cores, memory="dram"),
            Scale("node", units=8),
        ),
        memories=(Memory("ub", UB), Memory("l1", L1), Memory("l0a", L0A), Memory("l0b", L0B), Memory("l0c", L0C),
                  Memory("dram")),
        matrix_shapes=((16, 16, 16, "float16"), (16, 16, 16, "bfloat16"), (16, 16, 8, "float32"), (16, 16, 32, "int8")),
        dtypes=tuple(d for d in ir.DTYPES if d not in _MISSING),
        limits=(("programs", 2**62), ("tile", MAX_TILE)),
        gaps=tuple(_gaps()),
        features=("vector cores",),
    )  # fmt: skip


def names() -> list[str]:
    """The names of all Ascend targets."""
    return [f"ascend:{name}" for name in ARCHS]


def resolve(name: str) -> Target:
    """The target of a name such as `"ascend:910b1"` or `"ascend:9382"`."""
    arch = name.partition(":")[2]
    if not arch:
        raise UnsupportedError(f"target {name!r} names no NPU: write 'ascend:910b1', or another of {names()}")
    return ascend_target(arch)


def cores(target: Target) -> tuple[int, int]:
    """Cube cores and vector cores of an NPU."""
    cubes, vectors = target.units("device"), target.units("cluster")
    if cubes is None or vectors is None:
        raise KernelValueError(f"target {target.name!r} does not say how many units 'cluster' and 'device' have")
    return cubes, cubes * vectors


def features(target: Target, *, products: bool) -> Features:
    """The features that emission goes by. A program runs on one vector core, or, in a kernel with products, on a cube
    core and its two vector cores. As many blocks start as there are such cores, and each loops over programs, since to
    start a block costs more than a turn of its loop."""
    cubes, vectors = cores(target)
    ub = next(m.size for m in target.memories if m.name == "ub")
    return Features(
        arch=target.arch,
        backend="npu",
        processor=target.arch,
        lanes=1,
        shared=ub or UB,
        library=None,
        stages=2,
        blocks=cubes if products else vectors,
    )


def _gaps() -> list[Gap]:
    stored = "the vendor's compiler has no such operation: compute it on the host, or with the functions that are there"
    gaps = [Gap(f"map.{fn}", "*", stored) for fn in ("lgamma", "digamma", "erf_inv")]
    gaps += [Gap(f"map.{fn}", "uint64", "cast to int64") for fn in ("div", "rem")]
    gaps += [Gap(op, "*", "an NPU has no log that programs write to: return what you want to see as an output")
             for op in ("print", "assert")]  # fmt: skip
    gaps += [Gap("last_arrival", "*", "programs have no counters to arrive at: let a second kernel finish the work")]
    return gaps + without_devices()
