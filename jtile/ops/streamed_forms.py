"""The meta-parameters of products of a row or two that come from memory in rings: tiles, roles, slots, and how much of
a ring is on its way. See `hopper_gemv`."""

from __future__ import annotations

import functools

import jax

import jtile as jt
from jtile.ops.operands import Weight
from jtile.ops.streamed_numbers import LANES, bits_of, groups_of, room
from jtile.ops.streamed_operands import PIECE, of_blocks, of_piece

SHARED = 227 << 10  # bytes of shared memory; 2 KiB of them for each row of x are left to barriers and warps
NARROW = 154 << 10  # bytes of shared memory of a block that leaves room for one of attention, `hopper_spread`
_ON_THEIR_WAY = 48 << 10  # bytes of W that a program has asked for and that have not come, where its ring fills early
_BY_ITSELF = 16 << 10  # bytes of a piece that is waited for by itself, at least


def scale_bytes(weight: Weight, inner: int, kind: str) -> tuple[int, ...]:
    """For each array of scales or minima, the bytes of it that belong to 512 bytes of codes."""
    return tuple(of_piece(a, inner, kind) * a.dtype.itemsize for a in of_blocks(weight, kind))


def roles_of(inner: int) -> int:
    """How many roles multiply rows of so many numbers: each takes every so-manieth piece."""
    return min(4, jt.next_power_of_2(jt.cdiv(inner, PIECE)))


@functools.lru_cache(maxsize=1024)
def choices(
    m: int, inner: int, kind: str, gated: bool = False, lines: tuple[int, ...] = (), count: int = 3,
    beside: bool = False,
) -> list[dict[str, int]]:  # fmt: skip
    """Meta-parameters that fit, the best first: tall tiles (8 rows for 4 bits, where the last tile is sooner done), as
    many on their way as there is room for, at least three, or two where nothing else fits. lines: see `scale_bytes`;
    copies go to multiples of 128 bytes. count: see `bytes_of`. beside: room is left for a block of attention."""
    roles, out = roles_of(inner), []
    for rows in (8, 16, 4) if bits_of(kind) == 4 else (16, 8, 4):
        if any(rows * n % 128 for n in lines):
            continue
        found = form(m, inner, kind, gated, rows, roles, lines, count, NARROW if beside else SHARED)
        out += [found] if found else []
    deep = [one for one in out if one["slots"] >= 3]
    return deep or out


def form(
    m: int, inner: int, kind: str, gated: bool, rows: int, roles: int, lines: tuple[int, ...] = (),
    count: int = 3, shared: int = SHARED,
) -> dict[str, int] | None:  # fmt: skip
    """The meta-parameters of tiles of so many rows: see `choices`; None where there is no room for two slots."""
    chunks = jt.cdiv(inner, PIECE * roles)
    numbers = 4 * m * chunks * roles * sum(a.size for a in jax.tree.leaves(room(kind, count)))
    row = roles * groups_of(kind) * (512 + sum(lines)) * (1 + gated)
    sums = 2 * roles * (1 + gated) * m * rows * LANES * 4
    slots = (shared - 2048 * m - numbers - sums) // (row * rows)
    return dict(rows=rows, roles=roles, slots=min(slots, 16)) if slots >= 2 else None


def paced(form: dict[str, int], kind: str, weights: int, lines: tuple[int, ...]) -> dict[str, int]:
    """The meta-parameters that say how much of an early ring is on its way."""
    rows, roles, slots = (form[name] for name in ("rows", "roles", "slots"))
    of_round, sides = rows * roles * groups_of(kind) * (512 + sum(lines)), roles
    while sides > 1 and of_round // sides < _BY_ITSELF:
        sides //= 2
    ahead = max(2, round(_ON_THEIR_WAY * sides / of_round))
    return {"sides": sides, "ahead": min(ahead, weights * sides * slots)}
