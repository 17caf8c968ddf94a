"""`kernel.debug`: the interpreter, held: names, steps, breakpoints, watched Refs, and what failed."""

import io
from pathlib import Path

import block_language
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.debug.expressions import evaluate
from jtile.debug.prompt import Prompt
from jtile.errors import KernelValueError
from jtile.tools.cli import main

A = np.arange(128, dtype=np.float32).reshape(8, 16)
B = np.ones((16, 8), np.float32)
SOURCE = Path(block_language.__file__).read_text().splitlines()


@jt.kernel(out_type=jt.like(A, shape=(8, 8)), grid=(2, 2))
def product(a, b, o, *, bk=4):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jt.zeros((4, 4), jnp.float32)
    for k in jt.range(16 // bk):
        x = a.tiles(4, bk)[i, k]
        new = jt.dot(x, b.tiles(bk, 4)[k, j], acc)
        if k > 1:
            new = new + 1.0
        acc = new
    o.tiles(4, 4)[i, j] = acc


FIRST = product.__wrapped__.__code__.co_firstlineno + 2  # the line of its first statement


@pytest.fixture
def held():
    with product.debug(A, B) as d:
        yield d


def partial(i, j, rounds):
    """What `acc` is after so many rounds of program (i, j)."""
    rows, columns = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
    return A[rows, : 4 * rounds] @ B[: 4 * rounds, columns] + max(rounds - 2, 0)


def test_names_have_the_values_of_the_source_at_each_line(held):
    held.program(1, 1)
    assert (held.line, held.names) == (FIRST, ("a", "b", "o"))
    held.next()
    assert (held["i"], held["j"], held["bk"], held.program_id) == (1, 1, 4, (1, 1))
    held.break_at(FIRST + 5)
    for rounds in range(4):
        held.cont()
        assert (held.line, held["k"], held.rounds) == (FIRST + 5, rounds, (rounds,))
        np.testing.assert_array_equal(held["acc"], partial(1, 1, rounds))  # it is old until the end of the round
        plain = partial(1, 1, rounds + 1) - (rounds > 1)
        np.testing.assert_array_equal(held["new"], plain)
    held.next()
    np.testing.assert_array_equal(held["new"], plain)
    while held.line != FIRST + 8:
        held.next()
    np.testing.assert_array_equal(held["acc"], partial(1, 1, 4))
    assert "x" not in held.names  # it belongs to the loop


def test_a_run_ends_with_what_the_interpreter_gives(held):
    with pytest.raises(KernelValueError, match=r"has not ended: go on with cont\(\)"):
        held.result
    assert held.cont() == "the kernel has ended"
    assert (held.state, held.error, held.access) == ("done", None, None)
    np.testing.assert_array_equal(held.result, product.interpret(A, B))
    assert held.step() == "the kernel has ended"


def test_steps_rounds_and_programs(held):
    first, seen = held.program_id, []
    assert [held.next() for _ in range(3)] == ["line"] * 3
    assert held.round() == "round" and held.rounds == (1,)
    while held.round() == "round":
        pass
    assert held.line == FIRST + 8 and held.reason == "behind the loop"
    with pytest.raises(KernelValueError, match="no loop is around line"):
        held.round()
    assert held.next() == "another program"
    while held.state == "stopped":
        seen.append(held.program_id)
        held.program()
    assert sorted([first, *seen]) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_breakpoints_hold_in_one_program_and_under_a_condition(held):
    number = held.break_at(FIRST + 4, program=(1, 0), when="k == 2 and acc[0, 0] > 0")
    assert held.cont() == f"breakpoint {number}"
    assert (held.program_id, held["k"], held.breakpoints[number].hits) == ((1, 0), 2, 1)
    held.delete(number)
    number = held.break_at(when=lambda names: "acc" in names and names["acc"].max() > 1900)
    assert held.cont() in (f"breakpoint {number}", "the kernel has ended")
    with pytest.raises(KernelValueError, match="there is no breakpoint 9"):
        held.delete(9)


def test_a_condition_that_fails_stops_the_run_and_says_so(held):
    held.break_at(FIRST + 4, when="acc[99] > 0")
    assert held.cont().startswith("the condition of breakpoint 1 fails: the expression 'acc[99] > 0' fails: IndexError")


def test_a_watched_ref_stops_before_it_changes(held):
    held.watch("o", (slice(4, 8), 7))
    held.watch("a", 0, kinds="read", program=(0, 1), when="k == 1")
    reasons = {}
    while held.cont() and held.state == "stopped":
        reasons.setdefault(held.reason, held.program_id)
        if held.reason.startswith("watch 1"):
            assert np.isnan(held["o"][4:, 4:]).all()
    assert reasons == {"watch 1: it writes o[4, 7] and 3 more": (1, 1), "watch 2: it reads a[0, 4] and 3 more": (0, 1)}
    assert not np.isnan(held["o"]).any()


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda d: d.break_at(), "a breakpoint has a line, a program or a condition"),
        (lambda d: d.break_at(0), "an int of at least 1"),
        (lambda d: d.break_at(when="x >"), "cannot read the expression 'x >'"),
        (lambda d: d.break_at(when="[y for y in x]"), "has a ListComp: the debugger computes with arrays only"),
        (lambda d: d.watch("p"), "has no Ref 'p': it has a, b, o"),
        (lambda d: d.watch("o", 8), "has no part 8"),
        (lambda d: d.watch("o", kinds="load"), "of the kinds read, write, atomic"),
        (lambda d: d.program(2, 0), r"has no program \(2, 0\): its grid is \(2, 2\)"),
        (lambda d: d["acc"], "'acc' has no value here; these have: a, b, o, pid, bk"),
    ],
)
def test_what_cannot_be_asked(held, do, said):
    with pytest.raises(KernelValueError, match=said):
        do(held)


