"""One or two rows of x times a matrix, at the block level: in the interpreter, roles interleaved by seeds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal, stored_weight

import jtile as jt
from jtile import ops
from jtile.interpret.block_agents import CopyIn
from jtile.ops import gpu_tiles, hopper_gemv, quantized, streamed_forms
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.matmul import matmul_reference
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # kind, rows of x, out, in, meta-parameters
    "q4_0": ("q4_0", 1, 20, 512, {"rows": 4}),
    "q4_1, two rows": ("q4_1", 2, 12, 768, {}),
    "q8_0, rounds": ("q8_0", 1, 12, 1280, {"roles": 1, "rows": 4}),
    "int8, ragged": ("int8", 1, 24, 1056, {}),
    "bfloat16": ("bfloat16", 2, 20, 520, {"rows": 4}),
    "float16, rounds": ("float16", 1, 8, 2056, {"roles": 1, "slots": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_products(case, monkeypatch):
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)  # several tiles a program
    kind, m, out, inner, options = CASES[case]
    x = np.asarray(normal(2, m, inner, dtype="float16" if kind == "float16" else "bfloat16"))
    weight, matrix = stored_weight(kind, out, inner)
    operands, n = ((weight,), NO_EPILOGUE), 128 // hopper_gemv.bits_of(kind)
    meta = dict(kind=kind, activation=None, out_dtype="float32")
    meta |= streamed_forms.choices(m, inner, kind)[0] | options
    kernel = hopper_gemv.kernel(*operands)
    y = kernel.interpret(x.reshape(m, inner // n, n), *operands, seed=len(case), **meta)
    want = np.asarray(x, np.float32) @ np.asarray(matrix).T
    assert relative_error(y, want) < (1e-5 if hopper_gemv.integers(kind) else 3e-6)


@pytest.mark.parametrize(("sides", "ahead"), [(1, 1), (1, 2), (2, 3), (2, 9)])
def test_what_is_on_its_way(sides, ahead, monkeypatch):
    """Of an early ring only so many pieces are under way at a time, and results have the same bits."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)
    weights = tuple(stored_weight("q4_0", 28, 2048, seed)[0] for seed in (1, 3))
    x, act, under_way = np.asarray(normal(2, 1, 2048, dtype="bfloat16")), CopyIn.act, []

    def run(**paced):
        meta = dict(kind="q4_0", activation="silu", out_dtype="float32", rows=4, roles=2, slots=3) | paced
        kernel = hopper_gemv.kernel(weights, NO_EPILOGUE)
        under_way.clear()
        y = kernel.interpret(x.reshape(1, 64, 32), weights, NO_EPILOGUE, seed=sides + ahead, **meta)
        return y, max(under_way)

    def acts(copy, crew):
        under_way.append(len({id(a.barrier) for a in crew.agents if isinstance(a, CopyIn)}))
        act(copy, crew)

    monkeypatch.setattr(CopyIn, "act", acts)
    want, most = run(sides=sides)
    y, paced = run(sides=sides, ahead=ahead)
    np.testing.assert_array_equal(y, want)
    assert most > ahead >= paced


def test_how_much_is_on_its_way():
    """Of matrices of Llama-3.1-8B three pieces of some 16 KiB."""
    for kind, lines, bytes_ in (("fp8", (), 1024), ("q4_0", (16,), 528), ("bfloat16", (), 2048)):
        for inner, weights in ((4096, 1), (4096, 2), (14336, 1)):
            form = streamed_forms.choices(1, inner, kind, weights > 1, lines, 2)[0]
            paced = streamed_forms.paced(form, kind, weights, lines)
            piece = form["rows"] * form["roles"] * bytes_ / paced["sides"]
            assert (paced["ahead"], round(piece / 1024)) == (3, 16)
            assert paced["ahead"] <= paced["sides"] * form["slots"] * weights
    short = dict(rows=8, roles=1, slots=2)  # 4 KiB are all that a ring has room for
    assert streamed_forms.paced(short, "q4_0", 1, ()) == {"sides": 1, "ahead": 2}


