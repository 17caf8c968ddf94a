"""Products of a few hundred rows on Hopper at the block level, in tiles with any multiple of 8 columns.

Threads hold tiles whose sides are powers of two, but instructions for products have any multiple of 8 columns. A tile
here has as many columns as make the tiles of a product fill the multiprocessors once; its sums lie in the first columns
of an accumulator that is wider. In a product that is *turned*, rows of W are the rows of the instructions, of which
there are 64, and rows of x their columns: yᵀ = Wᵀ xᵀ. A block prepares itself while the kernel in front of it ends.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_tiles
from jtile.ops.epilogues import ACTIVATIONS
from jtile.tune.columns import LEAVING, ROWS, TERMS, Form


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      rows: for each consumer a ring of its 64 rows.
      columns: the ring of what all of them multiply with, which has a power of two of columns.
      leaving: for each consumer buffers of results on their way, by the number of their columns.
      full, empty: a round has come; has been read.
    """

    rows: list[jt.Shared]
    columns: jt.Shared
    leaving: list[dict[int, jt.Shared]]
    full: jt.Barrier
    empty: jt.Barrier


@dataclasses.dataclass(frozen=True)
class _Sides:
    """Which way the operands lie in memory: `across`: with the summed axis first."""

    turned: bool
    rows_across: bool
    columns_across: bool

    @staticmethod
    def of(turned: bool, tb: bool) -> _Sides:
        return _Sides(turned, turned and not tb, not (turned or tb))


def pieces(n: int, most: int) -> list[tuple[int, int]]:
    """(first, width) of neighbouring columns that n columns are made of: powers of two, up to `most`."""
    whole = [(at, most) for at in range(0, n - n % most, most)]
    at = n - n % most
    for width in (1 << k for k in reversed(range((n - at).bit_length()))):
        if (n - at) & width:
            whole.append((at, width))
            at += width
    return whole


