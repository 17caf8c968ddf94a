"""The block level: roles, asynchronous copies and products, what they wait for. Memory and barriers: `shared`.

Each function is one mechanism of Hopper and one card of `jtile.ir.block`, whose docstring is its meaning.
"""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import jax
import numpy as np

from jtile import ir
from jtile._errors import KernelSyntaxError, KernelTypeError, KernelValueError
from jtile.ir.block import holds
from jtile.language import _block_primitives as prims
from jtile.language import _level
from jtile.language._index import Access, Span, Take
from jtile.language._numbers import tile_of
from jtile.language._place import user_place
from jtile.language.atomics import Place
from jtile.language.refs import Ref, TileView, _operands, _tracer, _writable, as_ref
from jtile.language.shared import Barrier, BarrierRound, BarrierSlot, Shared, checked, condition, typed

# -- roles ------------------------------------------------------------------------------------------------------------


class role:  # noqa: N801 (`with jt.role(...)`)
    """`with jt.role("producer", warps=1, registers=24):` what stands below is run by these warps of the block.

    All roles run at once, and the kernel ends when all have ended. Outside of roles stand `jt.alloc`, `jt.barrier` and
    arithmetic of scalars, which all roles see. A role stands in the body of the kernel itself, or of a function that it
    calls, not in a loop, branch or other role.

    Args:
      name: what errors and profiles call it.
      warps: 1, 2, 4 or 8; of the first role 4 or 8: it is the warps that the kernel starts with.
      registers: for each thread, a multiple of 8 from 24 to 240; 0: what is left. A block whose roles all name them,
        and no more than three quarters of a multiprocessor's, takes no more, so that another may stand beside it.
      early: the role may start before the kernels in front of this one have ended, and the others wait for them. Until
        it waits, too (`jt.wait_for_kernels`), it writes no array, and what it reads must not be written by the kernel
        in front, which nobody checks: weights that are operands of the whole program, say. Where launches do not
        overlap, it makes no difference.
    """

    def __init__(self, name: str, warps: int = 4, registers: int = 0, early: bool = False):
        if not isinstance(name, str) or not name.isidentifier():
            raise KernelTypeError(f"a role has a name like 'producer', got {name!r}", user_place())
        for v, what in ((warps, "warps"), (registers, "registers")):
            if isinstance(v, bool) or not isinstance(v, int | np.integer):
                raise KernelTypeError(f"role {name!r}: {what} is a Python int, got {v!r}", user_place())
        if not isinstance(early, bool):
            raise KernelTypeError(f"role {name!r}: early is True or False, got {early!r}", user_place())
        self.name, self.warps, self.registers, self.early = name, int(warps), int(registers), early

    def __enter__(self) -> None:
        level = _level.at_block_level("jt.role")
        if level.role is not None:
            raise KernelSyntaxError(
                f"role {self.name!r} stands inside of role {level.role!r}; roles stand side by side", user_place()
            )
        if self.name in level.roles:
            raise KernelValueError(f"two roles are called {self.name!r}; give each its own name", user_place())
        lead = [("", 4, 0)] if level.roles else []  # a role in front: the first role has rules that this one has not
        names, warps, registers = zip(*lead, (self.name, self.warps, self.registers), strict=True)
        checked(f"role {self.name!r}", ir.Roles(names, warps, registers, tuple(ir.Block() for _ in names)))
        named = _memory_of(sys._getframe(1))
        handles = [handle for _, handle in named]
        names = tuple(name for name, _ in named)
        head = dict(name=self.name, warps=self.warps, registers=self.registers, early=self.early)
        prims.role_begin_p.bind(*handles, **head, names=names)
        level.role = self.name
        level.roles.append(self.name)
        self._before = _traced(sys._getframe(1))

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            prims.role_end_p.bind()
            level = _level.at_block_level("jt.role")
            level.role = None
            new = [v for v in _traced(sys._getframe(1)) if not any(v is old for old in self._before)]
            level.left += [(v, self.name) for v in new]