def test_bias_activation_residual_and_two_weights():
    (weight, matrix), (second, up) = (stored_weight("q4_1", 24, 256, seed) for seed in (1, 3))
    x, bias, residual = normal(2, 1, 256), normal(4, 1, 24), normal(5, 1, 24)
    y, z = (np.asarray(x) @ m.T for m in (matrix, up))
    with jt.config(arch="sm_90", interpret=True):
        epilogue = Epilogue(bias, residual)
        full, gated = evaluated(
            lambda x: (
                hopper_gemv.product(x, (weight,), epilogue, kind="q4_1", activation="gelu_tanh"),
                hopper_gemv.product(x, (weight, second), kind="q4_1", activation="silu"),
            )
        )(x)
    want = evaluated(lambda y, z: (jax.nn.gelu(y + bias) + residual, jax.nn.silu(y) * z))(y, z)
    assert relative_error(full, want[0]) < 3e-6
    assert relative_error(gated, want[1]) < 3e-6


def test_the_ops_call_it():
    """On CUDA; elsewhere, and where they are differentiated, other kernels do the same."""
    w, up = (QuantizedTensor.quantize(normal(seed, 24, 256), "q4_1").packed() for seed in (1, 3))
    x, more = normal(2, 1, 256), dict(bias=normal(4, 24), activation="silu", residual=normal(5, 1, 24))
    forms = {
        "one": lambda f: lambda x: f(x, w, **more),
        "two": lambda f: lambda x: jax.nn.silu(f(x, w)) * f(x, up),
    }
    with jt.config(arch="sm_90"):
        for name, op in {"one": forms["one"](ops.quantized_matmul), "two": lambda x: ops.gated_mlp(x, w, up)}.items():
            want = forms[name](quantized.quantized_matmul_reference)
            assert "hopper_gemv" in str(jax.make_jaxpr(op)(x))
            assert relative_error(*(evaluated(f)(x) for f in (op, want))) < 3e-6
            total = [lambda x, f=f: (f(x) ** 2).sum() for f in (op, want)]
            assert relative_error(*(evaluated(jax.grad(f))(x) for f in total)) < 1e-5
        assert relative_error(*(evaluated(lambda x, f=f: jax.jvp(f, (x,), (x,))[1])(x) for f in total)) < 1e-5


def test_rows_of_matmul():
    x, w, bias = (
        normal(seed, *shape, dtype="bfloat16") for seed, shape in ((1, (1, 1, 128)), (2, (24, 128)), (3, (24,)))
    )
    of = lambda f: lambda x, w, bias: f(x, w, bias=bias, activation="silu", transpose_b=True, out_dtype="float32")
    total = lambda f: jax.grad(lambda *args: (of(f)(*args) ** 2).sum(), (0, 1, 2))
    with jt.config(arch="sm_90", interpret=True):
        assert "hopper_gemv" in str(jax.make_jaxpr(of(ops.matmul))(x, w, bias))
        y, got = (evaluated(f(ops.matmul))(x, w, bias) for f in (of, total))
        row = lambda x, b: hopper_gemv.product(x, (Weight(w),), Epilogue(b), kind="bfloat16", activation="silu")
        here = evaluated(row)(np.asarray(x)[0], np.asarray(bias)[None])
    for z in (y, here):
        assert z.size == 24 and relative_error(z.ravel(), evaluated(of(matmul_reference))(x, w, bias).ravel()) < 1e-6
    for g, want in zip(got, evaluated(total(matmul_reference))(x, w, bias), strict=True):
        assert g.shape == want.shape and g.dtype == want.dtype and relative_error(g, want) < 4e-3


