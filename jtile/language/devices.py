"""Kernels that talk to other devices of a mesh: symmetric memory, Refs of another device, signals."""

from __future__ import annotations

import difflib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import core

from jtile._errors import KernelTypeError, KernelValueError, TransformError
from jtile._mesh import OnEveryDevice, asked, left_axes, mesh_axes
from jtile.ir.devices import POSTED, SIGNALS
from jtile.language import refs
from jtile.language._index import Take
from jtile.language._place import user_place
from jtile.language._primitives import (
    axis_barrier_p,
    axis_index_p,
    on_p,
    post_p,
    receive_p,
    signal_p,
    wait_signal_p,
)
from jtile.language.refs import Ref, TileView


def symmetric(shape: int | tuple[int, ...], dtype: Any) -> OnEveryDevice:
    """Memory that every device of the call has, to be given as `scratch=`.

    The programs of a device share it, and it is undefined when a call begins.

    In the body it is a Ref of this device's own memory; `ref.on(axis, index)` is that of another device.

        @jt.kernel(out_type=..., scratch=lambda x, *, axis: [jt.symmetric(x.shape, x.dtype), jt.signals()])
        def shift(x, o, box, came, *, axis):
            n, me = jt.axis_size(axis), jt.axis_index(axis)
            box.on(axis, (me + 1) % n)[...] = x[...]
            jt.signal(came.on(axis, (me + 1) % n))
            jt.wait(came)
            o[...] = box[...]
            jt.axis_barrier(axis)          # no device begins its next call before all have read

    A call site has two sets of it, which its calls use in turn.

    Args:
      shape: an int or a tuple of ints.
      dtype: the dtype of its elements.

    Returns:
      An entry for `scratch=`.
    """
    return OnEveryDevice((shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype), "symmetric")


def signals(shape: int | tuple[int, ...] = ()) -> OnEveryDevice:
    """Counters that every device of the call has, to be given as `scratch=`; they are zero when a call begins.

    Any device may raise them (`jt.signal`); only the device that has them waits for them (`jt.wait`). In a kernel with
    roles that names no axis of a mesh, they are those of the programs of one device.

    Args:
      shape: how many along each axis; `()`: one.

    Returns:
      An entry for `scratch=`.
    """
    return OnEveryDevice((shape,) if isinstance(shape, int) else tuple(shape), np.dtype(np.int32), "signal")


class Signals:
    """Signals as a kernel body sees them: `came[k]` is one of them, `came.on(axis, index)` those of another device.

    Attributes:
      shape: how many there are along each axis; () for one signal.
      name: what errors call it.
    """

    __slots__ = ("at", "far", "name", "tracer")

    def __init__(self, tracer: Any, name: str, at: tuple[Any, ...] = (), far: bool = False):
        self.tracer, self.name, self.at, self.far = tracer, name, at, far

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tracer.shape)[len(self.at) :]

    def on(self, axis: str, index: Any) -> Signals:
        """The same signals on another device.

        Args:
          axis: the name of an axis of the mesh.
          index: the number of the device along it, an int or a traced int scalar.
        Returns:
          `Signals` of the same shape.
        """
        return Signals(elsewhere(self.tracer, self.name, axis, index), f"{self.name}.on({axis!r})", self.at, True)

    def __getitem__(self, index: Any) -> Signals:
        at = index if isinstance(index, tuple) else (index,)
        if len(at) > len(self.shape):
            raise KernelValueError(
                f"{self.name} are signals of shape {self.shape}: this index has {len(at)} numbers", user_place()
            )
        numbers = [_place(i, n, f"an index of {self.name}") for i, n in zip(at, self.shape)]
        return Signals(self.tracer, self.name, (*self.at, *numbers), self.far)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise KernelTypeError(f"{self.name} are signals: jt.signal({self.name}[k]) raises one", user_place())

    def __iter__(self):
        raise KernelTypeError(f"{self.name} cannot be iterated; name one: {self.name}[k]", user_place())

    def __jax_array__(self):
        raise KernelTypeError(f"{self.name} are signals, no values: jt.wait({self.name}[k], at_least)", user_place())

    def __repr__(self) -> str:
        return f"Signals({self.name}: {list(self.shape)})"


