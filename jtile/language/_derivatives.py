"""JAX's rules for the language's pure primitives, so that `jax.jvp`, `jax.vjp`, `jax.linearize` and `jax.vmap` of
functions of tiles work inside of a kernel. User reductions and scans: `_recurrences`; loads, stores, atomics: `_vmap`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jtile._errors import TransformError
from jtile.ir.types import dtype_info
from jtile.language import _block_primitives as block
from jtile.language import _guards, _recurrences, _vmap
from jtile.language import _primitives as prims
from jtile.language._place import user_place


def register() -> None:
    """Make the rules known to JAX; done once, before the first trace."""
    for p, jvp in _JVPS.items():
        ad.primitive_jvps[p] = jvp
    for p, transpose in _TRANSPOSES.items():
        ad.primitive_transposes[p] = transpose
    for p, batch in _BATCHERS.items():
        batching.primitive_batchers[p] = batch
    for p in block.PRIMITIVES:
        ad.primitive_jvps[p] = _no_rule(p, "differentiated")
        batching.primitive_batchers[p] = _no_rule(p, "batched by jax.vmap")
    _recurrences.register()
    _vmap.register()
    _guards.register()


def _no_rule(p, what: str):
    """The rule of a primitive of the block level: schedules are written, not derived."""

    def refuse(*_, **__):
        name = p.name.removeprefix("jtile_")
        raise TransformError(f"{name} is of the block level and cannot be {what} inside of a kernel", user_place())

    return refuse


def zero(t) -> bool:
    """Whether a tangent or cotangent is known to be zero."""
    return isinstance(t, ad.Zero)


def zero_of(x) -> Any:
    """The zero tangent of a value: float0 for ints."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def linear(x) -> bool:
    return ad.is_undefined_primal(x)


# -- products ------------------------------------------------------------------------------------------------------
# d(acc + a @ b) = dacc + da @ b + a @ db, a chain of dots that accumulate.


def _dot_jvp(primals, tangents, *, precision):
    out = prims.dot_p.bind(*primals, precision=precision)
    if not jnp.issubdtype(out.dtype, np.inexact):
        return out, zero_of(out)
    (a, b, *_), (da, db, *more) = primals, tangents
    total = [t for t in more if not zero(t)]
    for x, y, moves in ((da, b, not zero(da)), (a, db, not zero(db))):
        if moves:
            total = [prims.dot_p.bind(x, y, *total, precision=precision)]
    return out, total[0] if total else zero_of(out)


def _dot_transpose(ct, a, b, *acc, precision):
    """ct @ b^T and a^T @ ct, accumulated in the dtype of ct (float32 at least) and rounded to the operand's."""
    if zero(ct):
        return [None] * (2 + len(acc))
    flip = lambda x: jnp.swapaxes(x, -1, -2)
    ct_a = ct_b = None
    if linear(a):
        ct_a = prims.dot_p.bind(ct, flip(b), precision=precision).astype(a.aval.dtype)
    if linear(b):
        ct_b = prims.dot_p.bind(flip(a), ct, precision=precision).astype(b.aval.dtype)
    return [ct_a, ct_b, *[ct if linear(v) else None for v in acc]]


def _dot_batch(args, dims, *, precision):
    (a, b, *acc), (da, db, *dacc) = args, dims
    size = _vmap.batch_size(args, dims)
    if db is None and b.ndim == 2:  # one wider product instead of a batch of them
        a = jnp.moveaxis(a, da, 0) if da is not None else jnp.broadcast_to(a, (size, *a.shape))
        rows = [
            x.reshape(-1, x.shape[-1]) for x in (a, *[_vmap.front(v, d, size) for v, d in zip(acc, dacc, strict=True)])
        ]
        out = prims.dot_p.bind(rows[0], b, *rows[1:], precision=precision)
        return out.reshape(size, -1, out.shape[-1]), 0
    return prims.dot_p.bind(*[_vmap.front(v, d, size) for v, d in zip(args, dims, strict=True)], precision=precision), 0


def _dot_scaled_jvp(primals, tangents, *, has):
    out = prims.dot_scaled_p.bind(*primals, has=has)
    names = [
        n for n, given in zip(("a", "sa", "b", "sb", "acc"), (True, has[0], True, has[1], has[2]), strict=True) if given
    ]
    moving = [k for k, t in enumerate(tangents) if not zero(t)]
    for k in moving:
        _check_carries(names[k], primals[k].dtype)

    def decoded(*values):
        given = dict(zip(names, primals, strict=True)) | {names[k]: v for k, v in zip(moving, values, strict=True)}
        a, b = (_decoded(given[n], given.get("s" + n), axis) for n, axis in (("a", 1), ("b", 0)))
        return prims.dot_p.bind(a, b, *([given["acc"]] if has[2] else []), precision="default")

    if not moving:
        return out, zero_of(out)
    return out, jax.jvp(decoded, [primals[k] for k in moving], [tangents[k] for k in moving])[1]


