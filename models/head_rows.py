"""Products of some rows of a head with an RMS norm, with the bits of those that the whole head gives on Hopper.

There, `ops.rms_norm_matmul` of one row is the kernel of `hopper_gemv`, which adds up the 4096 terms of a product in an
order of its own: in each of four roles, 32 lanes have 32 terms each. Whoever reads a few rows of the head again, to
find the largest of some logits that are near each other, has to add in that order and from the same numbers: x + delta
is not rounded to 16 bits in front of the norm, nor what the norm gives.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.operands import Norm
from jtile.ops.streamed_forms import roles_of
from jtile.ops.streamed_numbers import cut
from jtile.ops.streamed_operands import PIECE

AT_ONCE = 4  # rows that are read at a time: one for each of `WARPS` of a program
WARPS = 4
_LANES = (8, 2, 2)  # 32 lanes by their upper three bits and the two others, over which sums go one by one
_WIDE = 256  # numbers of a row that 32 lanes load at once, 8 each: the first and the last four have sums of their own
_GROUPS = PIECE // _WIDE


class Row(NamedTuple):
    """The row of x that a head is multiplied with, as tiles [`AT_ONCE`, 256], repeated along the first axis.

    Attributes:
      parts: by piece of 1024 numbers and group of 256: what the norm multiplies by `unit`.
      unit: 1 / sqrt(mean((x + delta)^2) + eps), [`AT_ONCE`].
      reach: float32, the norm of parts times unit, but for the rounding of sums.
    """

    parts: dict
    unit: jax.Array
    reach: jax.Array


def _columns(piece: int, group: int):
    """The numbers of a row that a tile [`AT_ONCE`, 256] has."""
    own = (piece * _GROUPS + group) * _WIDE + jt.arange(_WIDE)
    return jnp.broadcast_to(own[None, :], (AT_ONCE, _WIDE))


def _places(hidden: int) -> list[tuple[int, int]]:
    return [(piece, group) for piece in range(jt.cdiv(hidden, PIECE)) for group in range(_GROUPS)]


def _halves(x) -> list:
    """x [`AT_ONCE`, 256] as two tiles [`AT_ONCE`, *lanes, 4]."""
    return cut(x.reshape(AT_ONCE, *_LANES, 2, 4), 4)


def _roles(hidden: int) -> list[range]:
    """The pieces of each role of the kernel that has any."""
    pieces, roles = jt.cdiv(hidden, PIECE), roles_of(hidden)
    return [range(role, pieces, roles) for role in range(min(roles, pieces))]


def _load(ref, i, columns, hidden: int):
    """ref[i, columns] as float32, with zeros behind the last number of a row; without i ref[columns]."""
    place = (columns,) if i is None else (i, columns)
    ragged = hidden % PIECE != 0
    found = jt.load(ref, place, mask=columns < hidden, other=0) if ragged else ref[place]
    return found.astype(jnp.float32)


def row_of(x, norm: Norm, i, eps: float) -> Row:
    """Row i of x [rows, hidden], plus that of norm.residual where there is one, in front of the norm."""
    hidden, before, parts = x.shape[1], {}, {}
    for place in _places(hidden):
        columns = _columns(*place)
        before[place] = _load(x, i, columns, hidden)
        if norm.residual is not None:
            before[place] = before[place] + _load(norm.residual, i, columns, hidden)
        parts[place] = before[place] * _load(norm.weight, None, columns, hidden)
    unit = jax.lax.rsqrt(_squares(before, hidden) * jnp.float32(1 / hidden) + eps)
    square = _added(part * part for part in parts.values()).sum(1)
    return Row(parts, unit, (jnp.sqrt(square) * unit).max())


def products(table, rows, row: Row, lanes: int):
    """The products float32 [`AT_ONCE`] of a row with those rows, int32 [`AT_ONCE`], of a table [vocab, hidden]; lanes:
    what `hopper_gemv.lanes_of_sum` says of the head, 2 or 4."""
    hidden, of_roles = table.shape[1], []
    load = lambda place: _load(table, rows[:, None], _columns(*place), hidden)
    loaded = {place: load(place) for place in _places(hidden)}  # at once
    for role in _roles(hidden):
        fours = [_added(_terms(loaded, row.parts, piece)) for piece in role]
        of_roles.append(_added(_added(cut(four, 4)) for four in fours))
    sums = _added(of_roles)
    if lanes == 2:
        return sums.sum(3).sum(1).sum(1) * row.unit
    return _added(one for two in cut(sums, 2) for one in cut(two, 2)).sum(1) * row.unit


def _terms(w: dict, x: dict, piece: int) -> list:
    """The products of a piece, as tiles [`AT_ONCE`, *lanes, 4] in the order of their sum."""
    places = [(piece, group) for group in range(_GROUPS)]
    return [a * b for place in places for a, b in zip(_halves(w[place]), _halves(x[place]))]


def _squares(x: dict, hidden: int):
    """The sums [`AT_ONCE`] of the squares of a row. A lane of the kernel adds up 32 numbers as they lie, which four
    lanes have here."""
    of_roles = []
    for role in _roles(hidden):
        groups = []
        for group in range(_GROUPS):
            squares = _added(x[piece, group] * x[piece, group] for piece in role)
            groups.append(_added(half.sum(4).sum(2).sum(2) for half in _halves(squares)))
        pairs = [a + b for a, b in zip(groups[: _GROUPS // 2], groups[_GROUPS // 2 :])]
        of_roles.append(_added(pairs).sum(1))
    return _added(of_roles)


def _added(terms):
    """The sum of terms, one after the other."""
    return functools.reduce(jnp.add, terms)