def _traced(frame: FrameType) -> list[Any]:
    """The traced values that a function's variables hold."""
    return [v for v in frame.f_locals.values() if isinstance(v, jax.core.Tracer)]


def _memory_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Names and handles of the buffers and barriers that a function's variables hold, for errors and printed IR."""
    out = []
    for name, value in frame.f_locals.items():
        many = isinstance(value, list | tuple)
        for k, x in enumerate(value if many else (value,)):
            if isinstance(x, Shared | Barrier):
                out.append((f"{name}{k}" if many else name, x.memory))
    return out


def role_barrier() -> None:
    """A barrier for the threads of this role: after it, each thread sees what any of them stored before it."""
    _level.in_role("jt.role_barrier")
    prims.role_barrier_p.bind()


def wait_for_kernels(*, hold: bool = False) -> None:
    """Wait, in an early role, until the kernels in front of this one have ended.

    What stands behind it sees their results, and may write arrays. A kernel whose roles are all early lets the one
    behind it start at once, so that early roles there overlap with the kernels in front of this one, too. Where
    launches do not overlap, it does nothing.

    Args:
      hold: the kernel behind is let start after this wait, so that its early roles, and those of all kernels behind it,
        see what the kernels in front of this one have written.
    """
    _level.in_role("jt.wait_for_kernels")
    prims.kernels_wait_p.bind(hold=hold)


def fence_shared() -> None:
    """Make what this role has stored to shared memory visible to asynchronous copies and products that start later."""
    _level.in_role("jt.fence_shared")
    prims.fence_shared_p.bind()


def clock() -> jax.Array:
    """A running clock of this multiprocessor, of which only differences have a meaning.

    Returns:
      Nanoseconds, an int64 scalar.
    """
    _level.in_role("jt.clock")
    return prims.clock_p.bind()


# -- asynchronous copies ----------------------------------------------------------------------------------------------


def async_copy(
    src: Any, dst: Any, barrier: Any = None, *, fn: str = "set", when: Any = None, evict: str | None = None
) -> None:
    """Start a copy of a tile between an array and shared memory, by a tensor map.

    Args:
      src, dst: a place in an array (`v.at[i, k]` of a tile view, `x.at[jt.ds(r, n), :]` of a Ref) and a buffer, in this
        or the other order. The buffer has the shape of the tile, or is a matrix with the rows of a tile of more axes,
        one below the other.
      barrier: to a buffer: `bar[s]` or `bar.at(it)`, where the bytes of the buffer count when they have come.
      fn: to an array: `"set"`, or `"add"`, `"min"`, `"max"`: combine with what is there, atomic for each element.
      when: to a buffer: a bool scalar; where it is false nothing is copied.
      evict: to a buffer: whether a cache may forget what was read before other things ("first") or after them ("last");
        None: as usual. No result depends on it.

    Lanes outside the array give zeros, or NaN where the view has `pad=nan`, and are not written. Copies to arrays are
    waited for with `jt.store_wait`.
    """
    _level.in_role("jt.async_copy")
    to_buffer = isinstance(src, Place) and isinstance(dst, Shared)
    if evict not in ((None, "first", "last") if to_buffer else (None,)):
        raise KernelValueError(
            f'jt.async_copy: evict is "first" or "last", or None, for copies to shared memory, got {evict!r}',
            user_place(),
        )
    if to_buffer:
        return _async_load(src, dst, barrier, fn, when, evict)
    if isinstance(src, Shared) and isinstance(dst, Place):
        return _async_store(src, dst, barrier, fn, when)
    show = lambda x: f"a place in {x.x.name}" if isinstance(x, Place) else repr(x)
    raise KernelTypeError(
        "jt.async_copy goes from a place in an array (x.tiles(64, 64).at[i, k], x.at[jt.ds(r, 64), :]) to a buffer of "
        f"shared memory or back, got {show(src)} and {show(dst)}",
        user_place(),
    )


