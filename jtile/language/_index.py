"""Indices of Refs: NumPy-like index expressions, parsed into one entry per dimension plus what happens to the
loaded tile.

The structure of an index is static and hashable (`At`, `Span`, `Tile`, `Take`: the cards of `jtile.ir` without their
values); the traced values are operands of the load or store primitive, one for each dimension of the Ref.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jtile._errors import KernelTypeError, KernelValueError
from jtile.language._place import user_place
from jtile.language._sizes import as_value, integer, is_dynamic, side, static


@dataclasses.dataclass(frozen=True)
class At:
    """One element; the dimension is dropped."""


@dataclasses.dataclass(frozen=True)
class Span:
    """`size` elements from a start, `stride` apart."""

    size: int
    stride: int = 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile number k of a tile-space view: elements `[k * step, k * step + size)`."""

    size: int
    step: int


@dataclasses.dataclass(frozen=True)
class Take:
    """A gather by an integer tile. All gathers of one index have one shape, which stands at the place of the first."""


Dim = At | Span | Tile | Take


@dataclasses.dataclass(frozen=True)
class DynamicSpan:
    """`jt.ds(start, size, stride)`: `size` elements from a start that may be traced."""

    start: Any
    size: int
    stride: int = 1


def ds(start, size: int, stride: int = 1) -> DynamicSpan:
    """A part of an axis, for use in an index: `x[jt.ds(start, size), :]`.

    Elements past the end of the array read as the pad value (0 by default) and are never written.

    Args:
      start: the first element, an int or a traced int scalar of at least 0.
      size: the number of elements, a Python int.
      stride: the distance between them, a Python int.

    Returns:
      An entry of an index.

    Raises:
      KernelTypeError, KernelValueError: `size` or `stride` is no Python int, or a number is negative.
    """
    size, stride = _static(size, "the size of jt.ds"), _static(stride, "the stride of jt.ds")
    if size < 0 or stride < 1:
        raise KernelValueError(f"jt.ds takes size >= 0 and stride >= 1, got {size} and {stride}", user_place())
    side(size, "the size of jt.ds")
    if isinstance(start, int | np.integer) and start < 0:
        raise KernelValueError(f"jt.ds takes a start >= 0, got {start}", user_place())
    return DynamicSpan(start, size, stride)


@dataclasses.dataclass(frozen=True)
class Access:
    """A parsed index: `dims` and `values` go to the primitive; `after` and `before` map between the tile that the
    primitive reads or writes and the one that the user sees.

    Attributes:
      dims: one entry per dimension of the Ref.
      values: the traced value of each.
      reverse: axes (of the primitive's tile) that the user reads backwards (negative slice steps).
      perm: user axis k, before new axes, is axis `perm[k]` of the primitive's tile.
      new: places of the `None`s in the user's shape.
    """

    dims: tuple[Dim, ...]
    values: tuple[Any, ...]
    reverse: tuple[int, ...] = ()
    perm: tuple[int, ...] = ()
    new: tuple[int, ...] = ()

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of the primitive's tile."""
        return dims_shape(self.dims, [jnp.shape(v) for v in self.values])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the user's tile."""
        raw = self.raw_shape
        out = [raw[p] for p in self.perm]
        for k in self.new:
            out.insert(k, 1)
        return tuple(out)

    def after(self, x):
        """The primitive's tile as the user sees it."""
        x = lax.rev(x, self.reverse) if self.reverse else x
        x = lax.transpose(x, self.perm) if list(self.perm) != sorted(self.perm) else x
        return lax.expand_dims(x, self.new) if self.new else x

    def before(self, x):
        """The user's tile, broadcast to this access, as the primitive takes it."""
        x = broadcast(x, self.shape)
        x = lax.squeeze(x, self.new) if self.new else x
        x = lax.transpose(x, tuple(np.argsort(self.perm))) if list(self.perm) != sorted(self.perm) else x
        return lax.rev(x, self.reverse) if self.reverse else x


def dims_shape(dims, value_shapes) -> tuple[int, ...]:
    """Shape of the tile that a load with these entries gives."""
    out: list[int] = []
    taken = False
    for d, shape in zip(dims, value_shapes, strict=True):
        if isinstance(d, Take):
            out += [] if taken else list(shape)
            taken = True
        elif not isinstance(d, At):
            out.append(d.size)
    return tuple(out)


