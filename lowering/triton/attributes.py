"""Layouts as they stand in TTGIR, read as linear maps over bits. `registers` says which element of a
tile each register of each thread holds, `memory` where an element lies in shared memory."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .block.layouts import Linear
from .block.linear import Basis, fragment, steps

_NAMED = re.compile(r"^(#\w+) = (#ttg\.\w+<.*>)$", re.MULTILINE)
_PADS = re.compile(r"(\d+):\+(\d+)")


@dataclasses.dataclass(frozen=True)
class Memory:
    """A layout of shared memory.

    Attributes:
      along: for each axis the offset, in elements, of each bit of a coordinate; all offsets are combined by XOR.
      pads: pairs `(interval, padding)`: after every `interval` elements `padding` elements are left free.
    """

    along: tuple[tuple[int, ...], ...]
    pads: tuple[tuple[int, int], ...] = ()

    def moved(self, base: Sequence[int]) -> int:
        """Where an element lies, before padding."""
        out = 0
        for x, bits in zip(base, self.along, strict=True):
            for k, at in enumerate(bits):
                out ^= at if x >> k & 1 else 0
        return out

    def padded(self, at: int) -> int:
        return at + sum(at // every * more for every, more in self.pads)


def resolved(ttgir: str) -> dict[str, str]:
    """The layouts that a module gives names to, without such names in them."""
    out: dict[str, str] = {}
    for name, text in _NAMED.findall(ttgir):
        out[name] = spelled(text, out)
    return out


def spelled(text: str, names: Mapping[str, str]) -> str:
    """An attribute without names of others in it."""
    return re.sub(r"#\w+\b(?!\.)", lambda m: names.get(m[0], m[0]), text)


def fields(text: str) -> dict[str, Any] | None:
    """The parameters of an attribute, with its `kind`; None where it is not written as layouts are."""
    text = re.sub(r"<\[([^\[\]]*)\] \{", lambda m: f"<{{pads = {[[*map(int, p)] for p in _PADS.findall(m[1])]}, ", text)
    text = re.sub(r"#ttg\.(\w+)<\{", r'{"kind": "\1", ', text).replace("}>", "}")
    text = re.sub(r"\b(\w+) = ", r'"\1": ', text)
    text = re.sub(r"\b(true|false)\b", lambda m: m[0].capitalize(), text)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return found if isinstance(found, dict) and "kind" in found else None


def rank(f: Mapping[str, Any]) -> int:
    """How many axes a layout of shared memory has; buffers have axes of slots in front of them."""
    if "order" in f:
        return len(f["order"])
    return len(f["offset"][0]) if f.get("offset") else f.get("rank", 2)


# -- registers --------------------------------------------------------------------------------------------------------


def registers(f: Mapping[str, Any], shape: Sequence[int]) -> Linear | None:
    """The layout of a tile of a shape: which element each bit of the number of a register, a lane and a warp leads to.

    None for kinds that are not known here, and for tiles whose sides are no powers of two.
    """
    if any(n & (n - 1) or not n for n in shape):
        return None
    found = _slice(f, shape) if f["kind"] == "slice" else _whole(f, shape)
    if found is None:
        return None
    cut = lambda bases: tuple(tuple(x if x < n else 0 for x, n in zip(b, shape, strict=True)) for b in bases)
    held = tuple(b for b in cut(found.register) if any(b))
    return Linear(held, cut(found.lane), cut(found.warp))


def _slice(f: Mapping[str, Any], shape: Sequence[int]) -> Linear | None:
    k = f["dim"]
    whole = registers(f["parent"], (*shape[:k], 1, *shape[k:]))
    if whole is None:
        return None
    drop = lambda bases: tuple((*b[:k], *b[k + 1 :]) for b in bases)
    return Linear(drop(whole.register), drop(whole.lane), drop(whole.warp))


def _whole(f: Mapping[str, Any], shape: Sequence[int]) -> Linear | None:
    if f["kind"] == "linear":
        every = lambda name: tuple(map(tuple, f[name]))
        return Linear(every("register"), every("lane"), every("warp"))
    made = _KINDS.get(f["kind"], lambda f, shape: None)(f, shape)
    if made is None:
        return None
    register, lane, warp, sides, order = made
    register += steps([-(-n // s) for n, s in zip(shape, sides, strict=True)], sides, order)
    return Linear(tuple(register), tuple(lane), tuple(warp))


Made = tuple[list[Basis], list[Basis], list[Basis], list[int], Sequence[int]] | None


def _blocked(f: Mapping[str, Any], shape: Sequence[int]) -> Made:
    sides, order = [1] * len(shape), f["order"]
    per = [steps(f[name], sides, order) for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")]
    return per[0], per[1], per[2], sides, order


def _product(f: Mapping[str, Any], shape: Sequence[int]) -> Made:
    """The accumulator of a product on NVIDIA: pairs of neighbours, four lanes a row, eight rows, eight rows below."""
    rows, columns = f["instrShape"][:2]
    if len(shape) != 2 or rows != 16 or f["versionMajor"] not in (2, 3):
        return None
    register, lane, sides = fragment(2, columns)
    order = (0, 1) if f["versionMajor"] == 3 else (1, 0)
    return register, lane, steps(f["warpsPerCTA"], sides, order), sides, (1, 0)


def _operand(f: Mapping[str, Any], shape: Sequence[int]) -> Made:
    """An operand of a product: `kWidth` neighbours along the axis that is summed."""
    parent, right = f["parent"], f["opIdx"] == 1
    if len(shape) != 2:
        return None
    if parent["kind"] == "blocked":
        return _of_threads(parent, shape, 0 if right else 1)
    summed, other = (0, 1) if right else (1, 0)
    at = lambda along, across: (along, across) if right else (across, along)
    warps = _warps_of(parent, shape)
    if warps is None:
        return None
    sides, width = [1, 1], f.get("kWidth", 1)
    fastest = (summed, other)
    if parent["kind"] == "nvidia_mma":
        register = steps(at(width, 1), sides, fastest)
        lane = steps(at(4, 8), sides, fastest)
        if not right:
            register += steps(at(1, 2), sides, fastest)
        register += steps(at(2, 1), sides, fastest)
    else:
        lanes = 64 if parent["kind"] == "amd_mfma" else 32
        across = parent.get("instrShape", [16, 16])[0 if not right else 1]
        register = steps(at(width, 1), sides, fastest)
        lane = steps(at(1, across), sides, fastest)
        if parent.get("version") == 1 and parent["kind"] == "amd_wmma":
            lane += [(0, 0)]  # both halves of a wave hold the same elements
        else:
            lane += steps(at(lanes // across, 1), sides, fastest)
    return register, lane, _dealt(warps, summed, sides), sides, fastest


def _of_threads(parent: Mapping[str, Any], shape: Sequence[int], summed: int) -> Made:
    """An operand of a product without matrix units: each thread holds all of the axis that is summed."""
    sides, order = [1, 1], parent["order"]
    alone = lambda counts: [1 if k == summed else n for k, n in enumerate(counts)]
    whole = [shape[k] if k == summed else n for k, n in enumerate(parent["sizePerThread"])]
    register = steps(whole, sides, order)
    bits = [steps(alone(parent[name]), sides, order) for name in ("threadsPerWarp", "warpsPerCTA")]
    held = [parent[name][summed].bit_length() - 1 for name in ("threadsPerWarp", "warpsPerCTA")]
    zeros = [[(0, 0)] * n for n in held]
    lane, warp = ([*z, *b] if order[0] == summed else [*b, *z] for b, z in zip(bits, zeros))
    return register, lane, warp, sides, order


def _warps_of(parent: Mapping[str, Any], shape: Sequence[int]) -> list[list[int]] | None:
    """For each bit of a warp's number, by how many tiles of one warp it moves along each axis."""
    if parent["kind"] == "amd_wmma":
        layout = parent.get("ctaLayout") or {}
        return None if layout.get("register") else layout.get("warp")
    if parent["kind"] not in ("nvidia_mma", "amd_mfma") or parent.get("tilesPerWarp", [1, 1]) != [1, 1]:
        return None
    order = (0, 1) if parent.get("versionMajor") == 3 else (1, 0)
    return [list(b) for b in steps(parent["warpsPerCTA"], [1, 1], order)]


