"""Kernels on a mesh in the interpreter: results for every order; the races, deadlocks and signals that are found."""

import re

import numpy as np
import pytest
from device_kernels import corner, cycle, gather, numbers, own_programs, shift, shifted

import jtile as jt
from jtile.errors import (
    DeadlockError,
    KernelTypeError,
    KernelValueError,
    OutOfBoundsError,
    ProtocolError,
    RaceError,
    UninitializedReadError,
)
from jtile.interpret import interpret, interpret_devices
from jtile.ir import parse_kernel, verify

SEEDS = range(6)
X = numbers(4, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_results_are_the_same_in_every_order(seed):
    np.testing.assert_array_equal(shift.interpret(X, axis="x", mesh={"x": 4}, seed=seed), shifted(X))
    x = numbers(3, 2, 2)
    got = gather.interpret(x, axis="x", mesh={"x": 3}, seed=seed)
    np.testing.assert_array_equal(got, np.broadcast_to(x, (3, *x.shape)))


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_two_axes(seed):
    x = numbers(2, 3, 4)
    got = corner.interpret(x, rows="x", columns="y", mesh={"x": 2, "y": 3}, seed=seed)
    np.testing.assert_array_equal(got, np.roll(x, (-1, -1), (0, 1)) + 3)
    turned = corner.interpret(x, rows="y", columns="x", mesh={"x": 2, "y": 3}, seed=seed)
    np.testing.assert_array_equal(turned, np.roll(x, (-1, -1), (0, 1)) + 2)


def test_an_axis_of_which_the_kernel_knows_nothing():
    x = numbers(2, 4, 3)
    np.testing.assert_array_equal(shift.interpret(x, axis="y", mesh={"x": 2, "y": 4}), shifted(x, 1))
    np.testing.assert_array_equal(shift.interpret(x, axis="x", mesh={"x": 2, "y": 4}), shifted(x, 0))


def test_one_device():
    np.testing.assert_array_equal(shift.interpret(X[:1], axis="x", mesh={"x": 1}), X[:1])


@pytest.mark.parametrize("seed", SEEDS)
def test_signals_order_the_programs_of_a_device(seed):
    np.testing.assert_array_equal(own_programs.interpret(X, axis="x", mesh={"x": 4}, seed=seed), X)


def fails(kind, words, **meta):
    """The fault is found whatever the order."""
    for seed in SEEDS:
        with pytest.raises(kind, match=words) as e:
            shift.interpret(X, axis="x", mesh={"x": 4}, seed=seed, **meta)
        assert e.value.where[0].endswith("device_kernels.py")


def test_a_read_before_the_peer_has_written():
    words = r"device \(x=\d\), call \d, program \(\), Ref box: (race: it (reads|writes) .* which device|load reads)"
    fails((RaceError, UninitializedReadError), words, wait=False)


def test_a_write_over_what_the_last_call_but_one_still_reads():
    fails(RaceError, r"race: it (writes element .*call 1.* read|signals came of device \(x=\d\))", barrier=False)


def test_a_signal_that_nobody_sends():
    fails(
        DeadlockError,
        r"(?s)every program waits.*waits at .*:\d+ for came of device \(x=0\) to reach 2: .* at 1",
        at_least=2,
    )


def test_a_signal_too_many():
    fails(ProtocolError, "came of device .* stands at 2 .* nobody waited for more than 1", signals=2)


def test_a_cycle_of_waits():
    with pytest.raises(
        DeadlockError, match=r"(?s)device \(x=0\).*device \(x=1\).*device \(x=2\), device \(x=3\) ended"
    ) as e:
        cycle.interpret(X, axis="x", mesh={"x": 4})
    assert [who for who, *_ in e.value.stuck] == [f"device (x={k}), call 1, program ()" for k in (0, 1)]


BODY = """kernel @k(%x: ref<4xf32>, %o: ref<4xf32, out>, %box: ref<4xf32, symmetric>, %s: ref<2xi32, signal>)
    devices(x=2) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
{}
}}
"""


def run(lines, **kw):
    kernel = parse_kernel(BODY.format(lines))
    verify(kernel)
    return interpret_devices(kernel, [numbers(2, 4)], **kw)


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        ('  %p = on %box, %c2 axis="x" : ref<4xf32, symmetric>', OutOfBoundsError, "no device 2 of 2 along 'x'"),
        ("  signal add %s[%c2], %c1", OutOfBoundsError, "index 2 is outside axis 0"),
        ("  signal add %s[%c0], %c0", ProtocolError, r"raises s\[0\] of device \(x=\d\) by 0: it is at least 1"),
        (
            "  signal set %s[%c1], %c2\n  signal set %s[%c1], %c1",
            ProtocolError,
            r"s\[1\] .* is set to 1, and stands at 2",
        ),
    ],
)
def test_what_no_signal_can_be(lines, kind, words):
    with pytest.raises(kind, match=words):
        run(lines, calls=1)


