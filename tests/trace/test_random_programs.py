"""Random programs of loops and branches: traced, they give what Python gives."""

from __future__ import annotations

import linecache

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
from draws import draws

from jtile import language as jt
from jtile.interpret import interpret
from jtile.trace import function

NAMES = ("a", "b", "c")
_EXPRESSIONS = """
    a + b; b * 3 + 1; c - a; a * b + k; t + c; 2; a if b > c else c; (1 if a > 3 else b) + k
    max(a, b, 3); min(b - c, k); max([a, 2]) if a == 1 else box[0]
"""
_CONDITIONS = """
    a < b; b % 3 == 1; not a > c; a > 2 and b < 9; a > 9 or c < 3; 1 < b < 8; flag; flag and a > 1
    0 <= a < 3 and x[a] > 4; a > 2 or x[a] > 3; 1 < x[0] + b <= c < 9; any([a > 8, b > 8])
"""
EXPRESSIONS, CONDITIONS = (
    st.sampled_from([e.strip() for e in text.replace("\n", ";").split(";") if e.strip()])
    for text in (_EXPRESSIONS, _CONDITIONS)
)
PATTERNS = ("case 1:", "case 2 | 3:", "case t if t > 8:", "case (4 | 5) as t if b > 3:", "case _:")


@st.composite
def statements(draw, depth: int = 0, loops: int = 0) -> list[str]:
    """Random statements; `loops` of the loops around can be left by a jump."""
    out = []
    kinds = ["assign", "assign", "temporary", "set", *["for", "python for", "while", "if", "match"] * (depth < 3)]
    kinds += ["jump"] * bool(depth)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        if kind == "assign":
            out.append(f"{draw(st.sampled_from(NAMES))} = ({draw(EXPRESSIONS)}) % 13")
        elif kind == "temporary":
            out += [f"u = ({draw(EXPRESSIONS)}) % 7", f"{draw(st.sampled_from(NAMES))} += u"]
        elif kind == "set":
            out.append(f"box[{draw(st.integers(0, 1))}] = (box[0] + {draw(EXPRESSIONS)}) % 11")
        elif kind == "for":
            bound = draw(st.sampled_from(["3", "a % 4", "1, c % 5", "b % 5, 0, -2", "0, 7, 3", "a, b, c % 3 + 1"]))
            bound = draw(st.sampled_from([bound, "b, a, -1 - c % 2"]))
            out += ["k = 0", f"for k in jt.range({bound}):", *_indented(draw(statements(depth + 1, loops + 1)))]
            out += [*draw(_orelse(depth, loops))]
        elif kind == "python for":
            out += ["for k in [2, 0, 1]:", *_indented(draw(statements(depth + 1, loops + 1)))]
            out += [*draw(_orelse(depth, loops))]
        elif kind == "while":
            w = f"w{depth}"  # its own counter, so that the loop ends
            test = draw(st.sampled_from([f"{w} < 3 and ({draw(CONDITIONS)})", f"{w} < 3", "True"]))
            inside = [f"{w} += 1", f"if {w} > 3:", "    break", *draw(statements(depth + 1, loops + 1)), f"t = {w}"]
            out += [f"{w} = 0", f"while {test}:", *_indented(inside), *draw(_orelse(depth, loops))]
        elif kind == "match":
            out += ["match a:"]
            for pattern in PATTERNS[: draw(st.integers(1, len(PATTERNS)))]:
                out += _indented([pattern, *_indented(draw(statements(3, loops)))])
        elif kind == "jump":
            out += [f"if {draw(CONDITIONS)}:", f"    t = {draw(EXPRESSIONS)}"]
            jumps = ["return box[0] + t", "return t", *["break", "break", "continue"] * (loops > 0)]
            out += [f"    {draw(st.sampled_from(jumps))}"]
        else:
            out += [f"if {draw(CONDITIONS)}:", *_indented(draw(statements(depth + 1, loops)))]
            if draw(st.booleans()):
                out += ["else:", *_indented(draw(statements(depth + 1, loops)))]
    return out


@st.composite
def _orelse(draw, depth: int, loops: int) -> list[str]:
    return ["else:", *_indented(draw(statements(depth + 1, loops)))] if draw(st.booleans()) else []


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


class _Python:
    """`jt` for plain Python."""

    range = range

    @staticmethod
    def function(fn):
        return fn


def _define(lines: list[str], name: str, module) -> object:
    source = [line + "\n" for line in lines]
    # no modification time: linecache keeps it
    linecache.cache[name] = (sum(map(len, source)), None, source, name)
    space = {"jt": module, "function": module.function if module is _Python else function}
    exec(compile("".join(source), name, "exec"), space)
    return space["kernel"]


@draws(60)
@hypothesis.given(statements(), st.lists(st.integers(0, 9), min_size=3, max_size=3), st.booleans())
def test_traced_equals_python(lower, program, start, flag):
    """A helper may return early, and the kernel stores what it gives."""
    lines = [
        "@function",
        "def helper(x, o, flag):",
        "    a, b, c = x[0], x[1], x[2]",
        "    k = t = 1",
        "    box = [a, 4]",
    ]
    lines += _indented(program)
    lines += [f"    o[{n}] = {v}" for n, v in enumerate([*NAMES, "k", "t", "box[0]", "box[1]"])]
    lines += ["    return a", "def kernel(x, o, *, flag):", "    o[7] = helper(x, o, flag)"]
    want = [0] * 8
    _define(lines, "<python>", _Python)(start, want, flag=flag)
    kernel = lower(
        _define(lines, "<traced>", jt),
        [np.array(start, "i4")],
        [jax.ShapeDtypeStruct((8,), np.int32)],
        inits=(0,),
        flag=flag,
    )
    (got,) = interpret(kernel, [np.array(start, "i4")])
    assert got.tolist() == want, "\n".join(lines)
