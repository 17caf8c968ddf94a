"""Faults of block-level kernels: each is put into a right kernel and found within a few seeds, with its place."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from block_kernels import attention, block, gemm

from jtile._errors import (
    DeadlockError,
    InterpreterError,
    OutOfBoundsError,
    ProtocolError,
    SharedRaceError,
    UninitializedReadError,
)
from jtile.interpret import interpret
from jtile.ir import parse_kernel

SEEDS = range(4)
GEMM = gemm(m=32, n=16, k=40, bm=16, bn=8, bk=8, slots=3, blocks=1)
ATTENTION = attention(128, 64, 16, heads=1, bn=16)
RACES = (SharedRaceError, UninitializedReadError)


@dataclasses.dataclass(frozen=True)
class Fault:
    """`old` of the text becomes `new`, once or everywhere; one of `kinds` says so, and its message has `words`."""

    name: str
    old: str
    new: str
    kinds: type | tuple[type, ...]
    words: str = ""
    count: int = -1


GEMM_FAULTS = [
    Fault("producer does not wait for room", "wait %empty[%s], %before", "", (SharedRaceError, ProtocolError)),
    Fault("consumer does not wait for data", "wait %full[%s], %odd\n", "\n", RACES),
    Fault("one consumer does not wait for data", "wait %full[%s], %odd\n", "\n", RACES, count=1),
    Fault("no slot is given back", "arrive %empty[%done] when=%later", "", DeadlockError, "producer waits"),
    Fault("one consumer gives no slot back", "arrive %empty[%done] when=%later", "", DeadlockError, "1 of 2", count=1),
    Fault("the last slot is not given back", "arrive %empty[%s_1]", "", DeadlockError, "empty"),
    Fault("producer waits for the wrong parity", "wait %empty[%s], %before", "wait %empty[%s], %odd", DeadlockError),
    Fault("consumer waits for the wrong parity", "%odd = and %turn, %c1 : i32\n          wait",
          "%even = and %turn, %c1 : i32\n          %odd = xor %even, %c1 : i32\n          wait", RACES),
    Fault("too many bytes", "bytes=384", "bytes=386", DeadlockError, "and 2 bytes"),
    Fault("too few bytes", "bytes=384", "bytes=382", (ProtocolError, *RACES)),
    Fault("bytes of one operand", "bytes=384", "bytes=128", (ProtocolError, *RACES)),
    Fault("bytes nobody announces", "expect %full[%s] bytes=384", "arrive %full[%s]", (ProtocolError, *RACES)),
    Fault("more slots than the ring has", "full 3 : i32", "full 4 : i32", OutOfBoundsError, r"\[3\]: .* has 3"),
    Fault("arrivals for one consumer", "arrivals 2", "arrivals 1", (ProtocolError, *RACES, DeadlockError)),
    Fault("arrivals for three consumers", "arrivals 2", "arrivals 3", DeadlockError, "1 of 3"),
    Fault("products waited for too late", "pending=1", "pending=2", SharedRaceError, "dot_async .* may still read"),
    Fault("a slot given back while it is read", "arrive %empty[%done] when=%later", "arrive %empty[%s]",
          (SharedRaceError, ProtocolError)),
    Fault("the sum is not waited for", "%total = dot_wait %sum : tile<8x8xf32>", "%total = dot_wait %sum pending=1",
          ProtocolError, "cast reads the result of dot_async"),
    Fault("no fence before the copy out", "fence_shared", "", SharedRaceError, "without a fence_shared"),
    Fault("a fence too early", "store_shared %C0, %result\n        fence_shared",
          "fence_shared\n        store_shared %C0, %result", SharedRaceError, "without a fence_shared"),
    Fault("no wait before the copied buffer is filled anew", "store_wait 0\n        role_barrier", "",
          SharedRaceError, "async_store .* may still read"),
    Fault("a wait for copies that is too shallow", "store_wait 0\n        role_barrier", "store_wait 1",
          SharedRaceError),
    Fault("no wait for copies at the end", "store_wait 0\n    }", "}", ProtocolError, "add store_wait"),
    Fault("two consumers fill one buffer", "store_shared %C1", "store_shared %C0", RACES),
    Fault("two consumers write the same rows", "%w = full 1", "%w = full 0", SharedRaceError, "of o, which"),
]  # fmt: skip
ATTENTION_FAULTS = [
    Fault("K given back before its product has ended",
          "%s_1 = dot_wait %s_0 : tile<64x16xf32>\n      arrive %kempty[%c0]",
          "arrive %kempty[%c0]\n      %s_1 = dot_wait %s_0 : tile<64x16xf32>", SharedRaceError, "dot_async"),
    Fault("V given back before its product has ended",
          "%oj = dot_wait %or : tile<64x16xf32>\n        arrive %vempty[%b]",
          "arrive %vempty[%b]\n        %oj = dot_wait %or : tile<64x16xf32>", SharedRaceError, "dot_async"),
    Fault("scores read while they are summed", "%sj = dot_wait %sr pending=1", "%sj = dot_wait %sr pending=2",
          ProtocolError, "mul reads the result of dot_async"),
    Fault("sums scaled before they are there", "%oj = dot_wait %or :", "%oj = dot_wait %or pending=1 :", ProtocolError),
    Fault("the running sum taken from before", "%on = mul %oj, %ab", "%on = mul %or, %ab", ProtocolError),
    Fault("V is not waited for", "wait %vfull[%b], %odd_b", "", RACES),
    Fault("no turn is passed on", "arrive %turn[%other]", "", DeadlockError, r"waits .* for turn\[1\], parity 0"),
    Fault("the first consumer waits for its turn too", "%flip = full 1", "%flip = full 0", DeadlockError, "turn"),
    Fault("room for V under the wrong barrier", "wait %vempty[%s], %before", "wait %kempty[%s], %before",
          (SharedRaceError, ProtocolError), "full|async_load writes V"),
    Fault("the result goes out through the memory of the other", "store_shared %q_s, %oh",
          "%q_x = slot %Q[%other]\n      store_shared %q_x, %oh", SharedRaceError, "Q"),
]  # fmt: skip


def errors_of(text: str, seeds=SEEDS) -> list[InterpreterError]:
    kernel = parse_kernel(text)
    inputs = [np.ones(v.shape, v.type.info.numpy) for v in kernel.inputs]
    found = []
    for seed in seeds:
        try:
            interpret(kernel, inputs, seed=seed)
        except InterpreterError as e:
            found.append(e)
    return found


@pytest.mark.parametrize(
    ("right", "fault"),
    [(GEMM, f) for f in GEMM_FAULTS] + [(ATTENTION, f) for f in ATTENTION_FAULTS],
    ids=lambda x: x.name if isinstance(x, Fault) else "",
)
def test_faults_are_found(right, fault):
    """By some of the seeds, and none of them says anything else."""
    assert fault.old in right
    found = errors_of(right.replace(fault.old, fault.new, fault.count))
    assert found
    for e in found:
        assert isinstance(e, fault.kinds), e
        assert re.search(fault.words, str(e)), e


@pytest.mark.parametrize("right", [GEMM, ATTENTION])
def test_right_kernels_have_no_faults(right):
    assert not errors_of(right, range(10))


# -- single rules -----------------------------------------------------------------------------------------------------

MEMORY = """%S = alloc_shared : shared<4x4xf32>
%R = alloc_shared : shared<4x4xf32, slots 2>
%bar = alloc_barriers : barrier<2, arrivals 2>"""
TILE = "%t = full 1.0 : tile<4x4xf32>\n"
FILL = TILE + "store_shared %S, %t\nfence_shared\n"
COPY = "async_store %o[tile(%c0, 4), tile(%c0, 4)] <- %S"
LOAD = "async_load %x[tile(%c0, 4), tile(%c0, 4)] -> %S, %bar[%c0]"
STORE = "store %o[tile(%c0, 4), tile(%c0, 4)], %t\n"


@pytest.mark.parametrize(
    ("roles", "kind", "words"),
    [
        (["arrive %bar[%c0] count=2\narrive %bar[%c0]\narrive %bar[%c0] count=2"], ProtocolError,
         r"too many arrivals: 2 at bar\[0\], whose phase 1 waits for 1 of 2"),
        (["wait %bar[%c0], %c2"], ProtocolError, "a parity is 0 or 1, got 2"),
        (["arrive %bar[%c2]"], OutOfBoundsError, r"no barrier bar\[2\]: bar has 2"),
        (["%s = slot %R[%c3]"], OutOfBoundsError, r"no slot R\[3\]: R has 2"),
        (["%s = slot %R[%c1]\n%t = load_shared %s"], UninitializedReadError,
         r"element \(0, 0\) of R\[1\], which nobody filled"),
        ([f"expect %bar[%c0] bytes=64\n{LOAD}\narrive %bar[%c0]"], ProtocolError, "nobody waits for it"),
        (["expect %bar[%c0] bytes=64\narrive %bar[%c0]"], ProtocolError, "still waits for 64 bytes"),
        ([FILL + COPY], ProtocolError, "may still read their buffers: add store_wait"),
        ([FILL + "%d = dot_async %t, %S"], ProtocolError, "1 of its products may still run: add dot_wait"),
        ([FILL + "%d = dot_async %t, %S\n%e = dot_async %d, %S"], ProtocolError, "an operand is the result of"),
        ([FILL + "%d = dot_async %t, %S\n%e = dot_async %t, %S acc=%d\n%f = dot_async %t, %S acc=%d"], ProtocolError,
         "adds to this accumulator already"),
        ([FILL + "%d = dot_async %t, %S\n%e = dot_async %t, %S acc=%d\n%f = dot_wait %d"], ProtocolError, "is gone"),
        ([TILE + "store_shared %S, %t", TILE + "store_shared %S, %t"], SharedRaceError,
         "store_shared writes S, which store_shared of role r[01]"),
        ([TILE + "store_shared %S, %t\narrive %bar[%c0]\nwait %bar[%c0], %c0",
          "arrive %bar[%c0]\nwait %bar[%c0], %c0\n%a = slice_shared %S starts=(2, 0) sizes=(2, 4)\n"
          "%t = full 1.0 : tile<2x4xf32>\nstore_shared %a, %t\n%u = load_shared %S",
          "%u = load_shared %S"], (SharedRaceError, UninitializedReadError), "S"),
        # What goes through arrays: copies take another way to memory than stores.
        ([STORE.replace("%t", "%u").replace("store", TILE.replace("%t", "%u") + "store"), TILE + STORE],
         SharedRaceError, "store writes element .* of o, which role r[01] wrote"),
        ([FILL + STORE + COPY + "\nstore_wait 0"], SharedRaceError,
         "async_store writes element .* which role r0 wrote"),
        ([FILL + COPY + "\n" + COPY + "\nstore_wait 0"], SharedRaceError, "which an asynchronous store wrote"),
        ([FILL + COPY + "\nstore_wait 0\n%u = load %o[tile(%c0, 4), tile(%c0, 4)]"], SharedRaceError,
         "async_store writes element .* which role r0 read|load reads element .* which an asynchronous store wrote"),
        ([FILL + "print \"a\"\nassert %no message=\"b\""], InterpreterError, "role r0: assertion failed: b"),
    ],
)  # fmt: skip
def test_rules(roles, kind, words, capsys):
    text = block("%x: ref<4x4xf32>, %o: ref<4x4xf32, out>", MEMORY, *roles, grid="init(%o = 0.0)")
    found = errors_of(text)
    assert found
    for e in found:
        assert isinstance(e, kind), e
        assert re.search(words, str(e)), e


def test_a_deadlock_says_who_waits_for_what():
    first = 'wait %bar[%c1], %c0 @"k.py":7\narrive %bar[%c0]'
    second = 'arrive %bar[%c1]\nwait %bar[%c0], %c0 @"k.py":11'
    with pytest.raises(DeadlockError) as caught:
        interpret(parse_kernel(block("", MEMORY, first, second, "")), [])
    assert caught.value.stuck == (("r0", "bar", 1, 0, ("k.py", 7)), ("r1", "bar", 0, 0, ("k.py", 11)))
    assert caught.value.where == ("k.py", 7)
    lines = caught.value.message.splitlines()
    assert lines[0].endswith("every role waits, and no copy is under way")
    assert lines[1:] == [
        "  role r0 waits at k.py:7 for bar[1], parity 0: phase 0 of it misses 1 of 2 arrivals and 0 bytes",
        "  role r1 waits at k.py:11 for bar[0], parity 0: phase 0 of it misses 2 of 2 arrivals and 0 bytes",
        "  role r2 has ended",
    ]


def test_a_race_names_both_places():
    text = block("", MEMORY, TILE + 'store_shared %S, %t @"k.py":3', '%t = load_shared %S @"k.py":9')
    messages = {str(e) for e in errors_of(text, range(12))}
    assert any("role r1: race on shared memory: load_shared reads S, which store_shared of role r0 (k.py:3)" in m
               and "at k.py:9" in m for m in messages)  # fmt: skip
    assert any("role r1: load_shared reads element (0, 0) of S, which nobody filled" in m for m in messages)


def test_unchecked_runs_show_what_a_race_does():
    """Without checks, a product sees what is there: some seeds give the right sum, others do not."""
    kernel = parse_kernel(GEMM.replace("pending=1", "pending=2").replace("full 3 : i32", "full 2 : i32"))
    a, b = (np.random.default_rng(0).integers(-3, 4, v.shape).astype(v.type.info.numpy) for v in kernel.inputs)
    want = (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)
    right = [np.array_equal(interpret(kernel, [a, b], seed=s, check=False)[0], want) for s in range(20)]
    assert any(right)
    assert not all(right)
