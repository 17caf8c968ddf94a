"""Derivatives and batching of user reductions and scans.

`acc' = f(acc, x)` runs along an axis. Its derivative is the linear recurrence `t' = J t + w` with `J = df/dacc` and
`w = df/dx dx + df/dc dc` at every step, and the transpose of that is a linear recurrence the other way round, so one
primitive, `linear_scan`, serves every mode and every order. `J` is a matrix over the float leaves of `acc`: one tile
for each of its entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend import core as jexc
from jax.interpreters import ad, batching

from jtile._errors import TransformError
from jtile._parts import is_complex
from jtile.language import _primitives as prims
from jtile.language._place import user_place
from jtile.language._vmap import batch_size, front


def register() -> None:
    ad.primitive_jvps[prims.reduce_p] = _reduce_jvp
    ad.primitive_jvps[prims.scan_p] = _scan_jvp
    ad.primitive_jvps[linear_scan_p] = _linear_jvp
    ad.primitive_transposes[linear_scan_p] = _linear_transpose
    batching.primitive_batchers[prims.reduce_p] = _reduce_batch
    batching.primitive_batchers[prims.scan_p] = _scan_batch
    batching.primitive_batchers[linear_scan_p] = _linear_batch


# -- the linear recurrence -----------------------------------------------------------------------------------------

linear_scan_p = jexc.Primitive("jtile_linear_scan")
linear_scan_p.multiple_results = True


@linear_scan_p.def_abstract_eval
def _(*args, n, reverse):
    """`(*J, *w)` to `h[k] = J[k] h[k - 1] + w[k]` along the first axis; from the end if `reverse`. `J` has n x n tiles,
    row by row; its first (last, if `reverse`) row of numbers is not used."""
    del reverse
    return [core.ShapedArray(w.shape, w.dtype) for w in args[n * n :]]


def linear_scan(js, ws, reverse: bool) -> list[Any]:
    return linear_scan_p.bind(*js, *ws, n=len(ws), reverse=reverse)


def affine_scan(*args, n: int, reverse: bool) -> list[Any]:
    """What `linear_scan` means: an associative scan of affine maps."""
    from jtile.language.compute import associative_scan

    def then(first, second):
        (a, b), (c, d) = first, second
        matrix = [[_dot([c[i][k] for k in range(n)], [a[k][j] for k in range(n)]) for j in range(n)] for i in range(n)]
        return matrix, [_dot(c[i], b) + d[i] for i in range(n)]

    js, ws = args[: n * n], args[n * n :]
    matrix = [list(js[i * n : (i + 1) * n]) for i in range(n)]
    return associative_scan(then, (matrix, list(ws)), 0, reverse)[1]


def _dot(xs, ys):
    total = xs[0] * ys[0]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        total = total + x * y
    return total


def _shifted(x, reverse: bool):
    """`x[k - 1]` at k (`x[k + 1]` if `reverse`), zero at the start."""
    gap = jnp.zeros_like(x[:1])
    return jnp.concatenate([x[1:], gap]) if reverse else jnp.concatenate([gap, x[:-1]])


def _linear_jvp(primals, tangents, *, n, reverse):
    out = linear_scan_p.bind(*primals, n=n, reverse=reverse)
    djs, dws = tangents[: n * n], [ad.instantiate_zeros(t) for t in tangents[n * n :]]
    before = [_shifted(h, reverse) for h in out]
    for at, dj in enumerate(djs):
        if not isinstance(dj, ad.Zero):
            i, k = divmod(at, n)
            dws[i] = dws[i] + dj * before[k]
    return out, linear_scan(primals[: n * n], dws, reverse)


def _linear_transpose(cts, *args, n, reverse):
    """`h = J h- + w` transposed is `l = J+^T l+ + ct`: from the other end, with the next step's matrix."""
    js, ws = args[: n * n], args[n * n :]
    if any(ad.is_undefined_primal(j) for j in js):
        raise AssertionError("linear_scan is linear in w only")
    if all(isinstance(ct, ad.Zero) for ct in cts):
        return [None] * len(args)
    cts = [ad.instantiate_zeros(ct) for ct in cts]
    turned = [_shifted(js[k * n + i], not reverse) for i in range(n) for k in range(n)]
    out = linear_scan(turned, cts, not reverse)
    return [None] * len(js) + [v if ad.is_undefined_primal(w) else None for v, w in zip(out, ws, strict=True)]


