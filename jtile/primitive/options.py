"""`Options`: what a kernel or a call of it may ask of the compiler and of the interpreter, besides the language."""

from __future__ import annotations

import dataclasses

COMPILER = ("num_warps", "num_stages", "num_ctas", "consumers", "persistent", "specialize", "multicast", "spread")


@dataclasses.dataclass(frozen=True)
class Options:
    """What `@jt.kernel(...)` and `.with_options(...)` take besides the language; None leaves the choice to jtile.

    Attributes:
      interpret: run this kernel in the reference interpreter (overrides `Config.interpret`).
      fallback: `"raise"` or `"interpret"` for a kernel that the target cannot run (overrides `Config.fallback`).
      num_warps: warps of one program on a GPU.
      num_stages: depth of the software pipeline of every loop, whatever `jt.range(stages=)` says.
      num_ctas: blocks of one cluster on a GPU.
      consumers: warpgroups that share the rows of a program's products, where a kernel runs at the block level (sm_90).
      persistent: whether blocks take several programs there, one after the other.
      specialize: False: no plan of roles is made for this kernel; True: also for float32 products as tf32.
      multicast: blocks of a cluster that share what all of them copy alike, at the block level (sm_90).
      spread: blocks of a cluster that the roles of a program are spread over, one each, at the block level (sm_90).
      overlap: True where `Config.overlap` was where the kernel was called, since it is compiled later; no user gives
        it, and only launches on GPUs go by it.
    """

    interpret: bool | None = None
    fallback: str | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    num_ctas: int | None = None
    consumers: int | None = None
    persistent: bool | None = None
    specialize: bool | None = None
    multicast: int | None = None
    spread: int | None = None
    overlap: bool | None = None

    @property
    def compiler(self) -> dict[str, int | None]:
        """What the compiler of a GPU kernel is told."""
        return {n: getattr(self, n) for n in COMPILER}

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in OPTIONS}
        return ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)


OPTIONS = tuple(f.name for f in dataclasses.fields(Options) if f.name != "overlap")
