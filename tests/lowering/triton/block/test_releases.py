"""Arrivals behind loads: see `lowering/triton/block/releases.py`."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import jtile as jt

FENCE, ARRIVAL = "fence.proxy.async", "mbarrier.arrive.shared"


@jt.kernel(out_type=lambda x, **_: jt.like(x, shape=(64, 64)), grid=1)
def summed(x, y, *, fence: bool, where: str):
    """Sums of tiles that a ring brings: `where` a round lets its slot go, and whether the author has a fence there."""
    rounds = x.shape[0] // 64
    ring, full, empty = jt.alloc((64, 64), jnp.float32, slots=2), jt.barrier(2), jt.barrier(2)
    with jt.role("sums", warps=4):
        acc = jt.zeros((64, 64), jnp.float32)
        for k in jt.range(rounds):
            if where == "of the round before":
                empty.at(k + 1).arrive(when=k > 0)
            full.at(k).wait()
            acc = acc + ring.at(k).load()
            if fence:
                jt.fence_shared()
            if where == "of the round":
                empty.at(k).arrive()
        y[...] = acc
    with jt.role("copies", warps=1):
        for k in jt.range(rounds):
            empty.at(k).wait(before=True)
            full.at(k).expect(ring.nbytes)
            jt.async_copy(x.tiles(64, 64).at[k, 0], ring.at(k), full.at(k))


def lowered(**options):
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    return summed.lower(x, target="cuda:sm_90", **options)


def fenced(text: str) -> list[bool]:
    """For each arrival of a text, whether a fence stands between it and what comes in front of it."""
    lines = [line for line in text.split("\n") if any(x in line for x in (FENCE, ARRIVAL, "ld.shared", "mbarrier.try"))]
    return [FENCE in before for before, line in itertools.pairwise(lines) if ARRIVAL in line and ".expect" not in line]


@pytest.mark.parametrize("where", ["of the round", "of the round before"])
def test_a_slot_that_is_let_go_behind_a_load_has_a_fence(where):
    assert fenced(lowered(fence=False, where=where).texts["ptx"]) == [True]


def test_a_fence_of_the_author_is_enough():
    text = lowered(fence=True, where="of the round").texts["ptx"]
    assert text.count(FENCE) == lowered(fence=False, where="of the round").texts["ptx"].count(FENCE)
