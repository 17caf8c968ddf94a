"""Element-space indices: NumPy's meaning, checked against NumPy; and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import ir
from jtile import language as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.language._index import At, Span, Take, Tile

X = np.arange(7 * 5 * 6, dtype="f").reshape(7, 5, 6)
IDX = np.array([3, 0, 6, 2], "i4")
COL = np.array([[1], [4]], "i4")

STATIC = {
    "all": np.s_[...],
    "empty tuple": np.s_[()],
    "row": np.s_[2],
    "negative": np.s_[-1, :, -6],
    "slices": np.s_[1:6:2, :, 2:],
    "backwards": np.s_[::-1, 3:0:-2],
    "dots": np.s_[..., 1],
    "dots between": np.s_[1, ..., 1:3],
    "new axes": np.s_[None, 2, None, :, 1:2, None],
    "empty slice": np.s_[5:2],
    "clipped slice": np.s_[-100:3, 4:100],
    "step over": np.s_[::5, 1::100],
    "list": np.s_[[1, 2, 2]],
    "negative list": np.s_[:, [-1, 0]],
    "array": np.s_[IDX],
    "array second": np.s_[:, COL % 5],
    "two arrays": np.s_[IDX, IDX % 5],
    "outer": np.s_[IDX[:, None], COL[:, 0][None, :]],
    "apart": np.s_[IDX, :, IDX % 6],
    "int and array apart": np.s_[1, :, IDX % 6],
    "int beside array": np.s_[1, IDX % 5],
    "array int": np.s_[:, IDX % 5, 2],
    "array between new axes": np.s_[None, IDX, None],
    "array after new axis": np.s_[:, None, IDX % 5],
    "three arrays": np.s_[IDX, IDX % 5, COL],
    "negative static array": np.s_[np.array([-1, -7])],
    "int0 array": np.s_[np.array(2)],
    "np int": np.s_[np.int64(3)],
    "arrays and backwards": np.s_[::-2, IDX % 5, ::-1],
}


def _jax(index):
    """The index with its arrays traced: as JAX values."""
    wrap = lambda e: jnp.asarray(e) if isinstance(e, np.ndarray) and e.ndim and (e >= 0).all() else e
    return tuple(map(wrap, index)) if isinstance(index, tuple) else wrap(index)


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("traced", [False, True])
def test_load_and_store(run, name, traced):
    index = STATIC[name]
    want = X[index]

    def kernel(x, o, p):
        i = _jax(index) if traced else index
        t = x[i]
        o[...] = t
        p[i] = t * 2

    got, put = run(kernel, [X], [(want.shape, X.dtype), (X.shape, X.dtype)], inits=(None, 0))
    np.testing.assert_array_equal(got, want)
    expected = np.zeros_like(X)
    expected[index] = want * 2
    np.testing.assert_array_equal(put, expected)


def test_traced_scalars_and_spans(run):
    def kernel(x, k, o, p):
        i = k[...]
        o[...] = x[jt.ds(i, 3), i, jt.ds(0, 2, 3)]
        p[...] = x[i, None, jt.ds(i, 2)]

    o, p = run(kernel, [X, np.int32(2)], [((3, 2), X.dtype), ((1, 2, 6), X.dtype)])
    np.testing.assert_array_equal(o, X[2:5, 2, 0:6:3])
    np.testing.assert_array_equal(p, X[2, None, 2:4])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_index_dtypes(run, dtype):
    with jax.enable_x64(dtype == "int64"):

        def kernel(x, k, o):
            o[...] = x[k[...], k[0]]

        (o,) = run(kernel, [X, np.array([1, 3], dtype)], [((2, 6), X.dtype)])
    np.testing.assert_array_equal(o, X[[1, 3], 1])


def test_spans_hang_over(run):
    def kernel(x, o, p):
        o[...] = x[jt.ds(5, 4), 0, 0]
        p[jt.ds(5, 4)] = jnp.ones(4)

    o, p = run(kernel, [X], [((4,), X.dtype), ((7,), X.dtype)], inits=(None, 0))
    np.testing.assert_array_equal(o, [*X[5:, 0, 0], 0, 0])
    np.testing.assert_array_equal(p, [0, 0, 0, 0, 0, 1, 1])


def test_gathers_leave_the_array(run):
    """Index tiles follow the bounds rule: lanes outside read the pad and are not written."""
    idx = np.array([1, 9, -1, 3], "i4")

    def kernel(x, k, o, q, p):
        i = k[...]
        o[...] = x[i, 0, 0]
        q[...] = jt.load(x, (i, 0, 0), other=7.0)
        p[i] = jnp.ones(4)

    o, q, p = run(kernel, [X, idx], [((4,), X.dtype), ((4,), X.dtype), ((7,), X.dtype)], inits=(None, None, 0))
    np.testing.assert_array_equal(o, [X[1, 0, 0], 0, 0, X[3, 0, 0]])
    np.testing.assert_array_equal(q, [X[1, 0, 0], 7, 7, X[3, 0, 0]])
    np.testing.assert_array_equal(p, [0, 1, 0, 1, 0, 0, 0])


def test_zero_size_and_rank_0(run):
    def kernel(x, s, o, p):
        o[...] = x[...] + s[...]
        p[()] = s[()] * 2

    o, p = run(kernel, [np.zeros((0, 3), "f"), np.float32(4)], [((0, 3), np.dtype("f")), ((), np.dtype("f"))])
    assert o.shape == (0, 3)
    assert p == 8


def test_static_index_of_an_empty_dimension_is_legal(lower):
    def kernel(x, o):
        o[0] = x[0]

    out = jax.ShapeDtypeStruct((0,), np.float32)
    assert lower(kernel, [np.zeros(0, "f")], [out], grid=(0,)).grid == (0,)


WRONG = {
    "bool tile": (lambda x: x[x[...] > 0], KernelTypeError, "mask"),
    "bool": (lambda x: x[True], KernelTypeError, "bool"),
    "bool list": (lambda x: x[[True] * 7], KernelTypeError, "mask"),
    "float": (lambda x: x[1.5], KernelTypeError, "an index is an int"),
    "float tile": (lambda x: x[x[0, 0]], KernelTypeError, "float32"),
    "too many": (lambda x: x[0, 0, 0, 0], KernelTypeError, "rank 3 .*4 entries"),
    "two dots": (lambda x: x[..., 0, ...], KernelTypeError, r"one \.\.\."),
    "outside": (lambda x: x[7], KernelValueError, "index 7 leaves a dimension of 7"),
    "outside below": (lambda x: x[-8], KernelValueError, "index -8"),
    "negative ds": (lambda x: x[jt.ds(-1, 2)], KernelValueError, "start >= 0"),
    "traced slice": (lambda x: x[jt.program_id(0) :], KernelTypeError, "jt.ds"),
    "traced size": (
        lambda x: x[jt.ds(0, jt.program_id(0))],
        KernelTypeError,
        "the size of jt.ds is a Python int, got a traced",
    ),
    "bad size": (lambda x: x[jt.ds(0, -2)], KernelValueError, "size >= 0"),
    "step 0": (lambda x: x[::0], KernelValueError, "step"),
    "string": (lambda x: x["a"], KernelTypeError, "str 'a'"),
    "nested tuple": (lambda x: x[(0, (1, 2))], KernelTypeError, "tuple"),
    "gathers": (lambda x: x[jnp.arange(3), jnp.arange(2)], KernelTypeError, "do not broadcast"),
    "span of a tile": (lambda x: x[jt.ds(jnp.arange(3), 2)], KernelTypeError, "integer scalar"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(lower, name):
    fn, kind, message = WRONG[name]

    def kernel(x, o):
        o[...] = fn(x).sum()

    with pytest.raises(kind, match=message) as e:
        lower(kernel, [X], [jax.ShapeDtypeStruct((), np.float32)], grid=(1,))
    assert "test_index.py" in str(e.value)


HUGE = jax.ShapeDtypeStruct((2**33,), np.int8)
B = 3_000_000_000  # more than an int32 holds
INTS = {
    "element": (lambda x: x[B], At(), B),
    "element from the end": (lambda x: x[-B], At(), 2**33 - B),
    "slice": (lambda x: x[B : B + 4], Span(4), B),
    "slice backwards": (lambda x: x[B : B - 4 : -2], Span(2, 2), B - 2),
    "ds": (lambda x: x[jt.ds(B, 4)], Span(4), B),
    "list": (lambda x: x[[B, -1]], Take(), [B, 2**33 - 1]),
    "array": (lambda x: x[np.array([1, B])], Take(), [1, B]),
    "tile": (lambda x: x.tiles(2)[B], Tile(2, 2), B),
}


@pytest.mark.parametrize("name", INTS)
def test_indices_that_leave_int32(lower, name):
    """They are int64 constants where JAX has those, and never cut."""
    fn, dim, value = INTS[name]

    def kernel(x, o):
        o[...] = fn(x).sum(dtype=np.int8)

    out = [jax.ShapeDtypeStruct((), np.int8)]
    with jax.enable_x64(True):
        body = lower(kernel, [HUGE], out).body
    load = next(op for op in body.walk() if op.mnemonic == "load")
    assert type(load.index[0]).__name__ == type(dim).__name__
    constant = ir.dim_value(load.index[0])
    assert constant.dtype == "int64"
    assert np.asarray(constant.op.reference()).tolist() == value
    with pytest.raises(KernelValueError, match=r"x.*: index \d+ takes an int64, .* or count in larger tiles"):
        lower(kernel, [HUGE], out)


def test_a_number_beside_a_tile_that_fits_no_dtype_of_it(lower):
    def kernel(x, o):
        o[...] = x[...] + B

    with pytest.raises(KernelValueError, match=r"a Python int in it fits no dtype that it meets; write a f") as e:
        lower(kernel, [X], [X])
    assert "test_index.py" in str(e.value)


WIDE = {
    "ds": (lambda x: x[jt.ds(0, B)], "the size of jt.ds is 3000000000, and a tile has at most 2147483647 elements"),
    "slice": (lambda x: x[:B], "a slice of x is 3000000000"),
    "tiles": (lambda x: x.tiles(B)[0], "a tile size of x is 3000000000"),
    "no int64": (lambda x: x[jt.ds(2**70, 4)], "x: index 1180591620717411303424 does not fit an int64"),
    "range": (lambda x: jt.fori(B, lambda i, c: c, jnp.zeros(4)), "a bound of jt.range 3000000000 takes an int64"),
    "full": (lambda x: jt.full((4,), B), "jt.full: 3000000000 does not fit int32, .* dtype=jnp.int64"),
    "arange": (lambda x: jt.arange(B - 2, B), "jt.arange: 2999999998 does not fit int32"),
    "cdiv": (lambda x: x[jt.cdiv(jt.program_id(0), B)], "3000000000 does not fit int32, .* of jt.cdiv"),
}


@pytest.mark.parametrize("name", WIDE)
def test_numbers_that_leave_int32(lower, name):
    fn, message = WIDE[name]

    def kernel(x, o):
        o[...] = fn(x).sum(dtype=np.int8)

    with pytest.raises(KernelValueError, match=message) as e:
        lower(kernel, [HUGE], [jax.ShapeDtypeStruct((), np.int8)], grid=(1,))
    assert "test_index.py" in str(e.value)
