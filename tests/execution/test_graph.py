"""`jt.graph`: kernels in one launch give what they give one after another, natively and by the interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_programs import X, Y, added, appended, doubled, expected, step
from jax import export

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError, RaceError, UnsupportedError
from jtile.execution.primitive import attributes_of
from jtile.fusion import costs

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(autouse=True)
def on_a_cpu():
    """Beside a GPU, too: `test_persistent.py` is about graphs there."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a), b, 1e-5, 1e-5)


def test_one_launch_gives_what_its_kernels_give():
    g = jt.graph(step, cores=2)
    close(g(X, X, Y), expected(X, X, Y))
    close(g(X, X, Y), expected(X, X, Y))  # the memory of the first call serves the second
    for seed in range(3):
        close(g.interpret(X, X, Y, seed=seed), expected(X, X, Y))
    text, bands = str(g.explain(X, X, Y)), (7, 1) if jt.platform() == "cpu" else (12, 2)
    head = "1 launches, 1 equations by XLA\n\nXLA: float32[8,6] = sin\n\nlaunch: 7 tasks, "
    assert text.startswith(f"{head}{bands[0]} bands, ")
    assert f"\n  2: appended, 8 programs in {bands[1]} bands" in text and ", behind 0, 1\n" in text


def test_an_edge_that_misses_is_found_in_a_function():
    g = jt.graph(step, cores=2)

    def wrong(graph):
        """The update need not wait for who reads the old cache."""
        late, early = (next(k for k, b in enumerate(graph.bands) if b.task == t) for t in (2, 1))
        return graph.without((late, early))

    with pytest.raises(RaceError, match=r"task 2 \(appended\), programs 0:\d writes element .* task 1 \(summed\)"):
        for seed in range(4):  # in an order in which the reader comes second, it reads what is not its own
            g.interpret(X, X, Y, seed=seed, change=wrong)


def test_an_update_that_others_come_too_late_for_is_no_task():
    def late(cache, x):
        new = appended(cache, doubled(x))
        return new, added(cache, doubled(new))  # the old cache, behind the new one

    g = jt.graph(late)
    assert "kernel appended: it updates an operand in place that others read later" in str(g.explain(X, Y))
    close(g(X, Y), (X + 2 * Y, X + 2 * (X + 2 * Y)))


@jt.kernel(out_type=lambda c, *_: jt.like(c), grid=lambda c, *_: c.shape[0], alias={"c": "o"})
def mirrored(c, x, o):
    i = jt.program_id(0)
    o[i, :] = c[i, :] + x[x.shape[0] - 1 - i, :]


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.reshape(6, 8).reshape(8, 6)], ids=["array", "view"])
def test_an_update_of_an_array_that_the_kernel_has_twice_is_no_task(view):
    """Program 7 adds row 0 to row 7, not what program 0 has written over it."""

    def twice(x):
        a = doubled(x)
        return doubled(mirrored(a, view(a)))

    g = jt.graph(twice)
    assert "or it reads by another name" in str(g.explain(X))
    close([g(X), g.interpret(X), jax.jit(g, donate_argnums=0)(jnp.array(X))], [4 * (X + X[::-1])] * 3)


def test_derivatives_and_vmaps_are_those_of_the_function(monkeypatch):
    """And array programs become tasks, too."""
    monkeypatch.setattr(costs, "LEAST", 0)

    def f(x, w):
        return jnp.tanh(doubled(x) * w + x)

    g = jt.graph(f, assign="static")
    assert "1 equations" not in str(g.explain(X, Y)) and "2 tasks" in str(g.explain(X, Y))
    loss = lambda x: g(x, Y).sum()
    value = np.tanh(2 * X * Y + X)
    together = jax.jit(lambda x: (g(x, Y), jax.grad(loss)(x), jax.vmap(g, (0, None))(jnp.stack([x, x]), Y)))
    close(together(X), (value, (1 - value**2) * (2 * Y + 1), np.stack([value, value])))


def test_a_stored_program_has_its_graph():
    g = jax.jit(jt.graph(step, cores=2))
    stored = export.export(g, platforms=["cpu"], disabled_checks=jt.export_checks())(X, X, Y).serialize()
    close(export.deserialize(stored).call(X, X, Y), expected(X, X, Y))


def test_what_the_cores_did_is_written_down():
    (line,) = jt.graph(step, cores=2).timeline(X, X, Y)
    entry = {e.band: e for e in line.entries}
    assert line.measured and sorted(entry) == list(range(len(line.graph.bands)))
    for k, band in enumerate(line.graph.bands):
        assert all(entry[n].end <= entry[k].start for n in band.needs)


def test_what_cannot_be_a_graph_is_said():
    with pytest.raises(KernelTypeError, match="takes a function of arrays, got 3"):
        jt.graph(3)
    with pytest.raises(KernelValueError, match="'dynamic' or 'static', got 'any'"):
        jt.graph(step, assign="any")
    with pytest.raises(KernelValueError, match="cores is an int of at least 1"):
        jt.graph(cores=0)
    with (
        jt.config(arch="gfx942"),
        pytest.raises(UnsupportedError, match="runs no execution graphs, only CPUs and NVIDIA"),
    ):
        jt.graph(step)(X, X, Y)
    assert repr(jt.graph(step)) == "<jtile.Graphed step>"


def test_plans_that_would_not_end_are_refused():
    """The runtime of CPUs checks what it is given: a program may come from a file."""
    with jax.default_device(jax.devices("cpu")[0]):
        _refused_plans()


def _refused_plans():
    schedule = jt.graph(step, cores=2).explain(X, X, Y).schedules[0]
    memories = schedule.graph.memories
    numbers = {"operands": sum(m.operand is not None for m in memories), "traced": 0}
    numbers["results"] = 1 + max(m.result or 0 for m in memories)
    given = {k: np.int64(n) for k, n in numbers.items()} | attributes_of(schedule, static=False)[0]
    plan = given.pop("plan")
    backwards = attributes_of(dataclasses.replace(schedule, order=schedule.order[::-1]), static=False)[0]["plan"]
    wrong = {
        "made by another version": np.concatenate([[9], plan[1:]]),
        "ends too early": plan[:1],
        "goes on behind its end": np.append(plan, 0),
        "has -1 where a number below": np.concatenate([plan[:2], [-1], plan[3:]]),
        "waits for a later one": backwards,
        "in no queue, or in two": np.concatenate([plan[:-1], plan[-2:-1]]),
    }
    for text, numbers in wrong.items():
        call = jax.ffi.ffi_call("jtile_cpu_graph", [jax.ShapeDtypeStruct((1,), np.uint8)])
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.jit(lambda numbers=numbers, call=call: call(plan=numbers, **given))()
