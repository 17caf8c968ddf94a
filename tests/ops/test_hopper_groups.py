"""Products of groups of rows with stacks of packed matrices: at the block level in the interpreter, roles interleaved
by seeds; that the op calls them; and on a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import hopper_groups
from jtile.ops.grouped_matmul import grouped_matmul_reference
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.row_groups import padded
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


def stack(kind, groups, out, inner, group=None):
    drawn = np.random.default_rng(0).standard_normal((groups * out, inner), np.float32)
    whole = QuantizedTensor.quantize(drawn, kind, *([] if group is None else [group]))
    return jax.tree.map(lambda a: np.asarray(a).reshape(groups, out, -1), whole)


CASES = {  # kind, sizes of groups, rows, out, in, activation, what is chosen otherwise
    "gates, and rows behind": ("fp8", (3, 0, 9, 1), 20, 256, 512, "silu", {"programs": 3}),
    "as many rows as a tile, twice": ("fp8", (0, 16, 0, 1), 17, 128, 512, None, {"columns": 8, "programs": 2}),
    "an odd number of rounds": ("int8", (2, 1, 0), 3, 256, 768, None, {"programs": 2}),
    "scales of groups": ("q8_0", (5, 1), 6, 128, 512, "gelu", {}),
    "four bits": ("q4_1", (0, 4, 2, 0, 3), 12, 128, 512, None, {"programs": 4}),
    "no rows": ("q4_0", (0, 0), 9, 128, 512, "silu", {}),
    "two consumers, each with slots of its own": ("fp8", (40, 3), 50, 128, 512, None, {"programs": 1}),
    "the same with four bits and gates": ("q4_1", (33, 0), 50, 128, 512, "silu", {"programs": 1}),
    "tiles of many rows": ("fp8", (70, 3), 75, 128, 512, None, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_products(case):
    kind, sizes, m, out, inner, activation, options = CASES[case]
    w, x = stack(kind, len(sizes), out, inner), normal(2, m, inner, dtype="bfloat16")
    p, of = w.packed(), np.asarray(sizes, np.int32)
    meta = hopper_groups.choice(m, len(sizes), out, inner, kind, activation is not None) | options
    operand = Weight(p.codes, p.scale, p.scale if p.minimum is None else p.minimum)
    options = {"kind": kind, "activation": activation, "out_dtype": "float32", "seed": len(case)}
    y = hopper_groups.hopper_grouped_product.interpret(x, operand, padded(of), **options, **meta)
    want = evaluated(lambda x: grouped_matmul_reference(x, w, of, transpose_w=True, activation=activation))(
        np.asarray(x, np.float32)
    )
    # weights with scales of groups are rounded to bfloat16
    assert relative_error(y, want) < (1e-6 if p.scale.shape[-1] == 1 else 6e-3)
    assert (np.asarray(y)[sum(sizes) :] == 0).all()


@pytest.mark.parametrize("kind", ["fp8", "int8", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("gated", [False, True])
def test_slots_of_consumers(kind, gated):
    """Consumers that share the rounds of a row each have the same slots in all rounds: a barrier tells one phase from
    the next only. And buffers fit into shared memory."""
    wide, columns = 1 if kind in ("q4_0", "q4_1") else 2, set()
    for m, inner in itertools.product((1, 8, 9, 17, 33, 65, 200), (256, 512, 768, 7168)):
        with jt.config(arch="sm_90"):
            f = hopper_groups.choice(m, 1, 4096, inner, kind, gated)
        columns.add(f["columns"])
        if f["deep"] > 1:
            assert f["slots"] % f["deep"] == f["x_slots"] % (4 // f["pieces"] * f["deep"]) == 0
        words, x = f["high"] * wide * 64 * 128 * f["slots"], f["columns"] * 128 * f["pieces"] * f["x_slots"]
        scales = f["high"] * 64 * 16 * f["slots"] * {"int8": 0, "q4_1": 2}.get(kind, 1)
        sums = ((f["deep"] - 1) * f["high"] + gated) * 64 * f["columns"] * 4
        assert words + x + scales + sums <= 224 << 10
    assert columns == {8, 16, 32, 64, 128} | ({256} if not gated else set())


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_op_calls_it(activation):
    """Packed stacks on Hopper; and gradients, which other kernels make."""
    sizes, w, x = np.array([5, 0, 2], np.int32), stack("fp8", 3, 128, 256), normal(1, 8, 256, dtype="bfloat16")
    f = lambda x, w: ops.grouped_matmul(x, w, sizes, transpose_w=True, activation=activation, out_dtype=jnp.float32)
    g = jax.grad(lambda x, w: (f(x, w) ** 2).sum())
    with jt.config(arch="sm_90", interpret=True):
        called = [str(jax.make_jaxpr(f)(x, v)) for v in (w, w.packed())]
        assert ["hopper_grouped_product" in text for text in called] == [False, True]
        chosen = ops.choices(lambda x: f(x, w.packed()), x)
        got = evaluated(f)(x, w.packed()), evaluated(g)(x, w.packed())
    assert [c.implementation for c in chosen][:1] == ["warpgroups"]
    want = functools.partial(grouped_matmul_reference, group_sizes=sizes, transpose_w=True, activation=activation)
    exact = lambda x: want(x.astype(jnp.float32), w)
    assert relative_error(got[0], evaluated(exact)(x)) < 1e-6
    slope = evaluated(jax.grad(lambda x: (exact(x) ** 2).sum()))(x)
    assert got[1].dtype == x.dtype and relative_error(got[1], slope) < 1e-2


def test_what_does_not_fit():
    x, w = normal(1, 8, 256, dtype="bfloat16"), stack("fp8", 3, 128, 256)
    why = lambda x, w: hopper_groups.misfit(x, Weight(w.codes, w.scale, w.minimum), None, kind=w.kind)
    assert why(x, w.packed()) is None and "not packed words" in why(x, w)
    assert "not 16-bit floats" in why(np.asarray(x, np.float32), w.packed())
    of = stack("q8_0", 3, 128, 256).packed()
    of = Weight(of.codes, of.scale.astype(np.float32))  # two lines of 16 bytes for a round
    misfit = functools.partial(hopper_groups.misfit, x, of, None, kind="q8_0")
    assert misfit() is None and misfit(activation="silu") == "scales leave no room for gates"
    assert "no multiple of 128" in why(x, stack("fp8", 3, 64, 256).packed())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "q4_1", "q8_0"])
@pytest.mark.parametrize(("m", "groups"), [(256, 64), (200, 8), (300, 8), (2000, 8)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_on_a_gpu(kind, m, groups, activation):
    w, x = stack(kind, groups, 512, 1024), normal(2, m, 1024, dtype="bfloat16")
    shares = np.random.default_rng(m).integers(0, 2 * m // groups, groups)
    sizes = np.minimum(shares, np.maximum(m - np.cumsum(shares) + shares, 0)).astype(np.int32)
    f = jax.jit(lambda x, w: ops.grouped_matmul(x, w, sizes, transpose_w=True, activation=activation))
    got, plain = (f(x, jax.tree.map(jnp.asarray, v)) for v in (w.packed(), w))
    assert "hopper_grouped_product" in str(jax.make_jaxpr(f)(x, w.packed()))
    assert relative_error(got, plain) < 6e-3
    assert all((np.asarray(f(x, w.packed())) == np.asarray(got)).all() for _ in range(10))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "activation"), [("q8_0", None), ("q8_0", "silu"), ("fp8", None)])
def test_thousands_of_calls_have_the_same_bits(kind, activation):
    """Rings of two slots: without a fence in front of the arrivals behind loads, most calls differ on a busy GPU."""
    w, x = jax.tree.map(jnp.asarray, stack(kind, 8, 512, 1024).packed()), normal(2, 200, 1024, dtype="bfloat16")
    sizes = np.array([17, 40, 3, 25, 31, 0, 48, 36], np.int32)
    f = jax.jit(lambda x, w: ops.grouped_matmul(x, w, sizes, transpose_w=True, activation=activation))
    first = f(x, w)

    @jax.jit
    def others(first, x, w):
        once = lambda _, count: count + (f(*jax.lax.optimization_barrier((x, w))) != first).any().astype(jnp.int32)
        return jax.lax.fori_loop(0, 4000, once, jnp.int32(0))

    assert others(first, x, w) == 0
