"""Products with packed quantised weights: at the block level in the interpreter, roles interleaved by seeds, and what
is called where that kernel does not go."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ir, ops
from jtile.ops import hopper_quantized, hopper_quantized_shares, quantized
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

KINDS = ("int8", "q8_0", "fp8", "q4_0", "q4_1")  # mxfp4 has no such form


def weight(kind, out=128, inner=512, seed=1):
    return QuantizedTensor.quantize(normal(seed, out, inner), kind)


@functools.cache
def packed(*of, **more):
    """A weight, and with its codes in words."""
    w = weight(*of, **more)
    return w, w.packed()


def rounded(w, dtype):
    """The weights as the kernel multiplies them: codes times scales in `dtype` (one a row: scaled at the end)."""
    return evaluated(functools.partial(_rounded, dtype=dtype))(w)


def _rounded(w, dtype):
    near = lambda t: t.astype(dtype).astype(jnp.float32)
    if w.kind in ("int8", "fp8"):
        return w.dequantize()
    of_codes = lambda t: jnp.repeat(t, 32, axis=1)
    scale = w.scale.astype(jnp.float32)
    plain = QuantizedTensor(w.codes, jnp.ones_like(w.scale), None, "q4_0" if w.is_4bit else "q8_0").dequantize()
    if w.minimum is None:
        return near(plain * of_codes(near(scale)))
    shift = of_codes(near(w.minimum.astype(jnp.float32) + 8 * scale))
    product = plain * of_codes(near(scale))
    return near((product if dtype == jnp.bfloat16 else near(product)) + shift)  # of bfloat16 rounded once


@pytest.mark.parametrize("kind", KINDS)
def test_packing(kind):
    w = weight(kind, 6, 96)
    p = w.packed()
    assert p.is_packed and p.shape == w.shape and p.nbytes == w.nbytes and p.packed().codes is p.codes
    back = p.unpacked()
    assert back.codes.dtype == w.codes.dtype and np.asarray(back.codes).tobytes() == np.asarray(w.codes).tobytes()
    ids = np.array([[5, 0], [-1, 9]], np.int32)
    views = evaluated(lambda w: [w.dequantize(), w.rows(np.array([4, 0])).dequantize(), ops.embedding(w, ids)])
    for ours, theirs in zip(views(p), views(w), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(jt.errors.KernelTypeError, match=f"packed {kind}, {kind}|{kind}, packed {kind}"):
        QuantizedTensor.concatenate([p, w])


def test_where_words_hold_codes():
    """The table at the head of quantized_tensor.py."""
    k = np.arange(32)
    s, h, t, e = k >> 4, k >> 3 & 1, k >> 1 & 3, k & 1
    four = QuantizedTensor(
        jnp.asarray((k[:16] % 16 | k[16:] % 16 << 4)[None], jnp.uint8), jnp.ones((1, 1)), None, "q4_0"
    )
    words = np.asarray(four.packed().codes)[0]
    np.testing.assert_array_equal(words[t] >> (4 * (2 * s + h) + 16 * e) & 15, k % 16)
    eight = QuantizedTensor(jnp.asarray(k[None] - 16, jnp.int8), jnp.ones((1, 1)), None, "q8_0")
    words = np.asarray(eight.packed().codes)[0]
    np.testing.assert_array_equal(words[4 * s + t] >> (8 * h + 16 * e) & 255, k - 16 + 128)


CASES = {  # rows of x; of W, in; what is chosen otherwise
    "few": (3, 128, 512, {}),
    "ragged": (16, 200, 512, {"high": 2, "deep": 2}),
    "split": (20, 64, 1024, {"deep": 2, "splits": 2}),
    "rounds": (50, 128, 1536, {"high": 2, "deep": 2}),
    "many": (150, 128, 1280, {}),
}


COMBINED = [("q4_1", c) for c in CASES] + [(k, "rounds") for k in KINDS if k != "q4_1"] + [("int8", "ragged")]


@pytest.mark.parametrize(("kind", "case"), COMBINED)
def test_products(kind, case):
    m, out, inner, options = CASES[case]
    dtype = jnp.float16 if case == "ragged" else jnp.bfloat16
    (w, p), x = packed(kind, out, inner), np.asarray(normal(2, m, inner)).astype(dtype)
    meta = hopper_quantized.choice(m, out, inner, kind) | options
    operand = Weight(p.codes, w.scale, w.scale if w.minimum is None else w.minimum)
    y = hopper_quantized.hopper_quantized_product.interpret(x, operand, kind=kind, seed=len(case), **meta)
    want = np.asarray(x, np.float32) @ np.asarray(rounded(w, dtype)).T
    assert relative_error(np.asarray(y).sum(0), want) < 2e-6


STORED = {  # rows of x; of W, in; what is chosen otherwise: results copied out of a buffer of x, or stored
    "copied": (150, 200, 512, {}),
    "copied, few rounds": (40, 136, 256, {"high": 2, "deep": 1}),
    "copied, rounds in turns": (50, 136, 1024, {"high": 2, "deep": 2, "splits": 1}),
    "rows of no multiple of 16 bytes": (130, 100, 512, {}),
    "x in larger pieces": (16, 128, 512, {"high": 2, "deep": 2}),
}


@pytest.mark.parametrize("case", STORED)
def test_results_in_the_dtype_of_x(case):
    m, out, inner, options = STORED[case]
    (w, p), x = packed("q4_0", out, inner), normal(2, m, inner, dtype="bfloat16")
    meta = dict(kind="q4_0", **hopper_quantized.choice(m, out, inner, "q4_0") | options)
    operands = x, Weight(p.codes, w.scale, w.scale)
    y, z = (
        hopper_quantized.hopper_quantized_product.interpret(*operands, out_dtype=dtype, seed=len(case), **meta)
        for dtype in ("float32", "bfloat16")
    )
    assert z.dtype == jnp.bfloat16
    np.testing.assert_array_equal(z, y.astype(jnp.bfloat16))


@pytest.mark.parametrize(("m", "arch"), [(1, None), (5, None), (1, "sm_90"), (5, "sm_90"), (70, "sm_90")])
def test_out_dtype(m, arch):
    w, x, bias = packed("q4_0", 64, 256)[1], normal(2, m, 256, dtype="bfloat16"), normal(4, 64)
    with jt.config(arch=arch, interpret=True):
        for more in ({}, {"bias": bias, "activation": "silu"}):
            op = lambda x, more=more: [ops.quantized_matmul(x, w, out_dtype=d, **more) for d in ("float32", "bfloat16")]
            y, z = evaluated(op)(x)
            assert z.dtype == jnp.bfloat16 and relative_error(z, y) < 3e-3
            total = lambda x, dtype, more=more: ops.quantized_matmul(x, w, out_dtype=dtype, **more).sum(
                dtype=jnp.float32
            )
            g, h = (evaluated(jax.grad(functools.partial(total, dtype=d)))(x) for d in ("float32", "bfloat16"))
            assert h.dtype == x.dtype and relative_error(h, g) < 1e-2
    with pytest.raises(jt.errors.KernelTypeError, match="out_dtype int8; expected a float, for instance bfloat16"):
        ops.quantized_matmul(x, w, out_dtype="int8")


@pytest.mark.parametrize("kind", ["q4_1", "int8"])
def test_the_op_calls_it(kind):
    w, up = weight(kind, 64, 256), weight(kind, 64, 256, seed=3)
    x, bias, residual = normal(2, 5, 256, dtype="bfloat16"), normal(4, 64), normal(5, 5, 64)
    reference = quantized.quantized_matmul_reference
    op = lambda x, w: ops.quantized_matmul(x, w, bias=bias, activation="silu", residual=residual)
    with jt.config(arch="sm_90", interpret=True):
        called = str(jax.make_jaxpr(op)(x, w.packed()))  # on CUDA; elsewhere, and for gradients, what takes plain codes
        y = evaluated(op)(x, w.packed())
        g = evaluated(jax.grad(lambda x: (op(x, w.packed()) ** 2).sum()))(x)
        gated = evaluated(ops.gated_mlp)(x, w.packed(), up.packed())
    of = lambda x: reference(x, w, bias=bias, activation="silu", residual=residual)
    assert relative_error(y, evaluated(of)(x)) < 4e-3 and "hopper_quantized" in called
    assert g.dtype == x.dtype and relative_error(g, evaluated(jax.grad(lambda x: (of(x) ** 2).sum()))(x)) < 1e-2
    want = evaluated(lambda x: jax.nn.silu(reference(x, w)) * reference(x, up))(x)
    assert relative_error(gated, want) < 6e-3


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_of_one_row(kind):
    """In a multiple of 32: those that tensor maps cannot say are taken from memory as they are."""
    w, x, one = weight(kind, 12, 320), normal(2, 1, 320, dtype="bfloat16"), np.ones((), jnp.bfloat16)
    with jt.config(arch="sm_90"):
        got, large = (evaluated(ops.quantized_matmul)(np.asarray(x) * scale, w.packed()) for scale in (one, one * 1e30))
    want = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64).T
    # a GPU sums integers up, of 16 bits for a number of x
    assert relative_error(got, want) < 1e-5 and relative_error(large, want * 1e30) < 3e-3


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_packed_weights_elsewhere(arch):
    """What has no kernel for words unpacks them: CPUs, float32 of several rows, reverse mode."""
    w, up, x = weight("q4_1", 12, 96), weight("q4_1", 12, 96, seed=3), normal(2, 4, 96)
    f = lambda x, w: ops.quantized_matmul(x, w, activation="silu")
    g = jax.grad(lambda x, w: (f(x, w) ** 2).sum())
    with jt.config(arch=arch):
        for fn, y in ((f, x), (g, np.asarray(x)[:1]), (lambda x, w: ops.gated_mlp(x, w, up), x)):
            assert relative_error(*(evaluated(fn)(y, v) for v in (w.packed(), w))) < 1e-6


SHARED = {  # squares of a program, rows of x; of W, in; dtype of the result: tiles that hang over either way
    "five": (5, 300, 384, 512, "bfloat16"),
    "six": (6, 250, 320, 256, "float32"),
    "seven": (7, 256, 448, 512, "bfloat16"),
    "seven, hanging over": (7, 200, 328, 256, "float32"),
    "five, more rounds than slots": (5, 256, 320, 1280, "bfloat16"),
}


@pytest.mark.parametrize("kind", ["q4_0", "int8"])
@pytest.mark.parametrize("case", SHARED)
def test_shares_of_tiles(case, kind):
    """They give the bits of whole tiles."""
    squares, m, out, inner, dtype = SHARED[case]
    (w, p), x = packed(kind, out, inner), np.asarray(normal(2, m, inner)).astype(jnp.bfloat16)
    operand, options = Weight(p.codes, w.scale, w.scale), dict(kind=kind, out_dtype=dtype, seed=squares)
    rings = dict(slots=2, x_slots=4, registers=hopper_quantized_shares.REGISTERS[squares])
    y = hopper_quantized_shares.hopper_quantized_shares.interpret(x, operand, squares=squares, **rings, **options)
    meta = hopper_quantized.choice(m, out, inner, kind) | {"columns": 256, "deep": 1, "splits": 1, "x_slots": 4}
    want = hopper_quantized.hopper_quantized_product.interpret(x, operand, **meta, **options)
    np.testing.assert_array_equal(y, want[0])


def test_where_programs_have_shares():
    """Where whole tiles would leave many of the 132 multiprocessors idle; elsewhere tiles get narrower."""
    squares = lambda *sizes: hopper_quantized_shares.squares(*sizes, 132)
    assert squares(256, 10240, 4096) == 5 and squares(256, 11008, 4096) == 6 and squares(512, 6144, 4096) == 6
    assert squares(256, 14336, 4096) is None and squares(256, 4096, 4096) is None and squares(128, 11008, 4096) is None
    form = lambda *sizes: hopper_quantized.tiles_of_many(*sizes, 132)[:2]
    assert form(256, 14336, 4096) == (256, 1) and form(256, 8192, 8192) == (256, 2)
    assert form(256, 4096, 4096) == (64, 1) and form(512, 4096, 4096) == (128, 1) and form(128, 14336, 4096) == (128, 1)


def test_shares_called():
    x, w = jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16), weight("q4_0", 64, 256)
    shapes = lambda a, rows, inner: jax.ShapeDtypeStruct((rows, a.shape[1] * inner // 256), a.dtype)
    large = jax.tree.map(lambda a: shapes(a, 10240, 4096), w.packed())
    with jt.config(arch="sm_90"):
        called = str(jax.make_jaxpr(ops.quantized_matmul)(x, large))
    assert "hopper_quantized_shares" in called


@pytest.mark.parametrize("rows", [5, 256])
def test_what_stands_behind_waits_for_what_stands_in_front(rows):
    """All roles are early: the kernel behind, which may read lengths early, starts when these have waited."""
    p, meta = packed("q4_0", 128, 512)[1], hopper_quantized.choice(rows, 128, 512, "q4_0")
    x, operand = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16), Weight(p.codes, p.scale, p.scale)
    traced = [hopper_quantized.hopper_quantized_product.lower(x, operand, kind="q4_0", **meta)]
    shares = dict(squares=5, slots=2, x_slots=4, registers=hopper_quantized_shares.REGISTERS[5])
    traced.append(hopper_quantized_shares.hopper_quantized_shares.lower(x, operand, kind="q4_0", **shares))
    for lowered in traced:
        roles = next(op for op in lowered.program.kernel.body.ops if isinstance(op, ir.Roles))
        waits = [[op for op in body.ops if isinstance(op, ir.KernelsWait)] for body in roles.bodies]
        assert all(roles.early) and all(len(ops) == 1 and ops[0].hold for ops in waits)


@pytest.mark.parametrize(
    ("kind", "rows", "ahead"),
    [("q4_0", 256, True), ("q8_0", 256, True), ("q4_1", 256, False), ("q4_0", 128, False), ("q4_0", 64, False)],
)
def test_words_are_loaded_while_a_large_tile_multiplies(kind, rows, ahead):
    """The words of the next round, between the start of the last product of a round and the wait for it."""
    p, meta = packed(kind, 128, 1024)[1], hopper_quantized.choice(rows, 14336, 4096, kind)
    x, operand = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16), Weight(p.codes, p.scale, p.scale)
    lowered = hopper_quantized.hopper_quantized_product.lower(x, operand, kind=kind, **meta)
    roles = next(op for op in lowered.program.kernel.body.ops if isinstance(op, ir.Roles))
    loop = next(op for op in roles.bodies[0].ops if isinstance(op, ir.For))
    kinds = [type(op) for op in loop.body.ops if isinstance(op, ir.LoadShared | ir.DotAsync | ir.DotWait)]
    last = len(kinds) - 1 - kinds[::-1].index(ir.DotAsync)
    assert kinds[-1] is ir.DotWait and (ir.LoadShared in kinds[last:]) == ahead


def test_room_for_wide_scales():
    """Scales and minima in float32 are twice as wide: fewer slots, but as many as before elsewhere."""
    for kind in ("q4_0", "q4_1", "q8_0", "int8"):
        w = packed(kind, 8, 4096)[1]
        of = Weight(w.codes, w.scale, w.minimum)
        for m in (16, 64, 128, 256):
            meta = hopper_quantized.choice(m, 4096, 4096, kind)
            assert hopper_quantized._slots(meta, hopper_quantized.row_bytes(of, kind, 4096), 2) == meta["slots"]
    wide = Weight(w.codes, *(jnp.ones((8, 128), jnp.float32),) * 2)
    meta = hopper_quantized.choice(256, 4096, 4096, "q4_1")
    assert hopper_quantized._slots(meta, hopper_quantized.row_bytes(wide, "q4_1", 4096), 2) == 4 < meta["slots"]


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_weights_without_rows(arch):
    """Of packed codes, too, which have no length to be unpacked to."""
    p = packed("q4_0", 128, 512)[1]
    weight = QuantizedTensor(p.codes[:0], p.scale[:0], None, "q4_0")
    with jt.config(arch=arch):
        for rows in (0, 3, 200):
            x = jnp.ones((rows, 512), jnp.bfloat16)
            y, pull = jax.vjp(lambda x: ops.quantized_matmul(x, weight, out_dtype=jnp.bfloat16), x)
            assert y.shape == (rows, 0) and y.dtype == jnp.bfloat16
            assert not jnp.any(pull(y)[0])
