"""RWKV-7, Mamba's selective scan and Mamba-2's against one position after the other."""

import jax
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.rwkv import rwkv7_reference
from jtile.ops.state_space import selective_scan_reference, ssd_reference


def positive(seed, *shape):
    return np.abs(np.asarray(normal(seed, *shape)))


def rwkv(t=7, strength=1.0):
    """r, log_decay, k, v, a, b and a state, as RWKV-7 has them."""
    r, k, v = (np.asarray(normal(s, 2, t, 2, d)) for s, d in enumerate((6, 6, 5)))
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return r, -strength * positive(3, 2, t, 2, 6), k, v, -unit, unit * positive(4, 2, t, 2, 6), normal(5, 2, 2, 6, 5)


def with_state(f, **more):
    return lambda *args: f(*args[:-1], state=args[-1], return_state=True, **more)


RWKV, RWKV_REFERENCE = with_state(ops.rwkv7, chunk=4), with_state(rwkv7_reference)


def test_rwkv7():
    agree(RWKV, RWKV_REFERENCE, *rwkv())
    short = with_state(ops.rwkv7, chunk=2)  # kernels of few levels; those of more are in the delta rule's gradients
    gradients_agree(short, RWKV_REFERENCE, *rwkv(5))
    agree(RWKV, RWKV_REFERENCE, *rwkv(t=3))


@pytest.mark.usefixtures("on_the_cpu")
def test_rwkv7_by_positions(monkeypatch):
    """On a CPU where nobody asks for chunks; the gradient has them."""
    monkeypatch.setattr("jtile.ops.rwkv.CHUNK", 2)  # kernels of few levels
    positions = with_state(ops.rwkv7)
    assert ops.choices(ops.rwkv7, *rwkv()[:6])[0].implementation == "positions"
    agree(positions, RWKV_REFERENCE, *rwkv(), interpret=True)
    gradients_agree(positions, RWKV_REFERENCE, *rwkv(5))


def test_rwkv7_with_strong_decays():
    agree(RWKV, RWKV_REFERENCE, *rwkv(strength=np.float32(60)), tolerance=2e-5)


@pytest.mark.parametrize("strength", [1.0, 60.0])
def test_rwkv7_by_parts(strength):
    """What decays do is computed for all chunks at once; strong ones overflow nowhere."""
    args = rwkv(6, np.float32(strength))
    with jt.config(arch="sm_90"):
        assert ops.choices(RWKV, *args)[0].implementation.startswith("decays of chunks")
        agree(RWKV, RWKV_REFERENCE, *args, tolerance=2e-5)
        if strength == 1:
            gradients_agree(RWKV, RWKV_REFERENCE, *args)


def test_rwkv7_by_parts_of_short_floats():
    """Decays are summed in float32, whatever the operands are; no dtype is promoted by itself."""
    shapes = (6, "bfloat16"), (6, "float32"), (6, "bfloat16"), (5, "bfloat16"), (6, "bfloat16"), (6, "bfloat16")
    args = [jax.ShapeDtypeStruct((2, 70, 2, d), dtype) for d, dtype in shapes]
    with jt.config(arch="sm_90"), jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(lambda *args: ops.rwkv7(*args), *args).dtype == "bfloat16"


def test_rwkv7_errors():
    r, g, k, v, a, b, state = rwkv(3)
    with pytest.raises(KernelValueError, match="log_decay has shape"):
        ops.rwkv7(r, g[:, 1:], k, v, a, b)
    with pytest.raises(KernelValueError, match="state has shape"):
        ops.rwkv7(r, g, k, v, a, b, state=state[1:])
    with pytest.raises(KernelValueError, match="power of two"):
        ops.rwkv7(r, g, k, v, a, b, chunk=5)
    o, last = ops.rwkv7(*(x[:, :0] for x in (r, g, k, v, a, b)), state=state, return_state=True)
    assert o.shape == (2, 0, 2, 5)
    assert np.array_equal(last, state)


def mamba(t=21, d=7, n=3):
    """x, dt, a, b, c, skip and a state."""
    b, c = normal(3, 2, t, n), normal(4, 2, t, n)
    return normal(0, 2, t, d), positive(1, 2, t, d), -positive(2, d, n), b, c, normal(5, d), normal(6, 2, d, n)


def scanned(f):
    return lambda *args: f(*args[:5], skip=args[5], state=args[6], return_state=True)


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_selective_scan(arch):
    with jt.config(arch=arch):
        agree(scanned(ops.selective_scan), scanned(selective_scan_reference), *mamba(), interpret=arch is None)
    if arch is None:
        gradients_agree(scanned(ops.selective_scan), scanned(selective_scan_reference), *mamba())


def test_selective_scan_of_short_floats():
    x, dt, a, b, c, *_ = mamba()
    agree(ops.selective_scan, selective_scan_reference, x.astype("bfloat16"), dt, a, b, c)


def test_selective_scan_errors():
    x, dt, a, b, c, skip, state = mamba(3)
    for k, name in enumerate(("dt", "a", "b", "c")):
        wrong = [v[1:] if i == k else v for i, v in enumerate((dt, a, b, c))]
        with pytest.raises(KernelValueError, match=f"{name} has shape"):
            ops.selective_scan(x, *wrong)
    with pytest.raises(KernelTypeError, match="dt is an array, got NoneType"):
        ops.selective_scan(x, None, a, b, c)
    assert np.array_equal(ops.selective_scan(x, dt, a[:, :0], b[..., :0], c[..., :0], skip=skip), x * skip[None, None])
    with pytest.raises(KernelTypeError, match="float array"):
        ops.selective_scan(x, dt, a, b, c, skip=skip.astype(int))
    y, last = ops.selective_scan(x[:, :0], dt[:, :0], a, b[:, :0], c[:, :0], state=state, return_state=True)
    assert y.shape == (2, 0, 7)
    assert np.array_equal(last, state)


def test_ssd():
    """Groups of b and c for more heads, and the gradient of `a` through its decays."""
    t = 9
    x, dt, b, c = normal(0, 2, t, 4, 3), positive(1, 2, t, 4), normal(2, 2, t, 2, 5), normal(3, 2, t, 2, 5)
    args = x, dt, -positive(4, 4), b, c, normal(5, 4), normal(6, 2, 4, 5, 3)
    agree(scanned(ops.ssd), scanned(ssd_reference), *args)
    gradients_agree(scanned(ops.ssd), scanned(ssd_reference), *args)
    with pytest.raises(KernelValueError, match="a has shape"):
        ops.ssd(x, dt, args[2][1:], b, c)
    for wrong, error, match in (
        ((b[:, 1:], c), KernelValueError, "ssd: b has shape"),
        ((b, c[..., 1:]), KernelValueError, "ssd: c has shape"),
        ((b, c.astype("bfloat16")), KernelTypeError, "ssd: x, b and c have one dtype"),
        ((b[:, :, [0, 1, 0]], c[:, :, [0, 1, 0]]), KernelValueError, "4 heads do not divide into 3 groups"),
    ):
        with pytest.raises(error, match=match):
            ops.ssd(x, dt, args[2], *wrong)
