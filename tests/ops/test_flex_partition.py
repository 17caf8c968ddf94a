"""Gradients of attention with functions on several devices: the checks of flex_attention_checks.py, in one child
process with eight forced host devices; the shards of the kernel at block level, which CPUs do not cut; and what
functions read of the numbers of rows and heads."""

import functools
import itertools
from pathlib import Path

import devices
import jax
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile.interpret import interpret
from jtile.ops import flex_attention, gpu_tiles, hopper_attention_backward
from jtile.ops import hopper_flex_backward as hopper
from jtile.ops.flash_attention import attention_reference
from jtile.ops.flex_shards import Reads, reads
from jtile.primitive import partition
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CHECKS = Path(__file__).with_name("flex_attention_checks.py")
ROWS, SLOPES = np.zeros((3, 40), np.int32), np.zeros(4, np.float32)


def alibi(s, b, h, i, j, slopes):
    return s + slopes[h] * (j - i).astype("float32")


def of_all(s, b, h, i, j, table):
    return s + table[b, h] * (i - j).astype("float32") + 0.125 * (h + 2 * b).astype("float32")


def far(b, h, i, j, *_):
    return (i - j + h) % 3 != 0


def documents(b, h, i, j, segments):
    return (segments[b, i] == segments[b, j]) & (j <= i)


SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 72), np.int32), axis=1)
CASES = {  # heads, heads of keys, parts of a group; options of `attention`; the names of the extras' dimensions
    "heads that share keys": (
        4,
        2,
        2,
        {"score": alibi, "extras": (-SLOPES - np.arange(4, dtype=np.float32) / 9,)},
        "_",
    ),
    "arrays of heads": (2, 2, 1, {"score": alibi, "extras": (-np.arange(2, dtype=np.float32) / 9,)}, "h"),
    "arrays of rows": (2, 1, 2, {"mask": documents, "extras": (SEGMENTS,)}, "b _"),
    "numbers": (2, 2, 1, {"score": of_all, "mask": far, "extras": (np.ones((2, 2), np.float32) / 9,)}, "_ _"),
}


@pytest.mark.parametrize("name", CASES)
def test_shards(name, monkeypatch):
    """The kernel of a call on several devices, and its shards, put together."""
    heads, groups, members, given, names = CASES[name]
    q, k, v, g = (
        np.asarray(normal(s, 2, 72, n, 64, dtype="bfloat16")) for s, n in enumerate((heads, groups, groups, heads))
    )
    meta = {
        "scale": 0.125,
        "score": given.get("score"),
        "mask": given.get("mask"),
        "window": (None, None),
        "dropout": 0.0,
    }
    forward = functools.partial(flex_attention.run, tiles={"bq": 64, "bk": 64}, softcap=None, save=True, **meta)
    o, lse = (np.asarray(x) for x in evaluated(forward)(q, k, v, given["extras"], None))
    calls, make = [], hopper._kernel

    def kept(rule):
        assert rule.split(", ")[6] == names
        return lambda *args, **options: calls.append((make(rule), args, options)) or make(rule)(*args, **options)

    monkeypatch.setattr(gpu_tiles, "on_one_device", lambda: False)
    monkeypatch.setattr(hopper_attention_backward, "SHARED", 0)
    monkeypatch.setattr(hopper, "_kernel", kept)
    by = flex_attention._depends("attention", meta["mask"], given["extras"], 64, 64)
    with jt.config(interpret=True):
        got = hopper.of_batch(q, k, v, given["extras"], None, o, lse, g, None, by=by, **meta)
    want = lambda g, *x: jax.vjp(functools.partial(attention_reference, **given), *x)[1](g)
    for ours, exact in zip(got, evaluated(want)(*(x.astype(np.float32) for x in (g, q, k, v))), strict=True):
        assert relative_error(ours, exact) < 6e-3
    ((kernel, args, options),) = calls
    check_shards(kernel.lower(*args, **options).program, args, {"b": 2, "h": groups, "n": members})


def check_shards(program, args, parts):
    rule, arrays = partition.rule_of(program), [np.asarray(x) for x in jax.tree.leaves(args)]
    shard = partition.shard_program(program, tuple(parts.items())).kernel
    whole = interpret(program.kernel, arrays)
    together = [np.zeros(x.shape, np.float32) for x in whole]
    for place in itertools.product(*map(range, parts.values())):
        of = dict(zip(parts, place, strict=True))

        def part(dims, shape, of=of):
            sizes = [n // parts.get(name, 1) for name, n in zip(dims, shape, strict=True)]
            return tuple(slice(of.get(d, 0) * n, (of.get(d, 0) + 1) * n) for d, n in zip(dims, sizes, strict=True))

        found = interpret(shard, [x[part(dims, x.shape)] for dims, x in zip(rule.inputs, arrays, strict=True)])
        for out, dims, x in zip(together, rule.outputs, found, strict=True):
            out[part(dims, out.shape)] += x.astype(np.float32)
    for ours, exact in zip(together, whole, strict=True):
        assert relative_error(ours, exact) < 6e-3


def both(b, h, i, j, slopes, rows):
    return (slopes[h] > i.astype("float32")) & (rows[b, j] > b)


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_on_several_devices(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed


@pytest.mark.parametrize(
    ("mask", "extras", "shared", "found"),
    [
        (lambda b, h, i, j, x: x[b, i] == x[b, j], (ROWS,), True, Reads((("b", "_"),), False, False)),
        (lambda b, h, i, j, x: x[b, i] == x[0, j], (ROWS,), False, Reads((("_", "_"),), True, False)),
        (lambda b, h, i, j, x: x[b % 2, i] == x[b, j], (ROWS,), False, Reads((("_", "_"),), True, False)),
        (lambda b, h, i, j, x: x[b, i] == x[b, j], (ROWS[:2],), False, Reads((("_", "_"),), True, False)),
        (lambda b, h, i, j, x: x[h] > (i - j).astype("float32"), (SLOPES,), False, Reads((("h",),), False, False)),
        (lambda b, h, i, j, x: x[h] > (i - j).astype("float32"), (SLOPES,), True, Reads((("_",),), False, True)),
        (both, (SLOPES, ROWS), False, Reads((("h",), ("_", "_")), True, False)),
        (lambda b, h, i, j, x: x["rows"][b, i] > j, ({"rows": ROWS},), False, Reads((("b", "_"),), False, False)),
        (lambda b, h, i, j, x: x[i] > j + x.sum(), (SLOPES,), False, Reads((("_",),), True, True)),
        (lambda b, h, i, j: i >= j, (), False, Reads((), False, False)),
        (lambda b, h, i, j: (i >= j) & (h > 1), (), False, Reads((), False, True)),
    ],
)  # fmt: skip
def test_what_functions_read(mask, extras, shared, found):
    assert reads(None, mask, extras, 3, 4, shared) == found
