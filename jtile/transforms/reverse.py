"""Reverse mode of a kernel body: one program runs it forwards, then backwards.

A sweep evaluates a jaxpr and keeps, for every active equation, how a cotangent of its results becomes one of its
operands. Backwards, a load adds to the cotangent Ref of what it loaded from, and a store takes its value's cotangent
out of the cotangent Ref of what it stored to. Rounds of a loop are swept again, one at a time, when the loop runs
backwards (see `reverse_control`); that second sweep has no effects on the primal Refs, and what it would load from Refs
that change meanwhile was saved by the first.

A cotangent may have more bits than the value it belongs to: sums are kept in the accumulator's dtype, and rounded only
where an equation of that dtype needs them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax

from jtile import ir
from jtile.language._equations import bind, place
from jtile.language._index import At, Span, Take, dims_shape
from jtile.language._primitives import atomic_p, dot_p, load_p, store_p
from jtile.transforms.activity import Activity, is_float, is_literal, is_ref
from jtile.transforms.evaluate import refuse, refuse_memory
from jtile.transforms.pulls import pull_of
from jtile.transforms.ranges import Ranges
from jtile.transforms.rescaling import Rescaled

Pull = Callable[[Sequence[Any]], list[Any]]  # cotangents of results (None: zero) -> cotangents of operands

ORDER = (
    "depends on the order of the programs, so that no derivative goes through it: jtile differentiates atomic_add "
    "whose old value is unused; give the kernel a rule of its own (defvjp), or stop the derivative of what it reads "
    "with jax.lax.stop_gradient"
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A Ref of the kernel in the reverse kernel.

    Attributes:
      primal: the Ref itself; None where nothing reads it.
      ct: the Ref of its cotangent; None where it has none.
      kind: `input`: never written. `once`: an output each element of which is written once and not read. `memory`: an
        output that is. `scratch`: memory of one program.
    """

    primal: Any
    ct: Any
    kind: str

    @property
    def changes(self) -> bool:
        return self.kind in ("memory", "scratch")


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a sweep runs.

    Attributes:
      effects: stores to primal Refs happen. Without, loads from Refs that change read what was saved.
      tape: the sweep can be pulled back.
      path: index of the round of each loop around, outermost first.
    """

    effects: bool
    tape: bool
    path: tuple[Any, ...] = ()


def wide(dtype: Any) -> np.dtype:
    """The dtype in which cotangents of `dtype` are summed."""
    return np.dtype(np.float64) if np.dtype(dtype) == np.float64 else np.dtype(np.float32)


def plus(a: Any, b: Any) -> Any:
    """The sum of two cotangents; None is zero."""
    if a is None or b is None:
        return b if a is None else a
    dtype = a.dtype if a.dtype == b.dtype else max(wide(a.dtype), wide(b.dtype), key=lambda d: d.itemsize)
    return lax.add(lax.convert_element_type(a, dtype), lax.convert_element_type(b, dtype))


def row(ref: Any, at: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """The index of `ref[*at]`."""
    rest = ref.shape[len(at) :]
    return (*[At()] * len(at), *[Span(n) for n in rest]), [*at, *[np.int32(0)] * len(rest)]


def read_row(ref: Any, at: Sequence[Any], like: Any = None) -> Any:
    """Load `ref[*at]`, as random keys where `like` is a value of random keys."""
    dims, values = row(ref, at)
    out = load_p.bind(ref, *values, dims=dims, pad=0, masked=False)
    if like is not None and _is_key(like.dtype):
        return jax.random.wrap_key_data(out, impl=jax.random.key_impl(like))
    return out


def write_row(ref: Any, at: Sequence[Any], value: Any) -> None:
    dims, values = row(ref, at)
    value = jax.random.key_data(value) if _is_key(value.dtype) else value
    store_p.bind(ref, *values, value, dims=dims, masked=False)


def _is_key(dtype: Any) -> bool:
    return dtypes.issubdtype(dtype, dtypes.prng_key)


def new_ref(shape: Sequence[int], dtype: Any, *, zero: bool = False) -> Any:
    """Scratch of the reverse kernel. Random keys are kept as their data."""
    plain = jax.ShapeDtypeStruct(tuple(shape), dtype)
    ref = jax.empty_ref(jax.eval_shape(jax.random.key_data, plain) if _is_key(dtype) else plain)
    if zero:
        write_row(ref, (), jnp.zeros(tuple(shape), dtype))
    return ref


class Reverse:
    """The reverse mode of one kernel; `saved` holds what loads from changing Refs gave, by equation, `rescaled` the
    loops that need no carries saved, by the `id` of theirs."""

    def __init__(self, activity: Activity, ranges: Ranges, rescaled: Mapping[int, Rescaled]):
        self.activity, self.ranges, self.rescaled = activity, ranges, rescaled
        self.saved: dict[int, Any] = {}

    def sweep(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], mode: Mode,
        given: Mapping[Any, Any] = MappingProxyType({}),
    ) -> tuple[list[Any], Pull]:  # fmt: skip
        """Evaluate a jaxpr; `args` are values, and `Slot`s for Refs. Pulling back is possible once, with a tape.
        `given`: variables that are constants, whatever they are computed from."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda v: v.val if is_literal(v) else env[v]
        tape: list[tuple[Any, Pull]] = []
        for eqn in jaxpr.eqns:
            if any(v in given for v in eqn.outvars):
                env.update((v, given[v]) for v in eqn.outvars)
                continue
            with place(eqn):
                rule = RULES.get(eqn.primitive.name, Reverse.pure)
                outs, back = rule(self, eqn, [read(v) for v in eqn.invars], mode)
            env.update(zip(eqn.outvars, outs, strict=True))
            if back is not None and mode.tape:
                tape.append((eqn, back))
        return [read(v) for v in jaxpr.outvars], lambda cts: _pull(jaxpr, tape, cts)

    # -- equations without effects --------------------------------------------------------------------------------
    def moving(self, eqn: Any) -> list[int]:
        return [k for k, v in enumerate(eqn.invars) if not is_literal(v) and not is_ref(v) and v in self.activity]

    def pure(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        moving = self.moving(eqn)
        if any(isinstance(x, Slot) and (moving or x.changes or x.ct is not None) for x in args):
            refuse_memory(eqn)
        args = [x.primal if isinstance(x, Slot) else x for x in args]
        if not moving or not mode.tape:
            return bind(eqn, args), None
        if rule := pull_of(eqn):
            (out,) = bind(eqn, args)

            def asked(cts):
                ct = _full(cts[0], eqn.outvars[0].aval)
                return _spread([rule(eqn, args, out, ct, k) for k in moving], moving, len(args))

            return [out], asked

        def fn(*some):
            at = dict(zip(moving, some, strict=True))
            return tuple(bind(eqn, [at.get(k, x) for k, x in enumerate(args)]))

        outs, pull = jax.vjp(fn, *[args[k] for k in moving])

        def back(cts):
            found = pull(tuple(_full(ct, v.aval) for ct, v in zip(cts, eqn.outvars, strict=True)))
            return _spread(found, moving, len(args))

        return list(outs), back

    def convert(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        """A cast, which leaves the cotangent as it is where both dtypes are floats."""
        outs = bind(eqn, args)
        if not self.moving(eqn) or not is_float(eqn.outvars[0]):
            return outs, None
        return outs, lambda cts: list(cts)

    def transpose(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        """A transpose of axes; a cotangent of more bits than the value keeps them, since elements only move."""
        outs = bind(eqn, args)
        if not self.moving(eqn):
            return outs, None
        back = [eqn.params["permutation"].index(k) for k in range(len(eqn.params["permutation"]))]
        return outs, lambda cts: [None if cts[0] is None else lax.transpose(cts[0], back)]

    def dot(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        """A product, `d(a b + acc)`: products run in the operands' dtype and sum in the accumulator's."""
        moving = self.moving(eqn)
        outs = bind(eqn, args)
        if not moving:
            return outs, None
        a, b, *_ = args
        dot = lambda x, y: dot_p.bind(x, y, **eqn.params)

        def back(cts):
            (g,) = cts
            found: list[Any] = [None] * len(args)
            for k in moving:
                if k == 0:
                    x, y = _operands(g, b)
                    found[0] = dot(x, _flip(y))
                elif k == 1:
                    y, x = _operands(g, a)
                    found[1] = dot(_flip(x), y)
                else:
                    found[2] = g
            return found

        return outs, back

    def nothing(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        """Leave out a print or an assert, which the kernel itself has done."""
        return [], None

    # -- memory -----------------------------------------------------------------------------------------------------
    def load(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        slot, *rest = args
        saved = self.saved.get(id(eqn))
        if slot.changes and not mode.effects:
            out = read_row(saved, mode.path)
        else:
            out = load_p.bind(slot.primal, *rest, **eqn.params)
            if saved is not None:
                write_row(saved, mode.path, out)

        def back(cts):
            self.add(slot, eqn, rest, cts[0])
            return [None] * len(args)

        return [out], back if slot.ct is not None else None

    def add(self, slot: Slot, eqn: Any, rest: Sequence[Any], ct: Any) -> None:
        """`slot.ct[index] += ct` at the index and mask of a load."""
        dims, masked = eqn.params["dims"], eqn.params["masked"]
        values, mask = rest[: len(dims)], rest[len(dims) :]
        ct = lax.convert_element_type(ct, slot.ct.dtype)
        if slot.kind == "scratch" and not any(isinstance(d, Take) for d in dims):
            old = load_p.bind(slot.ct, *values, *mask, dims=dims, pad=0, masked=masked)
            store_p.bind(slot.ct, *values, lax.add(old, ct), *mask, dims=dims, masked=masked)
        else:
            atomic_p.bind(slot.ct, *values, ct, *mask, fn="add", dims=dims, masked=masked)

    def store(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        slot, *rest = args
        if mode.effects and slot.primal is not None:
            store_p.bind(slot.primal, *rest, **eqn.params)
        if slot.ct is None:
            return [], None
        return [], lambda cts: self.taken(slot, eqn, rest, clear=slot.changes)

    def taken(self, slot: Slot, eqn: Any, rest: Sequence[Any], *, clear: bool) -> list[Any]:
        """The cotangent of what a store or an atomic add wrote; what a store overwrote gets none (`clear`)."""
        dims, masked = eqn.params["dims"], eqn.params["masked"]
        n = len(dims)
        values, mask = rest[:n], rest[n + 1 :]
        ct = load_p.bind(slot.ct, *values, *mask, dims=dims, pad=0, masked=masked)
        if clear:
            store_p.bind(slot.ct, *values, lax.full_like(ct, 0), *mask, dims=dims, masked=masked)
        found: list[Any] = [None] * len(eqn.invars)
        if eqn.invars[1 + n] in self.activity:
            stays = _last_lanes(slot.ct.shape, dims, values, mask) if eqn.primitive is store_p else None
            found[1 + n] = ct if stays is None else lax.select(stays, ct, lax.full_like(ct, 0))
        return found

    def atomic(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        slot, *rest = args
        (out,) = eqn.outvars
        fn = eqn.params["fn"]
        if out in self.activity.read:
            raise refuse(f"the old value of atomic_{fn} is used here, and it {ORDER}", eqn)
        if slot.ct is not None and fn != "add":
            raise refuse(f"what atomic_{fn} leaves {ORDER}", eqn)
        if mode.effects and slot.primal is not None:
            atomic_p.bind(slot.primal, *rest, **eqn.params)
        if slot.ct is None:
            return [None], None
        return [None], lambda cts: self.taken(slot, eqn, rest, clear=False)

    def alloc(self, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
        (v,) = eqn.outvars
        primal = bind(eqn, args)[0] if mode.effects else None
        return [self.scratch(v, primal, mode.tape)], None

    def scratch(self, v: Any, primal: Any, tape: bool) -> Slot:
        """The slot of scratch that variable `v` names."""
        ct = new_ref(v.aval.shape, wide(v.aval.dtype), zero=True) if tape and v in self.activity else None
        return Slot(primal, ct, "scratch")


def _pull(jaxpr: Any, tape: list[tuple[Any, Pull]], cts: Sequence[Any]) -> list[Any]:
    """Cotangents of a jaxpr's invars from those of its outvars (None: zero)."""
    found: dict[Any, Any] = {}

    def add(v, ct):
        if ct is not None and not is_literal(v) and is_float(v):
            found[v] = plus(found.get(v), ct)

    for v, ct in zip(jaxpr.outvars, cts, strict=True):
        add(v, ct)
    for eqn, back in reversed(tape):
        outs = [found.pop(v, None) for v in eqn.outvars]
        if eqn.outvars and all(ct is None for ct in outs) and not _writes(eqn):
            continue
        with place(eqn):
            back_cts = back(outs)
        for v, ct in zip(eqn.invars, back_cts, strict=True):
            add(v, ct)
    return [found.get(v) for v in jaxpr.invars]


def _writes(eqn: Any) -> bool:
    """Whether the pull of an equation must run though nobody asks for its results: it may have written to Refs."""
    return eqn.primitive.name in ("scan", "while", "cond", "jtile_atomic")


def _full(ct: Any, aval: Any) -> Any:
    """A cotangent as `jax.vjp` takes it."""
    if not dtypes.issubdtype(aval.dtype, np.inexact):
        return np.zeros(aval.shape, dtypes.float0)
    if ct is None:
        return jnp.zeros(aval.shape, aval.dtype)
    return lax.convert_element_type(ct, aval.dtype)


def _spread(found: Sequence[Any], places: Sequence[int], n: int) -> list[Any]:
    at = dict(zip(places, found, strict=True))
    return [at.get(k) for k in range(n)]


def _last_lanes(shape: Sequence[int], dims: Sequence[Any], values: Sequence[Any], mask: Sequence[Any]) -> Any:
    """Which lanes of a scattered tile stay, a tile of bools: of those that name one element, the last. None: all.

    Lanes write their number to scratch as they write their values to the Ref, and look whose number stands there;
    where the Ref's size is a runtime value, which scratch has none of, they are sorted.
    """
    takes = [(d, v, n) for d, v, n in zip(dims, values, shape, strict=True) if isinstance(d, Take)]
    if not takes:
        return None
    tile = dims_shape(dims, [np.shape(v) for v in values])
    if mask:  # whether a lane writes may differ along the other axes
        kept = [(d, v, n) for d, v, n in zip(dims, values, shape, strict=True) if not isinstance(d, At)]
        takes = [x if isinstance(x[0], Take) else (Span(x[0].size), np.int32(0), x[0].size) for x in kept]
    some, at, sizes = (tuple(x) for x in zip(*takes, strict=True))
    lanes = dims_shape(some, [np.shape(v) for v in at])
    order = lax.reshape(lax.iota(np.int32, math.prod(lanes)), lanes)
    if all(isinstance(n, int) for n in sizes):
        marks = new_ref(sizes, np.int32)
        store_p.bind(marks, *at, order, *mask, dims=some, masked=bool(mask))
        last = lax.eq(load_p.bind(marks, *at, *mask, dims=some, pad=0, masked=bool(mask)), order)
    else:
        last = _last_of_equals(_names(some, at, lanes) + [m.astype(np.int32) for m in mask], order)
    first = sum(not isinstance(d, At) for d in dims[: next(k for k, d in enumerate(dims) if isinstance(d, Take))])
    return last if mask else lax.broadcast_in_dim(last, tile, range(first, first + len(lanes)))


def _names(dims: Sequence[Any], values: Sequence[Any], lanes: Sequence[int]) -> list[Any]:
    """What tells the lanes of a tile of Takes and Spans apart: integer tiles of its shape."""
    out = []
    rank = next(np.ndim(v) for d, v in zip(dims, values, strict=True) if isinstance(d, Take))
    first = next(k for k, d in enumerate(dims) if isinstance(d, Take))
    axis, taken = 0, False
    for d, v in zip(dims, values, strict=True):
        if isinstance(d, Take):
            out.append(lax.broadcast_in_dim(v, lanes, range(first, first + rank)))
            axis, taken = axis + (0 if taken else rank), True
        else:
            out.append(lax.broadcasted_iota(np.int32, lanes, axis))
            axis += 1
    return out


def _last_of_equals(names: Sequence[Any], order: Any) -> Any:
    """Where the last of the lanes stands that have equal names, by sorting: no memory of the size of the Ref."""
    n = math.prod(order.shape)
    *keys, place = lax.sort([lax.reshape(x, (n,)) for x in (*names, order)], num_keys=len(names) + 1)
    changes = [lax.ne(x[1:], x[:-1]) for x in keys]
    ends = jnp.concatenate([functools.reduce(lax.bitwise_or, changes), jnp.ones((1,), bool)])
    _, ends = lax.sort([place, ends.astype(np.int32)], num_keys=1)
    return lax.reshape(ends, order.shape) != 0


def _flip(x: Any) -> Any:
    return lax.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _operands(g: Any, other: Any) -> tuple[Any, Any]:
    """A cotangent and the tile that it is multiplied with, in the one dtype that a matrix unit takes: the tile's, or
    bfloat16 where that has fewer bits. The range of float16 is too small for a wider cotangent."""
    dtype = other.dtype if ir.dtype_info(other.dtype).bits >= 16 else jnp.bfloat16
    dtype = g.dtype if dtype == np.float16 else dtype
    return lax.convert_element_type(g, dtype), lax.convert_element_type(other, dtype)


RULES: dict[str, Callable[..., tuple[list[Any], Pull | None]]] = {
    "jtile_load": Reverse.load,
    "jtile_store": Reverse.store,
    "jtile_atomic": Reverse.atomic,
    "jtile_dot": Reverse.dot,
    "jtile_print": Reverse.nothing,
    "jtile_assert_": Reverse.nothing,
    "convert_element_type": Reverse.convert,
    "transpose": Reverse.transpose,
    "empty_ref": Reverse.alloc,
}
