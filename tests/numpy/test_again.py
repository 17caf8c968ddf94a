"""Calls that come again: they take a shorter way, on which each has to remain NumPy's."""

from __future__ import annotations

import jax
import numpy
import pytest

import jtile.numpy as np
from jtile.numpy import _device, _evaluate
from jtile.numpy._evaluate import as_numpy_counts

SIDE = 200  # large enough that calls are recorded
TWICE = range(2)


def _pair(dtype: str = "float64"):
    value = (numpy.random.default_rng(1).random((SIDE, SIDE)) * 100).astype(dtype)
    return value, np.asarray(value)


def _same(got, want) -> None:
    got = numpy.asarray(got)
    assert got.dtype == numpy.asarray(want).dtype
    numpy.testing.assert_array_equal(got, want)


OPERATORS = {
    "numbers": lambda m, x: (x + 1, x * 2.5, 3 - x, x < 50, x**2, x**3.0),
    "numbers of NumPy": lambda m, x: (x * numpy.float64(2), numpy.float32(3) + x, x - numpy.int8(4)),
    "other dtypes": lambda m, x: (x + (x > 50), x.astype("int32") * x, x.astype("int64") / 2),
    "shapes": lambda m, x: (x + x[0], x[:, :1] * x[0], x[:, 0] - x[0]),
    "views": lambda m, x: (x[1:-1] + x[2:], x[::-1, 3], x[None, ..., 5:9], x[-1, 2:], x[7:3]),
}
FUNCTIONS = {
    "choices": lambda m, x: (m.where(x > 50, x, 0), m.where(x > 50, 1.5, x), m.clip(x, 10, 20.5)),
    "shifts": lambda m, x: (m.roll(x, 1, 0), m.roll(x, -1, axis=1), m.roll(x, (1, 2), (0, 1)), m.roll(x, True, 1)),
    "sums": lambda m, x: (x.max(axis=0), x.max(axis=-1, keepdims=True), x.max(), m.any(x > 99, axis=1)),
    "edges": lambda m, x: (m.pad(x, 1), m.pad(x, 1, mode="edge"), m.pad(x, 2, constant_values=3)),
}


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8"])
@pytest.mark.parametrize("name", [*OPERATORS, *FUNCTIONS])
def test_the_second_call_is_numpys_too(name, dtype):
    calls = OPERATORS.get(name) or FUNCTIONS[name]
    value, array = _pair(dtype)
    with numpy.errstate(all="ignore"):
        want = calls(numpy, value)
    for _ in TWICE:
        for got, expected in zip(calls(np, array), want, strict=True):
            _same(got, expected)


def test_statements_in_place_are_numpys():
    value, array = _pair()
    view, mine = value[1:-1], array[1:-1]
    for _ in TWICE:
        for of, part in ((value, view), (array, mine)):
            of += 1
            of[2:4, 1:] *= of[4:6, 1:]
            part -= 0.5
            of[3] = part[0]
    _same(array, value)
    whole = np.asarray(value.astype("int32"))
    for _ in TWICE:
        with pytest.raises(numpy._core._exceptions.UFuncTypeError):
            whole += 0.5
        whole += value > 50
    _same(whole, value.astype("int32") + 2 * (value > 50).astype("int32"))


def test_numbers_that_do_not_fit_raise_every_time():
    _, array = _pair("uint8")
    _same(array + 1, numpy.asarray(array) + 1)
    for _ in TWICE:
        with pytest.raises(OverflowError):
            array + 300
        with pytest.raises(TypeError):
            array[1.0:3]
        with pytest.raises(IndexError):
            array[SIDE]
        _same(array[1:3], numpy.asarray(array)[1:3])


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_negative_zeros_are_not_the_others(zeros):
    value = numpy.full((SIDE, SIDE), numpy.nan)
    array = np.asarray(value)
    for zero in zeros * 2:
        got = numpy.asarray(np.nan_to_num(array, nan=zero))
        assert (numpy.signbit(got) == numpy.signbit(zero)).all()


def test_a_small_array_may_change_behind_a_program():
    value, array = _pair()
    small = np.zeros(SIDE)
    with np.execution("compiled"):
        first = array * small
        total = float(first.sum())
    small += 1
    _same(array * small, value)
    assert total == 0


def test_arrays_that_were_left_pending_come_into_later_programs():
    value, array = _pair()
    for _ in range(4):
        total = array * 2
        more = total + 1  # which the next round does not read
        assert float(total[0, 0]) == 2 * value[0, 0]
    _same(more * 2 + total, (value * 2 + 1) * 2 + value * 2)


