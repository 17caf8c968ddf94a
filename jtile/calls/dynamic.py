"""Dynamic dimensions of a call: which ones, the symbols that stand for them, and the program that serves their sizes.

A body is traced with symbols in place of the marked dimensions, once for all sizes, and a second time for sizes that
the tile steps of the kernel divide: that program's code has no edge to test for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.tree_util import tree_flatten

from jtile import ir
from jtile._compat import is_symbolic
from jtile._errors import KernelTypeError, KernelValueError
from jtile.calls.layout import Layout
from jtile.calls.signature import Signature
from jtile.primitive.sizes import sized

MAX_STEP = 4096  # larger common multiples of tile steps are not worth a program of their own


@dataclasses.dataclass(frozen=True)
class Marked:
    """The dynamic dimensions of one call.

    Attributes:
      places: per array, the name of each dimension's symbol, None for static ones.
      sizes: the size of each symbol in this call: an int, or JAX's symbolic dimension while a program is exported.
    """

    places: tuple[tuple[str | None, ...], ...]
    sizes: dict[str, Any]

    def shape(self, k: int, shape: Sequence[Any], multiples: Mapping[str, int]) -> tuple[Any, ...]:
        """The shape of array k with symbols."""
        return tuple(n if s is None else dimension(s, multiples[s]) for n, s in zip(shape, self.places[k]))


def marked(sig: Signature, names: Sequence[str], leaves: Sequence[Any], marks: Sequence[Any]) -> Marked | None:
    """The dynamic dimensions of a call with arrays of types `leaves`, called `names`; None where all are static.

    An empty dimension is static: symbols stand for 1 or more, and there is hardly a program to compile. So is one of
    more elements than an int32 counts.
    """
    places, sizes = [], {}
    for name, x, pairs in zip(names, leaves, marks, strict=True):
        asked = {_axis(sig, name, x, a): given for a, given in pairs}
        row: list[str | None] = []
        for axis, n in enumerate(x.shape):
            symbolic = is_symbolic(n)
            if not symbolic and (axis not in asked or not 0 < n <= ir.MAX_SIZE):
                row.append(None)
                continue
            row.append(_symbol(sig, asked.get(axis), f"{name}_{axis}", n, sizes))
        places.append(tuple(row))
    return Marked(tuple(places), sizes) if sizes else None


def _axis(sig: Signature, name: str, x: Any, axis: int) -> int:
    rank = len(x.shape)
    if not -rank <= axis < rank:
        raise KernelValueError(
            f"dynamic axis {axis} of {name} of kernel {sig.name} is none of its {rank} axes", sig.where
        )
    return axis % rank


def _symbol(sig: Signature, given: str | None, fresh: str, n: Any, sizes: dict[str, Any]) -> str:
    """The symbol of a dimension of n elements: the given name, the symbol of an equal dimension, or a fresh one."""
    if given is None:
        same = [s for s, size in sizes.items() if type(size) is type(n) and size == n]
        given = same[0] if same else fresh
    if sizes.setdefault(given, n) != n:
        raise KernelValueError(
            f"dynamic dimension {given!r} of kernel {sig.name} has {sizes[given]} elements in one argument and {n} in "
            "another",
            sig.where,
        )
    return given


@functools.cache
def dimension(name: str, multiple: int = 1) -> Any:
    """JAX's symbolic dimension `multiple * name`, in the one scope that kernels are traced in."""
    from jax.export import symbolic_shape

    return multiple * symbolic_shape(name, scope=_scope())[0]


@functools.cache
def _scope() -> Any:
    from jax.export import SymbolicScope

    return SymbolicScope()


# -- the programs of one signature -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Family:
    """The programs that serve all sizes of one signature: one for any size, and one for those that are multiples of
    `steps`.

    Attributes:
      names: the symbols of the signature.
      make: traces a program, given what each symbol is multiplied with; the result has it as `program`.
    """

    names: tuple[str, ...]
    make: Callable[[dict[str, int]], Any]

    @functools.cached_property
    def general(self) -> Any:
        return self.make(dict.fromkeys(self.names, 1))

    @functools.cached_property
    def steps(self) -> dict[str, int]:
        found = tile_steps(self.general.program.kernel)
        return {n: found.get(n, 1) for n in self.names}

    @functools.cached_property
    def even(self) -> Any:
        return self.make(self.steps)

    def pick(self, sizes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The traced program that serves these sizes, and the values of its symbols."""
        steps = self.steps
        if any(k > 1 for k in steps.values()) and all(bool(n % steps[s] == 0) for s, n in sizes.items()):
            return self.even, {s: n // steps[s] for s, n in sizes.items()}
        return self.general, dict(sizes)


def tile_steps(kernel: ir.Kernel) -> dict[str, int]:
    """For each symbol the number of which its size must be a multiple, so that no tile hangs over the edge."""
    found: dict[str, list[int]] = {}

    def note(size: Any, step: int) -> None:
        if isinstance(size, ir.Extent) and step > 1:
            for name in ir.symbols_of(size):
                found.setdefault(name, []).append(step)

    for op in kernel.body.walk():
        if isinstance(op, ir.Load | ir.Store | ir.Atomic):
            for d, n in zip(op.index, op.ref.shape, strict=True):
                if isinstance(d, ir.Tile | ir.Span):
                    note(n, d.step if isinstance(d, ir.Tile) else d.size * d.stride)
    sizes = [*kernel.grid, *(op.size for op in kernel.body.walk() if isinstance(op, ir.SizeOf))]
    for n in sizes:
        for fn, (a, b) in ir.calls_of(n):
            if fn in ("cdiv", "floordiv", "mod") and isinstance(b, int):
                note(a, b)
    common = {name: math.lcm(*steps) for name, steps in found.items()}
    return {name: step for name, step in common.items() if step <= MAX_STEP}


def check(sig: Signature, made: Layout, wanted: Layout, values: Mapping[str, Any]) -> None:
    """Refuse `out_type`, `scratch` or `grid` that give something else for symbols than for the sizes of the call."""
    at = lambda n: sized(ir.parse_size(str(n)) if is_symbolic(n) else n, values)
    for what in ("outputs", "scratch"):
        for a, b in zip(tree_flatten(getattr(made, what))[0], tree_flatten(getattr(wanted, what))[0], strict=True):
            if tuple(map(at, a.shape)) != tuple(b.shape) or a.dtype != b.dtype:
                raise _depends(sig, {"outputs": "out_type"}.get(what, what), a.shape, b.shape)
    if (made.axes, tuple(map(at, made.grid))) != (wanted.axes, tuple(wanted.grid)):
        raise _depends(sig, "grid", *(_sides(x.axes, x.grid) for x in (made, wanted)))


def _sides(axes: Sequence[str], grid: Sequence[Any]) -> Sequence[Any]:
    return [f"{name}: {n}" for name, n in zip(axes, grid, strict=True)] if axes else grid


def _depends(sig: Signature, what: str, symbolic: Any, actual: Any) -> KernelTypeError:
    show = lambda xs: "(" + ", ".join(map(str, xs)) + ")"
    return KernelTypeError(
        f"{what} of kernel {sig.name} gives {show(symbolic)} for dynamic dimensions, but {show(actual)} for the sizes "
        "of this call: it decides something by their values; compute with +, -, *, //, % and jt.cdiv, or mark fewer "
        "dimensions dynamic",
        sig.where,
    )
