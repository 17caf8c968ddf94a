"""The mesh whose devices a kernel may talk to: that of the `jax.shard_map` around the call, or of `kernel.interpret`;
and what stands for memory that all of them have."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jtile._config import jit_key


@dataclasses.dataclass(frozen=True)
class OnEveryDevice:
    """What `jt.symmetric` and `jt.signals` give for `scratch=`: memory of a call that each of its devices has.

    Attributes:
      shape, dtype: the same on all devices.
      role: `"symmetric"` or `"signal"`.
    """

    shape: tuple[int, ...]
    dtype: Any
    role: str


_GIVEN: contextvars.ContextVar[Mapping[str, int] | None] = contextvars.ContextVar("jtile_mesh", default=None)


@dataclasses.dataclass
class Watch:
    """Whether anything asked for the mesh in a block: then the result depends on it."""

    asked: bool = False


_WATCH: contextvars.ContextVar[Watch | None] = contextvars.ContextVar("jtile_mesh_watch", default=None)


@contextlib.contextmanager
def on_mesh(axes: Mapping[str, int]) -> Iterator[None]:
    """A block in which kernels find these axes, without devices."""
    token = _GIVEN.set(axes)
    try:
        with jit_key(("mesh", tuple(axes.items()))):
            yield
    finally:
        _GIVEN.reset(token)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Notice who asks for the mesh in this block."""
    watch = Watch()
    token = _WATCH.set(watch)
    try:
        yield watch
    finally:
        _WATCH.reset(token)
        if watch.asked and (outer := _WATCH.get()) is not None:
            outer.asked = True


def asked() -> None:
    """Say to whoever watches that what happens here depends on the mesh."""
    watch = _WATCH.get()
    if watch is not None:
        watch.asked = True


def left_axes() -> list[str]:
    """Axes of several devices that this `shard_map` leaves to XLA: devices along them cannot be told apart."""
    if _GIVEN.get() is not None:
        return []
    import jax

    mesh = jax.sharding.get_abstract_mesh()
    return [name for name in mesh.axis_names if name not in mesh.manual_axes and mesh.shape[name] > 1]


def mesh_axes() -> dict[str, int]:
    """The axes of the mesh here along which this is one device, with their sizes; empty outside of `shard_map`."""
    given = _GIVEN.get()
    if given is not None:
        return dict(given)
    import jax

    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.axis_names if name in mesh.manual_axes}
