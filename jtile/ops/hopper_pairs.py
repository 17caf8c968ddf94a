"""Products with a 2:4 weight in pairs on Hopper, by instructions for sparse matrices, at the block level: yᵀ = W xᵀ.

The kept numbers of W and their places (see `jtile.ops.two_of_four`) come through tensor maps as they are in memory, and
the tensor cores multiply them with the numbers of x that they belong to: half of the products of a dense weight, and
9/16 of its bytes. Rows of W are the rows of the product, since only the left operand may be sparse.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_tiles
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_columns import piece, pieces
from jtile.tune.columns import LEAVING, ROWS
from jtile.tune.pairs import SPAN, Form


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      rows, codes, columns: the rings of W's numbers, of their places, and of x.
      leaving: for each consumer, parts of the result on their way: two buffers for each number of columns.
      full, empty: a round of numbers has come; has been read. code_full, code_empty: a round of places likewise.
    """

    rows: jt.Shared
    codes: jt.Shared
    columns: jt.Shared
    leaving: list[dict[int, list[jt.Shared]]]
    full: jt.Barrier
    empty: jt.Barrier
    code_full: jt.Barrier
    code_empty: jt.Barrier


def _memory(x, y, form: Form) -> _Memory:
    wide = jt.next_power_of_2(form.columns)
    widths = sorted({width for _, width in pieces(form.columns, LEAVING)})
    return _Memory(
        rows=jt.alloc((form.rows, form.terms // 2), x.dtype, slots=form.slots),
        codes=jt.alloc((form.rows, form.span // 8), jnp.uint8, slots=form.code_slots),
        columns=jt.alloc((wide, form.terms), x.dtype, slots=form.slots),
        leaving=[{n: [jt.alloc((n, ROWS), y.dtype) for _ in range(2)] for n in widths} for _ in range(form.consumers)],
        full=jt.barrier(form.slots),
        empty=jt.barrier(form.slots, arrivals=form.consumers),
        code_full=jt.barrier(form.code_slots),
        code_empty=jt.barrier(form.code_slots, arrivals=form.consumers),
    )


@jt.function
def _sum(mem: _Memory, h: int, first, spans: int, form: Form):
    """The sums of consumer h over `spans` rounds of places, the first of which has number `first` among all tiles'."""
    total = jt.zeros((ROWS, jt.next_power_of_2(form.columns)), jnp.float32)
    each, own, width = form.span // form.terms, slice(h * ROWS, (h + 1) * ROWS), form.terms // 8
    for k in jt.range(spans):
        mem.code_full.at(first + k).wait()
        codes = mem.codes.at(first + k)[own].load()
        for e in range(each):
            at, places = (first + k) * each + e, codes[:, e * width : (e + 1) * width]
            mem.full.at(at).wait()
            left, right, later = mem.rows.at(at)[own], mem.columns.at(at)[: form.columns].T, (k > 0) if e == 0 else None
            # places stay in their registers until products have ended: only within a span two rounds run at once
            running = jt.dot_async(left, right, total, keep=later, places=places)
            total = jt.dot_wait(running, pending=1 if e + 1 < each else 0)
            if e:
                mem.empty.at(at - 1).arrive()
        mem.empty.at((first + k + 1) * each - 1).arrive()
        mem.code_empty.at(first + k).arrive()  # not behind the load: nothing has waited for what it loads there
    return total


def _leave(total, y, leaving: dict[int, list[jt.Shared]], row, column, form: Form) -> None:
    """Write the sums of 64 rows of W from `row` on, and of the rows of x from `column` on."""
    for n, (at, width) in enumerate(pieces(form.columns, LEAVING)):
        one, buffer = piece(total, at, width).astype(y.dtype), leaving[width][n % 2]
        jt.store_wait(1 if n else 0)
        buffer.store(one.T)
        jt.fence_shared()
        jt.async_copy(buffer, y.at[jt.ds(column + at, width), jt.ds(row, ROWS)])


def _place(t, high: int, form: Form):
    """The tiles of W and of x that tile t of the product is of: in bands of x, tiles of x first."""
    size = high * form.band
    band, within = t // size, t % size
    return within // form.band, band * form.band + within % form.band


@jt.function
def _fill(x, values, codes, mem: _Memory, i, j, first, spans: int, form: Form) -> None:
    """The copies of a tile."""
    each, nbytes = form.span // form.terms, mem.rows.nbytes + form.columns * form.terms * x.dtype.itemsize
    for k in jt.range(spans):
        full = mem.code_full.at(first + k)
        mem.code_empty.at(first + k).wait(before=True)
        full.expect(mem.codes.nbytes)
        jt.async_copy(codes.tiles(form.rows, form.span // 8).at[i, k], mem.codes.at(first + k), full)
        for e in range(each):
            at, n = (first + k) * each + e, k * each + e
            full = mem.full.at(at)
            mem.empty.at(at).wait(before=True)
            full.expect(nbytes)
            jt.async_copy(values.tiles(form.rows, form.terms // 2).at[i, n], mem.rows.at(at), full)
            for start, width in pieces(form.columns, 256):
                here = jt.ds(j * form.columns + start, width)
                part = mem.columns.at(at)[start : start + width]
                jt.async_copy(x.at[here, jt.ds(n * form.terms, form.terms)], part, full)


def _grid(x, values, codes, *, form: Form, **_):
    high, wide = form.tiles(x.shape[0], codes.shape[0])
    return min(form.programs or high * wide, high * wide)


@jt.kernel(
    out_type=lambda x, values, codes, *, out_dtype, **_: jax.ShapeDtypeStruct(
        (x.shape[0], codes.shape[0]), jnp.dtype(out_dtype)),
    grid=_grid,
)  # fmt: skip
def hopper_pairs(x, values, codes, y, *, form: Form, out_dtype: str):
    """y [m, n] of x [m, k] and a weight in pairs: values [n, k / 2], codes [n, k / 8]."""
    # Yᵀ = W Xᵀ, a sum over rounds of `terms`; t: tiles of this program, the i-th of W and the j-th of x
    mem, spans = _memory(x, y, form), jt.cdiv(x.shape[1], form.span)
    high, wide = form.tiles(x.shape[0], codes.shape[0])
    tiles, programs = high * wide, min(form.programs or high * wide, high * wide)
    mine = jt.program_id(0)
    for h in range(form.consumers):
        with jt.role(f"consumer{h}", warps=4, registers=form.registers):
            for t in jt.range(mine, tiles, programs):
                i, j = _place(t, high, form)
                total = _sum(mem, h, t // programs * spans, spans, form)
                _leave(total, y, mem.leaving[h], i * form.rows + h * ROWS, j * form.columns, form)
            jt.store_wait()
    with jt.role("producer", warps=1, registers=24):
        for t in jt.range(mine, tiles, programs):
            i, j = _place(t, high, form)
            _fill(x, values, codes, mem, i, j, t // programs * spans, spans, form)


def misfit_of_weight(n: int, k: int, dtype) -> str | None:
    """Why the kernel takes no weight [n, k] of a dtype, None where it does."""
    return first_unmet(
        (dtype in (jnp.bfloat16, jnp.float16), f"{dtype.name} is no 16-bit float"),
        (n % ROWS == 0 and k % SPAN == 0, f"a weight [{n}, {k}] has no whole tiles of {ROWS} rows and {SPAN} terms"),
    )


def misfit(x, weight, *, out_dtype: str) -> str | None:
    """Why the kernel does not compute the product of x [m, k] and a 2:4 weight, None where it does."""
    sizes = *x.shape, *weight.shape
    return first_unmet(
        (all(isinstance(size, int) and size > 0 for size in sizes), "sizes are 0, or not known"),
        (weight.order == "pairs", f"the numbers of the weight stand in {weight.order}"),
        (x.dtype == weight.dtype, f"rows are {x.dtype.name}, the weight {weight.dtype.name}"),
        (jnp.dtype(out_dtype).itemsize <= 4, f"sums are float32, the result {out_dtype}"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
    ) or misfit_of_weight(*weight.shape, weight.dtype)


def product(x, weight, *, out_dtype: str) -> jax.Array:
    """The product [m, n] of x [m, k] and a weight in pairs."""
    form = hopper_tiles.pairs(x.shape[0], *weight.shape, jnp.dtype(out_dtype).itemsize)
    return hopper_pairs(x, weight.values, weight.codes, form=form, out_dtype=out_dtype)
