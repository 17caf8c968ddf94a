"""Execution graphs over several GPUs: sums over devices as tasks of one persistent launch on each."""

from __future__ import annotations

import json

import graph_programs as programs
import jax
import numpy as np
import pytest
from graph_devices_step import C, D, expected, near, step
from graph_devices_step import X as X2
from graph_devices_step import Y as Y2
from graph_worlds import World, cut_of, random_program

import jtile as jt
from jtile.errors import RaceError
from jtile.execution import persistent
from jtile.lowering.here import target
from jtile.lowering.triton import task_devices
from jtile.lowering.triton.emit_tasks import STARTS, row_words

rng = np.random.default_rng(0)
X, Y = (rng.standard_normal((4, 8, 6)).astype(np.float32) for _ in range(2))


@pytest.fixture(autouse=True)
def on_hopper():
    with jt.config(arch="sm_90"):
        yield


def two_sums(axes):
    """One of what a kernel made, and one of an operand, which is copied to where other devices reach it."""
    return lambda x, y: [programs.added(jax.lax.psum(programs.doubled(x), axes), y), jax.lax.psum(y, axes)]


def of_two_sums(x, y):
    return [(2 * x).sum(0) + y, np.broadcast_to(y.sum(0), y.shape)]


def test_a_launch_with_sums_compiles_to_one_image():
    world = World(step, (C, X2, Y2), {"x": D}, cores=3)
    launch = persistent.launch_of(world.schedule, len(world.wired.operands), traced=True)
    artifact = persistent.image(world.schedule.graph, launch, target())
    devices = json.loads(artifact.launch["record"])["devices"]
    assert artifact.image[:4] == b"\x7fELF" and devices["axes"] == [["x", 2]] and devices["waits"]
    assert devices["bytes"] - devices["memory"] == 2 * launch.shape.far.bytes == 2 * 512  # two arrays in two sets
    assert launch.inner < persistent.launch_of(_alone(), 2, traced=False).inner + 1024


def _alone():
    f = lambda x, y: programs.added(programs.doubled(programs.doubled(x)), y)
    return jt.graph(f, cores=3).explain(X[0], Y[0]).schedules[0]


@pytest.mark.parametrize("devices", [{"x": 2}, {"a": 2, "x": 2}, {"x": 1}])
def test_launches_in_a_row(devices):
    """Devices are at different launches at times; what one has sent must not be taken for what comes next."""
    n, axes = int(np.prod([*devices.values()])), tuple(devices)
    world = World(two_sums(axes), (X[:n], Y[:n]), devices, cores=1) if n > 1 else None
    if world is None:  # one device is none to talk to
        found = jt.graph(two_sums(axes), cores=1).interpret(X[:1], Y[:1], devices=devices)
        return near(found, of_two_sums(X[:1], Y[:1]))
    calls = [(X[:n] + k, Y[:n] - k) for k in range(4)]
    for seed in range(2):
        for got, args in zip(world.run(calls, seed), calls, strict=True):
            near(got, of_two_sums(*args))


def test_one_set_of_memory_is_too_few(monkeypatch):
    """The evaluator sees what the two sets are for."""
    monkeypatch.setattr(task_devices, "SETS", 1)
    world = World(two_sums(("x",)), (X, Y), {"x": 4}, cores=1)
    calls = [(X + k, Y - k) for k in range(4)]
    wrong = [
        not np.allclose(a, b, 1e-5, 1e-5)
        for seed in range(4)
        for got, args in zip(world.run(calls, seed), calls, strict=True)
        for a, b in zip(got, of_two_sums(*args), strict=True)
    ]
    assert any(wrong)


def test_an_array_that_is_updated_while_others_read_it():
    world = World(step, (C, X2, Y2), {"x": D}, cores=3)
    calls = [(C + k, X2 * (1 + k), Y2 - k) for k in range(2)]
    for got, args in zip(world.run(calls), calls, strict=True):
        near(got, expected(*args))


def test_many_programs_of_a_sum():
    """Each starts when its part has come; the last ones overhang. bfloat16 is added up in float32."""
    wide = rng.standard_normal((2, 1000, 9)).astype("bfloat16")
    f = lambda x: [programs.added(jax.lax.psum(programs.doubled(x, b=40), "x"), x)]
    world = World(f, (wide,), {"x": 2}, cores=4)
    sums = [t for t in world.schedule.graph.tasks if t.kernel.name == "all_reduce"]
    assert [t.programs for t in sums] == [5]
    ((got,),) = world.run([(wide,)])
    want = 2 * wide.astype(np.float32).sum(0) + wide.astype(np.float32)
    assert np.linalg.norm(got.astype(np.float32) - want) <= 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed):
    f, by_numpy = random_program(seed)
    x, y = X[:2], Y[:2]
    with np.errstate(all="ignore"):
        want = by_numpy(x, y)
    for got, by in zip(jt.graph(f, cores=2).interpret(x, y, devices={"x": 2}, seed=seed), want, strict=True):
        np.testing.assert_allclose(got, by, 1e-4, 1e-4)
    (found,) = World(f, (x, y), {"x": 2}, cores=2).run([(x, y)], seed)
    for got, by in zip(found, want, strict=True):
        np.testing.assert_allclose(got, by, 1e-4, 1e-4)


def test_every_missing_edge_is_found_those_of_copies_too():
    found = []
    graph = jt.graph(two_sums(("x",)), cores=2)
    graph.interpret(X[:2], Y[:2], devices={"x": 2}, change=lambda g: found.append(g) or g)
    (g,) = found
    edges = [(k, n) for k, b in enumerate(g.bands) for n in b.needs]
    names = {g.tasks[g.bands[n].task].kernel.name for _, n in edges}
    assert "copied" in names and len(edges) >= 8
    for seed, edge in enumerate(edges):
        with pytest.raises(RaceError, match="an edge is missing"):
            graph.interpret(X[:2], Y[:2], devices={"x": 2}, seed=seed, change=lambda g, e=edge: g.without(e))


def test_a_meeting_that_does_not_come_is_reported_and_ends_all_devices():
    world = World(two_sums(("x",)), (X[:2], Y[:2]), {"x": 2}, cores=2)
    plan, names = world.site.launch.plan.copy(), row_words(far=True)
    g = world.schedule.graph
    width = len(names) + max(len(task.memories) for task in g.tasks)
    rows = plan[STARTS + g.cores + 1 :][: len(g.bands) * width].reshape(-1, width)
    rows[:, names.index("all")] += rows[:, names.index("meeting")] >= 0
    world.run([(X[:2], Y[:2])], plan=plan)
    facts = world.site.facts
    assert [name for name, _ in facts["signals"]] == ["event", "meeting"]
    told = [report for report in world.site.reports if report[0]]
    assert told and all(report[0] == 1 and report[5] < report[4] for report in told)


def test_what_stays_out_of_a_launch_says_why():
    def why(shape, devices):
        f = lambda x: jax.lax.psum(programs.doubled(programs.doubled(x)), "x")
        return [*cut_of(f, (np.broadcast_to(np.float32(0), (1, *shape)),), {"x": devices}).why.values()]

    large = 1 << 10, 1 << 12
    assert why((8, 6), 33) == ["it adds up over more than 32 devices"] and why((8, 6), 32) == why(large, 2) == []
    assert why(large, 4) == ["each device would read 48 MiB of others, and XLA's sum takes turns"]
