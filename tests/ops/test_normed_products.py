"""An RMS norm and the product behind it in one kernel: by the interpreter, and its derivative by that of both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles, normed_products
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.testing import relative_error

pytestmark = pytest.mark.usefixtures("by_numpy")

CASES = {  # kind of the weights, rows, out, in, gated
    "bfloat16": ("bfloat16", 2, 20, 1032, False),
    "bfloat16, gated": ("bfloat16", 1, 24, 264, True),
    "q4_1": ("q4_1", 1, 12, 256, False),
    "q8_0, gated": ("q8_0", 2, 12, 256, True),
}


def operands(kind, m, out, inner, gated):
    plain = kind == "bfloat16"
    dtype = jnp.bfloat16 if plain else jnp.float32
    x, residual = (normal(seed, m, inner).astype(dtype) for seed in (1, 2))
    of = lambda w: w.astype(dtype) if plain else QuantizedTensor.quantize(w, kind).packed()
    weights = [of(normal(seed, out, inner)) for seed in (3, 4)][: 1 + gated]
    return x, 1 + normal(5, inner) / 4, weights, residual


def functions(gated):
    name = "rms_norm_gated_mlp" if gated else "rms_norm_matmul"
    return getattr(ops, name), getattr(normed_products, name + "_reference")


@pytest.mark.parametrize("case", CASES)
def test_one_kernel(case, monkeypatch):
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)  # several tiles a program, and pieces of the sum in both
    kind, *sizes, gated = CASES[case]
    x, norm, weights, residual = operands(kind, *sizes, gated)
    op, reference = functions(gated)
    run = lambda x: op(x, norm, *weights, residual=residual, eps=1e-2, out_dtype="float32")
    with jt.config(arch="sm_90", interpret=True):
        traced = str(jax.make_jaxpr(run)(x))
        assert "hopper_norm_gemv" in traced
        rows = [a.reshape(-1, a.shape[-1]) for a in (x, residual)]
        options = dict(eps=1e-2, activation="silu" if gated else None, out_dtype="float32")
        got = normed_products._streamed(*rows, norm, tuple(weights), **options)
    want = reference(x, norm, *weights, residual=residual, eps=1e-2, out_dtype=jnp.float32)
    assert relative_error(got[0], want[0]) < 3e-6
    assert got[1].dtype == residual.dtype
    np.testing.assert_array_equal(np.asarray(got[1], np.float32), np.asarray(want[1], np.float32))


@pytest.mark.parametrize("gated", [False, True])
def test_nothing_in_front_of_the_norm(gated):
    """Without a residual the second result is x."""
    x, norm, weights, _ = operands("bfloat16", 1, 20, 264, gated)
    op, reference = functions(gated)
    want, _ = reference(x, norm, *weights, out_dtype=jnp.float32)
    with jt.config(arch="sm_90", interpret=True):
        options = dict(eps=1e-6, activation="silu" if gated else None, out_dtype="float32")
        assert "hopper_norm_gemv" in str(jax.make_jaxpr(lambda x: op(x, norm, *weights))(x))
        got, same = normed_products._streamed(x, None, norm, tuple(weights), **options)
    assert same is x and relative_error(got, want) < 3e-6
    got, same = op(x, norm, *weights, out_dtype="float32")
    assert relative_error(got, want) < 1e-2
    np.testing.assert_array_equal(np.asarray(same, np.float32), np.asarray(x, np.float32))


@pytest.mark.parametrize("kind", ["bfloat16", "q4_1"])
def test_a_product_and_a_residual(kind):
    """One kernel where it is held in registers, elsewhere none; and what other platforms compute in its place."""
    x, _, (w,), residual = (
        y if k == 2 else jax.tree.map(lambda a: a.astype(jnp.bfloat16), y)
        for k, y in enumerate(operands(kind, 1, 16, 512, False))
    )
    matrix = w.dequantize() if kind == "q4_1" else w.astype(jnp.float32)
    want = x.astype(jnp.float32) @ matrix.T + residual[:, :16].astype(jnp.float32)
    with jt.config(arch="sm_90", interpret=True):
        assert normed_products.product_and_residual(x, w, residual[:, :16]) is None
        with jt.config(overlap=True):
            both = lambda x: normed_products.product_and_residual(x, w, residual[:, :16])
            assert "hopper_held" in str(jax.make_jaxpr(both)(x))
            here, got = both(x), normed_products._held(x, w, residual[:, :16])
    with jt.config(overlap=True, arch=None):
        if "warpgroup products" not in jt.target().features:
            assert normed_products.product_and_residual(x, w, residual[:, :16]) is None
    for y in (here, got):
        assert y.dtype == jnp.bfloat16 and relative_error(y, want) < 1e-2


@pytest.mark.parametrize("gated", [False, True])
def test_as_a_function(gated):
    """With more axes, elsewhere than on Hopper, and the gradients of the norm and the product."""
    x, norm, weights, residual = operands("bfloat16", 1, 24, 128, gated)
    x, residual, weights = (
        x[None].astype(jnp.float32),
        residual[None].astype(jnp.float32),
        [w.astype(jnp.float32) for w in weights],
    )
    op, reference = functions(gated)
    of = lambda f: lambda x, norm, residual, w: f(x, norm, *w, residual=residual)
    total = lambda f: lambda *args: sum((y**2).sum() for y in of(f)(*args))
    args = x, norm, residual, weights
    for got, want in zip(of(op)(*args), of(reference)(*args), strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 3e-6
    gradients = zip(*(jax.tree.leaves(jax.grad(total(f), (0, 1, 2, 3))(*args)) for f in (op, reference)), strict=True)
    assert all(relative_error(got, want) < 1e-5 for got, want in gradients)


def test_what_fits_no_call():
    x, norm, (gate, up), residual = operands("bfloat16", 1, 24, 128, True)
    with pytest.raises(
        KernelValueError, match=r"x \(1, 128\) does not fit a weight of \[24, 64\]; expected \[24, 128\]"
    ):
        ops.rms_norm_matmul(x, norm, gate[:, :64], residual=residual)
    with pytest.raises(KernelValueError, match="residual"):
        ops.rms_norm_matmul(x, norm, gate, residual=residual[:, :64])
    with pytest.raises(KernelTypeError, match="two float weights, or two quantised ones of one kind"):
        quantised = QuantizedTensor.quantize(up.astype(jnp.float32), "q8_0")
        ops.rms_norm_gated_mlp(x, norm, gate, quantised, residual=residual)
    with pytest.raises(KernelValueError, match="silly"):
        ops.rms_norm_gated_mlp(x, norm, gate, up, residual=residual, activation="silly")
    with pytest.raises(KernelTypeError, match="int32"):
        ops.rms_norm_matmul(x.astype(jnp.int32), norm, gate, residual=residual)


@pytest.mark.gpu
def test_products_that_overlap_on_the_gpu():
    """A loop over products, each of which reads its matrix while the one in front still runs: the same bits as without,
    in a command buffer, and in one that is changed since buffers have moved."""
    matrices = [normal(k, 2048, 2048, dtype="bfloat16") for k in range(3)]
    norm, start = jnp.ones(2048, jnp.float32), normal(9, 1, 2048, dtype="bfloat16")

    def run(overlap: bool):
        @jax.jit
        def chain(x, matrices):
            def step(_, carry):
                x, total = carry
                with jt.config(overlap=overlap):
                    for w in matrices:
                        x, total = ops.rms_norm_matmul(x, norm, w, residual=total)
                return ops.matmul(x, matrices[0], transpose_b=True), total

            return jax.lax.fori_loop(0, 16, step, (x, jnp.zeros_like(x)))

        return [[np.asarray(y) for y in chain(start + n, [jnp.array(w) for w in matrices])] for n in range(4)]

    for with_, without in zip(run(True), run(False), strict=True):
        for a, b in zip(with_, without, strict=True):
            np.testing.assert_array_equal(a, b)
