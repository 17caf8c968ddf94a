"""Refs, tile views, loads and stores."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.ref import AbstractRef

from jtile._errors import KernelTypeError, KernelValueError
from jtile._parts import is_complex, is_key
from jtile.language import _index
from jtile.language._index import Access, At, Tile
from jtile.language._numbers import kind_of, number, tile_of
from jtile.language._place import user_place
from jtile.language._primitives import load_p, store_p
from jtile.language._sizes import as_value, is_dynamic, side, static

if TYPE_CHECKING:
    from jtile.language.atomics import Indexer


class MissingAttributeError(KernelTypeError, AttributeError):
    """A method of arrays asked of memory; an AttributeError too, for `hasattr`."""


class Ref:
    """The memory of an array, as the body of a kernel sees it.

    `x[...]` loads, `x[...] = v` stores, and `x.tiles(bm, bk)` is a view of the array as tiles. For `jax.tree` a Ref is
    a leaf, so that a pytree of Refs can be mapped over. `shape`, `dtype`, `ndim` and `size` are those of the array;
    they are known when the kernel is compiled, except for dimensions that the call marks as dynamic.

    Attributes:
      name: the name that errors use.
      role: `"in"`, `"out"`, `"scratch"` or `"symmetric"`. A kernel can store to an input only if it aliases the input
        with an output.
    """

    __slots__ = ("name", "role", "tracer", "writable")

    def __init__(self, tracer, name: str = "this Ref", role: str = "scratch", writable: bool = True):
        self.tracer, self.name, self.role, self.writable = tracer, name, role, writable

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tracer.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.tracer.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def at(self) -> Indexer:
        """Atomic updates: `x.at[index].add(v)`, and the other atomic functions; each returns the old values."""
        from jtile.language.atomics import Indexer

        return Indexer(self)

    def on(self, axis: str, index: Any) -> Ref:
        """The same symmetric memory (`jt.symmetric`) on another device, as a Ref.

        Args:
          axis: an axis of the mesh.
          index: the place of the device along it; its places along all other axes are those of this device.
        Returns:
          A Ref of the same shape and dtype.
        """
        if self.role != "symmetric":
            raise KernelTypeError(
                f"{self.name}.on: other devices have no {self.name}, which is memory of this device alone; put what "
                "they shall see into symmetric memory, scratch=[jt.symmetric(shape, dtype)]",
                user_place(),
            )
        from jtile.language.devices import elsewhere  # it takes its place among the users of Refs

        return Ref(elsewhere(self.tracer, self.name, axis, index), f"{self.name}.on({axis!r})", "symmetric")

    def tiles(self, *sizes: int | None, step: int | tuple[int | None, ...] | None = None, pad: complex = 0) -> TileView:
        """The tile-space view: tile k of an axis is elements `[k * step, k * step + size)`.

        Args:
          sizes: tile length per axis; None for an axis drops it (an index along it is one row, one head).
          step: distance between tiles, one int or one per axis; default: the tile length.
          pad: what lanes outside the array read: a number (of a complex array, a complex one too), nan or an infinity.
        Returns:
          A `TileView`: `view[i, j]` loads a tile, `view[i, j] = x` stores one.
        """
        return _view(self, sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes, step, pad)

    def access(self, index) -> Access:
        return self.stored(_index.parse(self.shape, index, self.name))

    def stored(self, a: Access) -> Access:
        """The access to the memory behind the elements that `a` names."""
        return a

    def __getitem__(self, index: Any) -> jax.Array:
        return load(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        store(self, index, value)

    def __len__(self) -> int:
        if not self.shape:
            raise KernelTypeError(f"{self.name} has rank 0 and no length", user_place())
        if is_dynamic(self.shape[0]):
            raise KernelTypeError(f"{self.name} has no static length: write {self.name}.shape[0]", user_place())
        return self.shape[0]

    def __iter__(self):
        raise KernelTypeError(
            f"{self.name} is a Ref and cannot be iterated; load it first, or loop with jt.range over a tile view",
            user_place(),
        )

    def __jax_array__(self):
        raise KernelTypeError(f"{self.name} is a Ref, not a value; load it with {self.name}[...]", user_place())

    def __getattr__(self, name: str):
        if not name.startswith("_") and hasattr(jax.Array, name):
            why = f"{self.name} is a Ref and has no .{name}; load it first: {self.name}[...].{name}"
            raise MissingAttributeError(why, user_place())
        raise AttributeError(f"a Ref has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"Ref({self.name}: {self.dtype.name}{list(self.shape)}, {self.role})"


def _no_arithmetic(name: str):
    def run(self, *_, **__):
        return self.__jax_array__()

    run.__name__ = name
    return run


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OTHER = ("neg", "abs", "invert", "lt", "le", "gt", "ge", "bool", "float", "int", "array")  # NumPy calls `__array__`


def refuse_arithmetic(kind: type) -> None:
    """Make arithmetic and NumPy on a class of memory the error that its `__jax_array__` raises."""
    for op in (*_BINARY, *[f"r{op}" for op in _BINARY], *_OTHER):
        setattr(kind, f"__{op}__", _no_arithmetic(f"__{op}__"))


refuse_arithmetic(Ref)


@dataclasses.dataclass(frozen=True)
class TileView:
    """What `x.tiles(...)` gives: `v[i, k]` loads one tile, `v[i, k] = t` stores it, `v.at[i, k].add(t)` accumulates.

    Attributes:
      shape: number of tiles per axis.
      tile_shape: shape of one tile.
      dtype: the dtype of the elements.
    """

    ref: Ref
    sizes: tuple[int | None, ...]
    steps: tuple[int, ...]
    pad: complex | int | bool = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(-(-n // s) for n, s in zip(self.ref.shape, self.steps, strict=True))

    @property
    def tile_shape(self) -> tuple[int, ...]:
        return tuple(n for n in self.sizes if n is not None)

    @property
    def ndim(self) -> int:
        return self.ref.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.ref.dtype

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def at(self) -> Indexer:
        from jtile.language.atomics import Indexer

        return Indexer(self)

    def access(self, index) -> Access:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise KernelTypeError(
                f"a tile of {self.name} is named by {self.ndim} indices (its view is {list(self.shape)} tiles), got "
                f"{len(index)}",
                user_place(),
            )
        dims, values = [], []
        for i, count, size, step in zip(index, self.shape, self.sizes, self.steps, strict=True):
            dims.append(At() if size is None else Tile(size, step))
            values.append(self._number(i, count))
        return self.ref.stored(Access(tuple(dims), tuple(values), perm=tuple(range(len(self.tile_shape)))))

    def _number(self, i, count: int):
        i = as_value(i)
        if (
            isinstance(i, bool | np.bool_)
            or not (isinstance(i, int | np.integer) or hasattr(i, "dtype"))
            or jnp.ndim(i)
        ):
            raise KernelTypeError(
                f"{self.name}: a tile is named by integer scalars, got {kind_of(i)}; for elements index the Ref itself",
                user_place(),
            )
        if isinstance(i, int | np.integer) and i < 0:
            return _index.static_index(int(i), count, f"the tile view of {self.name}")
        return _index.scalar_index(i, self.name)

    def __getitem__(self, index: Any) -> jax.Array:
        return load(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        store(self, index, value)

    def __iter__(self):
        raise KernelTypeError(
            f"the tile view of {self.name} cannot be iterated; loop with jt.range(v.shape[0])", user_place()
        )

    def __repr__(self) -> str:
        return f"TileView({self.name}: {list(self.shape)} tiles of {list(self.tile_shape)})"


def _view(ref: Ref, sizes, step, pad) -> TileView:
    if len(sizes) != ref.ndim:
        raise KernelTypeError(
            f"{ref.name} has rank {ref.ndim}, but .tiles got {len(sizes)} sizes {tuple(sizes)}", user_place()
        )
    steps = step if isinstance(step, tuple | list) else (step,) * ref.ndim
    if len(steps) != ref.ndim:
        raise KernelTypeError(f"{ref.name} has rank {ref.ndim}, but .tiles got {len(steps)} steps", user_place())
    out = []
    for size, s in zip(sizes, steps, strict=True):
        for v, low, what in ((size, 0, "a tile size"), (s, 1, "a tile step")):
            static(v, f"{what} of {ref.name}")
            if v is not None and (isinstance(v, bool) or not isinstance(v, int | np.integer)):
                raise KernelTypeError(f"{what} of {ref.name} is a Python int, got {v!r}", user_place())
            if v is not None and v < low:
                raise KernelValueError(f"{what} of {ref.name} is at least {low}, got {v}", user_place())
        out.append(1 if size is None else int(s or size or 1))
        side(size or 0, f"a tile size of {ref.name}")
    return TileView(ref, tuple(None if n is None else int(n) for n in sizes), tuple(out), number(pad, ref.dtype, "pad"))


def as_ref(x) -> Ref | TileView:
    """The argument as something that can be loaded from: a Ref or a view; JAX's own Refs become Refs."""
    if isinstance(x, Ref | TileView):
        return x
    if isinstance(getattr(x, "aval", None), AbstractRef) or isinstance(x, jax.Ref):
        return Ref(x)
    raise KernelTypeError(f"expected a Ref or a tile view, got {kind_of(x)}", user_place())


