"""`jtile.numpy` gives what NumPy gives: values, dtypes, shapes, types and errors."""

from __future__ import annotations

import ast
import pathlib
from typing import Any

import numpy as np
import numpy_programs
import pytest

import jtile.numpy
from jtile.numpy import _now, _record

SNIPPETS = (pathlib.Path(__file__).parents[1] / "data" / "numpy_snippets.txt").read_text().splitlines()


def results(module: Any, snippet: str) -> Any:
    """What the last statement of a snippet gives, or the error that it raises."""
    names: dict[str, Any] = {"np": module}
    tree = ast.parse(snippet)
    try:
        with np.errstate(all="ignore"):
            for statement in tree.body:
                if isinstance(statement, ast.Expr):
                    names["out"] = eval(compile(ast.Expression(statement.value), snippet, "eval"), names)
                else:
                    exec(compile(ast.Module([statement], []), snippet, "exec"), names)
    except Exception as error:
        return error
    return names.get("out")


def host(value: Any) -> Any:
    if isinstance(value, jtile.numpy.ndarray):
        return np.asarray(value)[()] if value._scalar else np.asarray(value)
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(host, value)]
    return value


def same(got: Any, want: Any) -> bool:
    if isinstance(want, Exception):
        return type(got) is type(want) and str(got) == str(want)
    if type(got) is not type(want):
        return False
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, np.ndarray | np.generic) and want.dtype.kind in "biufc":
        close = 1e-12 if want.dtype.itemsize >= 8 else 1e-3 if want.dtype.itemsize == 2 else 1e-6
        exact = want.dtype.kind not in "fc"
        return (got.dtype, got.shape) == (want.dtype, want.shape) and (
            bool((got == want).all()) if exact else np.allclose(got, want, close, close, equal_nan=True)
        )
    return got == want if isinstance(want, bool | int | float | complex | str) else True


def differing(mode: Any) -> list[str]:
    found = []
    with jtile.numpy.execution(mode):
        got = [results(jtile.numpy, snippet) for snippet in SNIPPETS]  # nothing is looked at before all is recorded
        for snippet, value in zip(SNIPPETS, got, strict=True):
            want = host(results(np, snippet))
            if not same(host(value), want):
                found.append(f"{snippet}: {host(value)!r}, NumPy: {want!r}")
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["auto", "numpy", "compiled"])
def test_as_numpy(mode):
    assert differing(mode) == []


def run(module: Any, lines: list[str]) -> list[Any]:
    """The values of `out`, and the errors of the statements before."""
    names: dict[str, Any] = {"np": module}
    errors = []
    with np.errstate(all="ignore"):
        for line in lines:
            try:
                exec(line, names)
            except Exception as error:
                errors.append(error)
    return [*errors, *names["out"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("small", "few"), [(32768, 256), (10, 5), (0, 256), (0, 3)])
def test_random_programs(small, few, monkeypatch):
    """Views and writes in any order, computed at once or recorded, with graphs of any length."""
    monkeypatch.setattr(_now, "SMALL", small)
    monkeypatch.setattr(_record, "FEW", few)
    for seed in range(60):
        lines = numpy_programs.program(seed)
        with jtile.numpy.execution("auto" if small else "numpy"):
            got, want = host(run(jtile.numpy, lines)), host(run(np, lines))
        assert all(map(same, got, want)) and len(got) == len(want), "\n".join(lines)
