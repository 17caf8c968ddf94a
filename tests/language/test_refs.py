"""Views, explicit loads and stores, atomics, and the errors of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.errors import KernelSyntaxError, KernelTypeError, KernelValueError

F32 = np.dtype("f")
X = np.arange(70, dtype="f").reshape(10, 7)


def test_views(run):
    def kernel(x, o):
        i = jt.program_id(0)
        v, w = x.tiles(3, None), o.tiles(3, None)
        assert (v.shape, v.tile_shape, v.dtype, v.ndim) == ((4, 7), (3,), F32, 2)
        for k in range(v.shape[1]):
            w[i, k] = v[i, k] + 1.0

    (o,) = run(kernel, [X], [(X.shape, F32)], grid=(4,))
    np.testing.assert_array_equal(o, X + 1)


def test_pad_and_overlap(run):
    """Overlapping tiles, as of a stencil; what hangs over reads the pad."""

    def kernel(x, o, p):
        v = x.tiles(4, 7, step=(2, None), pad=-jnp.inf)
        assert v.shape == (5, 1)
        o[jt.program_id(0), :] = v[jt.program_id(0), 0].max(0)
        p[jt.program_id(0), :] = x.tiles(4, 7, step=(2, 7))[jt.program_id(0), 0].sum(0)

    o, p = run(kernel, [X], [((5, 7), F32), ((5, 7), F32)], grid=(5,))
    np.testing.assert_array_equal(o, [X[2 * k : 2 * k + 4].max(0) for k in range(5)])
    np.testing.assert_array_equal(p, [X[2 * k : 2 * k + 4].sum(0) for k in range(5)])


@pytest.mark.parametrize("pad", [0, 2.5, np.nan, np.inf, -np.inf, np.float32(3)])
def test_pads(run, pad):
    def kernel(x, o):
        o[...] = x.tiles(8, 8, pad=pad)[1, 0]

    (o,) = run(kernel, [X], [((8, 8), F32)])
    want = np.full((8, 8), pad, "f")
    want[:2, :7] = X[8:]
    np.testing.assert_array_equal(o, want)


def test_negative_tile_numbers_count_from_the_end(run):
    def kernel(x, o):
        o[...] = x.tiles(4, 7)[-1, 0]

    (o,) = run(kernel, [X], [((4, 7), F32)])
    np.testing.assert_array_equal(o[:2], X[8:])


def test_load_store_masks(run):
    def kernel(x, o, p, q):
        rows = jt.arange(16)
        mask = (rows < 9) & (rows % 2 == 0)
        o[...] = jt.load(x, (rows, 0), mask=mask, other=-1.0)
        jt.store(p, (rows,), rows.astype(jnp.float32), mask=mask)
        q[...] = jt.load(x.tiles(16, None, pad=5.0), (0, 1), mask=rows != 3, other=rows.astype(jnp.float32) * -1)

    o, p, q = run(kernel, [X], [((16,), F32), ((16,), F32), ((16,), F32)], inits=(None, 0, None))
    rows = np.arange(16)
    mask = (rows < 9) & (rows % 2 == 0)
    np.testing.assert_array_equal(o, np.where(mask, np.pad(X[:, 0], (0, 6)), -1))
    np.testing.assert_array_equal(p, np.where(mask, rows, 0))
    np.testing.assert_array_equal(q, np.where(rows == 3, -3, np.pad(X[:, 1], (0, 6), constant_values=5)))


def test_masks_broadcast(run):
    def kernel(x, o):
        jt.store(o, ..., x[...], mask=(jt.arange(7) < 3)[None, :])
        o[jt.ds(0, 1), ...] += 100.0

    (o,) = run(kernel, [X], [(X.shape, F32)], inits=(0,))
    want = np.where(np.arange(7) < 3, X, 0)
    want[0] += 100
    np.testing.assert_array_equal(o, want)


def test_stores_broadcast_and_take_numbers(run):
    def kernel(x, o, p, q):
        o[...] = x[0]
        o[1] = 2.5
        o[2, :3] = np.float32(7)
        p[...] = 3
        q[...] = True

    o, p, q = run(kernel, [X], [(X.shape, F32), ((4,), np.dtype("i1")), ((2,), np.dtype("?"))])
    want = np.broadcast_to(X[0], X.shape).copy()
    want[1], want[2, :3] = 2.5, 7
    np.testing.assert_array_equal(o, want)
    assert p.tolist() == [3] * 4
    assert q.tolist() == [True] * 2


def test_pytrees_of_refs(run, lower):
    def kernel(args, o):
        a, (b, c) = args["a"], args["rest"]
        assert isinstance(a, jt.Ref)
        o[...] = jax.tree.reduce(lambda s, r: s + r.tiles(4)[0], (b, c), a[...])
        jax.tree.map(lambda r: jt.cond(jt.program_id(0) > 0, lambda q: q[0], lambda q: q[1], r), args)

    from jtile.trace import rewrite_loops, to_tile_ir, trace
    from jtile.trace.tracing import ref_names

    t = jax.ShapeDtypeStruct((4,), F32)
    tree = {"a": t, "rest": (t, t)}
    jaxpr = trace(rewrite_loops(kernel), [tree], [t], [], meta={}, name="k", grid=(2,), aliases=(), inits=())
    assert len(to_tile_ir(jaxpr, name="k", n_in=3, n_out=1, grid=(2,)).params) == 4
    assert ref_names(kernel, [tree, t]) == ["args['a']", "args['rest'][0]", "args['rest'][1]", "o"]


def test_atomics(run):
    def kernel(x, o, old):
        i = jt.program_id(0)
        old[i, 0] = jt.atomic_add(o, 0, x[i])
        old[i, 1] = o.at[1].max(x[i])
        old[i, 2] = o.at[2].min(x[i])
        old[i, 3] = jt.atomic_xor(o, 3, x[i])
        old[i, 4] = jt.atomic_or(o, 4, x[i])
        old[i, 5] = jt.atomic_xchg(o, 5, x[i])
        old[i, 6] = jt.atomic_cas(o, 6, 0, x[i])
        jt.atomic_and(o, 7, x[i])

    x = np.array([3, 9, 5, 12], "i4")
    o, old = run(kernel, [x], [((8,), x.dtype), ((4, 7), x.dtype)], grid=(4,), inits=(0, None))
    assert o[:5].tolist() == [29, 12, 0, 3 ^ 9 ^ 5 ^ 12, 3 | 9 | 5 | 12]
    assert o[5] in x
    assert o[6] in x
    assert o[7] == 0
    assert sorted(old[:, 0])[0] == 0
    assert len(set(old[:, 0])) == 4


def test_atomic_tiles(run):
    def kernel(x, o, p):
        v = o.tiles(4, None)
        v.at[0, jt.program_id(0)].add(x[:4, 0], mask=jt.arange(4) != 1)
        p.at[jt.arange(4) % 2].add(jt.ones(4))  # the same element twice in one tile

    o, p = run(kernel, [X], [((5, 2), F32), ((2,), F32)], grid=(2,), inits=(0, 0))
    np.testing.assert_array_equal(o, np.stack([[0, 0, 14, 21, 0]] * 2, 1))
    assert p.tolist() == [4, 4]


def test_packed_and_narrow_dtypes(run):
    def kernel(a, b, o, p):
        o[...] = (a[...].astype(jnp.float32) * b[...].astype(jnp.float32)).astype(o.dtype)
        p[1:] = a[:-1]

    a = np.arange(-4, 4).astype(jnp.int4)
    b = np.linspace(0, 1, 8).astype(jnp.float8_e4m3fn)
    o, p = run(kernel, [a, b], [((8,), jnp.bfloat16), ((8,), a.dtype)], inits=(None, 0))
    np.testing.assert_array_equal(o, (a.astype("f") * b.astype("f")).astype(jnp.bfloat16))
    np.testing.assert_array_equal(p[1:], a[:-1])


def _store_input(x, o):
    x[0] = 1.0


def _add_input(x, o):
    x[0, 0] += 1.0


def _atomic_input(x, o):
    jt.atomic_add(x, 0, 1.0)


def _bare(x, o):
    o[...] = jnp.sin(x)


def _arithmetic(x, o):
    o[...] = x + 1.0


WRONG = {
    "store to an input": (_store_input, KernelTypeError, "x is an input.*read only"),
    "add to an input": (_add_input, KernelTypeError, "x is an input"),
    "atomic on an input": (_atomic_input, KernelTypeError, "atomic_add on an output"),
    "ref as value": (_bare, KernelTypeError, "a Ref is used as a value"),
    "ref arithmetic": (_arithmetic, KernelTypeError, r"load it with x\[...\]"),
    "ref in NumPy": (lambda x, o: np.exp(x), KernelTypeError, r"load it with x\[...\]"),
    "ref as NumPy array": (lambda x, o: np.asarray(x, dtype=F32), KernelTypeError, r"load it with x\[...\]"),
    "sum of a ref": (lambda x, o: x.sum(), KernelTypeError, r"has no .sum; load it first: x\[...\].sum"),
    "ref stored": (lambda x, o: o.__setitem__(..., x), KernelTypeError, "load it before"),
    "dtype of a store": (
        lambda x, o: o.__setitem__(..., x[...].astype(jnp.int32)),
        KernelTypeError,
        "int32 value.*astype",
    ),
    "float into ints": (
        lambda x, o: jt.alloc((2,), jnp.int32).__setitem__(0, 1.5),
        KernelTypeError,
        "cannot be a int32",
    ),
    "shape of a store": (lambda x, o: o.__setitem__(0, x[...]), KernelTypeError, r"shape \(10, 7\) does not fit"),
    "view rank": (lambda x, o: x.tiles(2), KernelTypeError, "rank 2.* 1 sizes"),
    "view size": (lambda x, o: x.tiles(2, -1), KernelValueError, "at least 0"),
    "view step": (lambda x, o: x.tiles(2, 2, step=0), KernelValueError, "at least 1"),
    "view steps": (lambda x, o: x.tiles(2, 2, step=(1, 1, 1)), KernelTypeError, "3 steps"),
    "traced view size": (lambda x, o: x.tiles(jt.program_id(0), 1), KernelTypeError, "Python int"),
    "large pad": (
        lambda x, o: jt.alloc((2,), jnp.int8).tiles(3, pad=128),
        KernelValueError,
        "pad=128 does not fit int8",
    ),
    "negative pad": (lambda x, o: jt.alloc((2,), jnp.uint4).tiles(3, pad=-1), KernelValueError, "fit uint4: 0 to 15"),
    "huge pad": (lambda x, o: x.tiles(2, 2, pad=10**400), KernelValueError, "does not fit float32"),
    "traced pad": (lambda x, o: x.tiles(2, 2, pad=x[0, 0]), KernelTypeError, "pad is a number"),
    "tile index rank": (lambda x, o: x.tiles(2, 2)[0], KernelTypeError, "2 indices.*got 1"),
    "tile index slice": (lambda x, o: x.tiles(2, 2)[0, :], KernelTypeError, "integer scalars"),
    "tile index tile": (lambda x, o: x.tiles(2, 2)[0, jnp.arange(2)], KernelTypeError, "integer scalars"),
    "tile index dots": (lambda x, o: x.tiles(2, 2)[0, ...], KernelTypeError, "integer scalars"),
    "tile outside": (lambda x, o: x.tiles(2, 2)[-6, 0], KernelValueError, "index -6 leaves"),
    "mask dtype": (lambda x, o: jt.load(x, ..., mask=x[...]), KernelTypeError, "mask is bool"),
    "mask shape": (lambda x, o: jt.load(x, 0, mask=jnp.ones(3, bool)), KernelTypeError, "does not fit"),
    "other without mask": (lambda x, o: jt.load(x, 0, other=x[0]), KernelTypeError, "without a mask"),
    "other dtype": (
        lambda x, o: jt.load(x, 0, mask=jnp.ones(7, bool), other=jnp.arange(7)),
        KernelTypeError,
        "other has dtype",
    ),
    "no ref": (lambda x, o: jt.load(x[...], 0), KernelTypeError, "expected a Ref"),
    "float bits": (lambda x, o: jt.atomic_or(o, 0, 1.0), KernelTypeError, "for integers"),
    "iterated": (lambda x, o: list(x), KernelTypeError, "cannot be iterated"),
    "view iterated": (lambda x, o: list(x.tiles(2, 2)), KernelTypeError, "jt.range"),
    "truth": (lambda x, o: bool(x), KernelTypeError, "is a Ref"),
    "no tile": (
        lambda x, o: jt.store(o, 0, len),
        KernelTypeError,
        "the value of this store to o is a tile or a number",
    ),
    "no mask": (lambda x, o: jt.load(x, 0, mask=object()), KernelTypeError, "a mask is a tile or a number, got"),
    "no operand": (lambda x, o: jt.dot(x[...], None), KernelTypeError, "b is a tile or a number, got None"),
    "no number": (
        lambda x, o: jt.full(3, "1"),
        KernelTypeError,
        "the number of jt.full is a tile or a number, got '1'",
    ),
    "traced shape": (lambda x, o: jt.zeros((jt.program_id(0), 3)), KernelTypeError, "the shape of jt.zeros is known"),
    "comprehension": (lambda x, o: list(jt.range(3)), KernelSyntaxError, "no comprehension"),
    "float bound": (lambda x, o: jt.fori(jnp.float32(3), min, 0), KernelTypeError, r"integer scalar, got float32\[\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(lower, name):
    fn, kind, message = WRONG[name]

    def kernel(x, o):
        o[...] = jnp.zeros(o.shape)
        fn(x, o)

    with pytest.raises(kind, match=message) as e:
        lower(kernel, [X], [jax.ShapeDtypeStruct(X.shape, F32)], grid=(1,))
    assert "test_refs.py" in str(e.value)


def test_aliased_inputs_can_be_stored_to(lower):
    def kernel(x, o):
        x[0] = 1.0

    out = jax.ShapeDtypeStruct(X.shape, F32)
    assert lower(kernel, [X], [out], aliases=((0, 0),)).aliases == ((0, 0),)
    with pytest.raises(KernelTypeError):
        lower(kernel, [X], [out])


def test_array_methods_name_the_way():
    ref = jt.Ref(jax.ShapeDtypeStruct((2,), F32), "x")
    with pytest.raises(AttributeError, match=r"x\[...\].astype"):
        ref.astype
    with pytest.raises(AttributeError, match="no attribute 'foo'"):
        ref.foo