def _tracer(x: Ref | TileView):
    return x.ref.tracer if isinstance(x, TileView) else x.tracer


def _operands(a: Access) -> list[Any]:
    return [jnp.asarray(v) for v in a.values]


def _mask(a: Access, mask) -> list[Any]:
    if mask is None:
        return []
    mask = tile_of(mask, "a mask")
    if mask.dtype != np.bool_:
        raise KernelTypeError(f"a mask is bool, got {mask.dtype}", user_place())
    return [a.before(mask)]


def _value(x: Ref | TileView, a: Access, value, what: str):
    """`value` as the primitive takes it: the Ref's dtype (Python numbers adapt, nothing else is converted),
    broadcast."""
    if isinstance(value, Ref):
        raise KernelTypeError(f"{value.name} is a Ref; load it before it is stored: {value.name}[...]", user_place())
    if isinstance(value, bool | int | float | complex) and not is_key(x.dtype):
        value = jnp.asarray(number(value, x.dtype, f"the value of this {what} to {x.name}"), x.dtype)
    value = tile_of(value, f"the value of this {what} to {x.name}")
    value = _adapted(value, x.dtype)
    if value.dtype != x.dtype:
        cast = f"convert it: value.astype({x.name}.dtype)"
        if is_complex(value.dtype) and not is_complex(x.dtype):
            cast = "store jnp.real(value), jnp.imag(value) or jnp.abs(value)"
        keys = is_key(x.dtype) or is_key(value.dtype)
        raise KernelTypeError(
            f"{x.name} has dtype {x.dtype.name}, but this {what} has a {value.dtype.name} value; "
            f"{'a random key is no number, nor made of one' if keys else cast}",
            user_place(),
        )
    return a.before(value)


