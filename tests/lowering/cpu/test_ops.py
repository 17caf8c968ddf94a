"""Every op card on the CPU back end against its NumPy meaning, over dtypes, odd shapes and both vector directions."""

from __future__ import annotations

import op_matrix
import pytest
from draws import thorough
from native import run_native
from op_matrix import Bench, array

from jtile import ir
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.isa import ISAS


# `test_convert` casts everything to everything; here that is for `make test-all`.
@pytest.mark.parametrize("name", [n for n in op_matrix.CASES if thorough() or not n.startswith("casts-")])
def test_matrix(name):
    op_matrix.check(op_matrix.CASES[name](), run_native)


@pytest.mark.parametrize("isa", sorted(ISAS))
def test_text_for_every_isa(isa):
    """A kernel of every kind compiles for every instruction set, without an undefined symbol."""
    b = Bench(array((9, 33), "bfloat16"), array((33, 12), "float32"), array((9, 33), "int8"))
    x, y, z = b.loads()
    wide = b.b.cast(x, "float32")
    b.value(ir.Dot(wide, y, None))
    b.store(b.b.cast(b.b.map("exp", wide), "bfloat16"))
    b.value(ir.Reduce(wide, "max", (1,)))
    b.value(ir.Sort((z,), 1))
    art = compile_kernel(b.case().kernel, ISAS[isa], texts=True)
    assert art.image[:4] == b"\x7fELF"
    assert "extern" not in art.texts["asm"]
