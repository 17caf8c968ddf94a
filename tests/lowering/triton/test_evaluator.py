"""The evaluator of TTIR refuses what would not compile, and what no GPU code may do."""

from __future__ import annotations

import numpy as np
import pytest
from ttir import TtirError
from ttir.check import check
from ttir.machine import Machine
from ttir.memory import Memory
from ttir.parse import parse

N = 8
START = f"""
    %r = tt.make_range {{end = {N} : i32, start = 0 : i32}} : tensor<{N}xi32>
    %p = tt.splat %x : !tt.ptr<i32> -> tensor<{N}x!tt.ptr<i32>>
    %px = tt.addptr %p, %r : tensor<{N}x!tt.ptr<i32>>, tensor<{N}xi32>
    %q = tt.splat %o : !tt.ptr<i32> -> tensor<{N}x!tt.ptr<i32>>
    %po = tt.addptr %q, %r : tensor<{N}x!tt.ptr<i32>>, tensor<{N}xi32>
    %three = arith.constant dense<3> : tensor<{N}xi32>
    %low = arith.cmpi slt, %r, %three : tensor<{N}xi32>"""
LOAD = f"    %v = tt.load %px : tensor<{N}x!tt.ptr<i32>>"
STORE = f"    tt.store %po, %v : tensor<{N}x!tt.ptr<i32>>"
GARBAGE = int.from_bytes(b"\xaa" * 4, "little", signed=True)


def run(*lines: str, x: np.ndarray | None = None, out: int = N, grid: int = 1) -> np.ndarray:
    """`o` after these lines, of int32 zeros, with the pointers %px and %po; `x` is 0, 1, 2 .. by default."""
    x = np.arange(N, dtype=np.int32) if x is None else x
    o = np.zeros(out, np.int32)
    body = "\n".join([START, *lines, "    tt.return"])
    text = f"module {{\n  tt.func public @k(%x: !tt.ptr<i32>, %o: !tt.ptr<i32>) {{{body}\n  }}\n}}\n"
    functions = parse(text)
    check(functions)
    memory = Memory([x, o])
    Machine(functions, memory, grid, [], 0).launch(functions["k"], [memory.base(0), memory.base(1)])
    memory.finish()
    return o


def op(right: str) -> list[int]:
    """What an op of %w = 0, 1, 2 .. gives."""
    return run(LOAD.replace("%v", "%w"), f"    %v = {right}", STORE).tolist()


T, B = f"tensor<{N}xi32>", f"tensor<{N}xi1>"


def test_values():
    assert op(f"arith.addi %w, %three : {T}") == [3, 4, 5, 6, 7, 8, 9, 10]
    assert op(f"arith.divsi %three, %w : {T}") == [GARBAGE, 3, 1, 1, 0, 0, 0, 0]
    assert op(f"tt.gather %w[%three] {{axis = 0 : i32}} : ({T}, {T}) -> {T}") == [3] * N
    assert op(f"arith.select %low, %w, %three : {B}, {T}") == [0, 1, 2, 3, 3, 3, 3, 3]
    shifts = run(
        "    %k = arith.constant dense<30> : tensor<8xi32>", f"    %s = arith.addi %r, %k : {T}",
        f"    %v = arith.shli %three, %s : {T}", STORE,
    )  # fmt: skip
    assert shifts.tolist() == [-1 << 30, -1 << 31, *[GARBAGE] * 6]


def test_masked_lanes_of_a_load_are_garbage():
    got = run(f"    %v = tt.load %px, %low : tensor<{N}x!tt.ptr<i32>>", STORE)
    assert got.tolist() == [0, 1, 2, *[GARBAGE] * 5]


def test_loops_and_reductions():
    got = run(
        "    %lo = arith.constant 0 : i32", "    %hi = arith.constant 5 : i32", "    %st = arith.constant 2 : i32",
        f"    %v = scf.for %i = %lo to %hi step %st iter_args(%acc = %r) -> ({T}) : i32 {{",
        f"      %s = tt.splat %i : i32 -> {T}", f"      %n = arith.addi %acc, %s : {T}", f"      scf.yield %n : {T}",
        "    }", '    %sum = "tt.reduce"(%v) <{axis = 0 : i32}> ({', "    ^bb0(%a: i32, %b: i32):",
        "      %c = arith.addi %a, %b : i32", "      tt.reduce.return %c : i32", f"    }}) : ({T}) -> i32",
        f"    %all = tt.splat %sum : i32 -> {T}", STORE.replace("%v", "%all"),
    )  # fmt: skip
    assert got.tolist() == [28 + N * 6] * N


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"%v = arith.addf %r, %three : {T}", "addf of tensor"),
        ("%v = arith.addi %r, %three : tensor<8xi64>", "spelled tensor<8xi64>"),
        (f"%v = arith.addi %r, %nobody : {T}", "%nobody is not defined"),
        (f"%v = tt.reshape %r : {T} -> tensor<2x2xi32>", "tt.reshape from"),
        (f"%v = tt.splat %x : !tt.ptr<i32> -> {T}", "tt.splat from"),
        ("%v = arith.constant dense<0> : tensor<6xi32>", "powers of two"),
        (f"%v = tt.frobnicate %r : {T}", "no op tt.frobnicate"),
        (f"%v = tt.load %px, %r : tensor<{N}x!tt.ptr<i32>>", "the mask of a load"),
        (f"tt.store %po, %low : tensor<{N}x!tt.ptr<i32>>", "a store of"),
        (f"%v = arith.extsi %r : {T} to tensor<{N}xi16>", "the wrong way"),
        (f"%r = arith.addi %three, %three : {T}", "defined twice"),
        ("%v = arith.constant 0x3F80 : f32", "8 digits"),
    ],
)
def test_text_that_would_not_compile(line, message):
    with pytest.raises((TtirError, ValueError), match=message):
        run(f"    {line}")


def test_accesses_out_of_bounds():
    with pytest.raises(TtirError, match="store out of bounds: active lane 6 touches bytes 24"):
        run(LOAD, STORE, out=6)
    masked = STORE.replace("%v :", "%v, %low :")
    assert run(LOAD, masked, out=3).tolist() == [0, 1, 2]


def test_missing_barriers():
    again = ["    gpu.barrier", f"    %w = tt.load %po : tensor<{N}x!tt.ptr<i32>>"]
    run(LOAD, STORE, *again)
    with pytest.raises(TtirError, match=r"read by lane 0 here, and was written .* without a barrier"):
        run(LOAD, STORE, again[1])
    with pytest.raises(TtirError, match="was written by another lane or op"):
        run(LOAD, STORE, STORE)


def test_loads_that_a_pipeliner_would_move():
    def lines(last: str) -> list[str]:
        return [
            "    %lo = arith.constant 0 : i32", "    %hi = arith.constant 3 : i32", "    %st = arith.constant 1 : i32",
            "    scf.for %i = %lo to %hi step %st : i32 {", f"      %v = tt.load %po : tensor<{N}x!tt.ptr<i32>>",
            f"      %n = arith.addi %v, %three : {T}", "      gpu.barrier",
            f"      tt.store %po, %n : tensor<{N}x!tt.ptr<i32>>", "      gpu.barrier", last,
        ]  # fmt: skip

    assert run(*lines("    } {tt.num_stages = 1 : i32}")).tolist() == [9] * N
    with pytest.raises(TtirError, match="a pipelined loop loads before"):
        run(*lines("    }"))