def test_a_closed_run_is_over():
    d = product.debug(A, B)
    d.close()
    assert not d._session._thread.is_alive()
    with pytest.raises(KernelValueError, match="was ended"):
        d.step()


def test_a_debugger_that_is_forgotten_ends_its_thread():
    thread = product.debug(A, B)._session._thread
    thread.join(600)
    assert not thread.is_alive()


@jt.kernel(out_type=jt.like(A, shape=(8,)), grid=3)
def overlapping(x, o):
    i = jt.program_id(0)
    n = jnp.int32(0)
    while n < 2:
        n = n + 1
    o[jt.ds(2 * i, 4)] = x[jt.ds(2 * i, 4)]


def test_a_race_ends_the_run_at_its_access():
    with overlapping.debug(A[0, :8]) as d:
        assert d.cont() == "RaceError"
        assert (d.state, d["n"]) == ("failed", 2)
        assert "X where they race" in str(d.access) and d.access.other.startswith("program")
        with pytest.raises(jt.errors.RaceError):
            d.result
        assert "<svg" in d._repr_html_()


def test_rounds_of_a_while_loop():
    with overlapping.debug(A[0, :8]) as d:
        d.break_at(d.line + 3)
        assert [(d.cont(), d.rounds, int(d["n"]))[1:] for _ in range(2)] == [((0,), 0), ((1,), 1)]


def test_roles_stop_by_themselves():
    x, y = np.ones((64, 32), np.float16), np.ones((32, 64), np.float16)
    with block_language.gemm.debug(x, y, seed=3) as d:
        for text in ("jt.dot_async(", "full.at(k).expect("):  # of the consumer, of the producer
            d.break_at(next(n for n, line in enumerate(SOURCE, 1) if text in line), file="block_language.py")
        who = {d.where().splitlines()[0].rpartition(", role ")[2].split(",")[0] for _ in range(3) if d.cont()}
        assert who == {"consumer", "producer"}
        d.delete(1), d.delete(2)
        d.cont()
        np.testing.assert_array_equal(d.result, np.full((64, 64), 32, np.float32))


