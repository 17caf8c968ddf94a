"""Random programs of loops and branches: traced, they give what Python gives."""

from __future__ import annotations

import linecache

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np

from jtile import language as jt
from jtile.interpret import interpret

NAMES = ("a", "b", "c")
EXPRESSIONS = st.sampled_from(
    ["a + b", "b * 3 + 1", "c - a", "a * b + k", "t + c", "2", "a if b > c else c", "(1 if a > 3 else b) + k"]
)
CONDITIONS = st.sampled_from(
    ["a < b", "b % 3 == 1", "not a > c", "a > 2 and b < 9", "a > 9 or c < 3", "1 < b < 8", "flag", "flag and a > 1"]
)


@st.composite
def statements(draw, depth: int = 0) -> list[str]:
    out = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(
            st.sampled_from(["assign", "assign", "temporary", "set", *(["for", "while", "if"] if depth < 3 else [])])
        )
        if kind == "assign":
            out.append(f"{draw(st.sampled_from(NAMES))} = ({draw(EXPRESSIONS)}) % 13")
        elif kind == "temporary":
            out += [f"u = ({draw(EXPRESSIONS)}) % 7", f"{draw(st.sampled_from(NAMES))} += u"]
        elif kind == "set":
            out.append(f"box[{draw(st.integers(0, 1))}] = (box[0] + {draw(EXPRESSIONS)}) % 11")
        elif kind == "for":
            bound = draw(st.sampled_from(["3", "a % 4", "1, c % 5", "b % 5, 0, -2", "0, 7, 3"]))
            out += [f"for k in jt.range({bound}):", *_indented(draw(statements(depth + 1))), "k = 1"]
        elif kind == "while":
            w = f"w{depth}"  # its own counter, so that the loop ends
            inside = [*draw(statements(depth + 1)), f"{w} += 1", f"t = {w}"]
            out += [f"{w} = 0", f"while {w} < 3 and ({draw(CONDITIONS)}):", *_indented(inside)]
        else:
            out += [f"if {draw(CONDITIONS)}:", *_indented(draw(statements(depth + 1)))]
            if draw(st.booleans()):
                out += ["else:", *_indented(draw(statements(depth + 1)))]
    return out


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


class _Python:
    """`jt` for plain Python."""

    range = range


def _define(lines: list[str], name: str, module) -> object:
    source = [line + "\n" for line in lines]
    # no modification time: linecache keeps it
    linecache.cache[name] = (sum(map(len, source)), None, source, name)
    space = {"jt": module}
    exec(compile("".join(source), name, "exec"), space)
    return space["kernel"]


@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(statements(), st.lists(st.integers(0, 9), min_size=3, max_size=3), st.booleans())
def test_traced_equals_python(lower, program, start, flag):
    body = ["a, b, c = x[0], x[1], x[2]", "k = t = 1", "box = [a, 4]", *program]
    body += [f"o[{n}] = {v}" for n, v in enumerate([*NAMES, "k", "t", "box[0]", "box[1]"])]
    lines = ["def kernel(x, o, *, flag):", *_indented(body)]
    want = [0] * 7
    _define(lines, "<python>", _Python)(start, want, flag=flag)
    kernel = lower(
        _define(lines, "<traced>", jt), [np.array(start, "i4")], [jax.ShapeDtypeStruct((7,), np.int32)], flag=flag
    )
    (got,) = interpret(kernel, [np.array(start, "i4")])
    assert got.tolist() == want, "\n".join(lines)
