"""Checks that a kernel keeps the rules of Tile IR: types, SSA, regions, Refs, the stage grammar."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from jtile._errors import KernelValueError

from .block import AsyncLoad, AsyncStore, Prefetch
from .core import OPS, Block, Index, Kernel, Op, Span, Value
from .devices import POSTS, TALKING, AxisBarrier, Post, Receive, root
from .dynamic import sources, used_symbols
from .extents import Extent
from .memory import Atomic, Load, Store, counters_of
from .placement import check_copy, check_memory, check_roles, refuse
from .protocol import check_protocol
from .reductions import UserReduce, UserScan
from .shapes import Dense, Full, NumPrograms, ProgramId
from .types import DTYPES, ROLES, RefType, TileType

LEVELS = ("tile", "block")


def stage_grammar() -> dict[str, tuple[str, ...]]:
    """Which ops may stand at which level: level -> mnemonics, from the cards' `level`."""
    return {level: tuple(sorted(n for n, card in OPS.items() if card.level in (level, "any"))) for level in LEVELS}


def verify(kernel: Kernel, level: str = "tile") -> None:
    """Raise VerificationError (KernelValueError for grid, aliases and inits) where the kernel breaks a rule.

    Checked: result types against a second `infer`; every value defined once, before its use and in scope; regions yield
    what their op says; Refs are only read and written, inputs without an alias never written; constants fit their
    dtype; the ops belong to `level`; grid, aliases and inits fit the parameters. At block level besides: allocations
    and roles stand where they belong, registers suffice (`placement.py`), nothing that still runs is used
    (`in_flight.py`), and no role waits for ever (`protocol.py`).
    """
    _verify_head(kernel)
    _Scope(kernel, level).block(kernel.body, set(kernel.params), ())
    try:
        counters_of(kernel)
    except ValueError as e:
        refuse(kernel, None, str(e))
    if level == "block":
        check_roles(kernel)
        for op in kernel.body.walk():
            if isinstance(op, AxisBarrier):
                refuse(kernel, op, "a role has no barrier of devices: raise a signal of each, and wait for one of each")
        check_protocol(kernel)


def _refuse(k: Kernel, message: str) -> NoReturn:
    raise KernelValueError(f"kernel {k.name}: {message}", (k.loc.file, k.loc.line) if k.loc.file else None)


def _verify_head(k: Kernel) -> None:
    """Check what stands before the body: parameters, grid, sizes, lanes, starts of outputs, shared buffers."""
    roles = [p.type.role if isinstance(p.type, RefType) else "tile" for p in k.params]
    if any(r not in ROLES for r in roles) or [ROLES.index(r) for r in roles] != sorted(ROLES.index(r) for r in roles):
        _refuse(k, f"parameters are Refs: inputs, outputs, scratch, in that order; got {', '.join(roles)}")
    if len(set(map(id, k.params))) != len(k.params):
        _refuse(k, "a parameter stands twice")
    sides = [n for n in k.grid if not isinstance(n, Extent)]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sides):
        _refuse(k, f"a grid has whole numbers of programs, none negative; got {k.grid}")
    unbound = used_symbols(k) - set(sources(k))
    if unbound:
        _refuse(k, f"no dimension of an input says what {min(unbound)} is")
    if k.lanes < 0:
        _refuse(k, f"the number of lanes is not negative, got {k.lanes}")
    if k.inits and len(k.inits) != len(k.outputs):
        _refuse(k, f"it has {len(k.outputs)} outputs, but inits for {len(k.inits)}")
    for v, x in zip(k.outputs, k.inits, strict=False):
        if x is not None and not fits(x, v.dtype):
            _refuse(k, f"output {v.name} is {v.type}, which cannot start from {x!r}")
    _verify_aliases(k)
    _verify_devices(k)


def _verify_devices(k: Kernel) -> None:
    if len(dict(k.devices)) != len(k.devices) or any(n < 1 for _, n in k.devices):
        _refuse(k, f"the axes of its devices have different names and one device at least each, got {k.devices}")
    for v in k.shared:
        if not k.devices:
            _refuse(k, f"{v.name} ({v.type}) belongs to all devices of a call, and it names no axis of a mesh")
        if any(isinstance(n, Extent) for n in v.shape):
            _refuse(k, f"{v.name} ({v.type}) has one static shape on all devices")
    for v in k.refs("signal"):
        if v.dtype != "int32":
            _refuse(k, f"signals are int32, got {v.type}")


def _verify_aliases(k: Kernel) -> None:
    for i, o in k.aliases:
        if not (0 <= i < len(k.inputs) and 0 <= o < len(k.outputs)):
            _refuse(k, f"alias ({i}, {o}) names an input or output that it has not")
        a, b = k.inputs[i], k.outputs[o]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            _refuse(k, f"input {a.name} ({a.type}) cannot share its buffer with output {b.name} ({b.type})")
        if k.inits and k.inits[o] is not None:
            _refuse(k, f"output {b.name} starts from input {a.name}, so it takes no init")
    for side in (0, 1):
        if len({pair[side] for pair in k.aliases}) != len(k.aliases):
            _refuse(k, "an input or output stands in two aliases")


def fits(x: Any, dtype: str) -> bool:
    """Whether a Python number is one of `dtype` (a float dtype takes every number, rounded once)."""
    d = DTYPES[dtype]
    if d.kind == "f":
        return isinstance(x, int | float)
    if isinstance(x, float):
        if not math.isfinite(x) or x != int(x):
            return False
        x = int(x)
    if d.kind == "b":
        return x in (0, 1)
    low = -(1 << (d.bits - 1)) if d.kind == "i" else 0
    return isinstance(x, int) and low <= x < low + (1 << d.bits)


