"""jaxpr over Refs to Tile IR: the walk over equations, and the table of rules (`@rule("add")`) that the files in
`jtile/trace/rules` fill."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jtile import ir
from jtile._collector import paused
from jtile._compat import make_jaxpr
from jtile._errors import KernelTypeError, KernelValueError, UnsupportedError, VerificationError
from jtile.ir.block import level_of
from jtile.ir.builder import Builder
from jtile.ir.types import ROLES
from jtile.language._place import place_of
from jtile.trace.roles import RoleBuilder

RULES: dict[str, Callable[..., Any]] = {}


def rule(*names: str):
    """Register a rule for JAX primitives: `fn(c, *values, **params)` gives a value, or a list of values."""

    def register(fn):
        for n in names:
            RULES[n] = fn
        return fn

    return register


@dataclasses.dataclass(frozen=True)
class Keys:
    """A tile of random keys: one uint32 tile for every word of a key."""

    words: tuple[ir.Value, ...]


AnyValue = ir.Value | Keys


class Lowering:
    """The state of one kernel's lowering. `b` appends ops; `eqn` is the equation at hand."""

    def __init__(self, name: str, grid: Sequence[int]):
        self.name, self.grid = name, tuple(grid)
        self.b = Builder()
        self.roles = RoleBuilder(self.b)
        self.counters: dict[str, int] = {}  # the number of counters of each name
        self.devices: dict[str, int] = {}  # the number of devices along each axis of the mesh that the kernel names
        self.eqn: Any = None
        self._words = False  # whether a rule runs on one word of its keys: the dtype of keys then reads as uint32
        self._pinned: Any = None  # source place of everything inside a call of JAX's own functions
        self._used: set[Any] = set()  # variables that the jaxpr at hand reads

    # -- types of the equation at hand ---------------------------------------------------------------------------
    @property
    def out(self) -> ir.TileType:
        """Type of the first result."""
        return self.tile_type(self.eqn.outvars[0].aval)

    @property
    def outs(self) -> list[ir.TileType]:
        return [self.tile_type(v.aval) for v in self.eqn.outvars]

    def aval(self, k: int):
        return self.eqn.invars[k].aval

    def is_used(self, k: int) -> bool:
        """Whether anything reads result k of the equation at hand."""
        return self.eqn.outvars[k] in self._used

    def tile_type(self, aval) -> ir.TileType:
        if not all(isinstance(n, int) for n in aval.shape):
            shape = ", ".join(map(str, aval.shape))
            raise KernelTypeError(
                f"a tile of shape ({shape}) has a dynamic size, and the shape of a tile is static: cover the dimension "
                "with tiles (x.tiles(64) and jt.range over its shape)",
                self.place,
            )
        return ir.TileType(tuple(aval.shape), self.dtype(aval.dtype))

    def dtype(self, dtype) -> str:
        known = ir.BY_NUMPY.get(dtype)
        if known is not None:
            return known.name
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            name = "uint32" if self._words else str(dtype)
        else:
            name = np.dtype(dtype).name
        if name not in ir.DTYPES:
            raise UnsupportedError(f"dtype {name} is not one of the language's ({', '.join(ir.DTYPES)})", self.place)
        return name

    @property
    def place(self) -> tuple[str, int] | None:
        if self._pinned is not None:
            return self._pinned
        return place_of(self.eqn.source_info) if self.eqn is not None else None

    # -- errors ----------------------------------------------------------------------------------------------------
    def unsupported(self, why: str) -> UnsupportedError:
        """The error for an equation that cannot become Tile IR; `why` ends with the nearest way."""
        return UnsupportedError(f"{self.eqn.primitive.name}: {why}", self.place)

    # -- building ----------------------------------------------------------------------------------------------------
    def add(self, op: ir.Op) -> ir.Value:
        return self.b.value(op)

    def map(self, fn: str, *args: ir.Value) -> ir.Value:
        return self.b.map(fn, *args)

    def full(self, value, like: ir.TileType) -> ir.Value:
        return self.b.full(value, like.shape, like.dtype)

    def splat(self, x: ir.Value, shape) -> ir.Value:
        """An operand of an elementwise function at the result's shape: scalars and axes of length 1 are repeated."""
        dims = tuple(range(x.type.rank))
        return x if x.type.shape == tuple(shape) else self.add(ir.Broadcast(x, tuple(shape), dims))

    def literal(self, value) -> Any:
        """The value of a literal or a captured constant, as Tile IR."""
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            data = np.asarray(jax.random.key_data(value))
            return Keys(tuple(self.literal(data[..., k]) for k in range(data.shape[-1])))
        x = np.asarray(value)
        dtype = self.dtype(x.dtype)
        first = x.reshape(-1)[0] if x.size else np.zeros((), x.dtype)[()]
        if x.size <= 1 or _uniform(x):
            return self.b.full(number(first), x.shape, dtype)
        return self.add(ir.Dense(tuple(number(v) for v in x.reshape(-1)), x.shape, dtype))

    def call(self, fn: Callable[..., Any], *args: ir.Value) -> list[ir.Value]:
        """Inline a jnp function of tiles: it is traced and lowered at this place."""
        structs = [jax.ShapeDtypeStruct(a.type.shape, ir.DTYPES[a.type.dtype].numpy) for a in args]
        closed = make_jaxpr(fn)(*structs)
        with self._pin():
            return self.run(closed.jaxpr, [self.literal(c) for c in closed.consts], list(args))

    @contextlib.contextmanager
    def _pin(self) -> Iterator[None]:
        """A block in which every equation has the place of the one at hand: what runs is not the user's source."""
        old, self._pinned = self._pinned, self.place
        yield
        self._pinned = old

    # -- the walk ----------------------------------------------------------------------------------------------------
    def run(self, jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Lower a jaxpr's equations; gives the values of its outputs."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda v: self.literal(np.asarray(v.val, v.aval.dtype)) if hasattr(v, "val") else env[v]
        outer, outer_used = self.eqn, self._used
        self._used = {v for e in jaxpr.eqns for v in e.invars if not hasattr(v, "val")}
        self._used |= {v for v in jaxpr.outvars if not hasattr(v, "val")}
        for eqn in jaxpr.eqns:
            self.eqn = eqn
            place, around = self.place, self.b.loc
            self.b.loc = ir.Loc(*place) if place else around
            env.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
            self.b.loc = around
        self.eqn, self._used = outer, outer_used
        return [read(v) for v in jaxpr.outvars]

    def closed(self, closed, args: Sequence[Any]) -> list[Any]:
        """Inline a closed jaxpr, or an open one without constants."""
        consts = [self.literal(c) for c in getattr(closed, "consts", ())]
        return self.run(getattr(closed, "jaxpr", closed), consts, args)

    def called(self, closed, args: Sequence[Any]) -> list[Any]:
        """Inline a function that was called. JAX traces its own (`jnp.where`) once and keeps the lines of that
        first call, so the line of this call counts instead."""
        if not is_jax_function(getattr(closed, "jaxpr", closed)):
            return self.closed(closed, args)
        with self._pin():
            return self.closed(closed, args)

    def _equation(self, eqn, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name not in RULES:
            raise self.unsupported(
                "jtile has no rule for this primitive inside a kernel; compute it outside, or build it from other "
                "jnp functions"
            )
        place = self.place
        self.roles.check(values, self.b.loc)
        try:
            keys = any(isinstance(v, Keys) for v in values)
            out = self._keys(name, values) if keys else RULES[name](self, *values, **eqn.params)
        except VerificationError as e:
            types = ", ".join(str(getattr(v, "type", "keys")) for v in values)
            raise UnsupportedError(f"{name} of {types}: {e.message}", place) from e
        return list(out) if isinstance(out, list | tuple) else [out]

    def _keys(self, name: str, values: list[Any]) -> Any:
        """Lower a primitive with random keys among its operands: those about keys know them, those that only move
        elements act on every word."""
        fn = RULES[name]
        if getattr(fn, "takes_keys", False):
            return fn(self, *values, **self.eqn.params)
        if name not in KEY_MOVERS:
            raise self.unsupported("random keys cannot be computed with; use jax.random functions on them")
        count = next(len(v.words) for v in values if isinstance(v, Keys))
        outs = []
        for w in range(count):
            self._words = True
            got = fn(self, *[v.words[w] if isinstance(v, Keys) else v for v in values], **self.eqn.params)
            self._words = False
            outs.append(got if isinstance(got, list | tuple) else [got])
        return [Keys(tuple(o)) for o in zip(*outs, strict=True)]


KEY_MOVERS = frozenset(
    [
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "transpose",
        "concatenate",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "select_n",
        "rev",
        "gather",
        "copy",
        "copy_p",
        "unstack",
        "split",
        "optimization_barrier",
        "expand_dims",
    ]
)


_JAX = os.path.dirname(jax.__file__) + os.sep


def is_jax_function(jaxpr) -> bool:
    return (getattr(jaxpr.debug_info, "func_filename", None) or "").startswith(_JAX)


def number(v) -> float | int | bool:
    """A NumPy scalar as a Python number; one NaN object, so that equal kernels compare equal."""
    d = ir.dtype_info(np.asarray(v).dtype)
    if d.kind == "b":
        return bool(v)
    if d.kind in "iu":
        return int(v)
    out = float(v)
    return math.nan if math.isnan(out) else out


def _uniform(x: np.ndarray) -> bool:
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1)
    return bool((raw == raw[0]).all())


def to_tile_ir(
    jaxpr, *, name: str, n_in: int, n_out: int, grid, aliases=(), inits=(), ref_names=None, loc=None, shared=()
) -> ir.Kernel:
    """Tile IR of a kernel's jaxpr.

    Args:
      jaxpr: what `trace` gave: Ref inputs in the order inputs, outputs, scratch.
      name: the name of the kernel.
      n_in, n_out: how many Refs are inputs and outputs; the rest is scratch.
      grid: number of programs per axis, ints.
      aliases: pairs (input, output) that share a buffer.
      inits: per output its start number, or None.
      ref_names: a name per Ref, for errors and for the printed IR.
      loc: `ir.Loc` or `(file, line)` of the kernel.
      shared: pairs (Ref, role) of those behind the outputs that every device has.
    Raises:
      UnsupportedError: a primitive or dtype that Tile IR has not, with the source line and the nearest way.
    """
    load_rules()
    c = Lowering(name, grid)
    total = len(jaxpr.jaxpr.invars) if hasattr(jaxpr, "jaxpr") else len(jaxpr.invars)
    names = list(ref_names or [f"r{k}" for k in range(total)])
    params = []
    for k, var in enumerate(jaxpr.jaxpr.invars):
        role = "in" if k < n_in else "out" if k < n_in + n_out else dict(shared).get(k, "scratch")
        params.append(ir.Value(ir.RefType(sizes(var.aval.shape), c.dtype(var.aval.dtype), role), names[k]))
    loc = loc if isinstance(loc, ir.Loc) else ir.Loc(*loc) if loc else ir.NOWHERE
    with paused(), c.b.at(loc):
        c.run(jaxpr.jaxpr, [c.literal(x) for x in jaxpr.consts], params)
        c.roles.finish()
    inits = tuple(inits) or (None,) * n_out
    params.sort(key=lambda v: ROLES.index(v.type.role))
    if not c.devices and c.roles.roles and any(v.type.role in ("signal", "symmetric") for v in params):
        c.devices[ir.ALONE] = 1
    kernel = ir.Kernel(
        name, tuple(params), sizes(grid), c.b.block, tuple(map(tuple, aliases)), inits, loc,
        devices=tuple(c.devices.items()),
    )  # fmt: skip
    return _verified(kernel) if c.roles.roles or kernel.devices or kernel.shared else kernel


def _verified(kernel: ir.Kernel) -> ir.Kernel:
    """Verify a kernel at block level, or one that talks to other devices: its author may be wrong in more ways than
    its cards see."""
    try:
        ir.verify(kernel, level_of(kernel))
    except VerificationError as e:
        raise KernelValueError(e.message, e.where) from e
    return kernel


def sizes(shape: Sequence[Any]) -> tuple[ir.Size, ...]:
    """Sizes as Tile IR has them: ints, and JAX's symbolic dimensions as extents."""
    return tuple(int(n) if isinstance(n, int | np.integer) else ir.parse_size(str(n)) for n in shape)


@functools.cache
def load_rules() -> dict[str, Callable[..., Any]]:
    """Import the files that fill the table; gives the table."""
    from jtile.trace import rules

    del rules
    return RULES


__all__ = ["RULES", "Keys", "Lowering", "is_jax_function", "load_rules", "number", "rule", "to_tile_ir"]
