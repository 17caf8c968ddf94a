"""The fixtures `lower` and `run` of tests/trace."""

from __future__ import annotations

import importlib.util
import pathlib

_PATH = pathlib.Path(__file__).parent.parent / "trace" / "conftest.py"
_spec = importlib.util.spec_from_file_location("jtile_trace_fixtures", _PATH)
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
run, _lower = _fixtures.run, _fixtures._lower
