"""What graphs of several host devices do; `test_graph_devices.py` runs these checks in a process of its own."""

from __future__ import annotations

import json
import re

import graph_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_devices_step import C, D, X, Y, expected, near, step
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile.execution import primitive
from jtile.execution.primitive import attributes_of


def on_devices(f):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:D]), ("x",))
    run = lambda *xs: [o[None] for o in f(*(x[0] for x in xs))]
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x")))


def explained(f, *args):
    """What a graph explains inside of `shard_map`."""
    found = []
    on_devices(lambda *xs: found.append(jt.graph(f, cores=2).explain(*xs)) or f(*xs))(*args)
    return found[0]


def check_a_graph_of_one_device_names_what_it_needs_of_all():
    g = explained(step, C, X, Y).graphs[0]
    assert g.devices == D and len(g.tasks) == 8 and "of each of 2 devices" in str(g)
    assert "task 1: all_reduce(1,) on %3 of 0, %3 of 1, %4" in str(g) and "behind 1 of all devices" in str(g)
    assert "jtile_cpu_graph_devices" in on_devices(jt.graph(step, cores=2)).lower(C, X, Y).as_text()


def check_host_devices_run_it():
    f = on_devices(jt.graph(step, cores=2))
    for _ in range(50):
        near(f(C, X, Y), expected(C, X, Y))
    small = [np.asarray(a).astype("bfloat16") for a in (C, X, Y)]
    for got, want in zip(f(*small), expected(*(a.astype(np.float32) for a in small)), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float32) - want) <= 0.02 * np.linalg.norm(want)


def check_many_programs_of_a_sum_start_as_soon_as_their_part_is_there():
    """Sums of arrays in several bands, on four devices; the last rows of one overhang."""
    wide = np.random.default_rng(1).standard_normal((4, 2000, 9)).astype(np.float32)
    f = lambda x: [programs.added(jax.lax.psum(programs.doubled(x, b=40), "x"), x)]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    run = lambda f: jax.jit(jax.shard_map(lambda x: f(x[0])[0][None], mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    for _ in range(5):
        near([run(jt.graph(f, cores=4))(wide)], [2 * wide.sum(0) + wide])


def check_a_sum_of_operands_waits_until_all_devices_have_begun():
    """No band makes what it reads, so that no event says that the other devices' arrays are there."""
    f = on_devices(jt.graph(lambda x, y: [programs.added(jax.lax.psum(x, "x"), programs.doubled(y))], cores=2))
    for _ in range(50):
        near(f(X, Y), [X.sum(0) + 2 * Y])


def check_gradients_go_through_the_function_itself():
    loss = lambda f: lambda x, y: jnp.sum(f(y, x, y)[1] ** 2)
    grads = [on_devices(lambda x, y, f=f: [jax.grad(loss(f))(x, y)])(X, Y) for f in (jt.graph(step), step)]
    near(*grads)


def check_other_work_comes_while_other_devices_are_waited_for():
    def f(x, y):
        total = jax.lax.psum(programs.doubled(x), "x")
        for _ in range(3):
            y = programs.doubled(y)
        return programs.added(total, y), y

    (schedule,) = explained(f, X, Y).schedules
    names = [schedule.graph.tasks[schedule.graph.bands[b].task].kernel.name for b in schedule.order]
    assert names[-2:] == ["all_reduce", "added"] and names.count("doubled") == 4


def check_a_device_that_does_not_come_is_an_error():
    """The call of one device alone, by the custom call itself."""
    (schedule,) = explained(step, C, X, Y).schedules
    attributes, size = attributes_of(schedule, static=False)
    memories = schedule.graph.memories
    arrays = {m.operand: np.zeros(m.shape, m.dtype) for m in memories if m.operand is not None}
    given = [arrays[k] for k in range(len(arrays))]
    outs = sorted((m.result, m) for m in memories if m.result is not None)
    kinds = [jax.ShapeDtypeStruct(m.shape, m.dtype) for _, m in outs] + [jax.ShapeDtypeStruct((size,), np.uint8)]
    numbers = {"operands": len(given), "results": len(outs), "traced": 0, "timeout": 200}
    attributes |= {k: np.int64(n) for k, n in numbers.items()}
    attributes |= {"devices": json.dumps({"axes": [["x", D]], "signals": []})}
    aliases = {m.operand: m.result for m in memories if None not in (m.operand, m.result)}
    call = jax.ffi.ffi_call("jtile_cpu_graph_devices", kinds, input_output_aliases=aliases)
    error = "on device (x=1): waited 0.2 s for a band of all_reduce; device (x=0) has not begun the call"
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(error)):
        jax.block_until_ready(jax.jit(lambda *xs: call(*xs, np.array([0, 1], np.int32), **attributes))(*given))


def check_what_stays_out_of_graphs_says_why():
    f = lambda x: [jax.lax.psum(programs.doubled(programs.doubled(x)).astype(jnp.int8), "x")]
    assert "it adds up int8, and tasks add up numbers of 16 bits and more" in str(explained(f, X))


def check_gpus_add_up_in_the_launch_where_they_reach_each_other():
    with jt.config(arch="sm_90"), pytest.MonkeyPatch.context() as patch:
        f = on_devices(jt.graph(step, cores=3))
        for reach in (True, False):
            patch.setattr(primitive, "can_talk", lambda devices, reach=reach: reach)
            jax.clear_caches()
            text = f.trace(C, X, Y).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("stablehlo.all_reduce") == (0 if reach else 2)
            assert ("groups = dense<[0, 1]>" in text) == reach