ACCESSES = (Load, Store, Atomic, AsyncLoad, AsyncStore, Prefetch)
_CHANGES = (Store, Atomic, AsyncStore)
_NUMBERED = (Full, Dense, ProgramId, NumPrograms, *ACCESSES)  # cards with numbers of their own, to be checked
_AWARE = (*ACCESSES, *POSTS, *TALKING, UserReduce, UserScan)  # cards with rules of their own for memory


@functools.cache
def _asks(card: type[Op]) -> tuple[bool, bool]:
    """Whether ops of a card have rules of their own for memory, and numbers of their own."""
    return issubclass(card, _AWARE), issubclass(card, _NUMBERED)


class _Scope:
    def __init__(self, kernel: Kernel, level: str):
        self.kernel, self.level = kernel, level
        self.defined: set[Value] = set(kernel.params)
        writable = {kernel.outputs[o] for _, o in kernel.aliases}
        aliased = {kernel.inputs[i] for i, _ in kernel.aliases}
        self.read_only = {v for v in kernel.inputs if v not in aliased} - writable

    def fail(self, op: Op | None, message: str) -> NoReturn:
        refuse(self.kernel, op, message)

    def define(self, values: Iterable[Value], op: Op | None) -> None:
        for v in values:
            if v in self.defined:
                self.fail(op, f"value {v!r} is defined twice")
            for n in v.type.shape:
                if isinstance(n, Extent):
                    if isinstance(v.type, TileType):
                        self.fail(op, f"the shape of a tile is static, got {v!r}")
                elif n < 0:
                    self.fail(op, f"value {v!r} has a negative side")
            self.defined.add(v)

    def block(self, b: Block, visible: set[Value], params: tuple[Value, ...], owner: Op | None = None) -> None:
        """`visible`: values that dominate the block."""
        visible = visible.union(params)
        for op in b.ops:
            memory = False  # whether an operand is memory
            for v in op.operands():
                if v not in visible:
                    self.fail(op, f"operand {v!r} is not defined before its use, or not in scope here")
                memory |= type(v.type) is not TileType
            self.op(op, visible, memory)
            visible.update(op.results)
        for v in b.yields:
            if v not in visible:
                self.fail(owner, f"the yielded value {v!r} is not in scope")
            if not isinstance(v.type, TileType):
                self.fail(owner, f"a region yields tiles, got {v!r}")
        if owner is None and b.yields:
            self.fail(None, "a kernel returns nothing")

    def op(self, op: Op, visible: set[Value], memory: bool) -> None:
        if op.level not in (self.level, "any"):
            self.fail(op, f"{op.mnemonic} stands at {op.level} level, this kernel is at {self.level} level")
        results = op.results
        for v in results:
            if v.op is not op:
                self.fail(op, "a result does not know its op")
        try:
            types = tuple(op.infer())
        except (TypeError, ValueError, KeyError, IndexError) as e:
            self.fail(op, str(e))
        if types != tuple([v.type for v in results]):
            self.fail(op, f"the result is {', '.join(map(str, types)) or 'nothing'} by its operands")
        aware, numbered = _asks(type(op))
        if memory or aware:
            self.refs(op)
        if numbered:
            self.constants(op)
        if op.inner:
            for b in op.blocks():
                self.define(b.params, op)
                self.block(b, visible, b.params, op)
        self.define(results, op)

    def refs(self, op: Op) -> None:
        """Check that memory is used by memory ops only."""
        check_memory(self.kernel, op)
        if isinstance(op, TALKING) and op.axis not in dict(self.kernel.devices):
            axes = ", ".join(dict(self.kernel.devices)) or "none"
            self.fail(op, f"the devices of this kernel have no axis {op.axis!r}, but {axes}")
        if isinstance(op, ACCESSES) and op.ref.type.role == "signal":  # type: ignore[union-attr]
            self.fail(op, f"{op.ref.name or 'what it names'} is signals: raise one by signal, and wait for it")
        if isinstance(op, POSTS):
            self.posts(op)
        if isinstance(op, _CHANGES) and op.ref in self.read_only:
            self.fail(op, f"{op.ref.name} is an input, which cannot be written: alias it to an output")
        if isinstance(op, AsyncLoad | AsyncStore | Prefetch):
            check_copy(self.kernel, op)

    def posts(self, op: Post | Receive) -> None:
        """Check that memory through which programs hand over elements serves for nothing else."""
        name = op.ref.name or "what it names"
        if isinstance(op, Receive) and op.ref not in self.kernel.refs("symmetric"):
            self.fail(op, f"{name} is of another device, and programs receive what is posted to their own")
        if any(isinstance(o, ACCESSES) and root(o.ref) is root(op.ref) for o in self.kernel.body.walk()):
            self.fail(op, f"{name} is posted to and received from, and is loaded or stored, too: use other memory")

    def constants(self, op: Op) -> None:
        if isinstance(op, Full) and not fits(op.value, op.dtype):
            self.fail(op, f"{op.value!r} is no {op.dtype}")
        if isinstance(op, Dense) and not all(fits(x, op.dtype) for x in op.data):
            self.fail(op, f"a number of this literal is no {op.dtype}")
        if isinstance(op, Load) and not fits(op.pad, op.ref.dtype):
            self.fail(op, f"the pad {op.pad!r} is no {op.ref.dtype}")
        if isinstance(op, ProgramId | NumPrograms) and op.axis < 0:
            self.fail(op, f"a grid axis is not negative, got {op.axis}")
        if isinstance(op, ACCESSES):
            self.spans(op, op.index)

    def spans(self, op: Op, index: Index) -> None:
        for d in index:
            if isinstance(d, Span) and (d.size < 0 or d.stride < 1):
                self.fail(op, f"a span needs size >= 0 and stride >= 1, got {d.size} and {d.stride}")