def test_rows_of_a_gated_mlp_of_floats():
    """Both matrices in one pass, and the same gradients as in tiles."""
    x, gate, up = (np.asarray(normal(seed, n, 128, dtype="bfloat16")) for seed, n in ((1, 1), (2, 24), (3, 24)))
    of = lambda f: lambda x, gate, up: f(x, gate, up, transpose=True)
    total = lambda f: jax.grad(lambda *args: (of(f)(*args).astype(jnp.float32) ** 2).sum(), (0, 1, 2))
    with jt.config(arch="sm_90", interpret=True):
        assert "hopper_gemv" in str(jax.make_jaxpr(of(ops.gated_mlp))(x, gate, up))
        assert "hopper_gemv" not in str(jax.make_jaxpr(of(ops.gated_mlp))(np.tile(x, (3, 1)), gate, up))
        assert "hopper_gemv" not in str(jax.make_jaxpr(ops.gated_mlp)(x, gate.T, up.T))
        got = evaluated(total(ops.gated_mlp))(x, gate, up)
        both = lambda x, *w: hopper_gemv.product(x, tuple(map(Weight, w)), kind="bfloat16", activation="silu")
        y = evaluated(both)(x, gate, up)
    want = evaluated(of(gated_mlp_reference))
    assert relative_error(y, want(x.astype(np.float32), gate, up)) < 1e-6
    for g, expected in zip(got, evaluated(total(gated_mlp_reference))(x, gate, up), strict=True):
        assert g.dtype == expected.dtype and relative_error(g, expected) < 8e-3


@pytest.mark.parametrize(("kind", "inner"), [("q4_1", 96), ("q8_0", 288)])
def test_scales_that_no_tensor_map_copies(kind, inner, monkeypatch):
    """The roles read them, where kernels overlap: rows of 3 and of 9 scales of 16 bits are no lines of 16 bytes."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)  # several tiles a program
    weight, matrix = stored_weight(kind, 40, inner)
    x = np.asarray(normal(2, 1, inner, dtype="bfloat16"))
    with jt.config(arch="sm_90", interpret=True, overlap=True):
        assert hopper_gemv.misfit(x, weight, kind) is None
        y = evaluated(lambda x: hopper_gemv.product(x, (weight,), kind=kind))(x)
    assert relative_error(y, np.asarray(x, np.float32) @ np.asarray(matrix).T) < 1.2e-5


@pytest.mark.parametrize("scale", [1e30, 1e-30, 0.0, np.inf])
def test_any_size_of_x(scale):
    """x is brought to the range of the numbers that codes become."""
    w, x = QuantizedTensor.quantize(normal(1, 8, 256), "q4_0").packed(), normal(2, 1, 256)
    with jt.config(arch="sm_90", interpret=True):
        x0 = np.array(x) * np.float32(1 if np.isinf(scale) else scale)
        if np.isinf(scale):
            x0[0, 3] = scale
        y = evaluated(lambda x: hopper_gemv.product(x, (Weight(w.codes, w.scale),), kind="q4_0"))(x0)
    if np.isinf(scale):
        assert not np.isfinite(y).any()
    else:
        want = evaluated(quantized.quantized_matmul_reference)(x, w) * np.float32(scale)
        assert float(abs(y - want).max()) <= 1e-4 * scale


@pytest.mark.parametrize(
    ("m", "inner", "dtype", "why"),
    [
        (3, 512, "uint32", "there are 3 rows, and lanes hold two"),
        (1, 512, "uint8", "codes are uint8 of 512 columns: not packed words"),
        (1, 288, "uint32", "codes are uint32 of 288 columns: .* not in lines of copies"),
        (1, 1 << 17, "uint32", "rows of 131072 leave no room in shared memory"),
    ],
)
def test_what_it_does_not_take(m, inner, dtype, why):
    stored = lambda inner, dtype: map(jax.ShapeDtypeStruct, ((8, inner // 8), (8, inner // 32)), (dtype, jnp.float16))
    of = lambda m, inner, dtype: (
        jax.ShapeDtypeStruct((m, inner), jnp.bfloat16), Weight(*stored(inner, dtype)), "q4_0"
    )  # fmt: skip
    assert hopper_gemv.misfit(*of(1, 512, "uint32")) is None
    assert re.search(why, hopper_gemv.misfit(*of(m, inner, dtype)) or "")
    row, matrix = (jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (1, 8))
    assert "not 16-bit floats" in (hopper_gemv.misfit(row, Weight(matrix), "float32") or "")
