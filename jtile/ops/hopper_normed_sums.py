"""The product before a norm (`hopper_normed.into_norm`) whose sum goes over devices: the program that comes last to a
tile posts its sums to the others, and adds what they post. So a sum over devices costs no kernel, and no second pass
over its terms.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_normed, hopper_wide
from jtile.ops.collective_parts import others
from jtile.ops.collective_posts import not_posted, post_to_others, receive_terms
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, first_unmet, has
from jtile.ops.hopper_columns import piece, pieces
from jtile.ops.hopper_normed import PIECE
from jtile.ops.hopper_wide import ROWS, Form, bring_rows, bring_weights, memory, sums_of

_REGISTERS = 216
_TOGETHER = 4  # rows of a tile that a warp stores at once
SENT = 1 << 20  # bytes that a device sends beside those to the first of the others, up to which each sums up everything


def _boxes(x, w, r, norm, *, axis: str, form: Form, turns: int, **_):
    """For each device the tiles of its terms; in two turns, behind them, those of sums."""
    tiles = jt.cdiv(w.shape[0], form.columns)
    return [jt.symmetric((jt.axis_size(axis) + turns - 1, tiles, form.columns // PIECE, ROWS, PIECE), x.dtype)]


def _own(sums, shared, turned, tile, form: Form, dtype) -> list:
    """The sums of this device for a tile, piece by piece, of which a thread has neighbours in a row."""
    places = pieces(form.columns, PIECE)
    if form.parts > 1:  # in one order, whichever program comes last
        of = lambda at, width: [shared[tile, part, :, at : at + width] for part in range(form.parts)]
        return [functools.reduce(jnp.add, of(at, width)).astype(dtype) for at, width in places]
    for k, (at, width) in enumerate(places):
        turned.at(k).store(piece(sums, at, width).astype(dtype))
    jt.role_barrier()
    return [turned.at(k).load() for k in range(len(places))]


def _rows_of(device, width: int, axis: str):
    """Which elements of a tile [64, width] a device sums up, of those that make a sum in two turns."""
    owner = jt.arange(ROWS) // _TOGETHER % jt.axis_size(axis)
    return jnp.broadcast_to((owner == device)[:, None], (ROWS, width))


def _sums_in_two_turns(own: list, r, y, box, tile, form: Form, axis: str) -> list:
    """The sums of a tile over devices and r, rounded, piece by piece: each device sums up some of the rows, and posts
    what comes of them to the others."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    places = [(tile, k, slice(None), slice(None)) for k in range(len(own))]
    for place, part in zip(places, own):
        for d in others(axis):
            jt.post(box.on(axis, d), (me, *place), part, mask=_rows_of(d, part.shape[1], axis))
    sums = []
    for place, (at, width), part in zip(places, pieces(form.columns, PIECE), own):
        columns = tile * form.columns + at + jt.arange(width)
        mine = _rows_of(me, width, axis)
        inside = mine & (jt.arange(ROWS)[:, None] < y.shape[0]) & (columns[None, :] < y.shape[1])
        place_of_r = jt.ds(0, ROWS), jt.ds(tile * form.columns + at, width)
        total = jt.load(r, place_of_r, mask=inside, other=0).astype(jnp.float32)
        for term in receive_terms(box, place, part, axis, mask=mine):
            total = total + term.astype(jnp.float32)
        sums.append(total.astype(y.dtype))
        for d in others(axis):
            jt.post(box.on(axis, d), (n, *place), sums[-1], mask=mine)
    whole = []
    for place, one in zip(places, sums):
        mine = _rows_of(me, one.shape[1], axis)
        whole.append(jnp.where(mine, one, jt.receive(box, (n, *place), mask=~mine)))
    return whole


