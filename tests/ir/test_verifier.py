"""The verifier refuses kernels that break the rules of the IR."""

from __future__ import annotations

import dataclasses

import pytest

from jtile._errors import KernelValueError, ParseError, VerificationError
from jtile.ir import (
    Builder,
    Cast,
    Dense,
    For,
    Full,
    Kernel,
    Load,
    Loc,
    Map,
    Op,
    ProgramId,
    RefType,
    Span,
    Store,
    TileType,
    Value,
    parse_kernel,
    stage_grammar,
    verify,
)

GOOD = """kernel @good(%x: ref<8xf32>, %o: ref<8xf32, out>, %s: ref<4xf32, scratch>) grid(2) {
  %i = program_id 0 : i32
  %a = load %x[tile(%i, 4)] : tile<4xf32>
  %c0 = full 0 : i32
  %c2 = full 2 : i32
  %r = for %k in %c0..%c2 step %c2 carry (%acc = %a) {
    %b = add %acc, %acc : tile<4xf32>
    yield %b
  }
  store %o[tile(%i, 4)], %r
}
"""


def good() -> Kernel:
    return parse_kernel(GOOD)


def test_a_good_kernel_passes():
    verify(good())


def broken(change) -> Kernel:
    """The good kernel after `change(kernel)`."""
    k = good()
    return change(k) or k


def _wrong_type(k):
    k.body.ops[1].result.type = TileType((4,), "int32")


def _use_before_definition(k):
    k.body.ops[0], k.body.ops[1] = k.body.ops[1], k.body.ops[0]


def _out_of_scope(k):
    loop, store = k.body.ops[-2:]
    store.value = loop.body.ops[0].result


def _other_branch(k):
    k.body.ops[-2].body.yields = (k.body.ops[-2].result,)


def _twice(k):
    k.body.ops.append(k.body.ops[0])


def _shared_block(k):
    k.body.ops.append(dataclasses.replace(k.body.ops[-2]))


def _yields_too_much(k):
    k.body.ops[-2].body.yields *= 2


def _kernel_yields(k):
    k.body.yields = (k.body.ops[0].result,)


def _foreign_result(k):
    k.body.ops[0].result.op = k.body.ops[1]


def _stores_input(k):
    k.body.ops[-1].ref = k.params[0]


def _append(*ops):
    def change(k):
        b = Builder(k.body)
        for op in ops:
            op = op(k) if callable(op) else op
            op.results = tuple(Value(t, "", op) for t in op.infer())
            b.block.ops.append(op)

    return change


def _span(size, stride):
    def make(k):
        c0 = k.body.ops[2].result
        return Load(k.params[0], (Span(c0, size, stride),))

    return make


CASES = [
    (_wrong_type, "the result is tile<4xf32> by its operands"),
    (_use_before_definition, "not defined before its use"),
    (_out_of_scope, "not in scope"),
    (_other_branch, "not in scope"),
    (_twice, "defined twice"),
    (_yields_too_much, "body of a loop yields its carry"),
    (_kernel_yields, "a kernel returns nothing"),
    (_foreign_result, "does not know its op"),
    (_stores_input, "x is an input, which cannot be written"),
    (_append(Full(300, (), "uint8")), "300 is no uint8"),
    (_append(Full(0.5, (2,), "int32")), "0.5 is no int32"),
    (_append(Full(2, (), "bool")), "2 is no bool"),
    (_append(Full(float("nan"), (), "int8")), "nan is no int8"),
    (_append(Dense((1, 9), (2,), "int4")), "no int4"),
    (_append(ProgramId(-1)), "not negative"),
    (_append(_span(2, 0)), "stride >= 1"),
]


@pytest.mark.parametrize(("change", "message"), CASES)
def test_broken_kernels(change, message):
    with pytest.raises(VerificationError) as e:
        verify(broken(change))
    assert message in str(e.value)
    assert "kernel good" in str(e.value)


def test_pad_must_fit():
    k = parse_kernel(
        "kernel @k(%x: ref<8xi32>) {\n %c = full 0 : i32\n %a = load %x[tile(%c, 4)] pad=nan : tile<4xi32>\n}"
    )
    with pytest.raises(VerificationError, match="the pad nan is no int32"):
        verify(k)


def test_negative_side():
    with pytest.raises(VerificationError, match="negative side"):
        verify(broken(_append(Full(0, (3, -1), "int32"))))


REFS = [
    ("%r = for %k in %c..%c step %c carry (%acc = %s) { yield %acc }", "a Ref is memory, not a value: %s"),
    ("if %t { yield %s } else { yield %s }", "if has 1 results"),
    ("%r = if %t { yield %s } else { yield %s }", "a region yields tiles, got %s"),
]


