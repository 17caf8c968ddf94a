"""Products of which both halves are taken are one instruction; masks of rounded numbers stand in front of rounding."""

import pytest

from jtile.lowering.triton.contraction import wide_masks
from jtile.lowering.triton.ptx import mended

FRONT = ".visible .entry kernel()\n{\n"


@pytest.mark.parametrize(
    ("between", "pairs"),
    [
        ("xor.b32 %r7, %r5, %r6;", 1),
        ("xor.b32 %r1, %r5, %r6;", 0),  # another factor
        ("@%p1 bra $L__BB0_2;", 0),
        ("$L__BB0_2:", 0),
        ("mov.b64 {%r1, %r7}, %rd1;", 0),
        ("mul.hi.u32 %r8, %r1, 5;\nmul.lo.s32 %r1, %r8, 5;", 0),
        ("mul.lo.s32 %r7, %r1, 6;", 1),
    ],
)
def test_halves_of_a_product(between, pairs):
    text = f"{FRONT}mul.hi.u32 %r5, %r1, 7;\n{between}\nmul.lo.s32 %r6, %r1, 7;\nret;\n}}\n"
    got = mended(text)
    assert got.count("mul.wide.u32") == pairs and (pairs or got == text)
    if pairs:
        assert ".reg .b64 %jtw<1>;" in got and got.index("mov.b64 {%jtu, %r5}, %jtw0;") < got.index(between)
        assert got.index(between) < got.index("mov.b64 {%r6, %jtu}, %jtw0;")  # where the register was written
        assert "mul.wide.u32 %jtw0, %r1, 7;" in got and ", %r1, 7;" not in got.split("%jtw0, %r1, 7;")[1]


def test_pairs_have_registers_of_their_own():
    lines = [
        f"mul.lo.s32 %r{2 * k + 10}, %r{k}, -766062189;\nmul.hi.u32 %r{2 * k + 11}, %r{k}, -766062189;"
        for k in range(3)
    ]
    got = mended(FRONT + "\n".join(lines) + "\nret;\n}\n")
    assert got.count("mul.wide.u32") == 3 and ".reg .b64 %jtw<3>;" in got and "mul.lo" not in got


MASK = """define void @one() {{
  %3 = fptrunc {wide} %2 to {narrow}, !dbg !4
  %5 = select {cond} %4, {narrow} {sides}, !dbg !5
  ret void
}}
"""


@pytest.mark.parametrize(
    ("lanes", "narrow", "zero", "wide_zero"),
    [(None, "bfloat", "0xR0000", "0.0"), (None, "half", "0xH0000", "0.0"), (8, "bfloat", "zeroinitializer", None)],
)
@pytest.mark.parametrize("turned", [False, True])
def test_masks_in_front_of_rounding(lanes, narrow, zero, wide_zero, turned):
    of = lambda x: f"<{lanes} x {x}>" if lanes else x
    here, wide, cond = of(narrow), of("float"), of("i1")
    sides = lambda a, b, t: f"{a}, {t} {b}" if not turned else f"{b}, {t} {a}"
    text = MASK.format(wide=wide, narrow=here, cond=cond, sides=sides("%3", zero, here))
    got = wide_masks(text)
    assert f'  %"jtile.5.w" = select {cond} %4, {wide} {sides("%2", wide_zero or zero, wide)}, !dbg !5\n' in got
    assert f'  %5 = fptrunc {wide} %"jtile.5.w" to {here}, !dbg !5\n' in got
    other = text.replace(zero, "%9")  # no mask with zeros
    assert wide_masks(other) == other
    names = MASK.format(wide=wide, narrow=here, cond=cond, sides=sides("%3", zero, here)).split("\n", 2)
    apart = text.replace(names[1] + "\n", "") + text.replace("@one", "@two").replace("select", "other")
    assert wide_masks(apart) == apart  # %3 of another function
