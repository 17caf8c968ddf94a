"""What code for a GPU may use, by its architecture."""

from __future__ import annotations

import dataclasses
import functools
import re

from jtile._errors import KernelValueError

MAX_BLOCKS = 2**31 - 1  # along x, on every GPU


@dataclasses.dataclass(frozen=True)
class Features:
    """Facts of one architecture that emission depends on.

    Attributes:
      arch: `sm_90`, `gfx942`.
      lanes: threads of a warp (a wavefront).
      shared: bytes of shared memory that one block may take.
      tma: tile loads and stores may go through tensor maps.
      fp8: the dtypes of fp8 that hardware converts and multiplies.
      scaled: block-scaled products in hardware.
      max_threads: of a block.
      registers: 32-bit registers of one multiprocessor (on AMD: of one compute unit).
      warps: resident on one multiprocessor at most.
      npu: a processor with a cube core and vector cores, for which another compiler places tiles and orders what they
        do: no threads, no library of a GPU's vendor, no instructions in text. `shared` is then the memory of a vector
        core, which holds all tiles of a program.
      blocks: that one launch may start at most; further programs are shared out among them.
    """

    arch: str
    lanes: int
    shared: int
    tma: bool = False
    fp8: tuple[str, ...] = ()
    scaled: bool = False
    max_threads: int = 1024
    registers: int = 65536
    warps: int = 64
    npu: bool = False
    blocks: int = MAX_BLOCKS

    @property
    def multiprocessor_shared(self) -> int:
        """Bytes of shared memory of one multiprocessor: on NVIDIA each block takes 1 KiB more than it asks for."""
        return self.shared + 1024 * self.cuda

    @property
    def stages(self) -> int:
        """How deep a pipeline may be that a loop asks for. AMD's has one stage in registers, one in its small shared
        memory."""
        return 16 if self.cuda else 2

    @property
    def cuda(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> int:
        """90 of sm_90; 0 of AMD."""
        return int(re.sub(r"\D", "", self.arch)) if self.cuda else 0


_OCP = ("float8_e4m3fn", "float8_e5m2")

# bytes of shared memory a block may have: CUDA C programming guide, table of technical specifications
_CUDA = {
    75: Features("sm_75", 32, 65536, warps=32),
    80: Features("sm_80", 32, 166912),
    86: Features("sm_86", 32, 101376, warps=48),
    87: Features("sm_87", 32, 166912),
    89: Features("sm_89", 32, 101376, warps=48, fp8=_OCP),
    90: Features("sm_90", 32, 232448, tma=True, fp8=_OCP),
    100: Features("sm_100", 32, 232448, tma=True, fp8=_OCP, scaled=True),
    103: Features("sm_103", 32, 232448, tma=True, fp8=_OCP, scaled=True),
    120: Features("sm_120", 32, 101376, warps=48, tma=True, fp8=_OCP, scaled=True),
    121: Features("sm_121", 32, 101376, warps=48, tma=True, fp8=_OCP, scaled=True),
}
_ROCM = {
    "gfx90a": Features("gfx90a", 64, 65536, registers=131072, warps=32),
    "gfx942": Features("gfx942", 64, 65536, registers=131072, warps=32),
    "gfx950": Features("gfx950", 64, 163840, fp8=_OCP, scaled=True, registers=131072, warps=32),
    "gfx1100": Features("gfx1100", 32, 65536, registers=196608),
    "gfx1201": Features("gfx1201", 32, 65536, fp8=_OCP, registers=196608),
}


@functools.cache
def features(arch: str) -> Features:
    """The facts of an architecture by its name (`sm_90`, `gfx942`); KernelValueError for one that is not known."""
    name = arch.rstrip("a") if arch.startswith("sm_") else arch
    known = {f"sm_{k}": f for k, f in _CUDA.items()} | _ROCM
    if name not in known:
        raise KernelValueError(
            f"unknown GPU architecture {arch!r}: jtile compiles for {', '.join(known)}; on another GPU, run kernels on "
            "the CPU (JAX_PLATFORMS=cpu)"
        )
    return known[name]


def architectures() -> tuple[list[str], list[str]]:
    """The names of NVIDIA's and of AMD's."""
    return [f"sm_{k}" for k in _CUDA], list(_ROCM)
