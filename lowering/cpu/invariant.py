"""What LLVM text computes a second time: equal expressions, and those of a loop that are the same in all its turns."""

from __future__ import annotations

import re
from collections.abc import Collection

_MASKED_LOAD = " @llvm.masked.load."
_NAMES = re.compile(r"%[\w.]+")
_POINTER = re.compile(r"ptr (%[\w.]+)")
_DEFINITION = re.compile(r"  (%[\w.]+) = (\w+) ")
_CALLED = re.compile(r"@([\w.]+)\(")
_DIVISIONS = {"udiv", "urem", "sdiv", "srem"}  # have no result for some divisors, and must stay where they are
_IMPURE = {"call", "load", "alloca", "atomicrmw", "cmpxchg", "fence", "store", "br", "ret"}
_PURE_CALLS = (
    "llvm.fma.",
    "llvm.fmuladd.",
    "llvm.sqrt.",
    "llvm.fabs.",
    "llvm.floor.",
    "llvm.ceil.",
    "llvm.copysign.",
    "llvm.maxnum.",
    "llvm.minnum.",
    "llvm.maximum.",
    "llvm.minimum.",
    "llvm.smax.",
    "llvm.smin.",
    "llvm.umax.",
    "llvm.umin.",
)
_SILENT = ("llvm.prefetch", "llvm.masked.load.", "llvm.masked.gather.", *_PURE_CALLS)  # write no memory
ANY = "?"  # the root of a pointer that may be any


def is_pure(expression: str) -> bool:
    """Does an expression depend on its operands alone, wherever it stands?"""
    return expression.partition(" ")[0] not in _IMPURE


class Memory:
    """Which pointers may mean the same memory: `roots` gives the pointer that another one was counted from."""

    def __init__(self, own: Collection[str]):
        self.own = set(own)  # parameters whose memory is reached through no other pointer
        self.roots: dict[str, str] = {}
        self.slots: set[str] = set()  # variables of the function

    def note(self, name: str, expression: str) -> None:
        """Remember what a new pointer was counted from."""
        base = _POINTER.search(expression) if expression.startswith("getelementptr") else None
        self.roots[name] = self.root(base[1]) if base else ANY

    def root(self, pointer: str) -> str:
        return self.roots.get(pointer, pointer)

    def apart(self, a: str, b: str) -> bool:
        """Do two roots never mean the same memory?"""
        return a != b and ANY not in (a, b) and (a in self.own or b in self.own)

    def written(self, line: str) -> set[str] | None:
        """The roots that a line of text writes through; None: any memory."""
        kind = line.lstrip().partition(" ")[0]
        if kind.startswith("%"):
            kind = line.partition(" = ")[2].partition(" ")[0]
        if kind == "store":
            pointer = line.rpartition("ptr ")[2].partition(",")[0].strip()
            return set() if pointer in self.slots else {self.root(pointer)}
        if kind == "call":
            called = _CALLED.search(line)
            name = called[1] if called else ""
            if name.startswith(_SILENT) or ("ptr" not in line and name):
                return set()
            if name.startswith("llvm.masked.store."):
                return {self.root(_POINTER.search(line)[1])}
            return None
        return None if kind in ("atomicrmw", "cmpxchg", "fence") or " atomic " in line else set()


def split(lines: list[str], memory: Memory, writes: set[str] | None) -> tuple[list[str], list[str]]:
    """The lines of a loop's body that may stand before it, and the others.

    Args:
      lines: the body, in order, in which a loop is one entry; what an instruction uses stands before it.
      memory: of the function.
      writes: the roots of the memory that the loop writes; None: any, or the loop may not run at all, so that nothing
        may be read before it.
    """
    inside: set[str] = set()
    before: list[str] = []
    rest: list[str] = []
    for line in lines:
        definition = _DEFINITION.match(line) if line.startswith("  %") else None
        if definition is None:
            if not line.startswith(" "):
                writes = None  # behind the first block: what it reads may be for other turns than all
            rest.append(line)
            continue
        expression = line[definition.start(2) :]
        stays = not inside.isdisjoint(_NAMES.findall(expression))
        if stays or not _may_move(definition[2], expression, memory, writes):
            inside.add(definition[1])
            rest.append(line)
        else:
            before.append(line)
    return before, rest


def _may_move(kind: str, expression: str, memory: Memory, writes: set[str] | None) -> bool:
    if kind == "load" or (kind == "call" and _MASKED_LOAD in expression):
        pointer = _POINTER.search(expression)
        if writes is None or pointer is None or " atomic " in expression:
            return False
        root = memory.root(pointer[1])
        return pointer[1] not in memory.slots and all(memory.apart(root, w) for w in writes)
    if kind == "call":
        called = _CALLED.search(expression)
        return called is not None and called[1].startswith(_PURE_CALLS)
    if kind in _DIVISIONS:
        divisor = expression.partition(" ; ")[0].rpartition(", ")[2]  # without the mark of a line
        return divisor.isdigit() and int(divisor) > 0
    return kind not in _IMPURE
