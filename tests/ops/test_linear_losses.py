"""Cross-entropy of a linear layer against that of its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, integers, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import linear_losses
from jtile.ops.linear_losses import linear_cross_entropy_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

LABELS = np.array(integers(1, 0, 100, 11))
LABELS[[3, 5]] = -100, 100
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01}


def operands(dtype="float32", rows=11):
    return normal(0, rows, 24, dtype=dtype), normal(1, 100, 24, dtype=dtype), normal(2, 100, dtype=dtype)


def biased(f, labels=LABELS, **options):
    return lambda x, w, b: f(x, w, labels, bias=b, **options)


def both(labels=LABELS, **options):
    return (biased(f, labels, **options) for f in (ops.linear_cross_entropy, linear_cross_entropy_reference))


@pytest.mark.parametrize("options", [{}, {"ignore": 7, **OPTIONS}, {"ignore": None}], ids=str)
def test_options(options):
    agree(*both(**options), *operands(), tolerance=2e-6, interpret=True)


@pytest.mark.parametrize(("arch", "dtype"), [(None, "float32"), (None, "bfloat16"), ("sm_90", "float16")])
def test_gradients(arch, dtype):
    with jt.config(arch=arch):
        gradients_agree(*both(np.where(LABELS == 100, -100, LABELS), **OPTIONS), *operands(dtype))


@pytest.mark.parametrize("held", [11 * 4 * 16, 11 * 4 * 48])
def test_gradients_in_parts(monkeypatch, held):
    """Of 16 classes at a time, and of 48: the last part has fewer."""
    monkeypatch.setattr(linear_losses, "HELD", held)
    with jt.config(arch="sm_90"):
        monkeypatch.setattr(linear_losses, "tiles", lambda *_, **__: {"bm": 16, "bn": 16, "bk": 16})
        gradients_agree(*both(np.abs(LABELS) % 100), *operands())
        assert relative_error(*(evaluated(jax.vmap(f, (0, None, None)))(*stacked()) for f in both())) < 1e-6


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("held", [0, 4, 8, 52])
def test_gradients_with_logits_that_are_kept(monkeypatch, held):
    """Of none of 13 blocks of classes, 4 (one at a time), 8 (two at a time), and all of them."""
    monkeypatch.setattr(linear_losses, "KEPT", 11 * 4 * 8 * held)
    monkeypatch.setattr(linear_losses, "tiles", lambda *_, **__: {"bm": 16, "bn": 8, "bk": 0})
    x, w, b = operands()
    kept = 8 * min(held, 13)
    assert linear_losses._classes_to_keep(x, w, 16, 8, None) == min(kept, 100)
    gradients_agree(*both(np.abs(LABELS) % 100, **OPTIONS), x, w, b)


@pytest.mark.parametrize(("memory", "kept"), [(0, 0), (11 * 2 * 64, 64), (None, 100)])
def test_gradients_with_memory_on_gpus(monkeypatch, memory, kept):
    """For logits of no class, of 64, and of all, which are no more bytes than those of x and the weight."""
    monkeypatch.setattr(linear_losses, "HELD", 11 * 2 * 64)
    with jt.config(arch="sm_90"):
        x, w, b = operands("float16")
        assert linear_losses._classes_to_keep(x, w, 16, 64, memory) == kept
        keep = both(np.abs(LABELS) % 100, **OPTIONS)
        ours = biased(ops.linear_cross_entropy, np.abs(LABELS) % 100, memory=memory, **OPTIONS)
        gradients_agree(ours, list(keep)[1], x, w, b)


def stacked():
    x, w, b = operands()
    return np.stack([x, -np.asarray(x)]), w, b


def test_rows_without_a_label_have_no_gradient():
    x, w, _ = map(np.array, operands())
    x[3] = 1e30  # its logits overflow
    f = lambda x, w: ops.linear_cross_entropy(x, w, LABELS).sum()
    dx, dw = evaluated(jax.grad(f, (0, 1)))(x, w)
    assert np.isfinite(dw).all()
    assert not dx[[3, 5]].any()
    assert dx[[0, 1, 2, 4]].any(1).all()


@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_blocks_of_classes_that_a_bias_takes_out(monkeypatch, dtype, memory):
    """Of such a block all logits are -inf, and so is its log-sum-exp."""
    monkeypatch.setattr(linear_losses, "tiles", lambda *_, **__: {"bm": 16, "bn": 16, "bk": 0})
    (x, w, _), labels = operands(dtype), np.abs(LABELS) % 30
    low = np.where(np.arange(100) < 30, 0, -np.inf).astype("float32")
    slopes = lambda f, *first, **options: evaluated(
        jax.grad(lambda x, w: f(x, w[: first[0]] if first else w, labels, **options).sum(), (0, 1))
    )(x, w)
    ours = slopes(ops.linear_cross_entropy, bias=low, memory=memory)
    theirs = slopes(linear_cross_entropy_reference, 30)
    assert max(relative_error(a, b) for a, b in zip(ours, theirs)) < (2e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_forward_mode_and_the_gradient_of_a_gradient(dtype, tolerance):
    labels, (x, w, _) = np.abs(LABELS) % 100, operands(dtype)
    slopes = lambda f: lambda x: jax.grad(lambda x: (f(x, w, labels) ** 2).sum())(x)
    ours, theirs = (
        evaluated(lambda x, f=f: jax.jvp(slopes(f), (x,), (x,)))(x)
        for f in (ops.linear_cross_entropy, linear_cross_entropy_reference)
    )
    assert relative_error(ours, theirs) < tolerance


def test_reverse_mode_of_what_is_kept():
    labels, (x, w, _) = np.abs(LABELS) % 100, operands("bfloat16")
    slope = lambda f: lambda x: (jax.grad(lambda x: (f(x, w, labels) ** 2).sum())(x).astype("float32") ** 2).sum()
    both = (evaluated(jax.grad(slope(f)))(x) for f in (ops.linear_cross_entropy, linear_cross_entropy_reference))
    assert relative_error(*both) < 2e-2


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_second_derivatives_that_are_small(arch):
    """As those of means of many rows: float16, in which logits are kept, would have zeros for most of them."""
    labels, (x, w, _), small = np.abs(LABELS) % 100, operands("bfloat16"), 1e-6
    slope = lambda f: lambda x: jax.grad(lambda x: small * f(x, w, labels).sum())(x).astype("float32").sum() / small
    with jt.config(arch=arch):
        both = (evaluated(jax.grad(slope(f)))(x) for f in (ops.linear_cross_entropy, linear_cross_entropy_reference))
        assert relative_error(*both) < 2e-2


def test_errors():
    x, w, b = operands()
    for error, match, args, kw in [
        (KernelTypeError, "x and weight have one dtype", (x, w.astype("bfloat16"), LABELS), {}),
        (KernelTypeError, "labels is an integer array", (x, w, b[:11]), {}),
        (KernelValueError, "x has shape", (x[1:], w, LABELS), {}),
        (KernelValueError, "bias has shape", (x, w, LABELS), {"bias": b[1:]}),
        (KernelValueError, "label_smoothing", (x, w, LABELS), {"label_smoothing": -1.0}),
        (KernelValueError, "memory is a number of bytes", (x, w, LABELS), {"memory": -1}),
        (KernelValueError, "is empty", (x, w[:0], LABELS), {}),
    ]:
        with pytest.raises(error, match=match):
            ops.linear_cross_entropy(*args, **kw)
    assert ops.linear_cross_entropy(x[:0], w, jnp.zeros(0, jnp.int32)).shape == (0,)
