"""Execution graphs as persistent launches of NVIDIA's GPUs: what one is made of, and what it does."""

from __future__ import annotations

import dataclasses
import re

import graph_programs as others
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttir.tasks import GraphSite

import jtile as jt
from jtile.execution import persistent, primitive
from jtile.execution.build import array_of
from jtile.execution.graphed import _cut
from jtile.lowering import platforms
from jtile.lowering.here import target
from jtile.lowering.triton import versions
from jtile.lowering.triton.emit_tasks import ROW, SIGNALS, STARTS, Tasks
from jtile.lowering.triton.features import features

rng = np.random.default_rng(0)
X, W, V = (rng.standard_normal(s).astype(np.float32) for s in [(8, 64), (64, 96), (96, 64)])


@jt.kernel(out_type=lambda x, w: jt.like(x, shape=(x.shape[0], w.shape[1])), grid=lambda x, w: w.shape[1] // 16)
def columns(x, w, o):
    """Sixteen columns of a product a program."""
    j = jt.program_id(0)
    o.tiles(o.shape[0], 16)[0, j] = jt.dot(x[...], w.tiles(w.shape[0], 16)[0, j])


@jt.kernel(out_type=lambda x: (jt.like(x, shape=(1,)), jt.like(x, shape=(x.shape[0],))), grid=lambda x: x.shape[0])
def total(x, o, parts):
    """The sum of all elements, which the last program to come puts together."""
    i, n = jt.program_id(0), parts.shape[0]
    parts[i] = jnp.sum(x[i, :])
    if jt.arrive(jt.counters("come", (1,)), (0,), n):
        o[0] = jnp.sum(parts[...])


def chain(x, w, v):
    for _ in range(3):
        x = columns(columns(x, w), v) * np.float32(0.1)
    return x, total(x)[0]


def expected(x):
    for _ in range(3):
        x = x @ W @ V * np.float32(0.1)
    return x, x.sum(keepdims=True).reshape(1)


def close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, 2e-2, 2e-2)  # products in tf32


@pytest.fixture
def on_hopper():
    with jt.config(arch="sm_90"):
        yield


def test_a_graph_compiles_to_one_image(on_hopper):
    found = jt.graph(chain, cores=4).explain(X, W, V)
    (schedule,) = found.schedules[:1]
    g = schedule.graph
    assert {b.end - b.begin for b in g.bands if g.tasks[b.task].programs > 4} == {1, 2}
    operands = sum(m.operand is not None for m in g.memories)
    launch = persistent.launch_of(schedule, operands, traced=True)
    starts = launch.plan[STARTS : STARTS + 5]
    width = len(ROW) + max(len(task.memories) for task in g.tasks)
    rows = launch.plan[STARTS + 5 :][: width * len(g.bands)].reshape(-1, width)
    word = {name: rows[:, k] for k, name in enumerate(ROW)}
    assert starts[0] == 0 and starts[-1] == len(g.bands) and sorted(word["band"]) == list(range(len(g.bands)))
    assert word["event"].max() == len(g.events) - 1 and launch.inner % 16 == launch.inner % 4
    artifact = persistent.image(g, launch, target())
    assert artifact.image[:4] == b"\x7fELF" and '"grid": 4' in artifact.launch["record"]
    again = persistent.image(g, dataclasses.replace(launch, plan=launch.plan * 0), target())
    assert again.image == artifact.image  # the plan is an operand


