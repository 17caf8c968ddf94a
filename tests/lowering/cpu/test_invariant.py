"""What the text of CPU kernels computes once: equal expressions, and what is the same in all turns of a loop."""

import re

import pytest

from jtile.lowering.cpu.llvm import Code, Module, Val, i64

X, Y, N, C = Val("ptr noalias", "%x"), Val("ptr noalias", "%y"), Val("i64", "%n"), Val("i1", "%c")


def pointer(ptr: Val) -> Val:
    return Val("ptr", ptr.name)


def function() -> Code:
    return Code(Module("x86_64"), "f", [X, Y, N, C])


def before_and_in_loop(code: Code) -> tuple[str, str]:
    before, _, inside = code.finish().partition("\nbody")
    return before, inside


def test_equal_expressions_are_written_once():
    code = function()
    assert code.add(N, 3) == code.add(N, 3)
    with code.when(C):
        inner = code.mul(N, 5)
        assert code.add(N, 3) == code.add(N, 3)
    assert code.mul(N, 5) != inner  # what a branch computed is not there behind it


def test_constants_of_addresses_come_last():
    code = function()
    code.load("float", code.gep("float", pointer(X), code.mul(code.add(N, 2), 3)))
    code.load("float", code.gep("float", pointer(X), code.add(code.mul(N, 3), 9)))
    text = code.finish()
    assert len(re.findall(r"getelementptr float, ptr %x, i64 %", text)) == 1
    assert {"i64 6", "i64 9"} <= {line.rpartition(", ")[2] for line in text.splitlines() if "getelementptr" in line}


@pytest.mark.parametrize(("written", "moves"), [(X, False), (Y, True)], ids=["same", "other"])
def test_a_load_moves_out_of_a_loop_that_does_not_write_its_memory(written, moves):
    code = function()
    with code.loop(0, 8) as i:
        x = code.load("float", pointer(X), align=4)
        code.store(x, code.gep("float", pointer(written), i), align=4)
    before, inside = before_and_in_loop(code)
    assert ("load float" in before, "load float" in inside) == (moves, not moves)


def test_what_may_not_run_does_not_move():
    code = function()
    with code.loop(0, N):  # perhaps no turn
        code.store(code.load("float", pointer(X), align=4), pointer(Y), align=4)
    with code.loop(0, 8) as i:
        code.store(code.binary("sdiv", N, N), code.gep("i64", pointer(Y), i))
        with code.when(C):
            code.store(code.load("i32", pointer(X)), code.gep("i32", pointer(Y), i))
    before, inside = before_and_in_loop(code)
    assert not re.search("load float|load i32|sdiv", before)
    assert "sdiv" in inside.partition("\nbody")[2] and "load i32" in inside.partition("\nthen")[2]


@pytest.mark.parametrize("between", ["store", "atomic", "call"])
def test_memory_is_read_again_behind_a_write(between):
    code = function()
    first = code.load("i64", pointer(X))
    assert code.load("i64", pointer(X)) == first
    if between == "store":
        code.store(i64(1), code.gep("i64", pointer(X), N))
    elif between == "atomic":
        code.let("i64", f"atomicrmw add {pointer(Y)}, i64 1 acq_rel")
    else:
        code.do(f"call void @g({pointer(Y)})")
    assert code.load("i64", pointer(X)) != first


def test_marks_of_lines_change_nothing():
    texts = []
    for mark in ("", " ; @3"):
        code = function()
        code.mark = mark
        with code.loop(0, 8) as i:
            code.store(code.binary("sdiv", N, i64(3)), code.gep("i64", pointer(Y), i))
        texts.append(code.finish().replace(" ; @3", ""))
    assert texts[0] == texts[1] and "sdiv" in texts[0].partition("\nbody")[0]


def test_elements_of_a_variable_are_read_again_behind_a_write():
    code = function()
    table = code.var("i64", count=4)
    at = code.gep("i64", table, N)
    first = code.load("i64", at)
    code.store(i64(1), code.gep("i64", table, 0))
    assert code.load("i64", at) != first
    with code.loop(0, 8) as i:
        code.store(code.load("i64", at), pointer(Y))
        code.store(i, table)
    assert "load i64, ptr " + at.name in code.finish().partition("\nbody")[2]


def test_nested_loops_hand_on_what_moves():
    code = function()
    with code.loop(0, 8), code.loop(0, 8) as j:
        code.store(code.binary("mul", N, N), code.gep("i64", pointer(Y), j))
    before, inside = before_and_in_loop(code)
    assert "mul i64 %n, %n" in before and "mul i64 %n, %n" not in inside
