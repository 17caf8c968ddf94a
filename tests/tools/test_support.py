"""The support page is made from the tables, and kept up to date."""

from pathlib import Path

import pytest

from jtile.tools import support

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_in_the_docs_is_the_one_the_tables_give():
    assert (DOCS / "support.md").read_text() == support.page(), "run: python -m jtile.tools.support > docs/support.md"


@pytest.mark.parametrize("name", ["add", "dot_general", "scan", "while", "cond", "sort", "exp", "gather", "cumsum"])
def test_every_family_of_the_language_has_rules(name):
    assert any(name in names for names in support.primitives().values())


def test_every_op_has_code_for_every_target():
    from jtile import ir
    from jtile.lowering.cpu import compile as cpu
    from jtile.lowering.cpu import emitter, evaluate
    from jtile.lowering.triton import compile as gpu
    from jtile.lowering.triton.block import compile as roles
    from jtile.lowering.triton.block.emitter import BLOCK
    from jtile.lowering.triton.emitter import EMITTERS

    assert cpu and gpu and roles  # they fill the tables
    tile, block = (set(ir.stage_grammar()[level]) for level in ("tile", "block"))
    assert {card.mnemonic for card in EMITTERS} == tile
    assert {card.mnemonic for card in BLOCK} | {"roles"} >= block - tile  # roles: the frame of a kernel, no op in it
    literals = {"dense"}  # data of the object, not code
    written = {card.mnemonic for card in (*evaluate.RULES, *emitter.EMITTERS)} - {""}  # "": of the back end alone
    assert written | literals == tile


def test_what_targets_cannot_run_is_said_once():
    (line,) = (gap for gap in support.gaps() if gap.startswith("`dot`"))
    assert line.startswith("`dot` on `float8_e4m3fn` and `float8_e5m2` does not run on `cuda:sm_75`, ")
    assert "and `rocm:gfx1100`: cast" in line and "sm_90" not in line
    assert any(gap.startswith("`print` does not run on `ascend:*`: an NPU has no log") for gap in support.gaps())


def test_dtypes():
    from jtile import ir

    assert support.dtypes(ir.DTYPES) == "all"
    assert support.dtypes(["float32", "int8"]) == "float32, int8"


def test_rules_that_only_refuse_are_told_from_those_that_work():
    refused = {name for names in support.refused().values() for name in names}
    assert {"cholesky", "psum", "pallas_call"} <= refused
    assert not refused & {name for names in support.primitives().values() for name in names}
    assert all("; " in why or ", " in why for why in support.refused()), "each says what to use instead"