def _place(place: Place, buffer: Shared) -> tuple[Ref | TileView, Access]:
    """The access of a copy, which fits the buffer and can be said by a tensor map."""
    x = as_ref(place.x)
    a = x.access(place.index)
    what = f"a copy of a tile of {x.name}"
    if any(isinstance(d, Take) for d in a.dims):
        raise KernelTypeError(f"{what} takes no gather: load the elements and store them to the buffer", user_place())
    if a.reverse or a.new or a.perm != tuple(range(len(a.perm))):
        raise KernelTypeError(f"{what} reads axes forwards and in order, and adds none", user_place())
    if any(isinstance(d, Span) and d.stride != 1 for d in a.dims):
        raise KernelTypeError(f"{what} has steps of 1; load the elements and store them to the buffer", user_place())
    if x.dtype != buffer.dtype or not holds(buffer.shape, tuple(a.raw_shape)):
        raise KernelTypeError(
            f"{what} is {x.dtype.name}{list(a.raw_shape)}, the buffer is {buffer.dtype.name}{list(buffer.shape)}; make "
            "them the same, or take a matrix that has the rows of a tile of more axes one below the other",
            user_place(),
        )
    return x, a


def _async_load(src: Place, dst: Shared, barrier: Any, fn: str, when: Any, evict: str | None) -> None:
    if not isinstance(barrier, BarrierSlot | BarrierRound):
        raise KernelTypeError(
            "a copy to shared memory names the barrier that counts its bytes, bar[s] or bar.at(round), got "
            f"{barrier!r}",
            user_place(),
        )
    if fn != "set":
        raise KernelValueError(f"a copy to shared memory sets it; fn={fn!r} is for copies to arrays", user_place())
    handle = dst.handle
    x, a = _place(src, dst)
    pad = x.pad if isinstance(x, TileView) else 0
    if pad != 0 and not math.isnan(pad):
        raise KernelValueError(
            f"lanes outside {x.name} give 0 or nan in an asynchronous copy, not {pad}; mask the tile after it is "
            "loaded from shared memory",
            user_place(),
        )
    prims.async_load_p.bind(
        _tracer(x), *_operands(a), handle, barrier.barrier.memory, barrier.at, *condition(when, "when"), dims=a.dims,
        pad=pad, evict=evict,
    )  # fmt: skip


def prefetch(src: Any, dst: Any, *, when: Any = None) -> None:
    """Ask the second-level cache for what a copy of a tile to shared memory would read, so that it comes sooner later.

    Args:
      src, dst: as `jt.async_copy` takes them: a place in an array, and a buffer of its shape, which stays as it is.
      when: a bool scalar; where it is false nothing is asked for.

    No result depends on it. So early roles may ask for what kernels in front of this one still write, and for places
    that follow from what these write: an old number makes it useless, not wrong.
    """
    _level.in_role("jt.prefetch")
    if not isinstance(src, Place) or not isinstance(dst, Shared):
        raise KernelTypeError(
            "jt.prefetch takes a place in an array (x.tiles(64, 64).at[i, k], x.at[jt.ds(r, 64), :]) and the buffer of "
            f"shared memory that a copy of it would go to, got {src!r} and {dst!r}",
            user_place(),
        )
    handle = dst.handle
    x, a = _place(src, dst)
    prims.prefetch_p.bind(_tracer(x), *_operands(a), handle, *condition(when, "when"), dims=a.dims)


def _async_store(src: Shared, dst: Place, barrier: Any, fn: str, when: Any) -> None:
    if barrier is not None or when is not None:
        raise KernelTypeError(
            "a copy to an array has neither barrier nor when=: it is waited for with jt.store_wait, and an `if` guards "
            "it",
            user_place(),
        )
    if fn not in ("set", "add", "min", "max"):
        raise KernelValueError(f"jt.async_copy: fn is set, add, min or max, got {fn!r}", user_place())
    handle = src.handle
    _writable(dst.x, "copy to")
    x, a = _place(dst, src)
    prims.async_store_p.bind(_tracer(x), *_operands(a), handle, dims=a.dims, fn=fn)


