"""Matrix products: any `dot_general` becomes a batched `Dot` between reshapes; convolutions become sums of dots."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile import ir
from jtile.language.compute import precision_name
from jtile.trace.lower import Lowering, rule
from jtile.trace.rules.shapes import transpose


@rule("jtile_dot")
def _(c: Lowering, a, b, *acc, precision):
    (a, ta), (b, tb) = _untransposed(a), _untransposed(b)
    return c.add(ir.Dot(a, b, acc[0] if acc else None, ta, tb, precision))


def _untransposed(x: ir.Value) -> tuple[ir.Value, bool]:
    """The operand of a transpose of the last two axes, and True; else the value itself."""
    if isinstance(x.op, ir.Transpose) and x.type.rank >= 2:
        n = x.type.rank
        if x.op.perm == (*range(n - 2), n - 1, n - 2):
            return x.op.x, True
    return x, False


@rule("jtile_dot_scaled")
def _(c: Lowering, *args, has):
    given = iter(args)
    a = next(given)
    sa = next(given) if has[0] else None
    b = next(given)
    sb = next(given) if has[1] else None
    return c.add(ir.DotScaled(a, sa, b, sb, next(given) if has[2] else None))


@rule("dot_general")
def _(c: Lowering, a, b, *, dimension_numbers, precision=None, **_):
    a, b = _one_kind(c, a, b)
    (ca, cb), (ba, bb) = dimension_numbers
    fa = [k for k in range(a.type.rank) if k not in (*ca, *ba)]
    fb = [k for k in range(b.type.rank) if k not in (*cb, *bb)]
    sizes = lambda x, axes: [x.type.shape[k] for k in axes]
    batch, m, n, k = sizes(a, ba), math.prod(sizes(a, fa)), math.prod(sizes(b, fb)), math.prod(sizes(a, ca))
    lhs, ta = _operand(c, a, ba, fa, ca, (*batch, m, k))
    rhs, tb = _operand(c, b, bb, cb, fb, (*batch, k, n))
    out = c.add(ir.Dot(lhs, rhs, None, ta, tb, precision_name(_plain(precision))))
    return c.b.cast(c.b.reshape(out, [*batch, *sizes(a, fa), *sizes(b, fb)]), c.out.dtype)


def _plain(precision):
    """The name of a precision. JAX also has algorithms (`DotAlgorithmPreset`): those beyond the default are
    "highest"."""
    if precision is None or isinstance(precision, tuple | str | lax.Precision):
        return precision if precision != (None, None) else None
    return "default" if "DEFAULT" in str(precision) else "highest"


def _one_kind(c: Lowering, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Operands that `Dot` takes: two floats or two ints, as wide as the result asks for."""
    out = c.out.info
    if out.kind not in "fiu":
        raise c.unsupported(f"a dot of {a.type.dtype} and {b.type.dtype}; convert the operands to floats or ints first")
    if a.type.info.kind != b.type.info.kind or "b" in (a.type.info.kind, b.type.info.kind):
        common = out.name
        if {a.type.info.kind, b.type.info.kind} <= set("iu") and out.kind in "iu":
            return a, b
        a, b = c.b.cast(a, common), c.b.cast(b, common)
    if out.kind == "f" and a.type.info.kind in "iu":
        a, b = c.b.cast(a, out.name), c.b.cast(b, out.name)
    if out.bits == 64 and ir.accumulator_dtype(a.type.dtype, b.type.dtype) not in ("float64", "int64"):
        a, b = c.b.cast(a, out.name), c.b.cast(b, out.name)
    return a, b


def _operand(c: Lowering, x: ir.Value, batch, rows, columns, shape) -> tuple[ir.Value, bool]:
    """`x` as [*batch, rows, columns] or, where that saves the transpose, [*batch, columns, rows] and True."""
    flipped = [*batch, *columns, *rows]
    if flipped == list(range(x.type.rank)) and [*batch, *rows, *columns] != flipped:
        return c.b.reshape(x, (*shape[:-2], shape[-1], shape[-2])), True
    return c.b.reshape(transpose(c, x, (*batch, *rows, *columns)), shape), False


