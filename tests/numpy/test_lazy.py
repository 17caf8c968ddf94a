"""What is pending, what is shared, and what other libraries make of arrays of `jtile.numpy`."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy
import pytest

import jtile.numpy as np
from jtile.errors import KernelTypeError, KernelValueError
from jtile.numpy import _evaluate, _record

LARGE = 40_000  # elements: more than are computed at once


@pytest.fixture
def programs(monkeypatch):
    """The programs that are compiled in a test, by NumPy's names of their operations; nothing is compiled in truth."""
    found = []

    def compiled(walk, given):
        found.append([op.name for op, _, _ in walk.steps if op is not None])
        return walk

    monkeypatch.setattr(_evaluate, "compiled", compiled)
    with np.execution("compiled"):
        yield found


def pending():
    return len(_record._PENDING.nodes)


def test_nothing_is_computed_before_it_is_looked_at():
    x = np.zeros(LARGE) + 1
    y = (x * 2).sum()
    assert x._cell.node.op is not None and y._cell.node.op is not None
    assert float(y) == 2 * LARGE and pending() == 0
    assert x._cell.node.op is None  # what the script holds is computed with it, by one program


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_stencils_of_64_bits_are_programs_of_xla(dtype, monkeypatch):
    left = []
    monkeypatch.setattr(_evaluate, "compiled", lambda walk, given: left.append(walk.by_xla) or walk)
    with np.execution("compiled"):
        x = np.ones((200, 200), dtype)
        for _ in range(4):
            x = np.roll(x, 1, 0) + np.roll(x, 1, 1) - x
        assert x.sum() == x.size
    assert left == [dtype == "float64"]


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_divisions_of_integers_are_programs_of_xla(dtype, monkeypatch):
    """Integers among the numbers of a script divide nothing."""
    left = []
    monkeypatch.setattr(_evaluate, "compiled", lambda walk, given: left.append(walk.by_xla) or walk)
    with np.execution("compiled"):
        x = np.ones(LARGE, dtype) * 8
        assert ((x + 5) % 6 + x[::-1]).sum() == 9 * LARGE
    assert left == [dtype == "int64"]


def test_small_arrays_are_computed_at_once():
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        x = np.ones(3) / 0
    assert x._cell.node.op is None and pending() == 0


def test_a_call_like_an_earlier_one_is_recorded_as_that_was():
    """The second round finds what the first one has asked NumPy."""
    x, small = np.zeros(LARGE) + 1, np.zeros(LARGE, "uint8")
    for _ in range(2):
        y, one = 2 - x, 1 / x.sum()
        assert (y.shape, y.dtype, one.shape) == ((LARGE,), "float64", ()) and y._cell.node.op is not None
        assert (small + True).dtype == "uint8" and (x[:, None] * x[:3]).shape == (LARGE, 3)
        with pytest.raises(OverflowError):
            small + 300
        with pytest.raises(ValueError, match="could not be broadcast"):
            x + np.zeros(LARGE + 1)
        with pytest.raises(FloatingPointError), np.errstate(divide="raise"):
            x / 0.0
        assert (x / 0.0)._cell.node.op is not None
    few = np.array(numpy.arange(float(LARGE)))[:3]
    assert (few + 1.0)._cell.node.op is None  # a small view of an array whose values are there


def test_a_loop_has_one_program_whatever_its_numbers_and_its_length(programs):
    x = np.zeros(8)
    for i in range(10_000):
        x = x + i
        assert pending() <= _record.MANY
    assert float(x[0]) == sum(range(10_000))
    kinds = {tuple(p) for p in programs}
    assert len(kinds) <= 4 and len(programs) <= 8  # the first part, the parts between, the last one; numbers that vary


def test_a_number_that_changes_compiles_no_third_program(programs):
    x = np.asarray(numpy.zeros(LARGE))
    sums = [float((x * scale + 1).sum()) for scale in (0.5, 0.25, 0.125, 0.75)]
    assert sums == [LARGE] * 4
    assert len(programs) == 2  # with the number in the program, and with the number as an operand


