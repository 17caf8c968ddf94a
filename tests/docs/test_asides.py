"""The blocks of the pages that are labelled `py`: what takes long, wants a device or a folder with a model, or is of
another language. Each runs as far as it can here: calls that measure or load are bound to their signatures, not made;
code of packages that are not installed is read by Python only."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import models

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
FOREIGN = ("coming_from/tilelang.md", "coming_from/cutile.md")  # their packages want a GPU to be imported

PRODUCT = """
import jax, jax.numpy as jnp, numpy as np
import jtile as jt

@jt.kernel(out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
           grid=lambda a, b, **_: jt.cdiv(a.shape[0], 4))
def kernel(a, b, o, *, rows=4):
    o.tiles(4, b.shape[1])[jt.program_id(0), 0] = jt.dot(a.tiles(4, a.shape[1])[jt.program_id(0), 0], b[...])

x, w = jnp.ones((6, 8)), jnp.ones((8, 4))
a, b, y, args, softmax, vector_add = x, w, w, (x, w), kernel, kernel
reference = np.matmul
"""
# What stands in front of a block, where the page itself or the product above does not say it.
BEFORE = {
    "coming_from/numpy.md": "import numpy as np",
    "coming_from/pallas.md": "import jax, jax.numpy as jnp\nfrom jax.experimental import pallas as pl",
    "coming_from/triton.md": "import triton, triton.language as tl",
    "learn/matmul.md": "the page",
    "models.md": "import jax\nimport jtile.models\nlm, ids = jtile.models.load(), [1, 2]",
}
MEASURED = ("bench", "explain", "tune", "profile", "profile_program")  # public functions that take time
ASCEND = re.compile(r"ascend|arch=")


def blocks(page):
    return re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def name(page):
    return str(page.relative_to(DOCS))


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts and blocks(page)]


def test_every_block_has_a_label_that_says_whether_it_runs():
    known = {"", "sh", "py", "python", "text", "toml", "cuda", "{eval-rst}", "{toctree}", "{include}", "{math}"}
    found = {
        (label.split(" ")[0], name(page))
        for page in DOCS.rglob("*.md")
        if "_build" not in page.parts
        for label in re.findall(r"(?m)^```([^\n`]*)\n.*?^```", page.read_text(), re.DOTALL)
    }
    assert {(label, page) for label, page in found if label not in known} == set()


@contextlib.contextmanager
def only_bound():
    """Functions that measure, models, and meshes of devices that are not here, as objects that take the arguments of
    the real ones."""
    with contextlib.ExitStack() as stack:
        for function in MEASURED:
            stack.enter_context(mock.patch.object(jt, function, mock.create_autospec(getattr(jt, function))))
        stack.enter_context(mock.patch.object(models, "load", mock.create_autospec(models.load)))
        stack.enter_context(mock.patch.object(jax, "make_mesh", mock.create_autospec(jax.make_mesh)))
        engine = mock.create_autospec(models.Engine)
        engine.return_value.__enter__.return_value = engine.return_value
        engine.return_value.generate.return_value = mock.MagicMock()
        engine.return_value.stream.return_value = []
        stack.enter_context(mock.patch.object(models, "Engine", engine))
        stack.enter_context(mock.patch.object(jt.Lowered, "texts", {"schedule": "not compiled"}))
        yield


def executed(code, tmp_path, **names):
    """The names of a block that has run, from a file: kernels read their source."""
    path = tmp_path / "page.py"
    path.write_text(code)
    space = {"__name__": "page", "__file__": str(path), **names}
    exec(compile(code, str(path), "exec"), space)
    return space


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_asides_are_true(page, tmp_path, monkeypatch):
    code = "\n".join(blocks(page))
    if name(page) in FOREIGN:
        ast.parse(code)
        return
    if ASCEND.search(code):
        ascend(code)
        return
    if "triton" in name(page):
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.chdir(tmp_path)
    before = BEFORE.get(name(page), PRODUCT)
    if before == "the page":
        before = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)[:1])
        before = f"import jax, jax.numpy as jnp\nimport jtile as jt\n{before}"
    with only_bound(), jt.config(cache_dir=str(tmp_path / "cache")):
        found = executed(f"{before}\n{code}", tmp_path)
    check(name(page), found)


def check(page, found):
    """What a block of another language gives where it can run: its product or its average."""
    rng = np.random.default_rng(0)
    if page == "coming_from/numpy.md":
        x = rng.random(9)
        np.testing.assert_allclose(found["moving_average"](x), np.convolve(x, np.ones(5) / 5, "same"))
    if page == "coming_from/pallas.md":
        a, b = (rng.random(shape, np.float32) for shape in ((8, 16), (16, 8)))
        interpreted = functools.partial(found["pl"].pallas_call, interpret=True)
        with mock.patch.object(found["pl"], "pallas_call", interpreted):
            np.testing.assert_allclose(found["matmul"](a, b, 8, 8, 8), a @ b, rtol=1e-5)


def ascend(code):
    """The vendor's tools are not here: the functions that a block calls exist, and take what it gives them."""
    from jtile.lowering.ascend import check

    imports = "from jtile.lowering.ascend import check\n"
    pretended = mock.create_autospec(jt)
    pretended.export_bundle = mock.create_autospec(jt.export_bundle)
    pretended.config = lambda **options: contextlib.nullcontext(jt.Config(**options))
    space = {name: jnp.ones((2, 2)) for name in ("x", "y", "w", "a", "b")}
    space |= {"kernel": mock.create_autospec(jt.Kernel, instance=True), "f": jnp.add, "jax": jax, "jt": pretended}
    space |= {"check": mock.create_autospec(check), "export": mock.create_autospec(jax.export)}
    exec(compile(code.replace(imports, ""), "page", "exec"), space)
