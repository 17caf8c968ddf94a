"""What the library does on a GPU, run here: the same kernels with a GPU's tiles, and those that only a GPU takes."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from library import integers, normal

import jtile as jt
from jtile import ops
from jtile.ops import embeddings, flash_attention, gpu_tiles, losses, norms, quantized, scans, sorting, split_attention
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

# the functions of these names hide the modules in jtile.ops
gated_mlp, matmul = (importlib.import_module(f"jtile.ops.{name}") for name in ("gated_mlp", "matmul"))


KINDS = ["q4_0", "q4_1", "q8_0", "int8"]


@pytest.fixture(autouse=True)
def tiles_of_a_gpu():
    with jt.config(arch="sm_90"):
        yield


def same(op, reference, *args, tolerance=3e-6, grad=True):
    """Equal results, and equal gradients of their squares by the float arguments."""
    both_close(op, reference, *args, tolerance=tolerance)
    of = tuple(k for k, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
    if grad:
        total = lambda f: jax.grad(lambda *a: (f(*a).astype(jnp.float32) ** 2).sum(), of)
        both_close(total(op), total(reference), *args, tolerance=3 * tolerance)


def both_close(op, reference, *args, tolerance):
    close(*(evaluated(f)(*args) for f in (op, reference)), tolerance)


def shifted(*shape):
    return np.asarray(normal(0, *shape)) + 3


def close(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) <= tolerance


QUANTISED = [  # outside of make test-all, each kind with two of the shapes
    (kind, *shape)
    for (i, kind), (j, shape) in itertools.product(enumerate(KINDS), enumerate([(1, 12, 320), (2, 7, 96), (5, 70, 96)]))
    if (i + j) % 3 < 2 or thorough()
]


@pytest.mark.parametrize(("kind", "m", "out", "inner"), QUANTISED)
def test_quantised_products(kind, m, out, inner):
    weight, up = (ops.QuantizedTensor.quantize(normal(k, out, inner), kind) for k in (1, 2))
    with_all = lambda f: lambda x, b, r: f(x, weight, bias=b, activation="silu", residual=r)
    args = normal(3, m, inner), normal(4, out), normal(5, m, out)
    turn = (QUANTISED.index((kind, m, out, inner)) + KINDS.index(kind)) % 2 == 0  # each op for each kind and each shape
    same(with_all(ops.quantized_matmul), with_all(quantized.quantized_matmul_reference), *args, grad=turn or thorough())
    gated = (lambda x, f=f: f(x, weight, up) for f in (ops.gated_mlp, gated_mlp.gated_mlp_reference))
    same(*gated, args[0], grad=not turn or thorough())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 5])
def test_quantised_products_of_bfloat16(kind, m):
    """Products stay exact to 16 bits of a weight."""
    weight = ops.QuantizedTensor.quantize(normal(1, 24, 64), kind)
    x = normal(2, m, 64, dtype="bfloat16")
    of = lambda f: lambda x: f(x, weight)
    both_close(of(ops.quantized_matmul), of(quantized.quantized_matmul_reference), x, tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e30, 1e16, 1e-12, 1e-30])
def test_quantised_rows_of_any_size(kind, size):
    """Beyond the range in which codes are taken as the bits of subnormal numbers."""
    weight = ops.QuantizedTensor.quantize(normal(1, 6, 64), kind)
    x = np.asarray(normal(2, 1, 64)) * np.float32(size)
    of = lambda f: lambda x: f(x, weight)
    both_close(of(ops.quantized_matmul), of(quantized.quantized_matmul_reference), x, tolerance=3e-6)


def test_quantised_products_of_odd_lengths_and_in_vmap():
    weight = ops.QuantizedTensor.quantize(normal(1, 10, 50), "int8")
    op, reference = (lambda x, f=f: f(x, weight) for f in (ops.quantized_matmul, quantized.quantized_matmul_reference))
    same(op, reference, normal(2, 3, 50))
    x = normal(3, 4, 1, 50)
    both_close(jax.vmap(op), reference, x, tolerance=3e-6)


@pytest.mark.parametrize("transposed", [{}, {"transpose_a": True}, {"transpose_b": True}], ids=str)
def test_products_summed_in_parts(transposed):
    """Few tiles, and long sums: of whole numbers, so that every order of the terms gives the same."""
    a, b = (np.asarray(integers(s, -2, 3, *shape), jnp.bfloat16) for s, shape in enumerate([(70, 8200), (8200, 66)]))
    a, b = a.T if "transpose_a" in transposed else a, b.T if "transpose_b" in transposed else b
    op, reference = (
        lambda a, b, c, f=f: f(a, b, bias=c, activation="relu", out_dtype=jnp.float32, **transposed)
        for f in (ops.matmul, matmul.matmul_reference)
    )
    assert "matmul_parts" in str(jax.make_jaxpr(op)(a, b, normal(0, 66)))
    same(op, reference, a, b, normal(0, 66), tolerance=1e-3)
    if not transposed:
        two = np.stack([a, -a])
        mapped = (jax.vmap(f, (0, None, None)) for f in (op, reference))
        both_close(*mapped, two, b, normal(0, 66), tolerance=1e-6)
        pushed = (lambda a, f=f: jax.jvp(lambda a: f(a, b, normal(0, 66)), (a,), (a,)) for f in (op, reference))
        both_close(*pushed, a, tolerance=1e-2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_a_long_row(smoothing):
    labels = np.array([1, 19999, -100], np.int32)
    options = {"label_smoothing": smoothing}
    op, reference = (
        lambda x, f=f: f(x, labels, **options) for f in (ops.cross_entropy, losses.cross_entropy_reference)
    )
    same(op, reference, 3 * np.asarray(normal(0, 3, 20000)))
    if not smoothing:  # most threads see nothing but -inf
        hole = np.full((3, 20000), -np.inf, np.float32)
        hole[:, 19998:] = 1.0
        close(evaluated(op)(hole)[1:], np.log(np.array([2.0, 1.0], np.float32)), 1e-6)


@pytest.mark.parametrize(("n", "given"), [(16384, "weight bias"), (9001, "weight"), (9001, "bias"), (9001, "")])
def test_layer_norm_of_long_rows(n, given):
    x, params = shifted(5, n), [normal(1 + k, n) for k in range(len(given.split()))]
    call = lambda f: lambda x, *params: f(x, **dict(zip(given.split(), params, strict=True)))
    bn = gpu_tiles.long_rows(n, 2).tiles["bn"]
    assert bn < n  # the last block of 9001 is not whole
    kernel = lambda x, weight=None, bias=None: norms.layer_norm_long_rows(
        x, norms.Affine(weight, bias), bn=bn, eps=1e-5
    )
    same(call(kernel), call(norms.layer_norm_reference), x, *params, grad=False)
    # without a weight the sum of squares is the same for all x
    halves = [np.asarray(v, np.float16) for v in (x, *params)]
    same(call(ops.layer_norm), call(norms.layer_norm_reference), *halves, tolerance=1e-3, grad="weight" in given)


NORMS = ops.layer_norm, norms.layer_norm_reference


def moved_gradients(f):
    """Gradients, and how they change along a direction."""
    gradient = jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    return lambda at, along: jax.jvp(gradient, at, along)


def test_gradients_of_layer_norm_take_the_sums_of_a_row_together():
    x, w, b = shifted(300, 1100), normal(1, 1100), normal(2, 1100)
    assert gpu_tiles.gradients_of_rows(300, 1100, 4, True).tiles["together"]
    same(ops.layer_norm, norms.layer_norm_reference, x, w, b, tolerance=1e-5)
    both_close(*map(moved_gradients, NORMS), (x, w, b), (x, b, w), tolerance=2e-5)


@pytest.mark.parametrize(
    ("rows", "n", "way"),
    [
        (601, 20, {"br": 4, "ahead": True}),  # a last tile of one row, and no help from eps
        (9, 4500, {"br": 1, "again": True, "apart": True, "stages": 3}),
    ],
)
def test_gradients_of_norms_in_tiles_of_rows(rows, n, way):
    x, r, w = normal(0, rows, n), normal(1, rows, n), normal(2, n)
    rms = lambda f: lambda x, r, w: jnp.stack(f(x, w, residual=r, weight_offset=1.0, eps=0.0))
    assert gpu_tiles.gradients_of_rows(rows, n, 4, False).tiles.items() >= way.items()
    same(rms(ops.rms_norm), rms(norms.rms_norm_reference), x, r, w)


def test_gradients_of_norms_of_wide_rows():
    x, r, w, b = normal(0, 9, 4500), normal(1, 9, 4500), normal(2, 4500), normal(3, 4500)
    assert gpu_tiles.gradients_of_rows(9, 4500, 4, True) is None
    both_close(*map(moved_gradients, NORMS), (x, w, b), (r, b, w), tolerance=1e-5)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 9, "softcap": 2.0}], ids=str)
def test_gradients_of_attention(options):
    with_options = lambda f: lambda q, k, v: f(q, k, v, lengths=np.array([70, 33], np.int32), **options)
    args = normal(0, 2, 75, 4, 20), normal(1, 2, 75, 2, 20), normal(2, 2, 75, 2, 20)
    same(with_options(ops.attention), with_options(flash_attention.attention_reference), *args, tolerance=1e-5)


def test_attention_over_a_split_cache():
    args = normal(0, 2, 3, 4, 16), normal(1, 2, 1100, 2, 16), normal(2, 2, 1100, 2, 16), np.array([1100, 5], np.int32)
    both_close(ops.decode_attention, split_attention.decode_attention_reference, *args, tolerance=1e-5)


def test_top_k_of_long_rows():
    x = np.round(np.asarray(normal(0, 2, 20000)), 1)
    x[0, 7] = np.nan
    for k in (3, 40):
        for a, b in zip(*(evaluated(functools.partial(f, k=k))(x) for f in (ops.top_k, sorting.top_k_reference))):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("shape", "axis"), [((3, 5000), 1), ((5000, 3), 0)])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum_in_pieces(shape, axis, reverse):
    op, reference = (lambda x, f=f: f(x, axis, reverse=reverse) for f in (ops.cumsum, scans.cumsum_reference))
    same(op, reference, normal(0, *shape))


def test_gradients_of_an_embedding():
    ids = integers(1, -3, 55, 4, 60)
    op, reference = (lambda t, f=f: f(t, ids) for f in (ops.embedding, embeddings.embedding_reference))
    same(op, reference, normal(0, 50, 33))
