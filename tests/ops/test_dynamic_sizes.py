"""Functions of the library with marks of `jt.dynamic`: one compiled kernel for all sizes, against their references."""

from __future__ import annotations

import gc
import pickle
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from library import normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError, TransformError, UnsupportedError
from jtile.ops.convolutions import convolution_reference
from jtile.ops.elementwise import bias_gelu_residual_reference
from jtile.ops.filters import stencil_reference
from jtile.ops.flash_attention import attention_reference
from jtile.ops.linear_attention import linear_attention_reference
from jtile.ops.losses import cross_entropy_reference
from jtile.ops.matmul import matmul_reference
from jtile.ops.norms import rms_norm_reference
from jtile.ops.scans import cumsum_reference
from jtile.ops.segments import segment_sum_reference
from jtile.ops.softmaxes import log_softmax_reference, softmax_reference
from jtile.testing.evaluate import evaluated

SIZES = (5, 1, 33)  # the first one is compiled for


def of(*shape):
    return np.asarray(normal(sum(shape), *shape))


def ids(n, below):
    return (np.arange(n) * 7 % below).astype(np.int32)


def heads(n):
    return tuple(np.asarray(normal(k + n, 1, n, 2, 8)) for k in range(3))


def softly(n):
    q, k, v = heads(n)
    return q, k, v, -np.abs(of(1, n, 2))


causal = {"causal": True}
# name: the function, its reference, its arguments for a size, their dynamic axes, options
CASES = {
    "rows of a softmax": (ops.softmax, softmax_reference, lambda n: (of(n, 24),), (0,), {}),
    "softmax": (ops.softmax, softmax_reference, lambda n: (of(3, n),), (1,), {}),
    "columns of a log_softmax": (ops.log_softmax, log_softmax_reference, lambda n: (of(n, 9),), (0,), {"axis": 0}),
    "rms_norm": (ops.rms_norm, rms_norm_reference, lambda n: (of(2, n, 24), of(24)), (1, None), {}),
    "gelu": (
        ops.bias_gelu_residual, bias_gelu_residual_reference,
        lambda n: (of(n, 24), of(24), of(n, 24)), (0, None, 0), {},
    ),
    "rows of a product": (ops.matmul, matmul_reference, lambda n: (of(n, 16), of(16, 24)), (0, None), {}),
    "terms of a product": (ops.matmul, matmul_reference, lambda n: (of(8, n), of(n, 24)), (1, 0), {}),
    "cross_entropy": (ops.cross_entropy, cross_entropy_reference, lambda n: (of(n, 24), ids(n, 24)), (0, 0), {}),
    "attention": (ops.attention, attention_reference, heads, (1, 1, 1), causal),
    "keys of an attention": (
        ops.attention, attention_reference, lambda n: (heads(7)[0], *heads(n)[1:]), (None, 1, 1), {},
    ),
    "linear_attention": (
        lambda q, k, v, g: ops.linear_attention(q, k, v, log_decay=g),
        lambda q, k, v, g: linear_attention_reference(q, k, v, log_decay=g),
        softly, (1, 1, 1, 1), {},
    ),
    "convolution": (
        ops.convolution, convolution_reference, lambda n: (of(1, n, n + 2, 4), of(3, 3, 4, 8)), ((1, 2), None), {},
    ),
    "stencil": (ops.stencil, stencil_reference, lambda n: (of(n, 12), of(3, 3)), (0, None), {}),
    "cumsum": (ops.cumsum, cumsum_reference, lambda n: (of(3, n),), (1,), {}),
    "segment_sum": (
        lambda x, s: ops.segment_sum(x, s, 4), lambda x, s: segment_sum_reference(x, s, 4),
        lambda n: (of(n, 6), ids(n, 4)), (0, 0), {},
    ),
}  # fmt: skip


