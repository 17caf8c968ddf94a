"""The measured search: what it finds is right and fast, what is wrong or broken is dropped, an interrupt keeps."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tunable as kernels

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.tune import device, measure, search
from jtile.tune.store import read, store

X = kernels.X


def test_the_fastest_candidate_wins_and_is_used():
    slow = kernels.slow_kernel({"turns": [2, 300, 600]})
    x = jnp.ones((64, 256))
    f = jax.jit(lambda x: slow(x) + 1.0)
    np.testing.assert_array_equal(f(x), x + 1)
    report = jt.tune(f, x, progress=False)
    (found,) = report.kernels
    assert found.best.config == {"turns": 2}
    assert found.speedup > 2
    assert [c.state for c in found.candidates].count("measured") >= 2
    assert {c.state for c in found.candidates} <= {"measured", "same", "pruned"}
    np.testing.assert_array_equal(f(x), x + 1)
    (program,) = programs(f, x)
    assert dict(program.meta)["turns"] == 2
    assert "slow" in str(report)
    assert read(Path(report.path))[1] == {found.name: found.best}


def programs(f, *args):
    from jtile.tune.programs import trace

    return list(trace(f, *args)[0])


def test_wrong_and_failing_candidates_are_dropped_and_reported():
    slow = kernels.slow_kernel([{"turns": 2}, {"turns": 1}, {"turns": "many"}])
    (found,) = jt.tune(slow, jnp.ones((4, 256)), progress=False).kernels
    state = {c.config.get("turns"): c for c in found.candidates}
    assert state[1].state == "wrong"
    assert "tolerance" in state[1].detail
    assert state["many"].state == "failed"
    assert found.best.config["turns"] in (2, 600)


def test_candidates_that_the_authors_own_code_refuses_are_reported():
    (found,) = jt.tune(kernels.choosy_kernel(), X, progress=False).kernels
    failed = [c for c in found.candidates if c.state == "failed"]
    assert [(c.config, c.detail) for c in failed] == [({"bm": 48}, "AssertionError: tiles of 48")]
    assert found.best is not None


def test_a_space_that_takes_long_to_trace_keeps_to_the_limit(monkeypatch):
    """By a clock that goes on only where a candidate's time is predicted, 0.05 s each: 999 of them would take 50 s."""
    now, predicted = [0.0], []
    monkeypatch.setattr("jtile.tune.search.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("jtile.tune.api.time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def predict(*_):
        now[0] += 0.05
        predicted.append(now[0])
        return 1.0 if len(predicted) < 4 else 1e6  # few are compiled

    monkeypatch.setattr("jtile.tune.prune.predicted_us", predict)
    many = kernels.slow_kernel({"turns": list(range(2, 2000, 2))})
    (found,) = jt.tune(many, jnp.ones((4, 256)), progress=False, time_limit=4).kernels
    assert len(predicted) <= search.TRACING * 4 / 0.05 + 1
    assert found.best is not None
    assert sum(c.state == "late" for c in found.candidates) > 800


@pytest.mark.parametrize("limit", ["5", -1, float("nan"), [5], 1j])
def test_a_time_limit_that_is_none(limit):
    with pytest.raises(KernelValueError, match="number of seconds"):
        jt.tune(kernels.double_kernel(), X, time_limit=limit)


def test_what_is_no_function_is_refused():
    with pytest.raises(KernelTypeError, match="take a function"):
        jt.tune(X)


def test_data_that_are_no_function_are_refused():
    with pytest.raises(KernelTypeError, match="autotune: data is 5: expected a function"):
        kernels.double_kernel(data=5)


def test_data_that_are_no_arrays_are_refused():
    with pytest.raises(KernelValueError, match=r"gives arrays 1.0, expected float32\[64\]"):
        jt.tune(kernels.double_kernel(data=lambda x, **_: 1.0), X, progress=False)


def test_an_interrupt_keeps_what_was_found(monkeypatch, folder):
    real, rounds = measure.Runner.round, []

    def round(self, name, run):
        if len(rounds) == 5:
            raise KeyboardInterrupt
        rounds.append(name)
        real(self, name, run)

    monkeypatch.setattr(measure.Runner, "round", round)
    double = kernels.double_kernel()
    with pytest.raises(KeyboardInterrupt):
        jt.tune(double, X, progress=False)
    (path,) = folder.glob("*.json")
    (entry,) = read(path)[1].values()
    assert entry.config["bm"] in (2, 4, 16, 64)


def test_no_time_no_search():
    report = jt.tune(kernels.double_kernel(), X, time_limit=0.0, progress=False)
    assert len(report.skipped) == 1
    assert not report.kernels
    (found,) = jt.tune(kernels.double_kernel(), X, time_limit=0.001, progress=False).kernels
    assert {c.state for c in found.candidates} <= {"measured", "late", "pruned"}
    assert found.best is not None


def test_kernels_without_a_space_are_named():
    plain = jt.kernel(out_type=lambda x: jt.like(x), grid=())(lambda x, y: y.__setitem__(..., x[...]))
    report = jt.tune(lambda x: jnp.sin(plain(x)), X, progress=False)
    assert (report.kernels, len(report.fixed)) == ((), 1)


def test_every_kernel_of_a_function_once(monkeypatch):
    double = kernels.double_kernel()
    real, seen = search.search, []
    short = {"time_limit": 1.0}  # of each search: where all have one limit, a busy machine leaves the last ones out
    found = lambda call, **options: (seen.append(call), real(call, **(options | short)))[1]
    monkeypatch.setattr("jtile.tune.api.search", found)

    @jax.jit
    def f(x):
        y, _ = jax.lax.scan(lambda c, _: (double(c), None), x, length=3)
        return jax.vmap(double)(y.reshape(2, 32)).sum() + double(x, plus=1.0).sum() + double(x).sum()

    jt.tune(f, X, progress=False)
    assert sorted(c.name.split(" ", 1)[1].partition(" precision")[0] for c in seen) == [
        "x=float32[32] plus=0.0", "x=float32[64] plus=0.0", "x=float32[64] plus=1.0",
    ]  # fmt: skip


def test_data_of_the_author_is_measured_with():
    made = []

    def data(x, **meta):
        made.append(meta)
        return (jnp.full(x.shape, 7.0, x.dtype),)

    double = kernels.double_kernel(data=data)
    jt.tune(double, X, progress=False, time_limit=600.0)
    assert made == [{"bm": 2, "plus": 0.0}]
    wrong = kernels.double_kernel(data=lambda x, **_: (jnp.zeros(3),))
    with pytest.raises(KernelValueError, match="data="):
        jt.tune(wrong, X, progress=False)


def test_random_arguments_are_as_asked():
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "int4", "bool"):
        x = measure.random_array(jax.ShapeDtypeStruct((16, 16), jnp.dtype(dtype)), 0)
        assert (x.shape, x.dtype.name) == ((16, 16), dtype)
    sets = measure.argument_sets([jax.ShapeDtypeStruct((256,), jnp.float32)], [], cache=4096)
    assert len(sets) == 9  # twice the cache, and one
    assert not np.array_equal(sets[0][0], sets[1][0])


