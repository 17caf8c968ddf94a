"""The house: which folder may import which, what a wheel holds, and what `import jtile` costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jtile.ffi._library import library_path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("lowering", "ffi", "models")

# Part of jtile -> the parts that it may import, besides itself. `PUBLIC` is `import jtile` and what it exports.
BASE = {"_errors", "_config", "_compat", "_cache", "_collector", "_cores", "_memo", "_mesh", "_parts", "_frames",
        "_sizes", "_stack"}  # fmt: skip
PUBLIC = {"", "errors", "_errors", "testing", "tune", "ops", "models"}  # _errors: the same classes as jtile.errors
EVERYTHING_BELOW = BASE | {"ir", "language", "trace", "passes", "transforms", "interpret", "lowering", "ffi", "tune"}
MAY_IMPORT = {
    "_errors": set(),
    "_config": {"_errors"},
    "_compat": {"_errors"},
    "_memo": {"_compat"},
    "_cache": {"_errors", "_config"},
    "_collector": set(),
    "_cores": set(),
    "_stack": set(),
    "_frames": {"_errors"},
    "_mesh": {"_config"},
    "_parts": set(),
    "_sizes": set(),
    "_effect": {"_compat"},
    "errors": {"_errors"},
    "ir": BASE,
    "language": BASE | {"ir"},
    "trace": BASE | {"ir", "language"},
    "passes": BASE | {"ir"},
    "transforms": BASE | {"ir", "trace", "passes", "language"},
    "interpret": BASE | {"ir"},
    "debug": BASE | {"ir", "interpret"},
    "lowering": BASE | {"ir", "passes", "ffi"},
    "ffi": set(),
    "primitive": EVERYTHING_BELOW | {"_effect"},
    "calls": EVERYTHING_BELOW | {"primitive", "debug"},
    "tune": EVERYTHING_BELOW | {"primitive", "calls", "testing"},
    "": EVERYTHING_BELOW | {"_effect", "primitive", "calls", "errors", "testing"},
    "testing": EVERYTHING_BELOW | {"", "primitive", "calls"},
    "ops": PUBLIC - {"models"},
    "fusion": EVERYTHING_BELOW | {"", "ops"},
    "numpy": {"_errors", "_memo", "", "fusion"},
    "explorer": EVERYTHING_BELOW | {"", "primitive", "calls"},
    "execution": EVERYTHING_BELOW | {"primitive", "fusion"},
    "models": PUBLIC,
    "benchmarks": PUBLIC | {"numpy"},
}


def part_of(module: str) -> str | None:
    """`jtile.lowering.cpu.isa` -> `lowering`, `jtile` -> ``, `jax` -> None."""
    names = module.split(".")
    if names[0] == "jtile":
        return names[1] if len(names) > 1 else ""
    return names[0] if names[0] in ("benchmarks", "tests") else None


def module_of(path: Path) -> str:
    names = [*path.relative_to(ROOT).with_suffix("").parts]
    if names[0] in MAPPED:
        names.insert(0, "jtile")
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module) of every import of a file, inside functions too; not those for type checkers."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    out: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and any("TYPE_CHECKING" in vars(n).values() for n in ast.walk(node.test)):
            return
        if isinstance(node, ast.Import):
            out.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(name for name in (base, node.module) if name)
            # `from jtile import ir` imports the part, `from jtile import kernel` a public name of jtile
            for alias in node.names:
                submodule = source == "jtile" and (alias.name in MAY_IMPORT or alias.name in ("tools", "tests"))
                out.append((node.lineno, f"jtile.{alias.name}" if submodule else source))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # no expression holds an import
                visit(child)

    visit(ast.parse(path.read_text()))
    return out


def source_files() -> list[Path]:
    folders = ("jtile", *MAPPED, "benchmarks")
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def violation(importer: str, imported: str) -> bool:
    """Whether module `importer` must not import module `imported`."""
    here, there = part_of(importer), part_of(imported)
    if there is None or here in (there, "tools"):  # what is not jtile, itself, or the tools that may use all
        return there == "tests"
    if there in ("tools", "tests", "benchmarks"):
        return True
    return there not in MAY_IMPORT[here]


def test_imports_point_one_way():
    bad = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in source_files()
        for line, imported in imports_of(path)
        if violation(module_of(path), imported)
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("importer", "imported", "bad"),
    [
        ("jtile.ir.core", "jtile.language", True),
        ("jtile.language.refs", "jtile.ir.core", False),
        ("jtile.ops.softmax", "jtile", False),
        ("jtile.ops.softmax", "jtile.calls.kernel", True),
        ("jtile.ffi", "jtile._errors", True),
        ("jtile.lowering.cpu", "jtile.trace", True),
        ("jtile.calls.kernel", "jtile.tools.cli", True),
        ("jtile.tools.cli", "jtile.calls.kernel", False),
        ("jtile.models.llama", "jtile.ops", False),
        ("benchmarks.softmax", "jtile.lowering", True),
        ("jtile.ir.core", "jax.numpy", False),
        ("jtile", "jtile.tools", True),
        ("jtile", "jtile.language.refs", False),
    ],
)
def test_the_direction_rule_itself(importer, imported, bad):
    assert violation(importer, imported) is bad


def test_private_jax_only_in_compat():
    private = "jax." + "_src"
    bad = [str(p.relative_to(ROOT)) for p in source_files() if private in p.read_text() and p.name != "_compat.py"]
    assert not bad


SPELLED = re.compile(r"""["'](cpu|cuda|rocm|ascend|gpu|sm_|gfx)""")
NAMES = {"cpu", "cuda", "rocm", "ascend", "gpu"}
OWN = ("lowering/cpu", "lowering/cuda", "lowering/rocm", "lowering/ascend", "ffi")  # may know their names


