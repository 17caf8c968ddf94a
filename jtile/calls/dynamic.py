"""Dynamic dimensions of a call: which ones, the symbols that stand for them, and the program that serves their sizes.

A body is traced with symbols in place of the marked dimensions, once for all sizes, and a second time for sizes that
the tile steps of the kernel divide: that program's code has no edge to test for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.tree_util import tree_flatten

from jtile import ir
from jtile._compat import is_symbolic
from jtile._errors import KernelTypeError, KernelValueError
from jtile._sizes import bounds_of
from jtile.calls.layout import Layout
from jtile.calls.marks import Mark
from jtile.calls.signature import Signature
from jtile.primitive.sizes import sized

MAX_STEP = 4096  # larger common multiples of tile steps are not worth a program of their own


@dataclasses.dataclass(frozen=True)
class Marked:
    """The dynamic dimensions of one call.

    Attributes:
      places: per array, the name of each dimension's symbol, None for static ones.
      sizes: the size of each symbol in this call: an int, or JAX's symbolic dimension while a program is exported.
      bounds: the fewest and the most elements that a symbol may stand for, None: as many as an int32 counts.
    """

    places: tuple[tuple[str | None, ...], ...]
    sizes: dict[str, Any]
    bounds: dict[str, tuple[int, int | None]]

    def shape(self, k: int, shape: Sequence[Any], multiples: Mapping[str, int]) -> tuple[Any, ...]:
        """The shape of array k with symbols."""
        of = tuple((s, multiples[s], *self.bounds[s]) for s in self.sizes)
        symbols = dict(zip(self.sizes, dimensions(of), strict=True))
        return tuple(n if s is None else symbols[s] for n, s in zip(shape, self.places[k]))


@dataclasses.dataclass(frozen=True)
class Callee:
    """What is called with marks, as errors name it: `"kernel matmul"`, and the place of its source."""

    name: str
    where: tuple[str, int] | None = None


def marked(of: Callee, names: Sequence[str], leaves: Sequence[Any], marks: Sequence[Sequence[Mark]]) -> Marked | None:
    """The dynamic dimensions of a call with arrays of types `leaves`, called `names`; None where all are static.

    An empty dimension is static: symbols stand for 1 or more, and there is hardly a program to compile. So is one of
    more elements than an int32 counts.
    """
    places, found = [], Marked((), {}, {})
    for name, x, given in zip(names, leaves, marks, strict=True):
        asked = {_axis(of, name, x, m.axis): m for m in given}
        row: list[str | None] = []
        for axis, n in enumerate(x.shape):
            symbolic = is_symbolic(n)
            if not symbolic and (axis not in asked or not 0 < n <= ir.MAX_SIZE):
                row.append(None)
                continue
            mark = asked.get(axis, Mark(axis))
            row.append(_symbol(of, mark.name, f"{name}_{axis}", n, found.sizes))
            _bound(of, row[-1], n, mark, found.bounds)
        places.append(tuple(row))
    return dataclasses.replace(found, places=tuple(places)) if found.sizes else None


def _axis(of: Callee, name: str, x: Any, axis: int) -> int:
    rank = len(x.shape)
    if not -rank <= axis < rank:
        raise KernelValueError(f"dynamic axis {axis} of {name} of {of.name} is none of its {rank} axes", of.where)
    return axis % rank


def _symbol(of: Callee, given: str | None, fresh: str, n: Any, sizes: dict[str, Any]) -> str:
    """The symbol of a dimension of n elements: the given name, the symbol of an equal dimension, or a fresh one."""
    if given is None:
        same = [s for s, size in sizes.items() if type(size) is type(n) and size == n]
        while not same and fresh in sizes:  # another argument has a name that reads alike
            fresh += "_"
        given = same[0] if same else fresh
    if sizes.setdefault(given, n) != n:
        raise KernelValueError(
            f"dynamic dimension {given!r} of {of.name} has {sizes[given]} elements in one argument and {n} in another",
            of.where,
        )
    return given


def _bound(of: Callee, symbol: str, n: Any, mark: Mark, bounds: dict[str, tuple[int, int | None]]) -> None:
    """Note what a mark says about the sizes of a symbol, and hold it against the size at hand."""
    if is_symbolic(n):  # in a program over symbols, which has bounds of its own
        own = bounds_of(n)
        mark = mark._replace(least=max(own[0], mark.least), most=_lower(own[1], mark.most))
    elif not mark.least <= n <= (n if mark.most is None else mark.most):
        most = "any number of" if mark.most is None else mark.most
        raise KernelValueError(
            f"dynamic dimension {symbol!r} of {of.name} has {n} elements: marked as {mark.least} to {most}", of.where
        )
    least, most = bounds.get(symbol, (1, None))
    bounds[symbol] = max(least, mark.least), _lower(most, mark.most)


def _lower(a: int | None, b: int | None) -> int | None:
    return min((end for end in (a, b) if end is not None), default=None)


@functools.lru_cache(maxsize=1024)
def dimensions(of: tuple[tuple[str, int, int, int | None], ...]) -> tuple[Any, ...]:
    """JAX's symbolic dimensions `multiple * name` for (name, multiple, least, most), in one scope, which knows that
    each has at least and at most so many elements."""
    from jax.export import SymbolicScope, symbolic_shape

    says = [f"{name} >= {-(-least // multiple)}" for name, multiple, least, _ in of if least > multiple]
    says += [f"{name} <= {max(most // multiple, 1)}" for name, multiple, _, most in of if most is not None]
    scope = _scope() if not says else SymbolicScope(says)
    return tuple(multiple * symbolic_shape(name, scope=scope)[0] for name, multiple, *_ in of)


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
            if not _same(map(at, a.shape), b.shape) or a.dtype != b.dtype:
                raise _depends(sig, {"outputs": "out_type"}.get(what, what), a.shape, b.shape)
    if made.axes != wanted.axes or not _same(map(at, made.grid), wanted.grid):
        raise _depends(sig, "grid", *(_sides(x.axes, x.grid) for x in (made, wanted)))


_SOME = (1, 2, 3, 5, 8, 17, 64, 129, 1000)  # sizes that equal expressions agree for


def _same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether sizes are the same ones. Those over the symbols of an outer program are compared for some sizes, since
    JAX has no normal form: `floordiv(n - 4, 2) + 1` and `floordiv(n - 2, 2)` differ as texts."""
    return all(x == y or _agree(x, y) for x, y in zip(a, b, strict=True))


def _agree(x: Any, y: Any) -> bool:
    if not (is_symbolic(x) or is_symbolic(y)):
        return False
    x, y = (ir.parse_size(str(n)) for n in (x, y))
    names = sorted({s for n in (x, y) if isinstance(n, ir.Extent) for s in ir.symbols_of(n)})
    points = ({s: _SOME[(k + j) % len(_SOME)] for j, s in enumerate(names)} for k in range(len(_SOME)))
    return all(sized(x, at) == sized(y, at) for at in points)


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
