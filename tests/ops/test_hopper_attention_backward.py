"""Reverse mode of attention at the block level: in the interpreter, roles interleaved by seeds, against the kernels at
tile level; what it is called from, without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import attention_gradients, dropouts, hopper_backward_roles
from jtile.ops import hopper_attention_backward as hopper
from jtile.ops.flash_attention import attention_reference, flash_attention
from jtile.primitive import partition
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # batch, queries, keys, heads, kv heads, head dimension; options
    "full": ((1, 70, 128, 1, 1, 128), {}),
    "causal": ((1, 140, 256, 1, 1, 64), {"window": (None, 0)}),
    "ragged": ((1, 100, 150, 2, 1, 64), {"window": (None, 0), "ct": True}),
    "more keys": ((1, 40, 300, 1, 1, 128), {"window": (None, 0)}),
    "window": ((1, 200, 190, 1, 1, 64), {"window": (30, 50), "ct": True}),
    "lengths": ((2, 40, 200, 1, 1, 72), {"lengths": (170, 0)}),
    "all": (
        (2, 70, 160, 2, 1, 64),
        {"lengths": (130, 159), "offsets": (60, 3), "window": (90, 0), "dtype": "float16"},
    ),
    "dropout": (
        (2, 70, 160, 2, 1, 128),
        {"window": (None, 0), "ct": True, "dropout": 0.5},
    ),  # a factor of 2 rounds as 1 does
    "capped": ((1, 140, 256, 2, 1, 128), {"window": (None, 0), "ct": True, "softcap": 2.0}),
    "capped, all": (
        (2, 70, 160, 2, 1, 64),
        {"lengths": (130, 159), "offsets": (60, 3), "window": (90, 0), "dropout": 0.5, "softcap": 30.0},
    ),
    "a small cap": ((1, 70, 140, 1, 1, 64), {"window": (None, 0), "softcap": 1e-6}),
}


def arguments(
    sizes, dtype="bfloat16", window=(None, None), ct=False, lengths=None, offsets=None, dropout=0.0, softcap=None
):
    """Of `gradients`. What stands behind a length is NaN."""
    batch, t, keys, heads, groups, d = sizes
    q, g = (normal(s, batch, t, heads, d, dtype=dtype) for s in (0, 3))
    k, v = (normal(s, batch, keys, groups, d, dtype=dtype) for s in (1, 2))
    lengths, offsets = (None if x is None else np.array(x, np.int32) for x in (lengths, offsets))
    q, k, v, g = map(np.asarray, (q, k, v, g))
    if lengths is not None:
        behind = np.arange(keys)[None, :, None, None] >= lengths[:, None, None, None]
        k, v = (np.where(behind, np.asarray(np.nan, x.dtype), x) for x in (k, v))
    seeds = np.asarray(dropouts.seeds(np.array([3, 7], np.uint32), batch, heads)) if dropout else None
    options = {"scale": d**-0.5, "softcap": softcap, "window": window, "dropout": dropout}
    o, lse = flash_attention.interpret(q, k, v, lengths, offsets, seeds, bq=64, bk=64, save=True, **options)
    ct = np.asarray(normal(4, batch, heads, t)) if ct else None
    return (q, k, v, o, lse, g, ct, lengths, offsets, seeds), options


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(hopper, "SHARED", 0)  # heads that share keys stay together, though programs are few
    with jt.config(interpret=True):
        yield


def tiles(options):
    return functools.partial(attention_gradients.gradients, **options)


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name, monkeypatch):
    sizes, given = CASES[name]
    args, options = arguments(sizes, **given)
    want, kernel = evaluated(tiles(options))(*args), hopper.hopper_attention_backward
    for seed in range(3 if name == "ragged" else 1):
        monkeypatch.setattr(hopper, "hopper_attention_backward", functools.partial(kernel.interpret, seed=seed))
        for ours, theirs in zip(hopper.of_batch(*args, **options), want, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert relative_error(ours, theirs) < 1e-3  # the same roundings, other orders of sums


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_capped_scores_against_their_definition(softcap, monkeypatch):
    args, options = arguments((1, 70, 140, 1, 1, 64), window=(None, 0), softcap=softcap, dtype="float16")
    monkeypatch.setattr(hopper, "hopper_attention_backward", hopper.hopper_attention_backward.interpret)
    got = hopper.of_batch(*args, **options)
    q, k, v, g = (jnp.asarray(args[i], jnp.float32) for i in (0, 1, 2, 5))
    exact = functools.partial(attention_reference, causal=True, softcap=softcap)
    for ours, theirs in zip(got, jax.vjp(exact, q, k, v)[1](g), strict=True):
        assert relative_error(ours, theirs) < 1e-3


def test_blocks_of_heads_side_by_side(monkeypatch):
    """Every block of keys of every head has one program, in any order of them."""
    args, options = arguments((1, 40, 140, 2, 2, 64), window=(None, 0))
    want = evaluated(tiles(options))(*args)
    for bytes_ in (1, 1 << 30):
        monkeypatch.setattr(hopper_backward_roles, "NEAR", bytes_)
        spread = hopper.hopper_attention_backward.with_options()
        monkeypatch.setattr(hopper, "hopper_attention_backward", spread)  # traced anew
        got = evaluated(functools.partial(hopper.of_batch, **options))(*args)
        for ours, theirs in zip(got, want, strict=True):
            assert relative_error(ours, theirs) < 1e-3


@pytest.mark.parametrize("name", ["full", "causal", "heads that share keys", "dropout", "capped"])
def test_two_blocks_of_keys_a_program(name, monkeypatch):
    """The keys of the second come while the gradients of the first leave."""
    sizes, given = CASES.get(name, ((1, 260, 256, 4, 2, 64), {"window": (None, 0), "ct": True}))
    batch, t, _, heads, groups, d = sizes
    args, options = arguments((batch, max(t, 256), 256, heads, groups, d), **given)
    want, kernel, asked = evaluated(tiles(options))(*args), hopper.hopper_attention_backward, []
    monkeypatch.setattr(hopper.gpu_tiles, "processors", lambda: 1)
    monkeypatch.setattr(hopper, "TURNS", 0)

    def interpreted(*operands, **meta):
        asked.append(meta["several"])
        return kernel.interpret(*operands, seed=len(name), **meta)

    monkeypatch.setattr(hopper, "hopper_attention_backward", interpreted)
    for ours, theirs in zip(hopper.of_batch(*args, **options), want, strict=True):
        assert relative_error(ours, theirs) < 1e-3
    assert asked == [2]


@pytest.mark.parametrize(("processors", "parts"), [(1, 1), (3, 2), (100, 4)])
def test_heads_that_share_keys_are_shared_out(processors, parts, monkeypatch):
    """Where programs are few, each part of the heads has keys of its own, whose gradients are summed."""
    args, options = arguments((1, 140, 140, 4, 1, 64), window=(None, 0), dropout=0.2, lengths=(130,))
    want, kernel, asked = evaluated(tiles(options))(*args), hopper.hopper_attention_backward, []
    monkeypatch.setattr(hopper.gpu_tiles, "processors", lambda: processors)
    monkeypatch.setattr(hopper, "SHARED", 1)

    def interpreted(*operands, **meta):
        asked.append(operands[0].shape[2:4])
        return kernel.interpret(*operands, **meta)

    monkeypatch.setattr(hopper, "hopper_attention_backward", interpreted)
    for ours, theirs in zip(hopper.of_batch(*args, **options), want, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert relative_error(ours, theirs) < 4e-3
    assert asked == [(parts, 4 // parts)]


def test_programs_of_two_blocks(monkeypatch):
    monkeypatch.setattr(hopper.gpu_tiles, "processors", lambda: 132)
    of = lambda rows, t, keys, window=(None, 0), counted=False: hopper._several(rows, t, keys, window, counted)
    assert of(16, 16384, 16384) == of(128, 4096, 4096) == 2
    assert of(16, 4096, 4096) == 1  # as many turns as there are would not be filled
    assert of(128, 4096, 4096, (None, None)) == 2  # 32 turns of one, 16 of two
    assert of(33, 8192, 8192, (None, None)) == 2 and of(34, 8192, 8192, (None, None)) == 1  # 17 turns, 9 of two
    assert of(128, 4096, 8192) == of(128, 4096, 4096, counted=True) == of(128, 4096, 4096, (None, -1)) == 1


@pytest.mark.parametrize(
    ("d", "dtype", "options", "why"),
    [
        (64, "bfloat16", {}, None),
        (64, "bfloat16", {"softcap": 3.0}, None),
        (64, "bfloat16", {"softcap": 1e-7}, "scores are capped at 1e-07"),
        (64, "bfloat16", {"scale": 0.0}, "the scale is 0.0"),
        (136, "bfloat16", {}, "heads have 136 features"),
        (64, "float32", {}, "operands are float32"),
    ],
)
def test_what_fits(d, dtype, options, why):
    x = jax.ShapeDtypeStruct((1, 8, 2, d), dtype)
    found = hopper.misfit(x, x, **{"softcap": None, "scale": 0.1} | options)
    assert found is None if why is None else (found or "").startswith(why)


def test_batches_of_vmap_become_rows(monkeypatch):
    (q, k, v, o, lse, g, _, lengths, _, _), _ = arguments((2, 100, 140, 2, 1, 64), lengths=(140, 140))
    seen = []
    monkeypatch.setattr(hopper, "of_batch", lambda *x, **_: seen.append([y.shape for y in x[:3]]) or x[:3])
    run = hopper.of_rows(hopper.of_batch, scale=0.77, window=(None, None), dropout=0.0)
    lone = lambda q, k: run(q, k, v, o, lse, g, None, lengths, None, None)
    both = jax.vmap(jax.vmap(lone, (0, None)), (0, 0))
    dq, dk, dv = evaluated(both)(np.stack([np.stack([q] * 3)] * 2), np.stack([k] * 2))
    assert seen[-1] == [(12, *q.shape[1:]), (12, *k.shape[1:]), (12, *v.shape[1:])]
    np.testing.assert_array_equal(dq, np.broadcast_to(q, (2, 3, *q.shape)))
    np.testing.assert_array_equal(dk, np.broadcast_to(k, (2, 3, *k.shape)))
    np.testing.assert_array_equal(dv, np.broadcast_to(v, (2, 3, *v.shape)))


def test_the_op_in_every_transformation():
    """A machine without the GPU that the call was made for runs the kernels at tile level."""
    q, k, v = (np.asarray(normal(s, 2, 1, 40, 1, 64, dtype="bfloat16")) for s in range(3))
    loss = lambda op: lambda q, k, v: (op(q, k, v, causal=True).astype(jnp.float32) ** 2).sum()
    gradients = lambda op: jax.grad(loss(op), (0, 1, 2))
    mapped = lambda op: jax.jit(jax.vmap(gradients(op), (0, None, 0)))(q, k[0], v)
    mapped_reference = evaluated(jax.vmap(gradients(attention_reference), (0, None, 0)))(q, k[0], v)
    of_gradients = lambda op: jax.grad(lambda q: (gradients(op)(q, k[0], v[0])[0].astype(jnp.float32) ** 2).sum())
    with jt.config(arch="sm_90", interpret=False):
        text = str(jax.make_jaxpr(gradients(ops.attention))(q[0], k[0], v[0]))
        got, second = mapped(ops.attention), evaluated(of_gradients(ops.attention))(q[0])
    assert "hopper_attention_backward" in text
    for ours, theirs in zip(got, mapped_reference, strict=True):
        assert relative_error(ours, theirs) < 2e-2
    assert relative_error(second, evaluated(of_gradients(attention_reference))(q[0])) < 5e-2


def test_along_what_devices_may_cut_it():
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    q, k, s = of("bfloat16", 4, 200, 2, 3, 64), of("bfloat16", 4, 200, 2, 64), of("float32", 4, 2, 3, 256)
    args = q, k, k, q, s, s, of("int32", 4), of("int32", 4), of("uint32", 4, 2, 3, 2), of("float32", *q.shape)
    options = {"bq": 128, "scale": 0.1, "window": (None, 0), "counted": False, "dropout": 0.1}
    program = hopper.hopper_attention_backward.lower(*args, **options).program
    assert not program.io
    shard = partition.shard_program(program, (("b", 2), ("h", 2), ("n", 3))).kernel
    assert [v.shape for v in shard.outputs] == [(2, 200, 1, 1, 64), (2, 200, 1, 64), (2, 200, 1, 64)]
    rule = partition.rule_of(program)
    assert [set(p) for p in rule.partial] == [set(), {"n"}, {"n"}]  # of a group's heads: gradients of keys are sums


SLOW = [
    (64, (None, 0), False, 0), (64, (100, 0), False, 0), (128, (None, None), False, 0), (128, (None, 0), True, 0),
    (128, (None, 0), False, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("d", "window", "counted", "dropout"),
    [(128, (None, 0), False, 0.1), *[pytest.param(*c, marks=pytest.mark.slow) for c in SLOW]],
)
def test_what_it_compiles_to(d, window, counted, dropout):
    pytest.importorskip("triton")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    q, k, s = of("bfloat16", 2, 512, 4, 2, d), of("bfloat16", 2, 512, 4, d), of("float32", 2, 4, 2, 512)
    args = q, k, k, q, s, s, of("int32", 2), of("int32", 2), of("uint32", 2, 4, 2, 2), of("float32", *q.shape)
    options = {"bq": 8192 // d, "scale": 0.1, "window": window, "counted": counted, "dropout": dropout}
    found = hopper.hopper_attention_backward.lower(*args, target="cuda:sm_90", **options)
    assert found.launch["resources"]["spills"] <= 128  # bytes a thread, outside of what every round does
    for what in ("HGMMA", "UTMALDG", "UTMAREDG", "UTMASTG", "SYNCS", "USETMAXREG"):
        assert what in found.texts["sass"]
