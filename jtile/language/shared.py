"""Memory that the roles of a block share, and barriers: `jt.alloc`, `jt.barrier` and the objects that they give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jtile import ir
from jtile._errors import KernelTypeError, KernelValueError
from jtile._parts import is_complex, is_key
from jtile.ir.block import nbytes
from jtile.language import _block_primitives as prims
from jtile.language import _level
from jtile.language._numbers import kind_of, tile_of
from jtile.language._place import user_place
from jtile.language._sizes import static
from jtile.language.refs import Ref, refuse_arithmetic


def checked(what: str, card: ir.Op) -> tuple[ir.Type, ...]:
    """The result types of a card whose operands have types only; errors of its `infer` get the source line."""
    try:
        return card.infer()
    except TypeError as e:
        raise KernelTypeError(f"{what}: {e}", user_place()) from None
    except ValueError as e:
        raise KernelValueError(f"{what}: {e}", user_place()) from None


def typed(x: Any) -> ir.Value:
    """A value of Tile IR of the type of a tile, buffer or barrier."""
    return ir.Value(x.type if isinstance(x, Shared | Barrier) else ir.TileType(tuple(x.shape), x.dtype.name))


def index_value(v: Any, what: str) -> Any:
    """An int or integer scalar as an int32 operand."""
    traced = hasattr(v, "dtype")
    if isinstance(v, bool) or not (traced or isinstance(v, int)) or jnp.ndim(v):
        raise KernelTypeError(f"{what} is an integer scalar, got {kind_of(v)}", user_place())
    if traced and not jnp.issubdtype(v.dtype, np.integer):
        raise KernelTypeError(f"{what} is an integer scalar, got {v.dtype}", user_place())
    return lax.convert_element_type(v, np.int32) if traced else np.int32(v)


def condition(when: Any, what: str) -> list[Any]:
    """The operand of `when=`: none where it is left out."""
    if when is None:
        return []
    when = jnp.asarray(when)
    if when.ndim or when.dtype != np.bool_:
        raise KernelTypeError(f"{what} is a bool scalar, got {when.dtype}{list(when.shape)}", user_place())
    return [when]


def _number(v: Any, what: str, low: int) -> int:
    if isinstance(v, bool) or not isinstance(v, int | np.integer) or v < low:
        kind = "a traced value" if isinstance(v, core.Tracer) else repr(v)
        raise KernelValueError(f"{what} is a Python int of at least {low}, got {kind}", user_place())
    return int(v)


def slot_number(at: Any, count: int, what: str) -> Any:
    """The number of one of `count`: a Python int is checked and counts from the end where negative."""
    if isinstance(at, int | np.integer) and not isinstance(at, bool):
        if not -count <= at < count:
            raise KernelValueError(f"there is no number {at} of {what}: the count is {count}", user_place())
        return np.int32(at % count)
    return index_value(at, f"the number of one of {what}")


def round_of(it: Any, count: int) -> tuple[Any, Any]:
    """Slot and parity of round `it` of a ring: `it % count` and `(it // count) & 1`, for `it` of at least 0."""
    if isinstance(it, int | np.integer):
        return np.int32(it % count), np.int32((it // count) & 1)
    it = index_value(it, "the number of a round")
    one = np.int32(1)
    if count == 1:
        return np.int32(0), lax.bitwise_and(it, one)
    if count & (count - 1) == 0:
        turns = lax.shift_right_arithmetic(it, np.int32(count.bit_length() - 1))
        return lax.bitwise_and(it, np.int32(count - 1)), lax.bitwise_and(turns, one)
    n = np.int32(count)
    return lax.rem(it, n), lax.bitwise_and(lax.div(it, n), one)


class Shared:
    """Memory of the block that all its roles see: one buffer, or a ring of `slots` of them.

    `A[s]` is one buffer of a ring, `A.at(it)` that of round `it` (number `it % slots`). Of one buffer, `X.T` is the
    same memory with its two axes swapped, and `X[0:64, :]` a part of it, with static bounds.

    Attributes:
      shape, dtype: the shape and dtype of one buffer.
      slots: the length of the ring, None for one buffer.
      nbytes: bytes of one buffer: what one copy of it brings.
    """

    __slots__ = ("memory", "type")

    def __init__(self, handle: Any, type: ir.SharedType):
        self.memory, self.type = handle, type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> np.dtype:
        return self.type.info.numpy

    @property
    def slots(self) -> int | None:
        return self.type.slots

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.type.size

    @property
    def nbytes(self) -> int:
        return nbytes(self.type)

    @property
    def handle(self) -> Any:
        """The handle that the primitives take; a ring has none, only each of its buffers."""
        if self.slots is not None:
            raise KernelTypeError(
                f"expected one buffer, got a ring of {self.slots}: take one of them, A[s] or A.at(round)", user_place()
            )
        return self.memory

    @property
    def T(self) -> Shared:
        (type,) = checked("A.T", ir.TransposeShared(typed(self)))
        return Shared(prims.transpose_shared_p.bind(self.handle), type)

    def at(self, it: Any) -> Shared:
        """The buffer of a round: the one with number `it % slots`.

        Args:
          it: the number of the round, an int or integer scalar of at least 0.
        Returns:
          One buffer of the ring.
        """
        self._ring("at(round)")
        return self[round_of(it, self.slots or 1)[0]]

    def __getitem__(self, index: Any) -> Shared:
        if self.slots is None:
            return self._part(index if isinstance(index, tuple) else (index,))
        if isinstance(index, tuple | slice) or index is Ellipsis:
            raise KernelTypeError(f"a ring of {self.slots} buffers is indexed by one number: A[s]", user_place())
        at = slot_number(index, self.slots, "the ring")
        return Shared(prims.slot_p.bind(self.memory, at), ir.SharedType(self.shape, self.type.dtype))

    def _part(self, index: tuple[Any, ...]) -> Shared:
        if index == (Ellipsis,) or len(index) > self.ndim or not all(isinstance(s, slice) for s in index):
            raise KernelTypeError(
                f"part of a buffer of shape {list(self.shape)} is X[0:64, :], with slices only; X.load() gives its "
                "tile, X.store(x) writes one",
                user_place(),
            )
        ranges = []
        for s, n in zip((*index, *[slice(None)] * (self.ndim - len(index))), self.shape, strict=True):
            if any(isinstance(v, core.Tracer) for v in (s.start, s.stop)) or s.step not in (None, 1):
                raise KernelTypeError("the bounds of a part of a buffer are Python ints, its step is 1", user_place())
            ranges.append(range(n)[s])
        starts, sizes = tuple(r.start for r in ranges), tuple(map(len, ranges))
        (type,) = checked("a part of a buffer", ir.SliceShared(typed(self), starts, sizes))
        return Shared(prims.slice_shared_p.bind(self.handle, starts=starts, sizes=sizes), type)

    def load(self) -> jax.Array:
        """The tile that the buffer holds.

        Returns:
          An array of the buffer's shape and dtype, in registers.
        """
        _level.in_role("X.load()")
        (type,) = checked("X.load()", ir.LoadShared(typed(self)))
        return prims.load_shared_p.bind(self.handle, type=type)

    def store(self, x: Any) -> None:
        """Write a tile to the buffer. Asynchronous copies and products see it after `jt.fence_shared()`, the other
        warps of the role after `jt.role_barrier()`, other roles after a barrier.

        Args:
          x: a tile of the buffer's shape and dtype, or a number.
        Raises:
          KernelTypeError: another dtype.
        """
        _level.in_role("X.store(x)")
        x = tile_of(x, "what X.store writes")
        if x.dtype != self.dtype and x.weak_type:
            x = lax.convert_element_type(x, self.dtype)
        x = jnp.broadcast_to(x, self.shape) if x.ndim == 0 else x
        if x.dtype != self.dtype:
            raise KernelTypeError(
                f"this buffer is of {self.dtype.name}, the tile is of {x.dtype.name}; convert it: "
                f"X.store(x.astype({self.dtype.name!r}))",
                user_place(),
            )
        checked("X.store(x)", ir.StoreShared(typed(self), typed(x)))
        prims.store_shared_p.bind(self.handle, x)

    def _ring(self, what: str) -> None:
        if self.slots is None:
            raise KernelTypeError(f"{what} is for a ring: jt.alloc(shape, dtype, slots=n)", user_place())

    def __setitem__(self, index: Any, value: Any) -> None:
        raise KernelTypeError("a buffer is written as a whole: X.store(x), or X[0:64, :].store(x)", user_place())

    def __iter__(self):
        raise KernelTypeError("a buffer cannot be iterated; loop over its slots: A[s]", user_place())

    def __jax_array__(self):
        raise KernelTypeError(f"{self!r} is memory, not a value; .load() of one buffer gives its tile", user_place())

    def __repr__(self) -> str:
        ring = "" if self.slots is None else f", slots={self.slots}"
        return f"Shared({self.dtype.name}{list(self.shape)}{ring})"


refuse_arithmetic(Shared)


class Scratch(Ref):
    """What `jt.alloc` gives at tile level. It has the names of `Shared` too: whoever asks for one of them may be in a
    kernel that turns out to be at block level."""

    __slots__ = ()

    @property
    def T(self):
        return self._shared("T")

    @property
    def nbytes(self):
        return self._shared("nbytes")

    @property
    def slots(self):
        return self._shared("slots")

    def load(self):
        return self._shared("load()")

    def store(self, x: Any):
        return self._shared("store(x)")

    def _shared(self, name: str) -> Any:
        return _level.perhaps_block_level(
            KernelTypeError(
                f"scratch of a tile-level kernel has no .{name}: x[...] loads it, x[...] = v stores to it; buffers of "
                "shared memory belong to kernels with roles (jt.role)",
                user_place(),
            )
        )


def alloc(shape: Any, dtype: Any, slots: int | None = None) -> Any:
    """Memory made in the kernel body; undefined at first.

    In a kernel with roles it is shared memory of the block, made outside of them: one buffer, or with `slots` a ring
    of buffers (`Shared`). In any other kernel it is a scratch Ref of the program, and `slots` has no meaning.

    Args:
      shape: the shape of one buffer, an int or a tuple of ints.
      dtype: the dtype of its elements.
      slots: length of the ring.

    Returns:
      A `Shared` buffer or ring, or in a kernel without roles a `Ref`.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if is_complex(dtype) and not (slots is None and _level.scratch_at_tile_level()):
        why = "jt.alloc: no buffer of the block level holds complex numbers; make one for each of their two parts"
        raise KernelTypeError(why, user_place())
    if is_key(dtype):
        why = "jt.alloc: no memory of random keys can be made in a body; declare it with scratch= of the kernel"
        raise KernelTypeError(why, user_place())
    if slots is None and _level.scratch_at_tile_level():
        return Scratch(jax.empty_ref(jax.ShapeDtypeStruct(shape, np.dtype(dtype))), "this scratch", "scratch")
    _level.outside_roles("jt.alloc", "since all of them see the memory")
    shape = tuple(_number(static(n, "the shape of jt.alloc"), "a side of jt.alloc", 1) for n in shape)
    slots = slots if slots is None else _number(slots, "jt.alloc: slots", 1)
    try:
        name = ir.dtype_info(dtype).name
    except KeyError:
        raise KernelTypeError(f"jt.alloc: {dtype!r} is not a dtype of the language", user_place()) from None
    handle = prims.alloc_shared_p.bind(shape=shape, dtype=name, slots=slots)
    return Shared(handle, ir.SharedType(shape, name, slots))


