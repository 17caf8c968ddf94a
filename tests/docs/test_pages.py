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


def test_the_notebook_of_the_puzzles_is_their_page():
    """`make docs` writes it."""
    cells = json.loads(PUZZLES.with_suffix(".ipynb").read_text())["cells"]
    text = lambda kind: "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind).split()
    page = PUZZLES.read_text()
    assert text("code") == code_of(PUZZLES).split()
    assert text("markdown") == re.sub(r"(?ms)^```python\n.*?^```\n", "", page).split()
