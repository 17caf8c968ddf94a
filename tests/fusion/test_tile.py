"""`jt.tile`: the source that it writes does what the function does, whatever the function is."""

from __future__ import annotations

import atexit
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_programs import agree, array_program

import jtile as jt
from benchmarks.fuse import gradient, layer_norm, programs
from jtile.errors import KernelTypeError, KernelValueError, UnsupportedError
from jtile.fusion import costs, groups
from jtile.fusion.source import tiled as modules
from jtile.testing.evaluate import evaluated, walked
from jtile.tools import cli

rng = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("by_numpy")


@pytest.fixture(autouse=True)
def as_jax_comes():
    """JAX promotes dtypes and ranks, as it does by itself."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def array(*shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape) * 2, dtype)


def close(got, want, tolerance=1e-4):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        tolerance = 0.05 if x.dtype.itemsize == 2 else tolerance
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), tolerance, tolerance)


def same(f, *args, tolerance=1e-4):
    """The text, after a check that a file of it gives what the function gives."""
    tiled = jt.tile(f, *args)
    assert max(map(len, tiled.text.splitlines())) <= 120
    close(evaluated(tiled.load())(*args), evaluated(f)(*args), tolerance)
    return tiled


def softmax_of(x, axis):
    return jax.nn.softmax(x * 2, axis=axis)


def recurrence(values, start):
    def step(carry, given):
        state, count = carry
        value, decay = given
        state = state * jax.nn.sigmoid(decay) + value
        return (state, count + (value > 0)), (jnp.tanh(state), count * 2)

    (last, count), (states, counts) = jax.lax.scan(
        step, (start, jnp.zeros_like(start, jnp.int32)), (values, values * 2), reverse=True
    )
    return last, states, counts, count


def everything_of_integers(n, m):
    shifted = (n << 2) ^ (m >> 1) | (n & 5)
    return shifted, n // (jnp.abs(m) + 1), n % 7, ~n, jnp.clip(n, -3, m), -n, (n == m) & (n > 0), jnp.sign(m)


def functions_of_floats(x):
    y = jnp.abs(x) + 0.5
    chain = jnp.arctan2(x, y) + jnp.cbrt(x) + jnp.log1p(y) + jnp.expm1(-y) + jax.lax.erf(x) + x**3 - y**-2
    return chain, jnp.power(y, x), jnp.round(x * 3), jnp.isfinite(x / 0.0), jnp.where(x > 0, 1.0, 2.0), jnp.fmod(x, y)


PROGRAMS = {
    "rows": (softmax_of, [(5, 40)], {"axis": -1}),
    "columns": (softmax_of, [(9, 40)], {"axis": 0}),
    "the middle": (softmax_of, [(3, 9, 10)], {"axis": 1}),
    "several axes": (softmax_of, [(3, 4, 5, 6)], {"axis": (1, 3)}),
    "everything": (lambda x: (jnp.tanh(x) ** 2).sum(), [(37, 11)], {}),
    "parts of it": (lambda x: (x.sum(0), x.max(1) * 2, (x > 0).all(0), x.argmax(-1), x.prod(-1)), [(7, 12)], {}),
    "a running sum": (lambda x: jnp.cumsum(jnp.exp(x), axis=1) / jnp.cumprod(x, axis=0), [(5, 12)], {}),
    "a transpose": (lambda x, y: (jnp.exp(x.T) + y[None]).transpose(0, 2, 1), [(5, 6), (6, 5)], {}),
    "equal elements": (lambda x: jnp.broadcast_to(jnp.exp(x), (5, 8)).sum(0), [(8,)], {}),
    "a mask": (lambda s: jnp.where(jnp.arange(6)[:, None] >= jnp.arange(6), s * 2, -jnp.inf), [(2, 6, 6)], {}),
    "numbers": (lambda x, s: jnp.exp(x * s) + s, [(4, 5), ()], {}),
    "a number": (lambda s: jnp.exp(s) * 2, [()], {}),
    "its parts": (lambda x: x[1:, ::2] + jnp.flip(x, 0)[1:, ::2] * jnp.sort(x)[:-1, ::2], [(6, 8)], {}),
    "a gather": (lambda x: jnp.take(jnp.exp(x), jnp.asarray([3, 0, -1, 9]), axis=0) * 2, [(4, 6)], {}),
    "a scan": (recurrence, [(6, 33), (33,)], {}),
    "floats": (functions_of_floats, [(3, 50)], {}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    f, shapes, static = PROGRAMS[name]
    same(lambda *xs: f(*xs, **static), *(array(*shape) for shape in shapes))


def test_programs_of_the_benchmark(monkeypatch):
    """Those of which all is written."""
    monkeypatch.setattr("benchmarks.fuse.normal", lambda _, *shape: array(*shape))
    some = {name: one for name, one in programs(64).items() if name not in ("heat", "PageRank")}
    texts = {name: jt.tile(f, *args) for name, (f, args) in some.items()}
    ours = evaluated(lambda args: {name: tiled.load()(*args[name]) for name, tiled in texts.items()})
    plain = evaluated(lambda args: {name: f(*args[name]) for name, (f, _) in some.items()})
    args = {name: args for name, (_, args) in some.items()}
    close(ours(args), plain(args), 1e-3)


PRODUCTS = {
    "epilogue": (lambda x, w, b: jax.nn.gelu(x @ w + b), [(100, 70), (70, 90), (90,)], 1),
    "residual": (lambda x, w: x + jnp.tanh(x @ w) * 2, [(64, 64), (64, 64)], 1),
    "itself": (lambda x: x @ x.T, [(33, 70)], 1),
    "other order": (lambda x, y: jax.lax.dot_general(x, y, (((0,), (1,)), ((), ()))) + 1, [(33, 70), (20, 33)], 1),
    "both": (lambda x, g, u: jax.nn.silu(x @ g) * (x @ u), [(40, 50), (50, 60), (50, 60)], 2),
    "softmax": (lambda x, w: jax.nn.softmax(x @ w), [(40, 50), (50, 60)], 2),
    "precision": (lambda x, w: (jnp.dot(x, w, precision="highest") + 1, x @ w), [(40, 50), (50, 60)], 2),
    "batch": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w) + 1, [(3, 40, 50), (3, 50, 60)], 1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    """They are kernels, which compute what follows on their tiles."""
    f, shapes, kernels = PRODUCTS[name]
    tiled = same(f, *(array(*shape) for shape in shapes), tolerance=1e-3)
    assert len(tiled.kernels) == kernels
    assert ("jt.dot(" in tiled.text) == (name != "batch")


def test_rows_that_an_index_picks():
    """Negative ones and those that are not there, in every mode."""
    table, index = array(7, 3, 5), jnp.asarray([[3, -1], [6, 40], [-9, 0]])
    for mode in ("fill", "clip", "wrap"):
        tiled = same(lambda t, i, mode=mode: jnp.take(t, i, axis=0, mode=mode) * 2, table, index)
        assert "jt.load(t, (row, " in tiled.text
    same(lambda t, i: t[i], jnp.asarray(rng.integers(-9, 9, 7), "int16"), jnp.asarray([6, 0, 2]))


def test_products_of_short_numbers():
    same(lambda x, y: jax.nn.relu(x @ y), array(33, 70, dtype="bfloat16"), array(70, 20, dtype="bfloat16"))
    x, y = (jnp.asarray(rng.integers(-9, 9, shape), "int8") for shape in ((33, 70), (70, 20)))
    f = lambda x, y, scale: jax.lax.dot(x, y, preferred_element_type=jnp.int32) * scale
    assert "jnp.int32)" in same(f, x, y, array(20)).text


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int16"])
def test_integers(dtype):
    n, m = (jnp.asarray(rng.integers(0, 100, (4, 33)), dtype) for _ in range(2))
    same(everything_of_integers, n, m)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats(dtype):
    same(lambda x: jax.nn.softmax(x * 0.3) + x.mean(0), array(6, 40, dtype=dtype))


def test_sums_that_programs_share(monkeypatch):
    """Of a program that has no room for what it sums, beside results of other shapes."""
    monkeypatch.setattr(costs, "ALONE", 0)
    monkeypatch.setattr(costs, "ROW_CPU", 8)
    monkeypatch.setattr(groups, "LARGE", 0)
    text = same(gradient(layer_norm, 3), array(37, 8), array(8), array(8), tolerance=1e-3).text
    assert "shares=" in text
    same(lambda x: ((x > 0).any(0), (x * 2).max(), x.astype(jnp.float16).sum(0), jnp.exp(x)), array(37, 50))
    same(lambda x: (jnp.exp(x).sum(0), jax.nn.sigmoid(x).prod(0)), array(37, 5, dtype="bfloat16"))


@pytest.mark.parametrize("part", range(2))
def test_random_programs(part, request, monkeypatch):
    """What is written of them gives what they give."""
    monkeypatch.setattr(costs, "LEAST", 0)
    count, unwritten = 100 if request.config.getoption("--runslow") else 10, []
    for seed in range(part * count, (part + 1) * count):
        f, arrays = array_program(20_340 + seed)
        closed = jax.make_jaxpr(f)(*arrays)
        try:
            tiled = jt.tile(f, *arrays)
        except UnsupportedError as error:
            unwritten.append(str(error))
            continue
        agree(seed, closed, jax.tree.leaves(evaluated(tiled.load())(*arrays)), walked(closed, arrays))
    assert all("has no step that becomes a kernel" in why or "writes no remat" in why for why in unwritten)


TEXT = '''"""layer_norm(x: float32[64, 40], w: float32[40], b: float32[40]) as tile kernels, written by jt.tile."""

import jax
import jax.numpy as jnp

import jtile as jt


@jt.kernel(
    out_type=lambda x, w, b: jt.like(x),
    grid=lambda x, w, b, *, rows: jt.cdiv(x.shape[0], rows),
)
def layer_norm_kernel(x, w, b, out, *, rows=ROWS):
    i, columns = jt.program_id(0), x.shape[1]
    x_tile = x.tiles(rows, columns)[i, 0]
    w_tile = w[...][None, :]
    b_tile = b[...][None, :]
    mean = jnp.mean(x_tile, axis=1, keepdims=True)
    difference = x_tile - mean
    variance = jnp.mean(jnp.square(difference), axis=1, keepdims=True)
    out.tiles(rows, columns)[i, 0] = difference * jax.lax.rsqrt(variance + 1e-05) * w_tile + b_tile


def layer_norm(x, w, b):
    return layer_norm_kernel(x, w, b)
'''


def test_a_text_reads_as_if_somebody_had_written_it():
    x, w = jax.ShapeDtypeStruct((64, 40), jnp.float32), jax.ShapeDtypeStruct((40,), jnp.float32)
    tiled = jt.tile(layer_norm, x, w, w)
    assert tiled.kernels == ("layer_norm_kernel",)
    rows = tiled.text.partition("rows=")[2].partition(")")[0]
    assert str(tiled) == TEXT.replace("ROWS", rows)


def test_arguments_are_those_of_the_function():
    @jt.fuse(static_argnums=1, static_argnames="shift")
    def f(tree, power, *, shift):
        return {"y": [jnp.exp(tree["x"]) ** power, jnp.tanh(tree["z"]) + shift], "n": (tree["x"].sum(),)}

    tree = {"x": array(4, 8), "z": array(3)}
    tiled = jt.tile(f, tree, 2, shift=1.5)
    assert "def f(tree):" in tiled.text
    want = {"y": [jnp.exp(tree["x"]) ** 2, jnp.tanh(tree["z"]) + 1.5], "n": (tree["x"].sum(),)}
    close(evaluated(tiled.load())(tree), want)


def test_arrays_that_it_closes_over():
    weights = array(8)
    same(lambda x: jnp.tanh(x * weights) + 1, array(4, 8))
    with pytest.raises(UnsupportedError, match=r"closes over an array, float32\[100\], which is too large"):
        jt.tile(lambda x: jnp.tanh(x * jnp.asarray(np.ones(100, np.float32) * 3)), array(4, 100))


def test_files(tmp_path):
    x = array(4, 8)
    tiled = jt.tile(lambda x: jnp.exp(x) + 1, x)
    path = tiled.save(tmp_path / "mine.py")
    close(evaluated(tiled.load(path))(x), jnp.exp(x) + 1)
    with pytest.raises(KernelValueError, match="is there already"):
        tiled.save(path)


def test_a_module_that_is_not_saved_is_removed_at_the_end(monkeypatch):
    at_the_end = []
    monkeypatch.setattr(modules, "_folder", modules._folder.__wrapped__)
    monkeypatch.setattr(atexit, "register", lambda f, *args, **kwargs: at_the_end.append(lambda: f(*args, **kwargs)))
    loaded = jt.tile(lambda x: jnp.exp(x) + 1, array(4, 8)).load()
    path = Path(loaded.__code__.co_filename)
    assert path.exists()
    at_the_end.pop()()
    assert not path.parent.exists()


def test_what_is_not_written():
    x = array(4, 8)
    with pytest.raises(KernelTypeError, match=r"jt\.tile takes a function of arrays, got 5"):
        jt.tile(5)
    with pytest.raises(UnsupportedError, match="has no step that becomes a kernel"):
        jt.tile(lambda x: x.T, x)
    with pytest.raises(UnsupportedError, match=r"jt\.tile writes no while \(.*test_tile.py"):
        jt.tile(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, jnp.exp(x)), x)


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_tiled.py").write_text(
        "import jax\n\n\ndef f(x, axis=0):\n    return jax.nn.softmax(x, axis=axis)\n"
    )
    for more in ([], ["--out", "kernels.py"]):
        with pytest.raises(SystemExit) as status:
            cli.main(["tile", "mine_tiled.py:f", "--args", "f32[8,16]", "--meta", "axis=1", *more])
        assert status.value.code == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "kernels.py").read_text()
    assert printed == f"{text}wrote kernels.py: 1 kernels, and f, which calls them\n"
    assert "def f(x):" in text