def test_short_kernels_on_a_gpu_are_called_often_in_one_program():
    out = [jax.ShapeDtypeStruct((1 << 20,), jnp.float32)]
    assert measure.rounds_of([[X]], out, cache=0, predicted_us=1) == 1
    assert measure.rounds_of([[X]] * 4, out, cache=1 << 20, predicted_us=100) == 5
    assert measure.rounds_of([[X]] * 4, out, cache=1 << 20, predicted_us=0) == 32
    assert measure.rounds_of([[X]] * 4, out * 256, cache=1 << 20, predicted_us=0) == 2
    bound = types.SimpleNamespace(run=lambda arrays: (jnp.sort(arrays[0]),))
    program = measure.program_of(bound, [[X], [2 * X]], rounds=3)
    assert program.as_text().count(" sort(") == 6
    assert np.array_equal(program([[X], [2 * X]])[3][0], jnp.sort(2 * X))


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        (jnp.ones(4), jnp.ones(4) * (1 + 1e-6), True),
        (jnp.ones(4), jnp.ones(4) * 1.01, False),
        (jnp.array([jnp.nan, 1.0]), jnp.array([jnp.nan, 1.0]), True),
        (jnp.array([jnp.nan, 1.0]), jnp.array([1.0, 1.0]), False),
        (jnp.array([jnp.inf]), jnp.array([1.0]), False),
        (jnp.array([1, 2]), jnp.array([1, 3]), False),
        (jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.bfloat16) * 1.01, True),
    ],
)
def test_difference(got, expected, equal):
    assert (measure.difference([got], [expected]) <= 1) is equal


def test_tune_refuses_a_trace_and_another_device():
    with pytest.raises(KernelTypeError, match="outside of jax"):
        jax.jit(lambda x: jt.tune(kernels.double_kernel(), x))(X)
    with jt.config(arch="gfx90a"), pytest.raises(KernelValueError, match="gfx90a"):
        jt.tune(kernels.double_kernel(), X)


def test_winners_are_of_this_device_only():
    double = kernels.double_kernel()
    jt.tune(double, X, progress=False, time_limit=600.0)
    (name,) = store.entries(device.kind())
    assert name.startswith("double#")
    assert store.lookup("another", name) is None
