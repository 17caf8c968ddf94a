"""Products before and behind a norm of up to 64 rows, on Hopper at the block level, without a kernel for the norm.

`into_norm` is y = r + x Wᵀ, of which the program that comes last to a tile adds up the parts of the others. Besides y
it gives y times the weight of the norm, and the sum of squares of each row in each tile. `behind_norm` multiplies the
former by a matrix; its sums are what the norm of y would give, but for one factor a row, which it finds from the
squares. So nothing stands between two products that stream their matrices, and the second one has begun to read its
own when the first one ends.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_wide
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, first_unmet
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.hopper_columns import piece, pieces
from jtile.ops.hopper_wide import ROWS, Form, bring_rows, bring_weights, memory, sums_of, write

PIECE = 64  # columns of a tile that are put together at a time
_REGISTERS = 216


def _into_types(x, w, r, norm, *, form: Form, **_):
    tiles = jt.cdiv(w.shape[0], form.columns)
    shared = jax.ShapeDtypeStruct((tiles, form.parts, ROWS, form.columns), jnp.float32)
    return jt.like(r), jt.like(r), jax.ShapeDtypeStruct((tiles, ROWS), jnp.float32), shared


def _finish(sums, r, norm, y, scaled, squares, shared, tile, form: Form) -> None:
    """Write a tile of y, and what the norm needs of it, from the sums of all parts."""
    there = jt.arange(ROWS)[:, None] < y.shape[0]
    square = jt.zeros((ROWS,), jnp.float32)
    for at, width in pieces(form.columns, PIECE):
        first = tile * form.columns + at
        columns = first + jt.arange(width)
        place, inside = (jt.ds(0, ROWS), jt.ds(first, width)), there & (columns[None, :] < y.shape[1])
        total = jt.load(r, place, mask=inside, other=0).astype(jnp.float32)
        if form.parts == 1:
            total = total + piece(sums, at, width)
        else:
            parts = [shared[tile, part, :, at : at + width] for part in range(form.parts)]
            for one in parts:  # in one order, whichever program comes last
                total = total + one
        weight = jt.load(norm, (jt.ds(first, width),), mask=columns < y.shape[1], other=0).astype(jnp.float32)
        kept = jnp.where(inside, total, 0.0)  # a tile over the edge has rows of W twice
        square = square + (kept * kept).sum(1)
        jt.store(y, place, total.astype(y.dtype), mask=inside)
        jt.store(scaled, place, (total * weight[None, :]).astype(scaled.dtype), mask=inside)
    squares[tile, :] = square


@jt.kernel(out_type=_into_types, grid=lambda x, w, *_, form, **__: form.parts * jt.cdiv(w.shape[0], form.columns))
def into_norm(x, w, r, norm, y, scaled, squares, shared, *, form: Form, early: bool = False):
    """y [m, n] = r + x Wᵀ for x [m, k], m <= 64, and w [n, k]; scaled = y * norm, [n]; squares [tiles, 64]: the sums of
    y^2 over the columns of a tile; shared: what programs of a tile leave to the last of them."""
    # Y = R + sum_s X_s W_sᵀ
    tile, part = jax.lax.div(jt.program_id(0), form.parts), jax.lax.rem(jt.program_id(0), form.parts)
    mem = memory(x, (w,), form)
    first, count = hopper_wide.rounds_of(part, x.shape[1], form)
    with jt.role("consumer", warps=4, registers=_REGISTERS):
        (sums,) = sums_of(mem, count, form)
        done = jt.counters("tiles", squares.shape[0])
        if form.parts == 1:
            _finish(sums, r, norm, y, scaled, squares, shared, tile, form)
        else:
            for at, width in pieces(form.columns, 64):
                shared[tile, part, :, at : at + width] = piece(sums, at, width)
            if jt.arrive(done, tile, form.parts):
                _finish(None, r, norm, y, scaled, squares, shared, tile, form)
    with jt.role("producer", warps=1, registers=24, early=early):
        bring_weights(mem, (w,), tile, first, count, form)
    with jt.role("feeder", warps=1, registers=24):
        bring_rows(mem, x, first, count)


def _behind_types(x, squares, weights, *, form: Form, out_dtype: str, **_):
    return jax.ShapeDtypeStruct((form.parts, x.shape[0], weights[0].shape[0]), jnp.dtype(out_dtype))


@jt.kernel(
    out_type=_behind_types,
    grid=lambda x, squares, weights, *, form, **_: form.parts * jt.cdiv(weights[0].shape[0], form.columns),
)
def behind_norm(x, squares, weights: tuple, y, *, form: Form, activation, out_dtype: str, eps: float, early=False):
    """`hopper_wide` for rows x [m, k] that are to be divided by the root of the mean of their squares: squares [tiles,
    64] are the sums over the columns of a tile."""
    # Y_s = X_s W_sᵀ / sqrt(mean(y^2) + eps)
    tile, part = jax.lax.div(jt.program_id(0), form.parts), jax.lax.rem(jt.program_id(0), form.parts)
    mem = memory(x, weights, form)
    first, count = hopper_wide.rounds_of(part, x.shape[1], form)
    with jt.role("consumer", warps=4, registers=_REGISTERS):
        unit = jax.lax.rsqrt(_whole(squares) * (1.0 / x.shape[1]) + eps)  # while the first round comes
        sums = sums_of(mem, count, form)
        write(tuple(one * unit[:, None] for one in sums), y, part, tile, form, activation)
    with jt.role("producer", warps=1, registers=24, early=early):
        bring_weights(mem, weights, tile, first, count, form)
    with jt.role("feeder", warps=1, registers=24):
        bring_rows(mem, x, first, count)


def _whole(squares):
    """The sums of squares of rows, from those of each tile."""
    n = squares.shape[0]
    side = jt.next_power_of_2(n)
    of_tile = jt.arange(side)[:, None] < n
    return jt.load(squares, (jt.ds(0, side), jt.ds(0, ROWS)), mask=of_tile & (jt.arange(ROWS) >= 0)[None, :]).sum(0)


def choice(n: int, k: int) -> Form | None:
    """The form of the product before a norm, for a weight [n, k]; None: no form makes one round of the multiprocessors.

    The last program of a tile adds up its parts while those of other tiles have ended, so that they are few, and small:
    eight layers of Llama-3.1-8B with 64 rows take 1553 us a step on an H200 with tiles of 64 columns in two parts, 1601
    with 128 in four."""
    units = gpu_tiles.processors()
    for parts in (1, 2, 4, hopper_wide.MOST_PARTS):
        columns = jt.cdiv(jt.cdiv(n * parts, units), 8) * 8
        full = parts * jt.cdiv(n, columns) >= 0.9 * units
        if full and ROWS <= columns <= hopper_wide.WIDEST and k >= 4 * parts * hopper_wide.TERMS:
            return Form(columns, parts, hopper_wide.slots(columns, 1))
    return None


def misfit(x, w, weights: tuple) -> str | None:
    """Why the two kernels do not compute x [m, k] times w [n, k], a norm and `weights`, None where they do."""
    if not all(isinstance(one, jax.Array | jax.ShapeDtypeStruct) for one in (w, *weights)) or x.ndim != 2:
        return "weights are not plain matrices"
    y = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype)
    return first_unmet(
        (x.dtype == jnp.bfloat16, f"rows are {x.dtype.name}: those without their norm may overflow"),
        (choice(*w.shape), "the product before the norm fills no round of tiles"),
        (hopper_wide.misfit(x, (w,)) is None, "the product before the norm is not for wide tiles"),
        (hopper_wide.misfit(y, weights) is None, "the product behind the norm is not for wide tiles"),
    )


def _into(x, w, r, norm, *, form: Form):
    return into_norm(x, w, r, norm, form=form, early=gpu_tiles.overlaps())[:3]


def _into_whole(x, w, r, norm, *, form: Form):
    return of_sum(r.astype(jnp.float32) + jnp.matmul(x, w.T, preferred_element_type=jnp.float32), r, norm, form)


def of_sum(y, r, norm, form: Form) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `into_norm` gives for the sum y, float32 [m, n]."""
    squares = jnp.zeros((jt.cdiv(y.shape[1], form.columns), ROWS), jnp.float32)
    squares = squares.at[0, : y.shape[0]].set((y * y).sum(1))
    return y.astype(r.dtype), (y * norm.astype(jnp.float32)[None, :]).astype(r.dtype), squares