def test_what_is_slower_than_numpy_goes_back_to_numpy(programs, monkeypatch):
    ran = []
    run = _evaluate._compiled
    monkeypatch.setattr(_evaluate, "_compiled", lambda *args: ran.append(args[0]) or run(*args))
    monkeypatch.setattr(_evaluate, "COMPILE", 1.0)
    monkeypatch.setattr(_evaluate, "COMPILE_A_NODE", 1.0)
    x = np.asarray(numpy.ones(LARGE))
    with np.execution("auto"):
        float((x * x - x).sum())
        ran[0].numpys = 0.0  # as if NumPy had been asked before, and took no time
        sums = [float((x * x - x).sum()) for _ in range(8)]
    assert sums == [0] * 8 and len(ran) == _evaluate.TRIALS


def test_what_a_script_drops_unused_is_not_computed_again(programs, monkeypatch):
    outputs = []
    run = _evaluate._run
    monkeypatch.setattr(
        _evaluate, "_run", lambda graph, held, wanted: outputs.append(wanted) or run(graph, held, wanted)
    )
    x = np.asarray(numpy.ones(LARGE))
    for turn in range(4):
        twice = x + x
        kept = twice * 3
        total = float(kept.sum())
        assert total == 6 * LARGE
        if turn == 3:
            assert float(twice[5]) == 2  # it is used after all
    assert [len(o) for o in outputs] == [3, 1, 1, 1, 2]
    twice = x + x
    kept = twice * 3
    float(kept.sum())
    assert len(outputs[-1]) == 2  # `twice` is one that the script has used


def test_writes_go_where_numpy_writes_them():
    x = np.zeros((100, 400))
    rows, flipped, kept = x[10:20], x.T[::-1], x.copy()
    rows += 1
    flipped[0, 15] = 5
    assert float(x.sum()) == 4000 + 4 and float(rows[5, -1]) == 5
    assert float(kept.sum()) == 0
    with np.execution("numpy"):
        x[:, 0] = 7
    assert float(rows[0, 0]) == 7 and float(flipped[-1, 10]) == 7


def test_memory_that_somebody_sees_is_not_overwritten():
    start = np.asarray(numpy.arange(float(LARGE)))
    for mode in ("auto", "numpy", "compiled"):
        with np.execution(mode):
            x = start.copy()
            x[1:] += x[:-1]
            seen = numpy.asarray(x)
            x[1:-1] *= 2
            x += 1
            assert seen[2] == 3 and float(x[2]) == 7 and float(start[2]) == 2
    with np.execution("compiled"):
        y = start + 1
        given = jnp.asarray(y)
        y += 1
        assert float(y[0]) == 2 and float(given[0]) == 1


def test_small_writes_in_place_are_seen_by_views_and_by_no_copy():
    x = np.arange(6.0)
    view, other = x[::2], x.copy()
    before = view.copy()
    x[0] = 9
    x += 1
    assert view.tolist() == [10, 3, 5] and other.tolist() == [0, 1, 2, 3, 4, 5] and before.tolist() == [0, 2, 4]


def test_numpys_functions_take_the_arrays():
    x = np.arange(float(LARGE))
    for y in (numpy.sin(x), numpy.mean(x, keepdims=True), numpy.concatenate([x, [1.0]]), numpy.ones(LARGE) * x):
        assert isinstance(y, np.ndarray)
    out = numpy.zeros(LARGE)
    assert numpy.add(x, 1, out=out) is out and out[3] == 4
    numpy.testing.assert_allclose(numpy.linalg.norm(x), np.linalg.norm(x))
    file = io.BytesIO()
    numpy.save(file, x)
    file.seek(0)
    assert float(np.load(file)[7]) == 7
    assert float(pickle.loads(pickle.dumps(x))[3]) == float(copy.deepcopy(x)[3]) == 3


def test_jax_takes_the_arrays_and_gives_its_own():
    x = np.arange(float(LARGE))
    assert jax.config.jax_enable_x64 is False and jnp.asarray(x).dtype == "float32"
    assert float(jax.jit(lambda y: y[3] * 2)(x)) == 6
    assert jax.tree.leaves({"x": x})[0].dtype == "float32"
    assert (np.asarray(jnp.arange(3)) + 0.5).tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(KernelTypeError, match=r"use jax.numpy in functions"):
        jax.jit(lambda y: np.sin(y))(jnp.ones(3))


