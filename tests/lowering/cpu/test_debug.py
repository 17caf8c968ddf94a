"""Print and assert of native code read as the interpreter's, for grids of any rank and any number of lanes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from native import run_native

from jtile.errors import KernelAssertionError
from jtile.ffi import FfiError
from jtile.interpret import interpret
from jtile.ir import parse_kernel, verify
from jtile.passes import TILE, run_pipeline

# grid, lanes -> how the program whose ids are 1 on every axis of more than one program is named
GRIDS = {
    "": "(0, 0, 0)",
    "grid(2)": "(1, 0, 0)",
    "grid(2, 1, 3)": "(1, 0, 1)",
    "grid(2, 3, 1, 2, 1)": "(1, 1, 0, 1, 0)",
    "grid(3) lanes(1)": "(0, 0, 0), lane 1",
    "grid(2, 3) lanes(1)": "(1, 0, 0), lane 1",
    "grid(2, 1, 3) lanes(2)": "(1, 0, 0), lane (1, 0)",
    "grid(2, 1, 1, 1, 3, 2) lanes(2)": "(0, 0, 1, 1), lane (1, 0)",
}


def kernel(grid: str, body: str, outputs: str = ""):
    sides = [int(n) for n in re.findall(r"\d+", grid.split(")")[0])]
    ids = "\n".join(f"%i{k} = program_id {k} : i32" for k in range(len(sides)))
    made = parse_kernel(f"kernel @k({outputs}) {grid} {{\n{ids}\n{body}\n}}")
    verify(made)
    return made, sides


@pytest.mark.parametrize("grid", GRIDS)
def test_prints(grid, capfd):
    made, sides = kernel(grid, 'print "here"')
    interpret(made, [])
    expected = sorted(capfd.readouterr().out.splitlines())
    assert len(set(expected)) == math.prod(sides)
    assert f"[k {GRIDS[grid]}] here" in expected
    run_native(run_pipeline(made, TILE), [])
    assert sorted(capfd.readouterr().out.splitlines()) == expected


@pytest.mark.parametrize("grid", GRIDS)
def test_asserts(grid):
    """All programs with id 1 on the first axis fail; the first of them in the order of the grid is named."""
    first = "%i0" if "grid" in grid else "%c1"
    made, sides = kernel(grid, f'%c1 = full 1 : i32\n%ok = ne {first}, %c1 : bool\nassert %ok message="not one"')
    with pytest.raises(KernelAssertionError, match="not one"):
        interpret(made, [])
    lanes, own = made.lanes, len(sides) - made.lanes
    pid = [1, *[0] * (len(sides) - 1)] if sides else []
    named = made.program_text((*pid[:lanes], *pid[lanes:], *[0] * (3 - own)))
    with pytest.raises(FfiError, match=re.escape(f"assertion failed: not one (program {named})")):
        run_native(run_pipeline(made, TILE), [])


def test_ids_and_counts_of_many_axes():
    grid = (2, 1, 3, 1, 2, 2)
    index = ", ".join(f"%i{k}" for k in range(len(grid)))
    code = "%s0 = num_programs 0 : i32\n" + "\n".join(
        f"%n{k} = num_programs {k} : i32\n%p{k} = mul %s{k}, %n{k} : i32\n%s{k + 1} = add %p{k}, %i{k} : i32"
        for k in range(len(grid))
    )
    shape = "x".join(map(str, grid))
    made, _ = kernel(f"grid{grid}", f"{code}\nstore %o[{index}], %s6", f"%o: ref<{shape}xi32, out>")
    (got,) = run_native(run_pipeline(made, TILE), [])
    np.testing.assert_array_equal(got, interpret(made, [])[0])
    assert len(np.unique(got)) == got.size
