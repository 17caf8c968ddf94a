"""Reverse mode of attention with long heads at the block level: in the interpreter against the tile level."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.ops import attention_gradients, hopper_attention_backward
from jtile.ops import hopper_wide_backward as hopper
from jtile.ops.flash_attention import attention_reference, flash_attention
from jtile.ops.hopper_wide_keys import hopper_wide_keys
from jtile.primitive import partition
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # batch, queries, keys, heads, kv heads, head dimension; what `arguments` takes
    "full": ((1, 128, 128, 1, 1, 256), {}),
    "ragged": ((1, 130, 75, 2, 1, 256), {"ct": True}),
    "causal": ((1, 200, 200, 1, 1, 256), {"window": (None, 0)}),
    "a window": ((1, 260, 260, 1, 1, 256), {"window": (70, 0)}),
    "more keys than queries": ((1, 60, 200, 1, 1, 256), {"window": (None, 20)}),
    "shorter heads": ((1, 66, 90, 1, 1, 136), {"window": (None, 0), "dtype": "float16"}),
    "heads that share keys": ((2, 70, 70, 4, 2, 256), {"window": (None, 0)}),
    "lengths": ((2, 100, 140, 1, 1, 256), {"lengths": (140, 70)}),
    "capped": ((1, 100, 140, 2, 1, 256), {"window": (40, 0), "lengths": (130,), "softcap": 2.0, "ct": True}),
    "offsets": ((2, 70, 140, 1, 1, 256), {"window": (None, 0), "offsets": (0, 60), "lengths": (100, 130)}),
}


def arguments(sizes, *, window=(None, None), lengths=None, offsets=None, ct=False, softcap=None, dtype="bfloat16"):
    """Of `gradients`. What stands behind a length is NaN."""
    batch, t, keys, heads, groups, d = sizes
    q, g = (np.asarray(normal(s, batch, t, heads, d, dtype=dtype)) for s in (0, 3))
    k, v = (np.asarray(normal(s, batch, keys, groups, d, dtype=dtype)) for s in (1, 2))
    lengths, offsets = (None if x is None else np.array(x, np.int32) for x in (lengths, offsets))
    if lengths is not None:
        behind = np.arange(keys)[None, :, None, None] >= lengths[:, None, None, None]
        k, v = (np.where(behind, np.asarray(np.nan, x.dtype), x) for x in (k, v))
    options = {"scale": d**-0.5, "softcap": softcap, "window": window}
    more = {"bq": 64, "bk": 64, "save": True, "dropout": 0.0}
    o, lse = flash_attention.interpret(q, k, v, lengths, offsets, None, **more, **options)
    return (q, k, v, o, lse, g, np.asarray(normal(4, batch, heads, t)) if ct else None, lengths, offsets), options


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shared", [0, 1])
def test_in_the_interpreter(name, shared, monkeypatch):
    """`shared`: whether heads that share keys are shared out."""
    sizes, given = CASES[name]
    if shared and sizes[3] == sizes[4]:
        pytest.skip("heads share no keys")
    monkeypatch.setattr(hopper_attention_backward, "SHARED", shared)
    args, options = arguments(sizes, **given)
    with jt.config(interpret=True):
        want = evaluated(functools.partial(attention_gradients.gradients, **options))(*args)
        for seed in range(3 if name == "ragged" else 1):
            monkeypatch.setattr(hopper, "hopper_wide_keys", functools.partial(hopper_wide_keys.interpret, seed=seed))
            for ours, theirs in zip(hopper.of_batch(*args, **options), want, strict=True):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                assert relative_error(ours, theirs) < 6e-3  # weights are rounded before gradients of keys, too


def test_the_op():
    """A machine without the GPU that the call was made for runs the kernels at tile level."""
    q, k, v = (np.asarray(normal(s, 1, 40, 2, 256, dtype="bfloat16")) for s in range(3))
    loss = lambda op: lambda q, k, v: (op(q, k, v, causal=True).astype(jnp.float32) ** 2).sum()
    gradients = lambda op: jax.grad(loss(op), (0, 1, 2))
    with jt.config(arch="sm_90"):
        text = str(jax.make_jaxpr(gradients(ops.attention))(q, k, v))
        got = evaluated(jax.vmap(gradients(ops.attention), (0, None, 0)))(np.stack([q, -q]), k, np.stack([v, v]))
    assert "hopper_wide_keys" in text
    want = evaluated(jax.vmap(gradients(attention_reference), (0, None, 0)))(np.stack([q, -q]), k, np.stack([v, v]))
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours, theirs) < 2e-2


@pytest.mark.parametrize(
    ("d", "dtype", "options", "why"),
    [
        (256, "bfloat16", {}, None),
        (192, "float16", {}, None),
        (128, "bfloat16", {}, "heads have 128 features"),
        (264, "bfloat16", {}, "heads have 264 features"),
        (256, "bfloat16", {"softcap": 3.0}, None),
        (256, "bfloat16", {"softcap": 1e-7}, "scores are capped at 1e-07"),
        (256, "bfloat16", {"dropout": 0.1}, "weights are dropped"),
        (256, "bfloat16", {"scale": 0.0}, "the scale is 0.0"),
        (256, "float32", {}, "operands are float32"),
    ],
)
def test_what_fits(d, dtype, options, why):
    x = jax.ShapeDtypeStruct((1, 8, 2, d), dtype)
    found = hopper.misfit(x, x, **{"softcap": None, "scale": 0.1} | options)
    assert found is None if why is None else (found or "").startswith(why)


def types(heads: int = 16):
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    q, k, line = (
        of("bfloat16", 2, 4096, heads, 2, 256),
        of("bfloat16", 2, 4096, heads, 256),
        of("float32", 2, heads, 2, 4096),
    )
    return (q, k, k, q, line, line), of("int32", 2)


def test_along_what_devices_may_cut_it():
    args, n = types()
    options = {"scale": 0.1, "window": (None, 0)}
    keys = hopper_wide_keys.lower(*args, n, n, counted=False, **options).program
    parts = (("b", 2), ("h", 4), ("n", 2))
    assert [v.shape for v in partition.shard_program(keys, parts).kernel.outputs] == [(1, 4096, 4, 256)] * 2
    assert [set(p) for p in partition.rule_of(keys).partial] == [{"n"}, {"n"}]  # of a group's heads: sums


@pytest.mark.slow
@pytest.mark.parametrize("window", [(None, None), (None, 0)])
def test_what_it_compiles_to(window):
    pytest.importorskip("triton")
    args, n = types(4)
    for counted in (False, True):
        options = {"scale": 0.1, "window": window, "counted": counted, "target": "cuda:sm_90"}
        text = hopper_wide_keys.lower(*args, n, n, **options).texts["sass"]
        assert not spills_of_products(text)
        for what in ("HGMMA.64x256x16", "UTMALDG", "SYNCS", "USETMAXREG"):
            assert what in text
