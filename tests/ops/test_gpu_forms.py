"""What the library does on a GPU, run here: the same kernels with a GPU's tiles, and those that only a GPU takes."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from library import integers, normal

import jtile as jt
from jtile import ops
from jtile.ops import embeddings, flash_attention, gpu_tiles, losses, norms, quantized, scans, sorting, split_attention
from jtile.testing import relative_error

# the functions of these names hide the modules in jtile.ops
gated_mlp, matmul = (importlib.import_module(f"jtile.ops.{name}") for name in ("gated_mlp", "matmul"))


@pytest.fixture(autouse=True)
def tiles_of_a_gpu():
    with jt.config(arch="sm_90"):
        yield


def same(op, reference, *args, tolerance=3e-6, grad=True):
    """Equal results, and equal gradients of their squares by the float arguments."""
    close(op(*args), reference(*args), tolerance)
    of = tuple(k for k, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
    if grad:
        total = lambda f: lambda *a: (f(*a).astype(jnp.float32) ** 2).sum()
        close(jax.grad(total(op), of)(*args), jax.grad(total(reference), of)(*args), 3 * tolerance)


def close(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) <= tolerance


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "int8"])
@pytest.mark.parametrize(("m", "out", "inner"), [(1, 12, 320), (2, 7, 96), (5, 70, 96)])
def test_quantised_products(kind, m, out, inner):
    weight, up = (ops.QuantizedTensor.quantize(normal(k, out, inner), kind) for k in (1, 2))
    with_all = lambda f: lambda x, b, r: f(x, weight, bias=b, activation="silu", residual=r)
    args = normal(3, m, inner), normal(4, out), normal(5, m, out)
    same(with_all(ops.quantized_matmul), with_all(quantized.quantized_matmul_reference), *args)
    same(lambda x: ops.gated_mlp(x, weight, up), lambda x: gated_mlp.gated_mlp_reference(x, weight, up), args[0])


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "int8"])
@pytest.mark.parametrize("m", [1, 5])
def test_quantised_products_of_bfloat16(kind, m):
    """Products stay exact to 16 bits of a weight."""
    weight = ops.QuantizedTensor.quantize(normal(1, 24, 64), kind)
    x = normal(2, m, 64, dtype="bfloat16")
    close(ops.quantized_matmul(x, weight), quantized.quantized_matmul_reference(x, weight), 1e-5)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "int8"])
@pytest.mark.parametrize("size", [1e30, 1e16, 1e-12, 1e-30])
def test_quantised_rows_of_any_size(kind, size):
    """Beyond the range in which codes are taken as the bits of subnormal numbers."""
    weight = ops.QuantizedTensor.quantize(normal(1, 6, 64), kind)
    x = normal(2, 1, 64) * size
    close(ops.quantized_matmul(x, weight), quantized.quantized_matmul_reference(x, weight), 3e-6)


def test_quantised_products_of_odd_lengths_and_in_vmap():
    weight = ops.QuantizedTensor.quantize(normal(1, 10, 50), "int8")
    op, reference = (lambda x, f=f: f(x, weight) for f in (ops.quantized_matmul, quantized.quantized_matmul_reference))
    same(op, reference, normal(2, 3, 50))
    x = normal(3, 4, 1, 50)
    close(jax.vmap(op)(x), reference(x), 3e-6)


@pytest.mark.parametrize("transposed", [{}, {"transpose_a": True}, {"transpose_b": True}], ids=str)
def test_products_summed_in_parts(transposed):
    """Few tiles, and long sums: of whole numbers, so that every order of the terms gives the same."""
    a, b = (integers(k, -2, 3, *shape).astype(jnp.bfloat16) for k, shape in enumerate([(70, 8200), (8200, 66)]))
    a, b = a.T if "transpose_a" in transposed else a, b.T if "transpose_b" in transposed else b
    op, reference = (
        lambda a, b, c, f=f: f(a, b, bias=c, activation="relu", out_dtype=jnp.float32, **transposed)
        for f in (ops.matmul, matmul.matmul_reference)
    )
    assert "matmul_parts" in str(jax.make_jaxpr(op)(a, b, normal(0, 66)))
    same(op, reference, a, b, normal(0, 66), tolerance=1e-3)
    if not transposed:
        two = jnp.stack([a, -a])
        close(*(jax.vmap(f, (0, None, None))(two, b, normal(0, 66)) for f in (op, reference)), 1e-6)
        close(*(jax.jvp(lambda a, f=f: f(a, b, normal(0, 66)), (a,), (a,)) for f in (op, reference)), 1e-2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_a_long_row(smoothing):
    labels = jnp.array([1, 19999, -100])
    options = {"label_smoothing": smoothing}
    op, reference = (
        lambda x, f=f: f(x, labels, **options) for f in (ops.cross_entropy, losses.cross_entropy_reference)
    )
    same(op, reference, normal(0, 3, 20000) * 3)
    if not smoothing:  # most threads see nothing but -inf
        hole = jnp.full((3, 20000), -jnp.inf).at[:, 19998:].set(1.0)
        close(op(hole)[1:], jnp.log(jnp.array([2.0, 1.0])), 1e-6)


@pytest.mark.parametrize(("n", "given"), [(16384, "weight bias"), (9001, "weight"), (9001, "bias"), (9001, "")])
def test_layer_norm_of_long_rows(n, given):
    x, params = normal(0, 5, n) + 3, [normal(1 + k, n) for k in range(len(given.split()))]
    call = lambda f: lambda x, *params: f(x, **dict(zip(given.split(), params, strict=True)))
    bn = gpu_tiles.long_rows(n, 2).tiles["bn"]
    assert bn < n  # the last block of 9001 is not whole
    kernel = lambda x, weight=None, bias=None: norms.layer_norm_long_rows(
        x, norms.Affine(weight, bias), bn=bn, eps=1e-5
    )
    same(call(kernel), call(norms.layer_norm_reference), x, *params, grad=False)
    # without a weight the sum of squares is the same for all x
    halves = [v.astype(jnp.float16) for v in (x, *params)]
    same(call(ops.layer_norm), call(norms.layer_norm_reference), *halves, tolerance=1e-3, grad="weight" in given)


def test_slopes_of_layer_norm_take_the_sums_of_a_row_together():
    x, w, b = normal(0, 300, 1100) + 3, normal(1, 1100), normal(2, 1100)
    assert gpu_tiles.slopes_of_rows(300, 1100, 4, True).tiles["together"]
    same(ops.layer_norm, norms.layer_norm_reference, x, w, b, tolerance=1e-5)
    slope = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    ours, wanted = slope(ops.layer_norm), slope(norms.layer_norm_reference)
    close(jax.jvp(ours, (x, w, b), (x, b, w)), jax.jvp(wanted, (x, w, b), (x, b, w)), 2e-5)


@pytest.mark.parametrize(
    ("rows", "n", "way"),
    [
        (601, 20, {"br": 4, "ahead": True}),  # a last tile of one row, and no help from eps
        (9, 4500, {"br": 1, "again": True, "apart": True, "stages": 3}),
    ],
)
def test_slopes_of_norms_in_tiles_of_rows(rows, n, way):
    x, r, w = normal(0, rows, n), normal(1, rows, n), normal(2, n)
    rms = lambda f: lambda x, r, w: jnp.stack(f(x, w, residual=r, weight_offset=1.0, eps=0.0))
    assert gpu_tiles.slopes_of_rows(rows, n, 4, False).tiles.items() >= way.items()
    same(rms(ops.rms_norm), rms(norms.rms_norm_reference), x, r, w)


def test_slopes_of_norms_of_wide_rows():
    x, r, w, b = normal(0, 9, 4500), normal(1, 9, 4500), normal(2, 4500), normal(3, 4500)
    assert gpu_tiles.slopes_of_rows(9, 4500, 4, True) is None
    slope = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    ours, wanted = slope(ops.layer_norm), slope(norms.layer_norm_reference)
    close(jax.jvp(ours, (x, w, b), (r, b, w)), jax.jvp(wanted, (x, w, b), (r, b, w)), 1e-5)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 9, "softcap": 2.0}], ids=str)
def test_slopes_of_attention(options):
    with_options = lambda f: lambda q, k, v: f(q, k, v, lengths=jnp.array([70, 33]), **options)
    args = normal(0, 2, 75, 4, 20), normal(1, 2, 75, 2, 20), normal(2, 2, 75, 2, 20)
    same(with_options(ops.attention), with_options(flash_attention.attention_reference), *args, tolerance=1e-5)


def test_attention_over_a_split_cache():
    args = normal(0, 2, 3, 4, 16), normal(1, 2, 1100, 2, 16), normal(2, 2, 1100, 2, 16), jnp.array([1100, 5])
    close(ops.decode_attention(*args), split_attention.decode_attention_reference(*args), 1e-5)


def test_top_k_of_long_rows():
    x = jnp.round(normal(0, 2, 20000), 1).at[0, 7].set(jnp.nan)
    for k in (3, 40):
        for a, b in zip(ops.top_k(x, k), sorting.top_k_reference(x, k)):
            assert jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.floating))


@pytest.mark.parametrize(("shape", "axis"), [((3, 5000), 1), ((5000, 3), 0)])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum_in_pieces(shape, axis, reverse):
    op, reference = (lambda x, f=f: f(x, axis, reverse=reverse) for f in (ops.cumsum, scans.cumsum_reference))
    same(op, reference, normal(0, *shape))


def test_slopes_of_an_embedding():
    ids = integers(1, -3, 55, 4, 60)
    op, reference = (lambda t, f=f: f(t, ids) for f in (ops.embedding, embeddings.embedding_reference))
    same(op, reference, normal(0, 50, 33))