def signal(to: Signals, value: Any = 1, op: str = "add") -> None:
    """Raise a signal, of this device or of another; nobody waits.

    What this program did before (its loads and stores of any memory; in a role, what the role did, and the copies to
    arrays that it has started) has happened for the program that waits for the signal. Signals of one call never reach
    another call.

    Args:
      to: one signal: `came`, `came[k]`, `came.on(axis, index)[k]`.
      value: by how much, or for "set" to what; an int or a traced int scalar, at least 1.
      op: "add"; or "set", for a signal that one program raises to higher and higher numbers.
    """
    where = _one(to, "jt.signal")
    if op not in SIGNALS:
        raise KernelValueError(f"jt.signal: op is one of {', '.join(map(repr, SIGNALS))}, got {op!r}", user_place())
    number = _count(value, "the value of a signal")
    signal_p.bind(to.tracer, *where, number, fn=op)


def wait(on: Signals, at_least: Any = 1) -> None:
    """Wait until a signal of this device has been raised to `at_least`.

    It stays as it is: a further wait for the same number passes at once. All that is signalled in a call has to be
    waited for in it.

    Args:
      on: one signal of this device.
      at_least: an int or a traced int scalar.
    """
    where = _one(on, "jt.wait")
    if on.far:
        raise KernelTypeError(
            f"jt.wait({on.name}): a device waits for its own signals; let the other device raise one of this device",
            user_place(),
        )
    wait_signal_p.bind(on.tracer, *where, _count(at_least, "what a signal is waited for to reach"))


def post(x: Ref | TileView, index: Any, value: Any, mask: Any = None) -> None:
    """Write elements of symmetric memory of this device, or of another (`box.on(axis, i)`), for the programs there that
    receive them (`jt.receive`).

    Each element is posted at most once a call, and handed over by itself: whoever receives it knows nothing else of
    what this program did in this call. So it takes neither a fence nor a counter: on an H200 an element is there within
    half a microsecond. Memory that is posted to is for this alone. A NaN comes as a NaN, with other bits.

    Only kernels with roles post ([the block level](block_level.md)).

    Args:
      x: symmetric memory (`jt.symmetric`) of float32, bfloat16 or float16, or a tile view of it.
      index: as in `x[index] = value`, without gathers.
      value: of the dtype of `x`; it is broadcast.
      mask: bool, broadcast to the shape of the access; lanes where it is false are not written.
    """
    x = _box(x, "jt.post")
    a = _lines(x, index, "jt.post")
    masked = refs._mask(a, mask)
    value = refs._value(x, a, value, "post")
    post_p.bind(refs._tracer(x), *refs._operands(a), value, *masked, dims=a.dims, masked=bool(masked))


def receive(x: Ref | TileView, index: Any, mask: Any = None) -> Any:
    """Wait until elements of this device's symmetric memory have been posted in this call (`jt.post`), and read them.

    Args:
      x: symmetric memory of this device, or a tile view of it.
      index: as in `x[index]`, without gathers.
      mask: bool, broadcast to the shape of the result. Lanes where it is false, and lanes outside the array, are not
        waited for. Of 16-bit memory an NVIDIA GPU takes masks of whole lines of the last axis.

    Returns:
      A tile of `x.dtype`, 0 in lanes that were not waited for.
    """
    x = _box(x, "jt.receive")
    a = _lines(x, index, "jt.receive")
    masked = refs._mask(a, mask)
    return a.after(receive_p.bind(refs._tracer(x), *refs._operands(a), *masked, dims=a.dims, masked=bool(masked)))


def _box(x: Any, what: str) -> Any:
    """A Ref or a view of this device's symmetric memory."""
    x = refs.as_ref(x)
    ref = x.ref if isinstance(x, refs.TileView) else x
    if ref.role != "symmetric":
        raise KernelTypeError(
            f"{what} takes symmetric memory, scratch=[jt.symmetric(shape, dtype)]: {ref.name} is {ref.role!r}",
            user_place(),
        )
    if np.dtype(ref.dtype).name not in POSTED:
        raise KernelTypeError(
            f"{what} takes memory of {', '.join(POSTED)}, got {ref.name} of {np.dtype(ref.dtype).name}", user_place()
        )
    return x


def _lines(x: Any, index: Any, what: str) -> Any:
    """The access of an index without gathers."""
    a = x.access(index)
    if any(isinstance(d, Take) for d in a.dims):
        raise KernelTypeError(f"{what} takes a tile or a part of {x.name}, and no gathered index", user_place())
    return a