def _finish(sums, r, norm, y, scaled, squares, shared, turned, box, tile, form: Form, axis: str, turns: int) -> None:
    """Post a tile of this device's product, and write the sum of those of all devices and of r, and what the norm needs
    of it."""
    there = jt.arange(ROWS)[:, None] < y.shape[0]
    own = _own(sums, shared, turned, tile, form, box.dtype)
    if turns == 2:
        own = _sums_in_two_turns(own, r, y, box, tile, form, axis)
    else:
        for k, part in enumerate(own):
            post_to_others(box, (tile, k, slice(None), slice(None)), part, axis)
    square = jt.zeros((ROWS,), jnp.float32)
    for (at, width), part in zip(pieces(form.columns, PIECE), own):
        first = tile * form.columns + at
        columns = first + jt.arange(width)
        place, inside = (jt.ds(0, ROWS), jt.ds(first, width)), there & (columns[None, :] < y.shape[1])
        weight = jt.load(norm, (jt.ds(first, width),), mask=columns < y.shape[1], other=0).astype(jnp.float32)
        if turns == 2:
            total = part.astype(jnp.float32)
        else:
            total = jt.load(r, place, mask=inside, other=0).astype(jnp.float32)
            for term in receive_terms(box, (tile, at // PIECE, slice(None), slice(None)), part, axis):
                total = total + term.astype(jnp.float32)
        kept = jnp.where(inside, total, 0.0)  # a tile over the edge has rows of W twice
        square = square + (kept * kept).sum(1)
        jt.store(y, place, total.astype(y.dtype), mask=inside)
        jt.store(scaled, place, (total * weight[None, :]).astype(scaled.dtype), mask=inside)
    squares[tile, :] = square


@jt.kernel(
    out_type=hopper_normed._into_types,
    grid=lambda x, w, *_, form, **__: _programs(w, form),
    scratch=_boxes,
)
def sum_into_norm(
    x, w, r, norm, y, scaled, squares, shared, box, *, axis: str, form: Form, turns: int = 1, early: bool = False
):
    """`hopper_normed.into_norm` where y is r + the sum over devices of x Wᵀ; a tile has a multiple of `PIECE` columns.
    turns: every device sums up everything, or (2) some of the rows, and then posts the rounded sums of these."""
    # Y = R + sum over d of sum_s X_s W_sᵀ of device d
    tile, part = jax.lax.div(jt.program_id(0), form.parts), jax.lax.rem(jt.program_id(0), form.parts)
    mem = memory(x, (w,), form)
    first, count = hopper_wide.rounds_of(part, x.shape[1], form)
    turned = jt.alloc((ROWS, PIECE), x.dtype, slots=form.columns // PIECE) if form.parts == 1 else None
    given = r, norm, y, scaled, squares, shared, turned, box, tile, form, axis, turns
    with jt.role("consumer", warps=4, registers=_REGISTERS):
        (sums,) = sums_of(mem, count, form)
        done = jt.counters("tiles", squares.shape[0])
        if form.parts == 1:
            _finish(sums, *given)
        else:
            for at, width in pieces(form.columns, 64):
                shared[tile, part, :, at : at + width] = piece(sums, at, width)
            if jt.arrive(done, tile, form.parts):
                _finish(None, *given)
    with jt.role("producer", warps=1, registers=24, early=early):
        bring_weights(mem, (w,), tile, first, count, form)
    with jt.role("feeder", warps=1, registers=24):
        bring_rows(mem, x, first, count)


def misfit(x, w, weights: tuple, axis: str) -> str | None:
    """Why the two kernels do not compute x [m, k] times w [n, k], its sum over devices, a norm and `weights`."""
    return misfit_of_first(x, w, axis) or hopper_normed.misfit(x, w, weights)


def misfit_of_first(x, w, axis: str) -> str | None:
    """Why the first of the two kernels is not for x [m, k] times w [n, k]."""
    why = not_posted(x, axis) or hopper_wide.misfit(x, (w,))
    form = None if why else hopper_normed.choice(*w.shape)
    return why or first_unmet(
        (has(jt.target(), *BLOCK_LEVEL), "the target has no products of warpgroups"),
        (x.dtype == jnp.bfloat16, f"rows are {x.dtype.name}: those without their norm may overflow"),
        (form is not None and form.columns % PIECE == 0, f"tiles have no multiple of {PIECE} columns"),
        (form is not None and _programs(w, form) <= gpu_tiles.processors(), "its programs do not run at once"),
    )


def _programs(w, form: Form) -> int:
    return form.parts * jt.cdiv(w.shape[0], form.columns)


def _into(x, w, r, norm, *, axis: str, form: Form):
    turns = 1 + ((jt.axis_size(axis) - 2) * ROWS * w.shape[0] * x.dtype.itemsize > SENT)
    return sum_into_norm(x, w, r, norm, axis=axis, form=form, turns=turns, early=gpu_tiles.overlaps())[:3]


def _not_into(x, w, r, norm, *, axis: str, form: Form) -> str | None:
    del r, norm, form
    return not_posted(x, axis) or hopper_wide.misfit(x, (w,))


def _into_whole(x, w, r, norm, *, axis: str, form: Form):
    from jtile.ops.collectives import sum_of  # that module has these products, too

    total = sum_of(jnp.matmul(x, w.T, preferred_element_type=jnp.float32).astype(x.dtype), axis)
    return hopper_normed.of_sum(r.astype(jnp.float32) + total.astype(jnp.float32), r, norm, form)


_into_op = Op(
    "product before a norm, summed over devices",
    Implementation("wide tiles that are posted", _into, _not_into, BLOCK_LEVEL, portable=False),
    Implementation("whole sums", _into_whole),
)


def products(x, w, r, norm, weights: tuple, axis: str, *, eps: float, activation=None) -> tuple[jax.Array, jax.Array]:
    """`hopper_normed.products` with y = r + the sum over devices of x wᵀ; each device has weights of its own."""
    form = hopper_normed.choice(*w.shape)
    assert form is not None, "misfit says where these products are"
    y, scaled, squares = (jt.same_along(one, axis) for one in _into_op(x, w, r, norm, axis=axis, form=form))
    return y, hopper_normed.behind(scaled, squares, weights, eps=eps, activation=activation)
