"""Groups with windows as GPUs run them: one load for all parts of an array, and last tiles that end where it does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.fusion import tilings
from jtile.fusion.bodies import kernel_of
from jtile.fusion.fused import evaluate
from jtile.fusion.windowed import ends_within
from tests.fusion.test_windows import CASES, array, by_interpreter

pytestmark = pytest.mark.usefixtures("any_size")

TILES = [(16, 64), (64, 64), (8, 8), (64, 256)]
SUMS = ("sums", "sums of columns")


def results(f, x):
    """What the kernels of a function write, by the interpreter, which finds elements that two programs write."""
    plan, tree, leaves = jt.fuse(f).planned((x,), {})
    assert plan.units
    return jax.tree.leaves(jax.tree.unflatten(tree, evaluate(plan, leaves, by_interpreter)))


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tiles_of_gpus_give_the_bits_of_those_of_cpus(name, tile, monkeypatch):
    f, x, _ = CASES[name]
    want = results(f, x)
    monkeypatch.setattr(tilings, "NARROW_GPU", tile)
    monkeypatch.setattr(tilings, "ENDED_GPU", tile)
    with jt.config(arch="sm_90"):
        got = results(f, x)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if name in SUMS:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), 1e-5)
        else:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def texts(f, x, *levels):
    with jt.config(arch="sm_90"):
        (unit,) = jt.fuse(f).explain(x).plan.units
        kernel = kernel_of(unit)
        types = [jax.ShapeDtypeStruct(shape, v.dtype) for shape, v in zip(kernel.shapes, unit.inputs, strict=True)]
        found = kernel.kernel.lower(*types, target="cuda:sm_90").texts
        return [found[level] for level in levels]


# {name: (function, its array, loads, ways)}
LOADS = {
    "five points": (CASES["five points"][0], array(300, 300), 5, 1),
    "in place": (CASES["in place"][0], array(300, 300), 5, 1),
    "rolled": (lambda x: x * 2 + jnp.roll(x, 1, 0) - jnp.roll(x, -7, 0), array(300, 300), 3, 1),
    "wrapped": (lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="wrap")[2:] * 2 - x, array(300, 300), 2, 1),
    "edges": (lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="edge")[:-2] * 2 - x, array(300, 300), 2, 1),
    "rolled along rows": (lambda x: x * 2 + jnp.roll(x, 1, 1), array(40, 2100), 4, 2),
}


@pytest.mark.parametrize("name", LOADS)
def test_one_load_for_each_neighbour(name):
    pytest.importorskip("triton")
    f, x, loads, ways = LOADS[name]
    (text,) = texts(f, x, "ttir")
    assert (text.count("tt.load"), text.count("tt.store"), text.count("scf.if")) == (loads, ways, ways - 1)


def test_loads_in_the_last_tile_need_no_tests():
    pytest.importorskip("triton")
    (text,) = texts(*LOADS["five points"][:2], "ttir")
    assert all(line.count(",") == 0 for line in text.split("\n") if "tt.load" in line)  # no mask


def test_parts_of_computed_values_stay_apart():
    f, x = lambda x: jnp.roll(x * 3, 1, 0) * 2 + x, array(300, 300)
    with jt.config(arch="sm_90"):
        (group,) = jt.fuse(f).explain(x).plan.units
        assert ends_within(group, (1, 256)).apart
        (group,) = jt.fuse(lambda x: jnp.roll(x, 1, 0) * 2 + x).explain(x).plan.units
        needs = ends_within(group, (1, 256))
        assert not needs.apart and needs.within == {0: (0, 299), 1: (0, 299)}
        assert ends_within(group, (8, 256)).apart  # its numbers would be those of a vector
