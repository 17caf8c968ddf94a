"""`jtile.numpy` gives what NumPy gives: values, dtypes, shapes, types and errors."""

from __future__ import annotations

import ast
import pathlib
import random
from typing import Any

import numpy as np
import numpy_programs
import pytest

import jtile.numpy
from jtile.numpy import _evaluate, _now, _record, _uses

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


def loop(np: Any, seed: int) -> list[Any]:
    """A loop over some statements, which looks at a few values in some of its rounds."""
    draw = random.Random(seed)
    steps = [draw.randrange(12) for _ in range(6)]
    a, b, seen = np.arange(12.0).reshape(3, 4), np.ones((3, 4)), []
    t, u = a * 0, b + 1
    for k in range(12):
        for step in steps:
            if step == 0:
                t = a + b
            elif step == 1:
                u = t * 0.5 + a
            elif step == 2:
                a = a * 0.9 + u * 0.01
            elif step == 3:
                b[1:] += a[:-1] * 0.1
            elif step == 4:
                a -= t * 0.01
            elif step == 5 and k % 3 == 0:
                seen.append(float(u.sum()))
            elif step == 6:
                seen.append(float(a.max()))
            elif step == 7:
                t[...] = b
            elif step == 8:
                u = t.T[::-1].T
            elif step == 9 and k % 4 == 3:
                seen.append(float(t[0, 0]))
            elif step == 10:
                b = np.where(a > b, a, b)
            elif step == 11:
                u += k
    return [seen, a, b, t, u]


def test_random_loops(monkeypatch):
    """What a script drops unused in most rounds is left out, and is there when it is used after all."""
    monkeypatch.setattr(_evaluate, "SMALL", 0)
    monkeypatch.setattr(_record, "FEW", 7)
    for seed in range(40):
        with jtile.numpy.execution("numpy"):
            got, want = host(loop(jtile.numpy, seed)), host(loop(np, seed))
        assert all(map(same, got, want)), seed
    assert sum(len(uses.spare) for uses in _uses._USES._values.values()) > 10
