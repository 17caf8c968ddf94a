"""Shorter rounds: a loop that takes tiles of `size` elements takes the same ones in several rounds each.

As `retile`, but for one loop, whose bounds may be computed, and whose tiles may know where their elements stand, as
those under a causal mask do.
"""

from __future__ import annotations

import dataclasses

from jtile import ir
from jtile.ir.builder import build
from jtile.passes import canonicalise, dce
from jtile.passes.affine import Affine, Forms
from jtile.passes.fold import number
from jtile.passes.rewrite import Rewriter, Rules
from jtile.transforms.factors import factors
from jtile.transforms.retile import free, retile

PLACES = "places"  # name of an added input that holds the places of elements, as the index of the loop gives them


def round_size(kernel: ir.Kernel) -> int | None:
    """The size of the tiles that the one loop with products of a kernel takes in a round; None where it has none."""
    loop = _loop(kernel)
    found = set() if loop is None else _sizes(kernel, loop)
    return found.pop() if len(found) == 1 else None


def shorter_rounds(kernel: ir.Kernel, size: int) -> ir.Kernel | None:
    """The kernel, whose one loop with products takes tiles of `size` elements; None where that is another function, or
    its tiles are no multiple of that."""
    loop, now = _loop(kernel), round_size(kernel)
    if loop is None or now is None or now % size or now == size:
        return None
    lengths = {op.ref.shape[k] for op, k in _walks(kernel, loop)}
    counts = {-(-n // now) if isinstance(n, int) else 0 for n in lengths}
    if len(counts) != 1 or 0 in counts or any(-(-n // size) != -(-n // now) * (now // size) for n in lengths):
        return None
    plain = _plain(kernel, loop, now, counts.pop())
    found = factors(plain)
    factor = next((f for f in found.factors if free(f) == now and any(c.loop is not None for c in f.counters)), None)
    new = None if factor is None else retile(found, {factor.name: size})
    return None if new is None else _placed(new, kernel, loop, size, now // size)


def _loop(kernel: ir.Kernel) -> ir.For | None:
    loops = [op for op in kernel.body.ops if isinstance(op, ir.For)]
    dots = [op for op in kernel.body.walk() if isinstance(op, ir.Dot)]
    inside = [loop for loop in loops if any(op in dots for op in loop.body.walk())]
    nested = any(isinstance(op, ir.For | ir.While) for loop in inside for op in loop.body.walk())
    return inside[0] if len(inside) == 1 and not nested and number(inside[0].step) == 1 else None


def _walks(kernel: ir.Kernel, loop: ir.For) -> list[tuple[ir.Load | ir.Store | ir.Atomic, int]]:
    index = loop.body.params[0]
    accesses = [op for op in loop.body.walk() if isinstance(op, ir.Load | ir.Store | ir.Atomic)]
    return [(op, k) for op in accesses for k, d in enumerate(op.index) if ir.dim_value(d) is index]


def _sizes(kernel: ir.Kernel, loop: ir.For) -> set[int]:
    dims = [op.index[k] for op, k in _walks(kernel, loop)]
    return {d.size if isinstance(d, ir.Tile) and d.size == d.step else 0 for d in dims} - {0}


def _plain(kernel: ir.Kernel, loop: ir.For, size: int, count: int) -> ir.Kernel:
    """The kernel, whose loop makes every round there is, and loads where its elements stand."""
    forms = Forms(kernel)
    place = Affine(0, ((loop.body.params[0], size),))
    rules = Rules()
    found: dict[str, ir.Value] = {}

    def of_loop(op: ir.For, rw: Rewriter):
        if op is not loop:
            return None
        body = rw.block(op.body)
        zero, one = rw.b.full(0, (), op.lo.dtype), rw.b.full(1, (), op.lo.dtype)
        end = rw.b.full(count, (), op.lo.dtype)
        new = ir.For(zero, end, one, tuple(map(rw.look, op.inits)), body, op.stages, op.unroll)
        return rw.region_op(new, op, tuple(r.name for r in op.results))

    def standing(old: ir.Map) -> ir.Value | None:
        """The start of a tile of places that a sum is; None of another one."""
        if old.fn != "add" or not old.result.shape:
            return None
        for x, y in (old.args, old.args[::-1]):
            long = [n for n in old.result.shape if n > 1]
            if isinstance(x.op, ir.Iota) and isinstance(y.op, ir.Broadcast) and not y.op.x.shape and long == [size]:
                return y.op.x if forms.form(y.op.x) == place else None
        return None

    starts = {op: standing(op) for op in loop.body.walk() if isinstance(op, ir.Map)}

    class Walk(Rewriter):
        def look(self, v: ir.Value) -> ir.Value:
            if isinstance(v.op, ir.Full) and v.shape:  # one for each use: they may be cut along other axes
                return self.b.full(v.op.value, v.shape, v.dtype)
            return super().look(v)

        def op(self, op: ir.Op) -> None:
            if isinstance(op, ir.Map) and starts.get(op) is not None:
                dtype = op.result.dtype
                if dtype not in found:
                    found[dtype] = ir.Value(ir.RefType((size * count,), dtype, "in"), PLACES)
                index = self.look(loop.body.params[0])
                tile = self.b.value(ir.Load(found[dtype], (ir.Tile(index, size, size),)))
                self.replace(op.results, (self.b.reshape(tile, op.result.shape),))
            else:
                super().op(op)

    rules(ir.For)(of_loop)
    new = Walk(kernel, rules).run()
    return dataclasses.replace(new, params=(*kernel.inputs, *found.values(), *kernel.outputs, *kernel.scratch))


def _placed(new: ir.Kernel, kernel: ir.Kernel, loop: ir.For, size: int, rounds: int) -> ir.Kernel | None:
    """`new`, made of `_plain`, with the bounds and the places of the kernel again."""
    own = {p.name for p in kernel.params}
    places = [p for p in new.inputs if p.name == PLACES and PLACES not in own]
    changed = _loop(new)
    if changed is None:
        return None
    rules = Rules()

    @rules(ir.Load)
    def _(op: ir.Load, rw: Rewriter):
        if op.ref not in places:
            return None
        start = rw.b.map("mul", rw.b.cast(ir.dim_value(op.index[0]), op.ref.dtype), rw.b.full(size, (), op.ref.dtype))
        iota = rw.b.value(ir.Iota((size,), 0, op.ref.dtype))
        return rw.b.map("add", rw.b.value(ir.Broadcast(start, (size,), ())), iota)

    @rules(ir.For)
    def _(op: ir.For, rw: Rewriter):
        if op is not changed:
            return None
        bounds = [_copied(v, rw, {}) for v in (loop.lo, loop.hi)]
        if None in bounds:
            return None
        lo, hi = (rw.b.map("mul", v, rw.b.full(rounds, (), v.dtype)) for v in bounds if v is not None)
        body = rw.block(op.body)
        again = ir.For(lo, hi, rw.look(op.step), tuple(map(rw.look, op.inits)), body, op.stages, op.unroll)
        return rw.region_op(again, op, tuple(r.name for r in op.results))

    if not all(_scalar(v) for v in (loop.lo, loop.hi)):
        return None
    out = Rewriter(new, rules).run()
    out = dataclasses.replace(out, params=tuple(p for p in out.params if p not in places))
    return dce(canonicalise(out))


def _scalar(v: ir.Value) -> bool:
    """Whether a number is computed from program ids and constants alone."""
    if isinstance(v.op, ir.Full | ir.ProgramId):
        return True
    return isinstance(v.op, ir.Map | ir.Select | ir.Cast) and all(map(_scalar, v.op.operands()))


def _copied(v: ir.Value, rw: Rewriter, env: dict[ir.Value, ir.Value]) -> ir.Value | None:
    """A number of another kernel, computed by copies of its ops in this one."""
    if v not in env:
        for x in v.op.operands() if v.op is not None else ():
            _copied(x, rw, env)
        assert v.op is not None
        new = build(v.op.clone(lambda x: env[x]), v.op.loc)
        rw.b.block.ops.append(new)
        env[v] = new.results[0]
    return env[v]