def mark(args, axes, most=64):
    return [x if axis is None else jt.dynamic(x, axis, most=most) for x, axis in zip(args, axes, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_for_all_sizes(case, compilations):
    """Results and gradients of all sizes by what was compiled for the first one."""
    fn, reference, make, axes, options = CASES[case]

    def both(run, args, cotangent):
        floats = [k for k, x in enumerate(args) if x.dtype == np.float32]

        def some(*moved):
            at = dict(zip(floats, moved, strict=True))
            return run([at.get(k, x) for k, x in enumerate(args)])

        def pulled(cotangent, *moved):
            out, back = jax.vjp(some, *moved)
            return out, back(cotangent)

        return evaluated(pulled)(cotangent, *[args[k] for k in floats])

    for n in SIZES:
        args = make(n)
        want = evaluated(lambda *xs: reference(*xs, **options))(*args)
        cotangent = of(*want.shape)
        got = both(lambda xs: fn(*mark(xs, axes), **options), args, cotangent)
        expected = both(lambda xs: reference(*xs, **options), args, cotangent)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert x.shape == y.shape
            assert np.linalg.norm(x - y) <= 1e-5 * max(np.linalg.norm(y), 1)
        if n == SIZES[0]:
            first = list(compilations)
            assert first
    assert compilations == first


def rows_of_products(x, w):
    return ops.softmax(jt.dynamic(ops.matmul(jt.dynamic(x), w)))


def test_vmap_jit_and_grad_share_the_kernels(compilations):
    """Axes are those of one element of a batch; under jit the sizes are those that it is traced for."""
    w, step = of(16, 24), jax.jit(rows_of_products)
    for n in SIZES:
        x = of(n, 16)
        np.testing.assert_allclose(step(x, w), evaluated(softmax_reference)(x @ w), atol=1e-6)
    assert len(compilations) == 2
    for n in (5, 33):
        x = of(3, n, 16)
        got = evaluated(lambda x, n=n: jax.vmap(rows_of_products, (0, None))(x, w))(x)
        np.testing.assert_allclose(got, evaluated(softmax_reference)(x @ w), atol=1e-6)
    assert len(compilations) == 4  # a vmap is one more axis of the grid
    slope = lambda fn: evaluated(jax.vmap(jax.grad(lambda x: (fn(x, w) ** 2).sum())))
    np.testing.assert_allclose(
        slope(rows_of_products)(x), slope(lambda x, w: softmax_reference(x @ w))(x), rtol=1e-4, atol=1e-6
    )


def test_forward_mode_and_second_derivatives():
    x, w = of(5, 16), of(16)
    ours, theirs = (lambda x: ops.rms_norm(jt.dynamic(x), w)), (lambda x: rms_norm_reference(x, w))
    twice = lambda fn: evaluated(jax.grad(lambda x: (jax.grad(lambda x: (fn(x) ** 3).sum())(x) ** 2).sum()))
    np.testing.assert_allclose(twice(ours)(x), twice(theirs)(x), rtol=1e-3, atol=1e-3)
    moved = lambda fn: evaluated(lambda x: jax.jvp(fn, (x,), (x * x,))[1])
    np.testing.assert_allclose(moved(ours)(x), moved(theirs)(x), rtol=1e-4, atol=1e-5)


def test_bounds_choose_the_form():
    """Few keys are left to one program; where there may be many, several share them, and a kernel joins their parts."""
    q, k, lengths = of(1, 2, 8), of(1, 5, 2, 8), np.full(1, 5, np.int32)
    for most, kernels in ((64, 1), (None, 2)):
        marked = jt.dynamic(k, 1, most=most)
        traced = jax.make_jaxpr(lambda q, m=marked: ops.decode_attention(q, m, m, lengths))(q)
        assert str(traced).count("jtile_call[") == kernels


def test_what_is_empty_or_no_array_is_static(compilations):
    assert ops.softmax(jt.dynamic(of(0, 24))).shape == (0, 24)
    assert compilations == []
    x = of(5, 24)
    same = [np.asarray(ops.rms_norm(jt.dynamic(x), of(24), eps=eps)) for eps in (1e-6, 0.5)]
    assert np.abs(same[0] - same[1]).max() > 0.1


def test_trees_of_marked_arrays(compilations):
    for n in (5, 33):
        tree = {"w": of(n, 8)}
        state = ops.adam_init(tree)
        marked = ops.AdamState(state.count, *jt.dynamic((state.m, state.v)))
        got = ops.adamw(jt.dynamic(tree), jt.dynamic(tree), marked, learning_rate=0.1)
        want = ops.adamw(tree, tree, state, learning_rate=0.1)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)
    assert len(compilations) == 3  # one that is dynamic, and one of each size


def test_numbers_and_dtypes_of_numpy_are_fixed():
    x, w = of(5, 16), of(16)
    rows = jt.dynamic(x)
    want = ops.rms_norm(x, w, eps=1e-3)
    np.testing.assert_allclose(ops.rms_norm(rows, w, eps=np.float64(1e-3)), want, rtol=1e-6)  # GPUs sum in other orders
    assert ops.matmul(rows, of(16, 4), out_dtype=np.float32).dtype == np.float32


def test_arguments_of_any_kind_and_name():
    """Symbols are called after arguments: further ones of `*args`, and keys that read alike, have symbols too."""

    @jt.takes_marks
    def first(*xs, **more):
        return [ops.softmax(x)[0] for x in (*xs, *jax.tree.leaves(more))]

    trees = of(3, 8), of(4, 8), of(5, 8), {"a.b": of(2, 8), "a_b": of(6, 8), "größe": of(7, 8)}
    for got, want in zip(first(*jt.dynamic(trees[:3]), more=jt.dynamic(trees[3])), first(*trees[:3], more=trees[3])):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_marks_of_marked_arrays():
    x = of(3, 8)
    marked = jt.dynamic(jt.dynamic(x, 0, most=4), 1, most=64)
    assert [(m.axis, m.most) for m in marked.axes] == [(0, 4), (1, 64)]
    np.testing.assert_allclose(ops.softmax(marked), ops.softmax(x), rtol=1e-6)


@pytest.mark.early
def test_functions_that_close_over_arrays():
    """Over tracers of a derivative too; what was traced goes with the function."""
    x, held = of(5, 16), []

    def loss(w):
        @jt.takes_marks
        def product(x):
            return ops.matmul(x, w)

        held.append(weakref.ref(product))
        return (product(jt.dynamic(x)) ** 2).sum()

    w = of(16, 8)
    want = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    for slope in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_allclose(slope(w), want, rtol=1e-4, atol=1e-4)
    loss(w)
    gc.collect()
    assert [f() for f in held] == [None] * 3


def test_inside_of_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    x, w = of(6, 16), of(16)
    cut = lambda mark: jax.shard_map(
        lambda x, w: ops.softmax(ops.rms_norm(mark(x), w)), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")
    )
    slope = lambda fn: jax.jit(jax.value_and_grad(lambda x, w: (fn(x, w) ** 2).sum(), (0, 1)))(x, w)
    ours, theirs = slope(cut(jt.dynamic)), slope(cut(lambda x: x))
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_functions_of_the_library_are_found_by_name():
    assert pickle.loads(pickle.dumps(ops.softmax)) is ops.softmax


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.sort(jt.dynamic(of(3, 5), 1)), "sort is not made for these dynamic sizes (x_1)"),
        (lambda: ops.layer_norm(jt.dynamic(of(3, 5), {1: "n"})), "layer_norm is not made for these dynamic sizes (n)"),
        (lambda: ops.fft(jt.dynamic(of(3, 5).astype("F"), 1)), "fft is not made"),
        (lambda: ops.resize(jt.dynamic(of(6, 5)), (4, 4)), "resize is not made"),
        (lambda: ops.rms_norm(jt.dynamic(of(3, 5), 1), of(5)), "rms_norm is not made"),  # the weight has no mark
    ],
)
def test_sizes_that_a_function_has_to_know(call, words):
    """On CPUs: on GPUs, layer_norm does not have to know the length of rows."""
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(UnsupportedError) as e:
        call()
    assert words in str(e.value) and "without marks" in str(e.value)


