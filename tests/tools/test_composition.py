"""The page is the one that the generator makes, and a row says what its report says."""

from __future__ import annotations

import json
from pathlib import Path

from library_cases import CASES

from jtile.testing import Check, Report
from jtile.tools import composition

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_in_the_docs_is_the_one_that_the_tests_give():
    data = json.loads((DOCS / "composition.json").read_text())
    wanted = "run: python -m jtile.tools.composition > docs/composition.md"
    assert (DOCS / "composition.md").read_text() == composition.page(data), wanted
    assert list(data["ops"]) == list(CASES)


def test_nothing_failed_and_nothing_was_left_out():
    data = json.loads((DOCS / "composition.json").read_text())
    assert "Not checked" not in composition.page(data)
    rows = [(name, row) for group in data.values() for name, row in group.items()]
    assert [(name, t) for name, row in rows for t, words in row.items() if words == "failed"] == []


def test_cells_and_notes():
    checks = (Check("jvp"), Check("vjp", "x"), Check("vjp", "w", "skipped", detail="frozen"))
    nothing = Report("g", (Check("vjp", "", "skipped", detail="the results are no floats"),))
    text = composition.page({"ops": {"f": Report("f", checks).row(), "g": nothing.row()}, "kinds": {}})
    (f,) = [line for line in text.splitlines() if line.startswith("| f |")]
    (g,) = [line for line in text.splitlines() if line.startswith("| g |")]
    assert f.split(" | ")[1:3] == ["+", "x (1)"]
    assert g.split(" | ")[2] == g.split(" | ")[1] == "– (3)"
    assert "1. Not w: frozen." in text
    assert "3. The results are no floats." in text
