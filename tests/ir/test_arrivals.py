"""The card of an arrival: its text, what the verifier refuses, and what passes must leave in its place."""

import dataclasses

import pytest
from arrival_kernels import ROWS, TWICE, rows, twice

from jtile._errors import ParseError, TransformError, VerificationError
from jtile.ir import LastArrival, Load, counters_of, parse_kernel, print_kernel, symbol, verify
from jtile.passes.accumulate import accumulate
from jtile.passes.cse import cse
from jtile.passes.dce import dce
from jtile.passes.hoist import hoist
from jtile.passes.ref_forwarding import ref_forwarding
from jtile.transforms.batch import batch


@pytest.mark.parametrize("text", [ROWS, TWICE], ids=["rows", "twice"])
def test_text(text):
    kernel = parse_kernel(text)
    assert print_kernel(kernel) == text
    verify(kernel)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("size=3", "size=0", "1 to 16777216 counters, got 0"),
        ("%c4 counters", "%a counters", "two i32"),
        (
            "  if %last",
            '  %more = last_arrival %i, %c4 counters="rows" size=4 : bool\n  if %last',
            "'rows' are 3 in one place and 4",
        ),
        (
            "  if %last",
            '  %more = last_arrival %i, %c4 counters="others" size=16777214 : bool\n  if %last',
            "at most 16777216 counters, got 16777217",
        ),
    ],
)
def test_what_is_refused(old, new, words):
    with pytest.raises((ParseError, VerificationError), match=words):
        verify(parse_kernel(ROWS.replace(old, new)))


def test_counters_of_a_kernel():
    assert counters_of(rows()) == {"rows": (0, 3)}
    assert counters_of(twice()) == {"one": (0, 2), "two": (2, 1)}


def test_lanes_of_vmap_have_their_own():
    kernel = batch(batch(rows(), 5, [True, True, True]), 2, [False, True, True])
    verify(kernel)
    assert counters_of(kernel) == {"rows": (0, 30)}


def test_lanes_must_be_known():
    with pytest.raises(TransformError, match="number of lanes must be known"):
        batch(rows(), symbol("n"), [True, True, True])


def loads(kernel) -> int:
    return sum(isinstance(op, Load) for op in kernel.body.walk())


SEEN = """kernel @seen(%x: ref<4xf32>, %p: ref<4xf32, out>, %o: ref<4x2xf32, out>) grid(4) {
  %i = program_id 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c4 = full 4 : i32
  %a = load %x[%i] : f32
  store %p[%i], %a
  %before = load %p[%i] : f32
  store %o[%i, %c0], %before
  %last = last_arrival %c0, %c4 counters="c" size=1 : bool
  %after = load %p[%i] : f32
  store %o[%i, %c1], %after
}
"""


def test_loads_stay_behind_it():
    """What others wrote shows up there: an arrival stands between a store and a load of it, and between two loads."""
    kernel = parse_kernel(SEEN.replace("%p[%i] :", "%p[%i] checked=false :"))
    assert loads(kernel) == 3
    forwarded = ref_forwarding.run(kernel)
    assert loads(forwarded) == 2  # that in front of it is the value that was stored
    assert loads(cse.run(kernel)) == 3
    assert loads(cse.run(parse_kernel(SEEN.replace("%last = last_arrival", "%last = eq").replace(
        ' counters="c" size=1', "")))) == 2  # fmt: skip


def test_no_loop_gives_up_a_load_behind_it():
    text = SEEN.replace("  %last =", "  %r = for %k in %c0..%c4 step %c1 carry (%n = %a) {\n  %last =").replace(
        "  store %o[%i, %c1], %after\n", "  %m = add %n, %after : f32\n  yield %m\n  }\n  store %o[%i, %c1], %r\n"
    )
    moved = hoist.run(parse_kernel(text))
    (loop,) = (op for op in moved.body.ops if op.mnemonic == "for")
    assert [op.mnemonic for op in loop.body.ops] == ["last_arrival", "load", "map"]


def test_it_stays_though_nobody_asks():
    assert any(isinstance(op, LastArrival) for op in dce.run(parse_kernel(SEEN)).body.walk())


def test_programs_stay_as_they_are_counted():
    kernel = dataclasses.replace(twice(), inits=(0.0, None))
    floats = parse_kernel(print_kernel(kernel).replace("xi32", "xf32").replace("%x[%k] : i32", "%x[%k] : f32").replace(
        "%a : i32", "%a : f32").replace("[%c0] : i32", "[%c0] : f32").replace("%t : i32", "%t : f32"))  # fmt: skip
    assert accumulate(floats).kernels == (floats,)
