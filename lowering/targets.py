"""Targets as data: what a machine has. The cost model, the tuner, the capability check and `jtile info` read it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from jtile import ir
from jtile._config import current
from jtile._errors import KernelTypeError, KernelValueError, UnsupportedError
from jtile.ir.block import level_of

if TYPE_CHECKING:
    pass

LEVELS = ("thread", "warp", "warpgroup", "block", "cluster", "device", "node")


@dataclasses.dataclass(frozen=True)
class Memory:
    """One memory: `size` in bytes (None: unbounded), `bandwidth` in bytes a second (None: not known)."""

    name: str
    size: int | None = None
    bandwidth: float | None = None


@dataclasses.dataclass(frozen=True)
class Scale:
    """One level of the machine.

    Attributes:
      name: one of `LEVELS`, from the smallest.
      units: how many units of the level below make one of this.
      memory: name of the memory that the units of this level share, or None.
      link: bytes a second between two units of this level, or None where it is not known.
    """

    name: str
    units: int = 1
    memory: str | None = None
    link: float | None = None


@dataclasses.dataclass(frozen=True)
class Gap:
    """Something that a target cannot run.

    Attributes:
      op: mnemonic of an op (`"dot_scaled"`), with the function for those that have one (`"map.atan2"`, `"atomic.cas"`).
      dtype: the dtype for which it is missing; `"*"`: all.
      instead: the nearest form that the target has, for the message.
    """

    op: str
    dtype: str
    instead: str


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine that kernels are compiled for. Users may define one, or change one with `dataclasses.replace`.

    Attributes:
      name: how messages and caches call it.
      platform: which back end compiles for it, and XLA's name of the platform (`"cpu"`, `"cuda"`, `"rocm"`).
      arch: what that back end needs to know. CPU: `architecture:processor:vector bits:feature,feature,...`; GPU:
        `sm_90`, `gfx942`.
      scales: the hierarchy, from the smallest level.
      memories: the memories that the scales name.
      matrix_shapes: (m, n, k, dtype) of the matrix instructions.
      dtypes: dtypes that a kernel may use.
      limits: pairs (name, number): `"programs"` of a grid, `"rank"` of a Ref, `"scratch"` bytes of one program,
        `"tile"`: elements of a tile, `"resident"`: programs of a kernel whose programs wait for others.
      gaps: what it cannot run although the language has it.
      rates: pairs (dtype, operations a second of matrix products of it, on the whole device), where they are known.
      features: what code may be chosen by instead of the name of an architecture. `"warps"`: a program is a block of
        threads, whose registers hold its tiles, with sides of powers of two. `"vector cores"`: the
        memory of a core holds the tiles of a program, with such sides too. `"warpgroup products"`: the ops of the block
        level: roles, tensor maps and asynchronous products. `"measured warps"`: the numbers of warps and stages that
        the library and the model of time give kernels were measured on GPUs like it; elsewhere the compiler chooses.
        `"peers"`: kernels talk to other devices. `"host"`: kernels run on the processors of the host, in its memory.
    """

    name: str
    platform: str
    arch: str
    scales: tuple[Scale, ...] = ()
    memories: tuple[Memory, ...] = ()
    matrix_shapes: tuple[tuple[int, int, int, str], ...] = ()
    dtypes: tuple[str, ...] = tuple(ir.DTYPES)
    limits: tuple[tuple[str, int], ...] = ()
    gaps: tuple[Gap, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()
    features: tuple[str, ...] = ()

    def __post_init__(self):
        unknown = [s.name for s in self.scales if s.name not in LEVELS]
        unknown += [s.memory for s in self.scales if s.memory and s.memory not in {m.name for m in self.memories}]
        unknown += [d for d in self.dtypes if d not in ir.DTYPES]
        if unknown:
            raise KernelValueError(
                f"target {self.name!r} names {unknown[0]!r}, which is neither a level, memory nor dtype"
            )

    def limit(self, name: str) -> int | None:
        """A limit of the target, such as `"programs"`.

        Args:
          name: that of the limit, one of those in `limits`.
        Returns:
          The number, or None where the target states none.
        """
        return dict(self.limits).get(name)

    def units(self, scale: str) -> int | None:
        """How many units of the level below make one unit of a level.

        Args:
          scale: the name of the level, such as `"device"`.
        Returns:
          The number, or None where the target does not have the level.
        """
        return next((s.units for s in self.scales if s.name == scale), None)

    @property
    def programs_at_once(self) -> int:
        """How many programs run at once: the cores of the host that this process may use, or the multiprocessors of a
        GPU; 1 where nothing is known."""
        return self.units("device") or 1

    def memory(self, scale: str) -> Memory | None:
        """The memory that the units of a level share.

        Args:
          scale: the name of the level, such as `"block"`.
        Returns:
          A `Memory`, or None where the level has none.
        """
        names = {s.name: s.memory for s in self.scales}
        return next((m for m in self.memories if m.name == names.get(scale)), None)


INSTEAD_OF_DEVICES = "run it in the interpreter (interpret=True), or put collectives of jax.lax around the kernel"


def without_units(target: Target) -> Target:
    """The target with one unit at each level, as what does not depend on their number is kept in caches."""
    return dataclasses.replace(target, scales=tuple(dataclasses.replace(s, units=1) for s in target.scales))


def without_devices() -> list[Gap]:
    """The gaps of a target whose kernels do not talk to other devices."""
    cards = (ir.AxisIndex, ir.On, ir.Signal, ir.WaitSignal, ir.Post, ir.Receive, ir.AxisBarrier)
    return [Gap(card.mnemonic, "*", INSTEAD_OF_DEVICES) for card in cards]


# -- the capability check -------------------------------------------------------------------------------------------

# The dtypes to use where one is missing: the error names the first of them that the target has.
_NEAREST = {
    "bfloat16": ("float32", "float16"),
    "float16": ("float32", "bfloat16"),
    "float64": ("float32",),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
    "float8_e4m3": ("float8_e4m3fn", "bfloat16", "float32"),
    "float8_e3m4": ("bfloat16", "float16", "float32"),
    "float8_e4m3fnuz": ("float8_e4m3fn", "bfloat16", "float32"),
    "float8_e5m2fnuz": ("float8_e5m2", "bfloat16", "float32"),
    "float8_e4m3b11fnuz": ("bfloat16", "float16", "float32"),
    "float8_e8m0fnu": ("float32",),
    "float4_e2m1fn": ("float8_e4m3fn", "bfloat16", "float32"),
    "int2": ("int4", "int8"),
    "uint2": ("uint4", "uint8"),
    "int4": ("int8",),
    "uint4": ("uint8",),
    "int64": ("int32",),
    "uint64": ("uint32",),
    "bool": ("int8",),
}


def check_capabilities(kernel: ir.Kernel, target: Target) -> None:
    """Refuse, before any lowering, a kernel that `target` cannot run.

    Raises:
      UnsupportedError: names the op, the dtype, the target, the source line, and the nearest form that is supported.
    """
    if level_of(kernel) == "block" and "warpgroup products" not in target.features:
        instead = "run it in the interpreter (fallback='interpret', interpret=True), or write the kernel at tile level"
        what = "a kernel at block level, whose ops are those of NVIDIA's sm_90"
        _refuse(kernel, target, what, instead, kernel.loc)
    if kernel.devices:
        _check_devices(kernel, target)
    for ref in kernel.params:
        _check_dtype(kernel, target, f"Ref {ref.name!r}", ref.dtype, kernel.loc)
        rank = target.limit("rank")
        if rank is not None and len(ref.shape) > rank:
            _refuse(
                kernel, target, f"Ref {ref.name!r} of rank {len(ref.shape)}", f"reshape it to rank {rank}", kernel.loc
            )
    known = frozenset(target.dtypes)
    for op in kernel.body.walk():
        for v in (*op.operands(), *op.results):
            if v.dtype not in known:
                _check_dtype(kernel, target, f"op {mnemonic(op)!r}", v.dtype, op.loc)
        for v in op.results:
            _check_tile(kernel, target, v, op.loc)
        gap = next((g for g in target.gaps if _hits(g, op)), None)
        if gap is not None:
            what = f"op {mnemonic(op)!r}" + ("" if gap.dtype == "*" else f" on {gap.dtype}")
            _refuse(kernel, target, what, gap.instead, op.loc)
    _check_limits(kernel, target)


def _check_devices(kernel: ir.Kernel, target: Target) -> None:
    if "peers" in target.features and not talks(target) and not ir.alone(kernel):
        what = "a kernel that talks to other devices while the option gpu_peers (JTILE_GPU_PEERS) is off"
        _refuse(kernel, target, what, f"switch it on; or {INSTEAD_OF_DEVICES}", kernel.loc)
    resident, programs = target.limit("resident"), math.prod(kernel.grid)
    if resident is not None and ir.waits(kernel) and programs > resident:
        what = f"a grid of {programs} programs that wait for each other"
        instead = f"at most {resident} run at once: make the grid smaller, and let each program do several tiles"
        _refuse(kernel, target, what, instead, kernel.loc)


def talks(target: Target) -> bool:
    """Whether kernels talk to other devices on a target: on GPUs the option `gpu_peers` may forbid it."""
    return "peers" in target.features and (current().gpu_peers or "warps" not in target.features)


def mnemonic(op: ir.Op) -> str:
    """The name of an op with its function: `map.exp`, `atomic.add`, `dot`."""
    fn = getattr(op, "fn", None)
    return f"{op.mnemonic}.{fn}" if isinstance(fn, str) else op.mnemonic


def _hits(gap: Gap, op: ir.Op) -> bool:
    if gap.op not in (op.mnemonic, mnemonic(op)):
        return False
    return gap.dtype == "*" or any(v.dtype == gap.dtype for v in (*op.operands(), *op.results))


def _check_dtype(kernel: ir.Kernel, target: Target, what: str, dtype: str, loc: ir.Loc) -> None:
    if dtype in target.dtypes:
        return
    near = next((d for d in _NEAREST.get(dtype, ()) if d in target.dtypes), None)
    _refuse(kernel, target, f"{what} with dtype {dtype}", f"use {near}" if near else "there is no near dtype", loc)


def _check_tile(kernel: ir.Kernel, target: Target, v: ir.Value, loc: ir.Loc) -> None:
    limit = target.limit("tile")
    if limit is None or not isinstance(v.type, ir.TileType):
        return
    count = 1
    for n in v.shape:
        count <<= max(n - 1, 0).bit_length()  # sides are padded to powers of two
    if count > limit:
        what = f"a tile of {count} elements ({v.type}, its sides as powers of two)"
        _refuse(kernel, target, what, f"at most {limit} are possible: make the tile smaller, with a loop over it", loc)


def _check_limits(kernel: ir.Kernel, target: Target) -> None:
    programs, scratch = target.limit("programs"), target.limit("scratch")
    count = 1
    for n in kernel.grid:
        count *= 1 if isinstance(n, ir.Extent) else n
    if programs is not None and count > programs:
        _refuse(kernel, target, f"a grid of {count} programs", f"at most {programs} are possible", kernel.loc)
    used = sum(_bytes(v.type) for v in kernel.scratch)
    if scratch is not None and used > scratch:
        _refuse(kernel, target, f"scratch of {used} bytes a program", f"at most {scratch} are possible", kernel.loc)


def _bytes(t: Any) -> int:
    n = t.info.bits
    for side in t.shape:
        n *= side
    return -(-n // 8)


def _refuse(kernel: ir.Kernel, target: Target, what: str, instead: str, loc: ir.Loc) -> None:
    loc = loc if loc.file else kernel.loc
    raise UnsupportedError(
        f"kernel {kernel.name}: target {target.name!r} cannot run {what}; {instead}",
        (loc.file, loc.line) if loc.file else None,
    )


# -- targets by their names -----------------------------------------------------------------------------------------


def host_target() -> Target:
    """The CPU of this machine.

    Returns:
      Its `Target`.
    """
    return resolve("cpu")


def resolve(target: Target | str | None) -> Target:
    """A target from its name (`"cpu"`, `"cpu:avx2"`, `"cuda:sm_90"`, `"rocm:gfx942"`); None: this machine's CPU."""
    if target is None or isinstance(target, Target):
        return target or host_target()
    if not isinstance(target, str):
        raise KernelTypeError(f"target={target!r}: expected a Target or the name of one")
    from . import platforms

    name = target.partition(":")[0]
    if name not in [p.name for p in platforms.every()]:
        meant = "".join(f"write {full!r}; " for full in names() if full.endswith(f":{target}"))
        raise UnsupportedError(f"there is no target {target!r}: {meant}this release compiles for {', '.join(names())}")
    return platforms.named(name).resolve(target)


def names() -> list[str]:
    """The targets that have a name."""
    from . import platforms

    return [name for p in platforms.every() for name in p.names()]