def test_sums_of_parts_are_those_of_the_whole_with_zeros(monkeypatch):
    walks = []
    monkeypatch.setattr(_evaluate, "compiled", lambda walk, given: walks.append(walk) or walk)
    value, _ = _pair()
    value[0, 0], value[3, 3] = numpy.nan, numpy.inf  # in none of the parts
    parts = (numpy.s_[1:, 1::2], numpy.s_[-1:0:-1, 4:], numpy.s_[10:-10, ::3])
    with np.execution("compiled"):
        y = np.asarray(value) * 2
        sums = [y[part].sum() for part in parts] + [(y > 50)[part].sum() for part in parts]
        got = [numpy.asarray(total) for total in sums]
    value = value * 2
    want = [value[part].sum() for part in parts] + [(value > 50)[part].sum() for part in parts]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        numpy.testing.assert_allclose(ours, theirs, rtol=1e-13)
    assert len(walks[0].summed) == len(sums)


def test_sums_of_parts_with_other_axes():
    """An axis of a part is not that of the whole, where the part has more or fewer of them."""
    value = numpy.arange(2.0 * SIDE * SIDE).reshape(2, -1)
    with np.execution("compiled"):
        y = np.asarray(value) * 2
        got = [y[1].sum(axis=0), np.sum(y[0], -1), y[None, :, 1:].sum(axis=(0, 1, 2)), np.mean(y[1], axis=0)]
        got = [float(total) for total in got]
    value = value * 2
    assert got == [value[1].sum(), value[0].sum(), value[:, 1:].sum(), value[1].mean()]


def test_what_index_arrays_pick_is_numpys():
    value, array = _pair("int64")
    rows, columns = numpy.array([[3, -1, 7]]), numpy.array([[0], [SIDE - 1]])
    picks = (
        numpy.s_[rows], numpy.s_[rows, columns], numpy.s_[:, rows], numpy.s_[None, rows, 2], numpy.s_[rows, None, 2],
        numpy.s_[rows, :3], numpy.s_[..., columns], numpy.s_[2, ..., rows], numpy.s_[rows[:, :0]], numpy.s_[5:2, rows],
    )  # fmt: skip
    for pick in picks:
        ours = (
            tuple(np.asarray(i) if isinstance(i, numpy.ndarray) else i for i in pick) if type(pick) is tuple else pick
        )
        _same(array[ours], value[pick])
    large = numpy.random.default_rng(2).integers(-SIDE, SIDE, (SIDE, SIDE))
    mine = np.asarray(large) * 1
    for _ in TWICE:
        _same(array[mine - 0, mine], value[large, large])
        with pytest.raises(IndexError, match="is out of bounds for axis 1 with size"):
            array[:, mine * 2]
        with pytest.raises(IndexError, match="shape mismatch: indexing arrays could not be broadcast together"):
            array[mine, mine[:3]]


def test_quotients_of_complex_numbers_are_numpys():
    parts = (0.0, -0.0, 1.0, -2.5, numpy.inf, -numpy.inf, numpy.nan, 1e150, 1e-150)
    numbers = numpy.array([complex(a, b) for a in parts for b in parts])
    x, y = numbers.reshape(-1, 1), numbers.reshape(1, -1)
    with numpy.errstate(all="ignore"), as_numpy_counts():
        want = x / y
        got = numpy.asarray(_device.UFUNCS["divide"](jax.numpy.asarray(x), jax.numpy.asarray(y)))
    for ours, theirs in ((got.real, want.real), (got.imag, want.imag)):
        numpy.testing.assert_allclose(ours, theirs, rtol=1e-14)


@pytest.mark.parametrize("indexing", ["xy", "ij"])
def test_grids_are_numpys(indexing):
    lines = numpy.linspace(0, 1, 30), numpy.arange(40), numpy.float32(3) + numpy.arange(50, dtype="float32")
    for some in (lines, lines[:2], lines[:1], [numpy.ones((2, 300)), numpy.arange(400)]):
        want = numpy.meshgrid(*some, indexing=indexing)
        got = np.meshgrid(*map(np.asarray, some), indexing=indexing)
        got[0][...] += 1  # each has memory of its own
        want[0][...] += 1
        for ours, theirs in zip(got, want, strict=True):
            _same(ours, theirs)
