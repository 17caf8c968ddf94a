"""Layouts of TTGIR: how the lanes of a tile lie over the threads of a role, and how buffers lie in shared memory."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from ..ttir import bits

LANES = 32


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of tiles; its text is the attribute that TTGIR knows it by."""


@dataclasses.dataclass(frozen=True)
class Blocked(Layout):
    """Each thread has a box of neighbours; threads, then warps, stand side by side in boxes of their own. `order`: the
    axes, the fastest first."""

    per_thread: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        parts = zip(("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order"), dataclasses.astuple(self), strict=True)
        return f"#ttg.blocked<{{{', '.join(f'{k} = {_list(v)}' for k, v in parts)}}}>"


@dataclasses.dataclass(frozen=True)
class Mma(Layout):
    """The accumulator of a warpgroup product: `warps` along the two axes, instructions of 64 x n x k."""

    warps: tuple[int, int]
    n: int
    k: int

    def __str__(self) -> str:
        shape = _list((16, self.n, self.k))
        parts = f"versionMajor = 3, versionMinor = 0, warpsPerCTA = {_list(self.warps)}, instrShape = {shape}"
        return f"#ttg.nvidia_mma<{{{parts}}}>"


@dataclasses.dataclass(frozen=True)
class Sliced(Layout):
    """The layout that is left when an axis is reduced, or that a tile has before an axis of length 1 is added."""

    axis: int
    parent: Layout

    def __str__(self) -> str:
        return f"#ttg.slice<{{dim = {self.axis}, parent = {self.parent}}}>"


@dataclasses.dataclass(frozen=True)
class Operand(Layout):
    """The left operand of a warpgroup product in registers; `width`: elements of a 32-bit register."""

    parent: Mma
    width: int

    def __str__(self) -> str:
        return f"#ttg.dot_op<{{opIdx = 0, parent = {self.parent}, kWidth = {self.width}}}>"


@dataclasses.dataclass(frozen=True)
class Linear(Layout):
    """Which axis each bit of the number of a register, a lane and a warp moves along, and how far."""

    register: tuple[tuple[int, ...], ...]
    lane: tuple[tuple[int, ...], ...]
    warp: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        parts = [f"{name} = {_list(map(_list, getattr(self, name)))}" for name in ("register", "lane", "warp")]
        return f"#ttg.linear<{{{', '.join(parts)}, block = []}}>"


def _list(xs: Iterable) -> str:
    return f"[{', '.join(map(str, xs))}]"


def sliced(layout: Layout, axes: Iterable[int]) -> Layout:
    """A layout without some of its axes, as reductions from the last one on leave it."""
    for axis in sorted(axes, reverse=True):
        layout = Sliced(axis, layout)
    return layout


def origin(layout: Layout | None) -> Layout | None:
    """The layout that a sliced layout was taken from."""
    return origin(layout.parent) if isinstance(layout, Sliced) else layout


def unsliced(layout: Layout, axes: Iterable[int]) -> Layout | None:
    """The layout of which `sliced` with these axes gives `layout`, if there is one."""
    for axis in sorted(axes):
        if not isinstance(layout, Sliced) or layout.axis != axis:
            return None
        layout = layout.parent
    return layout


def blocked(shape: Sequence[int], elem: str, warps: int) -> Blocked:
    """A layout that gives each thread neighbours along the last axis, up to 16 bytes, and puts threads along it."""
    left = math.prod(shape) // (LANES * warps)
    per = min(shape[-1], max(128 // bits(elem), 1), max(left, 1))
    sides, out = list(shape), [[], []]
    sides[-1] //= per
    for k, many in enumerate((LANES, warps)):
        for axis in reversed(range(len(shape))):
            n = min(sides[axis], many)
            out[k].insert(0, n)
            sides[axis], many = sides[axis] // n, many // n
        out[k][0] *= many  # where there are more threads than elements, several threads hold the same element
    ones = (1,) * (len(shape) - 1)
    return Blocked((*ones, per), tuple(out[0]), tuple(out[1]), tuple(reversed(range(len(shape)))))


def mma(m: int, n: int, width: int, warps: int, *, widest: int = 256) -> Mma | None:
    """The accumulator of an m x n product of operands of `width` bits by a role of `warps`, with instructions of up to
    `widest` columns; None where there is none."""
    along_m = min(warps, m // 16)
    along_n = warps // max(along_m, 1)
    part = n // along_n
    if warps % 4 or m % 64 or along_m % 4 or part < 8 or part & (part - 1):
        return None
    return Mma((along_m, along_n), min(part, widest), 256 // width)


def places(k: int) -> Linear:
    """Two bits for each of the numbers that a sparse product over k terms is given, [64, k / 8] bytes, as its
    instructions want them: of 16 terms, a thread has those of two rows in one register (PTX ISA, section "Sparse
    wgmma.mma_async.sp with half-precision and .bf16 type"). Of 64 terms, the first two threads of four have the places
    for one instruction, the other two those for the next.
    """
    more = tuple((0, at) for at in (8 << n for n in range((k // 64).bit_length() - 1)))
    return Linear(((0, 1), (8, 0), *more), ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0)), ((16, 0), (32, 0)))


# -- shared memory ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Swizzled:
    """Rows of 128, 64 or 32 bytes (`width`) with their 16-byte words exchanged, as tensor maps and warpgroup products
    know them; 0: plain rows. `elem_bits`: bits of an element."""

    width: int
    elem_bits: int
    rank: int = 2
    transposed: bool = False

    def __str__(self) -> str:
        flag = "true" if self.transposed else "false"
        rank = f", rank = {self.rank}" if self.rank != 2 else ""
        parts = f"swizzlingByteWidth = {self.width}, transposed = {flag}, elementBitWidth = {self.elem_bits}{rank}"
        return f"#ttg.nvmma_shared<{{{parts}}}>"


@dataclasses.dataclass(frozen=True)
class Plain:
    """Elements in row-major order."""

    rank: int = 1

    def __str__(self) -> str:
        order = _list(reversed(range(self.rank)))
        return f"#ttg.swizzled_shared<{{vec = 1, perPhase = 1, maxPhase = 1, order = {order}}}>"


def swizzled(shape: Sequence[int], elem: str) -> Swizzled | Plain:
    """The layout of a buffer: the widest swizzle that its rows fill."""
    row = shape[-1] * bits(elem) // 8
    if bits(elem) > 32:
        return Plain(len(shape))
    rows = math.prod(shape[:-1])
    width = next((w for w in (128, 64, 32) if row % w == 0 and rows >= 8), 0)
    return Swizzled(width, bits(elem), len(shape))


# -- text -------------------------------------------------------------------------------------------------------------

_BASE = re.compile(r"#ttg\.(nvidia_mma|blocked|linear|nvmma_shared|swizzled_shared)<\{[^{}]*\}>")
_SHORT = {"nvidia_mma": "mma", "nvmma_shared": "shared", "swizzled_shared": "plain"}


def aliased(text: str) -> tuple[str, dict[str, str]]:
    """Text with a short name for each layout (`#mma`, `#mma1`), and the layouts by their names."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}

    def name(m: re.Match[str]) -> str:
        if m[0] not in names:
            short = _SHORT.get(m[1], m[1])
            k = counts[short] = counts.get(short, -1) + 1
            names[m[0]] = f"#{short}{k or ''}"
        return names[m[0]]

    return _BASE.sub(name, text), {v: k for k, v in names.items()}
