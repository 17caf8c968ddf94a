"""Loops and branches over traced values: `jt.range`, `jt.fori`, `jt.cond`, `jt.when`.

A counted loop becomes `lax.scan` (static bounds) or `lax.while_loop` (traced bounds) with the counter as first
carry, the form that `lax.fori_loop` has too, so JAX's own differentiation rules apply. What `jt.range` was told
about pipelining stands on the counter as `loop_hint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jtile._errors import KernelSyntaxError, KernelTypeError, KernelValueError
from jtile.language._numbers import kind_of, tile_of
from jtile.language._place import user_place
from jtile.language._primitives import loop_hint_p
from jtile.language._sizes import as_value, integer


@dataclasses.dataclass(frozen=True)
class Range:
    """What `jt.range(...)` gives: the bounds and hints of a tile loop. Only rewritten source can loop over it."""

    lo: Any
    hi: Any
    step: Any = 1
    stages: int | None = None
    unroll: int = 1

    @property
    def static(self) -> bool:
        return all(isinstance(v, int) for v in (self.lo, self.hi, self.step))

    def __iter__(self) -> Iterator[jax.Array]:
        raise KernelSyntaxError(
            "jt.range belongs in a for statement of a function that jtile has rewritten, and this is none: write the "
            "loop as a statement (no comprehension, list() or zip()), and decorate a helper with @jt.function; where "
            "there is no source (REPL, lambda, exec), write the function to a file, or register its text with "
            "linecache, or write jt.fori(n, body, init)",
            user_place(),
        )


def range_(*bounds, stages: int | None = None, unroll: int = 1) -> Range:
    """`for k in jt.range(n)`, `jt.range(lo, hi)`, `jt.range(lo, hi, step)`: a loop that runs on the device.

    The names that the body assigns and that are used later are its carry; they keep shape and dtype.

    Args:
      bounds: ints, Python's or traced int scalars, of either sign: the step too, as in the persistent loop
        `jt.range(jt.program_id(0), n, jt.num_programs(0))`. A traced step of 0 runs no round. The counter is int32, or
        int64 where a bound is.
      stages: ask for software pipelining with this many stages; never changes the meaning.
      unroll: ask for this many copies of the body.
    Returns:
      A `Range`, which stands in a `for` statement of a kernel.
    """
    if not 1 <= len(bounds) <= 3:
        raise KernelTypeError(f"jt.range takes n, or lo, hi, or lo, hi, step; got {len(bounds)} bounds", user_place())
    lo, hi = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    step = bounds[2] if len(bounds) == 3 else 1
    step = _bound(step, "the step")
    if isinstance(step, int) and step == 0:
        raise KernelValueError("the step of jt.range cannot be 0", user_place())
    for name, v in (("stages", stages), ("unroll", unroll)):
        if not (v is None and name == "stages") and (isinstance(v, bool) or not isinstance(v, int) or v < 1):
            raise KernelValueError(f"jt.range: {name} is a Python int of at least 1, got {v!r}", user_place())
    return Range(_bound(lo), _bound(hi), step, stages, unroll)


def _bound(v, what: str = "a bound") -> Any:
    v = as_value(v)
    if isinstance(v, int | np.integer) and not isinstance(v, bool):
        return int(v) if -(2**31) <= v < 2**31 else int(integer(v, "a bound of jt.range", "nest two loops"))
    if isinstance(v, bool) or not hasattr(v, "dtype") or not jnp.issubdtype(v.dtype, np.integer) or jnp.ndim(v):
        raise KernelTypeError(f"{what} of jt.range is an integer scalar, got {kind_of(v)}", user_place())
    return v


def counted(r: Range, body: Callable[[Any, list], list], init: list) -> list:
    """Run `body(k, carry) -> carry` for every k of `r`; `init` and the result are flat lists of arrays."""

    def step(k, carry):
        hinted = k if r.stages is None and r.unroll == 1 else loop_hint_p.bind(k, stages=r.stages, unroll=r.unroll)
        return hinted, tuple(body(hinted, list(carry)))

    if r.static:
        return _static_loop(r, step, init)
    if not isinstance(r.step, int):
        return _stepped(r, body, init)
    if r.step < 0:
        return _downward(r, body, init)
    dtype = _counter_dtype(r.lo, r.hi)
    lo, hi = (lax.convert_element_type(v, dtype) for v in (r.lo, r.hi))

    def advance(c):
        k, _, carry = c
        hinted, carry = step(k, carry)
        del hinted
        return k + dtype.type(r.step), c[1], carry

    return list(lax.while_loop(lambda c: lax.lt(c[0], c[1]), advance, (lo, hi, tuple(init)))[2])


def _static_loop(r: Range, step, init: list) -> list:
    n = len(range(r.lo, r.hi, r.step))
    dtype = np.dtype(
        np.int32 if min(r.lo, r.lo + n * r.step) >= -(2**31) and max(r.lo, r.lo + n * r.step) < 2**31 else np.int64
    )

    def advance(c, _):
        k, carry = c
        _, carry = step(k, carry)
        return (k + dtype.type(r.step), carry), None

    (_, out), _ = lax.scan(advance, (jnp.asarray(r.lo, dtype), tuple(init)), None, length=n)
    return list(out)


def _downward(r: Range, body, init: list) -> list:
    """Run a loop with a negative step and traced bounds by counting its rounds up."""
    dtype = _counter_dtype(r.lo, r.hi)
    lo, hi = (lax.convert_element_type(v, dtype) for v in (r.lo, r.hi))
    size = dtype.type(-r.step)
    rounds = lax.div(lax.max(lo - hi, dtype.type(0)) + size - dtype.type(1), size)
    up = Range(0, rounds, 1, r.stages, r.unroll)
    return counted(up, lambda t, c: body(lo - t * size, c), init)


def _stepped(r: Range, body, init: list) -> list:
    """Run a loop with a traced step by counting its rounds up. Nothing but the counter is greater than `hi - lo`."""
    dtype = _counter_dtype(r.lo, r.hi, r.step)
    lo, hi, step = (lax.convert_element_type(v, dtype) for v in (r.lo, r.hi, r.step))
    zero, one = dtype.type(0), dtype.type(1)
    gap = lax.select(lax.gt(step, zero), hi - lo, lo - hi)
    full = lax.div(lax.max(gap, one) - one, lax.max(lax.abs(step), one)) + one
    rounds = lax.select(lax.bitwise_and(lax.gt(gap, zero), lax.ne(step, zero)), full, lax.full_like(full, 0))
    up = Range(0, rounds, 1, r.stages, r.unroll)
    return counted(up, lambda t, c: body(lo + t * step, c), init)


def _counter_dtype(*bounds) -> np.dtype:
    wide = [v.dtype for v in bounds if hasattr(v, "dtype") and not getattr(v, "weak_type", False)]
    return np.dtype(np.int64) if any(np.dtype(d).itemsize == 8 for d in wide) else np.dtype(np.int32)


def fori(bounds, body: Callable, init: Any = None, *, stages: int | None = None, unroll: int = 1):
    """The tile loop as a function, for places whose source jtile cannot rewrite.

    Args:
      bounds: n, (lo, hi) or (lo, hi, step), as in `jt.range`.
      body: `(k, carry) -> carry`; with `init=None` it may return None.
      init: a pytree of arrays and numbers.
      stages, unroll: as in `jt.range`.
    Returns:
      The last carry.
    """
    r = bounds if isinstance(bounds, Range) else range_(*(bounds if isinstance(bounds, tuple) else (bounds,)))
    r = dataclasses.replace(r, stages=stages or r.stages, unroll=unroll if unroll != 1 else r.unroll)
    leaves, treedef = jax.tree.flatten(init)
    place = user_place()
    leaves = [tile_of(v, "the carry of jt.fori") for v in leaves]

    def flat(k, carry):
        out, got = jax.tree.flatten(body(k, treedef.unflatten(carry)))
        if got != treedef:
            raise KernelTypeError(f"the body of jt.fori gives {got}, but its carry is {treedef}", place)
        return [checked_carry("the carry of jt.fori", old, new, place) for old, new in zip(carry, out, strict=True)]

    return treedef.unflatten(counted(r, flat, leaves))


def checked_carry(what: str, old, new, place):
    """`new` as the next value of a loop carry `old`: it keeps shape and dtype, where Python numbers adapt."""
    new = tile_of(new, what)
    fits = new.shape == old.shape and (
        new.dtype == old.dtype
        or (old.weak_type and _adapts(old.dtype, new.dtype))  # lax gives the start the dtype of the rounds
        or (new.weak_type and _adapts(new.dtype, old.dtype))
    )
    if not fits:
        raise KernelTypeError(
            f"{what} changes its type in the loop: it was {spell(old)} and becomes {spell(new)}{_way_out(old, new)}",
            place,
        )
    return new if old.weak_type or new.dtype == old.dtype else lax.convert_element_type(new, old.dtype)


def _adapts(weak, strong) -> bool:
    """Whether a Python number of kind `weak` can become `strong` without losing its kind."""
    kinds = (np.integer, np.floating, np.complexfloating)
    rank = lambda d: next((k for k, kind in enumerate(kinds, 1) if jnp.issubdtype(d, kind)), 0)
    return rank(weak) <= rank(strong)


def _way_out(old, new) -> str:
    if new.shape != old.shape:
        return f"; start it with that shape, such as jt.zeros({new.shape}, jnp.{new.dtype})" if not old.shape else ""
    return f"; convert it with .astype(jnp.{old.dtype}), or start it as {new.dtype}"


def spell(v) -> str:
    return f"{v.dtype}[{','.join(map(str, v.shape))}]"


def scalar_condition(c, place, what: str):
    """A traced condition as a bool scalar; an error for anything else."""
    if jnp.ndim(c):
        raise KernelTypeError(
            f"{what} takes one bool, got a tile of shape {jnp.shape(c)}; reduce it with .any() or .all(), or "
            "select lanes with jnp.where",
            place,
        )
    return c if c.dtype == np.bool_ else lax.ne(c, jnp.zeros((), c.dtype))


def when(cond):
    """Guard stores by a condition: write `@jt.when(cond)` above `def _(): ...`, which runs only if `cond` is true.

    In a kernel whose source jtile can read, `if cond:` does the same.

    Args:
      cond: a bool, Python's or a traced scalar.
    """
    place = user_place()

    def run(fn: Callable[[], Any]) -> None:
        if not isinstance(cond, core.Tracer):
            if cond:
                fn()
            return

        def then():
            if fn() is not None:
                raise KernelTypeError("a function under @jt.when returns nothing; write jt.cond for a value", place)

        lax.cond(scalar_condition(cond, place, "jt.when"), then, lambda: None)

    return run


def cond(pred, true_fn: Callable, false_fn: Callable, *operands):
    """Choose between two functions: `true_fn(*operands) if pred else false_fn(*operands)`.

    Args:
      pred: a bool, Python's or a traced scalar.
      true_fn, false_fn: functions of the operands, whose results have the same structure, shapes and dtypes.
      operands: arrays, numbers, and pytrees of them.

    Returns:
      The result of the function that was chosen.
    """
    if not isinstance(pred, core.Tracer):
        return true_fn(*operands) if pred else false_fn(*operands)
    # The functions close over their operands, since operands of lax.cond cannot be Refs or views.
    pred = scalar_condition(pred, user_place(), "jt.cond")
    return lax.cond(pred, lambda: true_fn(*operands), lambda: false_fn(*operands))
