"""A function of JAX evaluated by NumPy, op by op: what a reference costs that is run once.

XLA takes 10 to 150 ms to compile a small program, and NumPy microseconds to run it. `evaluated(f)` traces `f`, so that
derivatives and batches are JAX's own, and walks the jaxpr: NumPy where the meaning of a primitive is one expression of
it, the primitive's own eager call (XLA, or a kernel) everywhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from jtile.language._equations import bind, opened, scan_counts
from jtile.testing.convolved import convolved

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}

_NARROW = tuple(map(jax.numpy.dtype, ("bfloat16", "float16")))
_extended = lambda v: not isinstance(v.aval.dtype, np.dtype)  # a variable of typed random keys


def evaluated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` without jit: the same results, as NumPy arrays, within the rounding of its dtypes."""

    @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), walked(closed, jax.tree.leaves(args)))

    return run


def walked(closed: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr for arrays, as `evaluated` computes them."""
    with np.errstate(all="ignore"):
        outs = _walk(closed.jaxpr, closed.consts, args)
    return [_array(x, v.aval) for x, v in zip(outs, closed.jaxpr.outvars, strict=True)]


def _array(x: Any, aval: Any) -> Any:
    """The value of a variable of this type: NumPy's where NumPy has it (typed random keys stay JAX's)."""
    return np.asarray(x, aval.dtype) if isinstance(aval.dtype, np.dtype) else x


def _walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, jexc.Literal) else values[v]
    for eqn in jaxpr.eqns:
        operands = [_array(read(v), v.aval) for v in eqn.invars]
        plain = not any(map(_extended, eqn.invars))
        found = RULES.get(eqn.primitive.name if plain else "", _bind)(eqn, *operands)
        for v, x in zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True):
            values[v] = _array(x, v.aval)
    return [read(v) for v in jaxpr.outvars]


def _inner(closed: Any, operands: Sequence[Any]) -> list[Any]:
    return _walk(*opened(closed), operands)


def _bind(eqn: Any, *operands: Any) -> Any:
    found = bind(eqn, operands)
    return found if eqn.primitive.multiple_results else found[0]


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


# -- element by element ------------------------------------------------------------------------------------------------


def _floating(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, np.floating)  # NumPy's `kind` of bfloat16 is no float's


def _wide(x: Any) -> Any:
    return x.astype(np.float32) if x.dtype in _NARROW else x


def _unary(fn: Callable[..., Any]) -> Rule:
    return lambda eqn, x: fn(_wide(x))


def _binary(fn: Callable[..., Any]) -> Rule:
    return lambda eqn, x, y: fn(_wide(x), _wide(y))


def _erf(name: str) -> Callable[..., Any]:
    def fn(x: Any) -> Any:
        import scipy.special

        return getattr(scipy.special, name)(x)

    return fn


def _divide(x: Any, y: Any) -> Any:
    """Division as XLA's: that of integers rounds towards zero, and gives -1 for a division by zero."""
    if x.dtype.kind not in "iu":
        return x / y
    quotient = np.where(y == 0, np.array(-1).astype(x.dtype), x // np.where(y == 0, 1, y))
    return quotient + ((y != 0) & ((x < 0) != (y < 0)) & (quotient * y != x))


RULES |= {
    name: _unary(fn)
    for name, fn in {
        "neg": np.negative, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "exp": np.exp,
        "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "sqrt": np.sqrt, "cbrt": np.cbrt,
        "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square, "abs": np.abs, "sign": np.sign, "floor": np.floor,
        "ceil": np.ceil, "not": np.invert, "is_finite": np.isfinite, "logistic": lambda x: 1 / (1 + np.exp(-x)),
        "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "atan": np.arctan, "erf": _erf("erf"),
        "erfc": _erf("erfc"), "real": np.real, "imag": np.imag, "conj": np.conj,
        "one_minus_square": lambda x: 1 - x * x,
        "stop_gradient": lambda x: x, "copy": lambda x: x, "copy_p": lambda x: x,
    }.items()
}  # fmt: skip
RULES |= {
    name: _binary(fn)
    for name, fn in {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "div": _divide,
        "add_any": np.add, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        "atan2": np.arctan2,
    }.items()
}  # fmt: skip


@rule("rem")
def _(eqn: Any, x: Any, y: Any) -> Any:
    if x.dtype.kind in "iu":
        return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))
    return np.fmod(_wide(x), _wide(y))


def _shift(fn: Callable[..., Any], beyond: Callable[..., Any]) -> Rule:
    """A shift; one by more than the bits of the operand leaves nothing of it but its sign, if it has one."""

    def run(eqn: Any, x: Any, by: Any) -> Any:
        bits = 8 * x.dtype.itemsize
        far = (by < 0) | (by >= bits)
        return np.where(far, beyond(x), fn(x, np.where(far, 0, by).astype(x.dtype)))

    return run


