"""Pages under Learn, How to and Coming from, the library, an op: their Python runs and prints what they say."""

import contextlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import forked
import jax
import pytest

import jtile as jt

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PUZZLES, SOLUTIONS = (DOCS / "learn" / f"{name}.md" for name in ("puzzles", "solutions"))
PAGES = sorted(page for part in ("learn", "howto", "coming_from") for page in (DOCS / part).glob("*.md"))
PAGES = [page for page in PAGES if page not in (PUZZLES, SOLUTIONS)]
PAGES += [DOCS / f"{name}.md" for name in ("library", "extending", "fuse", "graph", "numpy", "sharding", "testing")]


def code_of(page):
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))


@contextlib.contextmanager
def defaults_of_jax():
    """The suite forbids promotion; who reads a page has JAX as it comes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def promised(code):
    """What the comments behind `print(...)` say, but for those that only describe it."""
    comments = re.findall(r"(?m)^ *print\(.*\)  # (.*)$", code)
    return [comment for comment in comments if not comment.startswith("says ")]


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if code_of(page)],
    ids=lambda p: f"{p.parent.name}/{p.stem}",
)
def test_the_page_is_true(page, tmp_path, capsys, subprocess_env):
    code, script = code_of(page), tmp_path / "page.py"  # a file, so that kernels have source
    script.write_text(code)
    if "XLA_FLAGS" in code or "@rule" in code:  # more devices; a rule that other tests would find in the tables
        done = forked.run([sys.executable, script], env=subprocess_env | {"JTILE_OPTIMIZE": "0"})
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        spec = importlib.util.spec_from_file_location("page", script)
        before = Path.cwd()
        os.chdir(tmp_path)
        try:
            with jt.config(cache_dir=str(tmp_path / "cache")), defaults_of_jax():
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
        finally:
            os.chdir(before)
        printed = capsys.readouterr().out
    lines = iter(printed.splitlines())
    assert [line for line in promised(code) if line not in lines] == []


def puzzle_checks():
    """The lines that stand as comments below the puzzles, a text for each."""
    blocks = re.findall(r"^```python\n(.*?)^```", PUZZLES.read_text(), re.DOTALL | re.MULTILINE)
    return ["\n".join(re.findall(r"(?m)^# (.*)$", block)) for block in blocks if "\n# " in block]


def run_checks(solutions, checks, tmp_path):
    """What each check came to: an error or None."""
    code = [code_of(PUZZLES), solutions, "came = []"]
    for check in checks:
        lines = "".join(f"    {line}\n" for line in check.split("\n"))
        code.append(f"try:\n{lines}except Exception as error:\n    came.append(error)\nelse:\n    came.append(None)")
    script = tmp_path / "puzzles.py"
    script.write_text("\n".join(code))
    spec = importlib.util.spec_from_file_location("puzzles", script)
    module = importlib.util.module_from_spec(spec)
    with defaults_of_jax():
        spec.loader.exec_module(module)
    return module.came


@pytest.mark.usefixtures("by_numpy")
def test_every_puzzle_has_a_solution_and_no_beginning_passes(tmp_path):
    checks = puzzle_checks()
    assert len(checks) == 20
    assert [error for error in run_checks(code_of(SOLUTIONS), checks, tmp_path) if error] == []
    assert None not in run_checks("", checks, tmp_path)


# A mistake that a reader may make in each puzzle, as a change of its solution.
MISTAKES = (
    ("o[...] = 2 * x[...]", "o[...] = 2 + x[...]"),
    ("o.tiles(8)[i] = 2 * x.tiles(8)[i]", "o.tiles(8)[i] = 2 * x.tiles(8)[0]"),
    ("grid=lambda x, y: jt.cdiv(x.shape[0], 8))", "grid=lambda x, y: x.shape[0] // 8)"),
    ("x.tiles(4)[i][:, None] + y.tiles(8)[j][None, :]", "x.tiles(4)[j][:, None] + y.tiles(8)[i][None, :]"),
    ("x.tiles(4, 4)[i, j].T", "x.tiles(4, 4)[i, j]"),
    ("x.shape[0] - 1 - (i * 8", "x.shape[0] - (i * 8"),
    ("x.tiles(None, n)[i, 0].sum()", "x.tiles(None, 8)[i, 0].sum()"),
    ("x.tiles(None, 8, pad=-jnp.inf)\n    m = -jnp.inf", "x.tiles(None, 8)\n    m = -jnp.inf"),
    ("t.std(1, keepdims=True)", "t.std(1, keepdims=True, ddof=1)"),
    ("before = before + t.sum()", "before = t.sum()"),
    ("table[ids[i], :]", "table[i, :]"),
    ("found = j\n            break", "found = j"),
    ("jt.dot(A[i, k], B[k, j], acc)", "jt.dot(A[i, k], B[k, j])"),
    ("jax.nn.relu(acc + bias.tiles(8)[j][None, :])", "jax.nn.relu(acc) + bias.tiles(8)[j][None, :]"),
    ("jt.ones(8, jnp.int32), mask=here)", "jt.ones(8, jnp.int32))"),
    ('    if jt.arrive(jt.counters("done", ()), (), jt.num_programs(0)):\n        o[...]', "    o[...]"),
    ("jnp.where(columns <= rows, x", "jnp.where(columns < rows, x"),
    ("x.tiles(None, 8, pad=-jnp.inf)\n    m, s", "x.tiles(None, 8)\n    m, s"),
    ("j * 8 + jt.arange(8)[None, :] < k.shape[0]", "j * 8 + jt.arange(8)[None, :] < 16"),
    ("g * (1 - y**2)", "g * (1 - y)"),
)


@pytest.mark.usefixtures("by_numpy")
def test_a_typical_mistake_in_each_puzzle_is_found(tmp_path):
    solutions = code_of(SOLUTIONS)
    for right, wrong in MISTAKES:
        assert solutions.count(right) == 1, right
        solutions = solutions.replace(right, wrong)
    assert [k + 1 for k, error in enumerate(run_checks(solutions, puzzle_checks(), tmp_path)) if error is None] == []


def test_the_notebook_of_the_puzzles_is_their_page():
    """`make docs` writes it."""
    cells = json.loads(PUZZLES.with_suffix(".ipynb").read_text())["cells"]
    text = lambda kind: "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind).split()
    page = PUZZLES.read_text()
    assert text("code") == code_of(PUZZLES).split()
    assert text("markdown") == re.sub(r"(?ms)^```python\n.*?^```\n", "", page).split()