def test_a_barrier_to_which_one_device_does_not_come():
    lines = '  %i = axis_index "x" : i32\n  %first = eq %i, %c0 : bool\n  if %first {\n    axis_barrier "x"\n  }'
    with pytest.raises(DeadlockError, match=r"for all devices along 'x': 1 of 2 have come"):
        run(lines)


def test_programs_that_arrive_and_signal():
    """The last program of a device to arrive has seen the others, and so has whoever waits for its signal."""
    text = """kernel @k(%x: ref<2xf32>, %o: ref<1xf32, out>, %box: ref<2xf32, symmetric>, %s: ref<2xi32, signal>)
    grid(2) devices(x=2) {
  %k = program_id 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %i = axis_index "x" : i32
  %j = sub %c1, %i : i32
  %v = load %x[%k] : f32
  store %box[%k], %v
  %last = last_arrival %c0, %c2 counters="c" size=1 : bool
  if %last {
    %far = on %s, %j axis="x" : ref<2xi32, signal>
    signal add %far[%c0], %c1
    wait_signal %s[%c0], %c1
    %other = on %box, %j axis="x" : ref<2xf32, symmetric>
    %all = load %other[%c0:+2] : tile<2xf32>
    %sum = reduce sum %all axes=(0) : f32
    store %o[%c0], %sum
    signal add %far[%c1], %c1
    wait_signal %s[%c1], %c1
  }
}
"""
    kernel = parse_kernel(text)
    x = numbers(2, 2)
    for seed in SEEDS:
        np.testing.assert_array_equal(interpret_devices(kernel, [x], seed=seed)[0], x.sum(1, keepdims=True)[::-1])
    barrier = text.replace("  %last", '  axis_barrier "x"\n  %last', 1).replace('counters="c"', 'counters="x"')
    for seed in SEEDS:  # a counter with the name of the axis
        got = interpret_devices(parse_kernel(barrier), [x], seed=seed)[0]
        np.testing.assert_array_equal(got, x.sum(1, keepdims=True)[::-1])
    early = text.replace('%last = last_arrival %c0, %c2 counters="c" size=1', "%last = eq %k, %c0")
    with pytest.raises((RaceError, UninitializedReadError)):
        for seed in SEEDS:
            interpret_devices(parse_kernel(early), [x], seed=seed)


def test_what_is_printed_names_the_device_once(capsys):
    run('  %i = axis_index "x" : i32\n  print "{}" %i')
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[k device (x={k}) (0, 0, 0)] {k}" for k in (0, 1)]


def test_arguments():
    text = BODY.format("")
    with pytest.raises(KernelTypeError, match=re.escape("mesh={'x': 2}")):
        interpret(parse_kernel(text), [numbers(4)])
    with pytest.raises(KernelValueError, match=r"shape \[3, 4\]: its first axes are those of the devices \(x=2\)"):
        interpret_devices(parse_kernel(text), [numbers(3, 4)])
    with pytest.raises(KernelValueError, match=r"shape \[4, 3\]: on a mesh of \{'x': 5\} its first axes are \[5\]"):
        shift.interpret(X, axis="x", mesh={"x": 5})
    for mesh in (4, {"x": 0}):
        with pytest.raises(KernelTypeError, match="the number of devices along each axis"):
            shift.interpret(X, axis="x", mesh=mesh)
    with pytest.raises(jt.errors.KernelValueError, match="seed is an int"):
        shift.interpret(X, axis="x", mesh={"x": 4}, seed=-1)