def axis_index(axis: str) -> Any:
    """The number of this device along an axis of the mesh.

    Args:
      axis: the name of the axis, as in `jax.shard_map`.

    Returns:
      An int32 scalar, computed on the device.

    Raises:
      KernelValueError, KernelTypeError: the call is not inside of `jax.shard_map`, or the mesh has no such axis.
    """
    size = axis_size_of(axis, "jt.axis_index")
    return axis_index_p.bind(axis=axis, size=size)


def axis_size(axis: str) -> int:
    """The number of devices along an axis of the mesh. `out_type`, `grid` and `scratch` may call it, too.

    Args:
      axis: the name of the axis, as in `jax.shard_map`.

    Returns:
      A Python int.
    """
    return axis_size_of(axis, "jt.axis_size")


def axis_barrier(axis: str) -> None:
    """Wait until the same program of the grid has come here on all devices along an axis of the mesh.

    After it, the program sees what the same program did before on all of these devices. At the end of a kernel, in all
    of its programs, it prevents that the next call writes memory which this one still reads.

    Args:
      axis: the name of the axis, as in `jax.shard_map`.
    """
    size = axis_size_of(axis, "jt.axis_barrier")
    axis_barrier_p.bind(axis=axis, size=size)


def axis_size_of(axis: Any, what: str) -> int:
    """The number of devices along an axis of the mesh; a typed error where there is no such axis."""
    asked()
    if not isinstance(axis, str):
        raise KernelTypeError(f"{what}: expected the name of an axis of the mesh, a string, got {axis!r}", user_place())
    axes = mesh_axes()
    if axis in axes:
        _all_manual(what)
        return axes[axis]
    if not axes:
        raise KernelValueError(
            f"{what} names the axis {axis!r} of a mesh, and this kernel is called outside of jax.shard_map: call it "
            "in a function that jax.shard_map maps over the mesh, or run kernel.interpret(..., "
            f"mesh={{{axis!r}: 4}}), which needs no devices",
            user_place(),
        )
    close = difflib.get_close_matches(axis, axes, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"its axes are {', '.join(map(repr, axes))}"
    raise KernelValueError(f"{what}: the mesh has no axis {axis!r} in this jax.shard_map; {hint}", user_place())


def _all_manual(what: str) -> None:
    left = left_axes()
    if left:
        raise TransformError(
            f"{what}: this jax.shard_map leaves the axis {left[0]!r} of the mesh to XLA, so that devices along it "
            "cannot be told apart; map over all axes of the mesh (leave out axis_names)",
            user_place(),
        )


def elsewhere(tracer: Any, name: str, axis: str, index: Any) -> Any:
    """The tracer of the same memory on another device."""
    what = f"{name}.on"
    size = axis_size_of(axis, what)
    if isinstance(index, int | np.integer) and not isinstance(index, bool) and not 0 <= index < size:
        raise KernelValueError(f"{what}({axis!r}, {index}): there are {size} devices along this axis", user_place())
    return on_p.bind(tracer, _scalar(index, f"the place of a device ({what})"), axis=axis, size=size)


def _one(s: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(s, Signals):
        raise KernelTypeError(f"{what} takes signals (jt.signals in scratch=), got {type(s).__name__}", user_place())
    if s.shape:
        raise KernelTypeError(f"{what} takes one signal: {s.name} has shape {s.shape}; name one of them", user_place())
    return s.at


def _place(i: Any, n: int, what: str) -> Any:
    if isinstance(i, int | np.integer) and not isinstance(i, bool) and not 0 <= i < n:
        raise KernelValueError(f"{what} counts from 0 and is below {n}, got {i}", user_place())
    return _scalar(i, what)


def _count(v: Any, what: str) -> Any:
    if isinstance(v, int | np.integer) and not isinstance(v, bool) and not 1 <= v < 2**31:
        raise KernelValueError(f"{what} is at least 1, got {v}", user_place())
    return _scalar(v, what)


def _scalar(v: Any, what: str) -> Any:
    if isinstance(v, bool | np.bool_) or np.ndim(v) or not jnp.issubdtype(jnp.result_type(v), np.integer):
        shown = f"a tile of shape {list(np.shape(v))}" if np.ndim(v) else repr(v)
        raise KernelTypeError(f"{what} is an int scalar, got {shown}", user_place())
    return v.astype(np.int32) if isinstance(v, core.Tracer) else jnp.asarray(int(v), np.int32)


__all__ = [
    "Signals", "axis_barrier", "axis_index", "axis_size", "post", "receive", "signal", "signals", "symmetric", "wait",
]  # fmt: skip
