"""Sums, means, maxima and minima of segments against masks of all rows."""

import jax
import numpy as np
import pytest
from library import agree, gradients_agree, integers, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import segments
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

KINDS = {n: (getattr(ops, f"segment_{n}"), getattr(segments, f"segment_{n}_reference")) for n in ("sum", "mean", "max")}
KINDS["min"] = ops.segment_min, segments.segment_min_reference
IDS = np.array(integers(1, -1, 8, 150))
IDS[IDS == 3] = 2  # a segment without rows


def given(f, ids, in_order=False):
    return lambda x: f(x, ids, 7, sorted=in_order)


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize("kind", KINDS)
def test_segments(kind, arch):
    """Rows in any order and sorted ones; a tile of a GPU, many rows of one column, has a part of a segment."""
    pair = KINDS[kind]
    with jt.config(arch=arch):
        for in_order, shape in ((False, (150, 5)), (True, (150,))):
            ids = np.sort(IDS) if in_order else IDS
            ours, theirs = (given(f, ids, in_order) for f in pair)
            agree(ours, theirs, normal(0, *shape), interpret=arch is None)
            gradients_agree(ours, theirs, normal(0, *shape))


@pytest.mark.usefixtures("on_the_cpu")
def test_parts_of_rows(monkeypatch):
    """Few segments of many rows."""
    monkeypatch.setattr(segments, "programs_at_once", lambda: 8)
    monkeypatch.setattr(segments, "_VECTORS", 1)
    ids, x = IDS[:140] % 3, normal(0, 140, 2)
    ours, theirs = (lambda x, f=f: f(x, ids, 3) for f in KINDS["sum"])
    assert "float32[8,4,2]" in str(jax.make_jaxpr(ours)(x)).replace("f32", "float32")
    agree(ours, theirs, x)


def test_dtypes():
    x, (op, reference) = normal(0, 40, 3, dtype="bfloat16"), KINDS["sum"]
    agree(lambda x: op(x, IDS[:40].astype(np.int8), 200), lambda x: reference(x, IDS[:40], 200), x)
    whole = integers(0, -9, 9, 40, 3)
    for kind in ("sum", "min"):
        agree(*(given(f, IDS[:40].astype(np.uint32)) for f in KINDS[kind]), whole)


def test_ties_share_a_cotangent():
    x = np.array([1.0, 2.0, 2.0, 3.0], np.float32)
    slopes = evaluated(jax.grad(lambda x: (ops.segment_max(x, np.array([0, 0, 0, 1]), 3)[:2] ** 2).sum()))(x)
    assert slopes.tolist() == [0.0, 2.0, 2.0, 6.0]


def test_forward_mode_and_batches():
    x = np.asarray(normal(0, 2, 30, 3))
    for pair in (KINDS["sum"], KINDS["max"]):
        pushed = (evaluated(lambda x, f=f: jax.jvp(given(f, IDS[:30]), (x,), (x,))) for f in pair)
        assert relative_error(*(f(x[0])[1][:2] for f in pushed)) < 1e-6
    mapped = (evaluated(jax.vmap(given(f, IDS[:30]))) for f in KINDS["mean"])
    assert relative_error(*(f(x) for f in mapped)) < 1e-6


def test_errors():
    x, ids = normal(0, 4, 2), np.zeros(4, np.int32)
    for error, match, args in [
        (KernelTypeError, "ids is an integer array", (x, x[:, 0], 3)),
        (KernelTypeError, "float or integer array, got bool", (np.asarray(x) > 0, ids, 3)),
        (KernelValueError, "ids has shape", (x, ids[1:], 3)),
        (KernelValueError, "num_segments is an int", (x, ids, -1)),
        (KernelValueError, r"data is \[n, ...\]", (x[0, 0], ids, 3)),
    ]:
        with pytest.raises(error, match=match):
            ops.segment_sum(*args)
    with pytest.raises(KernelTypeError, match="segment_mean: data is a float array"):
        ops.segment_mean(ids, ids, 3)
    assert not ops.segment_sum(x[:0], ids[:0], 3).any()
