"""`jtile shrink`: planted defects are all that is left of files that have them."""

import ast

import pytest

from jtile.debug.shrink import edits, search, shrink
from jtile.debug.shrink.outcome import Outcome, of_exception
from jtile.debug.shrink.runs import Runs
from jtile.errors import KernelValueError
from jtile.tools.cli import main

FILE = '''"""Much here has nothing to do with what fails."""
import numpy as np
import jtile as jt

rng = np.random.default_rng(0)
rows, columns, unused = 24, 40, [1, 2]


def helper(n):
    return 2 * n + 1


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w, *, block: jt.cdiv(x.shape[0], block))
def smooth(x, w, o, *, block=8):
    i = jt.program_id(0)
    acc = jt.zeros((x.shape[1],), np.float32)
    for k in jt.range(block):
        row = x[i * block + k + DEFECT, :]
        if k > 2:
            acc = acc + row * 0.5
        else:
            acc = acc + row
        o[i * block + k, :] = acc * w[...] + helper(3)


x = rng.standard_normal((rows, columns)).astype(np.float32)
w = rng.standard_normal((columns,)).astype(np.float32)
print(helper(rows), unused)
y = smooth(x, w)
'''


class Simulated:
    """Runs that take no process: a version fails if it has what the defect needs."""

    def __init__(self, needed, inside=None):
        self.needed, self.inside = needed, inside

    def run(self, source, timeout, *, interpret=False):
        fails = self.needed(ast.parse(source))
        error = Outcome("error", "ValueError", "row 3 of 40", "smooth")
        passes = interpret and self.inside is not None
        return (self.inside if passes else error if fails else Outcome("passes")), 0.0

    def close(self):
        pass


def cut(tmp_path, monkeypatch, needed, source=FILE, **options):
    path = tmp_path / "failing.py"
    path.write_text(source)
    inside = options.pop("inside", None)
    monkeypatch.setattr(search, "Runs", lambda name: Simulated(needed, inside))
    return shrink(path, jobs=1, **options)


def names(tree):
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }


def test_what_a_defect_needs_is_left_and_no_more(tmp_path, monkeypatch):
    said = []
    found = cut(tmp_path, monkeypatch, lambda tree: "DEFECT" in names(tree), progress=said.append)
    assert found.text == "DEFECT\n"
    assert (found.lines, found.before, found.finished) == (1, len(ast.unparse(ast.parse(FILE)).splitlines()), True)
    assert len(said) > 3 and said[-1].endswith("1 lines, 7 characters")
    assert search.headed(found, "failing.py").startswith("# Cut down from failing.py by `jtile shrink`: 1 of 2")


def test_loops_sizes_parameters_and_operands_go(tmp_path, monkeypatch):
    """The defect needs a load in a kernel that is called, and a number of at least 5."""

    def needed(tree):
        kernels = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        large = any(isinstance(n, ast.Constant) and type(n.value) is int and n.value >= 5 for n in ast.walk(tree))
        return large and "smooth" in kernels and "smooth" in called and "DEFECT" in names(kernels["smooth"])

    found = cut(tmp_path, monkeypatch, needed)
    tree = ast.parse(found.text)
    (kernel,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    assert [p.arg for p in (*kernel.args.args, *kernel.args.kwonlyargs)] == []
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.If | ast.With | ast.BinOp | ast.Subscript)]
    assert [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)] == [5]
    assert found.lines <= 6


def test_every_edit_makes_a_file_smaller_and_leaves_the_tree_alone():
    tree = ast.parse(FILE)
    before, counts = ast.dump(tree), {}
    for one in (*edits.EVERYTHING, *edits.SIZES):
        for edit in one(tree):
            new = edit()
            smaller = edits.weight(new) < edits.weight(tree)
            counts[one.__name__] = counts.get(one.__name__, 0) + smaller
            if smaller:
                compiles(new)
    assert ast.dump(tree) == before
    assert all(counts.values()), counts