def _behind(x, squares, *weights, form: Form, activation, eps: float):
    out = x.dtype.name if form.parts == 1 else "float32"
    options = dict(activation=activation, out_dtype=out, eps=eps, early=gpu_tiles.overlaps())
    return behind_norm(x, squares, weights, form=form, **options)


def _behind_whole(x, squares, *weights, form: Form, activation, eps: float):
    unit = jax.lax.rsqrt(squares.sum(0)[: x.shape[0]] * (1.0 / x.shape[1]) + eps)[:, None]
    one, *other = (unit * jnp.matmul(x, w.T, preferred_element_type=jnp.float32) for w in weights)
    y = ACTIVATIONS[activation](one) * other[0] if other else one
    y = y[None].astype(x.dtype if form.parts == 1 else jnp.float32)
    return jnp.concatenate([y, *[jnp.zeros_like(y)] * (form.parts - 1)])


def _not_into(x, w, r, norm, *, form: Form) -> str | None:
    del r, norm, form
    return hopper_wide.misfit(x, (w,))


def _not_behind(x, squares, *weights, **_) -> str | None:
    del squares
    return hopper_wide.misfit(x, weights)


_into_op = Op(
    "product before a norm",
    Implementation("wide tiles", _into, _not_into, BLOCK_LEVEL, portable=False),
    Implementation("whole sums", _into_whole),
)
_behind_op = Op(
    "product behind a norm",
    Implementation("wide tiles", _behind, _not_behind, BLOCK_LEVEL, portable=False),
    Implementation("whole sums", _behind_whole),
)


def products(x, w, r, norm, weights: tuple, *, eps: float, activation=None) -> tuple[jax.Array, jax.Array]:
    """(y = r + x wᵀ, what the RMS norm of y gives times the weights): the latter as `hopper_wide.product` gives it."""
    form = choice(*w.shape)
    assert form is not None, "misfit says where these products are"
    y, scaled, squares = _into_op(x, w, r, norm, form=form)
    return y, behind(scaled, squares, weights, eps=eps, activation=activation)


def behind(scaled, squares, weights: tuple, *, eps: float, activation=None) -> jax.Array:
    """What the RMS norm of a sum gives times the weights, as `hopper_wide.product` gives it: from the sum times the
    weight of the norm, and its squares."""
    form = hopper_wide.choice(*weights[0].shape, len(weights))
    assert form is not None, "misfit says where these products are"
    out = _behind_op(scaled, squares, *weights, form=form, activation=activation, eps=eps)
    return out[0] if form.parts == 1 else out