def store_wait(pending: int = 0) -> None:
    """Wait until this role's copies to arrays have read their buffers, so that these may be written again.

    Args:
      pending: how many of the last copies need not have read theirs yet, a Python int.
    """
    _level.in_role("jt.store_wait")
    checked("jt.store_wait", ir.StoreWait(_pending(pending)))
    prims.store_wait_p.bind(pending=pending)


def _pending(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise KernelTypeError(f"pending is a Python int, got {n!r}", user_place())
    return int(n)


# -- products ---------------------------------------------------------------------------------------------------------


def dot_async(
    a: Any, b: Any, acc: Any = None, *, keep: Any = None, fast: bool = False, places: Any = None
) -> jax.Array:
    """Start `acc + a @ b` on the tensor cores.

    Args:
      a: [m, k], a tile (in registers) or a buffer.
      b: a buffer [k, n]; transposed ones with `.T`. A part of one, whose columns begin with the buffer's and are a
        multiple of 8, adds to the first columns of `acc`, and leaves the others.
      acc: tile [m, n] of float32 (int32 for ints), or None for zero.
      keep: bool scalar: where it is false, `acc` counts as zero.
      fast: sum 8-bit floats in the tensor cores' own accumulators, of about 22 bits, all the way; else in float32
        every 128 terms.
      places: uint8 [m, k / 8]: a is a matrix of which two of every four numbers along k are zero, and holds the others
        [m, k / 2], a buffer of 16-bit floats. Two bits for each of these, four numbers a byte, the first in the lowest
        bits, say at which of its four places it stands; those of a group ascend. A `jt.dot_wait` with `pending=0`
        stands behind such a product in its block (the body of the same loop or branch).
    Returns:
      The sum in flight: it may be the accumulator of a further product, carried by a loop, or given to `jt.dot_wait`;
      it is a tile after that. Buffers that it reads may not be overwritten before.
    """
    _level.in_role("jt.dot_async")
    a = a if isinstance(a, Shared) else _tile(a, "a")
    b = b if isinstance(b, Shared) else _tile(b, "b")
    if not isinstance(b, Shared):
        raise KernelTypeError(
            "jt.dot_async: b is a buffer of shared memory (its rows are read by all warps), got a tile; store it to "
            "one first: X.store(b); jt.fence_shared(); jt.role_barrier()",
            user_place(),
        )
    accs = [] if acc is None else [_tile(acc, "acc")]
    keeps = condition(keep, "keep")
    codes = [] if places is None else [_tile(places, "places")]
    given = [typed(xs[0]) if xs else None for xs in (accs, keeps, codes)]
    (type,) = checked("jt.dot_async", ir.DotAsync(typed(a), typed(b), *given[:2], fast, given[2]))
    operands = [x.handle if isinstance(x, Shared) else x for x in (a, b)]
    has = (bool(accs), bool(keeps), bool(codes))
    return prims.dot_async_p.bind(*operands, *accs, *keeps, *codes, type=type, has=has, fast=bool(fast))


def dot_wait(*values: Any, pending: int = 0) -> Any:
    """Wait until at most `pending` products of this role run; they end in the order of their start.

    Args:
      values: what `jt.dot_async` gave.
      pending: how many products, the last ones to start, may still run.
    Returns:
      The same values (one: the value itself); those whose products have ended are tiles now, others are still in
      flight.
    """
    _level.in_role("jt.dot_wait")
    tiles = tuple(_tile(v, "a value of jt.dot_wait") for v in values)
    checked("jt.dot_wait", ir.DotWait(tuple(map(typed, tiles)), _pending(pending)))
    out = prims.dot_wait_p.bind(*tiles, pending=int(pending))
    return out[0] if len(out) == 1 else tuple(out) if out else None


def _tile(x: Any, what: str) -> jax.Array:
    if isinstance(x, Ref):
        raise KernelTypeError(f"{what} is the Ref {x.name}; copy it to shared memory with jt.async_copy", user_place())
    return tile_of(x, what)


__all__ = [
    "async_copy",
    "clock",
    "dot_async",
    "dot_wait",
    "fence_shared",
    "prefetch",
    "role",
    "role_barrier",
    "store_wait",
    "wait_for_kernels",
]
