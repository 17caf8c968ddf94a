"""PTX of products whose left operand has two of every four numbers; triton has no op for them.

The emitter makes a dense product of one instruction over 16 terms for each 32 terms of the sparse one: its addresses,
its accumulator and its predicate are those of the sparse instruction, and what is not is said by a comment in front,
`// jtile.sparse %r7 0 2 4`: the register with the places, the selector of the threads that have them, the number of the
instruction in its product, and how many that has.

The tensor cores read the register with the places when they come to the instruction, which may be hundreds of cycles
after it was issued, and ptxas does not know it: where a round of a loop wrote them while the last product of the round
before ran, an H200 with two consumers gave wrong sums. So something that needs these registers, and does nothing,
stands behind the wait for all products (`held`), and nothing else is in them until then.

A text of which anything is not understood is refused: it would give wrong numbers.
"""

from __future__ import annotations

import dataclasses
import re

_MARK = re.compile(r"^\s*// jtile\.sparse (%r\d+) ([01]) (\d+) (\d+)$")
_PRODUCT = re.compile(
    r"^(\s*wgmma\.mma_async)(\.sync\.aligned\.m64n\d+)k16(\.f32\.(b?f16)\.\4) (\{[^{}]*\}), (%rd\d+), (%rd\d+), "
    r"(%p\d+|[01]), 1, 1, 0, 0;$"
)
_WRITES = re.compile(r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|[^,;]+)")
_LEAVES = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:bra|brx|call|ret|exit)\b|^\s*\$?\w+:")
_WAIT = "wgmma.wait_group.sync.aligned 0;"
_HELD = re.compile(r"@none nanosleep\.u32 (%r\d+);")
_GROUP = ("wgmma.commit_group.sync.aligned;", "wgmma.fence.sync.aligned;")


def mark(register: str, selector: int, step: int, steps: int) -> str:
    """The comment in front of instruction number `step` of `steps` of a product."""
    return f"// jtile.sparse {register} {selector} {step} {steps}"


def held(register: str) -> str:
    """Assembly that needs a register with places, of which none are 0, and does nothing."""
    return f"{{ .reg .pred none; setp.eq.u32 none, {register}, 0; @none nanosleep.u32 {register}; }}"


@dataclasses.dataclass
class _Open:
    """A product of which some instructions have been read.

    Attributes:
      register, selector, step, steps: what the last comment said.
      waits: whether the instruction behind that comment has not come yet.
      sums: the accumulator of the instructions before.
    """

    register: str
    selector: str
    step: int
    steps: int
    waits: bool = True
    sums: str = ""


def products(text: str) -> str:
    """PTX in which the marked dense products are sparse ones; those of one product are one group that is waited for.

    Raises:
      ValueError: something stands where it was not expected.
    """
    if "jtile.sparse" not in text:
        return text
    out: list[str] = []
    here: _Open | None = None
    used: dict[str, bool] = {}  # registers of products that may run; whether all products have been waited for since
    for line in text.split("\n"):
        if "jtile.sparse" in line:
            here = _marked(line, here)
            used[here.register] = False
        elif _WAIT in line:
            used = dict.fromkeys(used, True)
        elif "@none nanosleep" in line:
            used = {
                register: ended for register, ended in used.items() if not (ended and register in _HELD.findall(line))
            }
        elif here is None:
            pass
        elif "wgmma.mma_async" in line:
            line = _sparse(line, here)
        elif line.strip() in _GROUP and not here.waits:
            if here.step + 1 < here.steps:
                continue
            here = None
        elif line.strip() in _GROUP and here.step:
            continue
        else:
            _check(line, here)
        out.append(line)
    if here is not None:
        raise ValueError(f"instruction {here.step} of {here.steps} of a sparse product is the last one of the text")
    if used:
        raise ValueError(f"nothing holds the places of sparse products, {', '.join(used)}, until these have ended")
    return "\n".join(out)


def _marked(line: str, here: _Open | None) -> _Open:
    m = _MARK.match(line)
    if m is None:
        raise ValueError(f"a comment of a sparse product without its register: {line.strip()}")
    new = _Open(m[1], m[2], int(m[3]), int(m[4]))
    before = (-1, new.steps) if here is None else (here.step, here.steps)
    if (new.step - 1, new.steps) != before or (here is not None and here.waits):
        raise ValueError(f"instructions of a sparse product are not in order: {line.strip()}, after {here}")
    new.sums = "" if here is None else here.sums
    return new


def _sparse(line: str, here: _Open) -> str:
    m = _PRODUCT.match(line)
    if m is None or not here.waits or here.sums not in ("", m[5]):
        raise ValueError(f"this is no product that can be a sparse one: {line.strip()[:160]} ... {line[-60:]}")
    here.waits, here.sums = False, m[5]
    places = f"{here.register}, {here.selector}"
    return f"{m[1]}.sp{m[2]}k32{m[3]} {m[5]}, {m[6]}, {m[7]}, {places}, {m[8]}, 1, 1, 0, 0;"


def _check(line: str, here: _Open) -> None:
    """Refuse what may change the register with the places, or be reached from somewhere else."""
    if line.lstrip().startswith(("//", ".")) or not line.strip():
        return
    if _LEAVES.match(line):
        raise ValueError(f"a sparse product is not in one piece: {line.strip()}")
    m = _WRITES.match(line)
    if m and here.waits and re.search(rf"{re.escape(here.register)}\b", m[1]):
        raise ValueError(f"the places of a sparse product are overwritten: {line.strip()}")
