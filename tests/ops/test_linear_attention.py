"""Linear attention, its gates and delta rules: chunks and single positions against one position after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.linear_attention import linear_attention_reference
from jtile.ops.recurrences import inverse
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

KINDS = {"plain": (0, False), "decay": (1, False), "gated": (2, False), "delta": (0, True), "gated delta": (1, True),
         "KDA": (2, True)}  # fmt: skip


def operands(kind, t=21, heads=1, values=2, dk=6, dv=5, dtype="float32", strength=1.0):
    """q, k, v, log_decay, beta and a state; keys of length 1."""
    gate, rule = KINDS[kind]
    q, k, v = (np.asarray(normal(s, 2, t, *n)) for s, n in enumerate([(heads, dk), (heads, dk), (values, dv)]))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    decays = {0: None, 1: (2, t, values), 2: (2, t, values, dk)}[gate]
    g = None if decays is None else -np.abs(np.asarray(normal(3, *decays))) * np.float32(strength)
    beta = 1 / (1 + np.exp(-np.asarray(normal(4, 2, t, values)))) if rule else None
    return *(x.astype(jnp.dtype(dtype)) for x in (q, k, v)), g, beta, np.asarray(normal(5, 2, values, dk, dv))


def called(f, chunk=8):
    return lambda q, k, v, g, beta, state: f(
        q, k, v, log_decay=g, beta=beta, state=state, return_state=True, chunk=chunk
    )


OURS, REFERENCE = called(ops.linear_attention), called(linear_attention_reference)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks(kind):
    args = operands(kind)
    agree(OURS, REFERENCE, *args, interpret=kind == "gated delta")
    if kind == "gated delta":
        gradients_agree(OURS, REFERENCE, *args)


@pytest.mark.parametrize("kind", ["decay", "KDA"])
def test_single_positions(kind):
    agree(OURS, REFERENCE, *operands(kind, t=3))
    of = lambda t: ops.choices(OURS, *operands(kind, t=t))[0].implementation
    with jax.default_device(jax.devices("cpu")[0]):
        assert (of(3), of(5)) == ("steps", "chunks")
    with jt.config(arch="sm_90"):
        other = "decays of chunks, then the delta rule" if kind == "KDA" else "states of chunks"
        assert (of(3), of(5)) == ("steps", other)


def test_gradients_of_single_positions():
    gradients_agree(OURS, REFERENCE, *operands("gated delta", t=2))


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), [("delta", "bfloat16", 2e-2), ("decay", "float16", 3e-3)])
def test_short_floats(kind, dtype, tolerance):
    """Products take operands of 16 bits, as everybody's do; the state between chunks is float32."""
    agree(OURS, REFERENCE, *operands(kind, dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("kind", ["gated delta", "gated"])
def test_tiles_of_a_gpu(kind):
    with jt.config(arch="sm_90"):
        agree(called(ops.linear_attention, 16), REFERENCE, *operands(kind, dk=20, dv=40))


@pytest.mark.parametrize("kind", ["plain", "decay", "gated", "delta", "gated delta"])
def test_states_of_chunks(kind):
    """What GPUs compute in kernels of its own: states in front of chunks and cotangents of those behind them."""
    args = operands(kind)
    given = [n for n, x in enumerate(args) if x is not None]
    of = lambda f: lambda *now: f(*(now[given.index(n)] if n in given else None for n in range(len(args))))
    with jt.config(arch="sm_90"):
        agree(OURS, REFERENCE, *args)
        gradients_agree(of(OURS), of(REFERENCE), *(args[n] for n in given))


@pytest.mark.parametrize("kind", ["decay", "gated"])
def test_strong_decays_overflow_nowhere(kind):
    args = operands(kind, strength=60.0)  # sums of some hundreds, whose differences have their rounding errors
    agree(OURS, REFERENCE, *args, tolerance=2e-5)
    of = lambda f: lambda q, k, v, g, state: f(q, k, v, g, None, state)
    # a GPU sums up in a tree, so that differences have the rounding errors of both sums
    tolerance = 2e-4 if jax.default_backend() == "gpu" else 2e-5
    gradients_agree(of(OURS), of(REFERENCE), *args[:4], args[5], tolerance=tolerance)


@pytest.mark.parametrize("kind", ["gated delta", "gated"])
def test_decays_to_nothing(kind):
    """As where a document begins: what stands behind it keeps its digits, and no difference of infinities is taken."""
    q, k, v, g, beta, _ = operands(kind)
    g[:, 3], g[:, 12] = -np.inf, -1e9
    of = lambda f: lambda q, k, v, g: f(q, k, v, log_decay=g, beta=beta)
    agree(of(ops.linear_attention), of(linear_attention_reference), q, k, v, g, tolerance=3e-5)
    if kind == "gated":
        pull = lambda q, k, v, g: jax.vjp(of(ops.linear_attention), q, k, v, g)[1](v)
        assert all(np.isfinite(x).all() for x in evaluated(pull)(q, k, v, g))


def test_equal_keys_of_the_delta_rule():
    """The triangular matrix is one of ones: its powers have binomial entries, its inverse has two diagonals."""
    q, k, v, *_ = operands("delta", t=64)
    k = np.broadcast_to(k[:, :1], k.shape)
    args = (q, k, v, None, np.ones((2, 64, 2), np.float32), None)
    agree(called(ops.linear_attention, 64), REFERENCE, *args)
    low = np.tril(np.ones((64, 64), np.float32), -1)
    assert relative_error(inverted(low), np.eye(64) - np.eye(64, k=-1)) == 0
    low = np.tril(np.asarray(normal(0, 16, 16)), -1)
    assert relative_error(inverted(low), np.linalg.inv(np.eye(16) + low.astype(np.float64))) < 1e-6


def inverted(low):
    def body(x, y):
        y[...] = inverse(x[...])

    return evaluated(jt.call(body, out_type=jt.like(low), grid=1))(low)


def test_edges_and_errors():
    q, k, v, g, beta, state = operands("gated delta")
    empty = ops.linear_attention(q[:, :0], k[:, :0], v[:, :0], state=state, return_state=True)
    assert empty[0].shape == (2, 0, 2, 5)
    assert np.array_equal(empty[1], state)
    with pytest.raises(KernelTypeError, match="one dtype"):
        ops.linear_attention(q, k, v.astype(jnp.bfloat16))
    for wrong, match in (
        ({"log_decay": g[:, 1:]}, "log_decay has shape"),
        ({"beta": beta[:, 1:]}, "beta has shape"),
        ({"state": state[..., 1:]}, "state has shape"),
        ({"chunk": 48}, "power of two"),
    ):
        with pytest.raises(KernelValueError, match=match):
            ops.linear_attention(q, k, v, **wrong)
    with pytest.raises(KernelTypeError, match="chunk is an int"):
        ops.linear_attention(q, k, v, chunk=2.0)
    with pytest.raises(KernelTypeError, match="k is an array, got NoneType"):
        ops.linear_attention(q, None, v)
    with pytest.raises(KernelValueError, match="do not divide"):
        ops.linear_attention(*(np.concatenate([x] * 3, 2) for x in (q, k)), v)


@pytest.mark.parametrize("strength", [1.0, 40.0])
def test_decays_of_rows_and_the_delta_rule_by_parts(strength):
    """What decays do is computed for all chunks at once; strong ones overflow nowhere."""
    args = operands("KDA", t=12, dk=4, dv=3, strength=strength)
    with jt.config(arch="sm_90"):
        assert ops.choices(OURS, *args)[0].implementation.startswith("decays of chunks")
        agree(called(ops.linear_attention, 4), REFERENCE, *args)
        if strength == 1:
            gradients_agree(called(ops.linear_attention, 4), REFERENCE, *args)