@rule("conv_general_dilated")
def _(c: Lowering, x, w, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
      batch_group_count, **_):  # fmt: skip
    window = [w.type.shape[k] for k in dimension_numbers.rhs_spec[2:]]
    out = [c.out.shape[k] for k in dimension_numbers.out_spec[2:]]
    if min(math.prod(window), math.prod(out)) > _MOST_DOTS:
        raise c.unsupported(
            f"a convolution whose window and whose result both have more than {_MOST_DOTS} elements; write the "
            "loop over the window"
        )
    dtype = ir.DTYPES[c.out.dtype].numpy
    groups = max(feature_group_count, batch_group_count)
    # A window that is larger than the result (the derivative with respect to weights): one dot for each result.
    sum_up = _window_sum if math.prod(window) <= math.prod(out) else _window_dots

    def conv(x, w):
        x = lax.transpose(x, dimension_numbers.lhs_spec)
        w = lax.transpose(w, dimension_numbers.rhs_spec)
        edges = [(0, 0, 0), (0, 0, 0), *[(lo, hi, d - 1) for (lo, hi), d in zip(padding, lhs_dilation, strict=True)]]
        x = _grouped(lax.pad(x, jnp.zeros((), x.dtype), edges), 1 if feature_group_count > 1 else 0, groups)
        y = sum_up(x, _grouped(w, 0, groups), out, window_strides, rhs_dilation)  # [groups, n, o, *out]
        y = jnp.moveaxis(y, 0, 1).reshape(y.shape[1], y.shape[0] * y.shape[2], *out)
        return lax.transpose(y.astype(dtype), np.argsort(dimension_numbers.out_spec))

    return c.call(conv, x, w)


_MOST_DOTS = 128  # products into which a convolution is turned, at most


def _grouped(x, axis: int, groups: int):
    """An axis split into (groups, rest), the groups in front."""
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _window_sum(x, w, out, strides, dilation):
    """x [g, n, c, *space], w [g, o, c, *window]: one dot for each element of the window, summed; [g, n, o, *out]."""
    acc: Any = None
    for at in itertools.product(*map(range, w.shape[3:])):
        starts = [k * d for k, d in zip(at, dilation, strict=True)]
        stops = [lo + (n - 1) * s + 1 if n else lo for lo, n, s in zip(starts, out, strides, strict=True)]
        part = lax.slice(x, (0, 0, 0, *starts), (*x.shape[:3], *stops), (1, 1, 1, *strides))
        term = _contract(part, w[(slice(None), slice(None), slice(None), *at)], 1)  # [g, n, *out, o]
        acc = term if acc is None else acc + term
    return jnp.moveaxis(acc, -1, 2)


def _window_dots(x, w, out, strides, dilation):
    """The result of `_window_sum`, by one dot over the whole window for each element of the result."""
    window, found = w.shape[3:], []
    for at in itertools.product(*map(range, out)):
        starts = [k * s for k, s in zip(at, strides, strict=True)]
        stops = [lo + (n - 1) * d + 1 for lo, n, d in zip(starts, window, dilation, strict=True)]
        part = lax.slice(x, (0, 0, 0, *starts), (*x.shape[:3], *stops), (1, 1, 1, *dilation))
        found.append(_contract(part, w, 1 + len(window)))
    if not found:
        return jnp.zeros((x.shape[0], x.shape[1], w.shape[1], *out), _wide(x.dtype))
    return jnp.stack(found, -1).reshape(*found[0].shape, *out)


def _contract(part, w, axes: int):
    """[g, n, *contracted, *rest] with [g, o, *contracted]: the first `axes` axes after g and n; [g, n, *rest, o]."""
    inner = range(2, 2 + axes)
    if part.shape[0] == 1:
        shifted = tuple(k - 1 for k in inner)
        out = lax.dot_general(part[0], w[0], ((shifted, shifted), ((), ())), preferred_element_type=_wide(part.dtype))
        return out[None]
    numbers = ((tuple(inner), tuple(inner)), ((0,), (0,)))
    return lax.dot_general(part, w, numbers, preferred_element_type=_wide(part.dtype))


def _wide(dtype):
    return np.dtype(ir.accumulator_dtype(np.dtype(dtype).name, np.dtype(dtype).name))