def test_errors_that_are_asked_for_are_raised_where_they_arise():
    x = np.arange(float(LARGE))
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        1 / x
    with pytest.raises(IndexError, match=f"index {LARGE} is out of bounds for axis 0 with size {LARGE}"):
        x[np.array([LARGE])]
    with pytest.raises(np.exceptions.AxisError):
        x.sum(axis=1)
    with pytest.raises(KernelValueError, match="expected 'auto', 'numpy' or 'compiled'"), np.execution("fast"):
        pass


def test_on_cpus_numpy_sorts():
    """At once, in its own order, with NaN last; in place as well."""
    large = numpy.where(numpy.arange(70_000) % 7 == 0, numpy.nan, numpy.cos(numpy.arange(70_000.0)))
    ours = np.asarray(large) + 0
    order = np.argsort(ours, kind="stable")
    if jax.default_backend() == "cpu":
        assert isinstance(order._cell.node.value, numpy.ndarray)
    numpy.testing.assert_array_equal(order, large.argsort(kind="stable"))
    numpy.testing.assert_array_equal(np.sort(ours[::2] * 2), numpy.sort(large[::2] * 2))
    ours.sort()
    numpy.testing.assert_array_equal(ours, numpy.sort(large))


def test_random_numbers_are_numpys():
    np.random.seed(3)
    legacy = np.random.normal(size=5)
    numpy.random.seed(3)
    assert legacy.tolist() == numpy.random.normal(size=5).tolist()
    ours, theirs = np.random.default_rng(1), numpy.random.default_rng(1)
    x, y = np.arange(50), numpy.arange(50)
    ours.shuffle(x)
    theirs.shuffle(y)
    assert x.tolist() == y.tolist() and ours.integers(9, size=4).tolist() == theirs.integers(9, size=4).tolist()


def test_grids_are_arrays_of_ours():
    grids = (np.mgrid[0:3, 0:2], np.ogrid[0:3, 0:2][1], np.r_[1:4, np.arange(2)], np.c_[np.ones(2), np.zeros(2)])
    assert all(isinstance(grid, np.ndarray) for grid in grids)
    assert grids[2].tolist() == [1, 2, 3, 0, 1] and grids[3].tolist() == [[1, 0], [1, 0]]


def test_threads_record_for_themselves():
    sums = {}

    def work(k):
        x = np.zeros(LARGE)
        for i in range(20):
            x += i * k
        sums[k] = float(x.sum())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {k: 190 * k * LARGE for k in range(4)}


def test_an_operation_that_fails_leaves_no_half_written_array(monkeypatch):
    x = np.asarray(numpy.zeros(LARGE))
    x[1:] += 1

    def failing(*_):
        raise MemoryError("no room")

    y = np.sqrt(x)
    monkeypatch.setattr(y._cell.node.op, "host", failing)
    with np.execution("numpy"):
        with pytest.raises(MemoryError):
            numpy.asarray(y)
        del y
        assert float(x.sum()) == LARGE - 1


def test_what_only_jax_has_is_said_once():
    for name in ("minmax", "top_k"):
        if hasattr(jnp, name) and not hasattr(numpy, name):
            with pytest.warns(np.FallbackWarning, match=name):
                function = getattr(np, name)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert getattr(np, name) is function
    with pytest.raises(AttributeError, match=r"neither numpy nor jax\.numpy has it"):
        np.no_such_name


def test_the_page_says_how_every_name_of_jax_numpy_is_done():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "numpy.md").read_text()
    done = np.coverage()
    listed = {}
    for line in page.splitlines():
        if line.startswith("| **"):
            kind, names = line.strip("| ").split(" | ")
            listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), kind.strip("*"))
    assert {name: kind for name, kind in listed.items() if done.get(name, kind) != kind} == {}
    kinds = ("recorded", "view", "at once")
    assert [n for n in dir(jnp) if n in done and done[n] in kinds and n not in listed] == []