def _linear_batch(args, dims, *, n, reverse):
    size = batch_size(args, dims)
    moved = [jnp.moveaxis(front(v, d, size), 0, 1) for v, d in zip(args, dims, strict=True)]
    return linear_scan_p.bind(*moved, n=n, reverse=reverse), [1] * n


# -- one step and its derivative -----------------------------------------------------------------------------------


class _Step:
    """The combiner on whole tiles, as a function of its float leaves; ints among the leaves are fixed.

    `consts` and `leaves` tell which arguments are floats; `wide` is the dtype that derivatives are computed in.
    """

    def __init__(self, jaxpr, consts: Sequence[Any], leaves: Sequence[Any]):
        self.jaxpr, self.consts = jaxpr, list(consts)
        if any(is_complex(x.dtype) for x in (*consts, *leaves)):
            raise TransformError(
                "a derivative is asked for, inside of the kernel, of a reduction or scan of complex numbers by a "
                "function: give it the real and imaginary parts, as the pytree (jnp.real(x), jnp.imag(x)), or "
                "differentiate the kernel",
                user_place(),
            )
        self.floats = [k for k, x in enumerate(leaves) if _is_float(x)]
        self.float_consts = [k for k, c in enumerate(consts) if _is_float(c)]
        self.wide = np.dtype(np.float64 if any(x.dtype.itemsize == 8 for x in self._float(leaves)) else np.float32)

    def _float(self, values) -> list[Any]:
        return [values[k] for k in self.floats]

    def outputs(self, consts, acc, x) -> list[Any]:
        """The results of the combiner, lane by lane."""
        return lanewise(self.jaxpr, consts, [*acc, *x])

    def derivative(self, acc, x, dconsts, dacc, dx):
        """`(J, w)` at every lane; tangents may be symbolic zeros. `dacc` is what moves a start, or None."""
        float_acc, float_x = self._float(acc), self._float(x)
        shape = float_acc[0].shape
        float_consts = [jnp.broadcast_to(self.consts[k], shape) for k in self.float_consts]

        def f(consts, a, v):
            merged = lambda values, places, new: [
                dict(zip(places, new, strict=True)).get(k, old) for k, old in enumerate(values)
            ]
            wide_consts = merged([jnp.broadcast_to(c, shape) for c in self.consts], self.float_consts, consts)
            out = lanewise(self.jaxpr, wide_consts, [*merged(acc, self.floats, a), *merged(x, self.floats, v)])
            return [out[k].astype(self.wide) for k in self.floats]

        def push(consts, a, v):
            fill = lambda ts, like: [jnp.zeros_like(y) if t is None else t for t, y in zip(ts, like, strict=True)]
            primals = (float_consts, float_acc, float_x)
            tangents = tuple(fill(t, p) for t, p in zip((consts, a, v), primals, strict=True))
            return jax.jvp(f, primals, tangents)[1]

        none = [None] * len(self.floats)
        columns = []
        for k in range(len(self.floats)):
            one = [jnp.ones_like(a) if j == k else None for j, a in enumerate(float_acc)]
            columns.append(push([None] * len(float_consts), one, none))
        rows = [columns[k][i] for i in range(len(columns)) for k in range(len(columns))]
        spread = [None if isinstance(t, ad.Zero) else jnp.broadcast_to(t, shape) for t in dconsts]
        w = push(spread, [None if t is None else t for t in (dacc or none)], [_known(t) for t in dx])
        return rows, w