def _check_carries(name: str, dtype) -> None:
    info = dtype_info(dtype)
    if info.bits < 8 or info.name == "float8_e8m0fnu":
        raise TransformError(
            f"the derivative of jt.dot_scaled with respect to {name} would be {info.name}, which cannot hold one (too "
            "few values, or no sign and no zero); differentiate with respect to what it was quantised from: pass "
            f"jax.lax.stop_gradient({name}) here, and give the kernel its derivative with defvjp",
            user_place(),
        )


def _decoded(x, scale, axis: int):
    """What the elements of a block-scaled operand count as, in float32."""
    x = x.astype(jnp.float32)
    if scale is None:
        return x
    times = x.shape[axis] // scale.shape[axis]
    scale = scale.astype(jnp.float32)
    shape = [*scale.shape[: axis + 1], times, *scale.shape[axis + 1 :]]
    wide = lax.broadcast_in_dim(scale, shape, [k for k in range(3) if k != axis + 1])
    return x * wide.reshape(x.shape)


def _dot_scaled_batch(args, dims, *, has):
    """A batch of block-scaled products is one product for each of its elements, since there is no batched one."""
    size = _vmap.batch_size(args, dims)
    pick = lambda v, d, k: v if d is None else lax.index_in_dim(v, k, d, keepdims=False)
    outs = [
        prims.dot_scaled_p.bind(*[pick(v, d, k) for v, d in zip(args, dims, strict=True)], has=has) for k in range(size)
    ]
    return jnp.stack(outs), 0


# -- gather and scatter of values ----------------------------------------------------------------------------------


def _take_jvp(primals, tangents):
    (x, indices), (dx, _) = primals, tangents
    out = prims.take_p.bind(x, indices)
    return out, zero_of(out) if zero(dx) else prims.take_p.bind(dx, indices)


def _take_transpose(ct, x, indices):
    if zero(ct):
        return [None, None]
    start = jnp.zeros(x.aval.shape, x.aval.dtype)
    return [prims.put_p.bind(start, indices, ct, fn="add"), None]


def _put_jvp(primals, tangents, *, fn):
    (x, indices, updates), (dx, _, dupdates) = primals, tangents
    out = prims.put_p.bind(x, indices, updates, fn=fn)
    if zero(dx) and zero(dupdates):
        return out, zero_of(out)
    if fn not in ("set", "add"):
        raise TransformError(
            f"the derivative of a scatter with {fn} is not defined; only set and add are", user_place()
        )
    dx, dupdates = ad.instantiate_zeros(dx), ad.instantiate_zeros(dupdates)
    return out, prims.put_p.bind(dx, indices, dupdates, fn=fn)


def _put_transpose(ct, x, indices, updates, *, fn):
    if zero(ct):
        return [None, None, None]
    n, zeros = ct.shape[0], lambda v: jnp.zeros(v.shape, ct.dtype)
    inside = (indices >= 0) & (indices < n)
    lands = inside
    if fn == "set":  # where several updates name one element, the last one stays
        order = lax.iota(np.dtype(np.int32), indices.shape[0])
        last = prims.put_p.bind(jnp.full((n,), -1, np.dtype(np.int32)), indices, order, fn="set")
        lands = inside & (prims.take_p.bind(last, jnp.where(inside, indices, jnp.zeros_like(indices))) == order)
    ct_x = ct_updates = None
    if linear(x):
        ct_x = ct if fn == "add" else prims.put_p.bind(ct, indices, zeros(indices), fn="set")
    if linear(updates):
        got = prims.take_p.bind(ct, jnp.where(inside, indices, jnp.zeros_like(indices)))
        ct_updates = jnp.where(lands, got, zeros(got))
    return [ct_x, None, ct_updates]


def _take_batch(args, dims):
    size = _vmap.batch_size(args, dims)
    (x, indices), (dx, _) = args, dims
    indices = _vmap.front(indices, dims[1], size)
    if dx is not None:
        x = _vmap.front(x, dx, size)
        indices, x = indices + _rows(indices, x.shape[1]), x.reshape(-1)
    return prims.take_p.bind(x, indices.reshape(-1)).reshape(indices.shape), 0