# -- barriers ---------------------------------------------------------------------------------------------------------


class Barrier:
    """`count` barriers of the block: `bar[s]` is one of them, `bar.at(it)` that of round `it` of a ring."""

    __slots__ = ("memory", "type")

    def __init__(self, handle: Any, type: ir.BarrierType):
        self.memory, self.type = handle, type

    @property
    def count(self) -> int:
        return self.type.count

    @property
    def arrivals(self) -> int:
        return self.type.arrivals

    def __getitem__(self, index: Any) -> BarrierSlot:
        return BarrierSlot(self, slot_number(index, self.count, "these barriers"))

    def at(self, it: Any) -> BarrierRound:
        """The barrier of round `it`: the one with number `it % count`.

        Args:
          it: the number of the round, an int or integer scalar of at least 0.
        Returns:
          A `BarrierRound`, which knows slot and parity of the round.
        """
        return BarrierRound(self, *round_of(it, self.count))

    def __iter__(self):
        raise KernelTypeError("barriers cannot be iterated; name them: bar[s]", user_place())

    def __repr__(self) -> str:
        return f"Barrier(count={self.count}, arrivals={self.arrivals})"


class _OneBarrier:
    """What one barrier and one round of a barrier have in common: everything but waiting."""

    __slots__ = ("at", "barrier")

    def __init__(self, barrier: Barrier, at: Any):
        self.barrier, self.at = barrier, at

    def arrive(self, count: int = 1, when: Any = None) -> None:
        """Arrive `count` times at once: those who wait see all that this role did before."""
        _level.in_role("bar[s].arrive")
        count = _number(count, "the number of arrivals", 1)
        checked("bar[s].arrive", ir.Arrive(typed(self.barrier), _INDEX, count))
        prims.arrive_p.bind(self.barrier.memory, self.at, *condition(when, "when"), count=count)

    def expect(self, nbytes: int, when: Any = None) -> None:
        """Arrive once, and announce `nbytes` that asynchronous copies are going to bring in this phase."""
        _level.in_role("bar[s].expect")
        nbytes = _number(nbytes, "the number of bytes to expect", 0)
        prims.expect_p.bind(self.barrier.memory, self.at, *condition(when, "when"), bytes=nbytes)

    def _wait(self, parity: Any, when: Any) -> None:
        _level.in_role("bar[s].wait")
        prims.wait_p.bind(self.barrier.memory, self.at, parity, *condition(when, "when"))


