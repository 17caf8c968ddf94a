"""The skeleton of Tile IR: values, op cards, blocks, kernels, and the one traversal that every pass uses.

An op is a dataclass (a "card"). What a field means follows from its annotation: `Value` and `Value | None` are
operands, `tuple[Value, ...]` is a list of operands, `Index` is the index of a Ref, `Block` is a region (a tuple of
them: several), anything else is a static attribute. Printer, parser, hashing, cloning and traversal are derived from
that.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from .types import RefType, TileType, Type


@dataclasses.dataclass(frozen=True)
class Loc:
    """A place in the user's source."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "<unknown>"


NOWHERE = Loc()


class Value:
    """An SSA value. Equality is identity; `name` is only a hint for the printer."""

    __slots__ = ("name", "op", "type")

    def __init__(self, type: Type, name: str = "", op: Op | None = None):
        self.type, self.name, self.op = type, name, op

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    def __repr__(self) -> str:
        return f"%{self.name or '_'}: {self.type}"


# -- indices of Refs: one entry per dimension of the Ref -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class At:
    """One element of a dimension; the dimension is dropped."""

    index: Value


@dataclasses.dataclass(frozen=True)
class Span:
    """`size` elements from `start` (a traced scalar), `stride` apart."""

    start: Value
    size: int
    stride: int = 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile number `index` of a tile-space view: elements `[index * step, index * step + size)`."""

    index: Value
    size: int
    step: int


@dataclasses.dataclass(frozen=True)
class Take:
    """Gather: an integer tile of element indices. All `Take`s of one index have one shape, which stands in the result
    at the place of the first of them."""

    indices: Value


Dim = At | Span | Tile | Take
Index = tuple[Dim, ...]


def dim_value(d: Dim) -> Value:
    """The traced value inside an index dimension."""
    kind = type(d)
    return d.index if kind is Tile or kind is At else d.start if kind is Span else d.indices  # type: ignore[union-attr]


def with_dim_value(d: Dim, v: Value) -> Dim:
    match d:
        case At():
            return At(v)
        case Span():
            return Span(v, d.size, d.stride)
        case Tile():
            return Tile(v, d.size, d.step)
    return Take(v)


def index_shape(index: Index) -> tuple[int, ...]:
    """Shape of what a load with this index gives (before squeezing anything)."""
    out: list[int] = []
    taken = False
    for d in index:
        if isinstance(d, Take):
            out += [] if taken else list(d.indices.shape)
            taken = True
        elif isinstance(d, Span | Tile):
            out.append(d.size)
    return tuple(out)


# -- ops -----------------------------------------------------------------------------------------------------------

OPS: dict[str, type[Op]] = {}
_KINDS = {
    "Value": "operand",
    "Value | None": "optional",
    "tuple[Value, ...]": "operands",
    "Index": "index",
    "Block": "block",
    "tuple[Block, ...]": "blocks",
}


@dataclasses.dataclass(eq=False)
class Op:
    """Base of all op cards. Subclasses are dataclasses; `results` and `loc` are set when the op is built.

    Class attributes a card may set:
      mnemonic: its name in IR text.
      effect: `"none"`, `"read"`, `"write"` (Refs), or `"io"` (print, assert): what keeps it from being removed or
        moved.
      level: `"tile"`, `"block"` or `"any"`: the stage at which it may stand.
    """

    mnemonic: ClassVar[str] = ""
    effect: ClassVar[str] = "none"
    level: ClassVar[str] = "any"
    # field name -> "operand" | "optional" | "operands" | "index" | "block" | "blocks" | "attr"
    fields: ClassVar[dict[str, str]] = {}
    mapped: ClassVar[tuple[tuple[str, str], ...]] = ()  # name and kind of the fields that are no attributes
    inner: ClassVar[tuple[tuple[str, str], ...]] = ()  # name and kind of the fields that are regions
    plain: ClassVar[tuple[str, ...]] = ()  # the fields that are one operand each
    others: ClassVar[tuple[tuple[str, str], ...]] = ()  # those of `mapped` that are not
    named: ClassVar[tuple[str, ...]] = ()  # the attributes

    def __init_subclass__(cls, **kw):
        super().__init_subclass__(**kw)
        names = inspect.get_annotations(cls)
        cls.fields = {n: _KINDS.get(t, "attr") for n, t in names.items() if not t.startswith("ClassVar")}
        cls.mapped = tuple((n, k) for n, k in cls.fields.items() if k != "attr")
        cls.inner = tuple((n, k) for n, k in cls.mapped if k in ("block", "blocks"))
        cls.plain = tuple(n for n, k in cls.mapped if k == "operand")
        cls.others = tuple((n, k) for n, k in cls.mapped if k != "operand")
        cls.named = tuple(n for n, k in cls.fields.items() if k == "attr")
        lists = [n for n, k in cls.others if k == "operands"]
        if len(cls.others) == len(cls.inner) + len(lists) and len(lists) + bool(cls.plain) < 2:
            cls.operands = _operands_of(cls.plain, *lists)  # passes ask every op for its operands, time and again
        if cls.mnemonic:
            OPS[cls.mnemonic] = cls

    def __post_init__(self):
        self.results: tuple[Value, ...] = ()
        self.loc: Loc = NOWHERE

    # A card overrides these two.
    def infer(self) -> tuple[Type, ...]:
        """Result types from operands and attributes; raises `TypeError`/`ValueError` with a sentence when they do not
        fit."""
        raise TypeError(f"{self.mnemonic} has no infer")

    def reference(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...] | np.ndarray:
        """What the op computes, on NumPy arrays (one per operand, in order of `operands()`)."""
        raise TypeError(f"{self.mnemonic} is run by the interpreter itself")

    # Derived.
    @property
    def result(self) -> Value:
        (r,) = self.results
        return r

    def operands(self) -> list[Value]:
        """Every value used by the op itself (not by its regions), in field order; Refs included."""
        fields = self.__dict__
        out: list[Value] = []
        for name, kind in self.mapped:
            v = fields[name]
            if kind == "operand" or (kind == "optional" and v is not None):
                out.append(v)
            elif kind == "operands":
                out += v
            elif kind == "index":
                out += [dim_value(d) for d in v]
        return out

    def blocks(self) -> list[Block]:
        out: list[Block] = []
        for name, kind in self.inner:
            out += [getattr(self, name)] if kind == "block" else getattr(self, name)
        return out

    def attributes(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in self.named}

    def clone(self, env: Callable[[Value], Value], block: Callable[[Block], Block] | None = None) -> Op:
        """A copy with operands mapped by `env` and regions by `block` (default: `copy_block`); results are fresh
        values."""
        new = object.__new__(type(self))
        fields = new.__dict__  # passes copy every op: attributes are neither looked up nor set by name
        fields.update(self.__dict__)  # attributes and location; checked when the op was first built
        if not self.others:  # as most
            for name in self.plain:
                fields[name] = env(fields[name])
        for name, kind in self.mapped if self.others else ():  # in the order of the fields: `env` may go by it
            v = fields[name]
            if kind == "operand":
                fields[name] = env(v)
            elif kind == "operands":
                fields[name] = tuple(map(env, v))
            elif kind == "optional":
                fields[name] = None if v is None else env(v)
            elif kind == "index":
                fields[name] = tuple([with_dim_value(d, env(dim_value(d))) for d in v])
            elif kind == "blocks":
                fields[name] = tuple([block(b) if block else copy_block(b, env) for b in v])
            else:
                fields[name] = block(v) if block else copy_block(v, env)
        results = self.results
        fields["results"] = (
            (Value(results[0].type, results[0].name, new),)
            if len(results) == 1
            else tuple([Value(r.type, r.name, new) for r in results])
        )
        return new


def _operands_of(names: tuple[str, ...], many: str = "") -> Callable[[Op], list[Value]]:
    """`Op.operands` of a card whose operands are these fields, each of which is one; or those of the field `many`."""
    if many:
        return lambda op, read=operator.attrgetter(many): [*read(op)]
    if not names:
        return lambda op: []
    read = operator.attrgetter(*names)
    return (lambda op: [read(op)]) if len(names) == 1 else (lambda op: [*read(op)])


@dataclasses.dataclass(eq=False)
class Block:
    """A region: parameters, ops, and the values it yields."""

    params: tuple[Value, ...] = ()
    ops: list[Op] = dataclasses.field(default_factory=list)
    yields: tuple[Value, ...] = ()

    def walk(self) -> Iterator[Op]:
        """All ops, outer before inner, in program order."""
        for op in self.ops:
            yield op
            if op.inner:
                for b in op.blocks():
                    yield from b.walk()


def copy_block(b: Block, env: Callable[[Value], Value]) -> Block:
    """A deep copy with fresh values; `env` maps the values defined outside."""
    local: dict[Value, Value] = {}

    def look(v: Value) -> Value:
        return local[v] if v in local else env(v)

    params = tuple(Value(p.type, p.name) for p in b.params)
    local.update(zip(b.params, params, strict=True))
    ops = []
    for op in b.ops:
        new = op.clone(look)
        local.update(zip(op.results, new.results, strict=True))
        ops.append(new)
    return Block(params, ops, tuple(map(look, b.yields)))


@dataclasses.dataclass(eq=False)
class Kernel:
    """A whole kernel. `params` are Refs: inputs, outputs, scratch, symmetric memory, signals, in that order.

    Attributes:
      name: what profilers show.
      grid: number of programs per axis (empty: one program; a 0: none).
      aliases: pairs (index of an input, index of an output among the outputs) that share one buffer.
      inits: per output, the number it starts from, or None (undefined).
      lanes: how many of the grid's axes, the leading ones, stand for vmaps. Only print and assert read it, to tell them
        apart; a pass that makes other axes of a grid need not keep it.
      devices: axes of the mesh that the kernel names, and how many devices are along each: those of one call.
    """

    name: str
    params: tuple[Value, ...]
    grid: tuple[int, ...]
    body: Block
    aliases: tuple[tuple[int, int], ...] = ()
    inits: tuple[float | int | None, ...] = ()
    loc: Loc = NOWHERE
    lanes: int = 0
    devices: tuple[tuple[str, int], ...] = ()

    def refs(self, role: str) -> list[Value]:
        return [p for p in self.params if isinstance(p.type, RefType) and p.type.role == role]

    @property
    def inputs(self) -> list[Value]:
        return self.refs("in")

    @property
    def outputs(self) -> list[Value]:
        return self.refs("out")

    @property
    def scratch(self) -> list[Value]:
        return self.refs("scratch")

    @property
    def shared(self) -> list[Value]:
        """The parameters that every device of the call has: symmetric memory and signals."""
        return [*self.refs("symmetric"), *self.refs("signal")]

    def program_text(self, pid: tuple[int, ...]) -> str:
        """A program's name in messages: `(0, 2)`, under vmap `(0, 2), lane 5`, under two `(0, 2), lane (1, 5)`, the
        outer one first."""
        lanes, own = pid[: self.lanes], pid[self.lanes :]
        return str(own) + (f", lane {lanes[0] if len(lanes) == 1 else lanes}" if lanes else "")

    def with_body(self, body: Block) -> Kernel:
        return dataclasses.replace(self, body=body)


def tile(v: Value) -> TileType:
    """The type of a value that must be a tile."""
    if not isinstance(v.type, TileType):
        raise TypeError(f"expected a tile, got {v.type}")
    return v.type


def check_axes(axes, t: TileType) -> None:
    """Raise ValueError unless `axes` are different axes of a tile, counted from 0."""
    if any(not 0 <= a < t.rank for a in axes) or len(set(axes)) != len(axes):
        raise ValueError(f"{', '.join(map(str, axes))} are not different axes of {t}")
