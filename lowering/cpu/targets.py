"""CPU targets: this machine's, and those of instruction sets with a name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jtile import _cache
from jtile._cores import cores_here
from jtile._errors import KernelValueError

from ..targets import Memory, Scale, Target

if TYPE_CHECKING:
    from .isa import Isa

RESIDENT = 256  # programs of a kernel that waits for other devices: each has a thread, see ffi/csrc/program.cc


def cpu_target(isa: str | None) -> Target:
    """The CPU target of an instruction set that `jtile.lowering.cpu.isa` names; None: this machine's. It has the cores
    that this process may use now."""
    return _with_cores(isa, cores_here())


@functools.cache
def _with_cores(isa: str | None, cores: int) -> Target:
    if isa in (None, "host"):
        return _cpu_target("cpu", _host_arch(), _host_memories(), cores)
    from .isa import ISAS

    if isa not in ISAS:
        raise KernelValueError(f"unknown instruction set {isa!r}: expected host, {', '.join(sorted(ISAS))}")
    return _cpu_target(
        f"cpu:{isa}", spell_isa(ISAS[isa]), (Memory("l1", 32 << 10), Memory("l2", 512 << 10), Memory("dram")), cores
    )


def _cpu_target(name: str, arch: str, memories: tuple[Memory, ...], cores: int) -> Target:
    """A core is a block of one thread: programs are shared out to cores, and each runs on the vectors of one."""
    has, isa = {m.name for m in memories}, parse_isa(arch)
    return Target(
        name=name,
        platform="cpu",
        arch=arch,
        scales=(
            Scale("thread", memory="l1" if "l1" in has else None),
            Scale("block", memory="l2" if "l2" in has else None),
            Scale("device", units=cores, memory="dram"),
            Scale("node"),
        ),
        memories=memories,
        matrix_shapes=_matrix_shapes(isa.features),
        limits=(("programs", 2**62), ("resident", RESIDENT)),
        features=("host", "peers", *_features(isa)),
    )


def _features(isa: Isa) -> list[str]:
    """What ops ask for: whether rows are best rounded to int16, whether many such rows meet tiles, and whether these
    are of bytes."""
    from . import byte_digits, gemm_scaled, scaled_tiles

    integers = gemm_scaled.fits(isa) and isa.has("avx512vnni")
    return (
        ["int16 products"] * integers
        + ["int16 tiles"] * (integers and scaled_tiles.fits(isa))
        + (["byte tiles"] * (integers and byte_digits.fits(isa)))
    )


def _matrix_shapes(features: frozenset[str]) -> tuple[tuple[int, int, int, str], ...]:
    """The matrix shapes of instructions: those that add 2 or 4 products to each of 16 columns of a vector of
    accumulators, and those on tile registers."""
    shapes = {
        "avx512bf16": (1, 16, 2, "bfloat16"), "avx512vnni": (1, 16, 4, "int8"),
        "amx-bf16": (16, 16, 32, "bfloat16"), "amx-int8": (16, 16, 64, "int8"),
    }  # fmt: skip
    return tuple(shape for feature, shape in shapes.items() if feature in features)


def spell_isa(isa: Isa) -> str:
    """An instruction set as the `arch` of a target."""
    return f"{isa.arch}:{isa.cpu}:{isa.vector_bits}:{','.join(sorted(isa.features))}"


def parse_isa(arch: str) -> Isa:
    """The reverse of `spell_isa`; raises KernelValueError."""
    from .isa import Isa

    parts = arch.split(":")
    if len(parts) != 4 or not parts[2].isdecimal():
        raise KernelValueError(f"arch {arch!r} of a CPU target: expected architecture:processor:vector bits:features")
    return Isa(parts[0], parts[1], frozenset(filter(None, parts[3].split(","))), int(parts[2]))


def _host_arch() -> str:
    """This machine's instruction set. LLVM finds it once for each processor; afterwards it is read from the disk cache,
    so that a process whose kernels are all cached never loads LLVM."""
    key = _cache.key("host isa", _processor())
    entry = _cache.get(key)
    from .isa import permitted, processor_isa

    isa = parse_isa(str(entry.header["arch"])) if entry is not None else processor_isa()
    if entry is None:
        _cache.put(key, {"arch": spell_isa(isa)}, b"")
    return spell_isa(dataclasses.replace(isa, features=permitted(isa.features)))


def _processor() -> str:
    """A text that tells this machine's processor from others."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU implementer",
              "CPU architecture", "CPU variant", "CPU part", "CPU revision")  # fmt: skip
    lines = {platform.machine(): platform.processor()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        for line in f:
            if not line.strip():
                break  # /proc/cpuinfo repeats these lines for each processor, and the first stands for all
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                lines[name.strip()] = value.strip()
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()


def _host_memories() -> tuple[Memory, ...]:
    found = {m.name: m for m in _caches()}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found["dram"] = Memory("dram", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return tuple(found.setdefault(name, Memory(name)) for name in (*sorted(set(found) - {"dram"}), "dram"))


def _caches() -> Iterator[Memory]:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
            if kind in ("Data", "Unified"):
                yield Memory(f"l{level}", int(size[:-1]) * units[size[-1]])