def _known(t):
    return None if isinstance(t, ad.Zero) else t


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, np.floating)


def lanewise(jaxpr, consts, args) -> list[Any]:
    """A jaxpr over scalars, applied to every lane of tiles of one shape; a scalar counts for all lanes."""
    shape = args[-1].shape
    flat = [jnp.broadcast_to(v, shape).reshape(-1) for v in (*consts, *args)]
    out = jax.vmap(lambda *vs: core.eval_jaxpr(jaxpr, (), *vs), axis_size=math.prod(shape))(*flat)
    return [v.reshape(shape) for v in out]


def _tangents_of(step: _Step, outs, floats: Sequence[Any]) -> list[Any]:
    """Tangents of all leaves, in their dtypes."""
    by = dict(zip(step.floats, floats, strict=True))
    zeros = lambda v: ad.Zero(jax.typeof(v).to_tangent_aval())
    return [by[k].astype(v.dtype) if k in by else zeros(v) for k, v in enumerate(outs)]


# -- scans ---------------------------------------------------------------------------------------------------------


def _scan_jvp(primals, tangents, *, jaxpr, consts, axis, reverse):
    outs = prims.scan_p.bind(*primals, jaxpr=jaxpr, consts=consts, axis=axis, reverse=reverse)
    step = _Step(jaxpr, primals[:consts], outs)
    if not step.floats:
        return outs, [ad.Zero(jax.typeof(v).to_tangent_aval()) for v in outs]
    turn = lambda v: _first(v, axis, reverse)
    xs, ys = [turn(v) for v in primals[consts:]], [turn(v) for v in outs]
    dxs = [_moved(tangents[consts + k], turn) for k in step.floats]
    dconsts = [tangents[k] for k in step.float_consts]
    starts = [jnp.zeros(xs[k].shape, step.wide)[:1] if isinstance(t, ad.Zero) else t[:1].astype(step.wide)
              for k, t in zip(step.floats, dxs, strict=True)]  # fmt: skip
    if xs[0].shape[0] <= 1:
        found = starts if xs[0].shape[0] else [jnp.zeros(xs[0].shape, step.wide) for _ in starts]
    else:
        rest = [t if isinstance(t, ad.Zero) else t[1:] for t in dxs]
        js, ws = step.derivative([y[:-1] for y in ys], [x[1:] for x in xs], dconsts, None, rest)
        lead = jnp.zeros_like(js[0][:1])
        js = [jnp.concatenate([lead, j]) for j in js]
        found = linear_scan(js, [jnp.concatenate([s, w]) for s, w in zip(starts, ws, strict=True)], False)
    back = lambda v: jnp.moveaxis(lax.rev(v, (0,)) if reverse else v, 0, axis)
    return outs, _tangents_of(step, outs, [back(v) for v in found])


def _first(x, axis: int, reverse: bool):
    """The tile with the scanned axis in front, in the order of the scan."""
    x = jnp.moveaxis(x, axis, 0)
    return lax.rev(x, (0,)) if reverse else x


def _moved(t, move):
    return t if isinstance(t, ad.Zero) else move(t)


# -- reductions ----------------------------------------------------------------------------------------------------