def _right(kind: str) -> Callable[..., Any]:
    """A right shift of the operand's bits, which count as a number of this kind whether its dtype is signed or not."""

    def run(x: Any, by: Any) -> Any:
        own = np.dtype(f"{kind}{x.dtype.itemsize}")
        return (x.view(own) >> by.astype(own)).view(x.dtype)

    return run


def _signs(x: Any) -> Any:
    signed = x.view(np.dtype(f"i{x.dtype.itemsize}"))
    return (-(signed < 0).astype(signed.dtype)).view(x.dtype)


RULES |= {
    "shift_left": _shift(np.left_shift, np.zeros_like),
    "shift_right_logical": _shift(_right("u"), np.zeros_like),
    "shift_right_arithmetic": _shift(_right("i"), _signs),
}


@rule("integer_pow")
def _(eqn: Any, x: Any) -> Any:
    y = eqn.params["y"]
    return 1 / _wide(x) ** -y if y < 0 else _wide(x) ** y


@rule("pow")
def _(eqn: Any, x: Any, y: Any) -> Any:
    return np.power(_wide(x), _wide(y)) if _floating(x.dtype) and x.dtype == y.dtype else _bind(eqn, x, y)


@rule("round")
def _(eqn: Any, x: Any) -> Any:
    if eqn.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.rint(_wide(x))
    whole = np.trunc(x := _wide(x))
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0)


@rule("select_n")
def _(eqn: Any, which: Any, *cases: Any) -> Any:
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.select([which == k for k in range(len(cases))], cases)