def test_a_step_chooses_kernels_that_can_be_tasks(on_hopper):
    """Few rows have kernels at the block level, which are launches of their own, outside of graphs."""
    x, w = jax.ShapeDtypeStruct((1, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    f = lambda x, w: jt.ops.matmul(jt.ops.matmul(x, w, transpose_b=True), w, transpose_b=True)
    assert "stream" in str(jt.ops.choices(f, x, w)[0])
    assert str(jt.graph(f).explain(x, w)).startswith("1 launches, 0 equations by XLA")


def test_kernels_with_private_memory_are_no_tasks(on_hopper):
    @jt.kernel(out_type=lambda x: jt.like(x), grid=1, scratch=(jax.ShapeDtypeStruct((8, 64), np.float32),))
    def through(x, o, s):
        s[...] = x[...]
        o[...] = s[::1, :] + s[0, 0]

    text = str(jt.graph(lambda x, w, v: columns(columns(through(x), w), v)).explain(X, W, V))
    assert "kernel through: its programs have private memory" in text


@pytest.mark.gpu
def test_one_launch_gives_what_its_kernels_give_on_a_gpu():
    for options in ({}, {"cores": 3}, {"cores": 1}):
        g = jt.graph(chain, **options)
        for _ in range(3):
            close(g(X, W, V), expected(X))
    small = np.float32(2e-3)  # the numbers would leave float32
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jt.graph(chain)(x, W, V)[0] * small, x))
    want = X
    for _ in range(9):
        want = expected(want)[0] * small
    assert np.linalg.norm(looped(X) - want) <= 2e-2 * np.linalg.norm(want)


@jt.kernel(out_type=lambda x, n: jt.like(x), grid=lambda x, n: x.shape[0])
def few(x, n, o):
    """Sums of the rows in front of each, at most as many as `n` says."""
    i, acc = jt.program_id(0), jt.zeros(x.shape[1])
    for k in jt.range(i, jnp.maximum(i - n[0], -1), -1):
        acc = acc + x[k, :]
    o[i, :] = acc


def summed(x, ns):
    for n in ns:
        x = few(x, n)
    return x


def by_numpy(x, ns):
    for (n,) in ns:
        x = np.stack([x[max(i - n + 1, 0) : i + 1].sum(0) for i in range(len(x))])
    return x


