"""Execution graphs whose tasks talk to other devices: sums over `shard_map` as tasks, on host devices of the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import devices
import graph_programs as programs
import jax
import numpy as np
import pytest
from graph_devices_step import C, D, X, Y, expected, near, step
from random_graphs import DEVICES, random_world

import jtile as jt
from jtile.errors import RaceError, UnsupportedError
from jtile.execution.interpret import run_graph
from jtile.execution.schedule import simulate

CHECKS = Path(__file__).with_name("graph_devices_checks.py")


@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_on_host_devices(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed


def joint(f, *args):
    """The graph of all devices, as the interpreter runs it."""
    found = []
    jt.graph(f, cores=2).interpret(*args, devices={"x": D}, change=lambda g: found.append(g) or g)
    return found


def test_a_sum_over_devices_is_a_task():
    (g,) = joint(step, C, X, Y)
    assert [t.kernel.name for t in g.tasks[2:4]] == ["all_reduce"] * 2 and [t.device for t in g.tasks[2:4]] == [0, 1]
    text = str(g)
    assert "task 3: all_reduce(1,) on %3, %12, %13" in text and "band 5: programs 0:8, 0.1 us behind 2, 3" in text
    for seed in range(3):
        near(jt.graph(step, cores=2).interpret(C, X, Y, devices={"x": D}, seed=seed), expected(C, X, Y))


def test_every_missing_edge_is_found_those_between_devices_too():
    (g,) = joint(step, C, X, Y)
    edges = [(k, n) for k, b in enumerate(g.bands) for n in b.needs]
    assert sum(g.tasks[g.bands[k].task].device != g.tasks[g.bands[n].task].device for k, n in edges) == 6
    for seed, edge in enumerate(edges):
        with pytest.raises(RaceError, match=r"an edge is missing: task .* of device"):
            jt.graph(step, cores=2).interpret(
                C, X, Y, devices={"x": D}, seed=seed, change=lambda g, edge=edge: g.without(edge)
            )


def test_random_graphs_of_two_devices():
    """Results, missing edges, and that what one device waits for holds all edges of the graph of both."""
    across = 0
    for seed in range(40):
        whole, own, operands, want = random_world(seed)
        for got, x in zip(run_graph(whole, operands, seed), want, strict=True):
            np.testing.assert_array_equal(got, x)
        edges = [(k, n) for k, b in enumerate(whole.bands) for n in b.needs]
        far = [e for e in edges if len({whole.tasks[whole.bands[k].task].device for k in e}) == 2]
        across += len(far)
        if edges:
            with pytest.raises(RaceError, match="an edge is missing"):
                run_graph(whole.without(random.Random(seed).choice(far or edges)), operands, seed)
        number = {(b.task, b.begin): k for k, b in enumerate(own.bands)}
        local = [number[b.task // DEVICES, b.begin] for b in whole.bands]
        for k, n in edges:
            band = own.bands[local[k]]
            assert local[n] in (band.everywhere if (k, n) in far else band.needs + band.everywhere)
        assert simulate(own).timeline.length > 0
    assert across > 50


def test_other_operations_that_talk_are_no_tasks():
    f = lambda x: programs.doubled(jax.lax.all_gather(programs.doubled(programs.doubled(x)), "x").reshape(-1, 6)[:8])
    with pytest.raises(UnsupportedError, match="all_gather talks to other devices, and is no task"):
        jt.graph(f).interpret(X, devices={"x": D})