def _dealt(warps: Sequence[Sequence[int]], summed: int, sides: list[int]) -> list[Basis]:
    """Bases of warps that stand side by side; along an axis that is summed they hold the same (-1: there is none)."""
    side = tuple(sides)
    out = []
    for base in warps:
        out.append(tuple(0 if k == summed else x * s for k, (x, s) in enumerate(zip(base, side, strict=True))))
        for k, x in enumerate(base):
            sides[k] *= 2 if x and k != summed else 1
    return out


def _mfma(f: Mapping[str, Any], shape: Sequence[int]) -> Made:
    """The accumulator of a product on AMD's CDNA: four rows a register group, `isTransposed`: four columns."""
    rows, columns = f["instrShape"][:2]
    warps = _warps_of(f, shape)
    if (
        len(shape) != 2
        or rows != columns
        or rows not in (16, 32)
        or warps is None
        or f.get("elementBitWidth", 32) == 64
    ):
        return None
    turn = f["isTransposed"]
    at = lambda down, right: (right, down) if turn else (down, right)
    sides, order = [1, 1], (1, 0) if turn else (0, 1)
    register = steps(at(4, 1), sides, order)
    lane = steps(at(1, rows), sides, order) + steps(at(64 // rows, 1), sides, order)
    register += steps(at(rows * rows // 256, 1), sides, order)
    return register, lane, _dealt(warps, -1, sides), sides, (1, 0)


def _wmma(f: Mapping[str, Any], shape: Sequence[int]) -> Made:
    """The accumulator of a product on AMD's RDNA: rows of even and odd numbers (version 1) or the upper and lower half
    of 16 rows (2) in the two halves of a wave."""
    warps = _warps_of(f, shape)
    if len(shape) != 2 or warps is None or f["version"] not in (1, 2):
        return None
    turn = f.get("isTranspose", False)
    at = lambda down, right: (right, down) if turn else (down, right)
    sides, order = [1, 1], (1, 0) if turn else (0, 1)
    lane = steps(at(1, 16), sides, order)
    if f["version"] == 1:
        lane += steps(at(2, 1), sides, order)
        register = steps(at(8, 1), sides, order)
    else:
        register = steps(at(8, 1), sides, order)
        lane += steps(at(2, 1), sides, order)
    return register, lane, _dealt(warps, -1, sides), sides, (1, 0)


_KINDS = {
    "blocked": _blocked, "nvidia_mma": _product, "dot_op": _operand, "amd_mfma": _mfma, "amd_wmma": _wmma,
}  # fmt: skip


# -- shared memory ----------------------------------------------------------------------------------------------------


def memory(f: Mapping[str, Any], shape: Sequence[int]) -> Memory | None:
    """Where the elements of a buffer of a shape lie; None for kinds that are not known here."""
    if any(n & (n - 1) or not n for n in shape):
        return None
    if f["kind"] in ("swizzled_shared", "amd_rotating_shared"):
        return _swizzled(f, shape)
    if f["kind"] == "nvmma_shared":
        return _for_products(f, shape)
    bases = f.get("offset")
    if f["kind"] not in ("padded_shared", "shared_linear") or bases is None:
        return None
    return _inverse(bases, shape, tuple(map(tuple, f.get("pads", ()))))


def _swizzled(f: Mapping[str, Any], shape: Sequence[int]) -> Memory:
    """Row-major along `order`; boxes of `vec` elements are exchanged by the number of their row."""
    order = f["order"]
    along: list[list[int]] = [[] for _ in shape]
    size = 1
    for axis in order:
        for _ in range(shape[axis].bit_length() - 1):
            along[axis].append(size)
            size *= 2
    if len(order) > 1:
        inner, outer = order[0], order[1]
        bits = along[outer]
        for k in range(len(bits)):
            bits[k] ^= _phase(1 << k, f, shape, inner, outer)
    return Memory(tuple(map(tuple, along)))


def _phase(row: int, f: Mapping[str, Any], shape: Sequence[int], inner: int, outer: int) -> int:
    """The number that the place of an element in a row is combined with by XOR."""
    turn = row // f["perPhase"]
    phase = turn % f["maxPhase"]
    if f["kind"] == "amd_rotating_shared":
        phase ^= turn // f["maxPhase"] % f["maxPhase"]
    return phase * f["vec"] % shape[inner]


def _for_products(f: Mapping[str, Any], shape: Sequence[int]) -> Memory:
    """Blocks of columns as wide as the swizzle, one after the other; inside of one, rows, with their 16-byte words
    exchanged by the number of the row."""
    bits, wide = f["elementBitWidth"], f["swizzlingByteWidth"]
    word, columns = 128 // bits, (wide or shape[-1] * bits // 8) * 8 // bits
    turned = f.get("transposed", False)
    inner = 0 if turned else len(shape) - 1
    rows = [k for k in range(len(shape)) if k != inner]
    along: list[list[int]] = [[] for _ in shape]
    size = 1
    inside, outside = min(columns, shape[inner]), shape[inner] // min(columns, shape[inner])
    for axis, count in [(inner, inside), *((k, shape[k]) for k in reversed(rows)), (inner, outside)]:
        for _ in range(count.bit_length() - 1):
            along[axis].append(size)
            size *= 2
    phases, each = {128: (8, 1), 64: (4, 2), 32: (2, 4)}.get(wide, (1, 1))
    row = 1
    for axis in reversed(rows):
        for k in range(len(along[axis])):
            along[axis][k] ^= row // each % phases * word
            row *= 2
    return Memory(tuple(map(tuple, along)))


def _inverse(bases: Sequence[Sequence[int]], shape: Sequence[int], pads: tuple[tuple[int, int], ...]) -> Memory | None:
    """The memory layout (where each bit of a coordinate goes) from the coordinates that the bits of a place lead to."""
    widths = [n.bit_length() - 1 for n in shape]
    packed = lambda base: sum(x << sum(widths[:k]) for k, x in enumerate(base))
    held: dict[int, tuple[int, int]] = {}  # the highest bit of a coordinate -> the coordinate, and its place
    for k, base in enumerate(bases):
        value, at = _reduced(packed(base), 1 << k, held)
        if value:
            held[value.bit_length() - 1] = value, at
    along = []
    for axis, width in enumerate(widths):
        line = []
        for k in range(width):
            left, at = _reduced(1 << (k + sum(widths[:axis])), 0, held)
            if left:
                return None
            line.append(at)
        along.append(tuple(line))
    return Memory(tuple(along), pads)


def _reduced(value: int, at: int, held: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    while value and (top := value.bit_length() - 1) in held:
        value, at = value ^ held[top][0], at ^ held[top][1]
    return value, at
