"""From a kernel in Tile IR to the text of one TTIR function. Emitters of op families register themselves here.

A tile of any shape is a tensor whose sides are powers of two; the lanes beyond its shape hold anything (also NaN)
unless `Val.fill` says what. An op that lets lanes meet (reductions, dots, scans, sorts) fills them first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jtile import ir
from jtile._errors import UnsupportedError

from ..emitting import Marks, into
from . import versions
from .ttir import MAX_TILE, Code, Number, TensorTooLargeError, Val

if TYPE_CHECKING:
    from .features import Features
    from .record import Expression, Record

Results = Val | Sequence[Val] | None
EMITTERS: dict[type[ir.Op], Callable[[Emitter, ir.Op], Results]] = {}

# Registers hold bools as i1; what TTIR has no type for, or computes nothing on, as the bits of an i8: integers of
# 2 and 4 bits widened, floats of 8 and 4 bits as their codes.
_ELEMS = {
    "bool": "i1", "int2": "i8", "uint2": "i8", "int4": "i8", "uint4": "i8", "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64", "float4_e2m1fn": "i8",
    **{d: "i8" for d in ir.DTYPES if d.startswith("float8_")},
}  # fmt: skip
PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # elements share bytes in memory, the first in low bits
emits = into(EMITTERS)  # emitters are functions `(em, op) -> its results`


def elem_of(dtype: str) -> str:
    """The element type of tiles of a dtype in registers."""
    return _ELEMS.get(dtype) or f"i{ir.DTYPES[dtype].bits}"


def memory_elem(dtype: str) -> str:
    """The element type behind pointers to arrays of a dtype."""
    return "i8" if dtype == "bool" else elem_of(dtype)


def padded(shape: Sequence[int]) -> tuple[int, ...]:
    """The sides of the tensor that stands for a tile: the next powers of two, at least 1."""
    return tuple(1 << max(n - 1, 0).bit_length() for n in shape)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory of a Ref: a base pointer, and row-major strides in elements.

    Attributes:
      pointer: a scalar pointer to `memory_elem(dtype)` (for packed dtypes to bytes).
      shape: sides; i32 or i64 scalars where they are known when the kernel runs.
      strides: distances along each axis, in elements; scalars like those of `shape` where they are not known before.
      param: position among the kernel's arrays (operands, then results), or None for scratch.
      scope: who else may update it meanwhile, as atomics say it: `"sys"` for memory that other devices reach.
    """

    pointer: Val
    shape: tuple[int | Val, ...]
    strides: tuple[int | Val, ...]
    dtype: str
    param: int | None = None
    scope: str = "gpu"