@rule("clamp")
def _(eqn: Any, low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


@rule("convert_element_type")
def _(eqn: Any, x: Any) -> Any:
    to = np.dtype(eqn.params["new_dtype"])
    x = x.real if x.dtype.kind == "c" and to.kind != "c" else x
    if not _floating(x.dtype) or _floating(to) or to.kind in "bc":
        return x.astype(to)
    limits = jax.numpy.iinfo(to)  # XLA saturates, and makes zero of NaN; what C does is undefined
    return np.nan_to_num(np.clip(np.trunc(x.astype(np.float64)), int(limits.min), int(limits.max))).astype(to)


# -- shapes ------------------------------------------------------------------------------------------------------------


@rule("broadcast_in_dim")
def _(eqn: Any, x: Any, *_) -> Any:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    own = [1] * len(shape)
    for n, d in zip(x.shape, dims, strict=True):
        own[d] = n
    return np.broadcast_to(x.reshape(own), shape)


@rule("reshape", "squeeze")
def _(eqn: Any, x: Any, *_) -> Any:
    order = eqn.params.get("dimensions")  # the order of axes in which a reshape takes elements
    return (x.transpose(order) if order and eqn.primitive.name == "reshape" else x).reshape(eqn.outvars[0].aval.shape)


@rule("transpose")
def _(eqn: Any, x: Any) -> Any:
    return x.transpose(eqn.params["permutation"])


@rule("concatenate")
def _(eqn: Any, *xs: Any) -> Any:
    return np.concatenate(xs, eqn.params["dimension"])


@rule("slice")
def _(eqn: Any, x: Any) -> Any:
    p = eqn.params
    steps = p["strides"] or [1] * x.ndim
    return x[tuple(slice(a, b, c) for a, b, c in zip(p["start_indices"], p["limit_indices"], steps, strict=True))]


def _start(x: Any, sizes: Sequence[int], indices: Sequence[Any]) -> tuple[slice, ...]:
    starts = [min(max(int(i), 0), n - m) for i, n, m in zip(indices, x.shape, sizes, strict=True)]
    return tuple(slice(i, i + m) for i, m in zip(starts, sizes, strict=True))


@rule("dynamic_slice")
def _(eqn: Any, x: Any, *indices: Any) -> Any:
    return x[_start(x, eqn.params["slice_sizes"], indices)]


@rule("dynamic_update_slice")
def _(eqn: Any, x: Any, update: Any, *indices: Any) -> Any:
    out = x.copy()
    out[_start(x, update.shape, indices)] = update
    return out


@rule("pad")
def _(eqn: Any, x: Any, fill: Any) -> Any:
    """Padding: the elements are spread into the new shape; negative padding cuts."""
    out = np.full(eqn.outvars[0].aval.shape, fill, x.dtype)
    to, of = [], []
    for n, m, (low, _, inner) in zip(x.shape, out.shape, eqn.params["padding_config"], strict=True):
        at = low + np.arange(n) * (inner + 1)
        inside = (at >= 0) & (at < m)
        to.append(at[inside])
        of.append(np.arange(n)[inside])
    out[np.ix_(*to)] = x[np.ix_(*of)]
    return out


@rule("unstack")
def _(eqn: Any, x: Any) -> list[Any]:
    return list(np.moveaxis(x, eqn.params["axis"], 0))


@rule("rev")
def _(eqn: Any, x: Any) -> Any:
    return np.flip(x, eqn.params["dimensions"])


@rule("iota")
def _(eqn: Any, *_) -> Any:
    p = eqn.params
    own = [n if k == p["dimension"] else 1 for k, n in enumerate(p["shape"])]
    return np.broadcast_to(np.arange(p["shape"][p["dimension"]]).reshape(own), p["shape"]).astype(p["dtype"])


@rule("split")
def _(eqn: Any, x: Any) -> Any:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"])


@rule("bitcast_convert_type")
def _(eqn: Any, x: Any) -> Any:
    to = np.dtype(eqn.params["new_dtype"])
    return x.view(to) if to.itemsize == x.dtype.itemsize else _bind(eqn, x)


@rule("stack")
def _(eqn: Any, *xs: Any) -> Any:
    return np.stack(xs, eqn.params["axis"])


@rule("sort")
def _(eqn: Any, *xs: Any) -> list[Any]:
    """A stable sort, as NumPy's are, by the first operands: NaN stands behind all numbers, and -0.0 is like 0.0."""
    axis, keys = eqn.params["dimension"], [_wide(x) for x in xs[: eqn.params["num_keys"]]]
    order = np.argsort(keys[0], axis, kind="stable") if len(keys) == 1 else np.lexsort(keys[::-1], axis)
    return [np.take_along_axis(x, order, axis) for x in xs]


# -- gather and scatter ------------------------------------------------------------------------------------------------


def _windows(indices: Any, shape: Sequence[int], sizes: Sequence[int], of: Sequence[Any], mode: Any) -> tuple[Any, Any]:
    """Where the elements of windows of `sizes` lie in an array of `shape`, and which of the windows lie inside.

    `of`: the axes of the result (of the updates) that count within a window; the axes of the array that a window leaves
    out; those that the last axis of the indices names; those of the array, and of the indices, that go together.
    """
    within, dropped, named, own, theirs = of
    rank = indices.ndim - 1 + len(within)
    apart = [k for k in range(rank) if k not in within]
    along = lambda x, axes: x.reshape([x.shape[axes.index(k)] if k in axes else 1 for k in range(rank)])
    starts = [np.zeros([1] * rank, np.int64) for _ in shape]
    for j, d in enumerate(named):
        starts[d] = along(indices[..., j].astype(np.int64), apart)
    for d, k in zip(own, theirs, strict=True):
        starts[d] = along(np.arange(shape[d]), [apart[k]])
    last = [n - m for n, m in zip(shape, sizes, strict=True)]
    inside = np.asarray(True)
    for s, n in zip(starts, last, strict=True):
        inside = inside & (s >= 0) & (s <= n)
    starts = [np.clip(s, 0, n) for s, n in zip(starts, last, strict=True)]
    for d, k in zip([d for d in range(len(shape)) if d not in dropped and d not in own], within, strict=True):
        starts[d] = starts[d] + along(np.arange(sizes[d]), [k])
    return tuple(starts), np.asarray(True) if "CLIP" in str(mode) else inside


@rule("gather")
def _(eqn: Any, x: Any, indices: Any) -> Any:
    p, n, shape = eqn.params, eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    if x.size == 0:
        return _bind(eqn, x, indices)
    of = n.offset_dims, n.collapsed_slice_dims, n.start_index_map, n.operand_batching_dims
    at, inside = _windows(indices, x.shape, p["slice_sizes"], (*of, n.start_indices_batching_dims), p["mode"])
    found, fill = np.broadcast_to(x[at], shape), p["fill_value"]
    if inside.all():
        return found
    if fill is None and not _floating(x.dtype):
        return _bind(eqn, x, indices)
    return np.where(inside, found, np.asarray(np.nan if fill is None else fill, x.dtype))


@rule("scatter", "scatter-add")
def _(eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
    n, out = eqn.params["dimension_numbers"], np.array(_wide(x))
    of = n.update_window_dims, n.inserted_window_dims, n.scatter_dims_to_operand_dims, n.operand_batching_dims
    sizes = [1] * x.ndim
    kept = [d for d in range(x.ndim) if d not in n.inserted_window_dims and d not in n.operand_batching_dims]
    for d, k in zip(kept, n.update_window_dims, strict=True):
        sizes[d] = updates.shape[k]
    at, inside = _windows(indices, x.shape, sizes, (*of, n.scatter_indices_batching_dims), eqn.params["mode"])
    which = np.broadcast_to(inside, updates.shape)
    places, found = tuple(np.broadcast_to(i, updates.shape)[which] for i in at), _wide(updates)[which]
    if eqn.primitive.name == "scatter":
        out[places] = found
    else:
        np.add.at(out, places, found)
    return out


# -- reductions and products -------------------------------------------------------------------------------------------


def _reduction(fn: Callable[..., Any]) -> Rule:
    return lambda eqn, x, *_: fn(_wide(x), axis=tuple(eqn.params["axes"]))


def _sum(x: Any, axis: Any) -> Any:
    return np.sum(x, axis=axis, dtype=np.float64 if x.dtype == np.float32 else x.dtype)


def _prod(x: Any, axis: Any) -> Any:
    return np.prod(x, axis=axis, dtype=np.float64 if x.dtype == np.float32 else x.dtype)


RULES |= {"reduce_sum": _reduction(_sum), "reduce_prod": _reduction(_prod)}
RULES |= {"reduce_and": _reduction(np.all), "reduce_or": _reduction(np.any)}


@rule("reduce_max", "reduce_min")
def _(eqn: Any, x: Any, *_) -> Any:
    if x.size == 0:
        return _bind(eqn, x)
    fn = np.max if eqn.primitive.name == "reduce_max" else np.min
    return fn(_wide(x), axis=tuple(eqn.params["axes"]))


@rule("argmax", "argmin")
def _(eqn: Any, x: Any) -> Any:
    fn = np.argmax if eqn.primitive.name == "argmax" else np.argmin
    return fn(_wide(x), eqn.params["axes"][0])


def _running(fn: np.ufunc) -> Rule:
    def run(eqn: Any, x: Any) -> Any:
        axis, back = eqn.params["axis"], eqn.params["reverse"]
        wide = np.flip(x, axis) if back else x
        wide = wide.astype(np.float64) if _floating(x.dtype) else wide
        out = fn.accumulate(wide, axis, dtype=wide.dtype)
        return np.flip(out, axis) if back else out

    return run


RULES |= {
    "cumsum": _running(np.add), "cumprod": _running(np.multiply), "cummax": _running(np.maximum),
    "cummin": _running(np.minimum), "cumlogsumexp": _running(np.logaddexp),
}  # fmt: skip


_sums_in = lambda dtype: np.complex128 if dtype.kind == "c" else np.float64 if _floating(dtype) else np.int64


@rule("dot_general")
def _(eqn: Any, x: Any, y: Any, *_) -> Any:
    """A product: batch, free and contracted axes are moved to where `matmul` takes them."""
    (cx, cy), (bx, by) = eqn.params["dimension_numbers"]
    fx = [k for k in range(x.ndim) if k not in (*cx, *bx)]
    fy = [k for k in range(y.ndim) if k not in (*cy, *by)]
    out = eqn.outvars[0].aval
    wide = _sums_in(out.dtype)
    size = lambda a, axes: int(np.prod([a.shape[k] for k in axes]))
    a = x.transpose(*bx, *fx, *cx).reshape(size(x, bx), size(x, fx), size(x, cx)).astype(wide)
    b = y.transpose(*by, *cy, *fy).reshape(size(y, by), size(y, cy), size(y, fy)).astype(wide)
    return (a @ b).reshape(out.shape)


rule("conv_general_dilated")(lambda eqn, *xs: convolved(*xs, _sums_in(eqn.outvars[0].aval.dtype), **eqn.params))


# -- functions ---------------------------------------------------------------------------------------------------------


@rule("jit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
def _(eqn: Any, *operands: Any) -> Any:
    return _inner(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), operands)


@rule("cond")
def _(eqn: Any, which: Any, *operands: Any) -> Any:
    branches = eqn.params["branches"]
    return _inner(branches[min(max(int(which), 0), len(branches) - 1)], operands)


@rule("while")
def _(eqn: Any, *operands: Any) -> Any:
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    state = list(operands[n + m :])
    # Rows of vmap have conditions of their own.
    among = lambda on, x, old: np.where(on.reshape(on.shape + (1,) * (np.ndim(x) - on.ndim)), x, old) if on.ndim else x
    while (on := np.asarray(_inner(p["cond_jaxpr"], [*operands[:n], *state])[0])).any():
        found = _inner(p["body_jaxpr"], [*operands[n : n + m], *state])
        state = [among(on, x, old) for x, old in zip(found, state, strict=True)]
    return state


@rule("scan")
def _(eqn: Any, *operands: Any) -> Any:
    p = eqn.params
    n, carried = scan_counts(p)
    state, xs = list(operands[n : n + carried]), operands[n + carried :]
    rows = [np.empty(v.aval.shape, v.aval.dtype) for v in eqn.outvars[carried:]]
    for k in reversed(range(p["length"])) if p["reverse"] else range(p["length"]):
        outs = _inner(p["jaxpr"], [*operands[:n], *state, *(x[k] for x in xs)])
        state = outs[:carried]
        for row, x in zip(rows, outs[carried:], strict=True):
            row[k] = x
    return [*state, *rows]
