"""The spaces of the library: every point is a kernel that traces, for CPUs and GPUs, and entries are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough

import jtile as jt
from jtile import ops
from jtile.testing.evaluate import evaluated
from jtile.tune import device
from jtile.tune.programs import trace
from jtile.tune.store import Entry, store

S = jax.ShapeDtypeStruct


def calls(dtype):
    m = lambda *shape: S(shape, dtype)
    return {
        "matmul": (ops.matmul, m(256, 192), m(192, 320)),
        "one row": (ops.matmul, m(1, 256), m(256, 320)),
        "few rows": (ops.matmul, m(16, 256), m(256, 320)),
        "gated_mlp": (ops.gated_mlp, m(256, 128), m(128, 320), m(128, 320)),
        "attention": (lambda q: ops.attention(q, q, q, causal=True), m(1, 100, 2, 64)),
        "decode": (lambda q, k, n: ops.decode_attention(q, k, k, n), m(2, 4, 32), m(2, 512, 2, 32), S((2,), jnp.int32)),
        "softmax": (ops.softmax, m(64, 512)),
        "layer_norm": (ops.layer_norm, m(64, 512), m(512)),
        "rms_norm": (ops.rms_norm, m(64, 512), m(512)),
    }


@pytest.mark.parametrize("name", calls(jnp.float32))
@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_every_point_traces(name, arch):
    with jt.config(arch=arch):
        f, *args = calls(jnp.bfloat16 if arch else jnp.float32)[name]
        (call,) = trace(f, *args)[1]
        assert len(call.candidates) > 1
        step = max(len(call.candidates) // (12 if thorough() else 4), 1)
        for config in ({}, *call.candidates[::step]):
            assert call.bound(config).program.programs > 0


def test_a_tuned_product_is_the_product():
    a, b = (np.random.default_rng(k).standard_normal((96, 96), np.float32) for k in range(2))
    want = ops.matmul(a, b)
    report = jt.tune(ops.matmul, a, b, progress=False, time_limit=10.0)
    (found,) = report.kernels
    assert found.kernel == "matmul"
    assert not [c for c in found.candidates if c.state in ("wrong", "failed")]
    np.testing.assert_allclose(ops.matmul(a, b), want, rtol=1e-5, atol=1e-5)


def test_an_entry_goes_before_the_heuristic_of_an_op():
    x = jnp.ones((64, 512))
    (call,) = trace(ops.softmax, x)[1]
    store.put(device.kind(), call.name, Entry({"br": 16}, 1.0, 2.0))
    (program,) = trace(ops.softmax, x)[0]
    assert program.kernel.grid == (4,)
    gradient = jax.grad(lambda x: (ops.softmax(x) * x).sum())
    np.testing.assert_allclose(evaluated(gradient)(x), np.full_like(x, 1 / 512), rtol=1e-3)


def test_data_of_decoding_fills_the_cache():
    f, *args = calls(jnp.float32)["decode"]
    (call,) = trace(f, *args)[1]
    *_, lengths = call.data()
    np.testing.assert_array_equal(lengths, [512, 512])


def test_kernels_of_other_platforms_are_not_tuned():
    """A product of one row has a kernel for Hopper and another for the rest: only that of the platform at hand runs."""
    args = S((1, 4096), jnp.bfloat16), S((512, 4096), jnp.bfloat16)
    f = lambda x, w: ops.matmul(x, w, transpose_b=True)
    with jt.config(arch="sm_90"):
        assert [call.kernel.name for call in trace(f, *args)[1]] == ["hopper_gemv"]
    if jt.platform() == "cpu":
        assert [call.kernel.name for call in trace(f, *args)[1]] == ["matmul"]
