"""NumPy's modules `linalg`, `fft` and `random`, with arrays of ours for those that they give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy

from jtile.numpy._array import hosted, ndarray
from jtile.numpy._calls import at_once, given_back
from jtile.numpy._functions import at_once_of


class Module:
    """A module of NumPy, whose functions are called with the values that arrays have."""

    def __init__(self, name: str, own: dict[str, Any]):
        self.__name__ = f"jtile.numpy.{name}"
        self._of, self._own = getattr(numpy, name), own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._own:
            return self._own[name]
        try:
            value = getattr(self._of, name)
        except AttributeError:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}, as {self._of.__name__} has none"
            ) from None
        if isinstance(value, type) or not callable(value):
            return value
        return at_once_of(value)

    def __dir__(self) -> list[str]:
        return dir(self._of)


class Grid:
    """One of NumPy's objects that make arrays by an index: `mgrid`, `ogrid`, `r_`, `c_`."""

    def __init__(self, name: str):
        self._of = getattr(numpy, name)

    def __getitem__(self, index: Any) -> Any:
        return given_back(self._of[hosted(index)])

    def __repr__(self) -> str:
        return repr(self._of)


class Random(Module):
    """NumPy's module `random`: the same numbers, in arrays of ours."""

    def __init__(self) -> None:
        super().__init__("random", {"Generator": Generator, "RandomState": RandomState, "default_rng": default_rng})

    def shuffle(self, x: Any) -> None:
        _shuffle(numpy.random.shuffle, x)


class Generator:
    """One of NumPy's generators of random numbers: the same numbers, in arrays of ours."""

    def __init__(self, bit_generator: Any):
        self._of = numpy.random.Generator(bit_generator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._of, name)
        return functools.partial(at_once, value) if callable(value) else value

    def shuffle(self, x: Any, axis: int = 0) -> None:
        _shuffle(self._of.shuffle, x, *((axis,) if axis else ()))

    def spawn(self, n_children: int) -> list[Generator]:
        return [Generator(g.bit_generator) for g in self._of.spawn(n_children)]

    def __repr__(self) -> str:
        return repr(self._of)


class RandomState(Generator):
    """NumPy's older generator of random numbers."""

    def __init__(self, seed: Any = None):
        self._of: Any = numpy.random.RandomState(hosted(seed))


def default_rng(seed: Any = None) -> Generator:
    """NumPy's `random.default_rng`, whose generator gives arrays of ours."""
    return seed if isinstance(seed, Generator) else Generator(numpy.random.default_rng(hosted(seed)).bit_generator)


def _shuffle(of: Callable, x: Any, *axis: int) -> None:
    if not isinstance(x, ndarray):
        of(x, *axis)
        return
    value = numpy.array(hosted(x))
    of(value, *axis)
    x[...] = given_back(value)