@pytest.mark.parametrize(("op", "message"), REFS)
def test_refs_are_not_values(op, message):
    with pytest.raises((VerificationError, ParseError), match=message):
        verify(parse_kernel(f"kernel @k(%s: ref<4xf32, scratch>) {{ %c = full 0 : i32\n%t = full true : bool\n{op} }}"))


def test_an_aliased_input_may_be_written():
    k = parse_kernel(
        "kernel @k(%x: ref<4xf32>, %o: ref<4xf32, out>) alias(%x = %o) {\n"
        " %c = full 0 : i32\n %a = full 1.0 : tile<4xf32>\n store %x[tile(%c, 4)], %a\n}"
    )
    verify(k)
    with pytest.raises(VerificationError, match="cannot be written: alias it"):
        verify(dataclasses.replace(k, aliases=()))


HEADS = [
    ("kernel @k() grid(2, -1) {}", "none negative"),
    ("kernel @k(%o: ref<4xf32, out>, %x: ref<4xf32>) {}", "in that order"),
    ("kernel @k(%x: tile<4xf32>) {}", "in that order"),
    ("kernel @k(%x: ref<4xf32>, %o: ref<5xf32, out>) alias(%x = %o) {}", "cannot share its buffer"),
    ("kernel @k(%x: ref<4xf32>, %o: ref<4xf16, out>) alias(%x = %o) {}", "cannot share its buffer"),
    ("kernel @k(%x: ref<4xf32>, %o: ref<4xf32, out>) alias(%x = %o) init(%o = 0) {}", "takes no init"),
    ("kernel @k(%x: ref<4xf32>, %y: ref<4xf32>, %o: ref<4xf32, out>) alias(%x = %o, %y = %o) {}", "two aliases"),
    ("kernel @k(%o: ref<4xi8, out>) init(%o = 128) {}", "cannot start from 128"),
    ("kernel @k(%o: ref<4xi8, out>) init(%o = nan) {}", "cannot start from nan"),
]


@pytest.mark.parametrize(("text", "message"), HEADS)
def test_broken_heads(text, message):
    with pytest.raises(KernelValueError, match=message):
        verify(parse_kernel(text))


def test_heads_that_text_cannot_say():
    k = good()
    for change, message in [
        ({"grid": (True,)}, "whole numbers"),
        ({"grid": (1.0,)}, "whole numbers"),
        ({"inits": (None, None)}, "inits for 2"),
        ({"aliases": ((1, 0),)}, "that it has not"),
        ({"params": (k.params[0], k.params[0])}, "stands twice"),
    ]:
        with pytest.raises(KernelValueError, match=message):
            verify(dataclasses.replace(k, **change))


def test_the_error_has_the_place():
    k = good()
    k.body.ops[-1].ref = k.params[0]
    k.body.ops[-1].loc = Loc("kernels.py", 17)
    with pytest.raises(VerificationError) as e:
        verify(k)
    assert e.value.where == ("kernels.py", 17)
    assert "store %x[tile(%i, 4)], %r" in str(e.value)


def test_stage_grammar():
    grammar = stage_grammar()
    assert set(grammar) == {"tile", "block"}
    assert {"print", "assert"} <= set(grammar["tile"]) & set(grammar["block"])
    assert "dot" in grammar["tile"] and "dot" not in grammar["block"]
    assert "dot_async" in grammar["block"] and "dot_async" not in grammar["tile"]
    k = parse_kernel("kernel @k() { %x = full 1.0 : tile<16x16xf32> %d = dot %x, %x : tile<16x16xf32> }")
    verify(k)
    with pytest.raises(VerificationError, match="dot stands at tile level, this kernel is at block level"):
        verify(k, "block")


def test_every_card_has_a_known_level_and_effect():
    from jtile.ir import OPS

    for card in OPS.values():
        assert card.level in ("tile", "block", "any")
        assert card.effect in ("none", "read", "write", "io")
        assert card.__doc__ and issubclass(card, Op)


def test_infer_runs_again():
    """A pass that changes an operand without its result is found."""
    k = good()
    b = Builder(k.body)
    x = b.value(Cast(k.body.ops[1].result, "int32"))
    y = b.value(Map("neg", (x,)))
    x.op.dtype = "float16"
    with pytest.raises(VerificationError, match="by its operands"):
        verify(k)
    assert y.dtype == "int32"
    assert isinstance(k.body.ops[4], For | Store)
    assert RefType((1,), "int32").role == "in"
