"""The state of a kernel's source that grows: its lines, the values in scope, its arguments and results."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt

SIDES = (2, 3, 4, 1)
LIMIT = 8.0  # larger values are scaled down


@dataclasses.dataclass(frozen=True)
class V:
    """A float value in scope: |x| <= bound; `exact`: no rounding happened since it was loaded."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    bound: float = 2.0
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class Scalar:
    """An int expression that lies in [0, hi]; `distinct`: no two programs or rounds have all of these equal."""

    text: str
    hi: int


@dataclasses.dataclass(frozen=True)
class Argument:
    name: str
    array: Any


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    shape: tuple[int, ...]
    dtype: str
    init: float | None


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its arguments; `narrow`: some of its values are rounded to 16 bits."""

    source: str
    options: dict[str, Any]
    args: tuple[Any, ...]
    narrow: bool

    def define(self) -> jt.Kernel:
        """The kernel; its source is known to Python, so that its loops are rewritten."""
        name = f"<random gradient {abs(hash(self.source)):x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        space = {"jt": jt, "jax": jax, "jnp": jnp, "np": np}
        exec(compile(self.source, name, "exec"), space)
        return jt.kernel(**self.options)(space["kernel"])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print the fields

    def __repr__(self) -> str:
        arrays = "\n".join(f"#   {a.dtype.name}{list(a.shape)}" for a in self.args)
        return f"\n{self.source}# {self.options}\n# arguments:\n{arrays}\n"


class Gen:
    """Grows one kernel; `pool` holds the values in scope, `scalars` the index expressions."""

    def __init__(self, choices: bytes):
        self.choices = iter(choices)
        self.rng = np.random.default_rng(list(choices[:8]))
        self.grid = self.choose(((2,), (1,), (3,), (2, 2), (2,), (1, 2), (3, 1)))
        self.inputs: list[Argument] = []
        self.outputs: list[Result] = []
        self.alias: dict[str, str] = {}
        self.lines: list[str] = []
        self.pool: list[V] = []
        self.pids = [Scalar("ij"[k], n - 1) for k, n in enumerate(self.grid)]
        self.counters: list[Scalar] = []  # of the loops around
        self.depth = 0
        self.partial = 0  # how many regions around may not run for each counter
        self.names = 0
        self.steps: Sequence[Callable[[Gen], Any]] = ()
        self.narrow = False

    # -- choices -----------------------------------------------------------------------------------------------------
    def number(self, low: int, high: int) -> int:
        return low + next(self.choices, 0) % (high - low + 1)

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self.number(0, len(options) - 1)]

    def chance(self, of: int = 2) -> bool:
        """One time in `of`; never where choices are zero."""
        return self.number(0, of - 1) == of - 1

    def shape(self, low: int = 0, high: int = 2) -> tuple[int, ...]:
        return tuple(self.choose(SIDES) for _ in range(self.choose((1, 2, 2, 0)[: 4 - low]) if high > 1 else low))

    def scalar(self) -> Scalar:
        """An index: a program id, a loop counter or a constant."""
        options = [*self.counters, *self.pids, Scalar("0", 0), Scalar("1", 1)]
        return self.choose(options)

    # -- source ------------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        self.lines.append("    " * (self.depth + 1) + text)

    def fresh(self, letter: str = "v") -> str:
        self.names += 1
        return f"{letter}{self.names}"

    def put(self, text: str, shape: Sequence[int], bound: float, dtype: str = "float32", exact: bool = False) -> V:
        """A new value; one that may be large is scaled down."""
        name = self.fresh()
        if bound > LIMIT:
            text, bound, exact = f"({text}) * {4 / bound:.3g}", 4.0, False
        self.line(f"{name} = {text}")
        self.pool.append(V(name, tuple(shape), dtype, bound, exact))
        return self.pool[-1]

    @contextlib.contextmanager
    def block(self, partial: bool = False):
        """An indented region; what is made inside leaves the scope."""
        mark, lines = len(self.pool), len(self.lines)
        self.depth, self.partial = self.depth + 1, self.partial + partial
        yield
        if len(self.lines) == lines:
            self.line("pass")
        self.depth, self.partial = self.depth - 1, self.partial - partial
        del self.pool[mark:]

    # -- values ------------------------------------------------------------------------------------------------------
    def pick(self, fits: Callable[[V], bool] = lambda v: True) -> V | None:
        """A value in scope, the latest ones more often."""
        found = [v for v in self.pool if fits(v)]
        return found[-1 - self.number(0, min(len(found), 4) - 1)] if found else None

    def find(self, fits: Callable[[V], bool] = lambda v: True, low: int = 0) -> V:
        v = self.pick(lambda v: len(v.shape) >= low and v.dtype == "float32" and fits(v))
        return v or self.load(tuple(self.choose(SIDES) for _ in range(max(low, 1))))

    def like(self, v: V, exact: bool = False) -> V:
        """Another value of the same type."""
        w = self.pick(lambda w: w.shape == v.shape and w.dtype == v.dtype and (w.exact or not exact))
        if w is not None and (w.name != v.name or self.chance(3)):
            return w
        return self.load(v.shape, v.dtype)

    def last(self, count: int) -> list[V]:
        return self.pool[-count:]

    def load(self, shape: tuple[int, ...], dtype: str = "float32") -> V:
        from .memory import load

        return load(self, shape, dtype)

    # -- arguments and results ---------------------------------------------------------------------------------------
    def new_input(self, shape: Sequence[int], dtype: str = "float32") -> str:
        data = self.rng.uniform(-2, 2, shape)
        self.narrow = self.narrow or dtype != "float32"
        self.inputs.append(
            Argument(self.fresh("x"), jax.device_put(np.asarray(data, np.float32).astype(jnp.dtype(dtype))))
        )
        return self.inputs[-1].name

    def new_ints(self, low: int, high: int, shape: Sequence[int] = ()) -> str:
        data = self.rng.integers(low, high + 1, shape)
        self.inputs.append(Argument(self.fresh("n"), jnp.asarray(data, jnp.int32)))
        return self.inputs[-1].name

    def new_output(self, shape: Sequence[int], dtype: str, init: float | None) -> str:
        self.outputs.append(Result(self.fresh("o"), tuple(shape), dtype, init))
        return self.outputs[-1].name

    def case(self) -> Case:
        names = [a.name for a in self.inputs] + [o.name for o in self.outputs]
        ids = [f"    {s.text} = jt.program_id({k})" for k, s in enumerate(self.pids)]
        source = "\n".join([f"def kernel({', '.join(names)}):", *ids, *self.lines]) + "\n"
        options = {
            "out_type": tuple(jax.ShapeDtypeStruct(o.shape, jnp.dtype(o.dtype)) for o in self.outputs),
            "grid": self.grid,
            "init": {o.name: o.init for o in self.outputs if o.init is not None and o.name not in self.alias.values()},
            "alias": self.alias,
        }
        return Case(source, {k: v for k, v in options.items() if v}, tuple(a.array for a in self.inputs), self.narrow)


def size(shape: Sequence[int]) -> int:
    return math.prod(shape)
