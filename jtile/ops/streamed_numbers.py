"""What 16 bytes of a lane hold, as float32 in registers: plain 16-bit numbers, packed codes, 8-bit floats.

Integer codes become float32 without a conversion, as the bits of subnormal numbers: an and-instruction and a
multiply-add for each, and hardly a shift. x is brought to the range of these numbers by powers of two, which are exact.
8-bit floats become float16 two at a time, and these float32, by instructions: one and a half for each.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jtile.ops.quantized_tensor import FLOAT8

FOUR_BIT = ("q4_0", "q4_1")
LANES = 32
_UP, DOWN = 2.0**126, 2.0**23  # x in [1, 2) times that, times an integer's bits as a float32, is a normal number
_ZERO = {"q4_0": 8.0, "q8_0": 128.0, "int8": 128.0}  # the field of a word that says 0
_SHIFTS = {4: (0, 4, 8, 12, 16, 20, 0, 4), 8: (0, 8, 16, 0)}  # where the fields of a word lie when they are taken


def bits_of(kind: str) -> int:
    """Of a weight in memory; `kind`: that of a quantised weight, or the dtype of a plain one."""
    return 4 if kind in FOUR_BIT else 8 if kind in ("q8_0", "int8", "fp8") else 16


def integers(kind: str) -> bool:
    """Whether codes are integers, which are multiplied as subnormal numbers."""
    return bits_of(kind) < 16 and kind != "fp8"


def groups_of(kind: str) -> int:
    """512-byte pieces that hold 1024 weights."""
    return bits_of(kind) // 4


def real(x) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def planes_of(x, kind: str):
    """x [lanes * groups, of a lane] as [8, lanes, 4]: for each word of a lane's 16 bytes what its fields are multiplied
    with."""
    bits = bits_of(kind)
    if integers(kind):
        at = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        at = (at >> 3 & 1) + 2 * (at & 1) if bits == 8 else (at >> 3 & 3) + 4 * (at & 1)  # of s, h, t, e: h, s and e
        x = x * _choose(at, [_UP * 2.0**-shift for shift in _SHIFTS[bits]])
    if bits == 4:  # of a block: s, h, t, e, see `QuantizedTensor.packed`
        x = x.reshape(LANES, 2, 2, 4, 2).transpose(4, 1, 2, 0, 3)
    elif bits == 8:
        x = x.reshape(2, LANES, 2, 4, 2).transpose(0, 4, 2, 1, 3)
    else:
        x = x.reshape(4, LANES, 2, 4).transpose(0, 2, 1, 3)
    return x.reshape(8, LANES, 4)


def _choose(at, values: list[float]):
    """values[at], for tiles of numbers from 0 on."""
    if len(set(values)) == 1:
        return jnp.full(at.shape, values[0], jnp.float32)
    half = len(values) // 2
    return jnp.where(at >= half, _choose(at - half, values[half:]), _choose(at, values[:half]))


def _fields(stored, kind: str) -> list:
    """What 512 bytes of each of some rows hold, as float32 [rows, lanes, 4], for four words of a lane: 2^-149 times the
    bits of a field where it lies, or 24 bits further down (of 4 bits the last is the two highest together); or the
    weights, four at a time."""
    rows, bits = stored.shape[0], bits_of(kind)
    if bits == 16:
        return [numbers.astype(jnp.float32) for numbers in _along(stored.reshape(rows, LANES, 2, 4), 2)]
    words = stored.reshape(rows, LANES, 4)
    if kind == "fp8":
        bytes_ = [(words >> np.uint32(8 * k)).astype(jnp.uint8) for k in range(4)]
        return [jax.lax.bitcast_convert_type(byte, FLOAT8).astype(jnp.float32) for byte in bytes_]
    top = words >> np.uint32(24)
    fields = [real(words & np.uint32(((1 << bits) - 1) << shift)) for shift in range(0, 24, bits)]
    return [*fields, real(top)] if bits == 8 else [*fields, real(top & np.uint32(15)), real(top)]


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """x of one role and round, in registers: for each row of x its planes [lanes, 4]; and its sums [lanes] by group."""

    planes: list[list[jax.Array]]
    totals: list[list[jax.Array]]


def held(planes, totals, kind: str) -> _Numbers:
    found = [_along(ring.load(), 0) for ring in planes]
    if bits_of(kind) == 4:  # the last field of a word is the one before, plus 16 times its own
        found = [[*of_row[:6], of_row[6] - of_row[7], of_row[7]] for of_row in found]
    return _Numbers(found, [_along(ring.load(), 0) for ring in totals])


def _along(t, axis: int) -> list:
    """The tile cut along an axis, which goes; halves of halves, as registers are told apart."""
    if t.shape[axis] == 1:
        return [t.reshape(*t.shape[:axis], *t.shape[axis + 1 :])]
    half = t.shape[axis] // 2
    cut = lambda first: jax.lax.slice_in_dim(t, first, first + half, axis=axis)
    return [*_along(cut(0), axis), *_along(cut(half), axis)]


def lane_sums(pieces, of_blocks, x: _Numbers, kind: str):
    """What one round adds to the products of rows of W with each row of x: [rows, lanes].

    pieces: the 512 bytes of each group; of_blocks: by group the scales and, for Q4_1, the minima.
    """
    scaled, out, wide = len(of_blocks) > 0 or kind in _ZERO, [None] * len(x.planes), [None] * len(x.planes)
    for group, stored in enumerate(pieces):
        fields = _fields(stored, kind)
        for i, planes in enumerate(x.planes):
            own = planes[group * len(fields) : (group + 1) * len(fields)]
            terms = [field * plane[None] for field, plane in zip(fields, own)]
            if not scaled:  # one chain of multiply-adds over all groups
                wide[i] = functools.reduce(jnp.add, terms if wide[i] is None else [wide[i], *terms])
                continue
            part = functools.reduce(jnp.add, _along(functools.reduce(jnp.add, terms), 2))
            part = part + (x.totals[i][group] * jnp.float32(-_ZERO[kind]))[None] if kind in _ZERO else part
            part = part * of_blocks[0][group] if of_blocks else part
            part = part + x.totals[i][group][None] * of_blocks[1][group] if kind == "q4_1" else part
            out[i] = part if out[i] is None else out[i] + part
    return out if scaled else [functools.reduce(jnp.add, _along(part, 2)) for part in wide]


def spread(scales, rows: int):
    """Scales [rows, blocks] in the lanes that have weights of these blocks."""
    blocks, lanes = scales.shape[1], LANES // scales.shape[1]
    scales = scales.astype(jnp.float32)
    wide = jnp.broadcast_to(scales[:, :, None], (rows, blocks, lanes)) if lanes > 1 else scales
    return wide.reshape(rows, LANES) if lanes > 1 else wide
