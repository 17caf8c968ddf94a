"""What code for a GPU may use, by its architecture."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container
from typing import Literal

from jtile._errors import KernelValueError

MAX_BLOCKS = 2**31 - 1  # along x, on every GPU


@dataclasses.dataclass(frozen=True)
class Features:
    """Facts of one architecture that emission depends on. The folder of each platform has the table of its own.

    Attributes:
      arch: `sm_90`, `gfx942`.
      backend: which compiler takes the text, of triton's back ends for GPUs or of an NPU's vendor: what one of them
        gets wrong or lacks goes by this.
      processor: triton's name of the architecture: 90, "gfx942".
      lanes: threads of a warp (a wavefront).
      shared: bytes of shared memory that one block may take; it takes `reserved` bytes besides.
      stages: how deep a pipeline may be that a loop asks for.
      library: the vendor's library of mathematical functions, which triton links; None: there is none.
      ptx: instructions of NVIDIA may stand in the text.
      tma: tile loads and stores may go through tensor maps.
      clusters: blocks may share a program.
      warpgroup_products: four warps multiply together, from shared memory, while they go on: ops of the block level.
      tf32: matrix units take float32 rounded to tf32; float32_units: they take float32 as it is.
      int8_units: matrix units take bytes.
      fp8: the dtypes of fp8 that hardware converts and multiplies; mixed_fp8: also one with the other.
      scaled: block-scaled products in hardware.
      atomic_add: the 16-bit dtypes that memory adds by itself.
      cache_hints: loads may say when the cache should forget what they read.
      max_threads: of a block.
      dependents: a kernel may start before the one in front of it has ended.
      registers: 32-bit registers of one multiprocessor (on AMD: of one compute unit).
      warps: resident on one multiprocessor at most.
      blocks: that one launch may start at most; further programs are shared out among them.
    """

    arch: str
    backend: Literal["nvidia", "amd", "npu"]
    processor: int | str
    lanes: int
    shared: int
    library: Literal["libdevice", "ocml"] | None
    reserved: int = 0
    stages: int = 16
    ptx: bool = False
    tma: bool = False
    clusters: bool = False
    warpgroup_products: bool = False
    tf32: bool = False
    float32_units: bool = False
    int8_units: bool = True
    fp8: tuple[str, ...] = ()
    mixed_fp8: bool = False
    scaled: bool = False
    atomic_add: tuple[str, ...] = ()
    cache_hints: bool = False
    dependents: bool = False
    max_threads: int = 1024
    registers: int = 65536
    warps: int = 64
    blocks: int = MAX_BLOCKS

    @property
    def npu(self) -> bool:
        """A processor with a cube core and vector cores, for which another compiler places tiles and orders what they
        do: no threads, no library of a GPU's vendor, no instructions in text. `shared` is then the memory of a vector
        core, which holds all tiles of a program."""
        return self.backend == "npu"

    @property
    def multiprocessor_shared(self) -> int:
        """Bytes of shared memory of one multiprocessor."""
        return self.shared + self.reserved


def plain(arch: str, known: Container[str]) -> str:
    """`sm_90` of `sm_90a`: code for an architecture may use all that it has."""
    return arch if arch in known else arch.rstrip("a")


OCP = ("float8_e4m3fn", "float8_e5m2")


@functools.cache
def features(arch: str) -> Features:
    """The facts of an architecture by its name (`sm_90`, `gfx942`); KernelValueError for one that is not known."""
    from .. import platforms

    known: dict[str, Features] = {}
    for platform in platforms.every():
        known |= platform.features()
    name = plain(arch, known)
    if name not in known:
        raise KernelValueError(
            f"unknown GPU architecture {arch!r}: jtile compiles for {', '.join(known)}; on another GPU, run kernels on "
            "the CPU (JAX_PLATFORMS=cpu)"
        )
    return known[name]