def piece(x, at: int, width: int):
    """x[:, at : at + width], by halves: registers are renamed, no number moves."""
    while (half := x.shape[1] // 2) >= width:
        x, at = (x[:, half:], at - half) if at >= half else (x[:, :half], at)
    return x


@jt.function
def _sum(mem: _Memory, rows, rounds: int, form: Form, sides: _Sides):
    """The sums of a consumer, in the first columns of a tile."""
    wide = jt.next_power_of_2(form.columns)
    total = jt.zeros((ROWS, wide), jnp.float32)
    last = mem.full.count - 1
    for k in jt.range(rounds):
        mem.full.at(k).wait()
        left = rows.at(k).T if sides.rows_across else rows.at(k)
        right = mem.columns.at(k)[:, : form.columns] if sides.columns_across else mem.columns.at(k)[: form.columns].T
        total = jt.dot_wait(jt.dot_async(left, right, total, keep=k > 0), pending=1)
        mem.empty.at(k + last).arrive(when=k > 0)
    return jt.dot_wait(total)


def _leave(total, bias, y, leaving: dict[int, jt.Shared], row, column, form: Form, activation) -> None:
    """Write what follows from the sums of 64 rows from `row` on, and of the columns from `column` on."""
    for at, width in pieces(form.columns, LEAVING):
        one, here = piece(total, at, width), jt.ds(column + at, width)
        if bias is not None:
            added = bias[0, jt.ds(row, ROWS)][:, None] if form.turned else bias[0, here][None, :]
            one = one + added.astype(jnp.float32)
        one = ACTIVATIONS[activation](one).astype(y.dtype)
        jt.store_wait()
        leaving[width].store(one.T if form.turned else one)
        jt.fence_shared()
        rows = jt.ds(row, ROWS)
        jt.async_copy(leaving[width], y.at[here, rows] if form.turned else y.at[rows, here])
    jt.store_wait()


def _bring(source, buffer, first, width: int, term, across: bool, barrier) -> None:
    """Start to copy `width` rows or columns of an operand, from `first` on, and the terms of a round. What is outside
    of the operand takes a tensor map longer, and nobody needs its zeros: other rows come in its place."""
    inside = first < source.shape[1 if across else 0]
    here, terms = jt.ds(jnp.where(inside, first, 0), width), jt.ds(term, TERMS)
    jt.async_copy(source.at[terms, here] if across else source.at[here, terms], buffer, barrier)


@jt.function
def _fill(rows, columns, mem: _Memory, i, j, rounds: int, form: Form, sides: _Sides) -> None:
    """The role that fills the rings."""
    if sides.columns_across:  # buffers are cut side by side where their swizzle begins anew
        wide = mem.columns.shape[1]
        parts = [(at, min(wide, TERMS)) for at in range(0, form.columns, TERMS)]
    else:
        parts = pieces(form.columns, 2 * ROWS)
    nbytes = (len(mem.rows) * ROWS + sum(width for _, width in parts)) * TERMS * rows.dtype.itemsize
    for k in jt.range(rounds):
        mem.empty.at(k).wait(before=True)
        mem.full.at(k).expect(nbytes)
        for h, ring in enumerate(mem.rows):
            first = (i * form.consumers + h) * ROWS
            _bring(rows, ring.at(k), first, ROWS, k * TERMS, sides.rows_across, mem.full.at(k))
        for at, width in parts:
            whole = mem.columns.at(k)
            part = whole[:, at : at + width] if sides.columns_across else whole[at : at + width]
            _bring(columns, part, j * form.columns + at, width, k * TERMS, sides.columns_across, mem.full.at(k))


def _shape(x, w, tb: bool) -> tuple[int, int]:
    return x.shape[0], w.shape[0 if tb else 1]


def _grid(x, w, *_, tb: bool, form: Form, **__):
    m, n = _shape(x, w, tb)
    rows, columns = (n, m) if form.turned else (m, n)
    found = jt.cdiv(rows, ROWS * form.consumers), jt.cdiv(columns, form.columns)
    return found if form.turned else found[::-1]  # tiles of W change first: with those of x first it is 0 to 8 % slower


@jt.kernel(
    out_type=lambda x, w, *_, tb, out_dtype, **__: jax.ShapeDtypeStruct(_shape(x, w, tb), jnp.dtype(out_dtype)),
    grid=_grid,
)
def hopper_columns(x, w, bias, y, *, tb: bool, form: Form, slots: int, activation: str | None, out_dtype: str):
    """y = activation(x op(w) + bias) of x [m, k], w [k, n] or, with `tb`, [n, k], and bias [1, n] or None."""
    # Y = X W, or Yᵀ = Wᵀ Xᵀ, a sum over rounds of 64 terms
    i, j = (jt.program_id(0), jt.program_id(1)) if form.turned else (jt.program_id(1), jt.program_id(0))
    sides, wide = _Sides.of(form.turned, tb), jt.next_power_of_2(form.columns)
    shape = lambda width: (width, ROWS) if form.turned else (ROWS, width)
    widths = sorted({width for _, width in pieces(form.columns, LEAVING)})
    mem = _Memory(
        rows=[jt.alloc((TERMS, ROWS) if sides.rows_across else (ROWS, TERMS), x.dtype, slots=slots)
              for _ in range(form.consumers)],
        columns=jt.alloc((TERMS, wide) if sides.columns_across else (wide, TERMS), x.dtype, slots=slots),
        leaving=[{width: jt.alloc(shape(width), y.dtype) for width in widths} for _ in range(form.consumers)],
        full=jt.barrier(slots),
        empty=jt.barrier(slots, arrivals=form.consumers),
    )  # fmt: skip
    rounds = jt.cdiv(x.shape[1], TERMS)
    for h in range(form.consumers):
        with jt.role(f"consumer{h}", warps=4, registers=form.registers, early=True):
            jt.wait_for_kernels()
            total = _sum(mem, mem.rows[h], rounds, form, sides)
            row, column = (i * form.consumers + h) * ROWS, j * form.columns
            _leave(total, bias, y, mem.leaving[h], row, column, form, activation)
    with jt.role("producer", warps=1, registers=24, early=True):
        jt.wait_for_kernels()
        rows, columns = (w, x) if form.turned else (x, w)
        _fill(rows, columns, mem, i, j, rounds, form, sides)


def misfit(a, b, *, ta: bool, tb: bool, activation: str | None, save: bool, out_dtype: str) -> str | None:
    """Why the kernel does not compute op(a) op(b) of [1, m, k] and [1, k, n], None where it does and is the quickest;
    `save`: whether the sums are wanted besides."""
    if ta:
        return "the left operand lies in memory as [k, m]"
    why = gpu_tiles.misfit_of_plain_product(a, b, activation=activation, save=save, out_dtype=out_dtype)
    return why or (None if _form(a, b, tb) else "tiles of other sides are as quick")


def _form(a, b, tb: bool) -> Form | None:
    """The tiles that are best for a [1, m, k] and b [1, k, n], or [1, n, k]."""
    m, k, n = a.shape[1], a.shape[2], b.shape[1 if tb else 2]
    return hopper_tiles.columns(hopper_tiles.Product(m, n, k, transposed=tb, cut=True))


def product(a, b, bias, *, tb: bool, out_dtype: str) -> jax.Array:
    """a op(b) + bias of a [1, m, k], b [1, k, n] or [1, n, k], and bias [1, n] or None."""
    form = _form(a, b, tb)
    assert form is not None
    options = dict(tb=tb, form=form, slots=form.slots(), activation=None, out_dtype=out_dtype)
    return hopper_columns(a[0], b[0], bias, **options)[None]
