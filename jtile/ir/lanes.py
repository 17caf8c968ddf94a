"""The card of products of codes in words by the tensor cores: instructions of a warp that read registers."""

from __future__ import annotations

import dataclasses

import numpy as np

from .core import Op, Value, tile
from .types import DTYPES, TileType

# For each kind of codes in words: the tiles of factors, and the dtype of their numbers.
QUAD_PRODUCTS = {
    "int4": (2, "int8"),
    "uint4": (2, "int8"),
    "int8": (1, "int8"),
    "float8_e4m3fn": (2, "float16"),
}
ROWS, PLANES, LANES, WORDS = 8, 2, 32, 4  # of a tile of terms, and of factors


@dataclasses.dataclass(eq=False)
class DotQuads(Op):
    """Sums of products of the codes that words hold, over four lanes at a time, on the tensor cores.

    Two tiles of words [8, lanes, words] are the first and the last 8 of 16 rows a, tiles of factors [2, lanes, words]
    two planes b. The sum over the four lanes of quad q and over part p of their codes of a[r] b[d] is element [r, d, 2q
    + p] of the result, float32 [16, 2, 16]. The words of factors hold int8, or float16 where codes are 8-bit floats.

    `int4`, `uint4`: 8 codes of 4 bits in a word, less 8 or as they are. Part 0 are the lower 4 bits of each byte, of
    which the first tile of factors has the bytes, part 1 the upper ones with the second tile. `int8`: 4 codes, less
    128; parts are the first and the last two words. `float8_e4m3fn`: 4 codes; parts are the lower halves of words, with
    the first tile of factors, and the upper ones.
    """

    first: Value
    second: Value
    factors: tuple[Value, ...]
    kind: str

    mnemonic = "dot_quads"
    level = "block"

    def infer(self):
        a, b = [tile(self.first), tile(self.second)], [tile(v) for v in self.factors]
        count, _ = QUAD_PRODUCTS[self.kind]
        shown = f"{', '.join(map(str, a))} and {', '.join(map(str, b))}"
        if len(b) != count:
            raise TypeError(f"dot_quads takes {count} tiles of factors for {self.kind}, got {shown}")
        for side, rows in ((a, ROWS), (b, PLANES)):
            if any(t != TileType((rows, LANES, WORDS), "uint32") for t in side):
                raise TypeError(
                    f"dot_quads takes words, uint32 {ROWS}x{LANES}x{WORDS} and {PLANES}x{LANES}x{WORDS}, got {shown}"
                )
        return (TileType((2 * ROWS, PLANES, LANES // 2), "float32"),)

    def reference(self, first, second, *factors):
        a = [_codes(np.concatenate([first, second]), self.kind, part) for part in range(2)]
        b = [_factors(factors, self.kind, part) for part in range(2)]
        wide = np.int64 if QUAD_PRODUCTS[self.kind][1] == "int8" else np.float64
        quads = lambda x: x.reshape(len(x), LANES // 4, -1).astype(wide)
        out = [np.einsum("rqk,dqk->rdq", quads(x), quads(y)) for x, y in zip(a, b)]
        return np.stack(out, -1).reshape(2 * ROWS, PLANES, LANES // 2).astype(np.float32)


def _codes(words: np.ndarray, kind: str, part: int) -> np.ndarray:
    """The numbers that a part of the codes stands for, [rows, lanes, codes]."""
    if kind in ("int4", "uint4"):
        return _bytes(words >> np.uint32(4 * part) & np.uint32(0x0F0F0F0F)).astype(np.int64) - 8 * (kind == "int4")
    if kind == "int8":
        return _bytes(words[..., 2 * part : 2 * part + 2]).astype(np.int64) - 128
    halves = np.ascontiguousarray(words)[..., None].view(np.uint16)[..., part]
    return np.ascontiguousarray(halves)[..., None].view(DTYPES[kind].numpy)


def _factors(tiles: tuple[np.ndarray, ...], kind: str, part: int) -> np.ndarray:
    words = tiles[0][..., 2 * part : 2 * part + 2] if len(tiles) == 1 else tiles[part]
    return np.ascontiguousarray(words)[..., None].view(DTYPES[QUAD_PRODUCTS[kind][1]].numpy)


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words)[..., None].view(np.uint8)
