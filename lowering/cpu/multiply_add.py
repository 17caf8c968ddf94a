"""Which products and sums of floats are rounded once, in kernels of small tiles: their programs may run as one, and a
tile of another size is to have the same bits.

LLVM makes one instruction of a product and a sum where it meets both in one block of code, and of two products takes
the one that comes first there. That depends on how long a tile is, on its edge, and on which loops it is computed in.
So it is said here, by the values alone: a sum takes the product that nobody else reads, its first operand before its
second one. All others are rounded twice, but for products that a reduction sums: their rows have the same
length in all forms of a kernel, and in tiles of any number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jtile import ir
from jtile.passes.dce import dce
from jtile.passes.rewrite import Copier, Form, use_counts

Value = ir.Value
FLOATS = ("float32", "float64")


@dataclasses.dataclass(eq=False)
class MultiplyAdd(ir.Map):
    """`args[0] * args[1] + args[2]` elementwise, rounded once where the machine can. Of this back end alone."""

    fn: str
    args: tuple[Value, ...]

    mnemonic = ""

    def infer(self):
        return (self.args[0].type,)

    def reference(self, *arrays):
        a, b, c = (x.astype(np.float64) for x in arrays)
        return (a * b + c).astype(arrays[0].dtype)


def multiply_adds(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel, where sums take products that nobody else reads."""
    uses = use_counts(kernel.body)
    found = {op: k for block in _blocks(kernel.body) for op, k in _sums(block, uses)}
    return dce(Copier({op: _form(op, k) for op, k in found.items()}).whole(kernel)) if found else kernel


def _blocks(block: ir.Block) -> Iterator[ir.Block]:
    yield block
    for op in block.walk():
        yield from op.blocks()


def _sums(block: ir.Block, uses: Mapping[Value, int]) -> Iterator[tuple[ir.Map, int]]:
    """The sums of a block with a product of the same block that they take, and which operand that is."""
    inside = {op for op in block.ops if isinstance(op, ir.Map) and op.fn == "mul" and op.result.dtype in FLOATS}
    for op in block.ops:
        if isinstance(op, ir.Map) and op.fn in ("add", "sub"):
            k = next((k for k, v in enumerate(op.args) if v.op in inside and uses[v] == 1), None)
            if k is not None:
                yield op, k


def _form(op: ir.Map, k: int) -> Form:
    """a * b + c of a sum or difference whose operand k is a product."""

    def form(c: Copier) -> Sequence[Value]:
        product = op.args[k].op
        assert isinstance(product, ir.Map)
        a, b, other = *map(c.look, product.args), c.look(op.args[1 - k])
        if op.fn == "sub" and k == 0:
            other = c.b.map("neg", other)
        elif op.fn == "sub":
            a = c.b.map("neg", a)
        return [c.b.value(MultiplyAdd("fma", (a, b, other)))]

    return form
