"""Cards of the block level's products: warpgroups that start them on the tensor cores, and wait for them."""

from __future__ import annotations

import dataclasses

from .block import predicate, shared
from .core import Op, Value, tile
from .reductions import accumulator_dtype
from .types import TileType

COLUMNS = 8  # an instruction for products has a multiple of so many


@dataclasses.dataclass(eq=False)
class DotAsync(Op):
    """Start `acc + a @ b` on the tensor cores: a [m, k] in registers (a tile) or shared memory, b [k, n] in shared
    memory, acc a tile or None for zero; where `keep` (bool scalar) is false, acc counts as zero. The result may only be
    the accumulator of a further product, a carried value, or waited for; buffers may not be overwritten before that.

    b may have fewer columns than acc, a multiple of 8: the product is added to the first columns, and the others are
    those of acc, or zeros.

    `fast`: 8-bit floats are summed in the tensor cores' own accumulators, of about 22 bits; else they are added up in
    float32 every 128 terms.

    `places` (uint8 [m, k / 8]): a has two of every four numbers along k, and is [m, k / 2]. Byte p of a row has two
    bits for each of the four numbers 4 p, 4 p + 1, ... of a, the lowest first: in which of their four places it stands.
    The two places of a group ascend.
    """

    a: Value
    b: Value
    acc: Value | None
    keep: Value | None = None
    fast: bool = False
    places: Value | None = None

    mnemonic = "dot_async"
    effect = "io"
    level = "block"

    @property
    def narrow(self) -> bool:
        """Whether only the first columns of the accumulator are added to."""
        return self.result.shape[1] > self.b.shape[1]

    def infer(self):
        a = tile(self.a) if isinstance(self.a.type, TileType) else shared(self.a)
        b = shared(self.b)
        predicate(self.keep)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] * (1 if self.places is None else 2) != b.shape[0]:
            raise TypeError(f"dot_async cannot contract {a} with {b}")
        if self.places is not None:
            wanted = TileType((a.shape[0], b.shape[0] // 8), "uint8")
            if b.shape[0] % 8 or tile(self.places) != wanted:
                raise TypeError(f"the places of {a}, for {b}, are {wanted}, got {self.places.type}")
        acc = None if self.acc is None else tile(self.acc)
        out = TileType((a.shape[0], b.shape[1]), accumulator_dtype(a.dtype, b.dtype))
        if acc is not None and len(acc.shape) == 2 and acc.shape[1] > b.shape[1] and b.shape[1] % COLUMNS == 0:
            out = dataclasses.replace(out, shape=(a.shape[0], acc.shape[1]))
        if acc is not None and acc != out:
            raise TypeError(f"the accumulator of this product is {out}, got {self.acc.type}")
        if self.keep is not None and self.acc is None:
            raise TypeError("a product without accumulator has nothing to keep")
        return (out,)


@dataclasses.dataclass(eq=False)
class DotWait(Op):
    """Wait until at most `pending` products of this role run (they end in the order of their start); gives `values`.
    One whose product may still run comes out as it went in, in flight: an accumulator, a carried value, or waited for
    again, but nothing else."""

    values: tuple[Value, ...]
    pending: int = 0

    mnemonic = "dot_wait"
    effect = "io"
    level = "block"

    def infer(self):
        if self.pending < 0:
            raise ValueError(f"a number of products is not negative, got {self.pending}")
        return tuple(tile(v) for v in self.values)
