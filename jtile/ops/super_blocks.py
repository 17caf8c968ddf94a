"""The arrays of GGUF's K-quants: 256 weights of a row share a scale, and 16 or 32 of them a small integer beside it.

With d and m the floats of a super block, s and n the integers of a sub-block, a weight is (d s) (q - zero) - (m n):

| kind | bits of a code q | zero | weights of a sub-block | s                  | n      | bits a weight |
|------|------------------|------|------------------------|--------------------|--------|---------------|
| q2_k | 2                | 0    | 16                     | 4 bits             | 4 bits | 2.625         |
| q3_k | 2 + 1            | 4    | 16                     | 4 + 2 bits less 32 | -      | 3.4375        |
| q4_k | 4                | 0    | 32                     | 4 + 2 bits         | 4 + 2  | 4.5           |
| q5_k | 4 + 1            | 0    | 32                     | 4 + 2 bits         | 4 + 2  | 5.5           |
| q6_k | 4 + 2            | 32   | 16                     | int8               | -      | 6.5625        |

Lower and higher bits stand in arrays of their own, so that bytes hold whole fields, and every array is aligned. In a
plane of fields of b bits a super block has B bytes, and element e is the field e // B of the byte e % B, the lowest
first. The elements of the planes of integers are those of s, and behind them those of n. So all bits of a file are
kept, and no more.

A super block is taken in `parts`, each a run of weights of which every byte of a plane has one field at most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SUPER = 256  # weights of a super block


class Layout(NamedTuple):
    """How a kind is stored; see the table above.

    Attributes:
      bits: of a code, plane by plane, the lowest first.
      zero: the code of the weight 0.
      sub: weights of a sub-block.
      step_bits: of s and n, plane by plane; (8,) is int8.
      step_zero: what is taken from s.
      minima: whether there are m and n.
      places: where the arrays stand in a block of a file: codes, higher codes, integers, d and m; None: there are none.
    """

    bits: tuple[int, ...]
    zero: int
    sub: int
    step_bits: tuple[int, ...]
    step_zero: int
    minima: bool
    places: dict[str, tuple[int, int]]

    @property
    def parts(self) -> int:
        """Parts of a super block."""
        return 8 // min(self.bits)

    @property
    def subs(self) -> int:
        """Sub-blocks of a super block."""
        return SUPER // self.sub

    @property
    def grain(self) -> int:
        """Sub-blocks whose integers are fields of the same number in adjacent bytes."""
        return min(self.bytes_of(bits, steps=True) for bits in self.step_bits)

    @property
    def block_bytes(self) -> int:
        """Of a super block in a file, and in memory."""
        return max(end for _, end in self.places.values())

    def bytes_of(self, bits: int, steps: bool = False) -> int:
        """Bytes of a super block in a plane of codes, or of integers."""
        return (self.subs * (1 + self.minima) if steps else SUPER) * bits // 8


LAYOUTS = {
    "q2_k": Layout((2,), 0, 16, (4,), 0, True, dict(steps=(0, 16), codes=(16, 80), scale=(80, 82), minimum=(82, 84))),
    "q3_k": Layout((2, 1), 4, 16, (4, 2), 32, False,
                   dict(high=(0, 32), codes=(32, 96), steps=(96, 108), scale=(108, 110))),
    "q4_k": Layout((4,), 0, 32, (4, 2), 0, True, dict(scale=(0, 2), minimum=(2, 4), steps=(4, 16), codes=(16, 144))),
    "q5_k": Layout((4, 1), 0, 32, (4, 2), 0, True,
                   dict(scale=(0, 2), minimum=(2, 4), steps=(4, 16), high=(16, 48), codes=(48, 176))),
    "q6_k": Layout((4, 2), 32, 16, (8,), 0, False, dict(codes=(0, 128), high=(128, 192), steps=(192, 208),
                                                        scale=(208, 210))),
}  # fmt: skip
GGUF_BYTES = {kind: layout.block_bytes for kind, layout in LAYOUTS.items()}


class SuperBlocks(NamedTuple):
    """The arrays of a weight [out, in] of `blocks` super blocks a row, [out, blocks * bytes of a super block] each.

    Attributes:
      codes: the codes or their lower bits, uint8; or uint32, four bytes in a word.
      high: their higher bits likewise, or None.
      steps: the integers of sub-blocks or their lower bits, uint8 or int8.
      steps_high: their higher bits, or None.
      scale: d, float16 [out, blocks].
      minimum: m, or None.
    """

    codes: Any
    high: Any
    steps: Any
    steps_high: Any
    scale: Any
    minimum: Any


def _interleaved(stored: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Codes [..., fields of all runs] of bytes in runs of `run`, whose fields follow each other run by run."""
    runs = stored.reshape(*stored.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(*stored.shape[:-1], -1)


def _file_codes(kind: str, low: np.ndarray, high: np.ndarray | None) -> np.ndarray:
    """Codes uint8 [..., 256] in the order of the weights, of the bytes of a file."""
    if kind == "q6_k":  # 64 bytes have the lower bits of 128 weights
        codes = _interleaved(low, 64, 4)
    else:
        codes = _interleaved(low, 32, LAYOUTS[kind].bits[0])
    if high is None:
        return codes
    above = _interleaved(high, 32, LAYOUTS[kind].bits[1])
    return codes | above << np.uint8(LAYOUTS[kind].bits[0])


def _file_steps(kind: str, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The planes of integers."""
    if kind == "q6_k":
        return stored.view(np.int8), None
    if kind == "q2_k":
        return stored, None
    if kind == "q3_k":  # as in the file
        return stored[..., :8], stored[..., 8:]
    first, second, both = stored[..., :4], stored[..., 4:8], stored[..., 8:]  # of scales, of minima
    low = np.concatenate([first & 15 | second << 4, both], axis=-1)  # uint8: what is shifted out is gone
    parts = (first >> 4 & 3, first >> 6, second >> 4 & 3, second >> 6)
    return low, sum((part << np.uint8(2 * k) for k, part in enumerate(parts)), np.zeros_like(first))


def _plane(codes: np.ndarray, shift: int, bits: int) -> np.ndarray:
    """The bits from `shift` on of codes [..., 256] as a plane."""
    fields = codes.reshape(*codes.shape[:-1], 8 // bits, -1) >> np.uint8(shift) & np.uint8((1 << bits) - 1)
    return np.bitwise_or.reduce(fields << np.arange(0, 8, bits, dtype=np.uint8)[:, None], axis=-2)


def of_blocks(raw: np.ndarray, kind: str, shape: tuple[int, int]) -> SuperBlocks:
    """The arrays of the blocks of a file, NumPy's: raw uint8, `out * in / 256 * GGUF_BYTES[kind]` bytes."""
    layout, out, blocks = LAYOUTS[kind], shape[0], shape[1] // SUPER
    raw = raw.reshape(out, blocks, layout.block_bytes)
    part = {name: np.ascontiguousarray(raw[..., start:end]) for name, (start, end) in layout.places.items()}
    codes = _file_codes(kind, part["codes"], part.get("high"))
    shifts = np.cumsum([0, *layout.bits])
    low, *high = (_plane(codes, shift, bits) for shift, bits in zip(shifts, layout.bits))
    steps, steps_high = _file_steps(kind, part["steps"])
    half = lambda name: part[name].view(np.float16)[..., 0] if name in part else None
    flat = lambda a: None if a is None else np.ascontiguousarray(a).reshape(out, -1)
    return SuperBlocks(flat(low), flat(high[0] if high else None), flat(steps), flat(steps_high), half("scale"),
                       half("minimum"))  # fmt: skip


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


def fields(plane, bits: int, blocks: int):
    """Elements [..., blocks, elements] of a plane of bytes [..., blocks * bytes]."""
    bytes_ = plane.reshape(*plane.shape[:-1], blocks, -1)
    if bits == 8:
        return bytes_
    parts = [bytes_ >> np.uint8(shift) & np.uint8((1 << bits) - 1) for shift in range(0, 8, bits)]
    return jnp.concatenate(parts, axis=-1)


def _together(planes, bits: tuple[int, ...], blocks: int):
    """Elements of which each plane has some bits, as float32."""
    low, *high = (fields(plane, b, blocks) for plane, b in zip(planes, bits))
    return (low | high[0] << np.uint8(bits[0]) if high else low).astype(jnp.float32)


def dequantized(weight: SuperBlocks, kind: str) -> jax.Array:
    """float32 weights [..., in]; every product is exact, so that the rounding of the difference is the only one."""
    layout, blocks = LAYOUTS[kind], weight.scale.shape[-1]
    codes = _together((as_bytes(weight.codes), as_bytes(weight.high)), layout.bits, blocks) - layout.zero
    steps = _together((weight.steps, weight.steps_high), layout.step_bits, blocks)
    of_sub = lambda number, steps: (number.astype(jnp.float32)[..., None] * steps)[..., None]
    codes = codes.reshape(*codes.shape[:-1], layout.subs, layout.sub)
    weights = of_sub(weight.scale, steps[..., : layout.subs] - layout.step_zero) * codes
    if layout.minima:
        weights = weights - of_sub(weight.minimum, steps[..., layout.subs :])
    return weights.reshape(*weight.scale.shape[:-1], blocks * SUPER)
