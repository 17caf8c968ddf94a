"""The picture of the grid: what programs touch is what the interpreter says that they touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.explorer import access
from jtile.explorer.places import Places
from jtile.interpret import interpret


def rows(a, **_):
    return jt.like(a)


@jt.kernel(
    out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1])),
    grid=lambda a, b: (jt.cdiv(a.shape[0], 4), jt.cdiv(b.shape[1], 8)),
)
def product(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jt.zeros((4, 8), jnp.float32)
    for k in jt.range(jt.cdiv(a.shape[1], 2)):
        acc = jt.dot(a.tiles(4, 2)[i, k], b.tiles(2, 8)[k, j], acc)
    o.tiles(4, 8)[i, j] = acc


@jt.kernel(out_type=rows, grid=(4,))
def triangle(a, o):
    """The number of rounds depends on the program; a strided span; some programs write nothing."""
    i = jt.program_id(0)
    total = jt.zeros((4,), jnp.float32)
    for k in jt.range(i + 1):
        total = total + a[k, jt.ds(0, 4)]
    if i > 1:
        o[i, jt.ds(0, 4)] = total


@jt.kernel(out_type=lambda ids, table: jt.like(table, shape=(ids.shape[0], table.shape[1])), grid=(2,))
def rows_of(ids, table, o):
    """Indices that are loaded, and a mask."""
    i = jt.program_id(0)
    found = ids.tiles(4)[i]
    o.tiles(4, 8)[i, 0] = jt.load(
        table, (found[:, None], jt.arange(8)[None, :]), mask=(found > 2)[:, None] & jnp.ones((4, 8), bool)
    )


IDS = np.array([5, 1, 7, 6, 2, 2, 3, 9], np.int32)
CASES = {
    "product": (product, [np.ones((10, 6), "f"), np.ones((6, 12), "f")]),
    "triangle": (triangle, [np.ones((4, 6), "f")]),
    "rows_of": (rows_of, [IDS, np.ones((10, 8), "f")]),
}


def walked(kernel, inputs, data=None):
    lowered = kernel.lower(*inputs, target="cpu").kernel
    return lowered, access.walked(lowered, data, Places())


def events_of(grid, k):
    """The accesses of the k-th program as (access, round, masked, box)."""
    numbers, at = grid.events[k], 0
    while at < len(numbers):
        one = grid.accesses[numbers[at]]
        end = at + 3 + 2 * len(one.dims)
        yield (
            one,
            numbers[at + 1],
            numbers[at + 2],
            list(zip(numbers[at + 3 : end : 2], numbers[at + 4 : end : 2], strict=True)),
        )
        at = end


@pytest.mark.parametrize("name", CASES)
def test_accesses_are_those_of_the_interpreter(name):
    """All boxes of all programs, without what hangs over, are the elements that were read and written; those of gathers
    and masks are around them."""
    kernel, inputs = CASES[name]
    lowered, grid = walked(kernel, inputs, inputs)
    _, real = interpret(
        lowered, [*inputs, *[np.zeros(v.shape, "f") for v in lowered.inputs[len(inputs) :]]], trace_accesses=True
    )
    found = [np.zeros(v.shape, bool) for v in lowered.params], [np.zeros(v.shape, bool) for v in lowered.params]
    around = set()
    for k in range(len(grid.programs)):
        for one, _, masked, box in events_of(grid, k):
            stride = tuple(slice(max(lo, 0), lo + n, d["stride"]) for (lo, n), d in zip(box, one.dims, strict=True))
            found[one.kind != "read"][one.ref][stride] = True
            if masked or any(d["kind"] == "take" for d in one.dims):
                around.add((one.kind != "read", one.ref))
    for kind, flags in enumerate((real.read, real.written)):
        for ref, (ours, theirs) in enumerate(zip(found[kind], flags, strict=True)):
            assert (theirs <= ours).all()
            assert (kind, ref) in around or (ours == theirs).all(), (kind, ref)
    assert grid.notes == [] and grid.programs == list(range(np.prod(lowered.grid)))


def test_rounds_overhang_and_masks():
    _, grid = walked(*CASES["product"])
    last = list(events_of(grid, len(grid.programs) - 1))
    assert [e[1] for e in last] == [1, 1, 2, 2, 3, 3, 4]
    assert last[-1][3] == [(8, 4), (8, 8)]  # of an array of 10 x 12
    _, grid = walked(*CASES["rows_of"], CASES["rows_of"][1])
    gathers = [e for e in events_of(grid, 0) if e[0].dims[0]["kind"] == "take"]
    assert [(e[2], e[3]) for e in gathers] == [(8, [(1, 7), (0, 8)])]
    _, blind = walked(*CASES["rows_of"])
    assert blind.notes == [
        "Indices that are loaded count as zeros: call jt.view with arrays to see those of your data."
    ]


def test_large_grids_are_samples(monkeypatch):
    """Few programs, evenly spaced along each axis; late ones with one box for all rounds."""
    monkeypatch.setattr(access, "EVENTS", 150)
    big = [jax.ShapeDtypeStruct((1 << 15, 1 << 6), jnp.float32), jax.ShapeDtypeStruct((1 << 6, 1 << 14), jnp.float32)]
    lowered = product.lower(*big, target="cpu").kernel
    monkeypatch.setattr(access, "WALKED", 2000)
    grid = access.walked(lowered, None, Places())
    assert len(grid.programs) <= 2000 // 65 and grid.programs[0] == 0 and grid.programs[-1] == 8192 * 2048 - 1
    assert max(e[1] for e in events_of(grid, 0)) == 33
    assert next((e[1], e[3][1]) for e in events_of(grid, len(grid.programs) - 1)) == (-1, (0, 64))
    assert len(grid.notes) == 2 and grid.notes[0].endswith("16,777,216 programs are shown, evenly spaced.")
    assert access.sample((), 5) == [0]
    assert access.sample((3, 2), 6) == [0, 1, 2, 3, 4, 5]


def test_programs_without_an_end_are_cut(monkeypatch):
    @jt.kernel(out_type=lambda x: jt.like(x))
    def endless(x, o):
        k = jnp.int32(0)
        while k < 100_000:
            o[0] = x[0]
            k = k + 1

    monkeypatch.setattr(access, "EVENTS", 10)
    _, grid = walked(endless, [np.ones(1, "f")])
    assert len(grid.events[0]) == 10 * 5 and grid.notes == ["Of each program the first 10 accesses are shown."]