def _adapted(value, dtype):
    """A value of a Python number's dtype in that of a Ref, if the Ref has room for its kind."""
    loses = is_complex(value.dtype) and not is_complex(dtype)
    if value.dtype == dtype or not value.weak_type or loses or is_key(dtype):
        return value
    return lax.convert_element_type(value, dtype)


def _writable(x: Ref | TileView, what: str) -> None:
    ref = x.ref if isinstance(x, TileView) else x
    if not ref.writable:
        raise KernelTypeError(
            f"{ref.name} is an input, and an input is read only: {what} an output, or alias {ref.name} with one "
            f"(alias={{...}})",
            user_place(),
        )


def load(x, index, mask=None, other=None) -> jax.Array:
    """The elements of Ref or view `x` at `index`.

    Args:
      x: a Ref or a tile view.
      index: as in `x[index]`.
      mask: bool, broadcast to the shape of the result.
      other: what masked lanes, and lanes outside the array, read; default: the view's pad, or 0. A traced value,
        which needs a mask, fills the masked lanes only.
    Returns:
      A tile of `x.dtype`.
    """
    x = as_ref(x)
    a = x.access(index)
    pad = x.pad if isinstance(x, TileView) else 0
    traced = isinstance(other, core.Tracer) or (other is not None and np.ndim(other) > 0)
    if traced and mask is None:
        raise KernelTypeError("without a mask, other is a number (what lanes outside the array read)", user_place())
    if other is not None and not traced:
        pad = number(other, x.dtype, "other")
    masked = _mask(a, mask)
    out = a.after(load_p.bind(_tracer(x), *_operands(a), *masked, dims=a.dims, pad=pad, masked=bool(masked)))
    return _filled(x, out, mask, other) if traced else out


def _filled(x, out, mask, other):
    """A loaded tile with the lanes of a traced `other` where `mask` is false."""
    other = _adapted(tile_of(other, "other"), x.dtype)
    if other.dtype != x.dtype:
        raise KernelTypeError(f"other has dtype {other.dtype.name}, but {x.name} has {x.dtype.name}", user_place())
    other = _index.broadcast(other, out.shape)
    return lax.select(_index.broadcast(mask, out.shape), out, other)


def store(x, index, value, mask=None) -> None:
    """Write elements of a Ref, or a tile of a view. Lanes outside of the array are not written.

    Args:
      x, index: a Ref or a tile view, and an index as in `x[index] = value`.
      value: of the dtype of `x`; it is broadcast.
      mask: bool, broadcast to the shape of the access; lanes where it is false are not written.
    """
    x = as_ref(x)
    _writable(x, "store to")
    a = x.access(index)
    masked = _mask(a, mask)
    value = _value(x, a, value, "store")
    store_p.bind(_tracer(x), *_operands(a), value, *masked, dims=a.dims, masked=bool(masked))
