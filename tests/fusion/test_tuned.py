"""`jt.tune` of what `jt.fuse` makes: tiles and orders of kernels, which groups are kernels, by times that tests say."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile._errors import CacheWarning
from jtile.fusion import costs, cuts
from jtile.fusion.bodies import kernel_of
from jtile.fusion.choices import points_of
from jtile.fusion.cuts import Cut
from jtile.fusion.fused import evaluate
from jtile.testing.evaluate import evaluated
from jtile.tune import device, measure
from jtile.tune.store import store

pytestmark = pytest.mark.usefixtures("any_size_and_rows", "own_store", "by_numpy")

rng = np.random.default_rng(0)
X, W, I = rng.standard_normal((6, 40), "float32"), rng.standard_normal(40, "float32"), rng.integers(0, 9, 6)


@pytest.fixture
def own_store(tmp_path):
    """Entries of this test alone."""
    store.forget()
    with jt.config(cache_dir=str(tmp_path)):
        yield
    store.forget()


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)`: a candidate takes `seconds(name)`, whatever the machine does."""

    def of(seconds):
        monkeypatch.setattr(
            measure.Runner, "round", lambda self, name, run: self.samples.setdefault(name, []).append(1)
        )
        monkeypatch.setattr(
            measure.Runner, "time_us", lambda self, name: seconds(name) if name in self.samples else 1e9
        )

    return of


def norm(x, w):
    y = jnp.exp(x) * w
    return y / y.sum(-1, keepdims=True)


def counts(x, i):
    return jnp.zeros(9).at[i].add(jnp.exp(x)), jnp.exp(x).sum()


def scan(x, w):
    return jax.lax.scan(lambda s, v: (s * 0.5 + v, jnp.tanh(s)), w, x)[1]


def blurred(x, w):
    return jnp.tanh(x[1:] + 2 * x[:-1]) * w


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, 2e-5, 2e-5)


def test_every_point_of_every_space_gives_the_same_results(monkeypatch):
    """By the interpreter: tiles, orders of programs, and parts of sums."""
    monkeypatch.setattr(costs, "SCATTERS_ANYWHERE", True)
    programs = {norm: (X, W), counts: (np.tile(X[0], 30), np.tile(I[:1], 1200)), scan: (X, W), blurred: (X, W)}
    programs[lambda x, w: jnp.sin(x.T * 2) * w[:6]] = X, W
    programs[lambda x, w: jax.nn.gelu(x @ x.T + w[:6])] = X, W
    for f, args in programs.items():
        plan, _, leaves = jt.fuse(f).planned(args, {})
        want = jax.tree.leaves(evaluated(f)(*args))

        def run(unit, arrays, k):
            made = kernel_of(unit)
            points = points_of(made.tiling)
            point = {name: points[min(k, len(points) - 1)][name] for name in ("tile", "order")}
            return made.interpret(arrays, **point)

        for k in (1, 3, 7):
            close(evaluate(plan, leaves, functools.partial(run, k=k)), want)


def test_tiles_are_searched_and_kept(clock):
    clock(lambda name: 1.0 if name == 2 else 2.0 if name == -1 else 3.0)  # the points count from 0
    fused = jt.fuse(norm)
    before = str(fused.explain(X, W))
    report = jt.tune(fused, X, W, progress=False)
    tiles = [t for t in report.kernels if "tile" in t.best.config]
    (found,) = tiles
    assert found.speedup == 2.0
    assert found.kernel.startswith("fused_exp")
    assert "jt.tune" not in before
    text = str(fused.explain(X, W))
    assert "jt.tune chose this, 2.00 times as fast" in text
    (unit,) = fused.explain(X, W).plan.units
    assert kernel_of(unit).tiling.sides == found.best.config["tile"] != found.candidates[0].config
    close(fused(X, W), evaluated(norm)(X, W))
    store.forget()  # as in another process, which reads the file
    assert "jt.tune chose this" in str(jt.fuse(norm).explain(X, W))
    assert "jt.tune" not in str(jt.fuse(norm).explain(X[:, :39], W[:39]))


def test_cuts_are_searched_and_kept(clock):
    """Here XLA's code is quicker for what the model makes a kernel of, and a kernel for what the model leaves."""

    def f(x, w):
        return norm(x, w), jnp.floor(w)

    seconds = lambda c: 9.0 - 2 * len(c.xla) - 3 * len(c.kernels) if isinstance(c, Cut) else 1.0
    clock(seconds)
    fused = jt.fuse(f)
    before = fused.explain(X, W).plan
    assert (len(before.units), len(before.left)) == (1, 1)
    report = jt.tune(fused, X, W, progress=False)
    found = next(t for t in report.kernels if t.name.startswith(cuts.KIND))
    assert found.best.config == {"windows": False, "xla": tuple(before.firsts), "kernels": (before.left[0][0],)}
    assert found.speedup == 9 / 4
    text = str(fused.explain(X, W))
    assert text.splitlines()[0].endswith("cut by jt.tune, 2.25 times as fast as by the model")
    assert "jt.tune found that XLA's code is quicker" in text
    close(fused(X, W), evaluated(f)(X, W))
    assert "the cut of" in str(report)


def test_a_cut_that_gains_nothing_is_the_models(clock):
    clock(lambda _: 1.0)
    report = jt.tune(jt.fuse(blurred), X, W, progress=False)
    found = next(t for t in report.kernels if t.name.startswith(cuts.KIND))
    assert found.best.config == cuts.MODELS.config
    assert {c.state for c in found.candidates} == {"measured"}
    assert "jt.tune found nothing better" in str(jt.fuse(blurred).explain(X, W))


@pytest.mark.parametrize("wrong", [{"tile": (1, 8)}, {"tile": (1, 64)}, {"tile": (1,)}, {"order": (1,)}])
def test_a_tile_of_another_layout_is_not_taken(clock, wrong):
    """Sums along a part of an axis that programs take whole, or along padding, are wrong: exp(0) is 1."""
    clock(lambda _: 1.0)
    (found,) = [t for t in jt.tune(jt.fuse(norm), X, W, progress=False).kernels if "tile" in t.best.config]
    store.put(device.kind(), found.name, dataclasses.replace(found.best, config={**found.best.config, **wrong}))
    with pytest.warns(CacheWarning, match="does not fit the kernel any more"):
        close(jt.fuse(norm)(X, W), evaluated(norm)(X, W))
    assert "jt.tune chose" not in str(jt.fuse(norm).explain(X, W))


@pytest.mark.parametrize("wrong", [{"xla": 5}, {"kernels": ("a",)}, {"windows": 3}])
def test_an_entry_that_is_no_cut_is_not_taken(clock, wrong):
    clock(lambda _: 1.0)
    report = jt.tune(jt.fuse(blurred), X, W, progress=False)
    found = next(t for t in report.kernels if t.name.startswith(cuts.KIND))
    store.put(device.kind(), found.name, dataclasses.replace(found.best, config={**found.best.config, **wrong}))
    with pytest.warns(CacheWarning, match="no cut of a program"):
        close(jt.fuse(blurred)(X, W), evaluated(blurred)(X, W))
