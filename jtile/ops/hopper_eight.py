"""Caches of 8 bits for Hopper's attention at the block level: keys and values come as they lie in memory, and a role of
its own converts each unit once, for all consumers that multiply with it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

import jtile as jt

if TYPE_CHECKING:
    from jtile.ops.hopper_decode import Work

DTYPE = "float8_e4m3fn"  # int8 takes more instructions a number to convert
UNIT = 64  # keys of a unit, so that there is room for units in both forms


@dataclasses.dataclass(frozen=True)
class Eight:
    """What comes from a cache of 8 bits, and what the role that converts passes on beside the keys.

    Attributes:
      of_keys, of_values: the scales, float32 [pages, kv heads, slots of a page].
      K, V: rings of units of keys and of values of 8 bits; K_scales, V_scales: of their scales, which come with K.
      k_full, k_empty, v_full, v_empty: a slot of K or V has come; has been converted.
      keys, values: rings of scales beside the ring of converted keys, those of values zero behind the length.
    """

    of_keys: jt.Ref
    of_values: jt.Ref
    K: jt.Shared
    V: jt.Shared
    K_scales: jt.Shared
    V_scales: jt.Shared
    k_full: jt.Barrier
    k_empty: jt.Barrier
    v_full: jt.Barrier
    v_empty: jt.Barrier
    keys: jt.Shared
    values: jt.Shared


def rings(scales, unit: tuple[int, int], slots: int, converted: int) -> Eight | None:
    """The rings for units [keys, d] of a cache with these scales, of so many `slots` as they come and so many
    `converted`; None where there are no scales."""
    if not scales:
        return None
    K, V = (jt.alloc(unit, DTYPE, slots=slots) for _ in range(2))
    raw, beside = ([jt.alloc(unit[:1], "float32", slots=n) for _ in range(2)] for n in (slots, converted))
    return Eight(*scales, K, V, *raw, *(jt.barrier(slots) for _ in range(4)), *beside)


@jt.function
def converts(w: Work):
    """The role that converts: every unit of keys, its scales, and the unit of values."""
    e, size = w.eight, w.units.size
    begin, end, r, start, _ = w.share()
    c, length = jnp.int32(0), w.length(r)
    while start < end:
        n, mine, length = w.units.of(length), length, w.length(r + 1)
        lo, hi = w.inside(begin, end, start, n)
        for u in jt.range(lo, hi):
            e.k_full.at(c).wait()
            keys, of_keys, of_values = e.K.at(c).load(), e.K_scales.at(c).load(), e.V_scales.at(c).load()
            e.k_empty.at(c).arrive()
            w.k_empty.at(c).wait(before=True)
            w.K.at(c).store(keys.astype(w.K.dtype))
            e.keys.at(c).store(of_keys)
            e.values.at(c).store(jnp.where((u - start) * size + jt.arange(size) < mine, of_values, 0.0))
            jt.fence_shared()
            w.k_full.at(c).arrive()
            e.v_full.at(c).wait()
            values = e.V.at(c).load()
            e.v_empty.at(c).arrive()
            w.v_empty.at(c).wait(before=True)
            w.V.at(c).store(values.astype(w.V.dtype))
            jt.fence_shared()
            w.v_full.at(c).arrive()
            c = c + 1
        r, start = r + 1, start + n


def scaled(w: Work, s, c):
    """Scores times the scales of the keys of round c, and the scales of its values; of a cache without scales the
    scores as they are, and None."""
    e = w.eight
    return (s, None) if e is None else (s * e.keys.at(c).load()[None, :], e.values.at(c).load())