def broadcast(x, shape):
    """`x` repeated to `shape` by NumPy's rule; an error that says both shapes where they do not fit."""
    x = jnp.asarray(x)
    shape = tuple(shape)
    if x.shape == shape:
        return x
    lead = len(shape) - x.ndim
    if lead < 0 or any(n not in (1, m) for n, m in zip(x.shape, shape[lead:])):
        raise KernelTypeError(
            f"a tile of shape {x.shape} does not fit this access, which has shape {shape}", user_place()
        )
    return lax.broadcast_in_dim(x, shape, tuple(range(lead, len(shape))))


# -- parsing -------------------------------------------------------------------------------------------------------


def parse(shape: tuple[int, ...], index, what: str) -> Access:
    """The access that `ref[index]` means for a Ref of `shape`; `what` names the Ref in errors."""
    entries = _expand(shape, index if isinstance(index, tuple) else (index,), what)
    dims: list[Dim] = []
    values: list[Any] = []
    flip: list[bool] = []
    for n, e in zip(shape, [e for e in entries if e is not None], strict=True):
        d, v, back = _entry(n, e, what)
        dims.append(d)
        values.append(v)
        flip.append(back)
    values = _join_takes(dims, values)
    groups, reverse, at = [], [], 0  # groups: per entry of the index, the axes of the primitive's tile that it makes
    seen = False
    for d, v, back in zip(dims, values, flip, strict=True):
        rank = 0 if isinstance(d, At) or (isinstance(d, Take) and seen) else jnp.ndim(v) if isinstance(d, Take) else 1
        seen = seen or isinstance(d, Take)
        groups.append(tuple(range(at, at + rank)))
        reverse += [at] if back else []
        at += rank
    perm, new = _placement(entries, dims, groups)
    return Access(tuple(dims), tuple(values), tuple(reverse), perm, new)


def _expand(shape, entries, what: str) -> list[Any]:
    """`entries` with `...` spelled out, and full slices for what is missing at the end."""
    for e in entries:
        if isinstance(e, tuple):
            raise KernelTypeError(f"{what}: a tuple inside an index means nothing; write x[i, j]", user_place())
    dots = [k for k, e in enumerate(entries) if e is Ellipsis]
    given = sum(e is not None and e is not Ellipsis for e in entries)
    if len(dots) > 1:
        raise KernelTypeError(f"{what}: an index can have one ..., got {len(dots)}", user_place())
    if given > len(shape):
        raise KernelTypeError(
            f"{what} has rank {len(shape)} (shape {tuple(shape)}), but this index has {given} entries", user_place()
        )
    full = [slice(None)] * (len(shape) - given)
    if dots:
        return [*entries[: dots[0]], *full, *entries[dots[0] + 1 :]]
    return [*entries, *full]


def _entry(n: int, e, what: str) -> tuple[Dim, Any, bool]:
    """`(entry, value, backwards)` of one index entry for a dimension of `n` elements."""
    if isinstance(e, slice):
        return _slice(n, e, what)
    if all(hasattr(e, a) for a in ("start", "size", "stride")):  # ours, or JAX's pl.ds
        start = ds(e.start, e.size, e.stride).start
        return Span(e.size, e.stride), scalar_index(start, what), False
    if isinstance(e, bool | np.bool_) or (hasattr(e, "dtype") and e.dtype == np.bool_):
        raise KernelTypeError(
            f"{what}: a bool cannot be an index, since the result's shape would depend on its values; "
            "use jt.load(x, index, mask=...) or jnp.where",
            user_place(),
        )
    if isinstance(e, int | np.integer):
        return At(), static_index(int(e), n, what), False
    e = as_value(e)
    if isinstance(e, list | np.ndarray):
        return _static_take(n, np.asarray(e), what)
    if not hasattr(e, "dtype") or not jnp.issubdtype(e.dtype, np.integer):
        got = f"a {e.dtype} tile" if hasattr(e, "dtype") else f"{type(e).__name__} {e!r}"
        raise KernelTypeError(f"{what}: an index is an int, a slice, jt.ds or an integer tile, got {got}", user_place())
    return (At() if jnp.ndim(e) == 0 else Take()), jnp.asarray(e), False


def _slice(n: int, s: slice, what: str) -> tuple[Dim, Any, bool]:
    for v in (s.start, s.stop, s.step):
        if v is not None and not isinstance(v, int | np.integer):
            raise KernelTypeError(
                f"{what}: the bounds of a slice are Python ints, got {v!r}; write jt.ds(start, size) for a traced "
                "start",
                user_place(),
            )
    if s.step == 0:
        raise KernelValueError(f"{what}: the step of a slice cannot be 0", user_place())
    r = range(static(n, f"a dimension of {what}, sliced here,"))[s]
    count = side(len(r), f"a slice of {what}")
    first = 0 if not count else r.start if r.step > 0 else r[-1]
    return Span(count, abs(r.step)), _position(first, what), r.step < 0


