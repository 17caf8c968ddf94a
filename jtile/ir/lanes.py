"""The card of products of words, lane by lane, by the tensor cores: an instruction of a warp that reads registers."""

from __future__ import annotations

import dataclasses

import numpy as np

from .core import Op, Value, tile
from .types import DTYPES, TileType

# For each way to multiply the words of lanes: the tiles of b for one of a, and the dtype of sums.
LANE_PRODUCTS = {"integers": (1, "int32"), "bfloat16": (1, "float32"), "float8_e4m3fn": (2, "float32")}
# The dtypes of the numbers that words of a and of b hold.
_NUMBERS = {
    "integers": ("uint8", "int8"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float8_e4m3fn": ("float8_e4m3fn", "float16"),
}


@dataclasses.dataclass(eq=False)
class DotLanes(Op):
    """Sums of products of the numbers that words hold, lane by lane, on the tensor cores: for tiles of words a [rows,
    lanes, words] and b [planes, lanes, words], of which `kind` says the numbers, acc + sum_k a[r, l, k] b[p, l, k] is
    [rows, planes, lanes].

    `integers`: four uint8 in a word of a and four int8 in one of b, of as many tiles as there are of a. `bfloat16`: two
    in each. `float8_e4m3fn`: four in a word of a, and two float16 in those of b, which has two tiles for each of a: for
    the lower halves of the words of a, and for the upper ones.
    """

    terms: tuple[Value, ...]
    factors: tuple[Value, ...]
    acc: Value | None
    kind: str

    mnemonic = "dot_lanes"
    level = "block"

    def infer(self):
        a, b = [tile(v) for v in self.terms], [tile(v) for v in self.factors]
        count, dtype = LANE_PRODUCTS[self.kind]
        shown = f"{', '.join(map(str, a))} and {', '.join(map(str, b))}"
        if not a or len(b) != count * len(a) or len(set(a)) != 1 or len(set(b)) != 1:
            raise TypeError(f"dot_lanes takes tiles of one type, {count} of b for each of a, got {shown}")
        if a[0].rank != 3 or b[0].rank != 3 or a[0].shape[1:] != b[0].shape[1:]:
            raise TypeError(f"dot_lanes cannot multiply {shown}")
        if {a[0].dtype, b[0].dtype} != {"uint32"}:
            raise TypeError(f"dot_lanes takes words, uint32, got {shown}")
        out = TileType((a[0].shape[0], b[0].shape[0], a[0].shape[1]), dtype)
        if self.acc is not None and tile(self.acc) != out:
            raise TypeError(f"the accumulator of this product is {out}, got {tile(self.acc)}")
        return (out,)

    def reference(self, *args):
        n = len(self.terms)
        m = n + len(self.factors)
        count, dtype = LANE_PRODUCTS[self.kind]
        of_terms, of_factors = _NUMBERS[self.kind]
        wide = np.int32 if dtype == "int32" else np.float64
        whole = lambda tiles, name: np.concatenate([_numbers(x, name).astype(wide) for x in tiles], axis=-1)
        a, b = whole(_halves(args[:n], count), of_terms), whole(args[n:m], of_factors)
        out = np.einsum("rlwk,plwk->rpl", a, b).astype(DTYPES[dtype].numpy)
        return out + args[m] if self.acc is not None else out


def _numbers(words: np.ndarray, name: str) -> np.ndarray:
    """The numbers of a dtype that words hold, along a new last axis."""
    return np.ascontiguousarray(words)[..., None].view(DTYPES[name].numpy)


def _halves(tiles: tuple[np.ndarray, ...], count: int) -> tuple[np.ndarray, ...]:
    """Tiles of words, each cut in so many parts of its words."""
    return tuple(np.ascontiguousarray(t)[..., None].view(f"u{4 // count}")[..., k] for t in tiles for k in range(count))
