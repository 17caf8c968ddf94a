"""Small products on Hopper at the block level: one round of tiles.

Such a product takes as long to begin and to bring its operands as to multiply. So the block prepares its barriers while
the kernel in front of it ends, and one role of four warps starts the copies and multiplies, since roles of their own
take longer to begin; but long sums, and those whose operands take long, have a role for copies. Where bringing operands
takes longest, two or four blocks that need the same rows, or columns, bring a part of them each, to all (`multicast`).
Where tiles are few, roles sum parts of the terms of a tile, and each has a block of its own (`spread`), from which its
sums go to the block of the first one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_tiles
from jtile.tune.small import Form


@dataclasses.dataclass(frozen=True)
class _Ring:
    """What a block brings: slots of rows of x, and of columns of w, with the terms of a round.

    Attributes:
      full, empty: a round has come; has been read, in all blocks of a cluster. A role that brings what it alone reads
        knows without `empty`.
      rounds: how many there are.
    """

    rows: jt.Shared
    columns: jt.Shared
    full: jt.Barrier
    empty: jt.Barrier | None
    rounds: int

    def read(self, k) -> None:
        """Round k has been read."""
        if self.empty is not None:
            self.empty.at(k).arrive()


def _sizes(x, w, ta: bool, tb: bool) -> tuple[int, int, int]:
    """m, n, k of op(x) op(w)."""
    return x.shape[1 if ta else 0], w.shape[0 if tb else 1], x.shape[0 if ta else 1]


def _grid(x, w, *_: Any, ta: bool, tb: bool, form: Form) -> tuple[int, int]:
    m, n, _k = _sizes(x, w, ta, tb)
    return form.grid(m, n)


def _out(x, w, *_: Any, ta: bool, tb: bool, **__: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(_sizes(x, w, ta, tb)[:2], x.dtype)


def _ring(x, w, ta: bool, tb: bool, form: Form, part: int) -> _Ring:
    """The ring of one part of the sums."""
    rounds = jt.cdiv(jt.cdiv(_sizes(x, w, ta, tb)[2], form.terms) - part, form.parts)
    slots = min(form.slots(x.dtype.itemsize), rounds)
    sides = lambda first, across: (form.terms, first) if across else (first, form.terms)
    return _Ring(
        rows=jt.alloc(sides(form.rows, ta), x.dtype, slots=slots),
        columns=jt.alloc(sides(form.columns, not tb), w.dtype, slots=slots),
        full=jt.barrier(slots),
        empty=jt.barrier(slots) if form.roles > 1 or form.share > 1 else None,
        rounds=rounds,
    )


@jt.function
def _bring(x, w, ring: _Ring, k, i, j, part: int, ta: bool, tb: bool, form: Form) -> None:
    """Start to bring the operands of a round, when those in their place have been read."""
    m, n, _k = _sizes(x, w, ta, tb)
    inside = lambda first, size: jnp.where(first < size, first, 0)  # nobody needs what is outside, and it takes longer
    here, there = jt.ds(inside(i * form.rows, m), form.rows), jt.ds(inside(j * form.columns, n), form.columns)
    if ring.empty is not None:
        ring.empty.at(k).wait(before=True)
    ring.full.at(k).expect(ring.rows.nbytes + ring.columns.nbytes)
    terms = jt.ds((k * form.parts + part) * form.terms, form.terms)
    jt.async_copy(x.at[terms, here] if ta else x.at[here, terms], ring.rows.at(k), ring.full.at(k))
    jt.async_copy(w.at[there, terms] if tb else w.at[terms, there], ring.columns.at(k), ring.full.at(k))


@jt.function
def _added(ring: _Ring, k, total, ta: bool, tb: bool):
    """The sums, to which the product of a round is still added, and those of the rounds before are."""
    ring.full.at(k).wait()
    left = ring.rows.at(k).T if ta else ring.rows.at(k)
    right = ring.columns.at(k).T if tb else ring.columns.at(k)
    return jt.dot_wait(jt.dot_async(left, right, total), pending=1)


@jt.function
def _sum(x, w, ring: _Ring, i, j, part: int, ta: bool, tb: bool, form: Form):
    """A part of the sums of a tile: of every `form.parts`-th round. The role brings their operands, unless another
    does."""
    slots = ring.full.count if form.roles == 1 else 0
    for k in jt.range(slots):
        # This never waits, but keeps the loop: written out, all places of copies are computed in front of the first.
        ring.full.at(k).wait(before=True)
        _bring(x, w, ring, k, i, j, part, ta, tb, form)
    total = _added(ring, jnp.int32(0), jnp.zeros((form.rows, form.columns), jnp.float32), ta, tb)
    last = 1 + max(ring.rounds - slots, 0) if slots else 1  # rounds behind which nothing is brought any more
    for k in jt.range(1, last):  # what is brought takes the place of the round before
        total = _added(ring, k, total, ta, tb)
        ring.read(k - 1)
        _bring(x, w, ring, k - 1 + slots, i, j, part, ta, tb, form)
    for k in jt.range(last, ring.rounds):
        total = _added(ring, k, total, ta, tb)
        ring.read(k - 1)
    total = jt.dot_wait(total)
    ring.read(jnp.int32(ring.rounds - 1))
    return total


@jt.kernel(out_type=_out, grid=_grid)
def hopper_small(x, w, bias, y, *, ta: bool, tb: bool, form: Form):
    """y = op(x) op(w) + bias of x [m, k] (with `ta` [k, m]), w [k, n] (with `tb` [n, k]) and bias [1, n] or None."""
    i, j = (jt.program_id(axis) for axis in ((0, 1) if form.across else (1, 0)))
    rings = [_ring(x, w, ta, tb, form, part) for part in range(form.parts)]
    parts = [jt.alloc((form.rows, form.columns), jnp.float32) for _ in rings[1:]]
    came = [jt.barrier() for _ in parts]
    leaving = jt.alloc((form.rows, form.columns), y.dtype)
    for part, ring in enumerate(rings):
        with jt.role(f"part{part}", warps=4, early=True):
            jt.wait_for_kernels()
            total = _sum(x, w, ring, i, j, part, ta, tb, form)
            if part:
                parts[part - 1].store(total)
                came[part - 1][0].arrive()
                continue
            for buffer, barrier in zip(parts, came):
                barrier[0].wait(0)
                total = total + buffer.load()
            here, there = jt.ds(i * form.rows, form.rows), jt.ds(j * form.columns, form.columns)
            if bias is not None:
                total = total + bias[0, there][None, :].astype(jnp.float32)
            leaving.store(total.astype(y.dtype))
            jt.fence_shared()
            jt.async_copy(leaving, y.at[here, there])
            jt.store_wait()
    if form.roles == 2:
        with jt.role("copies", warps=1, early=True):
            jt.wait_for_kernels()
            for k in jt.range(rings[0].rounds):
                _bring(x, w, rings[0], k, i, j, 0, ta, tb, form)


def misfit(a, b, *, ta: bool, tb: bool, activation: str | None, save: bool, out_dtype: str) -> str | None:
    """Why the kernel does not compute op(a) op(b) of [1, m, k] and [1, k, n], None where it does and is the quickest;
    `save`: whether the sums are wanted besides."""
    why = gpu_tiles.misfit_of_plain_product(a, b, activation=activation, save=save, out_dtype=out_dtype)
    return why or (None if _form(a, b, ta, tb) else "there is more than a round of tiles, or other tiles are as quick")


def _form(a, b, ta: bool, tb: bool) -> Form | None:
    """The tiles that are best for a [1, m, k], or [1, k, m], and b [1, k, n], or [1, n, k]."""
    x, w = (jax.ShapeDtypeStruct(z.shape[1:], z.dtype) for z in (a, b))
    m, n, k = _sizes(x, w, ta, tb)
    return hopper_tiles.small(hopper_tiles.Product(m, n, k, transposed=tb, left=ta, cut=True))


def product(a, b, bias, *, ta: bool, tb: bool) -> jax.Array:
    """op(a) op(b) + bias of a [1, m, k] or [1, k, m], b [1, k, n] or [1, n, k], and bias [1, n] or None."""
    form = _form(a, b, ta, tb)
    assert form is not None
    return hopper_small.with_options(**form.options)(a[0], b[0], bias, ta=ta, tb=tb, form=form)[None]
