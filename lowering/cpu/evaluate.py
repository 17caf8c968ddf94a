"""Evaluates a lazy tile at an index: the expression above it is emitted inside the reader's loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from jtile import ir

from . import access
from .access import Lanes, const_value, to_i64
from .convert import emit_cast, from_memory, memory_type, register_type, to_memory
from .elementwise import emit_elementwise
from .llvm import Code, Val, i64, lanes_of, like, scalar_of
from .multiply_add import MultiplyAdd
from .values import Buffer, Ix, Step

if TYPE_CHECKING:
    from .emitter import Emitter
    from .short_rows import Turned

Index = tuple[Ix, ...]


@dataclasses.dataclass
class Point:
    """One place in a loop nest where values are computed: `ix` are the indices of the nest, `lanes` its width.

    `covers` says that the nest visits every element once, so that flagged values may be kept on the way. `row`: the
    index of the row that is being read, where many rows follow each other: a Ref's rows to come are prefetched.
    `number`: of that row among those that are read side by side. `turned`: the rows of which a lane each is read.
    """

    em: Emitter
    shape: tuple[int, ...]
    ix: Index
    lanes: Lanes
    covers: bool = True
    row: Val | None = None
    number: int = 0
    turned: Turned | None = None
    memo: dict = dataclasses.field(default_factory=dict)

    @property
    def code(self) -> Code:
        return self.em.code

    def at(self, v: ir.Value, ix: Index) -> Val:
        """Register-form value of `v` at `ix`: `lanes.count` lanes, or one scalar where all lanes are the same."""
        key = (v, ix)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._compute(v, ix)
        return found

    def full(self, v: ir.Value, ix: Index) -> Val:
        """The value of `v` at `ix` as `at` gives it, with one scalar for all lanes broadcast to a vector."""
        x = self.at(v, ix)
        return x if lanes_of(x.ty) == self.lanes.count else self.code.splat(x, self.lanes.count)

    def _compute(self, v: ir.Value, ix: Index) -> Val:
        rep = self.em.rep(v)
        if isinstance(rep, Val):
            return rep
        if isinstance(rep, Buffer):
            self.em.arena.touch(rep.alloc)
            lanes = self._lanes_for(ix)
            if self.row is not None and rep.alloc is None and lanes.count > 1:
                self._prefetch(rep, ix)
            if self.turned is not None and (found := self.turned.read(rep, ix, lanes.count)) is not None:
                return found
            return access.read(self.code, self.em.isa, rep, ix, lanes)
        if self.em.marks is None:
            x = RULES[type(v.op)](self, v.op, ix)
        else:
            with self.em.marking(v.op):
                x = RULES[type(v.op)](self, v.op, ix)
        if self.covers and v in self.em.flagged and v.shape == self.shape and ix == self.ix:
            self.em.keep(self, v, x)
        return x

    def _prefetch(self, buf: Buffer, ix: Index) -> None:
        """Ask for the elements some rows on: the hardware does not see a stream in short rows read side by side."""
        axis = next((k for k, x in enumerate(ix[:-1]) if x.base == self.row), None)
        if axis is None or not isinstance(buf.strides[axis], int) or (buf.strides[-1], ix[-1].step) != (1, 1):
            return
        row_bytes = buf.strides[axis] * access.elem_bytes(buf.dtype)
        same = self.number and self.number * row_bytes % LINE >= row_bytes  # the row before begins in the same line
        if 0 < row_bytes <= PREFETCH_ROW and not same:
            later = tuple(
                Ix(self.code.add(x.base, PREFETCH // row_bytes if k == axis else 0)) for k, x in enumerate(ix)
            )
            base, _ = access.offset(self.code, buf, later)
            ptr = self.code.gep(memory_type(buf.dtype), buf.ptr, base)
            self.code.intrinsic("prefetch", "void", ptr, *(Val("i32", k) for k in "021"), suffix="p0")

    def _lanes_for(self, ix: Index) -> Lanes:
        return self.lanes if any(x.step for x in ix) else Lanes(1)

    def ints(self, x: Ix) -> Val:
        """The indices of all lanes as i64: one scalar if they agree."""
        if not x.step or self.lanes.count == 1:
            return x.base
        n = self.lanes.count
        return self.code.binary("add", self.code.splat(x.base, n), access.lane_offsets(self.code, x.step, n))


FUSABLE = (
    "add",
    "sub",
    "mul",
)  # a product and the sum it goes into may round once (fused multiply-add), as XLA's CPU code does

PREFETCH = 12 << 10  # bytes ahead: about 0.4 us at the bandwidth of one core
LINE = 64  # bytes that are fetched together
PREFETCH_ROW = 4 << 10  # bytes of a row: the hardware prefetches longer ones by itself

Rule = Callable[[Point, ir.Op, Index], Val]
RULES: dict[type[ir.Op], Rule] = {}


def rule(card: type[ir.Op]):
    def add(fn: Rule) -> Rule:
        RULES[card] = fn
        return fn

    return add


def scalar_i64(em: Emitter, v: ir.Value) -> Val:
    """A scalar integer value as i64."""
    return to_i64(em.code, em.scalar(v), v.dtype)


def _same_lanes(p: Point, args: list[Val]) -> list[Val]:
    n = max(lanes_of(a.ty) for a in args)
    return [a if lanes_of(a.ty) == n else p.code.splat(a, n) for a in args]


@rule(MultiplyAdd)
@rule(ir.Map)
def _map(p: Point, op: ir.Map, ix: Index) -> Val:
    args = _same_lanes(p, [p.at(a, ix) for a in op.args])
    if op.fn in FUSABLE and (op.fn == "mul" or p.em.contracts) and op.args[0].dtype in ("float32", "float64"):
        return p.code.binary(f"f{op.fn} contract", *args)
    return emit_elementwise(p.code, p.em.isa, op.fn, args, op.args[0].dtype)


@rule(ir.Select)
def _select(p: Point, op: ir.Select, ix: Index) -> Val:
    a, b = _same_lanes(p, [p.at(op.a, ix), p.at(op.b, ix)])
    c = p.at(op.cond, ix)
    if lanes_of(c.ty) > 1:
        n = lanes_of(c.ty)
        a, b = (x if lanes_of(x.ty) == n else p.code.splat(x, n) for x in (a, b))
    return p.code.select(c, a, b)


@rule(ir.Cast)
def _cast(p: Point, op: ir.Cast, ix: Index) -> Val:
    return emit_cast(p.code, p.em.isa, p.at(op.x, ix), op.x.dtype, op.dtype)


@rule(ir.Bitcast)
def _bitcast(p: Point, op: ir.Bitcast, ix: Index) -> Val:
    raw = to_memory(p.code, p.em.isa, p.at(op.x, ix), op.x.dtype)
    raw = p.code.cast("bitcast", raw, like(raw.ty, memory_type(op.dtype)))
    return from_memory(p.code, p.em.isa, raw, op.dtype)


@rule(ir.Full)
def _full(p: Point, op: ir.Full, ix: Index) -> Val:
    return const_value(op.value, op.dtype)


@rule(ir.Iota)
def _iota(p: Point, op: ir.Iota, ix: Index) -> Val:
    n = p.ints(ix[op.axis])
    scalar = scalar_of(register_type(op.dtype, 1))
    info = ir.DTYPES[op.dtype]
    if info.kind in "iu" and info.bits >= 8:
        if n.name.lstrip("-").isdigit():
            return Val(scalar, n.name)
        return n if scalar == "i64" else p.code.cast("trunc", n, like(n.ty, scalar))
    return emit_cast(p.code, p.em.isa, n, "int64", op.dtype)


@rule(ir.Broadcast)
def _broadcast(p: Point, op: ir.Broadcast, ix: Index) -> Val:
    return p.at(op.x, broadcast_index(op, ix))


def broadcast_index(op: ir.Broadcast, ix: Index) -> Index:
    pairs = zip(op.x.shape, op.dims, strict=True)
    return tuple(Ix(i64(0)) if n == 1 and op.shape[d] != 1 else ix[d] for n, d in pairs)


@rule(ir.Transpose)
def _transpose(p: Point, op: ir.Transpose, ix: Index) -> Val:
    out: list[Ix] = [Ix(i64(0))] * len(ix)
    for k, q in enumerate(op.perm):
        out[q] = ix[k]
    return p.at(op.x, tuple(out))


@rule(ir.Slice)
def _slice(p: Point, op: ir.Slice, ix: Index) -> Val:
    dims = zip(ix, op.starts, op.strides, strict=True)
    return p.at(op.x, tuple(Ix(p.code.add(p.code.mul(x.base, s), a), x.step * s) for x, a, s in dims))


@rule(ir.Reverse)
def _reverse(p: Point, op: ir.Reverse, ix: Index) -> Val:
    dims = enumerate(zip(ix, op.x.shape, strict=True))
    return p.at(op.x, tuple(Ix(p.code.sub(n - 1, x.base), -x.step) if k in op.axes else x for k, (x, n) in dims))


@rule(ir.Reshape)
def _reshape(p: Point, op: ir.Reshape, ix: Index) -> Val:
    return p.at(op.x, reshape_index(p.code, op.x.shape, op.shape, ix))


@functools.lru_cache(maxsize=1024)  # a nest asks for the same shapes at each of its places
def reshape_groups(src: tuple[int, ...], dst: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of source axes and of result axes that hold the same elements."""
    groups, i, j = [], 0, 0
    while i < len(src) or j < len(dst):
        a, b, m, n = [], [], 1, 1
        while (not a and not b) or m != n:
            if m <= n and i < len(src):
                a.append(i)
                m *= src[i]
                i += 1
            elif j < len(dst):
                b.append(j)
                n *= dst[j]
                j += 1
            else:
                a.append(i)
                m *= src[i]
                i += 1
        groups.append((a, b))
    return groups


