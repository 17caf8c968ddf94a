"""Kernels some of whose sizes are known only when they run: the op that reads one, and what binds sizes to arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jtile._errors import KernelTypeError, KernelValueError

from .core import Block, Kernel, Op, Value
from .extents import Extent, Size, evaluate, symbols_of
from .shapes import Full
from .types import DTYPES, RefType, TileType

MAX_SIZE = 2**31 - 1  # elements of a dynamic dimension at most, so that its size fits an int32 scalar of the kernel


@dataclasses.dataclass(eq=False)
class SizeOf(Op):
    """A size that is known when the kernel runs, as a scalar."""

    size: Extent
    dtype: str = "int32"

    mnemonic = "size"

    def infer(self):
        if not isinstance(self.size, Extent):
            raise TypeError(f"a size that is known when the kernel runs has symbols, got {self.size!r}")
        if self.dtype not in ("int32", "int64"):
            raise TypeError(f"a size is int32 or int64, got {self.dtype}")
        return (TileType((), self.dtype),)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a symbol is read: `axis` of input `operand` has `multiple` times its value."""

    operand: int
    axis: int
    multiple: int


def sources(kernel: Kernel) -> dict[str, list[Source]]:
    """Every symbol that an input dimension is a multiple of, with all such dimensions, in the order of the inputs."""
    out: dict[str, list[Source]] = {}
    for k, v in enumerate(kernel.inputs):
        for axis, n in enumerate(v.shape):
            factor = _single(n)
            if factor is not None:
                out.setdefault(factor[0], []).append(Source(k, axis, factor[1]))
    return out


def _single(n: Size) -> tuple[str, int] | None:
    """`(symbol, multiple)` of a size that is a constant times one symbol."""
    if not isinstance(n, Extent) or len(n.terms) != 1:
        return None
    (atoms, k), *_ = n.terms
    return (atoms[0], k) if len(atoms) == 1 and isinstance(atoms[0], str) and k > 0 else None


def is_dynamic(kernel: Kernel) -> bool:
    """Whether any size or the grid of a kernel has symbols."""
    return any(isinstance(n, Extent) for v in kernel.params for n in v.shape) or any(
        isinstance(n, Extent) for n in kernel.grid
    )


def used_symbols(kernel: Kernel) -> set[str]:
    """Every symbol of a kernel's Refs, grid and body."""
    sizes = [*kernel.grid, *(n for v in kernel.params for n in v.shape)]
    sizes += [op.size for op in kernel.body.walk() if isinstance(op, SizeOf)]
    return set().union(*(symbols_of(n) for n in sizes if isinstance(n, Extent)))


def launch_symbols(kernel: Kernel) -> list[str]:
    """The symbols that a launch passes, in the order in which it numbers them."""
    used = used_symbols(kernel)
    return [name for name in sources(kernel) if name in used]


def bind_sizes(kernel: Kernel, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The values of a kernel's symbols for input arrays of these shapes.

    Raises:
      KernelTypeError: a static dimension differs, two dimensions of one symbol differ, or a dimension is no multiple of
        what the kernel was made for.
    """
    values: dict[str, int] = {}
    for name, places in sources(kernel).items():
        for s in places:
            n = shapes[s.operand][s.axis]
            value, rest = divmod(n, s.multiple)
            if rest or values.setdefault(name, value) != value:
                raise KernelTypeError(
                    f"kernel {kernel.name}: axis {s.axis} of input {kernel.inputs[s.operand].name} has {n} elements, "
                    f"where {kernel.inputs[s.operand].shape[s.axis]} with {name} = {values.get(name, value)} belong"
                )
    return values


def concrete(kernel: Kernel, values: Mapping[str, int]) -> Kernel:
    """The kernel with numbers in place of its symbols: what it means for arrays of these sizes."""
    number = lambda n: evaluate(n, values)
    env: dict[Value, Value] = {}
    params = []
    for v in kernel.params:
        t = RefType(tuple(map(number, v.shape)), v.dtype, v.type.role)  # type: ignore[union-attr]
        params.append(env.setdefault(v, Value(t, v.name)))

    def block(b: Block) -> Block:
        inner = tuple(Value(p.type, p.name) for p in b.params)
        env.update(zip(b.params, inner, strict=True))
        ops = []
        for op in b.ops:
            new = op.clone(lambda v: env.get(v, v), block)
            if isinstance(op, SizeOf):
                new = _constant(op, number(op.size))
            elif isinstance(getattr(op, "shape", None), tuple):
                _resize(new, tuple(map(number, op.shape)))  # type: ignore[attr-defined]
            env.update(zip(op.results, new.results, strict=True))
            ops.append(new)
        return Block(inner, ops, tuple(env.get(y, y) for y in b.yields))

    grid = tuple(map(number, kernel.grid))
    return dataclasses.replace(kernel, params=tuple(params), grid=grid, body=block(kernel.body))


def _constant(op: SizeOf, value: int) -> Full:
    if not value < 1 << (DTYPES[op.dtype].bits - 1):
        raise KernelValueError(f"a size of {value} does not fit {op.dtype}")
    new = Full(value, (), op.dtype)
    new.loc = op.loc
    new.results = (Value(op.result.type, op.result.name, new),)
    return new


def _resize(op: Op, shape: tuple[int, ...]) -> None:
    """Give memory that a kernel makes itself, and whose size was dynamic, the shape `shape`."""
    (old,) = op.results
    if op.shape == shape or not isinstance(old.type, RefType):  # type: ignore[attr-defined]
        return
    op.shape = shape  # type: ignore[attr-defined]
    op.results = (Value(RefType(shape, old.dtype, old.type.role), old.name, op),)