NS = [np.array([n], np.int32) for n in (3, 1, 8, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("cores", [None, 3, 1])
def test_bounds_of_loops_are_those_of_each_task_on_a_gpu(cores):
    np.testing.assert_allclose(jt.graph(summed, cores=cores)(X, NS), by_numpy(X, NS), 1e-4, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("cores", [None, 5, 1])
def test_updates_in_place_on_a_gpu(cores):
    """Readers of the old array come before the update, those of the new one behind it, call for call."""
    X, Y = others.X, others.Y
    for _ in range(2):
        for got, want in zip(jt.graph(others.step, cores=cores)(X, X, Y), others.expected(X, X, Y), strict=True):
            np.testing.assert_allclose(np.asarray(got), want, 1e-5, 1e-5)


@pytest.mark.gpu
def test_a_timeline_of_a_gpu_keeps_the_edges():
    for line in jt.graph(chain, cores=6).timeline(X, W, V):
        entry = {e.band: e for e in line.entries}
        assert sorted(entry) == list(range(len(line.graph.bands))) and {e.core for e in line.entries} <= set(range(6))
        assert all(entry[n].end <= entry[k].start for k, b in enumerate(line.graph.bands) for n in b.needs)


@pytest.mark.gpu
def test_a_band_that_does_not_come_is_an_error():
    """A plan in which a band waits for more bands than there are ends within the option `timeout`."""
    with jt.config(timeout=0.2, poison=False):
        region = _region()
        wired, schedule = primitive.scheduled(region, primitive.Options(cores=4))
        launch = persistent.launch_of(schedule, len(wired.operands), traced=False)
        platform = platforms.named("cuda")
        attributes = persistent.attributes(platform, persistent.image(wired.graph, launch, target()))
    g = wired.graph
    outs = sorted((m.result, m) for m in g.memories if m.result is not None)
    kinds = [jax.ShapeDtypeStruct(m.shape, m.dtype) for _, m in outs] + [
        jax.ShapeDtypeStruct((launch.inner,), np.uint8)
    ]
    width = len(ROW) + max(len(task.memories) for task in g.tasks)
    wrong = launch.plan.copy()
    rows = wrong[STARTS + 5 :][: width * len(g.bands)].reshape(-1, width)
    rows[:, ROW.index("count")] += 1

    platform.register()
    call = jax.ffi.ffi_call(platform.graph_call, kinds)
    run = jax.jit(lambda plan: call(*map(jnp.asarray, (X, W, V)), plan, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"waited 0.2 s for event\[\d+\] to reach \d+: it stands at"):
        for _ in range(3):  # the launch ends, and the call behind it hears of it
            jax.block_until_ready(run(wrong))


def _region():
    f = lambda x, w, v: columns(columns(x, w), v)
    return _cut(jax.make_jaxpr(f)(X, W, V)).regions[0]


def test_weights_are_loaded_before_a_band_waits(on_hopper):
    """The loads of what nobody writes stand in front of the wait, those of the result in front behind it."""
    (schedule,) = jt.graph(lambda x, w, v: columns(columns(x, w), v), cores=4).explain(X, W, V).schedules
    launch = persistent.launch_of(schedule, 3, traced=False)
    assert launch.shape.fixed == ((0, 1), (1,))
    text, _ = Tasks([t.kernel for t in schedule.graph.tasks], launch.shape, features("sm_90"), [None, None]).emit()
    first, second = re.split(r"mov.b32 %js, 0; mov.b32 %jk", text)[1:]
    loads = lambda part: re.findall(r"tt.load .*tensor<(\w+)x!tt.ptr<f32>>", part)
    assert loads(first) == ["128x16"] and loads(second) == ["8x128"]


@pytest.mark.parametrize("cores", [1, 3])
def test_the_text_of_a_launch_gives_what_its_kernels_give(on_hopper, cores):
    """Evaluated on the CPU, two launches in a row: blocks wait for each other, and counters go on from launch to
    launch."""
    region = _region()
    wired, schedule = primitive.scheduled(region, primitive.Options(cores=cores))
    site, have = GraphSite(schedule), dict(zip(region.inputs, (X, W, V), strict=True))
    for call in range(2):
        results = site.call([array_of(x, have) for x in wired.operands], seed=call)
        (got,) = (results[r] for r in wired.results)
        np.testing.assert_allclose(got, X @ W @ V, 1e-3, 1e-3)


@pytest.mark.parametrize("forgets", [False, True])
def test_bounds_of_loops_are_those_of_each_task(on_hopper, monkeypatch, forgets):
    """Also where they are written for triton 3.6, which would forget them."""
    monkeypatch.setattr(versions, "forgets_bounds", lambda: forgets)
    (region,) = _cut(jax.make_jaxpr(summed)(X, NS)).regions
    wired, schedule = primitive.scheduled(region, primitive.Options(cores=2))
    site, have = GraphSite(schedule), dict(zip(region.inputs, (X, *NS), strict=True))
    assert ('elementwise_inline_asm ""' in site.text) == forgets
    results = site.call([array_of(x, have) for x in wired.operands])
    np.testing.assert_allclose(results[wired.results[0]], by_numpy(X, NS), 1e-4, 1e-4)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def windows(x, o, *, w):
    """Sums of each row and those behind it, `w` in all."""
    i = jt.program_id(0)
    o[i, :] = jnp.sum(jnp.where((i + jnp.arange(w) < x.shape[0])[:, None], x[jt.ds(i, w), :], 0.0), 0)


def test_a_band_counts_in_all_events_that_need_it(on_hopper):
    """More of them than its row of the plan has words for."""
    f = lambda x: [windows(x, w=w) for w in (1, 2, 3)]
    (region,) = _cut(jax.make_jaxpr(lambda x: f(windows(x, w=1)))(X)).regions
    wired, schedule = primitive.scheduled(region, primitive.Options(cores=8))
    g = schedule.graph
    assert max(sum(b in needs for needs in g.events) for b in range(len(g.bands))) > len(SIGNALS)
    have = dict(zip(region.inputs, [X], strict=True))
    results = GraphSite(schedule).call([array_of(x, have) for x in wired.operands])
    for r, w in zip(wired.results, (1, 2, 3), strict=True):
        want = np.stack([X[i : i + w].sum(0) for i in range(len(X))])
        np.testing.assert_allclose(results[r], want, 1e-5, 1e-5)