def lazy_reshape(src: tuple[int, ...], dst: tuple[int, ...]) -> bool:
    """Can an index of the result be turned into one of the source with a constant step between lanes?"""
    if 0 in src or 0 in dst:
        return False
    return all(sum(src[k] > 1 for k in a) <= 1 for a, _ in reshape_groups(src, dst))


def reshape_index(code: Code, src, dst, ix: Index) -> Index:
    """Index of the source: in every group one source axis is longer than 1, and the result axes are its digits."""
    out: list[Ix] = [Ix(i64(0))] * len(src)
    for a, b in reshape_groups(src, dst):
        base, scale = i64(0), 1
        step: Step = 0
        for k in reversed(b):
            if dst[k] > 1:
                base = code.add(code.mul(ix[k].base, scale), base)
                step = step + ix[k].step * scale
            scale *= dst[k]
        for k in a:
            if src[k] > 1:
                out[k] = Ix(base, step)
    return tuple(out)


@rule(ir.DynamicSlice)
def _dynamic_slice(p: Point, op: ir.DynamicSlice, ix: Index) -> Val:
    out = []
    for x, start, size, n in zip(ix, op.starts, op.sizes, op.x.shape, strict=True):
        out.append(Ix(p.code.add(x.base, clamped_start(p.em, start, size, n)), x.step))
    return p.at(op.x, tuple(out))


