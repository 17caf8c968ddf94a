"""The picture of an access that failed: which elements, in text and as a drawing."""

import numpy as np
import pytest

import jtile as jt
from jtile.interpret import interpret
from jtile.ir import parse_kernel

LOAD = """
kernel @rows(%x: ref<{shape}xf32>, %o: ref<1x{n}xf32, out>) grid(1) {{
  %i = full {at} : i32
  %c0 = full 0 : i32
  %r = load %x[{index}] : tile<1x{n}xf32>
  store %o[%c0:+1, %c0:+{n}], %r
}}
"""


def failed(text, *arrays):
    with pytest.raises(jt.errors.InterpreterError) as caught:
        interpret(parse_kernel(text), arrays)
    return caught.value.access


def test_rows_behind_the_end():
    found = failed(LOAD.format(shape="4x3", n=3, at=5, index="%i:+1, %c0:+3"), np.zeros((4, 3), np.float32))
    lines = ["load, x of float32[4, 3], program (0,)", "   0  3", *(f"{r}  ..." for r in range(4)), "4", "5  XXX"]
    assert str(found).splitlines() == [*lines, ". the array, # what the access names, X outside of the array"]
    assert (found.shape, found.axes) == ((4, 3), (0, 1))
    np.testing.assert_array_equal(found.faults, [[5, 0], [5, 1], [5, 2]])
    assert found.svg().count("<rect") == 4 + 1 + 3  # four rows of the array, what is outside, three keys


def test_columns_before_the_start_and_axes_that_are_not_drawn():
    text = LOAD.format(shape="2x4x3", n=3, at=-2, index="%c0, %c0:+1, %i:+3")
    found = failed(text, np.zeros((2, 4, 3), np.float32))
    assert str(found).splitlines()[:3] == [
        "load, x[0, :, :] of float32[2, 4, 3], program (0,)",
        "   -20  3",
        "0  XX#..",
    ]
    # what is outside is drawn, whichever axis it is of
    found = failed(LOAD.format(shape="2x4x3", n=3, at=3, index="%i, %c0:+1, %c0:+3"), np.zeros((2, 4, 3), np.float32))
    assert found.axes == (0, 2) and str(found).splitlines()[-2] == "3  XXX"


def test_a_large_array_takes_cells_of_several_elements():
    text = LOAD.format(shape="96x6400", n=6400, at=2_000_000, index="%i:+1, %c0:+6400")
    found = failed(text, np.zeros((96, 6400), np.float32))
    lines = str(found).splitlines()
    assert len(lines) == 3 + 23 and max(map(len, lines[:-1])) < 80
    assert lines[-1].endswith("a character is 5 x 100 elements")
    assert len(found.svg()) < 6000 and found._repr_html_() == found.svg()


def test_a_race_shows_both_programs():
    text = """
    kernel @race(%o: ref<10xf32, out>) grid(2) {
      %i = program_id 0
      %two = full 3 : i32
      %s = mul %i, %two
      %v = full 0.0 : tile<5xf32>
      store %o[%s:+5], %v
    }
    """
    found = failed(text)
    second = {"program (0,)": "oooXX###..", "program (1,)": "###XXooo.."}[found.other]
    assert str(found).splitlines()[2] == f"0  {second}"
    assert f"o {found.other}" in str(found) and found.svg().count("<rect") == 4 + 4


def test_what_nobody_wrote():
    text = """
    kernel @read(%o: ref<6xf32, out>) {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %v = full 0.0 : tile<3xf32>
      store %o[%c0:+3], %v
      %x = load %o[%c1:+3] : tile<3xf32>
    }
    """
    found = failed(text)
    assert str(found).splitlines()[2] == "0  .##X.."
    assert "X nobody wrote it" in str(found)