def branches_on_names(code: str) -> list[tuple[int, str]]:
    """(line, text) of comparisons with the names of platforms and architectures; not those of JAX's devices."""
    if not SPELLED.search(code):
        return []
    tree = ast.parse(code)

    def named(node: ast.AST) -> bool:
        texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return any(text in NAMES or text.startswith(("sm_", "gfx")) for text in texts)

    compared = [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and any(map(named, (n.left, *n.comparators)))]
    starts = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "startswith" and named(n)
    ]
    matched = [n for n in ast.walk(tree) if isinstance(n, ast.MatchValue) and named(n)]
    found = [(n.lineno, ast.unparse(n)) for n in (*compared, *starts, *matched)]
    return [(line, text) for line, text in found if "device" not in text]


def test_nothing_branches_on_the_names_of_platforms():
    """What a platform differs in is a field of its record, or a feature of its targets: a new one comes without changes
    elsewhere."""
    asks = {"jtile/trace/rules/calls.py"}  # which of the codes that JAX has for its platforms a kernel takes
    found = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in source_files()
        if not str(path.relative_to(ROOT)).startswith((*OWN, "benchmarks")) and str(path.relative_to(ROOT)) not in asks
        for line, text in branches_on_names(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_rule_of_names_itself():
    code = (
        'a = p == "cuda"; b = "sm_90" in q; c = x.startswith("gfx"); d = name == "relu"; e = device.platform == "cpu"'
    )
    assert [text for _, text in branches_on_names(code)] == [
        "p == 'cuda'",
        "'sm_90' in q",
        "x.startswith('gfx')",
    ]


def letters(function: ast.FunctionDef) -> set[str]:
    """The names of one letter that a function assigns. Those of comprehensions end with their line, and a capital may
    stand for the argument with the small letter."""
    nodes = [*ast.walk(function)]
    short = {id(x) for n in nodes if isinstance(n, ast.comprehension) for x in ast.walk(n.target)}
    arguments = {n.arg for n in nodes if isinstance(n, ast.arg)}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and id(n) not in short}
    return {x for x in stored if len(x) == 1 and x != "_" and not (x.isupper() and x.lower() in arguments)}


def test_kernels_explain_their_letters():
    """A name of one letter in a kernel is one of "Names in kernels" (docs/extending.md), or a docstring or comment of
    its file says what it is; and no field of what roles share is of any type."""
    page = (ROOT / "docs" / "extending.md").read_text().partition("### Names in kernels")[2].partition("\n## ")[0]
    common = set(re.findall(r"`([a-z])`", page))
    assert {"b", "h", "i", "j", "m", "l", "p"} <= common
    for path in sorted((ROOT / "jtile" / "ops").glob("*.py")):
        text = path.read_text()
        tree, roles = ast.parse(text), "jt.role(" in text
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        said = [ast.get_docstring(n) or "" for n in (tree, *functions, *classes)] + re.findall("#.*", text)
        explained = set(re.findall(r"(?<!\w)\w(?!\w)", " ".join(said)))
        for f in functions:
            if roles or any(re.match(r"jt\.(kernel|function)", ast.unparse(d)) for d in f.decorator_list):
                found = {x for x in letters(f) if x.lower() not in common} - explained
                assert not found, f"{path.name}: {f.name} does not say what {', '.join(sorted(found))} is"
        fields = [x for c in classes for x in c.body if isinstance(x, ast.AnnAssign)]
        assert not roles or "Any" not in [ast.unparse(x.annotation) for x in fields], path.name


@pytest.mark.parametrize("native", ["built before", pytest.param("compiled", marks=pytest.mark.slow)])
def test_wheel_has_one_top_level_name(native, tmp_path):
    """With the library of this environment; with --runslow, which takes half a minute more, compiled for the wheel."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core, which builds the wheel, is not installed")
    command = ["wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", tmp_path, ROOT]
    if native == "built before":
        settings = ("source-dir=tests/support/built", f"define.JTILE_BUILT={library_path()}")
        command += [f"--config-settings=cmake.{s}" for s in settings]
    done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("jtile-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"jtile"}
    packages = {f"jtile/{name}/__init__.py" for name in MAPPED}
    files = {"jtile/tune/records/nvidia-h200.json", "jtile/models/serving/http/page/index.html"}
    missing = (packages | files) - set(names)
    assert not missing
    assert any(name.startswith("jtile/ffi/_jtile") and name.endswith(".so") for name in names), names
    assert not [name for name in names if name.endswith((".cc", ".h", "CMakeLists.txt", ".pyc"))]


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_folders_refuse_their_bare_name(name, subprocess_env):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=subprocess_env, check=False)
    assert done.returncode != 0
    assert f"import jtile.{name}, not {name}" in done.stderr


def test_import_does_no_work(subprocess_env):
    # A platform that does not exist: any use of a JAX backend at import would raise.
    env = subprocess_env | {"JAX_PLATFORMS": "no_such_platform"}
    lazy = ("llvmlite", "triton", "flax", "typer", "rich")
    code = f"import sys, jtile; print([m for m in {lazy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr or done.stdout


def test_import_is_cheap(subprocess_env):
    # Functions that are called, built-in ones included: `python -m benchmarks cpu --only overhead` measures the time.
    profile = "lambda frame, event, of: seen.append(event) if event in ('call', 'c_call') else None"
    measured = f"sys.setprofile({profile}); import jtile; sys.setprofile(None)"
    code = f"import sys, jax; seen = []; {measured}; print(len(seen))"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, env=subprocess_env, check=True)
    assert int(done.stdout) < 16_000
