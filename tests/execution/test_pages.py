"""Weights that come to the blocks of a GPU through pages of shared memory: the lists of copies, the text, the image."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttir.tasks import GraphSite

import jtile as jt
from jtile.errors import UnsupportedError
from jtile.execution import pages, persistent, primitive
from jtile.execution.build import array_of
from jtile.execution.graphed import _cut
from jtile.execution.pages import Copy
from jtile.lowering.here import target
from jtile.lowering.triton import versions
from jtile.lowering.triton.task_pages import BARRIERS, PAGE, SIZES, Pages

rng = np.random.default_rng(0)


@jt.kernel(
    out_type=lambda x, w, **_: jt.like(x, shape=(1, w.shape[0])),
    grid=lambda x, w, *, bn, rounds: jt.cdiv(w.shape[0], bn * rounds),
)
def product(x, w, y, *, bn, rounds):
    """One row times the rows of a matrix, `bn` of them in each of some rounds."""
    i, k = jt.program_id(0), w.shape[1]
    u = x[0, :].astype(jnp.float32)
    for r in jt.range(rounds):
        tile = w.tiles(bn, k)[i * rounds + r, 0].astype(jnp.float32)
        y.tiles(1, bn)[0, i * rounds + r] = jnp.sum(tile * u[None, :], 1)[None].astype(y.dtype)


@jt.kernel(out_type=lambda x, w, v: jt.like(x), grid=lambda x, w, v: w.shape[0] // 16)
def gated(x, w, v, y):
    """Two tiles beside each other, in no loop."""
    i = jt.program_id(0)
    w, v = (a.tiles(16, x.shape[1])[i, 0].astype(jnp.float32) for a in (w, v))
    part = x.tiles(1, 16)[0, i].astype(jnp.float32)
    y.tiles(1, 16)[0, i] = (part * jnp.max(w - v, 1)[None]).astype(y.dtype)


@jt.kernel(out_type=lambda w: jt.like(w), grid=lambda w: w.shape[0] // 2, alias={"w": "o"})
def halved(w, o):
    """Halves a matrix in place."""
    i = jt.program_id(0)
    o.tiles(2, w.shape[1])[i, 0] = w.tiles(2, w.shape[1])[i, 0] * 0.5


def chain(x, w, v, a, b):
    """The rows of `w` are no multiple of what a program reads; `b` changes when all have read it."""
    x = product(product(x, w, bn=9, rounds=2), v, bn=16, rounds=2)
    x = gated(x, a, b)
    return product(gated(x, b, a), w, bn=16, rounds=1), halved(b)


def operands(dtype):
    shapes = [(1, 256), (136, 256), (256, 136), (256, 256), (256, 256)]
    return [jnp.asarray(rng.standard_normal(s) / s[1] ** 0.5, dtype) for s in shapes]


def expected(*args):
    x, w, v, a, b = (np.asarray(t, np.float32) for t in args)
    x = x @ w.T @ v.T * (a - b).max(1)
    return x * (b - a).max(1) @ w.T, b * 0.5


def near(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(np.asarray(a, np.float32) - b) <= 2e-2 * np.linalg.norm(b)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(pages, "WORTH", 0)
    with jt.config(arch="sm_90", poison=False):
        yield


def scheduled(args, cores):
    (region,) = _cut(jax.make_jaxpr(chain)(*args)).regions
    return region, *primitive.scheduled(region, primitive.Options(cores=cores))


@pytest.mark.parametrize("sizes", [[64 << 10] * 9, [5000 * 16, 16, 0, 30000, 4096, 70000] * 5, [2048] * 99])
def test_a_copy_starts_when_its_pages_are_read(sizes):
    """Followed on paper: no page is written before it is read, and all copies start, many of them early."""
    ring = Pages(128, 144 << 10)
    words = np.array(pages.rows([Copy(0, 0, n, n) for n in sizes], ring), np.int64).reshape(-1, 4) % (1 << 32)
    place = [(w >> SIZES) * PAGE - ring.first for w in words[:-1, 2]]
    assert all(p >= 0 and p + n <= ring.ring for p, n in zip(place, sizes, strict=True))
    lies: dict[int, tuple[int, int]] = {}
    begun, most = 0, 0
    for read in range(len(sizes) + 1):
        for k in range(words[read, 3] & 0xFFFF, words[read, 3] >> 16):
            assert k == begun and all(place[k] >= b or place[k] + sizes[k] <= a for a, b in lies.values())
            lies[k], begun = (place[k], place[k] + sizes[k]), begun + 1
        most = max(most, len(lies))
        assert len(lies) <= BARRIERS and (read == len(sizes) or read in lies)
        lies.pop(read, None)
    assert begun == len(sizes) and most > 1


@pytest.mark.parametrize(("dtype", "cores", "forgets"), [("bfloat16", 3, False), ("float32", 1, True)])
def test_tiles_that_come_in_pages_are_those_of_the_arrays(on_hopper, monkeypatch, dtype, cores, forgets):
    """Evaluated on the CPU; a copy takes place early or late, and what it copies must not change meanwhile."""
    monkeypatch.setattr(versions, "spreads_first_axis", lambda: forgets)  # as for triton 3.6
    args = operands(dtype)
    region, wired, schedule = scheduled(args, cores)
    site, have = GraphSite(schedule), dict(zip(region.inputs, args, strict=True))
    assert site.launch.shape.pages is not None and site.text.count("cp.async.bulk.shared") == 1 + 5
    for call in range(2):
        results = site.call([array_of(x, have) for x in wired.operands], seed=call)
        near([results[r] for r in wired.results], expected(*args))


def test_the_image_has_room_for_pages(on_hopper):
    _, wired, schedule = scheduled(operands("bfloat16"), 4)
    launch = persistent.launch_of(schedule, len(wired.operands), traced=False)
    record = json.loads(persistent.image(wired.graph, launch, target()).launch["record"])
    assert launch.shape.pages is not None and launch.shape.pages.bytes < record["shared"] <= 227 << 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cores", [None, 5, 1])
def test_pages_on_a_gpu(monkeypatch, dtype, cores):
    monkeypatch.setattr(pages, "WORTH", 0)
    args = operands(dtype)
    g = jt.graph(chain, cores=cores)
    for _ in range(3):
        near(g(*args), expected(*args))


def test_a_launch_without_room_for_pages_goes_without(on_hopper, monkeypatch):
    _, wired, schedule = scheduled(operands("bfloat16"), 2)
    built = persistent.image

    def crowded(graph, launch, target):
        if launch.shape.pages:
            raise UnsupportedError("one block needs more shared memory than there is")
        return built(graph, launch, target)

    monkeypatch.setattr(persistent, "image", crowded)
    monkeypatch.setattr(pages, "WORTH", 32 << 10)
    assert persistent.launch_of(schedule, len(wired.operands), traced=False).shape.pages is None  # tiles are small
    monkeypatch.setattr(pages, "WORTH", 0)
    launch, artifact = persistent.launched(schedule, len(wired.operands), False, target())
    assert launch.shape.pages is None and artifact.image[:4] == b"\x7fELF"
    with jt.config(arch="sm_80"):
        assert not pages.room_for_pages(target())
