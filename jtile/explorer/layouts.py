"""Where the elements of a kernel's tiles are: in which register of which thread, and in which bank of shared memory. It
is read from the layouts in the TTGIR of a kernel, at the level of tiles and at the block level alike."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jtile.explorer.links import Linked
from jtile.explorer.places import Places
from jtile.explorer.record import Layouts
from jtile.explorer.vectors import vectors
from jtile.lowering.targets import Target

MOST = 24  # tiles, buffers and accesses that a record has, of each kind

_THREADS = re.compile(r'"ttg.threads-per-warp" = (\d+)')
_OP = re.compile(r"^\s*(?:%[\w:]+ = )?\"?([a-z]+\.[\w.]+)")
_TYPE = re.compile(r"(?:\b(tensor|memdesc)|(?<=-> ))<(?=\d)")  # some ops leave the name of a buffer's type out
_ACCESSES = {
    "ttg.local_load": "read", "ttg.local_store": "write", "ttg.local_alloc": "write", "ttng.warp_group_dot": "product",
    "ttg.async_copy_global_to_local": "write", "ttng.async_tma_copy_global_to_local": "copy",
    "ttng.async_tma_copy_local_to_global": "copy",
}  # fmt: skip


def layouts(texts: Mapping[str, Linked], target: Target, places: Places) -> Layouts | None:
    """The layouts of a kernel; None where its back end tells none."""
    if "ttgir" in texts:
        return _Module(texts["ttgir"], target, places).read()
    return vectors(texts["asm"], places) if "asm" in texts else None


@dataclasses.dataclass(frozen=True)
class Typed:
    """A tile (`tensor`) or a buffer (`memdesc`) in a text.

    Attributes:
      layout: its attribute, as it is written; whole: the shape of the buffer that it is a part of.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    whole: tuple[int, ...]


def types(line: str) -> Iterator[Typed]:
    """The tiles and buffers whose types stand in a line."""
    for found in _TYPE.finditer(line):
        parts = _parts(line, found.end())
        shape = re.match(r"((?:\d+x)+)(.+)", parts[0])
        if shape and len(parts) > 1:
            sides = _sides(shape[1])
            whole = _sides(parts[-1]) if re.fullmatch(r"\d+(x\d+)*", parts[-1]) else sides
            yield Typed(found[1] or "memdesc", sides, shape[2], parts[1], whole)


