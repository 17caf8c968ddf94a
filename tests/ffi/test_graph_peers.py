"""Execution graphs over two GPUs: sums over devices inside of one launch on each."""

from __future__ import annotations

import time

import graph_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_devices_step import C, D, X, Y, expected, near, step
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile.execution import primitive

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < D:
        pytest.skip(f"{len(jax.devices())} GPU: two are needed")
    return jax.sharding.Mesh(np.array(jax.devices()[:D]), ("x",))


@pytest.fixture
def over(mesh):
    def put(f, **options):
        run = lambda *xs: [o[None] for o in f(*(x[0] for x in xs))]
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), **options))

    return put


def test_it_is_one_launch_without_a_collective_of_xla(over):
    text = over(jt.graph(step)).lower(C, X, Y).compile().as_text()
    assert "all-reduce" not in text and text.count('custom_call_target="jtile_cuda"') == 1


@pytest.mark.parametrize("cores", [None, 5, 1])
def test_sums_inside_of_a_launch(over, cores):
    f = over(jt.graph(step, cores=cores))
    for k in range(20):
        near(f(C + k, X * k, Y - k), expected(C + k, X * k, Y - k))


def two_sums(x, y):
    """Nothing makes a device wait for the reads of the other before it writes its part of the next call."""
    return [programs.added(jax.lax.psum(programs.doubled(x), "x"), y), jax.lax.psum(y, "x")]


def test_a_thousand_calls_in_a_row(over):
    """In a loop that XLA may record, and from the host."""
    graph = jt.graph(two_sums, cores=4)

    def looped(x, y):
        def body(_, state):
            a, b = graph(*state)
            return a * np.float32(0.2), b * np.float32(0.2) + state[0] * np.float32(0.1)

        return jax.lax.fori_loop(0, 500, body, (x, y))

    f, got, want = over(looped), None, (X, Y)
    for _ in range(500):
        a, b = (2 * want[0]).sum(0) + want[1], np.broadcast_to(want[1].sum(0), want[1].shape)
        want = a * np.float32(0.2), b * np.float32(0.2) + want[0] * np.float32(0.1)
    for _ in range(2):
        got = f(X, Y)
        assert all(np.linalg.norm(g - w) <= 1e-3 * np.linalg.norm(w) for g, w in zip(got, want, strict=True))
    single = over(graph)
    for k in range(300):
        near(single(X + k, Y), [(2 * (X + k)).sum(0) + Y, np.broadcast_to(Y.sum(0), Y.shape)])


@pytest.mark.parametrize(("shape", "dtype"), [((64, 4096), "bfloat16"), ((1000, 9), "float32"), ((1, 4096), "float16")])
def test_sums_of_many_programs(over, shape, dtype):
    x = np.random.default_rng(0).standard_normal((D, *shape)).astype(jnp.dtype(dtype))
    f = lambda x: [programs.added(jax.lax.psum(programs.doubled(x, b=8), "x"), x)]
    wide = x.astype(np.float32)
    want = 2 * wide.sum(0) + wide
    for _ in range(5):
        (got,) = over(jt.graph(f))(x)
        assert np.linalg.norm(np.asarray(got, np.float32) - want) <= 1e-2 * np.linalg.norm(want)


def test_the_same_bits_on_both(over):
    f = over(jt.graph(lambda x: [jax.lax.psum(programs.doubled(programs.doubled(x)), "x")]))
    (got,) = f(X)
    np.testing.assert_array_equal(got[0], got[1])


def test_a_device_that_does_not_come_is_an_error_and_the_next_call_is_as_new(over):
    """It sleeps before its launch, longer than the other waits."""

    def asleep(x, y):
        def sleep(x):
            time.sleep(2)
            return x

        late = lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        x = jax.lax.cond(jax.lax.axis_index("x") == 1, late, lambda x: x, x)
        return jt.graph(two_sums, cores=4)(x, y)

    with jt.config(debug=True, timeout=0.5):  # each call is waited for
        program = over(asleep, check_vma=False).lower(X, Y).compile()
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"waited 0\.5 s for "):
                jax.block_until_ready(program(X, Y))
    near(over(jt.graph(two_sums, cores=4))(X, Y), [(2 * X).sum(0) + Y, np.broadcast_to(Y.sum(0), Y.shape)])
    again = over(lambda x: [jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)], check_vma=False)
    np.testing.assert_array_equal(again(X)[0], X)  # in place of tokens that have failed stand those of this one
    jax.effects_barrier()


def test_its_timeline_keeps_the_edges(over, mesh):
    found = []

    def traced(x, y):
        found.append(jt.graph(two_sums, cores=4).explain(x, y))
        region = found[0].cut.regions[0]
        have = dict(zip(found[0].cut.inputs, (x, y), strict=True))
        options = primitive.Options(cores=4, traced=True)
        return [primitive.bind(region, [have[v] for v in region.inputs], options)[-1]]

    call = over(traced)
    jax.block_until_ready(call(X, Y))
    (rows,) = call(X, Y)
    for own in np.asarray(rows):
        line = primitive.timeline_of(found[0].schedules[0], own)
        entry = {e.band: e for e in line.entries}
        bands = line.graph.bands
        assert all(entry[n].end <= entry[k].start for k, b in enumerate(bands) for n in b.needs)
        assert all(entry[n].end <= entry[k].start + 1000 for k, b in enumerate(bands) for n in b.everywhere)
