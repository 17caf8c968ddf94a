"""What machine code must not do: read uniform registers that, on some path, nothing has written (what ptxas mixed up
among roles), and keep registers on the stack in inner loops."""

from __future__ import annotations

import re
from typing import NamedTuple

LABEL = re.compile(r"^\s*(\.L_x_\d+|\$[\w$.]+):")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]*)(.*)")
TARGET = re.compile(r"\.L_x_\d+")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
REGISTER = re.compile(r"(gdesc\[)?UR(\d+)\b")
SPILL = re.compile(r"(@!?U?P\w+\s+)?(LDL|STL)\b")
COPY = re.compile(r"UMOV UR(\d+), UR(\d+)")  # of what nothing has written: no fault, if nothing reads the copy
NO_RESULT = ("UTMA", "USETMAXREG", "UBLKCP", "UTMACMD")  # uniform instructions that write no register
ZERO = 63


class Instruction(NamedTuple):
    place: str
    text: str
    after: list[int]
    writes: set[int]
    reads: set[int]


def unwritten(text: str) -> list[str]:
    """The instructions of a kernel, by place, that read a uniform register which some path to them has not written."""
    program = _program(text)
    written: list[frozenset[int] | None] = [None] * len(program)
    written[0], todo = frozenset(), [0]
    while todo:
        i = todo.pop()
        known = written[i]
        assert known is not None
        copy = COPY.fullmatch(program[i].text)
        after = known - {int(copy[1])} if copy and int(copy[2]) not in known else known | program[i].writes
        for k in program[i].after:
            before = written[k]
            now = after if before is None else before & after
            if now != before:
                written[k] = now
                todo.append(k)
    reached = [(x, w) for x, w in zip(program, written, strict=True) if w is not None]
    return [f"{x.place} {x.text}: UR{min(x.reads - w)}" for x, w in reached if x.reads - w and not COPY.match(x.text)]


def _program(text: str) -> list[Instruction]:
    lines, labels = [], {}
    for line in text.split("\n"):
        if label := LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := LINE.search(line):
            lines.append((found[1], found[2].strip(), found[3]))
    out = []
    for i, (place, body, rest) in enumerate(lines):
        op = PREDICATE.sub("", body)
        following = [i + 1] if i + 1 < len(lines) else []
        if op.startswith("BRX"):
            after = [labels[x] for x in TARGET.findall(body + rest)]
        elif op.startswith("BRA"):
            after = [labels[x] for x in TARGET.findall(body)] + (following if op != body else [])
        else:
            ends = op.startswith(("EXIT", "RET")) and op == body
            after = [] if ends else following
        out.append(Instruction(place, body, after, *_registers(op)))
    return out


def _registers(op: str) -> tuple[set[int], set[int]]:
    """Uniform registers that an instruction writes and reads."""
    name, _, rest = op.partition(" ")
    args = [a.strip() for a in rest.split(",")] if rest else []
    if name.startswith(("R2UR", "ELECT")) and len(args) == 3:  # a predicate first
        args = args[1:]
    writes: set[int] = set()
    uniform = name.startswith(("U", "S2UR", "R2UR", "REDUX", "ELECT", "VOTEU")) and not name.startswith(NO_RESULT)
    if uniform and args and (first := re.fullmatch(r"UR(\d+)", args[0])):
        count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        writes, args = {int(first[1]) + n for n in range(count)}, args[1:]
    reads: set[int] = set()
    for a in args:
        for descriptor, number in REGISTER.findall(a):
            at = int(number)
            if descriptor:  # of the right operand, and of the left one where it is in memory too
                left = len(args) > 1 and args[1] == a
                reads |= {at + 2, at + 3} | ({at, at + 1} if left else set())
            else:
                reads |= {at, at + 1} if ".64" in name and not a.startswith("[") else {at}
    return writes, reads - {ZERO}


def spills_of_products(text: str) -> list[str]:
    """The instructions, by place, that read or write the stack inside the innermost loops that multiply matrices. The
    loop in which warps wait for a role, and branch by a table to its code, runs each role once: it does not count."""
    program = _program(text)
    has = lambda loop, what: any(what in program[i].text for i in loop)
    busy = [loop for loop in _loops(program) if has(loop, "GMMA") and not has(loop, "BRX")]
    inner = [loop for loop in busy if not any(other < loop for other in busy)]
    found = sorted({i for loop in inner for i in loop if SPILL.match(program[i].text)})
    return [f"{program[i].place} {program[i].text}" for i in found]


def _loops(program: list[Instruction]) -> list[frozenset[int]]:
    """The loops of a kernel, outer ones too, each the instructions that it repeats: those that reach each other. What
    lies between a jump and its target need not be among them: the turns of a wait that was in vain stand far behind it.
    Of a loop without the jumps to where it is entered, the loops inside are left."""
    found, todo = [], [dict(enumerate(map(set, (x.after for x in program))))]
    while todo:
        graph = todo.pop()
        for part in _cycles(graph):
            found.append(part)
            entry = min({k for i, after in graph.items() if i not in part for k in after} & part or part)
            todo.append({i: graph[i] & part - {entry} for i in part})
    return found


def _cycles(graph: dict[int, set[int]]) -> list[frozenset[int]]:
    """The largest sets of nodes that reach each other (Tarjan's algorithm, without recursion)."""
    found, number, low, stack = [], {}, {}, []
    for root in graph:
        walk = [] if root in number else [(root, iter(graph[root]))]
        for i, _ in walk:
            number[i] = low[i] = len(number)
            stack.append(i)
        while walk:
            i, rest = walk[-1]
            for k in rest:
                if k not in number:
                    number[k] = low[k] = len(number)
                    stack.append(k)
                    walk.append((k, iter(graph[k])))
                    break
                if low[k] >= 0:
                    low[i] = min(low[i], number[k])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[i])
                if low[i] == number[i]:
                    at = stack.index(i)
                    part, stack = frozenset(stack[at:]), stack[:at]
                    low |= dict.fromkeys(part, -1)  # done
                    found += [part] if len(part) > 1 or i in graph[i] else []
    return found
