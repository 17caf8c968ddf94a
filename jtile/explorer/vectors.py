"""The vector registers of a CPU's machine code: how many are in use, and which lines of the source keep them busy."""

from __future__ import annotations

import re
from typing import Any

from jtile.explorer.links import Linked
from jtile.explorer.places import Places
from jtile.explorer.record import Layouts

# The names of vector registers: on x86-64, and on aarch64.
_X86 = re.compile(r"%([xyz])mm(\d+)")
_ARM = re.compile(r"(?<![\w.])([vzq])(\d+)(?:\.\d*[bhsd])?(?!\w)")
_STACK = re.compile(r"\(%r[sb]p|\[(?:sp|x29)")
_BYTES = {"x": 16, "y": 32, "z": 64, "v": 16, "q": 16}


def vectors(asm: Linked, places: Places) -> Layouts | None:
    """How vector registers are used: for each line of the source, how many instructions name each of them. None for
    machine code without vectors."""
    x86 = any("%r" in line for line in asm.lines)
    name = _X86 if x86 else _ARM
    rows: dict[int, dict[str, Any]] = {}
    widest, kept = "", 0
    for line, place in zip(asm.lines, asm.places, strict=True):
        if not line.startswith("\t") or line.startswith("\t."):
            continue
        found = {(kind, int(number)) for kind, number in name.findall(line.split("#")[0])}
        if not found:
            continue
        number = places.number(place)
        row = rows.setdefault(number, {"place": number, "instructions": 0, "registers": {}})
        row["instructions"] += 1
        kept += bool(_STACK.search(line))
        for kind, register in found:
            widest = max(widest, kind, key=lambda k: _BYTES.get(k, 0))
            row["registers"][register] = row["registers"].get(register, 0) + 1
    used = {r for row in rows.values() for r in row["registers"]}
    if not used:
        return None
    count = 32 if max(used) > 15 or not x86 or widest == "z" else 16
    listed = [
        {**row, "registers": [row["registers"].get(r, 0) for r in range(count)]}
        for row in sorted(rows.values(), key=lambda row: row["place"])
    ]
    about = {
        "name": f"{widest}mm" if x86 else widest, "bytes": _BYTES.get(widest, 16), "count": count, "used": len(used),
        "stack": kept, "rows": listed,
    }  # fmt: skip
    return Layouts(1, [], [], [], about, [])
