"""Works around defects of ptxas, and of the PTX that triton makes; says in PTX what triton has no words for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import clusters
from .ptx_copies import met
from .ptx_roles import sooner

_ADD = re.compile(r"^(\s*)add\.[su]16x2 (\s*)(%\w+), (%\w+), (%\w+|-?\w+);", re.M)
_CONSTANT = re.compile(r"^\s*mov\.[bus]32 \s*(%\w+), -?\w+;", re.M)


_MAP = r"mov\.b(?:32|64)\s+(%rd?\d+), \w+_param_{};"
_SAME = re.compile(r"^\s*(?:cvta\.param\.u64|cvt\.u64\.u32)\s+(%rd\d+), (%rd?\d+);", re.M)
_LOAD = re.compile(r"(cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\.[\w:.]+) (\[%r\d+\], \[(%rd\d+), [^;]*);")
_PLACE = re.compile(r"\[%rd\d+, \{[^}]*\}\]")  # of a box: its map, and where it begins
_START = re.compile(r"^\{\n", re.M)
_OF_PAGES = re.compile(r"\bld\.global\.cg\b")
_ENTRY = re.compile(r"^\s*(?:\.visible )?\.entry ", re.M)
_SOME_LANES = re.compile(r"^(\s*)(@!?%p\d+ ld\.shared\.\w+ (%r[sd]?)(\d+),)", re.M)
_HALF = re.compile(r"^\s*mul\.(hi\.u32|lo\.s32)\s+(%r\d+), (%r\d+), (%r\d+|-?\d+);$")
_WRITTEN = re.compile(r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(%\w+)[,|]")
_REGISTER = re.compile(r"%r\d+")
_BLOCK_ENDS = re.compile(r"^\s*(?:\$\w+:|(?:@!?%p\d+\s+)?bra\b|\{|\})")
FEW_PROGRAMS = 512  # of grids whose programs let the kernel behind start: see `letting`
WAITS = clusters.WAITS
_LETTING = f"""\t.reg .b32 %let_programs;
\t.reg .pred %let_few;
\tmov.u32 %let_programs, %nctaid.x;
\tsetp.le.u32 %let_few, %let_programs, {FEW_PROGRAMS};
\t@%let_few griddepcontrol.launch_dependents;
"""
_BITS = {"%rs": 16, "%r": 32, "%rd": 64}


def mended(text: str) -> str:
    """PTX of a kernel in which the defects below are worked around."""
    return met(sooner(_paged(_defined(_sums_of_halves(_whole_products(text))))))


def _paged(text: str) -> str:
    """PTX in which the shared memory of a launch has a name that `task_pages.py` goes by."""
    if "jtile_pages" not in text:
        return text
    text = _OF_PAGES.sub("ld.shared", text)
    return _ENTRY.sub(lambda m: f".extern .shared .align 16 .b8 jtile_pages[];\n{m[0]}", text, count=1)


def through_first_cache(text: str) -> str:
    """PTX whose copies of 16 bytes to shared memory go through the first-level cache, which they would pass by."""
    return text.replace("cp.async.cg.shared.global", "cp.async.ca.shared.global")


def evicting(text: str, evict: Sequence[tuple[int, str]]) -> str:
    """PTX whose copies by some tensor maps say when the second-level cache forgets what they read; triton has no words
    for it. `evict`: (position of the map among the parameters, "first" or "last"). "ahead": these copies are none, but
    bring what they name to that cache only; "blocks 2": to the same place in both blocks of a cluster.

    Raises:
      ValueError: a copy that is none is spelt in another way than was known: as a copy it would write to memory that
        nobody has set aside.
    """
    policies: dict[str, str] = {}  # register with the address of a map -> when the cache forgets what copies by it read
    for position, when in evict:
        policies |= dict.fromkeys(re.findall(_MAP.format(position), text), when)
    for to, of in _SAME.findall(text) if policies else ():
        policies |= {to: policies[of]} if of in policies else {}
    if not policies:
        return text

    def spelt(m: re.Match[str]) -> str:
        when = policies.get(m[3])
        if when == "ahead":
            place = _PLACE.search(m[2])
            if place is None:
                raise ValueError(f"this is no copy that can be brought to a cache only: {m[0]}")
            return f"cp.async.bulk.prefetch.tensor.{m[1].split('.')[4]}.L2.global {place[0]};"
        if when and when.startswith("blocks"):
            return f"{m[1].replace('::cta', '::cluster')}{clusters.SHARED}{m[2]}, %cluster_blocks;"
        return f"{m[1]}.L2::cache_hint {m[2]}, %evict_{when};" if when else m[0]

    text = _LOAD.sub(spelt, text)
    for line in text.split("\n"):
        of = re.search(r"cp\.async\.bulk\.tensor\..*\[(%rd\d+), ", line)
        if of and policies.get(of[1]) == "ahead":
            raise ValueError(f"this is no copy that can be brought to a cache only: {line.strip()}")
    made = [
        f"\t.reg .b64 %evict_{when};\n\tcreatepolicy.fractional.L2::evict_{when}.b64 %evict_{when}, 1.0;\n"
        for when in sorted(set(policies.values()) & {"first", "last"})
    ]
    made += [
        f"\t.reg .b16 %cluster_blocks;\n\tmov.b16 %cluster_blocks, {(1 << int(when.split()[1])) - 1};\n"
        for when in sorted(set(policies.values()))
        if when.startswith("blocks")
    ]
    return _START.sub(lambda m: m[0] + "".join(made), text, count=1)


def narrowed(text: str, columns: Sequence[tuple[int, int]]) -> str:
    """PTX whose warpgroup products have fewer columns than those that triton writes, which have powers of two.

    An instruction names a register for every number of its result that a thread has, columns from first to last, so
    that one of fewer columns names the first of them. The others stay as they are.

    Args:
      columns: (columns of instructions in the text, those that they are to have).
    """
    for wide, narrow in columns:
        instruction = re.compile(rf"(wgmma\.mma_async\S*\.m64n){wide}(k\S+\s+\{{)([^{{}}]*)\}}")
        first = lambda m, n=narrow: f"{m[1]}{n}{m[2]}{','.join(m[3].split(',')[: n // 2])}}}"
        text, found = instruction.subn(first, text)
        assert found, f"no products of {wide} columns"
    return text


def letting(text: str) -> str:
    """PTX of a kernel that lets early roles of the one behind it start; one that has such roles says itself when.

    Each program of a grid costs 0.6 ns of the whole GPU when it says so (H200): softmax of 262144 rows of 256 took 208
    us without, and 372 with it. So only the few programs of a small grid do, as kernels of a step of few rows have it;
    the kernel behind a larger one starts when that has ended, as without early roles.
    """
    if WAITS in text:
        return text
    return _START.sub(lambda m: m[0] + _LETTING, text, count=1)


def _defined(text: str) -> str:
    """PTX of a kernel with roles where what some lanes load (a sum over several warps, say) is zero in the others.

    Left undefined, it would be the value of another role in that register: roles are branches of a loop, so that ptxas
    keeps such a value over all of them, in local memory.
    """
    if "setmaxnreg" not in text:
        return text
    return _SOME_LANES.sub(lambda m: f"{m[1]}mov.b{_BITS[m[3]]} {m[3]}{m[4]}, 0;\n{m[1]}{m[2]}", text)


def _whole_products(text: str) -> str:
    """PTX in which the high and the low half of one product of 32-bit numbers come of one instruction; ptxas finds few
    of these pairs. Each half is taken where it was computed, so that registers hold what they held."""
    if "mul.hi.u32" not in text:
        return text
    lines = text.split("\n")
    alone: dict[tuple[str, str], re.Match[str]] = {}  # the factors -> the half of their product that is computed
    where: dict[tuple[str, str], int] = {}
    count = 0
    for k, line in enumerate(lines):
        half, written = _HALF.match(line), _WRITTEN.match(line)
        if half is not None:
            factors = half[3], half[4]
            other = alone.pop(factors, None)
            if other is not None and other[1] != half[1]:
                lines[where[factors]] = f"\tmul.wide.u32 %jtw{count}, {', '.join(factors)};\n{_taken(other, count)}"
                lines[k] = _taken(half, count)
                count += 1
            else:
                alone[factors], where[factors] = half, k
        if written is None and _BLOCK_ENDS.match(line):
            alone.clear()
        changed = _REGISTER.findall(line) if written is None else [written[1]]
        for factors in [f for f in alone if set(f).intersection(changed)]:
            del alone[factors]
    made = f"\t.reg .b64 %jtw<{count}>;\n\t.reg .b32 %jtu;\n"
    return _START.sub(lambda m: m[0] + made, "\n".join(lines), count=1) if count else text


def _taken(half: re.Match[str], product: int) -> str:
    pair = f"%jtu, {half[2]}" if half[1] == "hi.u32" else f"{half[2]}, %jtu"
    return f"\tmov.b64 {{{pair}}}, %jtw{product};"


def _sums_of_halves(text: str) -> str:
    """PTX with the sums of two 16-bit halves and a constant done half by half.

    Of `add.s16x2 d, a, constant` ptxas 12.8 and 12.9 (triton 3.6 to 3.9, for some architectures) drop the low half of
    the constant where nobody reads the high half of d: seen in SASS as `VIADD.16x2 R, R, 0x0`.
    """
    if "16x2" not in text:
        return text
    constants = set(_CONSTANT.findall(text))
    return _ADD.sub(lambda m: _halves(m) if m[5] in constants or m[5][0] != "%" or m[4] in constants else m[0], text)


def _halves(m: re.Match[str]) -> str:
    indent, _, d, a, b = m.groups()
    lines = [
        "{",
        ".reg .b16 %jt<6>;",
        f"mov.b32 {{%jt0, %jt1}}, {a};",
        f"mov.b32 {{%jt2, %jt3}}, {b};",
        "add.s16 %jt4, %jt0, %jt2;",
        "add.s16 %jt5, %jt1, %jt3;",
        f"mov.b32 {d}, {{%jt4, %jt5}};",
        "}",
    ]
    return "\n".join(indent + line for line in lines)
