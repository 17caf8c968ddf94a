"""Emits one Tile IR kernel as an LLVM function: walks blocks, keeps the representation of every value, owns the arena.

Ops that only compute elementwise or move elements stay lazy and are emitted inside the loops of their reader; `plan.py`
says which of them are worth a buffer of their own ("flagged"). Everything else (loads, stores, reductions, dots,
control flow) has an emitter in a sibling file, registered by `@emits(Card)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jtile import ir
from jtile._errors import UnsupportedError
from jtile.passes.affine import Forms

from ..emitting import Marks, into
from . import access, digit_products, nibbles, pairs, plan, together
from .access import Lanes
from .evaluate import RULES, Point, lazy_reshape
from .gemm import ANY_ORDER, Order
from .isa import Isa
from .llvm import Code, Module, Val, i64
from .multiply_add import MultiplyAdd
from .nest import emit_nest
from .values import LAZY, Arena, Buffer, Lazy, Rep, dense_strides

if TYPE_CHECKING:
    from .emit_devices import Devices

DEPTH = 64  # longer chains of lazy ops are cut by a buffer: Python's stack and LLVM's patience end somewhere
REPEAT = 0.9  # RECOMPUTE for a reader that reads every element many times
_AT_THE_SAME = frozenset([ir.Map, MultiplyAdd, ir.Select, ir.Cast, ir.Bitcast])  # read operands at their own index
FLAT = 8.0  # expressions of no more vector instructions are written out for each vector of a short row
RECOMPUTE = 2.0  # cheaper than this (vector instructions) is computed again rather than kept in memory

Places = dict[ir.Value, tuple[ir.Value | None, Buffer]]

EMITTERS: dict[type[ir.Op], Callable[[Emitter, ir.Op], None]] = {}
emits = into(EMITTERS)  # emitters define `em.env` for the results of their op


@dataclasses.dataclass
class Frame:
    """A block under emission and the position of the op that is being emitted.

    `prefer` says where results may be computed: value -> (the value whose memory that is, or None; the memory).
    """

    plan: plan.BlockPlan
    prefer: Places
    pos: int = 0


class Emitter:
    """State of one kernel's emission. `env` maps values to what they are now; `plan`/`pos` say where in which block we
    are."""

    def __init__(self, kernel: ir.Kernel, isa: Isa, module: Module, code: Code, marks: Marks | None = None):
        self.kernel, self.isa, self.module, self.code, self.marks = kernel, isa, module, code, marks
        self.arena = Arena()
        self.workspace = Val("ptr", "%ws")
        self.env: dict[ir.Value, Rep] = {}
        self.depth: dict[ir.Value, int] = {}
        self.flagged: set[ir.Value] = set()
        self.keeping: dict[ir.Value, Buffer] = {}
        self.frames: list[Frame] = []
        self.done: set[ir.Op] = set()
        self.digits: dict[ir.Dot, digit_products.Digits] = {}
        self.absorbed: set[ir.Value] = set()  # values that products of digits take as they are stored
        self.written = plan.written_refs(kernel)
        self.program: dict[int, Val] = {}
        self.range: tuple[Val, Val] | None = None  # the number of the program, and the first one of this call
        self.sites: list[dict] = []
        self.sizes: dict[ir.Extent, Val] = {}  # values of the dynamic dimensions, as i64
        self.alone: Val | None = None  # whether these are all programs of the grid, so that no others run meanwhile
        self.contracts = True  # whether LLVM may make one instruction of `add` and a product; of a reduction it may
        self.order = ANY_ORDER  # of the sums of all products that the kernel asks for
        self.orders: set[Order | None] = set()  # that they have
        self.devices: Devices | None = None  # set in a kernel that talks to other devices

    @functools.cached_property
    def forms(self) -> Forms:
        """The affine forms of the kernel's integers."""
        return Forms(self.kernel)

    # -- representations ------------------------------------------------------------------------------------------
    def rep(self, v: ir.Value) -> Rep:
        return self.env[v]

    def scalar(self, v: ir.Value) -> Val:
        """The register value of a rank-0 value."""
        rep = self.env[v]
        if isinstance(rep, Val):
            return rep
        assert isinstance(rep, Buffer), f"scalar {v!r} has no value yet"
        self.arena.touch(rep.alloc)
        return access.read(self.code, self.isa, rep, (), Lanes(1))

    def first(self) -> Val:
        """Whether this is the first program of a range that one worker runs."""
        assert self.range is not None
        return self.code.cmp("icmp", "eq", *self.range)

    def size(self, n: ir.Size) -> int | Val:
        """A dimension of a Ref: a number, or an i64 that is known at run time."""
        return self.sizes[n] if isinstance(n, ir.Extent) else n

    def new_buffer(self, shape, dtype: str) -> Buffer:
        """An uninitialised buffer in the arena."""
        shape = tuple(shape)
        if any(isinstance(n, ir.Extent) for n in shape):
            loc = self.kernel.loc
            raise UnsupportedError(
                f"kernel {self.kernel.name}: the cpu target has no memory of dynamic size for a program "
                f"({ir.TileType(shape, dtype)}); give its dimensions a static bound, or mark fewer dimensions dynamic",
                (loc.file, loc.line) if loc.file else None,
            )
        size = access.elem_bytes(dtype)
        for n in shape:
            size *= n
        alloc = self.arena.new(size)
        body = self.code.detour()
        ptr = self.code.let("ptr", f"getelementptr i8, {self.workspace}, i64 {alloc.token}", hint="buf")
        self.code.rejoin(body)
        self.code.own(ptr)  # buffers that share memory are never alive at once
        return Buffer(ptr, shape, dense_strides(shape), dtype, alloc)

    def result_buffer(self, v: ir.Value) -> Buffer:
        """A buffer to compute `v` into: the loop carry it will become if that is free, else a new one."""
        param, buf = self.frames[-1].prefer.get(v, (None, None))
        dead = buf is not None and (param is None or self.plan.last(param) < self.pos)
        if dead and self._unread(buf, param, v) and not self._scrambles(v, buf):
            self.arena.touch(buf.alloc)
            return buf
        return self.new_buffer(v.shape, v.dtype)

    def set_buffer(self, v: ir.Value, buf: Buffer) -> None:
        """Record that `v` stands in `buf` from here on; a scalar is read back into a register."""
        self.arena.touch(buf.alloc)
        if v.type.rank == 0:
            self.env[v] = access.read(self.code, self.isa, buf, (), Lanes(1))
        else:
            self.env[v] = buf
        self.flagged.discard(v)

    @property
    def plan(self) -> plan.BlockPlan:
        return self.frames[-1].plan

    @property
    def pos(self) -> int:
        return self.frames[-1].pos

    # -- blocks ---------------------------------------------------------------------------------------------------
    def block(self, block: ir.Block, donated=frozenset(), kept=frozenset(), prefer: Places | None = None) -> None:
        """Emit all ops of a block; `donated` outer values may be overwritten in it, `kept` parameters may not."""
        p = plan.plan_block(block)
        p.defined |= donated
        p.defined -= kept
        p.outer = self.depth
        frame = Frame(p, prefer or {})
        self.frames.append(frame)
        self.flag(p)
        products, inside = digit_products.absorbed(self.isa, p)
        self.digits |= products
        self.absorbed |= inside
        for k, op in enumerate(block.ops):
            frame.pos = k
            if op not in self.done:
                self.op(op)
        frame.pos = len(block.ops)

    def leave(self) -> None:
        """End the block that `block` began (its plan stays valid until the yields are taken)."""
        self.frames.pop()

    def op(self, op: ir.Op) -> None:
        self.done.add(op)
        self.arena.tick()
        if self.marks is None:
            return self._op(op)
        with self.marking(op):
            self._op(op)

    @contextlib.contextmanager
    def marking(self, op: ir.Op) -> Iterator[None]:
        """A context in which emitted lines are marked with the place of an op in the user's source."""
        before = self.code.mark
        self.code.mark = self.marks(op.loc) if self.marks else ""
        yield
        self.code.mark = before

    def _op(self, op: ir.Op) -> None:
        if plan.is_lazy(op):
            self.lazy(op)
        elif type(op) in EMITTERS:
            EMITTERS[type(op)](self, op)
        else:
            raise UnsupportedError(
                f"the cpu target has no code for {op.mnemonic!r}", (op.loc.file, op.loc.line) if op.loc.file else None
            )

    def lazy(self, op: ir.Op) -> None:
        """Register a lazy op; scalars are computed at once, views of memory are made without code."""
        v = op.result
        if v in self.absorbed:
            self.env[v] = LAZY
            self.depth[v] = 1
            return
        if isinstance(op, ir.Gather) and op.x.type.rank:
            self.materialise(op.x)
        if v.type.rank == 0 and not isinstance(op, ir.Dense):
            if isinstance(op, ir.Reshape) and op.x.type.rank:
                self.env[v] = Point(self, op.x.shape, (), Lanes(1), False).at(op.x, _zeros(op.x.shape))
                return
            self.env[v] = RULES[type(op)](Point(self, (), (), Lanes(1), False), op, ())
        elif isinstance(op, ir.Dense):
            self.env[v] = self._dense(op)
        elif pairs.is_merged(self, op) or (
            isinstance(op, ir.Reshape) and nibbles.stays_packed(self.isa, self.plan, op)
        ):
            self.env[v] = LAZY
            self.depth[v] = 1
        elif isinstance(op, ir.Reshape) and not lazy_reshape(op.x.shape, op.shape):
            self.materialise_reshape(op)
        else:
            self.postpone(v)

    def postpone(self, v: ir.Value) -> None:
        """Leave `v` to be computed where it is read, unless that makes a chain of lazy values too long."""
        self.env[v] = LAZY
        below = (self.depth[a] for a in v.op.operands() if isinstance(self.env.get(a), Lazy))
        self.depth[v] = 1 + max(below, default=0)
        if v.type.rank and self.depth[v] > DEPTH:
            self.materialise(v)

    def materialise_reshape(self, op: ir.Reshape) -> None:
        """A reshape that needs its elements side by side: a view of the (materialised) operand."""
        src = self.materialise(op.x)
        if not src.contiguous():
            src = self.copy(op.x, self.new_buffer(op.x.shape, op.x.dtype))
        self.env[op.result] = Buffer(src.ptr, op.shape, dense_strides(op.shape), src.dtype, src.alloc, owned=False)

    def _dense(self, op: ir.Dense) -> Rep:
        from .constants import dense_global

        buf = dense_global(self.module, op)
        return access.read(self.code, self.isa, buf, (), Lanes(1)) if not op.shape else buf

    # -- flags ----------------------------------------------------------------------------------------------------
    def flag(self, p: plan.BlockPlan) -> None:
        """Decide which lazy values of a block get a buffer: dear ones that several readers, or one repeating reader,
        use."""
        cost: dict[ir.Value, float] = {}
        for op in p.block.ops:
            if not plan.is_lazy(op) or op.results[0].type.rank == 0:
                continue
            v = op.result
            c = plan.op_cost(op) + sum(cost.get(a, 0.5 if a.type.rank else 0) for a in op.operands())
            users = [p.block.ops[u] for u in p.uses.get(v, []) if u < len(p.block.ops)]
            repeats = any(plan.amplifies(u, v) for u in users) or any(u.blocks() for u in users)
            if (len(p.uses.get(v, [])) > 1 and c > RECOMPUTE) or (repeats and c > REPEAT):
                self.flagged.add(v)
                c = 0.5
            cost[v] = c

    def tree(self, root: ir.Value) -> list[tuple[ir.Value, bool]]:
        """The lazy expression at `root`: every value in it, and whether it is read at the reader's own index. Root
        first."""
        seen, env = {(root, True): None}, self.env
        todo = [(root, True)]
        while todo:
            v, identity = todo.pop()
            if not isinstance(env.get(v), Lazy):
                continue
            same = identity and type(v.op) in _AT_THE_SAME
            for a in v.op.operands():
                at = a, same
                if at not in seen and not isinstance(env.get(a), Val):
                    seen[at] = None
                    todo.append(at)
        return list(seen)

    def prepare(self, roots: list[ir.Value], shape: tuple[int, ...]) -> None:
        """Before a nest over `shape` reads `roots`: give buffers to flagged values that it cannot keep on the way."""
        for root in roots:
            for v, identity in self.tree(root):
                if v in self.flagged and isinstance(self.env[v], Lazy) and not (identity and v.shape == shape):
                    self.materialise(v)

    def bits(self, roots: list[ir.Value]) -> int:
        """Register width of the widest value in the roots' expressions."""
        return max((plan.register_bits(v.dtype) for r in roots for v, _ in self.tree(r)), default=32)

    def expression_cost(self, root: ir.Value) -> float:
        """Vector instructions to compute one vector of `root`, everything lazy below it included."""
        lazy = {v for v, _ in self.tree(root) if isinstance(self.env.get(v), Lazy)}
        return sum(plan.op_cost(v.op) for v in lazy)

    def is_short(self, roots: list[ir.Value]) -> bool:
        """Whether a few vectors of the roots' expressions are as little code as a loop over them."""
        return sum(map(self.expression_cost, roots)) <= FLAT

    # -- materialisation ------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def keep_scope(self) -> Iterator[None]:
        outer, self.keeping = self.keeping, {}
        yield
        for v, buf in self.keeping.items():
            self.env[v] = buf
            self.flagged.discard(v)
        self.keeping = outer

    def keep(self, p: Point, v: ir.Value, x: Val) -> None:
        """Store a flagged value, computed in a nest that covers it, for its other readers."""
        if v not in self.keeping:
            self.keeping[v] = self.new_buffer(v.shape, v.dtype)
        access.write(self.code, self.isa, self.keeping[v], p.ix, x, p.lanes)

    def materialise(self, v: ir.Value, into: Buffer | None = None) -> Buffer:
        """Give `v` a buffer (an existing one, one that dies here, or a new one) and compute it there."""
        rep = self.env[v]
        if isinstance(rep, Buffer) and into is None:
            self.arena.touch(rep.alloc)
            return rep
        if isinstance(rep, Lazy) and into is None:
            self.flagged.discard(v)
            self.flagged -= together.kept_for_nobody(self, [v], [], [v])
            self.prepare([v], v.shape)
            into = self.dying_operand(v) or self.result_buffer(v)
        buf = self.copy(v, into or self.new_buffer(v.shape, v.dtype))
        if isinstance(rep, Lazy):
            self.env[v] = buf
        return buf

    def copy(self, v: ir.Value, into: Buffer) -> Buffer:
        """Evaluate `v` into a buffer."""
        self.prepare([v], v.shape)
        self.arena.touch(into.alloc)

        def body(p: Point) -> None:
            access.write(self.code, self.isa, into, p.ix, p.at(v, p.ix), p.lanes)

        emit_nest(self, v.shape, self.bits([v]), body, flat=self.is_short([v]))
        self.arena.touch(into.alloc)
        return into

    def dying_operand(self, v: ir.Value) -> Buffer | None:
        """A buffer that `v` may overwrite while it is computed: read at the same index only, and dead afterwards."""
        seen: dict[ir.Value, bool] = {}
        for a, identity in self.tree(v):
            seen[a] = seen.get(a, True) and identity
        for a, identity in seen.items():
            fits = identity and a is not v and a.shape == v.shape and a.dtype == v.dtype
            if (
                fits
                and self.plan.last(a) < self.pos
                and self.overwritable(a, v)
                and not self._scrambles(v, self.env[a])
            ):
                return self.env[a]
        return None

    def overwritable(self, a: ir.Value, by: ir.Value | None) -> bool:
        """May the buffer of `a` be overwritten by the op at the current position (which computes `by`)?"""
        rep = self.env.get(a)
        if not isinstance(rep, Buffer) or not rep.owned or rep.alloc is None or not rep.contiguous():
            return False
        if a not in self.plan.defined or self.plan.last(a) > self.pos:
            return False
        return self._unread(rep, a, by)

    def _unread(self, buf: Buffer, owner: ir.Value | None, by: ir.Value | None) -> bool:
        """Will nobody but `owner` read this memory, now or later? Others see it through views, or took it over."""
        sharing = [w for w, rep in self.env.items() if isinstance(rep, Buffer) and rep.alloc is buf.alloc]
        return not any((w is not owner and self._alive(w)) or self.pending_on(w, by) for w in sharing)

    def _scrambles(self, v: ir.Value, buf: Buffer) -> bool:
        """Would `v`, computed into this memory, read elements of it that are overwritten already?"""
        reps = (self.env.get(a) for a, identity in self.tree(v) if not identity)
        return any(isinstance(rep, Buffer) and rep.alloc is buf.alloc for rep in reps)

    def _alive(self, v: ir.Value) -> bool:
        """Might `v` still be read, here or in an enclosing block?"""
        return any(f.plan.last(v) >= f.pos for f in self.frames)

    def pending_on(self, a: ir.Value, by: ir.Value | None) -> bool:
        """Is there a lazy value other than `by`, to be read now or later, whose expression reads `a`?"""
        todo, seen = [a], {a, by}
        while todo:
            v = todo.pop()
            for f in self.frames:
                users = (f.plan.block.ops[k] for k in f.plan.uses.get(v, []) if k < len(f.plan.block.ops))
                for u in (r for op in users for r in op.results if r not in seen and isinstance(self.env.get(r), Lazy)):
                    if f.plan.last(u) >= f.pos:
                        return True
                    seen.add(u)
                    todo.append(u)
        return False


def _zeros(shape):
    from .values import Ix

    return tuple(Ix(i64(0)) for _ in shape)
