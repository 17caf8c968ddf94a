"""From a kernel at the block level to the text of one TTGIR function: roles, what they take from outside, and tiles in
the layouts that their uses want."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jtile import ir

from ...emitting import Marks, into
from .. import versions
from ..clusters import MARK
from ..combine import reduce
from ..emit_basics import start_program
from ..emitter import EMITTERS, Buffer, Emitter, elem_of, padded
from ..features import Features
from ..hazards import PAIRS, may_repeat
from ..layouts import in_order
from ..record import Record
from ..ttir import Val
from .alike import Shared
from .analysis import COLUMNS, Homes, dims_of, is_free
from .code import LaidCode, Mem
from .layouts import Layout, Linear, blocked, origin, sliced
from .linear import in_vectors, linear
from .releases import behind_loads

BLOCK: dict[type[ir.Op], Callable[[BlockEmitter, Any], Any]] = {}  # emitters of the block level
SHARED_WITH_TILES = (
    ir.ProgramId, ir.NumPrograms, ir.SizeOf, ir.Full, ir.Iota, ir.Map, ir.Select, ir.Cast, ir.Bitcast, ir.Reduce,
    ir.ArgReduce, ir.Load, ir.Store, ir.Atomic, ir.LastArrival, ir.Dense, ir.Cumulative, ir.UserScan,
)  # fmt: skip  # ops whose emitters for TTIR serve at the block level too
emits = into(BLOCK)


class BlockEmitter(Emitter):
    """State of one kernel's emission. `env` maps values of the current role; `outer` those outside of roles."""

    code: LaidCode
    env: dict[ir.Value, Any]  # type: ignore[reportIncompatibleVariableOverride]  # tiles and shared memory

    def __init__(self, kernel: ir.Kernel, features: Features, record: Record, *, marks: Marks | None = None):
        super().__init__(kernel, features, record, marks=marks)
        self.count = [0]
        self.code = LaidCode(self.count, 2)
        self.homes: Homes | None = None
        self.warps, self.widest = 4, COLUMNS  # warps of the role; columns of an instruction for its products, at most
        self.captures: dict[Val | Mem, Val | Mem] | None = None  # in a partition: an outside value -> its name inside
        self.captured: list[Val | Mem] = []  # outside values that any partition captures, in order
        self.laid: dict[tuple[ir.Value, Layout], Val] = {}
        self.places: dict[ir.Value, tuple[ir.Block | None, tuple[list[Any], int]]] = {}
        self.within: ir.Block | None = None  # the block whose ops are being emitted
        self.layouts: dict[ir.Value, str] = {}  # layouts of all values that were defined, for texts that people read
        self.flying: list[ir.Value] = []  # products of the current block that nobody has waited for
        self.cluster: Shared | None = None  # what blocks of a cluster share
        self.held: list[Val] = []  # places of sparse products of the current block that may run
        self.behind_loads = behind_loads(kernel)  # arrivals with a fence in front

    # -- values from outside ------------------------------------------------------------------------------------------

    def use(self, v: Any) -> Any:
        """A value of the function's own block, by its name in the current role."""
        if self.captures is None or v is None:
            return v
        if v not in self.captures:
            if v not in self.captured:
                self.captured.append(v)
            self.captures[v] = dataclasses.replace(v, name=f"{self.code.name()}")
        return self.captures[v]

    # -- tiles --------------------------------------------------------------------------------------------------------

    def val(self, v: ir.Value) -> Any:
        """An operand: a tile comes in the layout that the current op has for its rank."""
        if not isinstance(v.type, ir.TileType) or not v.shape:
            return self.env[v]
        return self.tile(v, self.code.layout(v.shape))

    def tile(self, v: ir.Value, layout: Layout) -> Val:
        """A tile in a layout: made or converted where it was defined, once."""
        own = None if is_free(v) else self.env[v]
        if own is not None and (own.layout == layout or own.number is not None):
            return own if own.layout == layout else self.code_in(layout, own)
        key = (v, layout)
        if key not in self.laid:
            block, place = self.places[v]
            here = contextlib.nullcontext() if block is self.within else self.code.writing(place)
            with here:
                self.laid[key] = self.code.convert(own, layout) if own is not None else self._made(v, layout)
        return self.laid[key]

    def code_in(self, layout: Layout, own: Val) -> Val:
        with self.code.within({len(own.shape): layout}):
            return self.code.const(own.number, own.elem, own.shape)  # type: ignore[arg-type]

    def _made(self, v: ir.Value, layout: Layout) -> Val:
        """A free tile in a layout."""
        op, rank = v.op, len(v.shape)
        with self.code.within({rank: layout}):
            if not isinstance(op, ir.Broadcast | ir.Reshape):
                return EMITTERS[type(op)](self, op)  # type: ignore[index, return-value]
            if not op.x.shape:
                return self.code.splat(self.env[op.x], v.shape)
            missing = [k for k in range(rank) if k not in dims_of(op)]
            out = self.tile(op.x, sliced(layout, missing))
            if out.number is not None:
                return self.code.const(out.number, out.elem, v.shape)
            for k in missing:
                out = self.code.expand_dims(out, k)
            return self.code.broadcast(out, v.shape)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def block(self, block: ir.Block, args: Sequence[Any] = (), layouts: Sequence[Any] = ()) -> list[Any]:
        """Emit the ops of a block here, its parameters bound to `args`; gives what it yields in `layouts`."""
        outer, flying, held = self.within, self.flying, self.held
        self.within, self.flying, self.held = block, [], []
        for p, a in zip(block.params, args, strict=True):
            self.define(p, a)
        for op in block.ops:
            self.op(op)
        wants = layouts or [None] * len(block.yields)
        out = [self.env[y] if h is None else self.tile(y, h) for y, h in zip(block.yields, wants, strict=True)]
        self.within, self.flying, self.held = outer, flying, held
        return out

    def define(self, v: ir.Value, val: Any) -> None:
        self.env[v] = val
        if val.name and getattr(val, "layout", ""):
            self.layouts[v] = str(val.layout)
        if isinstance(v.type, ir.TileType) and v.shape:
            self.places[v] = (self.within, self.code.place())

    def op(self, op: ir.Op) -> None:
        self.check_sides(op)
        code, before = self.code, self.code.mark
        code.mark = self.marks(op.loc) if self.marks else ""
        if len(op.results) == 1 and isinstance(op.result.type, ir.TileType) and op.result.shape and is_free(op.result):
            results = Val("", op.result.shape, elem_of(op.result.dtype))  # a free tile is made where it is used
        elif isinstance(op, ir.Broadcast | ir.Reshape) and not op.result.shape:
            results = self._only(op.x)
        elif type(op) in BLOCK:
            results = BLOCK[type(op)](self, op)
        elif type(op) in SHARED_WITH_TILES:
            results = self.as_tile(op)
        else:
            what = f"no code for {op.mnemonic!r} inside a role"
            self.refuse(op, f"{what}: do this in a kernel of the tile level, before or after this one")
        code.mark = before
        results = () if results is None else results if isinstance(results, tuple | list) else (results,)
        for r, v in zip((r for r in op.results), results, strict=True):
            self.define(r, v)

    def _only(self, v: ir.Value) -> Val:
        """The element of a tile that has no other, or a scalar."""
        if not v.shape:
            return self.env[v]
        assert self.homes is not None
        out = self.tile(v, self.homes[v])
        for axis in reversed(range(1, len(v.shape))):
            with self.code.within({axis: sliced(out.layout, [axis])}):
                (out,) = reduce(self, [out], axis, lambda a, _: a)
        return self.code.unsplat(out)

    def as_tile(self, op: ir.Op) -> Any:
        """Emit an op by its emitter for TTIR: all its tiles have the layout of its result, or of its operand."""
        self.check_turns(op)
        main, layout = self._main(op)
        if main is None or layout is None or not main.shape:
            return EMITTERS[type(op)](self, op)
        rank = len(main.shape)
        layout = in_vectors(layout) if isinstance(op, ir.Store) else layout
        layouts = {rank: layout}
        if isinstance(op, ir.Reduce | ir.ArgReduce):
            axes = op.axes if isinstance(op, ir.Reduce) else (op.axis,)
            for k, axis in enumerate(sorted(axes, reverse=True)):
                layouts[rank - k - 1] = sliced(layouts[rank - k], [axis])
        for axis, q in _taken(op):
            layouts.setdefault(q, sliced(layout, [k for k in range(rank) if not axis <= k < axis + q]))
        if isinstance(op, ir.Load) and (own := in_vectors(layout)) != layout:
            with self.code.within(layouts | {rank: own}):
                return self.code.convert(EMITTERS[type(op)](self, op), layout)
        with self.code.within(layouts):
            return EMITTERS[type(op)](self, op)

    def _main(self, op: ir.Op) -> tuple[ir.Value | None, Layout | None]:
        """The tile whose layout all tiles of an op take, and that layout."""
        assert self.homes is not None
        if isinstance(op, ir.Reduce | ir.ArgReduce):
            home = self.homes[op.x] if op.x.shape else None
            if isinstance(origin(home), Linear) and not self._folds(op, home):
                home = blocked(op.x.shape, elem_of(op.x.dtype), self.warps)
            return op.x, home
        if isinstance(op, ir.Cumulative | ir.UserScan):
            r = op.results[0]
            return r, blocked(r.shape, elem_of(r.dtype), self.warps)  # scans take blocked layouts only
        if isinstance(op, ir.Store):
            v = op.value
        else:
            v = op.results[0] if op.results else None
        return (v, self.homes[v] if v.shape else None) if v is not None else (None, None)

    def _folds(self, op: ir.Reduce | ir.ArgReduce, home: Layout) -> bool:
        """Whether triton's code for a reduction in this layout folds the right threads; see `triton/layouts.py`."""
        h = linear(home, op.x.shape)
        return versions.reduces_any_layout() or (in_order(h.lane) and in_order(h.warp))

    def check_sides(self, op: ir.Op) -> None:
        views = isinstance(op, ir.SliceShared | ir.TransposeShared)  # `emit_shared` says which of these there are
        for v in () if views else op.results:
            shape = v.shape if isinstance(v.type, ir.TileType | ir.SharedType) else ()
            if shape != padded(shape):
                self.refuse(op, f"tiles and buffers with sides of powers of two at the block level, got {v.type}")

    def check_turns(self, op: ir.Op) -> None:
        """Refuse scatters whose lanes may name one element: they take turns, for which a role has no loop."""
        if not isinstance(op, ir.Store) or not may_repeat(op.index):
            return
        lanes = math.prod(padded(next(d.indices for d in op.index if isinstance(d, ir.Take)).shape))
        if lanes > PAIRS or op.mask is not None:
            kind = "masked " if op.mask is not None else ""
            what = f"no {kind}scatter in a role by {lanes} places of which two may be the same"
            self.refuse(op, f"{what}: store whole rows by at most {PAIRS} numbers of rows, o[rows, :], without a mask")

    # -- roles --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def role(self, body: ir.Block, warps: int, *, isolated: bool, asks: Sequence[str]) -> Iterator[LaidCode]:
        """A context that emits a role, with its own code, values and layouts. `isolated`: the role sees only what it
        captures; `asks`: what it begins with, see `launches`."""
        names = ("code", "env", "refs", "program", "symbols", "homes", "warps", "captures", "laid", "places",
                 "within")  # fmt: skip
        old = {n: getattr(self, n) for n in names}
        self.code, self.laid, self.places, self.program = LaidCode(self.count, 3), {}, {}, {}
        self.captures = {} if isolated else None
        self.homes, self.warps, self.within = Homes(body, warps, self.widest), warps, body
        self.env = _Outside(self, old["env"])
        self.refs = {r: _Lazy(self, b) for r, b in old["refs"].items()}  # type: ignore[assignment]
        self.symbols = {n: self.use(v) for n, v in old["symbols"].items()}
        for what in asks:
            self.launches(what)
        start_program(self, self.code.let("tt.get_program_id x : i32", (), "i32"))
        self._remake(body)
        yield self.code
        for n, v in old.items():
            setattr(self, n, v)

    def launches(self, what: str) -> None:
        """Emit `wait` (until the kernels in front end) or `launch_dependents` (which lets the one behind start)."""
        asm = f'"griddepcontrol.{what}; // $0" {{constraints = "=r", packed_element = 1 : i32, pure = false}}'
        self.code.let(f"tt.elementwise_inline_asm {asm} -> i32", (), "i32")

    def say_cluster(self, what: str) -> None:
        """Mark what comes next in the PTX; see `lowering/triton/clusters.py`."""
        asm = f'"mov.b32 $0, 0; {MARK} {what}" {{constraints = "=r", packed_element = 1 : i32, pure = false}}'
        self.code.let(f"tt.elementwise_inline_asm {asm} -> i32", (), "i32")

    def _remake(self, body: ir.Block) -> None:
        """Emit again, in a role, the arithmetic before the roles that it needs."""
        wanted = {v for op in body.walk() for b in (op,) for v in _uses(b)} | set(body.yields)
        chosen: list[ir.Op] = []
        for op in reversed(self.kernel.body.ops):
            if any(r in wanted for r in op.results) and not isinstance(op, ir.AllocShared | ir.AllocBarriers):
                chosen.append(op)
                wanted.update(v for inner in (op, *(o for b in op.blocks() for o in b.walk())) for v in _uses(inner))
        for op in reversed(chosen):
            self.op(op)


