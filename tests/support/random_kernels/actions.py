"""Steps that a random kernel is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jtile.ir import (
    ArgReduce,
    Bitcast,
    Broadcast,
    Concat,
    Cumulative,
    Dense,
    Dot,
    DynamicSlice,
    DynamicUpdate,
    Gather,
    Iota,
    Load,
    NumPrograms,
    Pad,
    Reduce,
    Reshape,
    Reverse,
    Scatter,
    Select,
    Slice,
    Sort,
    Transpose,
    UserReduce,
    UserScan,
)
from jtile.ir.types import DTYPES

from .gen import DTYPE_NAMES, MAX_ERROR, MAX_SIZE, SIGNIFICAND, TINY, Gen, V, int_bound, limit, step_of

FLOATS = [d for d in DTYPE_NAMES if DTYPES[d].kind == "f"]
INTS = [d for d in DTYPE_NAMES if DTYPES[d].kind in "iu"]
NUMBERS = [d for d in DTYPE_NAMES if d != "bool"]
ACTIONS: list[Callable[[Gen], Any]] = []


def action(fn: Callable[[Gen], Any]) -> Callable[[Gen], Any]:
    """A step that adds ops and values; it does nothing where no value in scope suits it."""
    ACTIONS.append(fn)
    return fn


# fn -> (domain, slope inside it, bound of the result). Arguments are clamped to the domain first.
SMOOTH: dict[str, tuple[tuple[float, float], float, float]] = {
    "exp": ((-4, 3), 20.2, 20.2), "exp2": ((-4, 4), 11.2, 16.1), "expm1": ((-4, 3), 20.2, 19.2),
    "log": ((0.25, 8), 4, 2.1), "log2": ((0.25, 8), 5.8, 3), "log1p": ((-0.5, 8), 2, 2.2), "sin": ((-8, 8), 1, 1),
    "cos": ((-8, 8), 1, 1), "tan": ((-1, 1), 3.5, 1.6), "tanh": ((-8, 8), 1, 1), "erf": ((-4, 4), 1.2, 1),
    "erfc": ((-3, 3), 1.2, 2), "logistic": ((-8, 8), 0.25, 1), "rsqrt": ((0.25, 8), 4, 2),
    "cbrt": ((0.25, 8), 0.9, 2), "atan": ((-8, 8), 1, 1.5), "asin": ((-0.9, 0.9), 2.4, 1.2),
    "acos": ((-0.9, 0.9), 2.4, 2.7), "sinh": ((-3, 3), 10.1, 10.1), "cosh": ((-3, 3), 10.1, 10.1),
    "asinh": ((-8, 8), 1, 2.8), "acosh": ((1.5, 8), 0.9, 2.8), "atanh": ((-0.9, 0.9), 5.3, 1.5),
    "erf_inv": ((-0.8, 0.8), 2.1, 1), "lgamma": ((0.5, 8), 2.1, 8.6), "digamma": ((1.5, 8), 1, 2.1),
    "sqrt": ((0.25, 90), 1, 10),
}  # fmt: skip
STEPS = ("floor", "ceil", "round", "round_away", "sign")
INT_UNARY = ("neg", "abs", "sign", "square", "not", "popcount", "clz")
INT_BINARY = ("add", "sub", "mul", "max", "min", "and", "or", "xor", "div", "rem", "shl", "shr", "shr_logical")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def rounded(dtype: str, bound: float, err: float, grain: float = 0, smooth: bool = False) -> dict[str, float]:
    """What is known of a float after one function: `smooth` functions may be a few steps off."""
    grain = grain if grain and bound / grain <= 2 ** SIGNIFICAND[dtype] else 0
    if err == 0 and not smooth:
        return {"bound": bound, "err": 0, "grain": grain}
    steps = 1 if SIGNIFICAND[dtype] < 24 else 16
    return {"bound": bound, "err": err + steps * step_of(dtype) * bound + TINY.get(dtype, 1e-30), "grain": 0}


def tame(g: Gen, known: dict[str, float], dtype: str) -> bool:
    """Whether a result is small enough, and known well enough, to be worth having."""
    return known["bound"] <= limit(dtype) and known["err"] <= MAX_ERROR * max(known["bound"], 1e-3)


def floats(v: V) -> bool:
    return v.kind == "f"


def ints(v: V) -> bool:
    return v.kind in "iu"


def like(v: V) -> Callable[[V], bool]:
    return lambda w: w.shape == v.shape and w.dtype == v.dtype


def into(g: Gen, v: V, lo: float, hi: float) -> V:
    """The float value clamped to [lo, hi]."""
    ends = [g.b.full(float(x), v.shape, v.dtype) for x in (lo, hi)]
    return V(g.b.map("clamp", ends[0], v.value, ends[1]), max(abs(lo), abs(hi)), v.err, 0)


def partner(g: Gen, v: V) -> V:
    """Another operand of the same type: a value in scope, or a constant."""
    w = g.pick(like(v))
    if w is not None and g.number(0, 3):
        return w
    if v.kind == "b":
        return V(g.b.full(g.chance(), v.shape, "bool"))
    n = g.choose((1, 2, 3) if v.kind == "u" or DTYPES[v.dtype].bits == 4 else (1, 2, -1, 3))
    return V(g.b.full(float(n) if v.kind == "f" else n, v.shape, v.dtype), 3, 0, 1)


@action
def load(g: Gen) -> None:
    """A tile of a new input."""
    g.load(g.shape(), g.choose(g.dtypes))


@action
def constant(g: Gen) -> None:
    shape, dtype = g.shape(), g.choose(g.dtypes)
    x, bound, grain = g.data(shape, dtype)
    what = g.number(0, 3)
    if what == 0 and x.size <= 12:
        g.put(g.b.value(Dense(tuple(x.reshape(-1).tolist()), shape, dtype)), bound, 0, grain)
    elif what <= 1 or not shape or dtype == "bool":
        g.put(g.b.full(x.reshape(-1)[0].item() if dtype != "bool" else True, shape, dtype), bound, 0, grain)
    elif max(shape) <= min(
        limit(dtype) if DTYPES[dtype].kind == "f" else 99, int_bound(dtype), 2 ** SIGNIFICAND.get(dtype, 9)
    ):
        g.put(g.b.value(Iota(shape, g.number(0, len(shape) - 1), dtype)), max(shape), 0, 1)


@action
def index_value(g: Gen) -> None:
    s = g.scalar()
    g.put(s.value, s.hi)
    if g.grid:
        g.put(g.b.value(NumPrograms(g.number(0, len(g.grid) - 1))), 3)


@action
def smooth(g: Gen) -> None:
    v = g.find(floats, FLOATS)
    fn = g.choose(SMOOTH)
    (lo, hi), slope, bound = SMOOTH[fn]
    known = rounded(v.dtype, bound, slope * v.err, 0, fn != "sqrt")
    if tame(g, known, v.dtype):
        g.put(g.b.map(fn, into(g, v, lo, hi).value), **known)


@action
def step_function(g: Gen) -> None:
    v = g.find(lambda v: floats(v) and v.exact, FLOATS)
    fn = g.choose((*STEPS, "nextafter", "is_finite", "cast", "square"))
    if fn == "is_finite":
        g.put(g.b.map(fn, v.value))
    elif fn == "cast":
        dtype = g.choose(("int32", "int8", "uint8", "int64", "bool", "int4", "uint16"))
        g.put(g.b.cast(v.value, dtype), min(v.bound, int_bound(dtype)))
    elif fn == "nextafter":
        up = g.b.full(8.0, v.shape, v.dtype)
        g.put(g.b.map(fn, into(g, v, 1, 4).value, up), bound=5)
    elif fn == "square":
        known = rounded(v.dtype, v.bound**2, 0, v.grain**2)
        if tame(g, known, v.dtype):
            g.put(g.b.map(fn, v.value), **known)
    else:
        g.put(g.b.map(fn, v.value), **rounded(v.dtype, v.bound + 1, 0, 1))


@action
def float_binary(g: Gen) -> None:
    a = g.find(floats, FLOATS)
    b = partner(g, a)
    fn = g.choose(("add", "mul", "sub", "max", "min", "div", "pow", "atan2", "rem", "clamp"))
    grain = min(a.grain, b.grain)
    match fn:
        case "add" | "sub":
            known = rounded(a.dtype, a.bound + b.bound, a.err + b.err, grain)
        case "mul":
            known = rounded(
                a.dtype, a.bound * b.bound, a.bound * b.err + b.bound * a.err + a.err * b.err, a.grain * b.grain
            )
        case "max" | "min" | "clamp":
            known = {"bound": max(a.bound, b.bound), "err": max(a.err, b.err), "grain": grain}
        case "div":
            b = into(g, b, 0.5, 8)
            known = rounded(a.dtype, 2 * a.bound, 2 * a.err + 4 * a.bound * b.err)
        case "rem":
            b = into(g, b, 0.5, 8)
            if not (a.exact and b.exact):
                return
            known = rounded(a.dtype, 8, 0)
        case "pow":
            a, b = into(g, a, 0.25, 4), into(g, b, -2, 2)
            known = rounded(a.dtype, 16, 128 * a.err + 23 * b.err, 0, True)
        case _:
            b = into(g, b, 0.5, 8)
            known = rounded(a.dtype, 1.6, 2 * (a.err + b.err), 0, True)
    if tame(g, known, a.dtype):
        args = (a.value, b.value) if fn != "clamp" else (g.b.full(-1.0, a.shape, a.dtype), a.value, b.value)
        g.put(g.b.map(fn, *args), **(known | {"bound": max(known["bound"], 1.0)}))


@action
def int_function(g: Gen) -> None:
    a = g.find(ints, INTS)
    if g.number(0, 2) == 0:
        fn = g.choose(INT_UNARY)
        small = fn in ("sign", "popcount", "clz")
        g.put(g.b.map(fn, a.value), min(64, int_bound(a.dtype)) if small else int_bound(a.dtype))
    else:
        g.put(g.b.map(g.choose(INT_BINARY), a.value, partner(g, a).value), int_bound(a.dtype))


@action
def compare(g: Gen) -> None:
    a = g.find(lambda v: v.exact and v.kind != "b", NUMBERS)
    b = partner(g, a)
    if b.exact:
        g.put(g.b.map(g.choose(COMPARISONS), a.value, b.value))


@action
def logic(g: Gen) -> None:
    a = g.find(lambda v: v.kind == "b", ("bool",))
    fn = g.choose(("not", "and", "or", "xor", "eq", "max", "min", "lt"))
    g.put(g.b.map(fn, a.value) if fn == "not" else g.b.map(fn, a.value, partner(g, a).value))


@action
def select(g: Gen) -> None:
    c = g.find(lambda v: v.kind == "b", ("bool",))
    a = g.pick(lambda v: v.shape == c.shape)
    if a is not None:
        b = partner(g, a)
        known = {"bound": max(a.bound, b.bound), "err": max(a.err, b.err), "grain": min(a.grain, b.grain)}
        g.put(g.b.value(Select(c.value, a.value, b.value)), **known)


@action
def cast(g: Gen) -> None:
    v = g.pick()
    if v is None:
        return
    dtype = g.choose(DTYPE_NAMES)
    kind = DTYPES[dtype].kind
    if v.kind == "f" and kind != "f":
        return  # step_function does that
    if kind != "f":
        bound = min(v.bound or 1, int_bound(dtype)) if dtype != "bool" else 0
        wraps = v.bound > int_bound(dtype) - 1 or DTYPES[dtype].kind == "u"
        narrow = g.put(g.b.cast(v.value, dtype), int_bound(dtype) if wraps else bound)
        if g.chance():
            g.put(g.b.cast(narrow.value, v.dtype), int_bound(v.dtype) if v.kind in "iu" else 0)
        return
    if v.kind == "b":
        g.put(g.b.cast(v.value, dtype), 1, 0, 1)
        return
    if v.kind in "iu" and v.bound > 64:
        v = V(g.b.map("and", v.value, g.b.full(7, v.shape, v.dtype)), 7)
    known = rounded(dtype, max(v.bound, 1), v.err, v.grain if v.kind == "f" else 1)
    if tame(g, known, dtype):
        narrow = g.put(g.b.cast(v.value, dtype), **known)
        back = rounded(v.dtype, narrow.bound, narrow.err, narrow.grain) if floats(v) else {}
        if back and g.chance() and tame(g, back, v.dtype):
            g.put(g.b.cast(narrow.value, v.dtype), **back)


@action
def bitcast(g: Gen) -> None:
    """Integers of one width; the bits of floats hang on the sign of zeros, which sums may choose."""
    v = g.find(ints, INTS)
    same = [d for d in INTS if DTYPES[d].bits == DTYPES[v.dtype].bits]
    dtype = g.choose(same)
    g.put(g.b.value(Bitcast(v.value, dtype)), int_bound(dtype) if dtype != v.dtype else v.bound)


@action
def move(g: Gen) -> None:
    """Another shape of the same elements."""
    v = g.find(lambda v: len(v.shape) > 0, DTYPE_NAMES)
    rank, x = len(v.shape), v.value
    axes = range(rank)
    match g.number(0, 5):
        case 0:
            order = g.permutation(rank)
            op: Any = Transpose(x, order)
        case 1:
            op = Reshape(
                x, g.choose([(math.prod(v.shape),), (*v.shape, 1), (1, *v.shape), (v.shape[0], math.prod(v.shape[1:]))])
            )
        case 2:
            op = Reverse(x, tuple(k for k in axes if g.chance()))
        case 3:
            starts = tuple(g.number(0, n // 2) for n in v.shape)
            op = Slice(x, starts, v.shape, tuple(g.choose((1, 2, 1)) for _ in axes))
        case 4:
            starts = tuple(g.scalar().value for _ in axes)
            op = DynamicSlice(x, starts, tuple(g.number(1, n) for n in v.shape))
        case _:
            side = g.choose(g.sides)
            if math.prod(v.shape) * side > MAX_SIZE:
                return
            at = g.number(0, rank)
            op = Broadcast(x, (*v.shape[:at], side, *v.shape[at:]), tuple(k + (k >= at) for k in axes))
    g.put(g.b.value(op), v.bound, v.err, v.grain)


@action
def spread(g: Gen) -> None:
    """A scalar as a tile."""
    v = g.pick(lambda v: v.shape == ()) or g.load((), g.choose(g.dtypes))
    g.put(g.b.splat(v.value, g.shape((1, 2))), v.bound, v.err, v.grain)


@action
def combine(g: Gen) -> None:
    """Tiles put together: concatenation, padding, updates, gathers, scatters."""
    v = g.find(lambda v: len(v.shape) > 0, DTYPE_NAMES)
    if v.value.type.size > MAX_SIZE // 3:
        return
    w, axis = partner(g, v), g.number(0, len(v.shape) - 1)
    known = {"bound": max(v.bound, w.bound), "err": max(v.err, w.err), "grain": min(v.grain, w.grain)}
    what = g.number(0, 4)
    if what == 0:
        g.put(g.b.value(Concat((v.value, w.value), axis)), **known)
    elif what == 1:
        low, high, inner = (tuple(g.number(0, m) for _ in v.shape) for m in (2, 2, 1))
        corner = g.b.value(Slice(w.value, (0,) * len(v.shape), (1,) * len(v.shape), (1,) * len(v.shape)))
        op = Pad(v.value, g.b.reshape(corner, ()), low, high, inner)
        g.put(g.b.value(op), **known)
    elif what == 2:
        part = g.b.value(Slice(w.value, (0,) * len(v.shape), tuple((n + 1) // 2 for n in v.shape), (1,) * len(v.shape)))
        starts = tuple(g.scalar().value for _ in v.shape)
        g.put(g.b.value(DynamicUpdate(v.value, part, starts)), **known)
    elif what == 3:
        i = g.pick(lambda i: i.shape == v.shape and i.dtype in ("int32", "uint8", "int64", "int16"))
        if i is not None:
            ends = [g.b.full(n, i.shape, i.dtype) for n in (0, min(v.shape[axis] - 1, 127))]
            g.put(
                g.b.value(Gather(v.value, g.b.map("clamp", ends[0], i.value, ends[1]), axis)), v.bound, v.err, v.grain
            )
    elif len(v.shape) == 1:
        fn = (
            g.choose(("set", "max", "min", "add"))
            if v.kind in "iu"
            else "set"
            if v.kind == "b"
            else g.choose(("set", "max"))
        )
        known["bound"] = int_bound(v.dtype) if v.kind in "iu" else known["bound"]
        g.put(g.b.value(Scatter(v.value, g.take_indices(v.shape[0]), w.value, fn)), **known)


@action
def reduce(g: Gen) -> None:
    v = g.find(lambda v: len(v.shape) > 0, DTYPE_NAMES)
    axes = tuple(k for k in range(len(v.shape)) if g.chance()) or (0,)
    n = math.prod(v.shape[k] for k in axes)
    if v.kind == "b":
        g.put(g.b.value(Reduce(v.value, g.choose(("or", "and", "xor", "max", "min")), axes)))
    elif v.kind != "f":
        fn = g.choose(("sum", "max", "min", "xor", "prod", "and", "or"))
        g.put(g.b.value(Reduce(v.value, fn, axes)), int_bound(v.dtype))
    elif g.chance():
        known = total(v.dtype, v.bound, v.err, v.grain, n)
        if tame(g, known, v.dtype):
            g.put(g.b.value(Reduce(v.value, "sum", axes)), **known)
    else:
        g.put(g.b.value(Reduce(v.value, g.choose(("max", "min")), axes)), v.bound, v.err, v.grain)


def total(dtype: str, bound: float, err: float, grain: float, n: int, out: str | None = None) -> dict[str, float]:
    """A sum of n numbers, accumulated in float32 (float64) in any order, then rounded to `out`."""
    wide = "float64" if dtype == "float64" else "float32"
    exact = err == 0 and grain and n * bound / grain <= 2 ** SIGNIFICAND[wide]
    err = 0 if exact else n * err + n * step_of(wide) * n * bound
    return rounded(out or dtype, n * bound, err, grain if exact else 0)


@action
def arg_and_sort(g: Gen) -> None:
    v = g.find(lambda v: len(v.shape) > 0 and v.exact, DTYPE_NAMES)
    axis = g.number(0, len(v.shape) - 1)
    if g.chance():
        g.put(
            g.b.value(ArgReduce(v.value, g.choose(("max", "min")), axis, g.choose(("int32", "int64")))), v.shape[axis]
        )
        return
    ids = g.b.value(Iota(v.shape, axis, "int32"))
    op = g.b.add(Sort((v.value, ids), axis, g.number(1, 2), g.chance()))
    g.put(op.results[1], v.shape[axis])
    g.put(op.results[0], v.bound, v.err, v.grain)


@action
def scan(g: Gen) -> None:
    v = g.find(lambda v: len(v.shape) > 0 and v.kind != "b", NUMBERS)
    axis, reverse = g.number(0, len(v.shape) - 1), g.chance()
    fn = g.choose(("sum", "max", "min", "logsumexp") if v.kind == "f" else ("sum", "prod", "max"))
    if fn == "logsumexp":
        v = into(g, v, -8, 8)
        known = rounded(v.dtype, 12, v.err + 1e-5, 0, True)
    elif v.kind != "f":
        known = {"bound": int_bound(v.dtype)}
    elif fn == "sum":
        known = total(v.dtype, v.bound, v.err, v.grain, v.shape[axis])
    else:
        known = {"bound": v.bound, "err": v.err, "grain": v.grain}
    if v.kind != "f" or tame(g, known, v.dtype):
        g.put(g.b.value(Cumulative(v.value, fn, axis, reverse)), **known)


@action
def user_combiner(g: Gen) -> None:
    """A reduction or scan by a combiner of two tiles: the extreme value and where it stands."""
    v = g.find(lambda v: len(v.shape) > 0 and v.exact and v.kind in "iuf", NUMBERS)
    axis = g.number(0, len(v.shape) - 1)
    ids = g.b.value(Iota(v.shape, axis, "int32"))
    scalars = [v.value.type.with_shape(()), ids.type.with_shape(())]
    fn = g.choose(("ge", "le"))
    with g.b.region(scalars * 2) as body:
        x, i, y, j = body.params
        first = g.b.map(fn, x, y)
        body.yields = (g.b.value(Select(first, x, y)), g.b.value(Select(first, i, j)))
    if g.chance():
        start = (g.b.full(float(1) if v.kind == "f" else 1, (), v.dtype), g.b.full(-1, (), "int32"))
        axes = tuple(sorted({axis, g.number(0, len(v.shape) - 1)}))
        op = g.b.add(UserReduce((v.value, ids), start, axes, body))
    else:
        op = g.b.add(UserScan((v.value, ids), axis, g.chance(), body))
    g.put(op.results[1], v.shape[axis])
    g.put(op.results[0], max(v.bound, 1), 0, min(v.grain, 1))


@action
def dot(g: Gen) -> None:
    a = g.find(lambda v: len(v.shape) in (2, 3) and v.kind != "b", NUMBERS, rank=2)
    if DTYPES[a.dtype].bits == 64 and a.kind == "u":
        return
    m, k = a.shape[-2:]
    n = g.choose(g.sides)
    ta, tb = g.chance(), g.chance()
    m, k = (k, m) if ta else (m, k)
    want = (*a.shape[:-2], *((n, k) if tb else (k, n)))
    b = g.pick(lambda v: v.shape == want and (v.kind == "f") == (a.kind == "f") and v.kind != "b")
    if b is None:
        if math.prod(want) > MAX_SIZE:
            return
        dims, sides = g.access(want, takes=False)
        ref, bound, grain = g.new_input(sides, a.dtype if a.kind == "f" else g.choose((a.dtype, "int8")))
        b = V(g.b.value(Load(ref, tuple(dims))), bound, 0, grain)
    op = Dot(a.value, b.value, None, ta, tb)
    out = op.infer()[0].dtype
    known: dict[str, float] = {"bound": int_bound(out) if out.startswith("int") else 0.0}
    if a.kind == "f":
        err = a.bound * b.err + b.bound * a.err + a.err * b.err
        known = total(out, a.bound * b.bound, err, a.grain * b.grain, k)
        if not tame(g, known, out):
            return
    if k == 0 or math.prod((*a.shape[:-2], m, n)) > MAX_SIZE:
        return
    acc = g.pick(lambda v: v.shape == (*a.shape[:-2], m, n) and v.dtype == out and v.exact)
    if acc is not None and g.chance():
        op.acc = acc.value
        if a.kind == "f":
            grain = min(acc.grain, a.grain * b.grain)
            exact = known["err"] == 0 and grain and (known["bound"] + acc.bound) / grain <= 2 ** SIGNIFICAND[out]
            both = known["bound"] + acc.bound
            err = 0 if exact else known["err"] + k * step_of(out) * both
            known = {"bound": both, "err": err, "grain": grain if exact else 0}
            if not tame(g, known, out):
                return
    g.put(g.b.value(op), **known)
