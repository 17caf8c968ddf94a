"""The primitives of the language, and JAX's own on Refs, as functions of values; see `functional`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jtile.interpret import poison
from jtile.language._index import At, Span, Take, dims_shape

RULES: dict[str, Callable[..., Any]] = {}


class Cell:
    """A Ref: the array that it holds now."""

    def __init__(self, value: Any):
        self.value = value


def concrete(v: Any) -> bool:
    return not isinstance(v.value if isinstance(v, Cell) else v, core.Tracer)


def rule(*names: str):
    def register(fn):
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


# -- accesses --------------------------------------------------------------------------------------------------------


def lanes(dims: Sequence[Any], values: Sequence[Any], shape: Sequence[int], mask: Any) -> tuple[Any, Any]:
    """`(flat, active)` for each lane of an access: its element, and whether it is inside and not masked."""
    np_ = np if all(map(concrete, values)) and (mask is None or concrete(mask)) else jnp
    out = dims_shape(dims, [np.shape(v) for v in values])
    flat, active = np_.zeros(out, np.int32), np_.ones(out, bool) if mask is None else np_.asarray(mask)
    axis, taken = 0, None
    for d, v, n in zip(dims, values, shape, strict=True):
        v = np_.asarray(v).astype(np.int32)
        if isinstance(d, At):
            i = np_.broadcast_to(v, (1,) * len(out))
        elif isinstance(d, Take):
            taken, axis = (axis, axis + v.ndim) if taken is None else (taken, axis)
            i = v.reshape((1,) * taken + v.shape + (1,) * (len(out) - taken - v.ndim))
        else:
            start, step = (v, d.stride) if isinstance(d, Span) else (v * np.int32(d.step), 1)
            i = start + np_.arange(d.size, dtype=np.int32) * np.int32(step)
            i = i.reshape((1,) * axis + (-1,) + (1,) * (len(out) - axis - 1))
            axis += 1
        inside = np_.broadcast_to((i >= 0) & (i < n), out)
        active = active & inside
        flat = flat * np.int32(n) + np_.broadcast_to(np_.where((i >= 0) & (i < n), i, np.int32(0)), out)
    return np_.where(active, flat, np.int32(0)), active


def _run(flat: Any, active: Any) -> int | None:
    """Where the lanes start if they are neighbouring elements, all inside: short programs trace and compile fast."""
    if not (concrete(flat) and concrete(active)) or not flat.size or not np.all(active):
        return None
    at = np.asarray(flat).reshape(-1)
    return int(at[0]) if (at == at[0] + np.arange(at.size)).all() else None


_TO_FLAT = lax.GatherDimensionNumbers((), (0,), (0,))
_FROM_FLAT = lax.ScatterDimensionNumbers((), (0,), (0,))


def gather(x: Any, flat: Any, active: Any, pad: Any) -> Any:
    x = jnp.asarray(x)
    if not x.size:
        return jnp.full(flat.shape, pad, x.dtype)
    line, start = lax.reshape(x, (x.size,)), _run(flat, active)
    if start is not None:
        return lax.reshape(lax.slice(line, (start,), (start + flat.size,)), flat.shape)
    got = lax.gather(line, flat[..., None], _TO_FLAT, (1,), mode="clip")
    if concrete(active) and np.all(active):
        return got
    return lax.select(jnp.asarray(active), got, jnp.full(flat.shape, pad, x.dtype))


def scatter(cell: Cell, flat: Any, active: Any, value: Any, unique: bool) -> None:
    x = jnp.asarray(cell.value)
    line, start = lax.reshape(x, (x.size,)), _run(flat, active)
    if start is not None:
        out = lax.dynamic_update_slice(line, lax.reshape(value, (flat.size,)), (np.int32(start),))
    else:
        out = lax.scatter(line, _aimed(x, flat, active), value, _FROM_FLAT, unique_indices=unique, mode="drop")
    cell.value = lax.reshape(out, x.shape)


def _aimed(x: Any, flat: Any, active: Any) -> Any:
    """The lanes' elements as indices of a scatter: lanes that write nothing point outside, each elsewhere."""
    np_ = np if concrete(flat) and concrete(active) else jnp
    outside = np.int32(x.size) + np.arange(flat.size, dtype=np.int32).reshape(flat.shape)
    return np_.where(active, flat, outside)[..., None]


