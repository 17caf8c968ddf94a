"""PTX of kernels with roles that begin and end sooner than triton writes them.

Memory is idle from the end of a block to the first copies of the one that takes its place, which is some 4 us of four
kernels a layer where a model generates for one row. So the instructions in between count:

- The first role makes the barriers of a kernel, twenty and more, and triton 3.6 lets its warps meet behind each. No
  warp looks at one before all of them are there.
- Copies wait for their tensor maps, which come from memory: they are asked for in front of the barriers. Where no
  registers change hands, another warp asks than the one that makes barriers, which takes as long.
- The first role takes all registers while it makes barriers. It waits until the others have handed theirs over, and
  these wait until it has given them back. It keeps those that it has started with.
- At their end the roles meet, hand registers back and forth, and wait for a word that there is nothing left to do. They
  return instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .clusters import MARK

_INIT = re.compile(r"^\s*(@%p\d+) mbarrier\.init\.")
_MEETING = re.compile(r"^\s*bar(?:rier)?\.sync\s+0(?:, \d+)?;")  # of the first role, or of the only one
_NOTE = r"\s*(?://|\.loc\b)[^\n]*\n"  # a line that is no instruction
_PLACES = re.compile(r"^\s*(?:$|//|\.loc\b|\$L__tmp\d+:|(?:add\.[su](?:32|64)|mov\.[bu](?:32|64))\s)")  # of a barrier
_MAP = re.compile(r"^\s*\.param \.align 64 \.b8 (\w+)\[128\]", re.M)
_LABEL = re.compile(r"^(\$L__BB\w+):", re.M)
_JOIN = r"\tbarrier\.sync \t1;\n"
_REGISTERS = r"\tsetmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32 \t\d+;\n"
_OF_ALL = re.compile(r"^\s*(?:@!?%p\d+\s+)?bar(?:rier)?(?:\.cta)?\.sync(?:\.aligned)?\s+\w+;", re.M)  # names no count
_BEGIN = re.compile(rf"{_REGISTERS}(?:{_NOTE})*{_JOIN}")  # of a role, behind which the first of all roles begins
_IDLE = re.compile(rf"{_JOIN}{_JOIN}\tbra\.uni ")  # warps that have no role
_LOOP = re.compile(
    rf"^(\$L__BB\w+):[^\n]*\n(?:{_NOTE})*{_REGISTERS}{_JOIN}(?:\t(?:add|mov)[^\n]*\n)*\tld\.shared\.b8", re.M
)
_LAST = re.compile(
    rf"{_JOIN}{_REGISTERS}(?:{_NOTE})*(?:\tst\.shared\.[^\n]*\n)+{_JOIN}(?=(?:\$L__BB\w+:[^\n]*\n|{_NOTE})*\tret;)"
)
_ASKS = 96  # the thread that asks for tensor maps there: of the first role's last warp, if it has four
_START = re.compile(r"^\.maxnreg (\d+)", re.M)
_GIVEN = re.compile(rf"({_JOIN})\tsetmaxnreg\.\w+\.sync\.aligned\.u32 \t(\d+);\n({_JOIN})")


def sooner(text: str) -> str:
    """PTX of a kernel that begins and ends as said above; text in which something is not understood stays as it is."""
    return _ended(_begun(text))


def _begun(text: str) -> str:
    """PTX that asks for tensor maps first, and makes barriers without meetings in between."""
    lines = text.split("\n")
    entry = next((k for k, line in enumerate(lines) if ".entry " in line), 0)
    first = next((k for k, line in enumerate(lines) if _INIT.match(line)), None)
    if first is None or not _comes_first(lines, entry, first):
        return text
    meetings: list[int] = []  # behind the last barrier
    left_out: set[int] = set()
    for k in range(first, len(lines)):
        if _INIT.match(lines[k]):
            left_out.update(meetings)
            meetings = []
        elif _MEETING.match(lines[k]):
            meetings.append(k)
        elif not _PLACES.match(lines[k]):
            break
    asks = _asks(text, lines[first].split()[0], _MAP.findall("\n".join(lines[entry:first])))
    return "\n".join([*lines[:first], *asks, *(lines[k] for k in range(first, len(lines)) if k not in left_out)])


def _asks(text: str, one: str, names: Sequence[str]) -> list[str]:
    """Lines that ask for tensor maps; `one`: the predicate of the thread that makes barriers."""
    if not names or "setmaxnreg" in text:
        return [f"\t{one} prefetch.param.tensormap [{name}];" for name in names]
    who = ["\t.reg .pred %asks;", "\t.reg .b32 %thread;", "\tmov.u32 %thread, %tid.x;"]
    who.append(f"\tsetp.eq.u32 %asks, %thread, {_ASKS};")
    return ["\t{", *who, *(f"\t@%asks prefetch.param.tensormap [{name}];" for name in names), "\t}"]


def _comes_first(lines: list[str], entry: int, at: int) -> bool:
    """Whether no line from the entry on touches shared memory in front of line `at`, which runs once."""
    front = "\n".join(lines[entry:at])
    behind = "\n".join(lines[at:])
    return "shared" not in front and not any(re.search(rf"{re.escape(x)}\b", behind) for x in _LABEL.findall(front))


def _ended(text: str) -> str:
    """PTX whose roles return when they have done their work, and whose first one takes no registers for its barriers.
    Blocks of clusters, which meet at their ends, stay as they are."""
    loop = _LOOP.search(text)
    if loop is None or MARK in text or len(_LAST.findall(text)) != 1:
        return text
    again = re.escape(loop[1])
    back = re.compile(rf"{_JOIN}{_REGISTERS}(?:\tbra\.uni \t{again};\n|(?={again}:))")
    found = _LAST.sub("\tret;\n", back.sub("\tret;\n", text))
    # The roles join at the top of the loop; where each begins, and the first one in front of that, too; and two times
    # where warps have no role. Another join would be an end that is not understood, or wait for those that returned.
    joins = 1 + len(_BEGIN.findall(found)) + 2 * len(_IDLE.findall(found))
    return _keeping(found) if len(_OF_ALL.findall(found)) == joins else text


def _keeping(text: str) -> str:
    """PTX whose first role has the registers that it started with until the others begin."""
    start, taken, given = _START.search(text), re.search(_REGISTERS, text), _GIVEN.search(text)
    if start is None or taken is None or given is None or taken.start() > given.start():
        return text
    if "setmaxnreg" in text[taken.end() : given.start()] or ".inc" not in taken[0]:
        return text  # other roles stand in front of the first one
    has, gets = int(start[1]), int(given[2])
    way = "" if has == gets else f"\tsetmaxnreg.{'inc' if gets > has else 'dec'}.sync.aligned.u32 \t{gets};\n"
    return f"{text[: taken.start()]}{text[taken.end() : given.start()]}{given[1]}{way}{given[3]}{text[given.end() :]}"