def _reduce_jvp(primals, tangents, *, jaxpr, consts, axes):
    outs = prims.reduce_p.bind(*primals, jaxpr=jaxpr, consts=consts, axes=axes)
    n = len(outs)
    step = _Step(jaxpr, primals[:consts], outs)
    zeros = [ad.Zero(jax.typeof(v).to_tangent_aval()) for v in outs]
    if not step.floats or all(isinstance(t, ad.Zero) for t in tangents):
        return outs, zeros
    xs, inits = primals[consts : consts + n], primals[consts + n :]
    dxs, dinits = tangents[consts : consts + n], tangents[consts + n :]
    if (known := _known_derivative(jaxpr, consts, axes)) is not None:
        return outs, [
            known(k, x, i, dx, di) for k, (x, i, dx, di) in enumerate(zip(xs, inits, dxs, dinits, strict=True))
        ]
    rows = lambda v: _rows(v, axes)
    xs = [rows(x) for x in xs]
    dxs = [_moved(dxs[k], rows) for k in step.floats]
    dinits = [dinits[k] for k in step.floats]
    if xs[0].shape[0] == 0:
        lift = lambda t, v: jnp.broadcast_to(ad.instantiate_zeros(t), v.shape)
        return outs, _tangents_of(step, outs, [lift(t, outs[k]) for k, t in zip(step.floats, dinits, strict=True)])
    before = _prefixes(step, xs, inits)
    start = [None if isinstance(t, ad.Zero) else _at_first(t, xs[0].shape) for t in dinits]
    js, ws = step.derivative(before, xs, [tangents[k] for k in step.float_consts], start, dxs)
    js = [jnp.concatenate([jnp.zeros_like(j[:1]), j[1:]]) for j in js]  # the effect of the start is part of w
    return outs, _tangents_of(step, outs, [h[-1] for h in linear_scan(js, ws, False)])


def _rows(x, axes):
    """The tile with the reduced axes joined to one, in front."""
    keep = [k for k in range(x.ndim) if k not in axes]
    count = math.prod(x.shape[k] for k in axes)
    return jnp.transpose(x, (*axes, *keep)).reshape(count, *[x.shape[k] for k in keep])


def _prefixes(step: _Step, xs, inits) -> list[Any]:
    """The accumulator before every row."""
    starts = [jnp.broadcast_to(i, x[:1].shape) for i, x in zip(inits, xs, strict=True)]
    if xs[0].shape[0] == 1:
        return starts
    first = step.outputs(step.consts, starts, [x[:1] for x in xs])
    after = [jnp.concatenate([a, x[1:-1]]) for a, x in zip(first, xs, strict=True)]
    run = prims.scan_p.bind(*step.consts, *after, jaxpr=step.jaxpr, consts=len(step.consts), axis=0, reverse=False)
    return [jnp.concatenate([s, r]) for s, r in zip(starts, run, strict=True)]


def _at_first(t, shape):
    """A tangent of the start, on the lanes of the first row."""
    row = jnp.broadcast_to(t, (1, *shape[1:]))
    return jnp.concatenate([row, jnp.zeros((shape[0] - 1, *shape[1:]), row.dtype)])


def _known_derivative(jaxpr, consts: int, axes):
    """The derivative of sums, maxima and minima as JAX has it (ties share it evenly); None for other functions."""
    n = len(jaxpr.outvars)
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    accs, xs = jaxpr.invars[consts : consts + n], jaxpr.invars[consts + n :]
    names = []
    for a, x, out in zip(accs, xs, jaxpr.outvars, strict=True):
        eqn = None if hasattr(out, "val") else made.get(out)
        if eqn is None or eqn.primitive.name not in ("add", "max", "min"):
            return None
        if {v for v in eqn.invars if not hasattr(v, "val")} != {a, x}:
            return None
        names.append(eqn.primitive.name)

    def extreme(pick, reduce):
        return lambda x, i: pick(found := reduce(x, axes), jnp.broadcast_to(i, found.shape))

    functions = {
        "add": lambda x, i: jnp.sum(x, axes, dtype=x.dtype) + i,
        "max": extreme(lax.max, jnp.max),
        "min": extreme(lax.min, jnp.min),
    }

    def tangent(k, x, init, dx, dinit):
        if not _is_float(x) or (isinstance(dx, ad.Zero) and isinstance(dinit, ad.Zero)):
            out = [m for j, m in enumerate(x.shape) if j not in axes]
            return ad.Zero(core.ShapedArray(tuple(out), x.dtype).to_tangent_aval())
        if math.prod(x.shape[a] for a in axes) == 0:
            kept = [m for j, m in enumerate(x.shape) if j not in axes]
            return jnp.broadcast_to(ad.instantiate_zeros(dinit), kept)
        tangents = (ad.instantiate_zeros(dx), ad.instantiate_zeros(dinit))
        return jax.jvp(functions[names[k]], (x, init), tangents)[1]

    return tangent


