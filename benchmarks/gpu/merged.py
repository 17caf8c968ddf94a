"""Whether XLA made one piece of work of several calls in a program, by the text of what it compiled.

Barriers between calls are gone before XLA fuses: kernels without custom calls that read the same arguments may become
one, which reads them once for all calls (`n_body` read 53 us so instead of 1,024).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", re.M)
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$", re.M)
_OPCODE = re.compile(r"(?<=[\s)}\]])([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_FREE = ("parameter", "tuple", "get-tuple-element", "call", "bitcast")  # no work of their own
_MADE = ("constant", "iota", "partition-id", "replica-id")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    opcode: str
    operands: tuple[str, ...]
    number: int  # of a parameter, or the index of a tuple's element
    applies: str  # the computation of a call


@dataclasses.dataclass(frozen=True)
class _Computation:
    root: str
    instructions: dict[str, _Instruction]


# An instruction in its calls from the outermost on, (name of the call, ...), and the indices of the element of its
# tuple that is asked for, the outermost first.
_Value = tuple[tuple[str, ...], str, tuple[int, ...]]


def shared_work(text: str, calls: int) -> list[str]:
    """Names of instructions that compute from the program's arguments, and that the results of several calls need.

    Args:
      text: the compiled program, as `as_text` gives it. Its results are those of one call behind the other's.
      calls: how many calls it has.
    """
    entry, computations = _parsed(text)
    walk = _Walk(entry, computations)
    root = computations[entry].instructions[computations[entry].root]
    if calls < 2 or root.opcode != "tuple":
        return []
    leaves = len(root.operands) // calls
    seen: dict[tuple, int] = {}
    found = []
    for call in range(calls):
        results = [((), name, ()) for name in root.operands[call * leaves : (call + 1) * leaves]]
        for work in dict.fromkeys(walk.work_behind(results)):
            if seen.setdefault(work, call) != call and walk.reads_arguments(work):
                found.append(work[1])
    return list(dict.fromkeys(found))


class _Walk:
    """Ways from results to the arguments of a program, through calls of its computations."""

    def __init__(self, entry: str, computations: dict[str, _Computation]):
        self._entry, self._computations = entry, computations

    def work_behind(self, values: list[_Value]) -> Iterator[tuple[tuple[str, ...], str]]:
        """All instructions that the values need and that compute something, each as (its calls, its name)."""
        for value, instruction in self._needed(values):
            if instruction.opcode not in (*_FREE, *_MADE):
                yield value[:2]

    def reads_arguments(self, work: tuple[tuple[str, ...], str]) -> bool:
        """Whether an instruction needs an argument of the program."""
        needed = self._needed([(*work, ())])
        return any(instruction.opcode == "parameter" and not value[0] for value, instruction in needed)

    def _needed(self, values: list[_Value]) -> Iterator[tuple[_Value, _Instruction]]:
        """The values, and all that they need, each once and with its instruction."""
        stack, done = list(values), set()
        while stack:
            value = stack.pop()
            if value in done:
                continue
            done.add(value)
            instruction = self._of(value)
            yield value, instruction
            stack.extend(self._before(value, instruction))

    def _of(self, value: _Value) -> _Instruction:
        return self._computation(value[0]).instructions[value[1]]

    def _computation(self, scope: tuple[str, ...]) -> _Computation:
        found = self._computations[self._entry]
        for call in scope:
            found = self._computations[found.instructions[call].applies]
        return found

    def _before(self, value: _Value, instruction: _Instruction) -> Iterator[_Value]:
        scope, name, path = value
        match instruction.opcode:
            case "parameter" if scope:
                outer, call = scope[:-1], scope[-1]
                yield outer, self._computation(outer).instructions[call].operands[instruction.number], path
            case "get-tuple-element":
                yield scope, instruction.operands[0], (instruction.number, *path)
            case "tuple" if path:
                yield scope, instruction.operands[path[0]], path[1:]
            case "call":
                inner = (*scope, name)
                yield inner, self._computation(inner).root, path
            case _:
                for operand in instruction.operands:
                    yield scope, operand, ()


def _parsed(text: str) -> tuple[str, dict[str, _Computation]]:
    """(The name of the entry, the computations by name.)"""
    heads = [*_COMPUTATION.finditer(text)]
    found, entry = {}, ""
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(text)]):
        instructions, root = {}, ""
        for line in _INSTRUCTION.finditer(text, head.end(), end):
            instructions[line[2]] = _instruction(line[3])
            root = line[2] if line[1] else root
        found[head[2]] = _Computation(root, instructions)
        entry = head[2] if head[1] else entry
    return entry, found


def _instruction(text: str) -> _Instruction:
    """What stands behind the `=` of an instruction: `type opcode(operands), attributes`."""
    opcode = _OPCODE.search(" " + text)
    assert opcode is not None, text
    start, depth = opcode.end() - 1, 1
    end = start
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    inside, behind = text[start : end - 1], text[end:]
    name = opcode[1]
    if name == "parameter":
        return _Instruction(name, (), int(inside), "")
    index = re.search(r"index=(\d+)", behind) if name == "get-tuple-element" else None
    applies = re.search(r"to_apply=%?([\w.\-]+)", behind) if name == "call" else None
    return _Instruction(
        name, () if name in _MADE else tuple(_NAME.findall(inside)), int(index[1]) if index else 0,
        applies[1] if applies else "",
    )  # fmt: skip
