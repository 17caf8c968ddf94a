"""The comparison of compile times: which sides are equal programs, whose time counts, and what is the least."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import compile as times


def test_programs_left_to_xla_are_equal():
    _, same = times._equal(["Adam", "softmax"])
    assert same == ["Adam"]


def test_the_least_of_each_side_counts():
    turns = [
        {"ours": [(1.0, 2.0, 3.0, 9.0), (2.0, 2.0, 4.0, 4.0)], "xla": [(1.0, 1.0, 1.0, 1.0)] * 2},
        {"ours": [(1.0, 3.0, 5.0, 5.0), (1.0, 1.0, 9.0, 9.0)], "xla": [(2.0, 2.0, 2.0, 2.0)] * 2},
    ]
    row = times._row("chain", turns, [])
    assert row["ours"] == {"trace": 2, "compile": 3, "clock to trace": 9, "clock to compile": 9}
    assert (row["ratio"], row["clock ratio"]) == (1.25, 4.5)
    assert "ratio 1.25 (clock 4.50)" in times._line(row)
    equal = times._row("chain", turns, ["chain"])
    assert (equal["ratio"], equal["clock ratio"]) == (1, 1)
    assert times._line(equal).endswith("ours is the program of xla")


def test_children_count():
    begun = times._used()
    subprocess.run([sys.executable, "-c", "sum(range(5_000_000))"], check=True)
    assert times._used() - begun > 0.02


@pytest.mark.parametrize("side", ["ours", "xla"])
def test_one_side_alone_is_timed_at_two_sizes(side, monkeypatch):
    seen = []
    monkeypatch.setattr(times, "_seconds", lambda f, args: (seen.append(args[0].shape), (1.0,) * 4)[1])
    assert times._turn(side, ["chain"]) == {"chain": [(1.0,) * 4] * 2}
    assert seen == [(1 << 18,), (1 << 19,), (1 << 20,)] or len(set(seen)) == 3