@jt.kernel(out_type=lambda x, **_: jt.like(x), scratch=lambda x, **_: [jt.symmetric(x.shape, x.dtype), jt.signals()])
def shift(x, o, box, came, *, axis):
    right = (jt.axis_index(axis) + 1) % jt.axis_size(axis)
    box.on(axis, right)[...] = x[...]
    jt.signal(came.on(axis, right))
    jt.wait(came)
    o[...] = box[...]
    jt.axis_barrier(axis)


def test_programs_of_several_devices():
    parts = np.arange(4, dtype=np.float32).reshape(2, 2)
    with shift.debug(parts, mesh={"x": 2}, axis="x") as d:
        d.next()
        assert "device (x=" in d.where() and d["right"] in (0, 1)
        d.cont()
        np.testing.assert_array_equal(d.result, parts[::-1])


def test_the_prompt(held):
    commands = f"""program 1, 0\nn\nb {FIRST + 3} program 1, 0 if k == 1\nc\np acc.max()\nnames\nw\nl\nfoo\np y\ns 2
        r\nwatch o[4, :2] write if k >= 0\nb\ndelete 1\ndelete 2\npicture\nhelp watch\nc\nc\nc\n"""
    out = io.StringIO()
    Prompt(held, io.StringIO(commands), out).run([f"b {FIRST + 4}"])
    said = out.getvalue()
    for text in (
        f"1: breakpoint at line {FIRST + 4}",
        f"2: breakpoint at line {FIRST + 3} in program (1, 0) if k == 1",
        "breakpoint 2", "round 1 of 4", "> x = a.tiles(4, bk)[i, k]", "acc: float32[4, 4]", "k: int32[] 1",
        "there is no command 'foo'", "3: watch o (write) if k >= 0", "'y' has no value here", "no access has failed",
        "[if CONDITION]", "the kernel has ended", f"{partial(1, 0, 1).max():g}",
    ):  # fmt: skip
        assert text in said, said
    assert "Traceback" not in said and held._session._thread is not None


def test_expressions_compute_and_do_nothing_else():
    names = {"x": np.arange(6.0).reshape(2, 3), "k": np.int32(2)}
    value = lambda text: evaluate(text, names.__getitem__)
    assert value("x[1, ::2].sum() - 2 * k") == 4
    assert value("(x > 1).any() and not isnan(x).any()")
    assert value("0 < k < 3") and not value("0 < k < 2")
    assert value("max(x, axis=0)[1] // 2 + len(x)") == 4
    assert value("x.T.shape") == (3, 2)
    for bad in ("__import__('os')", "x.tofile('a')", "open('a')", "lambda: 1", "x @ x", "x.sum(out=x)", "(y := 1)"):
        with pytest.raises(KernelValueError):
            value(bad)


def test_the_command_line(tmp_path, capsys):
    def run(*args):
        with pytest.raises(SystemExit) as stop:
            main(["debug", *args])
        said = capsys.readouterr().out
        return stop.value.code if stop.value.code else said

    np.savez(tmp_path / "arguments.npz", a=A, b=B)
    said = run(
        f"{__file__}:product", "--data", str(tmp_path / "arguments.npz"), "-c", "c", "-c", "p o[7, 7]", "-c", "q"
    )
    assert said.splitlines()[-2:] == ["the kernel has ended", f"{partial(1, 1, 4)[3, 3]:g}."]
    said = run("jtile.ops:softmax", "--args", "f32[2,8]", "-c", "next", "-c", "names", "-c", "quit")
    assert "kernel softmax_rows" in said and "x: float32[2, 8]" in said
    assert "say what the arguments are" in run("jtile.ops:softmax")
    assert "there is no file" in run("jtile.ops:softmax", "--data", "no.npz")
    (tmp_path / "text.npz").write_text("no arrays")
    assert "is no .npz file of arrays" in run("jtile.ops:softmax", "--data", str(tmp_path / "text.npz"))
    assert "calls no kernel 'sum'" in run("jtile.ops:softmax", "--args", "f32[2,8]", "--kernel", "sum")
