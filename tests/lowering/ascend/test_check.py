"""The checker of HIVM: texts that AscendNPU-IR 1.2.0 made of kernels of ours pass, and none that is damaged does."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from jtile import errors
from jtile.lowering.ascend import check

DATA = Path(__file__).resolve().parents[2] / "data" / "hivm"
GRIDS = {"add": (10, 1, 1), "matmul": (16, 1, 1), "gemm_gelu": (16, 1, 1), "cumsum": (8, 1, 1)}


@functools.cache
def lines(name: str) -> tuple[str, ...]:
    """The text of a kernel: `add` has tiles that hang over, `matmul` buffers in turns, `gemm_gelu` both kinds of
    cores, `cumsum` loads and stores of single numbers."""
    return tuple((DATA / f"{name}.mlir").read_text().splitlines())


def found(name: str, text: tuple[str, ...] | list[str]) -> tuple[Exception, ...]:
    return check.check("\n".join(text), grid=GRIDS[name]).errors


def without(text: tuple[str, ...], part: str, turn: int = 0) -> tuple[str, ...]:
    """The text without the line, the `turn`th of those that have this part."""
    where = [k for k, line in enumerate(text) if part in line][turn]
    return (*text[:where], *text[where + 1 :])


def changed(text: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    assert any(old in line for line in text), old
    return tuple(line.replace(old, new) for line in text)


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("add", {"UB": 8192}),
        ("matmul", {"L1": 16384, "L0C": 16384}),
        ("gemm_gelu", {"L1": 16384, "L0C": 16384, "UB": 24960}),
        ("cumsum", {"UB": 16384}),
    ],
)
def test_what_the_compiler_made_passes(name, used):
    report = check.verify("\n".join(lines(name)), grid=GRIDS[name])
    assert report.used == used
    assert all(f.startswith("jtile_") for f in report.functions)


@pytest.mark.parametrize("name", ["add", "cumsum"])
def test_no_flag_can_be_taken_away(name):
    """Without a set the wait never ends; without a wait the set is left over; without both, two pipes race."""
    text = lines(name)
    flags = [k for k, line in enumerate(text) if "set_flag" in line]
    assert len(flags) >= 2
    for k in flags:
        wait = next(
            j for j in range(k, len(text)) if text[j].strip() == text[k].strip().replace("set_flag", "wait_flag")
        )
        assert errors.DeadlockError in map(type, found(name, text[:k] + text[k + 1 :]))
        assert errors.ProtocolError in map(type, found(name, text[:wait] + text[wait + 1 :]))
        both = text[:k] + text[k + 1 : wait] + text[wait + 1 :]
        assert errors.SharedRaceError in map(type, found(name, both))
        assert errors.ProtocolError in map(type, found(name, (*text[: k + 1], *text[k:])))


M_FIX = "[<PIPE_M>, <PIPE_FIX>, <EVENT_ID0>]"


@pytest.mark.parametrize(
    ("name", "damage", "error", "says"),
    [
        ("matmul", lambda t: without(without(t, "set_flag" + M_FIX), "wait_flag" + M_FIX), errors.SharedRaceError,
         "reads bytes 0 to 16384 of L0C on PIPE_FIX, which line"),
        ("matmul", lambda t: without(t, "wait_flag[<PIPE_MTE1>, <PIPE_MTE2>, %"), errors.ProtocolError, "a second set"),
        ("matmul", lambda t: without(t, "set_flag[<PIPE_MTE2>, <PIPE_MTE1>"), errors.DeadlockError, "mma_tile"),
        ("matmul", lambda t: changed(t, "constant 12288", "constant 8192"), errors.SharedRaceError,
         "of L1 on PIPE_MTE2"),
        ("gemm_gelu", lambda t: without(t, "pipe_barrier[<PIPE_V>]", -1), errors.SharedRaceError, "a pipe_barrier of"),
        ("gemm_gelu", lambda t: without(t, "sync_block_set"), errors.DeadlockError, "vector core 1"),
        ("gemm_gelu", lambda t: without(without(t, "sync_block_set"), "sync_block_wait"), errors.SharedRaceError,
         "of global memory on PIPE_MTE2 of vector core"),
        ("add", lambda t: changed(t, "constant 4096 :", "constant 2048 :"), errors.VerificationError,
         "two buffers that live at the same time overlap"),
        ("add", lambda t: changed(t, "constant 4096 :", "constant 4100 :"), errors.VerificationError,
         "the buffer of 4096 bytes at byte 4100 of UB does not begin at a multiple of 32 bytes"),
        ("add", lambda t: changed(t, "(%c4096_i64) : memref<1024x", "(%c4096_i64) : memref<65536x"),
         errors.VerificationError, "ends behind its 196608 bytes: take smaller tiles"),
    ],
)  # fmt: skip
def test_damage_is_found(name, damage, error, says):
    got = found(name, damage(lines(name)))
    assert any(type(e) is error and says in str(e) for e in got), [str(e) for e in got]
    assert all("line " in str(e) for e in got)


def test_a_vector_core_that_only_repeats_the_work_of_the_other():
    """Where the compiler lets the first one alone store, what the second one reads of arrays is used by nobody."""
    text = without(without(lines("gemm_gelu"), "sync_block_set"), "sync_block_wait")
    assert sum("of vector core 1" in str(e) for e in found("gemm_gelu", text)) > 0
    last = max(k for k, line in enumerate(text) if line.strip() == "return")
    mark = ("    scf.if %never {", "    } {limit_sub_block_id0}")
    shadowed = (*text[:last], "    %never = arith.constant false", *mark, *text[last:])
    assert not any("reads" in str(e) and "of vector core 1," in str(e) for e in found("gemm_gelu", shadowed))


def test_the_base_of_a_view():
    lines_of = """
    %base, %at, %sizes:1, %strides:1 = memref.extract_strided_metadata %t : memref<64xf32, #ub> -> memref<f32, #ub>, index, index, index
    %u = memref.reinterpret_cast %base to offset: [%at], sizes: [%sizes], strides: [%strides] : memref<f32, #ub> to memref<64xf32, #ub>
    hivm.hir.vexp ins(%u : memref<64xf32, #ub>) outs(%u : memref<64xf32, #ub>)
    %data"""  # noqa: E501
    got = check.check(small().replace("\n    %data", lines_of)).errors
    assert got and all("a pipe_barrier of PIPE_V between them is missing" in str(e) for e in got)


def test_capacities_of_another_target():
    text = "\n".join(lines("gemm_gelu"))
    with pytest.raises(errors.VerificationError, match="L0C ends behind its 8192 bytes"):
        check.verify(text, capacities={"L0C": 8192, "L1": 1 << 19}, grid=GRIDS["gemm_gelu"])


# Ops before they become calls of the library; a branch and a loop that depend on data; an argument used twice.
SMALL = """
#ub = #hivm.address_space<ub>
#map = affine_map<(d0)[s0] -> ((d0 - 7) ceildiv 2 + s0 mod 7, 64)>
module {{
  func.func @k(%x: memref<?xf32, #hivm.address_space<gm>>, %y: memref<?xf32, #hivm.address_space<gm>>, %n: i32) attributes {{hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>}} {{
    %c0_i64 = arith.constant 0 : i64
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c7 = arith.constant 7 : index
    %zero = arith.constant 0 : i32
    %m = affine.min #map(%c7)[%c7]
    %t = hivm.hir.pointer_cast(%c0_i64) : memref<64xf32, #ub>
    %gx = memref.reinterpret_cast %x to offset: [%c0], sizes: [64], strides: [1] : memref<?xf32, #hivm.address_space<gm>> to memref<64xf32, strided<[1]>, #hivm.address_space<gm>>
    %gy = memref.subview %y[%m] [64] [1] : memref<?xf32, #hivm.address_space<gm>> to memref<64xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
    hivm.hir.load ins(%gx : memref<64xf32, strided<[1]>, #hivm.address_space<gm>>) outs(%t : memref<64xf32, #ub>)
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.vexp ins(%t : memref<64xf32, #ub>) outs(%t : memref<64xf32, #ub>)
    %data = memref.load %x[%c0] : memref<?xf32, #hivm.address_space<gm>>
    %many = arith.cmpi sgt, %n, %zero : i32
    scf.if %many {{
      {then}
    }} else {{
      hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID1>]
    }}
    {wait}
    %last = scf.while (%k = %c0) : (index) -> index {{
      %more = arith.cmpi slt, %k, %c7 : index
      scf.condition(%more) %k : index
    }} do {{
    ^bb0(%k: index):
      hivm.hir.store ins(%t : memref<64xf32, #ub>) outs(%gy : memref<64xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>)
      hivm.hir.pipe_barrier[<PIPE_MTE3>]
      %next = arith.addi %k, %c1 : index
      scf.yield %next : index
    }}
    return
  }}
}}
"""  # noqa: E501
FLAG = "hivm.hir.{}_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID1>]"


def small(then: str = FLAG.format("set"), wait: str = FLAG.format("wait")) -> str:
    return SMALL.format(then=then, wait=wait)


def test_both_ways_of_a_branch_on_data():
    assert check.verify(small()).used == {"UB": 256}
    with pytest.raises(errors.DeadlockError, match=r"line 26: hivm\.hir\.wait_flag.*on PIPE_MTE3"):
        check.verify(small(then=""))
    left = check.check(small(wait="")).errors
    assert {type(e) for e in left} == {errors.ProtocolError, errors.SharedRaceError}
    assert any("nobody waits for" in str(e) for e in left)


ROUNDS = """%c256_i64 = arith.constant 256 : i64
      %other = hivm.hir.pointer_cast(%c256_i64) : memref<64xf32, #ub>
      %one = arith.constant 1 : i32
      scf.for %r = %zero to %n step %one : i32 {{
        %left = arith.subi %n, %r : i32
        %even = arith.cmpi eq, {by}, %n : i32
        %u = arith.select %even, %t, %other : memref<64xf32, #ub>
        hivm.hir.pipe_barrier[<PIPE_V>]
        hivm.hir.vexp ins(%u : memref<64xf32, #ub>) outs(%u : memref<64xf32, #ub>)
      }}
      """ + FLAG.format("set")


def test_buffers_of_rounds_whose_number_depends_on_data():
    """What the checker takes for it is the same in and around the loop; buffers that data choose are not followed."""
    assert check.verify(small(then=ROUNDS.format(by="%left"))).used == {"UB": 512}
    with pytest.raises(errors.UnsupportedError, match=r"cannot tell which buffer .* chooses: that depends on data"):
        check.verify(small(then="%was = memref.load %x[%c0] : memref<?xi32>\n      " + ROUNDS.format(by="%was")))


def test_stores_to_one_place_want_a_barrier():
    with pytest.raises(errors.SharedRaceError, match="a pipe_barrier of PIPE_MTE3 between them is missing"):
        check.verify(small().replace("hivm.hir.pipe_barrier[<PIPE_MTE3>]", ""))


def test_arguments_that_share_a_buffer():
    assert not check.check(small()).errors
    shared = check.check(small(), aliases={1: 0}).errors  # x is loaded by the scalar pipe, and y written, with no flag
    assert [type(e) for e in shared] == [errors.SharedRaceError]
    assert "PIPE_S" in str(shared[0])


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (lambda: small().replace("hivm.hir.vexp", "hivm.hir.newest").replace("outs(%t : memref<64xf32, #ub>)\n    %d",
                                                                            "\n    %d"),
         errors.UnsupportedError, "does not know the op of line 18"),
        (lambda: "\n".join(changed(lines("add"), "@vadd_1d_float", "@newest_1d")), errors.UnsupportedError,
         "'newest_1d'"),
        (lambda: "hello", errors.ParseError, "cannot read 'hello'"),
        (lambda: "module {\n}", errors.ParseError, "it has no function"),
        (lambda: small()[:400], errors.ParseError, "line 5|not closed"),
    ],
)  # fmt: skip
def test_what_the_checker_does_not_know(text, error, says):
    with pytest.raises(error, match=says):
        check.check(text())


def test_long_loops_keep_their_begin_their_end_and_their_turns():
    from jtile.lowering.ascend.check.run import rounds

    for count in (0, 1, 29, 30, 31, 1000, 1001, 1002):
        got = list(rounds(3, 3 + 2 * count, 2))
        assert len(got) <= 35
        assert got[:6] == [3 + 2 * k for k in range(min(count, 6))]
        assert not got or got[-1] == 3 + 2 * (count - 1)
        assert all((b - a) // 2 % 12 == 1 for a, b in itertools.pairwise(got))
