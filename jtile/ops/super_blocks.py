"""The arrays of GGUF's K-quants: 256 weights of a row share a scale, and 16 or 32 of them a small integer beside it.

With d and m the floats of a super block, s and n the integers of a sub-block, a weight is (d s) (q - zero) - (m n):

| kind | bits of a code q | zero | weights of a sub-block | s       | n      | bits a weight, in a file |
|------|------------------|------|------------------------|---------|--------|--------------------------|
| q2_k | 2                | 0    | 16                     | 4 bits  | 4 bits | 2.625, 2.625             |
| q3_k | 2 + 1            | 4    | 16                     | 6, less 32 | -   | 3.5625, 3.4375           |
| q4_k | 4                | 0    | 32                     | 6 bits  | 6 bits | 4.625, 4.5               |
| q5_k | 4 + 1            | 0    | 32                     | 6 bits  | 6 bits | 5.625, 5.5               |
| q6_k | 4 + 2            | 32   | 16                     | int8    | -      | 6.5625, 6.5625           |

Lower and higher bits of codes stand in arrays of their own, planes, with the bytes that a file has: runs of 32 bytes,
each of which has fields of 32 weights that follow each other. A super block is taken in `parts`; a part is `runs` runs
of 32 weights, `parts` of which lie between one and the next, and it has one field of a byte in each plane. So weight
`32 (parts a + p) + j` is the a-th of part p in its run's byte j.

Integers of 6 bits have a byte each, which costs 4 bytes in a super block: taking them apart in each product would cost
more. These integers stand in the order of parts. So every bit of a file is kept, and reading a file is mostly copying.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtile.ops.operands import Shaped

SUPER, RUN = 256, 32  # weights of a super block, and of a run of bytes with one field each


class Layout(NamedTuple):
    """How a kind is stored; see the table above.

    Attributes:
      bits: bits of a code in each plane, the lowest first.
      zero: the code of the weight 0.
      sub: weights of a sub-block.
      minima: whether there are m and n.
      runs: runs of a part, 32 weights each.
      across: runs of a plane have the parts one after the other, and then their next fields; else fields come first.
      places: where the arrays stand in a block of a file: codes, higher codes, integers, d and m; None: there are none.
    """

    bits: tuple[int, ...]
    zero: int
    sub: int
    minima: bool
    runs: int
    across: bool
    places: dict[str, tuple[int, int]]

    @property
    def parts(self) -> int:
        """Parts of a super block."""
        return SUPER // RUN // self.runs

    @property
    def wide(self) -> int:
        """Sub-blocks of a run."""
        return RUN // self.sub

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """The axes of a super block's weights: runs of a part, parts, sub-blocks of a run, weights of these."""
        return self.runs, self.parts, self.wide, self.sub

    def place(self, part: int, bits: int) -> tuple[int, int]:
        """(which run, which field) of a plane's runs between those of one part is this part's."""
        if self.across:
            return part % (bits // self.runs), part // (bits // self.runs)
        return divmod(part, 8 // bits)

    @property
    def subs(self) -> int:
        """Sub-blocks of a super block."""
        return SUPER // self.sub

    @property
    def block_bytes(self) -> int:
        """The bytes of a super block in a file."""
        return max(end for _, end in self.places.values())


LAYOUTS = {
    "q2_k": Layout((2,), 0, 16, True, 2, False,
                   dict(steps=(0, 16), codes=(16, 80), scale=(80, 82), minimum=(82, 84))),
    "q3_k": Layout((2, 1), 4, 16, False, 1, False,
                   dict(high=(0, 32), codes=(32, 96), steps=(96, 108), scale=(108, 110))),
    "q4_k": Layout((4,), 0, 32, True, 4, False,
                   dict(scale=(0, 2), minimum=(2, 4), steps=(4, 16), codes=(16, 144))),
    "q5_k": Layout((4, 1), 0, 32, True, 1, False,
                   dict(scale=(0, 2), minimum=(2, 4), steps=(4, 16), high=(16, 48), codes=(48, 176))),
    "q6_k": Layout((4, 2), 32, 16, False, 2, True,
                   dict(codes=(0, 128), high=(128, 192), steps=(192, 208), scale=(208, 210))),
}  # fmt: skip
GGUF_BYTES = {kind: layout.block_bytes for kind, layout in LAYOUTS.items()}


class SuperBlocks[T: Shaped](NamedTuple):
    """The arrays of a weight [out, in] of `blocks` super blocks a row, [out, blocks * bytes of a super block] each.

    Attributes:
      codes: the codes or their lower bits, uint8; or uint32, four bytes in a word.
      high: their higher bits likewise, or None.
      steps: s of the sub-blocks: uint8, or int8 without a zero; of q2_k the lower four bits of a byte.
      lows: n of the sub-blocks, uint8; of q2_k None: the higher four bits of `steps`.
      scale: d, float16 [out, blocks].
      minimum: m, or None.
    """

    codes: T
    high: T | None
    steps: T
    lows: T | None
    scale: T
    minimum: T | None


def _integers(kind: str, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """s and n as `SuperBlocks` has them, from the integers of a file, uint8 [..., bytes]."""
    layout = LAYOUTS[kind]
    if kind == "q3_k":  # runs of a part: one
        low = np.concatenate([stored[..., :8] & 15, stored[..., :8] >> 4], axis=-1)
        above = np.concatenate([(stored[..., 8:] >> shift & 3) << 4 for shift in range(0, 8, 2)], axis=-1)
        return ((low | above) - np.uint8(32)).view(np.int8), None
    if kind in ("q2_k", "q6_k"):  # bytes of two adjacent sub-blocks in the order of parts
        pairs = stored.view(np.uint16).reshape(*stored.shape[:-1], layout.runs, layout.parts)
        ordered = np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(*stored.shape[:-1], -1)
        return ordered.view(np.int8 if kind == "q6_k" else np.uint8), None
    return _six_bits(stored, interleaved=layout.runs > 1)


def _six_bits(stored: np.ndarray, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """8 s and 8 n of 6 bits, which a file keeps in 12 bytes, four at a time: of the first of each, and of the last, the
    lower 6 bits of the bytes of a word, and parts of others. `interleaved`: those of even numbers first."""
    first, second, rest = (np.ascontiguousarray(word) for word in np.moveaxis(stored.view("<u4"), -1, 0))
    each = lambda bits: np.uint32(bits * 0x01010101)
    low4 = rest & each(15), rest >> 4 & each(15)
    pairs = [(w & each(63), w >> 2 & each(48) | low) for w, low in zip((first, second), low4, strict=True)]
    if interleaved:
        pairs = [(_every_second(a, b), _every_second(a >> 8, b >> 8)) for a, b in pairs]
    s, n = (np.stack(pair, axis=-1).view(np.uint8) for pair in pairs)
    return s, n


def _every_second(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The bytes 0 and 2 of two words as one."""
    first, last = (word & 255 | word >> 8 & 0xFF00 for word in (a, b))
    return first | last << 16


def of_blocks(raw: np.ndarray, kind: str, shape: tuple[int, int]) -> SuperBlocks:
    """The arrays of the blocks of a file, NumPy's: raw uint8, `out * in / 256 * GGUF_BYTES[kind]` bytes."""
    layout, out, blocks = LAYOUTS[kind], shape[0], shape[1] // SUPER
    raw = raw.reshape(out, blocks, layout.block_bytes)
    part = {name: np.ascontiguousarray(raw[..., start:end]) for name, (start, end) in layout.places.items()}
    half = lambda name: part[name].view(np.float16)[..., 0] if name in part else None
    flat = lambda a: None if a is None else np.ascontiguousarray(a).reshape(out, -1)
    steps, lows = map(flat, _integers(kind, part["steps"]))
    return SuperBlocks(flat(part["codes"]), flat(part.get("high")), steps, lows, half("scale"), half("minimum"))


def as_words(plane):
    """A plane of bytes with four in a uint32."""
    if plane is None or plane.dtype == jnp.uint32:
        return plane
    return jax.lax.bitcast_convert_type(plane.reshape(*plane.shape[:-1], -1, 4), jnp.uint32)


def as_bytes(plane):
    """The inverse of `as_words`."""
    if plane is None or plane.dtype != jnp.uint32:
        return plane
    return jax.lax.bitcast_convert_type(plane, jnp.uint8).reshape(*plane.shape[:-1], -1)


def _codes(planes, layout: Layout, blocks: int):
    """Codes [..., blocks, runs, parts, 32] of planes of bytes."""
    found = None
    for shift, plane, bits in zip((0, layout.bits[0]), planes, layout.bits):
        runs = plane.reshape(*plane.shape[:-1], blocks, layout.runs, -1, RUN)
        places = [layout.place(part, bits) for part in range(layout.parts)]
        parts = [runs[..., run, :] >> np.uint8(bits * field) & np.uint8((1 << bits) - 1) for run, field in places]
        here = jnp.stack(parts, axis=-2) << np.uint8(shift)
        found = here if found is None else found | here
    return found


def integers(steps, lows, layout: Layout):
    """s and n (or None) of `SuperBlocks.steps` and `lows` or parts of them, float32."""
    if not layout.minima:
        return steps.astype(jnp.float32), None
    if lows is None:
        steps, lows = steps & np.uint8(15), steps >> np.uint8(4)
    return steps.astype(jnp.float32), lows.astype(jnp.float32)


def dequantized(weight: SuperBlocks, kind: str) -> jax.Array:
    """float32 weights [..., in]; every product is exact, so that the rounding of the difference is the only one."""
    layout, (*lead, blocks) = LAYOUTS[kind], weight.scale.shape
    codes = _codes((as_bytes(weight.codes), as_bytes(weight.high)), layout, blocks).astype(jnp.float32) - layout.zero
    steps, lows = integers(weight.steps, weight.lows, layout)
    order = (*lead, blocks, layout.parts, layout.runs, layout.wide)
    of_sub = lambda number, steps: (
        number.astype(jnp.float32)[..., None, None, None, None] * (steps.reshape(order).swapaxes(-3, -2)[..., None])
    )
    weights = of_sub(weight.scale, steps) * codes.reshape(*lead, blocks, *layout.axes)
    if lows is not None:
        weights = weights - of_sub(weight.minimum, lows)
    return weights.reshape(*lead, blocks * SUPER)