def _static_take(n: int, e: np.ndarray, what: str) -> tuple[Dim, Any, bool]:
    if e.dtype == np.bool_ or (e.size and not np.issubdtype(e.dtype, np.integer)):
        return _entry(n, jnp.asarray(e), what)
    if e.ndim == 0:
        return _entry(n, int(e), what)
    for i in (e.min(initial=0), e.max(initial=0)):
        _position(int(i), what)
    if is_dynamic(n) and (e < 0).any():
        raise KernelTypeError(f"{what}: indices of a dynamic dimension count from its start, got {e}", user_place())
    at = np.where(e < 0, e + np.int64(n), e) if (e < 0).any() else e
    return Take(), jnp.asarray(at.astype(_position(int(at.max(initial=0)), what).dtype)), False


def static_index(i: int, n: int, what: str) -> np.integer:
    """A Python int as an element number: negative ones count from the end. An empty dimension has no elements, and
    a kernel over it no programs, so every index is let through; so is every index of a dynamic one."""
    if is_dynamic(n):
        return as_value(i + n) if i < 0 else _position(i, what)
    if n and not -n <= i < n:
        raise KernelValueError(f"{what}: index {i} leaves a dimension of {n}", user_place())
    return _position(i + n if i < 0 else i, what)


def _position(i: int, what: str) -> np.integer:
    return integer(i, f"{what}: index", "count in larger tiles, as v = x.tiles(4096) and v[k] do")


def scalar_index(v, what: str):
    """An int or an integer scalar, as an operand."""
    v = as_value(v)
    if isinstance(v, bool | np.bool_) or not (isinstance(v, int | np.integer) or hasattr(v, "dtype")):
        raise KernelTypeError(f"{what}: an index is an integer, got {v!r}", user_place())
    if isinstance(v, int | np.integer):
        return _position(int(v), what)
    if not jnp.issubdtype(v.dtype, np.integer) or jnp.ndim(v):
        raise KernelTypeError(f"{what}: expected an integer scalar, got {v.dtype}{list(jnp.shape(v))}", user_place())
    return v


def _join_takes(dims, values) -> list[Any]:
    """Gather indices broadcast to one shape and dtype."""
    takes = [v for d, v in zip(dims, values) if isinstance(d, Take)]
    if not takes:
        return values
    try:
        shape = np.broadcast_shapes(*(v.shape for v in takes))
    except ValueError:
        shapes = ", ".join(str(v.shape) for v in takes)
        raise KernelTypeError(f"gather indices of shapes {shapes} do not broadcast", user_place()) from None
    return [broadcast(v, shape) if isinstance(d, Take) else v for d, v in zip(dims, values)]


def _placement(entries, dims, groups) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """NumPy's place of the gathered axes: at the first of the advanced entries if they stand side by side, else in
    front. Integers beside an integer tile count as advanced."""
    kinds = iter(zip(dims, groups, strict=True))
    order: list[tuple[int, ...] | None] = []  # None stands for a new axis
    advanced: list[int] = []
    for e in entries:
        if e is None:
            order.append(None)
            continue
        d, axes = next(kinds)
        if isinstance(d, Take | At):
            advanced.append(len(order))
        order.append(axes)
    if any(isinstance(d, Take) for d in dims):
        taken = next(g for d, g in zip(dims, groups) if isinstance(d, Take))
        adjacent = advanced[-1] - advanced[0] == len(advanced) - 1
        rest = [g for k, g in enumerate(order) if k not in advanced]
        place = advanced[0] if adjacent else 0
        order = [*rest[:place], taken, *rest[place:]]
    perm, new, at = [], [], 0
    for g in order:
        if g is None:
            new.append(at)
            at += 1
        else:
            perm += g
            at += len(g)
    return tuple(perm), tuple(new)


def _static(v, what: str) -> int:
    static(v, what)
    if isinstance(v, bool) or not isinstance(v, int | np.integer):
        kind = "a traced value" if isinstance(v, core.Tracer) else repr(v)
        raise KernelTypeError(f"{what} is a Python int, got {kind}", user_place())
    return int(v)
