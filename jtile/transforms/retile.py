"""Other tiles: the same kernel on the same arrays, whose programs and rounds take tiles of other sizes.

What may be cut to another size is what `factors` finds: axes of tiles along which elements do not depend on their
place, walked in steps by one grid axis or by loops that only sum. Cutting an array for shards leaves tiles as they are
and makes fewer of them; here the arrays stay, and a walk takes as many steps as it needs for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from jtile import ir
from jtile.passes import bounds, canonicalise, dce
from jtile.passes.axes import Node, contraction
from jtile.transforms.factors import Factor, Factors
from jtile.transforms.localise import Localise
from jtile.transforms.walks import Walk


def lanes(found: Factors, factor: Factor) -> frozenset[Node]:
    """Roots of the axes of tiles that lie along a factor."""
    return frozenset(found.classes.find((u.tile, u.axis)) for u in factor.uses if u.axis is not None)


def free(factor: Factor) -> int | None:
    """The size of the tiles along a factor that may have another one, or None."""
    walks = [u.how for u in factor.uses if isinstance(u.how, Walk)]
    plain = all(w.coarse == w.inner == 1 and not w.reverse for w in walks)
    sizes = {w.size for w in walks}
    return sizes.pop() if factor.even and plain and len(sizes) == 1 else None


def retile(found: Factors, sizes: Mapping[str, int]) -> ir.Kernel | None:
    """The kernel with tiles of `sizes[factor]` elements along each named factor; None where that is another function:
    a factor has no size that may change, or a tile would hang over the edge along which terms are summed that are not
    zero there.

    Args:
      found: `factors` of the kernel.
    """
    new = {name: size for name, size in sizes.items() if free(found.named(name)) != size}
    if not new:
        return found.kernel
    for name, size in new.items():
        factor = found.named(name)
        now = free(factor) or size
        parts = now // size if now % size == 0 else 0  # the same elements, those outside too, in parts of the tiles
        hangs = any(n % size and -(-n // size) != -(-n // now) * parts for n in factor.sizes)
        if len({-(-n // size) for n in factor.sizes}) > 1:  # arrays of as many tiles as before, but not of such
            return None
        if free(factor) is None or (hangs and not factor.ragged and not _zero_outside(found, factor)):
            return None
    kernel = _Retile(found, new).run(())
    for op in kernel.body.walk():
        if isinstance(op, ir.Load | ir.Store):
            op.checked = True  # the proof that it is in bounds was of the old tiles
    return dce(canonicalise(bounds(kernel)))


def _zero_outside(found: Factors, factor: Factor) -> bool:
    """Whether what is summed along a factor comes straight from loads that read zeros outside of their arrays."""
    along = lanes(found, factor)
    walked = lambda v, axis: found.classes.find((v, axis)) in along
    for op in found.kernel.body.walk():
        summed: tuple[ir.Value, ...] = ()
        if isinstance(op, ir.Dot) and walked(op.a, contraction(op)[0][1]):
            summed = op.a, op.b
        elif isinstance(op, ir.Reduce) and any(walked(op.x, axis) for axis in op.axes):
            summed = (op.x,)
        if not all(map(_reads_zeros, summed)):
            return False
    return True


def _reads_zeros(v: ir.Value) -> bool:
    while isinstance(v.op, ir.Cast | ir.Transpose):
        v = v.op.x
    return isinstance(v.op, ir.Load) and v.op.pad == 0


class _Retile(Localise):
    def __init__(self, found: Factors, sizes: Mapping[str, int]):
        super().__init__(found, {})
        for name, size in sizes.items():
            for use in found.named(name).uses:
                if isinstance(use.how, Walk):
                    self.walk(use, size, -(-use.op.ref.shape[use.place] // size))
