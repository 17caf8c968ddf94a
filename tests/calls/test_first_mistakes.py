"""Mistakes of a first kernel: what the error says, and the way out that it names."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError

X = np.ones((5, 3), np.float32)


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w, *, rows: jt.cdiv(x.shape[0], rows))
def scaled(x, w, o, *, rows=2):
    i, n = jt.program_id(0), x.shape[1]
    o.tiles(rows, n)[i, 0] = x.tiles(rows, n)[i, 0] * w[...][None]


def test_an_output_that_is_never_written():
    @jt.kernel(out_type=lambda x: jt.like(x))
    def forgets(x, o):
        o = x[...] * 2  # noqa: F841

    with pytest.raises(KernelTypeError, match=r"does not write to its output o, .* o\[\.\.\.\] = value .* init=0"):
        forgets(X)

    def nothing(x, o):
        pass

    assert jt.call(nothing, out_type=jt.like(X), init=0)(X).sum() == 0
    assert jt.call(nothing, out_type=jt.like(X), alias={"x": "o"})(X).sum() == X.sum()
    assert jt.call(nothing, out_type=jt.like(X, shape=(0, 3)))(X).shape == (0, 3)


def test_a_structure_among_the_outputs_is_one_parameter():
    @jt.kernel(out_type=lambda x: (jt.like(x), (jt.like(x), jt.like(x))))
    def three(x, a, b, c):
        a[...] = b[...] = c[...] = x[...]

    with pytest.raises(KernelTypeError, match="makes 2 outputs; output 1 is a structure of arrays, which is one para"):
        three(X)


def test_a_list_is_no_array():
    with pytest.raises(KernelTypeError, match=r"argument x is a list, a structure of 2 arrays .* np\.asarray makes"):
        scaled([1.0, 2.0], X[0])
    first = jt.call(lambda x, o: None, out_type=jt.like(X), grid=lambda x: x.shape[0])
    with pytest.raises(KernelTypeError, match=r"no attribute 'shape'; argument x is a list"):
        first([1.0, 2.0])


def test_a_note_names_what_is_none():
    with pytest.raises(TypeError) as e:
        scaled(X, None)
    assert "x: float32[5, 3], o: float32[5, 3], w: None" in e.value.__notes__[-1]


def test_a_size_that_is_none():
    with pytest.raises(KernelTypeError, match="cdiv takes whole numbers, got None"):
        scaled(X, X[0], rows=None)


def test_an_assert_of_python():
    @jt.kernel(out_type=lambda x: jt.like(x))
    def asserts(x, o):
        assert x[0, 0] > 0
        o[...] = x[...]

    with pytest.raises(KernelTypeError, match=r"jt\.assert_ for an assert"):
        asserts(X)


def test_what_a_lowered_kernel_cannot_be_differentiated_by():
    low = scaled.lower(X, X[0])
    with pytest.raises(KernelValueError, match=r"with respect to 'x' \(wrt= takes places of inputs of floats\)"):
        low.vjp("x")
    with pytest.raises(KernelValueError, match="differentiated, since no input is of floats: its inputs are x: int32"):
        scaled.lower(X.astype(np.int32), X[0].astype(np.int32)).vjp()


def test_types_like_those_of_a_structure():
    tree = {"w": X, "b": (X[0],)}

    @jt.kernel(out_type=lambda tree: jt.like(tree))
    def doubled(tree, o):
        jax.tree.map(lambda x, o: o.__setitem__(..., 2 * x[...]), tree, o)

    got = doubled(tree)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == 2 * b).all()), got, tree))
    assert jt.like(tree, dtype=np.int8)["b"][0] == jax.ShapeDtypeStruct((3,), np.int8)
    with pytest.raises(KernelTypeError, match=r"jt\.like takes an array"):
        jt.like(tree, shape=(3,))
