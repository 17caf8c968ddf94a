"""Which implementation of an op a call gets, and what derivatives, other platforms and errors make of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ops
from jtile.ops import dispatch
from jtile.ops.dispatch import BLOCK_LEVEL, Choice, Implementation, Op

S = jax.ShapeDtypeStruct
X, W = jnp.arange(4.0), jnp.full(4, 3.0)


def here(x, w, *, power):
    return jnp.sin(x) * w["codes"]


def elsewhere(x, w, *, power):
    return x**power * w["codes"]


def only_squares(x, w, *, power):
    return dispatch.first_unmet((power == 2, f"the power is {power}"), (x.shape[0] < 9, f"{x.shape[0]} elements"))


toy = Op(
    "toy",
    Implementation("roles", here, only_squares, BLOCK_LEVEL, portable=False),
    Implementation("squares", elsewhere, only_squares),
    Implementation("any power", elsewhere, lambda x, w, *, power: "the power is negative" if power < 0 else None),
)


def test_the_first_that_fits():
    with jt.config(arch="sm_90"):
        assert toy.choice(X, {"codes": W}, power=2) == Choice("toy", "cuda:sm_90", "roles", "squares")
        third = toy.choice(X, {"codes": W}, power=3)
    assert third.implementation == "any power" and third.elsewhere is None
    assert third.refused == (("roles", "the power is 3"), ("squares", "the power is 3"))
    assert str(third) == "toy on cuda:sm_90: any power\n  not roles: the power is 3\n  not squares: the power is 3"
    with jt.config(arch="gfx942"):
        choice = toy.choice(S((9,), jnp.float32), {"codes": W}, power=2)
        assert choice.refused == (
            ("roles", "target rocm:gfx942 has no warpgroup products"), ("squares", "9 elements"),
        )  # fmt: skip


def test_none_fits():
    with jt.config(arch="sm_90"), pytest.raises(jt.errors.UnsupportedError) as e:
        toy(X, {"codes": W}, power=-1)
    assert e.value.message == (
        "toy: nothing computes this call on target cuda:sm_90 (roles: the power is -1; squares: the power is -1; "
        "any power: the power is negative)"
    )


@pytest.mark.cpu
def test_what_runs_where_the_guess_was_wrong():
    """The stand-in, and its derivatives, by what moves: frozen operands and integers may lie beside."""
    frozen = lambda w: jax.lax.stop_gradient({"codes": w, "counts": jnp.arange(3), "none": None})
    f = lambda x, w: toy(x, frozen(w), power=2)
    with jt.config(arch="sm_90"):
        np.testing.assert_allclose(jax.jit(f)(X, W), X**2 * 3)  # on a CPU
        text = str(jax.make_jaxpr(f)(X, W))
        assert "platform_index" in text and "sin" in text
        np.testing.assert_allclose(jax.jvp(f, (X, W), (W, W))[1], 2 * X * 3 * 3)
        dx, dw = jax.grad(lambda *a: f(*a).sum(), (0, 1))(X, W)
        np.testing.assert_allclose(dx, 6 * X)
        np.testing.assert_allclose(dw, 0)
        both = lambda x, w: toy(x, {"codes": w}, power=2).sum()
        np.testing.assert_allclose(jax.grad(both, 1)(X, W), X**2)
        np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(both), (None, 0)))(X, W[None] * 2)[0], 12 * X)
        np.testing.assert_allclose(jax.grad(lambda x: jax.grad(both)(x, W).sum())(X), jnp.full(4, 6.0))
        lowered = jax.jit(f).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
        assert "sine" in lowered and "platform_index" not in lowered


def test_choices_of_a_function():
    """Also of what JAX has traced before, and of the steps inside of an op."""
    a, b = S((2, 4096), jnp.bfloat16), S((512, 4096), jnp.bfloat16)
    f = jax.jit(lambda a, b: ops.softmax(ops.matmul(a, b, transpose_b=True)))
    for _ in range(2):
        with jt.config(arch="sm_90"):
            product, rows = ops.choices(f, a, b)
        assert (product.op, product.implementation, product.elsewhere) == (
            "matmul", "rows against a stream of the matrix", "tiles",
        )  # fmt: skip
        assert (rows.op, rows.implementation) == ("softmax", "rows")
    with jt.config(arch="sm_80"):
        product, step, _ = ops.choices(f, a, b)
    assert {why for _, why in product.refused} == {"target cuda:sm_80 has no warpgroup products"}
    assert (step.op, step.implementation) == ("product of matrices", "whole sums")
    assert ops.choices(jnp.sin, X) == []


WANTED = {  # op, operands, options -> what computes it on sm_90, and on a CPU
    "quantized_matmul, rows": (ops.quantized_matmul, (1, 512), "rows against a stream of codes", "rows of codes"),
    "quantized_matmul": (ops.quantized_matmul, (64, 512), "tensor cores", "rows of codes"),
    "top_k": (functools.partial(ops.top_k, k=4), (3, 9000), "pieces of long rows", "picks"),
    "rms_norm": (lambda x: ops.rms_norm(x, x[0]), (3, 40000), "XLA", "rows"),
    "fft": (ops.fft, (1024, 1024), "XLA's", "transforms of rows"),
    "rfft": (ops.rfft, (3, 9), "one of complex numbers", "one of complex numbers"),
    "sparse24": (lambda x: ops.sparse24_matmul(x, ops.sparse24(x)), (512, 16), "the dense weight in memory",
                 "the weight as it is"),
    "grouped": (lambda x: ops.grouped_matmul(x, jnp.stack([x, x]), jnp.full(2, 64), activation="silu"), (128, 128),
                "one kernel", "products, then gates"),
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_choices_of_the_library(name):
    op, shape, on_hopper, on_cpu = WANTED[name]
    args = (S(shape, jnp.bfloat16),)
    if "quantized" in name:
        scale = S((64, shape[1] // 32), jnp.float16)
        args += (ops.QuantizedTensor(S((64, shape[1] // 8), jnp.uint32), scale, None, "q4_0"),)
    with jt.config(arch="sm_90"):
        assert ops.choices(op, *args)[0].implementation == on_hopper
    if jt.platform() == "cpu":
        assert ops.choices(op, *args)[0].implementation == on_cpu