def _put_batch(args, dims, *, fn):
    size = _vmap.batch_size(args, dims)
    x, indices, updates = (_vmap.front(v, d, size) for v, d in zip(args, dims, strict=True))
    n = x.shape[1]
    inside = (indices >= 0) & (indices < n)  # what fell outside must not land in the next row
    at = jnp.where(inside, indices + _rows(indices, n), jnp.full_like(indices, -1))
    return prims.put_p.bind(x.reshape(-1), at.reshape(-1), updates.reshape(-1), fn=fn).reshape(x.shape), 0


def _rows(indices, n: int):
    """Where each row of a flattened [size, n] array starts, over `indices` [size, count]."""
    return lax.broadcasted_iota(indices.dtype, indices.shape, 0) * np.asarray(n, indices.dtype)


# -- the rest ------------------------------------------------------------------------------------------------------


def _hint_batch(args, dims, **params):
    return prims.loop_hint_p.bind(args[0], **params), dims[0]


def _load_jvp(primals, tangents, *, dims, pad, masked):
    """A Ref that has a tangent is one of JAX's own, made within the function that is differentiated."""
    out = prims.load_p.bind(*primals, dims=dims, pad=pad, masked=masked)
    if zero(tangents[0]):
        return out, zero_of(out)
    return out, prims.load_p.bind(tangents[0], *primals[1:], dims=dims, pad=0, masked=masked)


def _store_jvp(primals, tangents, *, dims, masked):
    n = 1 + len(dims)
    if zero(tangents[0]):
        _check_lost("store", tangents)
    else:
        moved = ad.instantiate_zeros(tangents[n])
        prims.store_p.bind(tangents[0], *primals[1:n], moved, *primals[n + 1 :], dims=dims, masked=masked)
    return prims.store_p.bind(*primals, dims=dims, masked=masked), []


def _atomic_jvp(primals, tangents, **params):
    _check_lost("atomic " + params["fn"], tangents)
    out = prims.atomic_p.bind(*primals, **params)
    return out, zero_of(out)


def _arrive_jvp(primals, tangents, **params):
    del tangents  # the operands are ints, whose tangents are zero
    out = prims.last_arrival_p.bind(*primals, **params)
    return out, zero_of(out)


def _arrive_batch(*_, **__):
    raise TransformError(
        "jt.arrive under jax.vmap inside of a kernel: a program arrives as one; arrive outside of the mapped function",
        user_place(),
    )


def _device_batch(p):
    def refuse(*_, **__):
        what = p.name.removeprefix("jtile_")
        raise TransformError(
            f"{what} under jax.vmap inside of a kernel: a program talks to other devices as one; leave it outside of "
            "the mapped function",
            user_place(),
        )

    return refuse


_DEVICES = (prims.on_p, prims.signal_p, prims.wait_signal_p, prims.post_p, prims.receive_p)


def _check_lost(what: str, tangents) -> None:
    if any(not zero(t) for t in tangents):
        raise TransformError(
            f"a {what} to a Ref inside of a function that is differentiated within the kernel would lose the "
            "derivative of its value: return the value from that function and store it outside, or store "
            "jax.lax.stop_gradient(value)",
            user_place(),
        )


def _shown_jvp(p):
    """Values are printed and asserted on, tangents are not."""
    return lambda primals, tangents, **params: (p.bind(*primals, **params), [])


_JVPS: dict[Any, Any] = {
    prims.dot_p: _dot_jvp,
    prims.dot_scaled_p: _dot_scaled_jvp,
    prims.take_p: _take_jvp,
    prims.put_p: _put_jvp,
    prims.load_p: _load_jvp,
    prims.store_p: _store_jvp,
    prims.atomic_p: _atomic_jvp,
    prims.last_arrival_p: _arrive_jvp,
    prims.signal_p: _shown_jvp(prims.signal_p),
    prims.wait_signal_p: _shown_jvp(prims.wait_signal_p),
    prims.print_p: _shown_jvp(prims.print_p),
    prims.assert_p: _shown_jvp(prims.assert_p),
    prims.loop_hint_p: lambda primals, tangents, **p: (prims.loop_hint_p.bind(*primals, **p), tangents[0]),
}
_TRANSPOSES: dict[Any, Any] = {
    prims.dot_p: _dot_transpose,
    prims.take_p: _take_transpose,
    prims.put_p: _put_transpose,
}
_BATCHERS: dict[Any, Any] = {
    prims.dot_p: _dot_batch,
    prims.dot_scaled_p: _dot_scaled_batch,
    prims.take_p: _take_batch,
    prims.put_p: _put_batch,
    prims.loop_hint_p: _hint_batch,
    prims.last_arrival_p: _arrive_batch,
    **{p: _device_batch(p) for p in _DEVICES},
    prims.any_lane_p: lambda args, dims: (args[0].any(dims[0]), None),
}