class BarrierSlot(_OneBarrier):
    """One barrier by its number: `bar[s]`."""

    __slots__ = ()

    def wait(self, parity: Any, when: Any = None) -> None:
        """Wait until a phase has ended.

        Args:
          parity: 0 or 1, that of the phase. A barrier that has ended no phase counts as one that has just ended a phase
            of parity 1.
          when: a bool scalar; if it is false, nothing happens.
        Raises:
          KernelValueError: another parity.
        """
        if isinstance(parity, int) and parity not in (0, 1):
            raise KernelValueError(f"a parity is 0 or 1, got {parity}", user_place())
        self._wait(index_value(parity, "a parity"), when)


class BarrierRound(_OneBarrier):
    """The barrier of one round: `bar.at(it)`, which knows its parity, `(it // count) & 1`."""

    __slots__ = ("parity",)

    def __init__(self, barrier: Barrier, at: Any, parity: Any):
        super().__init__(barrier, at)
        self.parity = parity

    def wait(self, when: Any = None, *, before: bool = False) -> None:
        """Wait until the phase of this round has ended.

        Args:
          when: a bool scalar; if it is false, nothing happens.
          before: wait for the round that had the same slot before this one; in the first round that passes at once.
        """
        self._wait(self.parity ^ np.int32(1) if before else self.parity, when)


_INDEX = ir.Value(ir.INDEX)


def barrier(count: int = 1, arrivals: int = 1) -> Barrier:
    """Barriers of the block, made outside of roles.

    A phase of a barrier ends when all its arrivals, and all bytes that were announced for it, have come.

    Args:
      count: how many barriers: the slots of a ring.
      arrivals: arrivals (`arrive`, `expect`) in a phase of each.

    Returns:
      A `Barrier`: `bar[s]` is one of them, `bar.at(it)` that of round `it`.
    """
    _level.outside_roles("jt.barrier", "since all of them see it")
    count, arrivals = _number(count, "jt.barrier: count", 1), _number(arrivals, "jt.barrier: arrivals", 1)
    return Barrier(prims.alloc_barriers_p.bind(count=count, arrivals=arrivals), ir.BarrierType(count, arrivals))


__all__ = ["Barrier", "BarrierRound", "BarrierSlot", "Shared", "alloc", "barrier"]