def _parts(eqn: Any, rest: Sequence[Any]) -> tuple[Any, Any, list[Any], Any]:
    """dims, index values, other operands, mask."""
    dims, masked = eqn.params["dims"], eqn.params["masked"]
    n = len(dims)
    return dims, rest[:n], list(rest[n:-1] if masked else rest[n:]), rest[-1] if masked else None


@rule("jtile_load")
def _(e, eqn, ref, *rest):
    dims, values, _, mask = _parts(eqn, rest)
    return gather(ref.value, *lanes(dims, values, ref.value.shape, mask), eqn.params["pad"])


@rule("jtile_store")
def _(e, eqn, ref, *rest):
    dims, values, (value,), mask = _parts(eqn, rest)
    unique = not any(isinstance(d, Take) for d in dims)
    scatter(ref, *lanes(dims, values, ref.value.shape, mask), jnp.asarray(value), unique)
    return []


_COMBINE = {
    "add": jnp.add, "max": jnp.maximum, "min": jnp.minimum, "and": jnp.bitwise_and, "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor, "xchg": lambda old, new: new,
}  # fmt: skip


@rule("jtile_atomic")
def _(e, eqn, ref, *rest):
    dims, values, (value, *compare), mask = _parts(eqn, rest)
    flat, active = lanes(dims, values, ref.value.shape, mask)
    fn, x = eqn.params["fn"], jnp.asarray(ref.value)
    unused = type(eqn.outvars[0]).__name__ == "DropVar"
    if fn == "add" and (unused or not any(isinstance(d, Take) for d in dims)):
        old = gather(x, flat, active, 0)
        line, at = lax.reshape(x, (x.size,)), _aimed(x, flat, active)
        ref.value = lax.reshape(lax.scatter_add(line, at, jnp.asarray(value), _FROM_FLAT, mode="drop"), x.shape)
        return old
    return _one_by_one(ref, fn, flat, active, value, compare)


def _one_by_one(ref: Cell, fn: str, flat: Any, active: Any, value: Any, compare: list[Any]) -> Any:
    """Lane after lane: later lanes see what earlier ones wrote."""

    def step(x, lane):
        at, on, v, *c = lane
        old = x.at[at].get(mode="clip")
        new = jnp.where(old == c[0], v, old) if fn == "cas" else _COMBINE[fn](old, v)
        return x.at[at].set(jnp.where(on, new, old)), jnp.where(on, old, jnp.zeros_like(old))

    x = jnp.asarray(ref.value)
    if not x.size:
        return jnp.zeros(flat.shape, x.dtype)
    columns = [jnp.asarray(v).reshape(-1) for v in (flat, active, value, *compare)]
    last, old = lax.scan(step, x.reshape(-1), columns)
    ref.value = last.reshape(x.shape)
    return old.reshape(flat.shape)


# -- JAX's own Refs --------------------------------------------------------------------------------------------------


def _positions(ref: Cell, leaves: Sequence[Any], tree: Any) -> Any:
    """The flat element of every lane of JAX's index, in the order of its result."""
    at = np.arange(ref.value.size, dtype=np.int32).reshape(ref.value.shape)
    for t in jax.tree.unflatten(tree, leaves):
        index = []
        for axis, e in enumerate(t.indices):
            if hasattr(e, "size") and hasattr(e, "stride") and not isinstance(e.start, int):
                taken = jnp.asarray(e.start) + jnp.arange(e.size) * e.stride
                at = jnp.take(jnp.asarray(at), taken, axis=axis)
                e = slice(None)
            elif hasattr(e, "size") and hasattr(e, "stride"):
                e = slice(e.start, e.start + e.size * e.stride, e.stride)
            index.append(e)
        on_host = all(concrete(i) for i in index if hasattr(i, "dtype"))
        at = at[tuple(index)] if on_host else jnp.asarray(at)[tuple(index)]
    return at


@rule("get")
def _(e, eqn, ref, *leaves):
    return jnp.asarray(ref.value).reshape(-1)[_positions(ref, leaves, eqn.params["tree"])]


@rule("swap", "addupdate")
def _(e, eqn, ref, value, *leaves):
    at = _positions(ref, leaves, eqn.params["tree"])
    x = jnp.asarray(ref.value)
    old, place = x.reshape(-1)[at], x.reshape(-1).at[at]
    adds = eqn.primitive.name == "addupdate"
    ref.value = (place.add(value) if adds else place.set(value)).reshape(x.shape)
    return [] if adds else old


