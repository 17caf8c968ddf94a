"""TTIR as text: typed values, and a writer with one method for each construct that emitters use often.

Emitters write text instead of calling triton's builder, since the spelling is the same from triton 3.6 to 3.9, but for
what `versions.py` switches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from . import versions

Number = int | float | bool


MAX_TILE = 1 << 20  # elements of a tensor: triton's limit


class TensorTooLargeError(Exception):
    """A tensor of more elements than triton takes."""


@dataclasses.dataclass(frozen=True)
class Val:
    """An SSA value: a scalar (shape `()`) or a tensor whose sides are powers of two.

    Attributes:
      name: its spelling, `%12`.
      elem: element type, `f32`, `i1`, `!tt.ptr<f32>`.
      fill: what the lanes beyond the logical shape of a tile hold, where that is known; None: anything.
      number: the number that every lane of a constant holds.
      layout: how the lanes of a tensor lie over threads, at the block level; "" where the compiler chooses it.
    """

    name: str
    shape: tuple[int, ...]
    elem: str
    fill: Number | None = dataclasses.field(default=None, compare=False)
    number: Number | None = dataclasses.field(default=None, compare=False)
    layout: Any = ""

    @property
    def type(self) -> str:
        return spell(self.shape, self.elem, self.layout)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.elem in FLOATS


FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f8E4M3FN": 8, "f8E5M2": 8}


def bits(elem: str) -> int:
    """Width of an element type."""
    return FLOATS[elem] if elem in FLOATS else 64 if elem.startswith("!") else int(elem[1:])


def spell(shape: Sequence[int], elem: str, layout: Any = "") -> str:
    if not shape:
        return elem
    return f"tensor<{'x'.join([*map(str, shape), elem])}{f', {layout}' if layout else ''}>"


def literal(value: Number, elem: str) -> str:
    """A constant as MLIR spells it; floats in hexadecimal where decimals would not say them exactly."""
    if elem == "i1":
        return "true" if value else "false"
    if elem not in FLOATS:
        width = bits(elem)
        value = int(value) & ((1 << width) - 1)
        return str(value - (1 << width) if value >> (width - 1) else value)
    return f"0x{_float_bits(float(value), elem):0{FLOATS[elem] // 4}X}"


def _float_bits(value: float, elem: str) -> int:
    if elem == "f64":
        return int.from_bytes(struct.pack(">d", value))
    import ml_dtypes
    import numpy as np

    types = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
             "f8E4M3FN": ml_dtypes.float8_e4m3fn, "f8E5M2": ml_dtypes.float8_e5m2}  # fmt: skip
    with np.errstate(over="ignore"):
        return int.from_bytes(np.asarray(value, np.float32).astype(types[elem]).tobytes(), "little")


class Code:
    """The body of one `tt.func`, written in order. `head` comes before it: constants, which dominate everything."""

    lifts_scalars = False  # whether scalar floats are converted to integers as tensors of one element

    def __init__(self, *, isolate: bool = False) -> None:
        self._isolate = isolate
        self.head: list[str] = []
        self.lines: list[str] = []
        self.mark = ""  # a comment behind each line: see `emitting.Marks`
        self._depth = 2
        self._count = 0
        self._constants: dict[tuple[str, str], Val] = {}
        self._bitcasts: dict[str, Val] = {}

    def name(self) -> str:
        self._count += 1
        return f"%{self._count}"

    def do(self, text: str) -> None:
        """Write a line without a result."""
        self.lines.append("  " * self._depth + text + self.mark)

    def let(self, right: str, shape: Sequence[int], elem: str, fill: Number | None = None) -> Val:
        """`%n = right`, a value of the given type (which `right` spells where its op wants it)."""
        v = self.new(_possible(shape), elem, fill)
        self.do(f"{v.name} = {right}")
        return v

    def new(self, shape: Sequence[int], elem: str, fill: Number | None = None) -> Val:
        """A name for a value to come."""
        return Val(self.name(), tuple(shape), elem, fill, None, self.layout(shape))

    def layout(self, shape: Sequence[int]) -> Any:
        """The layout of a tensor that the current op makes; "" at the level of TTIR, where the compiler chooses it."""
        return ""

    def vector(self, axis: int, full: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """A context in which vectors are made that will be laid along `axis` of a tensor."""
        return contextlib.nullcontext()

    def gather_attribute(self) -> str:
        """The text of further attributes of a `tt.gather`, behind its axis."""
        return versions.gather_layout()

    def spell(self, shape: Sequence[int], elem: str) -> str:
        """The text of the type of a tensor, or of a scalar, that the current op makes."""
        return spell(shape, elem, self.layout(shape))

    def let_many(
        self, right: str, types: Sequence[tuple[Sequence[int], str]], layouts: Sequence[Any] | None = None
    ) -> list[Val]:
        """`%n:2 = right`: the results of an op, of the given types. They have the layouts that `layouts` gives, or else
        those of other tensors that the op makes."""
        name = self.name()
        self.do(f"{name}:{len(types)} = {right}" if len(types) != 1 else f"{name} = {right}")
        names = [f"{name}#{k}" if len(types) != 1 else name for k in range(len(types))]
        layouts = layouts or [self.layout(s) for s, _ in types]
        return [Val(n, _possible(s), e, layout=h) for n, (s, e), h in zip(names, types, layouts, strict=True)]

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Indent what is written inside."""
        self._depth += 1
        yield
        self._depth -= 1

    # -- constants ----------------------------------------------------------------------------------------------------

    def const(self, value: Number, elem: str, shape: Sequence[int] = ()) -> Val:
        """A number, or a tensor of it; a number that an integer cannot hold wraps."""
        text = literal(value, elem)
        text = f"dense<{text}> : {self.spell(shape, elem)}" if shape else text if elem == "i1" else f"{text} : {elem}"
        return self._constant(f"arith.constant {text}", tuple(shape), elem, value)

    def i32(self, value: int) -> Val:
        return self.const(value, "i32")

    def arange(self, n: int) -> Val:
        """0, 1, ... n - 1 as i32; n is a power of two."""
        if n == 1:
            return self.const(0, "i32", (1,))
        return self._constant(
            f"tt.make_range {{end = {n} : i32, start = 0 : i32}} : {self.spell((n,), 'i32')}", (n,), "i32"
        )

    def _constant(self, right: str, shape: tuple[int, ...], elem: str, number: Number | None = None) -> Val:
        key = (right, elem)
        if key not in self._constants:
            v = dataclasses.replace(self.new(_possible(shape), elem, number), number=number)
            self._constants[key] = v
            self.head.append(f"    {v.name} = {right}")
        return self._constants[key]

    # -- ops ----------------------------------------------------------------------------------------------------------

    def op(self, name: str, *args: Val, elem: str | None = None) -> Val:
        """An op of arith or math whose operands have one type and whose result has it too, `elem` apart from that."""
        first = args[0]
        right = f"{name} {', '.join(a.name for a in args)} : {first.type}"
        if elem is not None and elem != first.elem and not name.startswith("arith.cmp"):
            right += f" to {self.spell(first.shape, elem)}"
        return self.let(right, first.shape, elem or first.elem)

    def cmp(self, predicate: str, a: Val, b: Val) -> Val:
        """`arith.cmpi`/`arith.cmpf`, by the type of the operands: `slt`, `ult`, `eq`; `olt`, `une`."""
        op = "arith.cmpf" if a.is_float else "arith.cmpi"
        return self.let(f"{op} {predicate}, {a.name}, {b.name} : {a.type}", a.shape, "i1")

    def select(self, cond: Val, a: Val, b: Val) -> Val:
        """`cond ? a : b`; `cond` is a scalar, or has the shape of `a`."""
        types = a.type if not cond.shape else f"{cond.type}, {a.type}"
        return self.let(f"arith.select {cond.name}, {a.name}, {b.name} : {types}", a.shape, a.elem)

    def cast(self, name: str, a: Val, elem: str) -> Val:
        """`arith.extsi` and its kin, `tt.int_to_ptr`: `name` from the type of `a` to `elem`."""
        arrow = "->" if name.startswith("tt.") else "to"
        return self.let(f"{name} {a.name} : {a.type} {arrow} {self.spell(a.shape, elem)}", a.shape, elem)

    def bitcast(self, a: Val, elem: str) -> Val:
        """The bits of `a` as another element type of the same width; a bitcast back gives the original value."""
        before = self._bitcasts.get(a.name, a)
        if elem in (a.elem, before.elem):
            return a if a.elem == elem else before
        v = self.let(f"tt.bitcast {a.name} : {a.type} -> {self.spell(a.shape, elem)}", a.shape, elem, None)
        self._bitcasts[v.name] = a
        return v

    # -- shapes -------------------------------------------------------------------------------------------------------

    def splat(self, a: Val, shape: Sequence[int]) -> Val:
        """A tensor of one scalar."""
        if not shape:
            return a
        return self.let(f"tt.splat {a.name} : {a.type} -> {self.spell(shape, a.elem)}", shape, a.elem)

    def expand_dims(self, a: Val, axis: int) -> Val:
        """A new axis of length 1 at `axis`."""
        shape = (*a.shape[:axis], 1, *a.shape[axis:])
        kind = f"{{axis = {axis} : i32}} : {a.type} -> {self.spell(shape, a.elem)}"
        return self.let(f"tt.expand_dims {a.name} {kind}", shape, a.elem)

    def broadcast(self, a: Val, shape: Sequence[int]) -> Val:
        """A tensor whose axes of length 1 are repeated; the rank stays."""
        if tuple(shape) == a.shape:
            return a
        return self.let(f"tt.broadcast {a.name} : {a.type} -> {self.spell(shape, a.elem)}", shape, a.elem)

    def along(self, a: Val, axis: int, shape: Sequence[int]) -> Val:
        """A vector laid along `axis` of `shape` and repeated over the other axes."""
        rank = len(shape)
        for k in range(rank):
            if k != axis:
                a = self.expand_dims(a, k)
        return self.broadcast(a, shape)

    def laid(self, a: Val, axis: int, rank: int) -> Val:
        """A tensor on the axes from `axis` on of a tensor of a higher rank, whose other axes have length 1."""
        for _ in range(axis):
            a = self.expand_dims(a, 0)
        while len(a.shape) < rank:
            a = self.expand_dims(a, len(a.shape))
        return a

    def reshape(self, a: Val, shape: Sequence[int]) -> Val:
        """A tensor of another shape with the same lanes in row-major order."""
        if tuple(shape) == a.shape:
            return a
        if not a.shape:
            return self.splat(a, shape)
        if not shape:
            return self.unsplat(a)
        if len(shape) > len(a.shape) and tuple(shape) == (*a.shape, *[1] * (len(shape) - len(a.shape))):
            # sums along the last axis, beside what was summed: what is made of a reshape may have threads that hold
            # whole rows each
            return self.laid(a, 0, len(shape))
        return self.let(f"tt.reshape {a.name} : {a.type} -> {self.spell(shape, a.elem)}", shape, a.elem)

    def unsplat(self, a: Val) -> Val:
        """The only element of a tensor of one lane."""
        if a.size != 1:
            raise AssertionError(f"unsplat of {a.type}")
        flat = self.reshape(a, (1,)) if len(a.shape) > 1 else a
        return self.let(f"tt.unsplat {flat.name} : {flat.type}", (), a.elem)

    def transpose(self, a: Val, perm: Sequence[int]) -> Val:
        """A tensor whose axis k is axis `perm[k]` of `a`."""
        if list(perm) == list(range(len(perm))):
            return a
        shape = tuple(a.shape[p] for p in perm)
        order = ", ".join(map(str, perm))
        right = f"tt.trans {a.name} {{order = array<i32: {order}>}} : {a.type} -> {self.spell(shape, a.elem)}"
        return self.let(right, shape, a.elem)

    def isolated(self, a: Val) -> Val:
        """The tensor in a layout of the compiler's default kind, where that was asked for: a scan of one element, which
        costs nothing, takes no other. See `layouts.py`."""
        if not self._isolate or not a.shape:
            return a
        if a.elem == "i1":
            return self.to_int(self.isolated(self.to_int(a, "i32", signed=False)), "i1")
        wide = self.expand_dims(a, len(a.shape))
        x, y = self.name(), self.name()
        attributes = f"axis = {len(a.shape)} : i32, reverse = false"
        out = self.let(f'"tt.scan"({wide.name}) <{{{attributes}}}> ({{', wide.shape, a.elem)
        self.do(f"^bb0({x}: {a.elem}, {y}: {a.elem}):")
        self.do(f"  tt.scan.return {y} : {a.elem}")
        self.do(f"}}) : ({wide.type}) -> {wide.type}")
        return self.reshape(out, a.shape)

    # -- integer arithmetic that folds what is constant ---------------------------------------------------------------

    def add(self, a: Val, b: Val) -> Val:
        return a if _is(b, 0) else b if _is(a, 0) else self.op("arith.addi", a, b)

    def sub(self, a: Val, b: Val) -> Val:
        return a if _is(b, 0) else self.op("arith.subi", a, b)

    def mul(self, a: Val, b: Val) -> Val:
        return a if _is(b, 1) else b if _is(a, 1) else self.op("arith.muli", a, b)

    def scale(self, a: Val, k: int) -> Val:
        """`a * k` for a number k."""
        return a if k == 1 else self.mul(a, self.const(k, a.elem, a.shape))

    def shift(self, a: Val, k: int) -> Val:
        """`a + k` for a number k."""
        return a if k == 0 else self.add(a, self.const(k, a.elem, a.shape))

    def both(self, a: Val | None, b: Val | None) -> Val | None:
        """The conjunction of two masks; None is the mask that lets everything through."""
        return b if a is None else a if b is None else self.op("arith.andi", a, b)

    def to_int(self, a: Val, elem: str, *, signed: bool = True) -> Val:
        """An integer in another width: it wraps, or is extended by the sign (by zeros unless `signed`)."""
        if a.elem == elem:
            return a
        narrow = bits(elem) < bits(a.elem)
        unsigned = not signed or a.elem == "i1"
        return self.cast("arith.trunci" if narrow else "arith.extui" if unsigned else "arith.extsi", a, elem)

    def text(self) -> str:
        return "\n".join([*self.head, *self.lines])


def _possible(shape: Sequence[int]) -> tuple[int, ...]:
    if math.prod(shape) > MAX_TILE:
        raise TensorTooLargeError(str(math.prod(shape)))
    return tuple(shape)


def _is(a: Val, value: int) -> bool:
    return a.number is not None and a.number == value
