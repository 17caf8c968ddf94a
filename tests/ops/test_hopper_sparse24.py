"""Few rows times a 2:4 weight in roles on Hopper, in the interpreter, and when they are chosen."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import hopper_sparse24 as module
from jtile.ops.two_of_four import sparse24_matmul_reference


@pytest.mark.parametrize(("m", "n", "k", "dtype"), [(3, 72, 640, "bfloat16"), (9, 64, 1280, "float16")])
def test_against_the_dense_weight(m, n, k, dtype):
    """Rows that fill no tile, a weight whose last tile of rows and last round are not whole."""
    x, w = normal(0, m, k, dtype=dtype), ops.sparse24(normal(1, n, k, dtype=dtype))
    form, p = module.choice(m), k // 8
    parts = np.zeros((8, form.columns, p), x.dtype)
    parts[:, :m] = np.asarray(x).reshape(m, 2, p, 4).transpose(1, 3, 0, 2).reshape(8, m, p)
    y = module.hopper_sparse24.interpret(parts.reshape(-1, p), w.values, w.codes, m=m, form=form)
    wanted = sparse24_matmul_reference(x, w, out_dtype="float32")
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * abs(np.asarray(wanted)).max())


def test_choice():
    x, w = jnp.zeros((3, 256), "bfloat16"), ops.sparse24(jnp.zeros((64, 256), "bfloat16"))
    with jt.config(arch="sm_90"):
        found = [c for c in ops.choices(ops.sparse24_matmul, x, w) if c.op == "product with a 2:4 weight"]
        assert [(c.implementation, c.elsewhere) for c in found] == [("roles", "tiles")]
        assert "as quick otherwise" in str(module.misfit(jnp.zeros((65, 256), "bfloat16"), w.values, w.codes))
        assert "16-bit floats" in str(module.misfit(x.astype("float32"), w.values, w.codes))
        assert "no lines" in str(module.misfit(x[:, :64], w.values[..., :8], w.codes[:, :8]))
