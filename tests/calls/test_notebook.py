"""Kernels in notebooks: with plain loops, as HTML, and the notebook of the puzzles from its first cell to its last."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.calls.notebook import lowered_html

PUZZLES = Path(__file__).resolve().parent.parent.parent / "docs" / "learn" / "puzzles.ipynb"
CELLS = [
    "import jax, jax.numpy as jnp, numpy as np, jtile as jt",
    """\
@jt.kernel(out_type=lambda x: jt.like(x), grid=2)
def sums(x, o, *, rounds=3):
    acc = jt.zeros((4,), jnp.float32)
    for k in jt.range(rounds):
        t = x[jt.program_id(0), :] * k
        if k > 1:
            t = t + 1.0
        acc = acc + t
    o[jt.program_id(0), :] = acc""",
    "np.asarray(jax.jit(sums)(np.ones((2, 4), np.float32))).tolist()",
    "sums",
    "sums.lower(np.ones((2, 4), np.float32), target='cpu')",
    "sums.interpret(np.ones((3, 4), np.float32)[:1])",  # an error, which names the cell's line
]


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=1)
def doubled(x, o, *, factor=2, least):
    o[...] = jnp.maximum(x[...] * factor, least)  # <&>


def test_a_kernel_shows_its_parameters_and_its_source():
    shown = doubled._repr_html_()
    assert "Refs <code>x, o</code>; meta-parameters <code>factor=2, least</code>" in shown
    assert "@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=1)\ndef doubled" in shown
    assert "# &lt;&amp;&gt;" in shown and "source (3 lines)" in shown
    nameless = {}
    exec("def body(x, o): o[...] = x[...]", nameless)
    assert "source" not in jt.call(nameless["body"], out_type=jt.like(np.ones(2)))._repr_html_()


def test_a_lowered_kernel_shows_its_levels():
    low = doubled.lower(np.ones(3, np.float32), least=1.0, target="cpu")
    assert repr(low) == f"<jtile.Lowered doubled for {low.target.name}>"
    shown = low._repr_html_()
    assert [f"<summary>{name} (" in shown for name in low.texts] == [True] * len(low.texts)
    long = lowered_html("k", "cpu", {"asm": "nop\n" * 2500})
    assert "asm (2500 lines)" in long and "... and 500 lines more" in long and long.count("nop") == 2000


def test_notebooks_run(monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient, which runs notebooks, is not installed")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="ipykernel, in which notebooks run, is not installed")
    monkeypatch.setenv("JTILE_CACHE_DIR", str(tmp_path))
    book, own = nbformat.read(PUZZLES, as_version=4), [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    own[-1].metadata["tags"] = ["raises-exception"]
    book.cells = [*own, *(cell for cell in book.cells if cell.cell_type == "code")]
    nbclient.NotebookClient(book, timeout=600).execute()
    value, shown, levels, error = (cell.outputs[0] for cell in own[2:])
    assert value.data["text/plain"] == "[[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]"
    assert "def sums" in shown.data["text/html"] and "tile_ir" in levels.data["text/html"]
    assert error.ename == "OutOfBoundsError" and "t = x[jt.program_id(0), :] * k" in error.evalue
