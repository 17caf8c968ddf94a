"""Sizes of dimensions that are known when a kernel runs: polynomials over symbols with integer coefficients.

A symbol stands for a whole number of at least 1. Where a size is known to be a multiple of 128 it is written `128*n`,
so that divisions by what divides 128 are exact and the arithmetic of polynomials is all that proofs need.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class UndecidedError(TypeError):
    """Asked of a size that is not known yet: a comparison that holds for some sizes only, or its value as an int."""


@dataclasses.dataclass(frozen=True, order=True)
class Call:
    """A function of sizes that is no polynomial: `cdiv`, `floordiv`, `mod`, `max`, `min`."""

    fn: str
    args: tuple[Any, ...]  # Extents and ints

    def __str__(self) -> str:
        return f"{self.fn}({', '.join(map(str, self.args))})"


Atom = str | Call
Monomial = tuple[Atom, ...]  # a product of atoms, sorted by their text
Size = Any  # an int or an Extent


@dataclasses.dataclass(frozen=True)
class Extent:
    """A size that is not a constant: the sum of `coefficient * product of atoms`; equal polynomials are equal.

    Arithmetic with ints and Extents gives an int where the result is one. Comparisons answer where they hold, or fail,
    for all values of the symbols, and raise UndecidedError elsewhere; `==` asks whether two are one polynomial.
    """

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Size) -> Size:
        return _combine(self, other, 1)

    def __sub__(self, other: Size) -> Size:
        return _combine(self, other, -1)

    def __mul__(self, other: Size) -> Size:
        if not isinstance(other, int | Extent):
            return NotImplemented
        out: dict[Monomial, int] = {}
        for (a, x), (b, y) in itertools.product(self.terms, _terms(other)):
            key = tuple(sorted((*a, *b), key=str))
            out[key] = out.get(key, 0) + x * y
        return _extent(out)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __rsub__(self, other: Size) -> Size:
        return -self + other

    def __floordiv__(self, other: Size) -> Size:
        return call("floordiv", self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return call("floordiv", other, self)

    def __mod__(self, other: Size) -> Size:
        return call("mod", self, other)

    def __rmod__(self, other: Size) -> Size:
        return call("mod", other, self)

    def __lt__(self, other: Size) -> bool:
        return _decided(other - self - 1, f"{self} < {other}")

    def __le__(self, other: Size) -> bool:
        return _decided(other - self, f"{self} <= {other}")

    def __gt__(self, other: Size) -> bool:
        return _decided(self - other - 1, f"{self} > {other}")

    def __ge__(self, other: Size) -> bool:
        return _decided(self - other, f"{self} >= {other}")

    def __bool__(self) -> bool:
        return self >= 1

    def __index__(self) -> int:
        raise UndecidedError(f"{self} is known only when the kernel runs")

    def __str__(self) -> str:
        words = []
        for atoms, k in self.terms:
            product = "*".join(map(str, atoms))
            text = str(abs(k)) if not atoms else product if abs(k) == 1 else f"{abs(k)}*{product}"
            words += [(" - " if words else "-") if k < 0 else (" + " if words else ""), text]
        return "".join(words)

    __repr__ = __str__


def symbol(name: str) -> Extent:
    """The size called `name`."""
    return Extent((((name,), 1),))


def _terms(x: Size) -> tuple[tuple[Monomial, int], ...]:
    return x.terms if isinstance(x, Extent) else (((), int(x)),)


def _extent(terms: Mapping[Monomial, int]) -> Size:
    kept = {m: k for m, k in terms.items() if k}
    if not any(kept):
        return kept.get((), 0)
    return Extent(tuple(sorted(kept.items(), key=lambda t: (-len(t[0]), tuple(map(str, t[0]))))))


def _combine(a: Size, b: Size, sign: int) -> Size:
    if not isinstance(b, int | Extent):
        return NotImplemented
    out = dict(_terms(a))
    for m, k in _terms(b):
        out[m] = out.get(m, 0) + sign * k
    return _extent(out)


# -- functions that are no polynomials --------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "cdiv": lambda a, b: -(-a // b),
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


def call(fn: str, a: Size, b: Size) -> Size:
    """`fn(a, b)`, simplified."""
    if isinstance(a, int) and isinstance(b, int):
        return FUNCTIONS[fn](a, b)
    if fn in ("max", "min"):
        return _largest(fn, a, b)
    if isinstance(a, Extent) and isinstance(b, int) and b > 0:
        return _divided(fn, a, b)
    return Extent((((Call(fn, (a, b)),), 1),))


def _largest(fn: str, a: Size, b: Size) -> Size:
    if at_least(a, b):
        return a if fn == "max" else b
    if at_least(b, a):
        return b if fn == "max" else a
    return Extent((((Call(fn, tuple(sorted((a, b), key=str))),), 1),))


def _divided(fn: str, a: Extent, b: int) -> Size:
    """Division by a constant: terms that it divides are divided, the rest stays; `-((-n) // b)` becomes `cdiv`."""
    whole = _extent({m: k // b for m, k in a.terms if k % b == 0})
    rest = _extent({m: k for m, k in a.terms if k % b})
    if fn == "mod":
        return rest % b if isinstance(rest, int) else Extent((((Call("mod", (rest, b)),), 1),))
    if isinstance(rest, int):
        return whole + FUNCTIONS[fn](rest, b)
    if all(k < 0 for _, k in rest.terms):
        other = "floordiv" if fn == "cdiv" else "cdiv"
        return whole - Extent((((Call(other, (-rest, b)),), 1),))
    return whole + Extent((((Call(fn, (rest, b)),), 1),))


# -- proofs -----------------------------------------------------------------------------------------------------------


def at_least(a: Size, b: Size) -> bool:
    """Whether `a >= b` is certain, whatever the symbols are (each at least 1). False says that it is not known."""
    return _not_negative(a - b)


def _not_negative(x: Size) -> bool:
    """Whether a size is surely not negative: with 1 + t for every symbol, t >= 0, it has no negative coefficient."""
    if isinstance(x, int):
        return x >= 0
    shifted: dict[Monomial, int] = {}
    for atoms, k in x.terms:
        if not all(isinstance(a, str) or _call_not_negative(a) for a in atoms):
            return False
        names = [a for a in atoms if isinstance(a, str)]
        calls = tuple(a for a in atoms if isinstance(a, Call))
        for keep in itertools.product((True, False), repeat=len(names)):
            key = (*(n for n, kept in zip(names, keep, strict=True) if kept), *calls)
            shifted[key] = shifted.get(key, 0) + k
    return all(k >= 0 for k in shifted.values())


@functools.lru_cache(maxsize=1024)
def _call_not_negative(c: Call) -> bool:
    signs = [_not_negative(a) for a in c.args]
    return any(signs) if c.fn == "max" else signs[1] if c.fn == "mod" else all(signs)


def _decided(gap: Size, what: str) -> bool:
    if _not_negative(gap):
        return True
    if _not_negative(-gap - 1):
        return False
    raise UndecidedError(f"whether {what} depends on sizes that are known only when the kernel runs")


# -- values and text --------------------------------------------------------------------------------------------------


def symbols_of(x: Size) -> set[str]:
    """Names of the symbols in a size."""
    return {a for a in _atoms(x) if isinstance(a, str)}


def calls_of(x: Size) -> list[tuple[str, tuple[Size, ...]]]:
    """Every `(function, arguments)` in a size."""
    return [(a.fn, a.args) for a in _atoms(x) if isinstance(a, Call)]


def _atoms(x: Size) -> Iterator[Atom]:
    for atoms, _ in _terms(x):
        for a in atoms:
            yield a
            if isinstance(a, Call):
                for arg in a.args:
                    yield from _atoms(arg)


def evaluate(x: Size, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] = FUNCTIONS) -> Any:
    """The size with `values` for its symbols: ints, or anything with arithmetic that `functions` take."""
    if isinstance(x, int):
        return x
    total: Any = 0
    for atoms, k in x.terms:
        product: Any = k
        for a in atoms:
            if isinstance(a, str):
                product = product * values[a]
            else:
                product = product * functions[a.fn](*(evaluate(v, values, functions) for v in a.args))
        total = total + product
    return total


def parse_size(text: str) -> Size:
    """The size that `text` spells: as `str` writes it, or as JAX writes its symbolic dimensions.

    Raises:
      ValueError: the text is no size.
    """
    try:
        return _read(ast.parse(text.strip().replace("^", "**"), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{text!r} is no size") from None


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _read(node: ast.AST) -> Size:
    match node:
        case ast.Constant(int() as value):
            return value
        case ast.Name(name):
            return symbol(name)
        case ast.UnaryOp(ast.USub(), x):
            return -_read(x)
        case ast.BinOp(base, ast.Pow(), ast.Constant(int() as power)) if power >= 0:
            return functools.reduce(operator.mul, [_read(base)] * power, 1)
        case ast.BinOp(a, op, b) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_read(a), _read(b))
        case ast.Call(ast.Name(fn), [first, *rest]) if fn in FUNCTIONS:
            return functools.reduce(lambda a, b: call(fn, a, b), map(_read, rest), _read(first))
    raise ValueError(f"{ast.unparse(node)!r} is no size")
