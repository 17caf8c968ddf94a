"""Roles, rings and barriers of a record, and the timeline that the interpreter simulates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile.explorer import roles as part
from jtile.explorer.places import Places
from jtile.lowering import targets
from jtile.primitive.lowering import pieces_of

pytest.importorskip("triton", reason="triton is not installed")


@jt.kernel(out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1])), grid=lambda a, b: jt.cdiv(a.shape[0], 64))
def product(a, b, o):
    i = jt.program_id(0)
    acc = jt.zeros((64, b.shape[1]), jnp.float32)
    for k in jt.range(a.shape[1] // 64, stages=3):
        acc = jt.dot(a.tiles(64, 64)[i, k], b.tiles(64, b.shape[1])[k, 0], acc)
    o.tiles(64, b.shape[1])[i, 0] = acc.astype(o.dtype)


@pytest.fixture(scope="module")
def piece():
    shape = jax.ShapeDtypeStruct((192, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    return pieces_of(product.lower(*shape, target="cpu").program).kernels[0]


def made(piece, target="cuda:sm_90"):
    return part.roles(piece, targets.resolve(target), {}, None, Places(), run=False)


def test_roles_rings_and_barriers(piece):
    found = made(piece)
    names = [r["name"] for r in found.roles]
    assert names[-1] == "producer" and all(n.startswith("consumer") for n in names[:-1])
    producer = len(names) - 1
    rings = {ring["name"]: ring for ring in found.rings}
    assert rings["%b"]["writers"] == [producer] and producer not in rings["%b"]["readers"]
    assert rings["%b"]["bytes"] == rings["%b"]["slots"] * 64 * 64 * 2
    full, empty = (next(b for b in found.barriers if b["name"].endswith(end)) for end in ("full", "empty"))
    assert full["expects"] == empty["waits"] == [producer] and full["waits"] == empty["arrives"]


def test_the_timeline_is_that_of_the_first_programs(piece):
    """Each role has a lane whose spans lie in the program; a slot is asked for before it is read."""
    found = made(piece)
    assert found.unit == "steps" and [p["number"] for p in found.programs] == [0, 1] and found.notes == []
    for program in found.programs:
        lanes = {
            kind: [lane for lane in program["lanes"] if lane["kind"] == kind] for kind in ("role", "products", "slot")
        }
        assert [lane["name"] for lane in lanes["role"]] == [r["name"] for r in found.roles]
        assert len(lanes["products"]) == 1 and lanes["slot"] and 0 < program["busy"] <= 1
        for lane in program["lanes"]:
            starts, ends = lane["spans"][2::4], lane["spans"][3::4]
            assert all(0 <= a <= b <= program["length"] for a, b in zip(starts, ends, strict=True))
            assert max(lane["spans"][0::4], default=0) < len(found.kinds)
    assert any(text.startswith("producer: ") for text in found.shares)


def test_without_roles_or_with_too_many_elements(piece, monkeypatch):
    assert made(piece, "rocm:gfx942") is None
    monkeypatch.setattr(part, "ELEMENTS", 100)
    found = made(piece)
    assert found.programs == [] and found.unit == "" and found.rings
    assert found.notes == [
        "The timeline is simulated for arrays of few elements only: view the kernel for smaller ones."
    ]
