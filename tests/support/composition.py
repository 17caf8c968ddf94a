"""The file docs/composition.json: what the tests found, and what the page docs/composition.md is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jtile.testing import Report

FILE = Path(__file__).resolve().parents[2] / "docs" / "composition.json"


def load() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {"ops": {}, "kinds": {}}


def agree(config: Any, group: str, order: list[str], *reports: Report) -> None:
    """Assert that these reports say what the file says; with --composition, write them into it instead."""
    data = load()
    for report in reports:
        row = report.row()
        if config.getoption("--composition"):
            data[group].setdefault(report.kernel, {}).update(row)
        else:
            said = data[group].get(report.kernel, {})
            assert row == {k: said.get(k) for k in row}, f"{report.kernel}: run pytest --composition; {report}"
    if config.getoption("--composition"):
        data[group] = {name: data[group][name] for name in order if name in data[group]}
        FILE.write_text(json.dumps(data, indent=1) + "\n")
