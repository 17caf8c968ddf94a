"""Loops whose condition is a tile: what `jax.vmap` makes of a `while` whose rounds differ by lane.

They become loops whose condition is a scalar: while any lane goes on, and every lane that has ended keeps its carry.
Where the lanes count, the loop counts the rounds of the one that has most, so that it is one that has a reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from jtile._parts import is_key
from jtile.language.control import Range, counted

Carry = list[Any]  # values, with None in the place of one that nobody needs


def run(cond: Callable[[Carry], Any], body: Callable[[Carry], Carry], init: Carry, counting: Any = None, *,
        lent: bool = False) -> Carry:  # fmt: skip
    """Run `while cond(carry): carry = body(carry)`, lane by lane.

    Args:
      cond: gives a tile of bools, whose axes are the first of every carry.
      counting: None, or `(place of the carry that counts, its step, limit)` of the form `while i < limit: i += step`;
        the limit is a value that no round changes.
      lent: where the lanes count, the body sees in those that have ended what it sees in one that goes on. Reverse mode
        needs it: the derivative of a round that a lane does not run may be infinite there (that of a root at 0), and
        times a cotangent of 0 it would be NaN.
    Returns:
      The last carry.
    """
    if counting is not None and counting[1] <= _STEP:
        return _counted(body, init, *counting, lent=lent)
    places = [k for k, x in enumerate(init) if x is not None]

    def spread(some: Sequence[Any]) -> Carry:
        at = dict(zip(places, some, strict=True))
        return [at.get(k) for k in range(len(init))]

    def step(now):
        goes_on, *some = now
        after = body(spread(some))
        kept = [_select(goes_on, after[k], x) for k, x in zip(places, some, strict=True)]
        return (cond(spread(kept)), *kept)

    any_lane = lambda now: lax.reduce_or(now[0], range(now[0].ndim))
    return spread(lax.while_loop(any_lane, step, (cond(init), *[init[k] for k in places]))[1:])


def _select(goes_on: Any, new: Any, old: Any) -> Any:
    """`new` in the lanes that go on, else `old`; the axes of `goes_on` are the first ones."""
    if new is old:
        return old
    return lax.select_n(lax.broadcast_in_dim(goes_on, old.shape, range(goes_on.ndim)), old, new)


def _lent(goes_on: Any, carry: Carry) -> Carry:
    """The carry with the values of the first lane that goes on in those that do not; some lane does."""
    axes = range(goes_on.ndim)
    numbers = lax.reshape(lax.iota(np.dtype(np.int32), goes_on.size), goes_on.shape)
    first = lax.reduce_min(lax.select(goes_on, numbers, lax.full_like(numbers, goes_on.size)), axes)
    chosen = lax.eq(numbers, lax.broadcast(first, goes_on.shape))

    def one(x: Any) -> Any:
        x = lax.stop_gradient(x)
        mine = lax.broadcast_in_dim(chosen, x.shape, axes)
        if x.dtype == np.bool_:
            value = lax.reduce_or(lax.bitwise_and(mine, x), axes)
        else:
            value = lax.reduce_sum(lax.select(mine, x, lax.full_like(x, 0)), axes)
        return lax.broadcast(value, goes_on.shape)

    plain = lambda x: x is not None and not is_key(x.dtype)
    return [_select(goes_on, x, one(x)) if plain(x) else x for x in carry]


_STEP = 2**15  # longer steps, whose sums may leave 32 bits, go the other way


def _counted(body: Callable[[Carry], Carry], init: Carry, place: int, step: int, limit: Any, *, lent: bool) -> Carry:
    start = init[place]
    rounds = _rounds(start, lax.broadcast_in_dim(limit, start.shape, range(limit.ndim)), step)
    moving = [k for k, x in enumerate(init) if x is not None and k != place]

    def spread(done: Any, some: Sequence[Any]) -> Carry:
        """The carry after `done` rounds of each lane; a lane that has ended counts no further."""
        count = lax.convert_element_type(lax.min(done, rounds), start.dtype)
        at = dict(zip(moving, some, strict=True)) | {place: lax.add(start, lax.mul(count, lax.full_like(start, step)))}
        return [at.get(k) for k in range(len(init))]

    def one(t, some):
        done = lax.broadcast(lax.convert_element_type(t, rounds.dtype), rounds.shape)
        goes_on = lax.lt(done, rounds)
        now = spread(done, some)
        seen = _lent(goes_on, now) if lent else now
        after = body(seen)
        kept = zip(moving, some, strict=True)  # only values that a round changes are carries of the loop
        return [x if after[k] is seen[k] else _select(goes_on, after[k], x) for k, x in kept]

    most = lax.reduce_max(rounds, range(rounds.ndim))
    return spread(rounds, counted(Range(0, most), one, [init[k] for k in moving]))


def _rounds(start: Any, limit: Any, step: int) -> Any:
    """How often each lane runs, in at least 32 bits.

    What bounds `start` and `limit` bounds the result, in terms that `jtile.transforms.ranges` follows; no difference
    leaves the dtype.
    """
    if np.iinfo(start.dtype).bits < 32:
        start, limit = (lax.convert_element_type(x, np.int32) for x in (start, limit))
    number = lambda v: lax.full_like(start, v)
    more = lambda a, b: lax.convert_element_type(lax.gt(a, b), start.dtype)
    info = np.iinfo(start.dtype)
    if info.min == 0:
        gap = lax.sub(limit, lax.min(start, limit))
        return gap if step == 1 else lax.add(lax.div(gap, number(step)), more(lax.rem(gap, number(step)), number(0)))
    if step == 1:  # a start further below the limit than the largest number is never counted to the end
        lowest = lax.sub(lax.max(limit, number(-1)), number(info.max))
        return lax.max(lax.sub(limit, lax.max(start, lowest)), number(0))
    whole = lax.sub(lax.div(limit, number(step)), lax.div(start, number(step)))
    left = lax.sub(lax.rem(limit, number(step)), lax.rem(start, number(step)))  # between -2 and 2 steps
    whole = lax.add(whole, lax.add(more(left, number(0)), more(left, number(step))))
    return lax.max(lax.sub(whole, more(number(1 - step), left)), number(0))
