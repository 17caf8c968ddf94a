"""Greedy tokens of one row by a head in 8 bits: those of the head as it is stored.

A step of one row reads all of the head, a tenth of what Llama-3.1-8B in 8 bits has. Here a copy of the head in 8 bits
gives every logit within a bound: the norm of x, times that of what the row of the head has lost by rounding. The few
rows whose logits may be the largest by that are read as they are stored, and the first with the largest product is the
token. So half of the head's bytes are read, and half of them are added to the memory of the model.

The products of these few are made of the same numbers and in the same order as the head's kernel makes them
(`head_rows`), and the bound is one of the difference to what that kernel gives, with all roundings of both. So the
token is the one that would be found without a screen, and rows of the head that are equal give the first of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import QuantizedTensor, hopper_gemv
from jtile.ops._shapes import fit
from jtile.ops.argmax import TILE, first_in_part, first_of, keys_of, parts_of
from jtile.ops.dispatch import BLOCK_LEVEL, has
from jtile.ops.operands import Norm, Weight

from . import head_rows
from .decoder import Decoder
from .head_rows import AT_ONCE
from .next_step import IN_PLACE, enter, leave, token_of, types_of_next

TAKEN = True  # whether heads are screened
LARGE = 128 << 20  # bytes of a head, at least: of a smaller one, half are read sooner than two more kernels run
ROUNDED = 4096  # rows of the head that are rounded at a time
TINY = 1e-30  # what is lost at least
PARTS, BN = 256, 512  # programs that look at a row of logits again, at most, and logits that one holds
_LAST, _LEAST = 2**31 - 1, -(2**31)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Screen:
    """A copy of a head [vocab, hidden] in 8 bits, with a scale for each row. lost float32 [vocab]: by how much a logit
    of it may be off, over the norm of x."""

    codes: QuantizedTensor
    lost: jax.Array


def fits(model: Decoder) -> bool:
    """Whether a screen makes greedy tokens of one row sooner: with a large head of 16 bits, where products with codes
    read memory as fast as others, and the head is multiplied by the kernel that `head_rows` follows."""
    table = model.head_table()
    plain = isinstance(table, jax.Array | jax.ShapeDtypeStruct) and table.dtype in (jnp.bfloat16, jnp.float16)
    large = plain and table.dtype.itemsize * table.shape[0] * table.shape[1] >= LARGE
    whole = large and table.shape[1] % 128 == 0 and model.config.softcap is None
    if not (TAKEN and whole and model.dtype == table.dtype.name and has(jt.target(), *BLOCK_LEVEL)):
        return False
    row = jax.ShapeDtypeStruct((1, table.shape[1]), table.dtype)
    return hopper_gemv.misfit(row, Weight(table), table.dtype.name) is None


def has_room(table: jax.Array) -> bool:
    """Whether the device of a head has memory for its screen, and three times as much for what makes it."""
    (device,) = table.devices()
    now = device.memory_stats() or {}
    free = now.get("bytes_limit", 0) - now.get("bytes_in_use", 0)
    return "bytes_limit" not in now or free > 2 * table.nbytes


def screen_of(table: jax.Array) -> Screen:
    """The screen of a head [vocab, hidden]."""
    found = [_rounded(table[i : i + ROUNDED]) for i in range(0, len(table), ROUNDED)]
    codes, scales, lost = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
    copy = QuantizedTensor(codes, scales, None, "int8")
    return Screen(copy.packed() if has(jt.target(), *BLOCK_LEVEL) else copy, lost)


@jax.jit
def _rounded(rows):
    """The codes, scales and losses of some rows of a head.

    The kernel rounds x to integers of 16 bits, each 16 numbers by the largest of them: by at most 2^-15 of that, and so
    by 2^-13 of the norms in a product. What two kernels lose in 40 sums of float32 is 40 * 2^-24. 2e-4 of the norms are
    for both, and so is the least number, where products are too small for float32."""
    found = QuantizedTensor.quantize(rows, "int8")
    back = found.dequantize()
    norm = functools.partial(jnp.linalg.norm, axis=1)
    return found.codes, found.scale, 1.001 * norm(rows.astype(jnp.float32) - back) + 2e-4 * norm(back) + TINY


def _types_of_parts(logits, *, parts: int, **_):
    found = jax.ShapeDtypeStruct((logits.shape[0], parts), jnp.int32)
    return found, found


@jt.kernel(out_type=_types_of_parts, grid=lambda logits, *, parts, **_: (logits.shape[0], parts))
def largest_in_parts(logits, tops, places, *, parts: int, bn: int):
    """The keys of the largest of each part of logits float32 [rows, vocab], and the first places that have them: int32
    [rows, parts]."""
    # y_ip: the first j of part p with logits_ij = max_j logits_ij
    i, p = jt.program_id(0), jt.program_id(1)
    tops[i, p], places[i, p] = first_in_part(logits, i, p, parts, bn, _LAST)


@jt.function
def _again(logits, i, p, least, row, table, lost, none, parts: int, bn: int, lanes: int):
    """(the largest key of the products of a `head_rows.Row` with the rows of the table in part p whose logits may be
    `least` or more, the first of the rows that has it): those that have row.reach times what they may have lost, and
    those of which that is not known. none: whether no row is looked at."""
    L, E = logits.tiles(None, bn, pad=-jnp.inf), lost.tiles(bn, pad=0.0)
    each = jt.cdiv(L.shape[1], parts)
    best, at = jnp.int32(_LEAST), jnp.int32(_LAST)
    for k in jt.range(p * each, jnp.minimum(p * each + each, L.shape[1])):
        column = k * bn + jt.arange(bn)
        may = ~(L[i, k] + row.reach * E[k] < least) & (column < logits.shape[1]) & ~none
        before = jnp.int32(-1)
        for _ in jt.range(jt.cdiv(may.astype(jnp.int32).sum(), AT_ONCE)):
            rows = jt.full((AT_ONCE,), _LAST, jnp.int32)
            for one in range(AT_ONCE):
                before = jnp.where(may & (column > before), column, jnp.int32(_LAST)).min()
                rows = jnp.where(jt.arange(AT_ONCE) == one, before, rows)
            found = keys_of(head_rows.products(table, jnp.minimum(rows, logits.shape[1] - 1), row, lanes))
            top, place = first_of(jnp.where(rows < _LAST, found, jnp.int32(_LEAST)), rows)
            more = top > best
            best, at = jnp.where(more, top, best), jnp.where(more, place, at)
    return best, at


def _types(logits, tops, places, x, norm, table, lost, tokens, done, out, lengths, ends, column, entering, frequencies,
           *, hidden: int, dtype: str, parts: int, **_):  # fmt: skip
    found = jax.ShapeDtypeStruct((logits.shape[0], parts), jnp.int32)
    return *types_of_next(tokens, done, out, lengths, frequencies, hidden, dtype), found, found


@jt.kernel(out_type=_types, grid=lambda logits, *_, parts, **__: (logits.shape[0], parts), alias=IN_PLACE)
def next_screened(
    logits, tops, places, x, norm, table, lost, tokens, done, out, lengths, ends, column, entering, frequencies,
    new_tokens, new_done, new_out, new_lengths, entered, rest, cos, sin, own_tops, own_places,
    *, hidden: int, dtype: str, parts: int, bn: int, lanes: int, eps: float, scale: float, factors: tuple[float, ...],
):  # fmt: skip
    """What `next_tokens` makes, where logits float32 [rows, vocab] are those of a `Screen` with the losses `lost`, and
    tops, places int32 [rows, n] what `largest_in_parts` has found of them.

    x [rows, hidden], or x + norm.residual, goes into the RMS norm in front of the head, which has the weight
    norm.weight [hidden]; table [vocab, hidden]: the head; entering: the table of embeddings."""
    # u = rms_norm(x_i)   r = |u|   y_i: the first j with w_j . u = max w_j . u, over all j with
    # logits_ij + r lost_j >= logits_ij' - r lost_j' for j' = argmax logits_i
    i, p, vocab = jt.program_id(0), jt.program_id(1), logits.shape[1]
    row = head_rows.row_of(x, norm, i, eps)
    top, place = first_of(tops[i, :], places[i, :])
    least = logits[i, place] - row.reach * lost[place]
    wrong = top == keys_of(jnp.float32(jnp.nan))
    best, at = _again(logits, i, p, least, row, table, lost, wrong, parts, bn, lanes)
    own_tops[i, p], own_places[i, p] = jnp.where(wrong, top, best), at
    if jt.arrive(jt.counters("rows", tokens.shape[0]), i, parts):
        token = token_of(first_of(own_tops[i, :], own_places[i, :]), vocab, done[i], tokens[i])
        position = lengths[i] + 1
        leave(i, token, position, done, ends, column, new_tokens, new_done, new_out, new_lengths)
        enter(i, token, position, entering, frequencies, entered, rest, cos, sin, hidden, dtype, scale, factors)


def tokens(logits, x, residual, model: Decoder, screen: Screen, same: tuple, options: dict[str, Any]):
    """What `next_tokens.next_tokens` gives without its last two, of the logits by a screen, for x [1, hidden] or x +
    residual in front of the norm. same, options: the operands that all such kernels have, and their
    meta-parameters."""
    vocab = logits.shape[1]
    found = largest_in_parts(logits, parts=parts_of(*logits.shape), bn=fit(vocab, TILE))
    norm, bn, head = Norm(model.norm.get_value(), residual), fit(vocab, BN), model.head_table()
    more = {"parts": min(PARTS, jt.next_power_of_2(jt.cdiv(vocab, bn))), "bn": bn, "eps": float(model.config.norm_eps)}
    more |= {"lanes": hopper_gemv.lanes_of_sum(x, Weight(head), head.dtype.name)}
    kernel = next_screened.with_options(num_warps=head_rows.WARPS)
    return kernel(logits, *found, x, norm, head, screen.lost, *same, **more, **options)[:-2]