def _sides(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x") if n)


def _parts(line: str, start: int) -> list[str]:
    """The text up to the bracket that closes the one before `start`, cut at the commas that are in no other bracket."""
    out, depth, begin = [], 0, start
    for k in range(start, len(line)):
        if line[k] in "<[{(":
            depth += 1
        elif line[k] in ">]})":
            depth -= 1
        if depth < 0 or (depth == 0 and line[k] == ","):
            out.append(line[begin:k].strip())
            begin = k + 1
        if depth < 0:
            break
    return out


class _Module:
    """What is found on the way through the lines of a module."""

    def __init__(self, text: Linked, target: Target, places: Places):
        from jtile.lowering.triton import attributes
        from jtile.lowering.triton.targets import features_of

        whole = "\n".join(text.lines)
        self.text, self.places, self.names = text, places, attributes.resolved(whole)
        self.lanes = int(found[1]) if (found := _THREADS.search(whole)) else 32
        self.matrices = bool(features_of(target).ptx)
        self.tiles: dict[Any, dict[str, Any]] = {}
        self.buffers: dict[Any, dict[str, Any]] = {}
        self.accesses: dict[Any, dict[str, Any]] = {}

    def read(self) -> Layouts:
        converts = False
        for line, place in zip(self.text.lines, self.text.places, strict=True):
            if op := _OP.match(line):
                converts |= op[1] == "ttg.convert_layout"
                self._line(op[1], line, self.places.number(place))
        tiles = sorted(self.tiles.items(), key=lambda item: -math.prod(item[1]["shape"]))[:MOST]
        buffers = sorted(self.buffers.items(), key=lambda item: -item[1]["bytes"])[:MOST]
        of_tile, of_buffer = ({key: k for k, (key, _) in enumerate(found)} for found in (tiles, buffers))
        accesses = [
            {**one, "tile": of_tile.get(tile, -1), "buffer": of_buffer[buffer]}
            for (_, tile, buffer), one in self.accesses.items()
            if buffer in of_buffer
        ][:MOST]
        shown = {"tiles": self.tiles, "buffers": self.buffers, "accesses": self.accesses}
        notes = [
            f"The first {MOST} of {len(all_)} {what} are shown." for what, all_ in shown.items() if len(all_) > MOST
        ]
        if converts:
            notes.append(
                "Where a tile changes from one layout to another, triton moves it through shared memory in an order of "
                "its own, which its TTGIR does not tell; those moves are not among the accesses."
            )
        if self.lanes == 64:
            notes.append(
                "Threads that are served together are taken to be neighbours; AMD's hardware may group others."
            )
        return Layouts(self.lanes, [one for _, one in tiles], [one for _, one in buffers], accesses, None, notes)

    def _line(self, op: str, line: str, place: int) -> None:
        found = [*types(line)]
        tiles, buffers = ([t for t in found if t.kind == kind] for kind in ("tensor", "memdesc"))
        if " = " in line:  # the type of the result stands last
            for t in tiles[-1:]:
                if found[-1] is t:
                    self._tile(t, place)["values"] += 1
        kind = _ACCESSES.get(op)
        for t in buffers if kind == "product" else buffers[-1:]:
            self._buffer(t, place)
            if kind in ("product", "copy"):
                self._access(kind, op, None, t, place)
            elif kind and tiles:
                self._access(kind, op, tiles[-1 if kind == "read" else 0], t, place)

    def _tile(self, t: Typed, place: int) -> dict[str, Any]:
        from jtile.lowering.triton import attributes

        text = attributes.spelled(t.layout, self.names)
        fields = attributes.fields(text)
        bases = attributes.registers(fields, t.shape) if fields else None
        one = self.tiles.setdefault((text, t.shape), {
            "name": title(t.layout), "text": text, "about": about(fields), "shape": [*t.shape], "dtypes": [],
            "register": _lists(bases and bases.register), "lane": _lists(bases and bases.lane),
            "warp": _lists(bases and bases.warp), "known": bases is not None, "values": 0, "places": [],
        })  # fmt: skip
        _add(one["places"], place)
        _add(one["dtypes"], t.dtype)
        return one

    def _buffer(self, t: Typed, place: int) -> None:
        from jtile.lowering.triton import attributes, ttir

        text = attributes.spelled(t.layout, self.names)
        fields = attributes.fields(text)
        shape = t.whole[-attributes.rank(fields) :] if fields else t.whole
        memory = attributes.memory(fields, shape) if fields else None
        slots, bits = math.prod(t.whole) // math.prod(shape), ttir.bits(t.dtype)
        one = self.buffers.setdefault((text, shape, t.dtype), {
            "name": title(t.layout), "text": text, "about": about(fields), "shape": [*shape], "dtype": t.dtype,
            "bits": bits, "slots": slots, "bytes": math.prod(t.whole) * bits // 8,
            "along": _lists(memory and memory.along), "pads": _lists(memory and memory.pads),
            "known": memory is not None, "places": [],
        })  # fmt: skip
        if slots > one["slots"]:
            one |= {"slots": slots, "bytes": math.prod(t.whole) * bits // 8}
        _add(one["places"], place)

    def _access(self, kind: str, op: str, tile: Typed | None, t: Typed, place: int) -> None:
        from jtile.lowering.triton import attributes, banks, ttir

        of = lambda x: attributes.spelled(x.layout, self.names)
        fields = attributes.fields(of(t))
        if fields is None:
            return
        shape, bits = t.whole[-attributes.rank(fields) :], ttir.bits(t.dtype)
        memory, found = attributes.memory(fields, shape), None
        if memory is not None and kind == "product":
            found = banks.of_product(memory, shape, bits)
        elif memory is not None and tile is not None:
            self._tile(tile, place)
            held = attributes.fields(of(tile))
            bases = attributes.registers(held, tile.shape) if held else None
            asynchronous = op == "ttg.async_copy_global_to_local"
            if bases is not None:
                found = banks.of_registers(bases, memory, bits, matrices=self.matrices and not asynchronous)
        key = op, (of(tile), tile.shape) if tile else None, (of(t), shape, t.dtype)
        counts = {"how": "", "width": 0, "offsets": [], "together": 0, "wavefronts": 0, "least": 0}
        if found is not None:
            counts = {name: [*x] if isinstance(x, tuple) else x for name, x in vars(found).items()}
        one = self.accesses.setdefault(
            key, {"kind": kind, "op": op, "known": found is not None, "times": 0, "places": []} | counts
        )
        one["times"] += 1
        _add(one["places"], place)


def _lists(bases: Any) -> list[list[int]]:
    return [[*b] for b in bases or ()]


def _add(values: list[Any], value: Any) -> None:
    if value and value not in values and len(values) < 8:
        values.append(value)


# -- in words ---------------------------------------------------------------------------------------------------------


def title(text: str) -> str:
    """A short name of a layout from the text of its attribute, in which others have names."""
    while found := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", text):
        return f"{title(found[2])}, without axis {found[1]}"
    if found := re.fullmatch(r"#ttg\.dot_op<\{opIdx = (\d), parent = (.*?)(?:, kWidth = \d+)?\}>", text):
        return f"{'right' if found[1] == '1' else 'left'} operand of {title(found[2])}"
    return text if text.startswith("#") and "<" not in text else text.split("<")[0]


def _times(counts: list[int]) -> str:
    return " × ".join(map(str, counts))


def about(fields: Mapping[str, Any] | None) -> str:
    """A sentence about a layout."""
    if fields is None:
        return "A layout that the explorer does not know."
    f, kind = fields, fields["kind"]
    if kind == "slice":
        return f"What is left of another layout when axis {f['dim']} is gone. {about(f['parent'])}"
    if kind == "dot_op":
        side = "right" if f["opIdx"] else "left"
        return f"The {side} operand of a product, as its instructions take it from registers. {about(f['parent'])}"
    return _WORDS.get(kind, lambda f: "A layout that the explorer does not know.")(f)


def _swizzle(f: Mapping[str, Any]) -> str:
    if f["maxPhase"] == 1:
        return "Elements stand in the order of their axes, with no swizzle."
    rows = f"every {f['perPhase']} rows" if f["perPhase"] > 1 else "every row"
    return f"Swizzled: boxes of {f['vec']} elements change places, in one of {f['maxPhase']} ways, another one {rows}."


_WORDS: dict[str, Any] = {
    "blocked": lambda f: (
        f"Each thread has {_times(f['sizePerThread'])} neighbours; {_times(f['threadsPerWarp'])} threads make a warp, "
        f"and {_times(f['warpsPerCTA'])} warps stand side by side."
    ),
    "linear": lambda f: "Each bit of the number of a register, a thread and a warp moves along the axes by itself.",
    "nvidia_mma": lambda f: (
        f"The accumulator of matrix products, {'of warpgroups' if f['versionMajor'] == 3 else 'of warps'}, "
        f"{_times(f['instrShape'][:2])} an instruction of a warp; {_times(f['warpsPerCTA'])} warps."
    ),
    "amd_mfma": lambda f: f"The accumulator of matrix products (MFMA), {_times(f['instrShape'][:2])} an instruction.",
    "amd_wmma": lambda f: "The accumulator of matrix products (WMMA), 16 × 16 an instruction.",
    "swizzled_shared": _swizzle,
    "amd_rotating_shared": _swizzle,
    "nvmma_shared": lambda f: (
        f"As tensor maps and warpgroup products know it: rows of {f['swizzlingByteWidth']} bytes, whose words of 16 "
        "bytes are exchanged by the number of the row."
        if f["swizzlingByteWidth"]
        else "As tensor maps and warpgroup products know it: plain rows."
    ),
    "padded_shared": lambda f: (
        "Padded: "
        + " and ".join(f"after every {every} elements {more} are left free" for every, more in f["pads"])
        + "."
    ),
    "shared_linear": lambda f: "Each bit of a place in memory moves along the axes by itself.",
}
