"""The cards of the device scale: their text, what the verifier refuses, and what passes must leave in its place."""

import pytest

from jtile._errors import KernelValueError, ParseError, TransformError, VerificationError
from jtile.ir import Load, Store, WaitSignal, parse_kernel, print_kernel, root, symbol, verify
from jtile.passes.accumulate import accumulate
from jtile.passes.cse import cse
from jtile.passes.dce import dce
from jtile.passes.hoist import hoist
from jtile.passes.ref_forwarding import ref_forwarding
from jtile.transforms.batch import batch

# A device stores to another one's memory, signals it, and loads its own memory and that one's before and after waits.
TEXT = """kernel @talk(
    %x: ref<4xf32>,
    %o: ref<4x4xf32, out>,
    %box: ref<4xf32, symmetric>,
    %s: ref<2xi32, signal>) grid(4) devices(x=2, "y z"=3) {
  %k = program_id 0 : i32
  %i = axis_index "y z" : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %c3 = full 3 : i32
  %a = load %x[%k] : f32
  %row = on %box, %c1 axis="x" : ref<4xf32, symmetric>
  %far = on %row, %i axis="y z" : ref<4xf32, symmetric>
  store %far[%k], %a checked=false
  %own = load %box[%k] checked=false : f32
  store %o[%k, %c0], %own
  %theirs = load %far[%k] checked=false : f32
  store %o[%k, %c1], %theirs
  %s_1 = on %s, %c1 axis="x" : ref<2xi32, signal>
  signal set %s_1[%c0], %c3
  wait_signal %s[%c0], %c3
  %own_1 = load %box[%k] checked=false : f32
  store %o[%k, %c2], %own_1
  axis_barrier "x"
  %own_2 = load %box[%k] checked=false : f32
  store %o[%k, %c3], %own_2
}
"""


def talk():
    return parse_kernel(TEXT)


def loads(kernel) -> int:
    return sum(isinstance(op, Load) for op in kernel.body.walk())


def test_text():
    assert print_kernel(talk()) == TEXT
    verify(talk())
    assert [v.name for v in talk().shared] == ["box", "s"]
    assert talk().devices == (("x", 2), ("y z", 3))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('axis_barrier "x"', 'axis_barrier "w"', "the devices of this kernel have no axis 'w', but x, y z"),
        (' devices(x=2, "y z"=3)', "", "box .* belongs to all devices of a call, and it names no axis"),
        ("devices(x=2", "devices(x=0", "one device at least each"),
        ("box: ref<4xf32, symmetric>", "box: ref<4xf32, symmetric>, %more: ref<{n}xf32, symmetric>", "what n is"),
        ("s: ref<2xi32, signal>", "s: ref<2xi32, signal>, %more: ref<2xi64, signal>", "signals are int32, got"),
        ("  wait_signal %s[%c0], %c3", "  wait_signal %s_1[%c0], %c3", "waits for its own signals"),
        ("  wait_signal %s[%c0], %c3", "  wait_signal %box[%c0], %c3", "expected a Ref of signals"),
        ("  wait_signal %s[%c0], %c3", "  %v = load %s[%c0] : i32", "s is signals: raise one by signal"),
        ("signal set %s_1[%c0], %c3", "signal or %s_1[%c0], %c3", "a signal is one of add, set"),
        ("signal set %s_1[%c0], %c3", "signal set %s_1[], %c3", "is named by 1 numbers"),
        ("%row = on %box, %c1", "%row = on %x, %c1", "expected a Ref that every device has"),
    ],
)
def test_what_is_refused(old, new, words):
    assert old in TEXT
    with pytest.raises((ParseError, VerificationError, KernelValueError), match=words):
        verify(parse_kernel(TEXT.replace(old, new)))


def test_the_memory_behind_a_ref_of_another_device():
    kernel = talk()
    (far,) = (op.ref for op in kernel.body.ops if isinstance(op, Store) and not op.checked)
    assert root(far) is kernel.shared[0]


def test_loads_stay_where_they_see_other_devices():
    """The store went to a device that may be this one: nothing is forwarded; behind a wait stands what others wrote."""
    assert loads(ref_forwarding.run(talk())) == loads(talk()) == 5
    assert loads(cse.run(talk())) == 5
    together = TEXT.replace("  wait_signal %s[%c0], %c3\n", "").replace("  signal set %s_1[%c0], %c3\n", "")
    assert loads(cse.run(parse_kernel(together))) == 4


def test_no_loop_gives_up_a_load_behind_a_wait():
    text = TEXT.replace(
        "  %own_1 = load %box[%k] checked=false : f32\n",
        "  %own_1 = for %n in %c0..%c2 step %c1 carry (%sum = %own) {\n    wait_signal %s[%n], %c1\n"
        "    %w = load %box[%k] checked=false : f32\n    %t = add %sum, %w : f32\n    yield %t\n  }\n",
    )
    (loop,) = (op for op in hoist.run(parse_kernel(text)).body.ops if op.mnemonic == "for")
    assert [op.mnemonic for op in loop.body.ops] == ["wait_signal", "load", "map"]


def test_waits_stay_though_nobody_asks():
    bare = parse_kernel(TEXT)
    assert any(isinstance(op, WaitSignal) for op in dce.run(bare).body.walk())
    assert accumulate(bare).kernels == (bare,)


def test_lanes_of_vmap_have_memory_and_signals_of_their_own():
    kernel = batch(batch(talk(), 5, [True, True]), 2, [False, True])
    verify(kernel)
    assert [v.shape for v in kernel.shared] == [(2, 5, 4), (2, 5, 2)]
    with pytest.raises(TransformError, match="number of lanes must be known"):
        batch(talk(), symbol("n"), [True, True])