def test_a_gradient_that_saves_rounds_asks_for_a_bound():
    x, a, b = of(1, 9, 4), -np.abs(of(4, 2)), jt.dynamic(of(1, 9, 2), 1)
    scanned = lambda x: ops.selective_scan(x, x, a, b, b).sum()
    loss = lambda most: jax.eval_shape(jax.grad(lambda x: scanned(jt.dynamic(x, 1, most=most))), x)
    with pytest.raises(TransformError, match="most="):
        loss(None)
    assert loss(16).shape == x.shape


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: ops.softmax(jt.dynamic(of(3, 5), 2)), KernelValueError, "dynamic axis 2 of x of softmax"),
        (lambda: ops.softmax(jt.dynamic(of(3, 5), most=2)), KernelValueError, "marked as 1 to 2"),
        (lambda: ops.softmax(jt.dynamic(of(3, 5), least=4)), KernelValueError, "marked as 4 to any number of"),
        (lambda: jt.dynamic(of(3, 5), least=4, most=3), KernelValueError, "expected 1 <= least <= most"),
        (lambda: jt.dynamic(of(3, 5), most=2.5), KernelTypeError, "are ints"),
        (lambda: jt.dynamic(of(3, 5), {0: "max"}), KernelValueError, "take max_"),
        (lambda: jt.takes_marks(lambda x, o: x)(jt.dynamic(of(3, 5)), {1}), KernelTypeError, "type set has no hash"),
        (lambda: ops.softmax(jt.dynamic(ids(3, 5))), KernelTypeError, "float array, got int32"),
        (lambda: ops.matmul(jt.dynamic(of(3, 5)), of(4, 2)), KernelValueError, "matmul"),
    ],
)  # fmt: skip
def test_mistakes_keep_their_errors(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
