"""What composes with what, from the reports of the tests. `python -m jtile.tools.composition > docs/composition.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

Rows = Mapping[str, Mapping[str, str]]  # op or kind of kernel -> transform -> `Report.row`'s words

COLUMNS = (
    "jvp", "vjp", "second order", "checkpoint", "vmap", "grad of vmap", "vmap of grad", "shard_map", "partitioned jit",
    "export",
)  # fmt: skip

_PAGE = """# What composes with what

The tables say which transformation of JAX works with which function of the library, and with which kind of kernel. A
**+** is a test: `jt.testing.check_kernel` has compared a small case with a function of `jnp`. A **–** has a number,
under which the reason stands below the tables. Where only some arguments have a derivative, the cell names them.

| column | what is compared |
|---|---|
| jvp | the tangents |
| vjp | the cotangent of every float argument, and differences of the kernel itself |
| second order | the derivative of the gradient along a direction |
| checkpoint | the vjp through `jax.checkpoint` |
| vmap | a batch over each argument alone, and over all of them |
| grad of vmap | the cotangent of an argument that a whole batch shares |
| vmap of grad | gradients of a batch |
| shard_map | gradients with `check_vma=True` over eight devices |
| partitioned jit | a batch that is sharded over eight devices under `jax.jit`, with no gather in the program |
| export | the value and the vjp of a program that `jax.export` has serialised and read back |

Every row also runs under `jax.jit`, in the interpreter, and with poisoned outputs.

The tests write this page: `pytest --composition tests/ops/test_transforms.py tests/transforms/test_kinds.py` writes
`docs/composition.json`, and `python -m jtile.tools.composition > docs/composition.md` prints the page. Every run of the
tests compares what it finds with that file.

## The kernel library

{ops}

## Kinds of kernels

{kinds}

{notes}
"""


def page(data: Mapping[str, Rows]) -> str:
    """The text of docs/composition.md."""
    notes: dict[str, int] = {}
    ops, kinds = (_table(data[key], what, notes) for key, what in (("ops", "op"), ("kinds", "kernel with")))
    lines = [f"{k}. {text[0].upper()}{text[1:]}." for text, k in notes.items()]
    return _PAGE.format(ops=ops, kinds=kinds, notes="\n".join(lines)).rstrip() + "\n"


def _table(rows: Rows, what: str, notes: dict[str, int]) -> str:
    lines = [f"| {what} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in rows.items():
        none = row["vjp"] if row.get("vjp", "").startswith("no: ") else "no: not checked"
        cells = [_cell(row.get(c, none), notes) for c in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(words: str, notes: dict[str, int]) -> str:
    """The text of a cell: `+`, or what holds and the number of the note that says why the rest does not."""
    if words == "yes":
        return "+"
    parts, _, why = ("–", "", words.removeprefix("no: ")) if words.startswith("no: ") else words.partition("; ")
    return f"{parts} ({notes.setdefault(why, len(notes) + 1)})" if why else parts


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/composition.json")
    sys.stdout.write(page(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
