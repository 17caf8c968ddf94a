"""Attention of MLA over whole sequences: keys in two parts, values of another size; and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal, shapes_and_dtypes
from machines import machine

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.interpret import interpret
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.ops.latent_gradients import latent_gradient_of_queries
from jtile.ops.latent_prefill import latent_prefill, mla_attention_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
ROWS = {"lengths": np.array([90, 37], np.int32), "offsets": np.array([50, 3], np.int32)}


def operands(batch, t, s, heads, d, r, e, dtype="float32"):
    shapes = (batch, t, heads, d + r), (batch, s, heads, d), (batch, s, r), (batch, s, heads, e)
    return [normal(k, *shape, dtype=dtype) for k, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("sizes", "dtype"), shapes_and_dtypes([(2, 70, 70, 3, 16, 8, 20), (1, 140, 300, 1, 128, 64, 128)])
)
def test_sizes(sizes, dtype):
    causal = sizes[1] == sizes[2]
    args = operands(*sizes, dtype=dtype)
    agree(ops.mla_attention, mla_attention_reference, *args, tolerance=TOLERANCE[dtype], causal=causal)


def test_rows_of_a_chunked_prompt():
    args = operands(2, 40, 90, 2, 16, 8, 20)
    agree(ops.mla_attention, mla_attention_reference, *args, tolerance=2e-6, **ROWS)
    spoiled = [np.array(x) for x in args[1:]]
    for x in spoiled:
        x[1, 37:] = np.nan
    run = evaluated(lambda *args: ops.mla_attention(*args, **ROWS))
    np.testing.assert_array_equal(run(args[0], *spoiled), run(*args))


def test_gradients():
    args = operands(2, 20, 30, 2, 8, 4, 6)
    rows = {"lengths": np.array([30, 17], np.int32), "offsets": np.array([10, 3], np.int32)}
    gradients_agree(ops.mla_attention, mla_attention_reference, *args, of=4, **rows)


def test_vmap_and_no_work():
    args = operands(1, 20, 20, 2, 8, 4, 6)
    ropes = np.stack([args[2], -np.asarray(args[2])])
    each = lambda op: evaluated(jax.vmap(lambda rope: op(args[0], args[1], rope, args[3])))(ropes)
    np.testing.assert_allclose(each(ops.mla_attention), each(mla_attention_reference), rtol=2e-5, atol=1e-6)
    assert ops.mla_attention(args[0][:, :0], *args[1:]).shape == (1, 0, 2, 6)


@pytest.mark.parametrize(("causal", "bk", "lengths"), [(True, 128, None), (False, 64, 150)])
def test_on_hopper_it_is_a_kernel_of_roles(causal, bk, lengths):
    args = operands(1, 256, 256, 1, 128, 64, 128, dtype="bfloat16")
    rows = () if lengths is None else (jnp.array([lengths], jnp.int32),)
    options = {"bq": 128, "bk": bk, "scale": 0.07, "causal": causal, "save": True}
    planned = steps(latent_prefill.lower(*args, *(rows or (None,)), None, **options).program.kernel, machine(), {})
    assert not isinstance(planned, NoPlan), str(planned)
    o, _ = interpret(planned.kernel, [np.asarray(x) for x in (*args, *rows)], seed=bk)
    options = {"causal": causal, "scale": 0.07, "lengths": rows[0] if rows else None}
    assert relative_error(o, evaluated(lambda *args: mla_attention_reference(*args, **options))(*args)) < 4e-3


def test_gradients_of_queries_are_a_kernel_of_roles_on_hopper():
    q, k, rope, v = operands(1, 256, 256, 1, 128, 64, 128, dtype="bfloat16")
    row = jnp.zeros((1, 1, 256), jnp.float32)
    options = {"bq": 128, "bk": 64, "scale": 0.07, "causal": True}
    lowered = latent_gradient_of_queries.lower(q, k, rope, v, v, row, row, None, None, **options)
    planned = steps(lowered.program.kernel, machine(), {})
    assert not isinstance(planned, NoPlan), str(planned)


def test_errors():
    q, k, rope, v = operands(1, 4, 4, 2, 8, 4, 6)
    for error, problem, args, options in [
        (KernelValueError, "q has shape", (q[..., :11], k, rope, v), {}),
        (KernelValueError, "k has shape", (q, k[:, :, :1], rope, v), {}),
        (KernelValueError, "rope has shape", (q, k, rope[:, :2], v), {}),
        (KernelValueError, "lengths has shape", (q, k, rope, v), {"lengths": jnp.array([1, 2])}),
        (KernelTypeError, "one dtype", (q, k, rope.astype("bfloat16"), v), {}),
        (KernelTypeError, "lengths is an array, got list", (q, k, rope, v), {"lengths": [4]}),
        (KernelTypeError, "rope is an array, got NoneType", (q, k, None, v), {}),
    ]:
        with pytest.raises(error, match=problem):
            ops.mla_attention(*args, **options)
    with jt.config(interpret=True):
        agree(ops.mla_attention, mla_attention_reference, q, k, rope, v, tolerance=2e-6)
