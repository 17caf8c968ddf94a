from __future__ import annotations

import ast
import textwrap

import pytest

from jtile.trace.names import Liveness, assigned, free_reads


def body(source: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(source)).body


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a = b = c", "a b"),
        ("a, (b, *c) = d", "a b c"),
        ("a[0] = b; c.d = e", ""),
        ("a += 1", "a"),
        ("a: int = 3", "a"),
        ("for i, j in k: l = 1", "i j l"),
        ("with a as b, c as (d, e): pass", "b d e"),
        ("import a.b, c as d; from e import f", "a d f"),
        ("def f(x): y = 1", "f"),
        ("class A: b = 1", "A"),
        ("[x for x in y if (z := x)]", "z"),
        ("(a := 1) + 2", "a"),
        ("del a", "a"),
        ("try: pass\nexcept E as e: f = 1", "e f"),
        ("match a:\n case [b, *c]: pass\n case {'k': d, **e}: pass\n case C() as f: pass", "b c d e f"),
        ("lambda x: (y := x)", ""),
    ],
)
def test_assigned(source, names):
    assert assigned(body(source)) == frozenset(names.split())


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a + b.c[d]", "a b d"),
        ("lambda x, y=z: x + w", "z w"),
        ("[x + a for x in y]", "a y"),
        ("[x for x in x]", "x"),
        ("def f(x):\n  t = x + a\n  return t", "a"),
        ("@d\ndef f(x=e): return g()", "d e g"),
        ("a = 3", ""),
        ("a[0] = b", "a b"),
    ],
)
def test_free_reads(source, names):
    assert free_reads(body(source)[0]) == frozenset(names.split())


def live(source: str) -> dict[int, str]:
    """Line of each statement -> the names alive after it."""
    out = Liveness(body(source)).after
    return {s.lineno: " ".join(sorted(n for n in names if n in "abcdefk")) for s, names in out.items()}


def test_straight_line():
    assert live("a = 1\nb = a\na = b\nprint(a)") == {1: "a", 2: "b", 3: "a", 4: ""}


def test_branches():
    after = live("a = 1\nif c:\n  b = a\nelse:\n  b = 2\n  a = 3\nprint(b)")
    assert after == {1: "a c", 2: "b", 3: "b", 5: "b", 6: "b", 7: ""}


def test_loops():
    source = "a = b = 0\nfor k in range(3):\n  e = k\n  a = a + e\nprint(a)"
    liveness = Liveness(body(source))
    loop = body(source)[1]
    after = live(source)
    assert after[2] == "a"
    assert after[4] == "a"
    (head,) = liveness.head.values()
    assert "a" in head
    assert "e" not in head
    assert "k" not in head
    del loop


def test_break_and_continue():
    after = live("a = b = 1\nwhile c:\n  if d:\n    b = 2\n    break\n  a = 3\nprint(a, b)")
    assert after[4] == "a b"
    after = live("for k in d:\n  if k:\n    a = 1\n    continue\n  b = a\nprint(b)")
    assert "a" in after[3]


def test_functions_read_where_they_are_called():
    after = live("a = 1\ndef f():\n  return a\na = 2\nb = f()\na = 3\nprint(b)")
    assert after[4] == "a f"
    assert "a" not in after[6]
    after = live("a = 1\nf = lambda: a\na = 2\nprint(f())")
    assert "a" in after[3]


def test_try_keeps_everything():
    after = live("a = 1\ntry:\n  a = 2\n  b = 3\nexcept E:\n  print(a)\nfinally:\n  print(c)\nprint(b)")
    assert after[1] == "a b c"
    assert "a" in after[3]