def _uses(op: ir.Op) -> list[ir.Value]:
    return [*op.operands(), *(y for b in op.blocks() for y in b.yields)]


def _taken(op: ir.Op) -> Iterator[tuple[int, int]]:
    """The first axis and the rank of the gathered part of an access."""
    axis = 0
    for d in getattr(op, "index", ()):
        if isinstance(d, ir.Take):
            yield axis, len(d.indices.shape)
            return
        axis += not isinstance(d, ir.At)


class _Outside(dict):
    """The values of a role; memory that stands outside is captured when it is first used."""

    def __init__(self, em: BlockEmitter, outer: dict[ir.Value, Any]):
        super().__init__()
        self._em, self._outer = em, outer

    def __missing__(self, v: ir.Value) -> Any:
        self[v] = self._em.use(self._outer[v])
        return self[v]


class _Lazy:
    """A `Buffer` whose pointer and strides are captured when they are first used."""

    def __init__(self, em: BlockEmitter, buf: Buffer):
        self._em, self._buf = em, buf

    def __getattr__(self, name: str) -> Any:
        v = getattr(self._buf, name)
        if isinstance(v, tuple):
            return tuple(self._em.use(x) if isinstance(x, Val) else x for x in v)
        return self._em.use(v) if isinstance(v, Val) else v