def clamped_start(em: Emitter, start: ir.Value, size: int, n: int) -> Val:
    if size == n:
        return i64(0)
    s = scalar_i64(em, start)
    if start.dtype == "uint64":
        s = em.code.intrinsic("umin", "i64", s, i64(n))
    s = em.code.intrinsic("smax", "i64", s, i64(0))
    return em.code.intrinsic("smin", "i64", s, i64(n - size))


@rule(ir.Gather)
def _gather(p: Point, op: ir.Gather, ix: Index) -> Val:
    """The source stands in memory (the block emitter saw to it); an index outside reads the nearest element."""
    buf = p.em.rep(op.x)
    if not isinstance(buf, Buffer):
        return p.at(op.x, tuple(Ix(i64(0)) for _ in ix))
    p.em.arena.touch(buf.alloc)
    n = op.x.shape[op.axis]
    at = to_i64(p.code, p.at(op.indices, ix), op.indices.dtype)
    lanes = lanes_of(at.ty)
    limit = lambda k: p.code.splat(i64(k), lanes)
    at = p.code.intrinsic("smin", at.ty, p.code.intrinsic("smax", at.ty, at, limit(0)), limit(n - 1))
    if lanes == 1:
        return access.read(
            p.code, p.em.isa, buf, tuple(Ix(at) if k == op.axis else x for k, x in enumerate(ix)), p._lanes_for(ix)
        )
    return gather_vector(p, buf, tuple(Ix(i64(0)) if k == op.axis else x for k, x in enumerate(ix)), [(op.axis, at)])


def gather_vector(p: Point, buf: Buffer, ix: Index, varying: list[tuple[int, Val]], mask: Val | None = None) -> Val:
    """Read `buf` at `ix` plus per-lane i64 indices along the `varying` axes; lanes outside `mask` read element 0 of
    nothing."""
    n = p.lanes.count
    base, step = access.offset(p.code, buf, ix)
    offs = p.code.binary("add", p.code.splat(base, n), access.lane_offsets(p.code, step, n))
    for axis, at in varying:
        stride = buf.strides[axis]
        scaled = p.code.binary("mul", at, p.code.splat(i64(stride) if isinstance(stride, int) else stride, n))
        offs = p.code.binary("add", offs, scaled)
    ty = memory_type(buf.dtype)
    mask = mask if mask is not None else p.lanes.mask
    raw = access.gather_lanes(p.code, ty, buf.ptr, offs, Lanes(n, mask))
    return from_memory(p.code, p.em.isa, raw, buf.dtype)