# -- batches -------------------------------------------------------------------------------------------------------


def _scan_batch(args, dims, *, jaxpr, consts, axis, reverse):
    size = batch_size(args, dims)
    xs = [front(v, d, size) for v, d in zip(args[consts:], dims[consts:], strict=True)]
    wrapped, leaves, fixed = _with_batched_consts(jaxpr, args[:consts], dims[:consts], xs[0].shape)
    out = prims.scan_p.bind(*fixed, *leaves, *xs, jaxpr=wrapped, consts=len(fixed), axis=axis + 1, reverse=reverse)
    return out[len(leaves) :], [0] * len(xs)


def _with_batched_consts(jaxpr, consts, dims, shape):
    """Constants that differ over the batch become leaves that every step passes on: `(jaxpr, leaves, other consts)`."""
    moving = [k for k, d in enumerate(dims) if d is not None]
    if not moving:
        return jaxpr, [], list(consts)
    n, fixed = len(jaxpr.outvars), [k for k in range(len(consts)) if k not in moving]

    def run(*args):
        still, rest = args[: len(fixed)], args[len(fixed) :]
        first, second = rest[: len(moving) + n], rest[len(moving) + n :]
        values = dict(zip(fixed, still, strict=True)) | dict(zip(moving, first[: len(moving)], strict=True))
        inner = [values[k] for k in range(len(consts))]
        out = core.eval_jaxpr(jaxpr, (), *inner, *first[len(moving) :], *second[len(moving) :])
        return [*first[: len(moving)], *out]

    scalars = lambda vs: [jax.ShapeDtypeStruct((), v.aval.dtype if hasattr(v, "aval") else v.dtype) for v in vs]
    leaves = [consts[k] for k in moving]
    accs = [*scalars(leaves), *scalars(jaxpr.outvars)]
    closed = jax.make_jaxpr(run)(*scalars([consts[k] for k in fixed]), *accs, *accs)
    lanes = [lax.broadcast_in_dim(v, shape, (0,)) for v in leaves]
    return closed.jaxpr, lanes, [consts[k] for k in fixed]


def _reduce_batch(args, dims, *, jaxpr, consts, axes):
    size, n = batch_size(args, dims), (len(args) - consts) // 2
    xs = [front(v, d, size) for v, d in zip(args[consts : consts + n], dims[consts : consts + n], strict=True)]
    inits, dinits = args[consts + n :], dims[consts + n :]
    if all(d is None for d in (*dims[:consts], *dinits)):
        out = prims.reduce_p.bind(
            *args[:consts], *xs, *inits, jaxpr=jaxpr, consts=consts, axes=tuple(a + 1 for a in axes)
        )
        return out, [0] * n
    # Starts or constants that differ over the batch: a scan whose first row is the start, and its last row.
    rows = [_rows(x, tuple(a + 1 for a in axes)) for x in xs]  # [count, size, ...]
    starts = [front(i, d, size) for i, d in zip(inits, dinits, strict=True)]
    lift = lambda i, r: lax.broadcast_in_dim(i, (1, *r.shape[1:]), (1,))
    rows = [jnp.concatenate([lift(i, r), r]) for i, r in zip(starts, rows, strict=True)]
    batched = [jnp.moveaxis(r, 1, 0) for r in rows]
    run, _ = _scan_batch(
        [*args[:consts], *batched], [*dims[:consts], *[0] * n], jaxpr=jaxpr, consts=consts, axis=0, reverse=False
    )
    return [v[:, -1] for v in run], [0] * n