@rule("new_ref", "ref", "mutable_array")
def _(e, eqn, x, **_):
    return Cell(x)


@rule("empty_ref")
def _(e, eqn):
    ty = eqn.params["ty"]
    return Cell(poison(ty.shape, np.dtype(ty.dtype).name))


@rule("freeze")
def _(e, eqn, ref):
    return ref.value


@rule("free_ref", "jtile_print", "jtile_assert_")
def _(e, eqn, *args):
    return []


# -- values ----------------------------------------------------------------------------------------------------------


@rule("jtile_program_id")
def _(e, eqn):
    return np.int32(e.ids[eqn.params["axis"]])


@rule("jtile_num_programs")
def _(e, eqn):
    return np.int32(e.grid[eqn.params["axis"]])


@rule("jtile_loop_hint")
def _(e, eqn, k):
    return k


def _product(a: Any, b: Any, dtype: Any) -> Any:
    a, b = (jnp.asarray(x).astype(dtype) for x in (a, b))
    return jnp.matmul(a, b, precision="highest")


@rule("jtile_dot")
def _(e, eqn, a, b, *acc):
    out = _product(a, b, eqn.outvars[0].aval.dtype)
    return acc[0] + out if acc else out


@rule("jtile_dot_scaled")
def _(e, eqn, *args):
    it = iter(args)
    scaled_a, scaled_b, added = eqn.params["has"]
    a, sa = next(it), next(it) if scaled_a else None
    b, sb = next(it), next(it) if scaled_b else None
    acc = next(it) if added else None
    wide = lambda x: jnp.asarray(x).astype(jnp.float32)
    a, b = wide(a), wide(b)
    a = a if sa is None else a * jnp.repeat(wide(sa), a.shape[1] // sa.shape[1], 1)
    b = b if sb is None else b * jnp.repeat(wide(sb), b.shape[0] // sb.shape[0], 0)
    out = _product(a, b, jnp.float32)
    return out if acc is None else acc + out


def _combiner(e: Any, eqn: Any, consts: Sequence[Any]) -> Callable[..., list[Any]]:
    """The user's function of scalars, on vectors."""
    run = e.function(eqn.params["jaxpr"])
    return lambda acc, x: jax.vmap(lambda a, b: [jnp.asarray(v) for v in run(*consts, *a, *b)])(acc, x)


@rule("jtile_reduce")
def _(e, eqn, *args):
    n, axes = eqn.params["consts"], eqn.params["axes"]
    consts, rest = args[:n], args[n:]
    xs, inits = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    fn, keep = _combiner(e, eqn, consts), [k for k in range(xs[0].ndim) if k not in axes]
    out = [v.aval.shape for v in eqn.outvars]
    columns = [jnp.transpose(x, (*axes, *keep)).reshape(-1, int(np.prod(s))) for x, s in zip(xs, out)]
    acc = [jnp.broadcast_to(i, c.shape[1:]) for i, c in zip(inits, columns)]
    for k in range(columns[0].shape[0]):
        acc = fn(acc, [c[k] for c in columns])
    return [a.reshape(s) for a, s in zip(acc, out)]


@rule("jtile_associative_scan")
def _(e, eqn, *args):
    n, axis = eqn.params["consts"], eqn.params["axis"]
    consts, xs = args[:n], args[n:]
    fn, shape = _combiner(e, eqn, consts), xs[0].shape
    order = range(shape[axis])[::-1] if eqn.params["reverse"] else range(shape[axis])
    rows = [jnp.moveaxis(x, axis, 0) for x in xs]
    done: list[Any] = [None] * shape[axis]
    for count, k in enumerate(order):
        now = [r[k].reshape(-1) for r in rows]
        done[k] = now if count == 0 else fn(done[order[count - 1]], now)
    if not done:
        return list(xs)
    rest = rows[0].shape[1:]
    return [jnp.moveaxis(jnp.stack([d[j].reshape(rest) for d in done]), 0, axis) for j in range(len(xs))]


@rule("jtile_take")
def _(e, eqn, x, indices):
    return jnp.asarray(x)[indices]


@rule("jtile_put")
def _(e, eqn, x, indices, updates):
    return getattr(jnp.asarray(x).at[indices], eqn.params["fn"])(updates, mode="drop")