def compiles(tree):
    """It may be no Python, which the search finds out as here."""
    try:
        compile(ast.unparse(ast.fix_missing_locations(tree)), "version", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def test_a_wrong_result_that_the_interpreter_shares_keeps_its_formulas(tmp_path, monkeypatch):
    source = "n = 64\nt = 2 * n + 1\nprint(n)\nassert t == 2 * n, t\n"
    path = tmp_path / "failing.py"
    path.write_text(source)

    class Same:
        def __init__(self, name):
            self.name = name

        def run(self, source, timeout, *, interpret=False):
            try:
                exec(compile(source, self.name, "exec"), {})
            except Exception as error:
                return of_exception(error, self.name, source), 0.0
            return Outcome("passes"), 0.0

        def close(self):
            pass

    monkeypatch.setattr(search, "Runs", Same)
    assert shrink(path, jobs=1).text == "n = 0\nt = 2 * n + 1\nassert t == 2 * n, t\n"


def test_a_version_has_to_end_alike_in_the_interpreter(tmp_path, monkeypatch):
    """One that fails natively alone is kept only while the interpreter passes."""
    found = cut(tmp_path, monkeypatch, lambda tree: "DEFECT" in names(tree), inside=Outcome("passes"))
    assert found.interpreted == Outcome("passes")
    assert "With kernels in the interpreter: it passes." in str(found)


def test_failures_are_the_same_up_to_numbers():
    error = lambda text, **of: Outcome("error", "jtile._errors.OutOfBoundsError", text, **{"function": "f", **of})
    one = error("kernel f, program (3, 4), Ref x: index 128 is outside axis 0, which has -1.5e3 elements")
    assert one.key == error("kernel f, program (0,), Ref x: index 1 is outside axis 1, which has 2 elements").key
    assert one.key != error("kernel f, program (0,), Ref w: index 1 is outside axis 1, which has 2 elements").key
    assert one.key != error(one.text, function="g").key
    assert error("float32[3,4]").key == error("float32[7]").key != error("float16[3,4]").key
    assert str(one).startswith("OutOfBoundsError: kernel f") and str(Outcome("signal", "SIGSEGV")).endswith("SIGSEGV")
    assert {str(Outcome("time")), str(Outcome("exit", "3"))} == {"it does not end in time", "exit status 3"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(str(tmp_path_factory.mktemp("shrink") / "failing.py"))
    yield runs
    runs.close()


BOUNDS = FILE.replace("DEFECT", "1")


def test_runs_end_as_python_runs_files(runs):
    end = lambda source, **options: runs.run(source, options.pop("timeout", 600), **options)[0]
    assert end("x = 1").passes
    assert end("raise SystemExit(0)").passes
    assert end("import sys\nsys.exit('no')") == Outcome("exit", "no")
    assert end("import os\nos._exit(3)") == Outcome("exit", "3")
    assert end("import os\nos.abort()") == Outcome("signal", "SIGABRT")
    assert end("import time\ntime.sleep(6000)", timeout=0.5) == Outcome("time")
    claim = end("def f(n):\n    if n:\n        assert n == 2, 'n is 1'\nf(1)")
    assert claim == Outcome("error", "AssertionError", "n is 1", "f", "assert n == 2, 'n is 1'")
    inside = end(BOUNDS, interpret=True)
    assert inside.name == "jtile._errors.OutOfBoundsError" and inside.text.startswith("kernel smooth, program")


def test_files_that_do_not_fail_alike_are_refused(tmp_path, monkeypatch):
    with pytest.raises(KernelValueError, match=r"failing\.py does not fail\. Let it assert"):
        cut(tmp_path, monkeypatch, lambda tree: False)
    with pytest.raises(KernelValueError, match="is no Python"):
        cut(tmp_path, monkeypatch, lambda tree: True, source="def")
    with pytest.raises(KernelValueError, match="cannot be read: No such file"):
        shrink(tmp_path / "none.py")
    turns = iter((True, False) * 3)
    with pytest.raises(KernelValueError, match="fails in another way each time"):
        cut(tmp_path, monkeypatch, lambda tree: next(turns))
    late = cut(tmp_path, monkeypatch, lambda tree: "DEFECT" in names(tree), time_limit=0.0)
    assert not late.finished and "no time for more" in str(late)


def test_the_command(tmp_path, capsys, monkeypatch):
    path = tmp_path / "failing.py"
    path.write_text(FILE)
    monkeypatch.setattr(search, "Runs", lambda name: Simulated(lambda tree: "DEFECT" in names(tree)))

    def command(*args):
        with pytest.raises(SystemExit) as status:
            main(["shrink", str(path), *args])
        return status.value.code

    assert "which stays" in command("--out", str(path))
    assert "there is no folder" in command("--out", str(tmp_path / "none" / "x.py"))
    assert not command("--time-limit", "60", "--jobs", "1")
    text = (tmp_path / "failing.min.py").read_text()
    assert "# ValueError: row 3 of 40\n" in text and text.endswith("\nDEFECT\n")
    assert "1 of 24 lines are left after" in capsys.readouterr().out
    assert path.read_text() == FILE