class Emitter:
    """State of one kernel's emission: `env` maps tiles to values, `refs` Refs to memory."""

    def __init__(
        self,
        kernel: ir.Kernel,
        features: Features,
        record: Record,
        *,
        isolate: bool = False,
        num_stages: int | None = None,
        marks: Marks | None = None,
    ):
        self.kernel, self.features, self.record, self.marks = kernel, features, record, marks
        self.num_stages = num_stages  # stages of every loop, where the user gave their number
        self.code = self.new_code(isolate)
        self.env: dict[ir.Value, Val] = {}
        self.refs: dict[ir.Value, Buffer] = {}
        self.program: dict[int, Val] = {}
        self.symbols: dict[str, Val] = {}  # values of the symbols of dynamic sizes, as i32
        self.sites: list[dict] = []
        self.params: list[tuple[Val, str]] = []  # parameters: a scalar, and attributes behind its type
        self.workspace: Val | None = None  # memory of all blocks for private Refs
        self.around = False  # whether the whole kernel stands in a loop, which carries what the kernel goes by
        self.memo: dict[str, Any] = {}  # values that emitters of one family keep from op to op
        self.counters: Val | None = None  # where programs arrive, see `emit_arrivals.py`
        self.paged: dict[ir.Op, Any] = {}  # loads that come in pages, and where these are: see `task_pages.py`
        self.log: Val | None = None  # the log of print and assert, see `emit_debug.py`

    def new_code(self, isolate: bool) -> Code:
        """The `Code` that the text of the function is written to."""
        return Code(isolate=isolate)

    def barrier(self) -> None:
        """Emit a barrier, behind which all threads of the block see what each of them has done to memory before."""
        self.code.do("gpu.barrier")

    def unfolded(self, base: Val) -> Val:
        """The offset of an access whose masked lanes may stand in front of the array, as the compiler takes it."""
        return base

    # -- parameters of the function -----------------------------------------------------------------------------------

    def param(self, record: dict[str, Any], elem: str, attributes: str = "") -> Val:
        """A further parameter: what the launcher passes (see `record.py`), and its type here."""
        v = Val(f"%p{len(self.params)}", (), elem)
        self.params.append((v, attributes))
        self.record.params.append(record)
        return v

    def pointer_param(self, array: int, elem: str) -> Val:
        """A parameter that points to an array of the call: operands, then results. XLA aligns all to 16 bytes."""
        return self.param({"kind": "buffer", "buffer": array}, f"!tt.ptr<{elem}>", " {tt.divisibility = 16 : i32}")

    def extra_result(self, size: Expression, elem: str) -> Val:
        """A pointer to a further result of the call, of `size` bytes."""
        arrays = len(self.kernel.inputs) + len(self.kernel.outputs) + len(self.record.extra)
        self.record.extra.append(size)
        return self.pointer_param(arrays, elem)

    # -- values -------------------------------------------------------------------------------------------------------

    def val(self, v: ir.Value) -> Val:
        return self.env[v]

    def use(self, v: Val) -> Val:
        """A value of the function's own block, by its name here."""
        return v

    def mask(self, op: ir.Load | ir.Store | ir.Atomic) -> Val | None:
        """The mask that an access was given."""
        return None if op.mask is None else self.val(op.mask)

    def valid(self, shape: Sequence[int]) -> Val | None:
        """The mask of a tile's own lanes; None where its tensor has no others."""
        full, mask = padded(shape), None
        for axis, (n, m) in enumerate(zip(shape, full, strict=True)):
            if n != m:
                inside = self.code.cmp("slt", self.code.arange(m), self.code.const(n, "i32", (m,)))
                mask = self.code.both(mask, self.code.along(inside, axis, full))
        return mask

    def filled(self, v: ir.Value, number: Number) -> Val:
        """A tile with `number` in the lanes beyond its shape."""
        t = self.val(v)
        mask = self.valid(v.shape)
        if mask is None or (t.fill is not None and type(t.fill) is type(number) and t.fill == number):
            return t
        out = self.code.select(mask, t, self.code.const(number, t.elem, t.shape))
        return dataclasses.replace(out, fill=number)

    def iota(self, shape: Sequence[int], axis: int) -> Val:
        """0, 1, 2 along an axis of the tensor of a tile of this shape, as i32."""
        full = padded(shape)
        with self.code.vector(axis, full):
            lanes = self.code.arange(full[axis])
        return self.code.along(lanes, axis, full)

    def zeros(self, v: ir.Value) -> Val:
        """Zero in every lane of a tensor like that of `v`."""
        return self.code.const(0, elem_of(v.dtype), padded(v.shape))

    def integer(self, v: ir.Value, elem: str = "i32") -> Val:
        """An integer value in another width, by its signedness."""
        return self.code.to_int(self.val(v), elem, signed=ir.DTYPES[v.dtype].kind == "i")

    def kept(self, bound: Val) -> Val:
        """A bound of a loop, which may change in a loop around it: what triton 3.6 takes for dead is given to an
        instruction here that does nothing (`versions.forgets_bounds`)."""
        if bound.number is not None or self.features.npu or not versions.forgets_bounds():
            return bound
        register = "v" if self.features.backend == "amd" else {"i32": "r", "i64": "l"}[bound.elem]
        asm = f'"" {{constraints = "={register},0", packed_element = 1 : i32, pure = false}}'
        return self.code.let(
            f"tt.elementwise_inline_asm {asm} {bound.name} : {bound.elem} -> {bound.elem}", (), bound.elem
        )

    # -- blocks -------------------------------------------------------------------------------------------------------

    def block(self, block: ir.Block, args: Sequence[Val] = ()) -> list[Val]:
        """Emit the ops of a block here, its parameters bound to `args`; gives what it yields."""
        self.env.update(zip(block.params, args, strict=True))
        for op in block.ops:
            self.op(op)
        return [self.val(y) for y in block.yields]

    def op(self, op: ir.Op) -> None:
        if type(op) not in EMITTERS:
            self.refuse(op, f"no code for {op.mnemonic!r}")
        code, before = self.code, self.code.mark
        code.mark = self.marks(op.loc) if self.marks else ""
        try:
            results = EMITTERS[type(op)](self, op)
        except TensorTooLargeError as e:
            what = f"tiles of at most {MAX_TILE} elements, and {op.mnemonic!r} takes one of {e} here"
            self.refuse(op, f"{what} (sides count as powers of two): make the tiles of the kernel smaller")
        code.mark = before
        results = () if results is None else (results,) if isinstance(results, Val) else results
        for r, v in zip((r for r in op.results if isinstance(r.type, ir.TileType)), results, strict=True):
            if (v.shape, v.elem) != (padded(r.shape), elem_of(r.dtype)):
                raise AssertionError(f"emitter of {op.mnemonic} gave {v.type} for {r.type}")
            self.env[r] = v

    def refuse(self, op: ir.Op, what: str) -> NoReturn:
        """UnsupportedError at the line of an op."""
        loc = op.loc if op.loc.file else self.kernel.loc
        raise UnsupportedError(
            f"kernel {self.kernel.name}: target {self.features.arch!r} has {what}",
            (loc.file, loc.line) if loc.file else None,
        )
