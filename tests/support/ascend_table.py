"""The tables of docs/ascend.md: `python tests/support/ascend_table.py --write` writes them anew (four minutes).

`test_table.py` compares the page with them.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import ascend_numbers
import jax
import library_cases
import numpy as np
from ascend_cases import CASES, Outcome, all_kernels, outcome
from ascend_cpu import NotOnCpuError, run_linalg

import jtile as jt
from jtile import ir
from jtile.errors import JtileError
from jtile.lowering.ascend import compile as back_end
from jtile.lowering.ascend.targets import resolve
from jtile.passes import TILE, run_pipeline
from jtile.testing import relative_error

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ascend.md"
MARKS = {name: (f"<!-- {name}: begin -->", f"<!-- {name}: end -->") for name in ("compiled", "numbers")}
NUMBERS = library_cases.CASES | ascend_numbers.CASES
CLOSE = 2e-6  # relative norm of the difference to the interpreter


def why(text: str) -> str:
    """The reason in an error, short."""
    if found := re.search(r"take (\d+) bytes of (\w+).* has (\d+)", text):
        return f"{found[2]}: {int(found[1]) >> 10} KiB of {int(found[3]) >> 10}"
    tool = "adapter" if "triton-adapter-opt" in text else "compiler" if "bishengir" in text else "jtile"
    found = re.search(r"cannot translate it: (.*?); what it was given", text, re.S)
    said = (found[1] if found else text).split("Assertion ")[-1].splitlines()[0]
    return f"{tool}: {said[:110]}".replace("|", "/")


def compiled(names: list[str] | None = None) -> Iterator[Outcome]:
    for name, kernel in all_kernels(names or list(CASES)):
        yield outcome(name, kernel)


def compiled_table() -> str:
    """A line for each kernel: which cores run it, and what it takes of each memory at most."""
    lines = ["| case | kernel | cores | UB, L1, L0C of a program (KiB) |", "|---|---|---|---|"]
    for o in compiled():
        kib = ", ".join(str(-(-o.used.get(m, 0) // 1024)) for m in ("ub", "l1", "l0c"))
        lines.append(f"| {o.case} | `{o.kernel}` | {o.kind or 'no'} | {kib if not o.why else why(o.why)} |")
    return "\n".join(lines)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[ir.Kernel, list[np.ndarray], list[np.ndarray]]]]:
    """The programs that the interpreter runs meanwhile, with operands and results."""
    import jtile.interpret as interpreter

    found: list = []
    run = interpreter.interpret

    def watched(kernel, operands, **options):
        arrays = [np.array(x) for x in operands]
        out = run(kernel, operands, **options)
        found.append((kernel, arrays, out))
        return out

    interpreter.interpret = watched
    try:
        yield found
    finally:
        interpreter.interpret = run


def gradients(case: library_cases.LibraryCase, *args):
    """The gradients of a case by its float arguments; None where it gives integers."""
    moved = [k for k, a in enumerate(args) if isinstance(a, jax.Array) and a.dtype == np.float32]

    def total(*some):
        out = case.op(*(some[moved.index(k)] if k in moved else a for k, a in enumerate(args)))
        return sum((x * x).sum() for x in jax.tree.leaves(out) if x.dtype == np.float32)

    floats = any(x.dtype == np.float32 for x in jax.tree.leaves(jax.eval_shape(case.op, *args)))
    return jax.grad(total, tuple(range(len(moved))))(*(args[k] for k in moved)) if floats else None


def numbers(name: str) -> list[tuple[str, str]]:
    """(kernel, "equal" or why not) of a library case and its gradients: what the linalg text gives on the CPU from the
    operands that the kernels of the case get, beside the interpreter."""
    case = NUMBERS[name]
    with jt.config(arch="910b1", interpret=True), recorded() as found:
        for fn in (case.op, functools.partial(gradients, case)):
            jax.block_until_ready(fn(*case.args()))
    out: dict[str, tuple[str, str]] = {}
    for kernel, operands, expected in found:
        out.setdefault(ir.print_kernel(kernel), (kernel.name, _compared(kernel, operands, expected)))
    return sorted(out.values())  # programs that do not depend on each other run in any order


def _compared(kernel: ir.Kernel, operands: list[np.ndarray], expected: list[np.ndarray]) -> str:
    simple = run_pipeline(kernel, TILE)
    try:
        got = run(simple, operands)
    except NotOnCpuError as e:
        return f"not on the CPU: {str(e)[:80]}"
    except JtileError as e:
        return why(str(e))
    errors = [relative_error(np.asarray(a), np.asarray(b)) for a, b in zip(got, expected, strict=True)]
    worst = max(errors, default=0.0)
    return "equal" if worst <= CLOSE else f"differs: {worst:.1e}"


def run(kernel: ir.Kernel, operands: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs of a kernel (after the passes) on the CPU, by its linalg text."""
    text, record, symbol = linalg(kernel)
    return run_linalg(text, symbol, record, kernel, operands)


def linalg(kernel: ir.Kernel):
    """The linalg text of a kernel, its launch record, and the name of its function."""
    import tempfile

    ttir, record, symbol = back_end.emit(kernel, resolve("ascend:910b1"))
    with tempfile.TemporaryDirectory() as folder:
        return back_end.to_linalg(ttir, Path(folder), kernel), record, symbol


def numbers_table() -> str:
    lines = ["| case | kernels with equal numbers | others |", "|---|---|---|"]
    for name in NUMBERS:
        found = numbers(name)
        equal = ", ".join(dict.fromkeys(f"`{k}`" for k, said in found if said == "equal"))
        others = "; ".join(f"`{k}`: {said}" for k, said in found if said != "equal")
        lines.append(f"| {name} | {equal} | {others} |")
    return "\n".join(lines)


def on_page(name: str) -> str:
    """A table as the page has it."""
    begin, end = MARKS[name]
    return PAGE.read_text().partition(begin)[2].partition(end)[0].strip()


def main(argv: list[str]) -> None:
    tables = {"compiled": compiled_table(), "numbers": numbers_table()}
    if "--write" not in argv:
        print("\n\n".join(tables.values()))
        return
    text = PAGE.read_text()
    for name, table in tables.items():
        begin, end = MARKS[name]
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
