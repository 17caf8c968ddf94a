"""Instruction sets the CPU back end emits for: what a vector holds, and which fast paths exist."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import platform
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Isa:
    """One CPU instruction set.

    Attributes:
      arch: `"x86_64"` or `"aarch64"`.
      cpu: LLVM's name of the processor (`"znver5"`, `"haswell"`, `"x86-64"`, `"generic"`).
      features: LLVM feature names that are present (`"avx512bf16"`, `"fma"`, ...).
      vector_bits: width of the vectors the generated code uses.
    """

    arch: str
    cpu: str
    features: frozenset[str]
    vector_bits: int

    def has(self, *features: str) -> bool:
        return all(f in self.features for f in features)

    def lanes(self, bits: int) -> int:
        """How many elements of `bits` bits one vector holds."""
        return max(1, self.vector_bits // bits)

    @property
    def registers(self) -> int:
        """Number of architectural vector registers."""
        return 32 if self.arch == "aarch64" or self.vector_bits == 512 else 16

    @property
    def triple(self) -> str:
        return f"{self.arch}-unknown-linux-gnu"

    @property
    def feature_string(self) -> str:
        """The features as LLVM's `target-features` wants them; sorted, so that images are reproducible."""
        return ",".join(f"+{f}" for f in sorted(self.features))


_SSE2 = frozenset({"sse", "sse2", "fxsr", "cx8", "mmx", "64bit"})
_AVX2 = _SSE2 | {
    "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe",
    "cx16",
}  # fmt: skip
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}

ISAS: dict[str, Isa] = {
    "sse2": Isa("x86_64", "x86-64", _SSE2, 128),
    "avx2": Isa("x86_64", "haswell", _AVX2, 256),
    "avx512": Isa("x86_64", "skylake-avx512", _AVX512, 512),
    "avx512bf16": Isa("x86_64", "cooperlake", _AVX512 | {"avx512bf16", "avx512vnni", "avx512vbmi"}, 512),
    "amx": Isa(
        "x86_64",
        "sapphirerapids",
        _AVX512 | {"avx512bf16", "avx512vnni", "avx512vbmi", "amx-tile", "amx-bf16", "amx-int8"},
        512,
    ),
    "aarch64": Isa("aarch64", "generic", frozenset({"neon", "fp-armv8"}), 128),
}


def permitted(features: Iterable[str]) -> frozenset[str]:
    """The features without those of tile registers where the system does not let this process use them."""
    found = frozenset(features)
    return found if _tiles_are_permitted() else frozenset(f for f in found if not f.startswith("amx-"))


@functools.cache
def _tiles_are_permitted() -> bool:
    """Asks Linux to save tile registers (8 KiB a thread, once it has used them) with this process's threads."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@functools.cache
def host_isa() -> Isa:
    """The instruction set that this process may use on the machine it runs on."""
    isa = processor_isa()
    return dataclasses.replace(isa, features=permitted(isa.features))


@functools.cache
def processor_isa() -> Isa:
    """The instruction set of this machine's processor, of which `permitted` says what this process may use."""
    import llvmlite.binding as llvm  # not at import: a kernel that comes from the disk cache needs no LLVM

    features = frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)
    triple = llvm.get_process_triple()
    arch = "aarch64" if triple.startswith(("aarch64", "arm64")) else "x86_64"
    if arch == "aarch64":
        bits = 128
    else:
        bits = (
            512 if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= features else 256 if "avx2" in features else 128
        )
    return Isa(arch, llvm.get_host_cpu_name(), features, bits)
