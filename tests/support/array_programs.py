"""Random array programs: elementwise functions, reductions, running sums, moves, what XLA keeps, losses' and norms'
forms, loops and branches, over arrays of all kinds of sizes and dtypes.

What rounds is kept from what jumps: `floor`, comparisons, `argmax` and casts to integers are taken of values only that
every implementation computes to the bit, and no value grows far, so that results agree within the roundings.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOATS = ("float32", "float32", "float32", "float32", "bfloat16", "float16")
WHOLE = ("int32", "int32", "int8", "uint8", "int16", "uint16", "uint32")
LARGE = 200.0  # values are at most so large


@dataclasses.dataclass(frozen=True)
class Made:
    """A value of a program: whether its bits are the same everywhere, and how large it is at most."""

    x: Any
    exact: bool
    size: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def kind(self) -> str:
        """f, i, u or b."""
        return "f" if jnp.issubdtype(self.x.dtype, jnp.floating) else self.x.dtype.kind


def array_program(seed: int, most: int = 7) -> tuple[Callable[..., list[Any]], list[np.ndarray]]:
    """A function of arrays, of up to `most` steps, and its arrays."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    sides = [draw.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 8]) if draw.random() < 0.3 else draw.randint(2, 8) for _ in "abc"]
    arrays = []
    for _ in range(3):
        shape = tuple(n if draw.random() < 0.8 else 1 for n in sides[draw.randint(0, 2) :])
        arrays.append(_array(rng, draw.choice(FLOATS if draw.random() < 0.7 else (*WHOLE, "bool")), shape))

    def f(*xs: Any) -> list[Any]:
        draw = random.Random(seed + 1)
        start = [Made(x, True, 100.0 if x.dtype.kind in "iub" else 4.0) for x in xs]
        values, steps = [*start], draw.randint(2, most)
        for _ in range(4 * most):
            if len(values) >= len(xs) + steps:
                break
            new = draw.choices(KINDS, WEIGHTS)[0](draw, values)
            if new is not None and new.x.ndim <= 4 and new.x.size <= 600:
                values.append(new)
        made = values[len(xs) :]
        kept = [v for v in made if draw.random() < 0.4] or made[-1:] or values[:1]
        return [v.x for v in kept]

    return f, arrays


def _array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.6
    if dtype in WHOLE:
        return rng.integers(0 if dtype[0] == "u" else -9, 10, shape).astype(dtype)
    x = np.clip(rng.standard_normal(shape), -4, 4)
    if rng.random() < 0.2:
        x = np.where(rng.random(shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf, -0.0]), x)
    return x.astype(jnp.dtype(dtype))


def agree(seed: int, closed: Any, got: Any, want: Any) -> None:
    """Results have the same types, and are equal within the roundings of the dtypes that the program has."""
    types = {str(getattr(v.aval, "dtype", "")) for eqn in closed.jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)}
    tolerance = 0.06 if types & {"bfloat16", "float16"} else 2e-4
    try:
        for x, y in zip(got, want, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            if x.dtype.kind in "iub":
                np.testing.assert_array_equal(x, y)
            else:
                np.testing.assert_allclose(np.float64(x), np.float64(y), tolerance, tolerance)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


# -- what is taken -----------------------------------------------------------------------------------------------------


def _pick(draw: random.Random, values: list[Made], ok: Callable[[Made], bool] = lambda v: True) -> Made | None:
    """A value, late ones more often."""
    good = [v for v in values if ok(v)]
    return good[max(draw.randrange(len(good)), draw.randrange(len(good)))] if good else None


def _float(draw: random.Random, values: list[Made]) -> Made | None:
    """A value as floats, of at least one element or none."""
    v = _pick(draw, values)
    if v is None or v.kind == "f":
        return v
    return Made(lax.convert_element_type(v.x, jnp.float32), v.exact, max(v.size, 1.0))


def _as(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    """As NumPy broadcasts; what has one element along an axis is first without it, as `jnp` does it."""
    if x.shape == shape:
        return x
    own = [k for k, n in enumerate(x.shape) if n != 1 or shape[k + len(shape) - x.ndim] == 1]
    flat = lax.reshape(x, [x.shape[k] for k in own]) if len(own) < x.ndim else x
    return lax.broadcast_in_dim(flat, shape, [k + len(shape) - x.ndim for k in own])


def _pair(draw: random.Random, v: Made, values: list[Made]) -> tuple[Any, Any, Made] | None:
    """Two operands of one shape and dtype."""

    def fits(w: Made) -> bool:
        try:
            return np.prod(np.broadcast_shapes(v.shape, w.shape)) <= 600 and (w.kind == "f" or v.kind != "f" or w.exact)
        except ValueError:
            return False

    w = _pick(draw, values, fits)
    if w is None or draw.random() < 0.1:
        n = draw.choice([0, 1, 2, 3])
        return v.x, lax.full_like(v.x, n), Made(v.x, True, n)
    if v.kind != "f" and w.kind == "f":
        v, w = w, v
    shape = np.broadcast_shapes(v.shape, w.shape)
    if v.kind != "f" and v.x.dtype != w.x.dtype and w.size > 100:
        return None
    x, y = _spread(v.x, shape), _spread(_as(w.x, v.x.dtype), shape)
    return (x, y, w) if draw.random() < 0.5 else (y, x, w)


def _axes(draw: random.Random, v: Made) -> list[int]:
    """Some of its axes, at least one."""
    axes = draw.sample(range(len(v.shape)), draw.choice([1] * 4 + [*range(1, len(v.shape) + 1)]))
    return sorted(axes)


def _count(v: Made, axes: list[int]) -> int:
    return int(np.prod([v.shape[a] for a in axes]))


# -- steps -------------------------------------------------------------------------------------------------------------

SMOOTH: dict[str, tuple[Callable[[Any], Any], Callable[[float], float]]] = {
    "tanh": (lax.tanh, lambda n: 1),
    "exp": (lambda x: lax.exp(lax.min(x, lax.full_like(x, 2))), lambda n: 7.4),
    "logistic": (lax.logistic, lambda n: 1),
    "log": (lambda x: lax.log(lax.add(lax.abs(x), lax.full_like(x, 0.5))), lambda n: 6),
    "log1p": (lambda x: lax.log1p(lax.abs(x)), lambda n: 6),
    "expm1": (lambda x: lax.expm1(lax.min(x, lax.full_like(x, 1))), lambda n: 2),
    "sqrt": (lambda x: lax.sqrt(lax.add(lax.abs(x), lax.full_like(x, 0.25))), lambda n: n),
    "rsqrt": (lambda x: lax.rsqrt(lax.add(lax.abs(x), lax.full_like(x, 0.25))), lambda n: 2),
    "sin": (lax.sin, lambda n: 1),
    "cos": (lax.cos, lambda n: 1),
    "erf": (lax.erf, lambda n: 1),
    "atan": (lax.atan, lambda n: 2),
    "square": (lax.square, lambda n: n * n),
    "cube": (lambda x: lax.integer_pow(x, 3), lambda n: n**3),
    "relu": (jax.nn.relu, lambda n: n),
    "gelu": (jax.nn.gelu, lambda n: n),
    "silu": (jax.nn.silu, lambda n: n),
    "softplus": (jax.nn.softplus, lambda n: n + 1),
}


def smooth(draw: random.Random, values: list[Made]) -> Made | None:
    v, name = _float(draw, values), draw.choice([*SMOOTH])
    if v is None:
        return None
    fn, size = SMOOTH[name]
    n = size(v.size)
    return Made(fn(v.x), name == "relu" and v.exact, n) if n <= LARGE else None


def sharp(draw: random.Random, values: list[Made]) -> Made | None:
    """What jumps, or has the same bits everywhere."""
    v = _pick(draw, values, lambda v: v.exact and v.kind != "b")
    if v is None:
        return None
    if v.kind == "f":
        name = draw.choice(["floor", "ceil", "round", "sign", "abs", "neg", "is_finite"])
        fn = functools.partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN)
        x = fn(v.x) if name == "round" else getattr(lax, name)(v.x)
        return Made(x, True, v.size + 1)
    name = draw.choice(["sign", "neg", "bitwise_not", "abs", "square"][: 5 if v.size <= 100 else 4])
    if name == "abs" and v.kind == "u":
        return None
    return Made(getattr(lax, name)(v.x), True, 128.0 if name != "square" else 1e4)


def binary(draw: random.Random, values: list[Made]) -> Made | None:
    v = _pick(draw, values, lambda v: v.kind != "b")
    pair = v and _pair(draw, v, values)
    if not pair:
        return None
    x, y, w = pair
    exact = v.exact and w.exact
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _whole(draw, x, y)
    name = draw.choice(["add", "sub", "mul", "max", "min", "div", "atan2"])
    n = {"add": v.size + w.size, "sub": v.size + w.size, "mul": v.size * w.size}.get(name, max(v.size, w.size, 2))
    if name == "div":
        y = lax.add(lax.abs(y), lax.full_like(y, 1))
    if name == "atan2":
        y = lax.add(lax.abs(y), lax.full_like(y, 0.5))
    if n > LARGE:
        return None
    return Made(getattr(lax, name)(x, y), exact and name in ("max", "min"), n)


def _whole(draw: random.Random, x: Any, y: Any) -> Made:
    name = draw.choice(["add", "sub", "mul", "max", "min", "div", "rem", "bitwise_and", "bitwise_or", "bitwise_xor",
                        "shift_left", "shift_right_logical", "shift_right_arithmetic"])  # fmt: skip
    if name.startswith("shift"):
        y = lax.bitwise_and(y, lax.full_like(y, 7))
    return Made(getattr(lax, name)(x, y), True, 1e4)


def compare(draw: random.Random, values: list[Made]) -> Made | None:
    v = _pick(draw, values, lambda v: v.exact)
    pair = v and _pair(draw, v, [w for w in values if w.exact])
    if not pair:
        return None
    x, y, _ = pair
    if x.dtype == bool:
        return Made(draw.choice([lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.eq])(x, y), True, 1.0)
    return Made(draw.choice([lax.lt, lax.le, lax.gt, lax.ge, lax.eq, lax.ne])(x, y), True, 1.0)


def select(draw: random.Random, values: list[Made]) -> Made | None:
    v = _pick(draw, values)
    pair = v and _pair(draw, v, values)
    if not pair:
        return None
    x, y, w = pair

    def fits(m: Made) -> bool:
        try:
            return m.kind == "b" and np.broadcast_shapes(m.shape, x.shape) == x.shape
        except ValueError:
            return False

    mask = _pick(draw, values, fits)
    exact, size = v.exact and w.exact, max(v.size, w.size)
    if mask is not None:
        return Made(lax.select_n(_spread(mask.x, x.shape), x, y), exact, size)
    if len(x.shape) >= 2 and draw.random() < 0.7:  # a mask of the numbers of rows and columns
        rows, columns = (lax.broadcasted_iota(jnp.int32, x.shape, len(x.shape) - k) for k in (2, 1))
        return Made(lax.select_n(lax.ge(rows, columns), x, y), exact, size)
    if x.dtype == bool:
        return None
    return Made(lax.clamp(jnp.asarray(0, x.dtype), x, jnp.asarray(2, x.dtype)), v.exact and w.exact, size)


def cast(draw: random.Random, values: list[Made]) -> Made | None:
    v = _pick(draw, values)
    if v is None:
        return None
    to = draw.choice([*FLOATS, *WHOLE, "bool"])
    if v.kind == "f" and to in (*WHOLE, "bool") and not v.exact:
        return None
    if v.kind != "f" and to == "float16" and v.size > 100:
        return None
    return Made(lax.convert_element_type(v.x, jnp.dtype(to)), v.exact, 100.0 if v.kind != "f" else v.size)


def reduction(draw: random.Random, values: list[Made]) -> Made | None:
    v = _pick(draw, values, lambda v: v.x.ndim > 0)
    if v is None:
        return None
    axes = _axes(draw, v)
    count, small = _count(v, axes), v.x.dtype.itemsize < 4
    if v.kind == "b":
        return Made(draw.choice([jnp.all, jnp.any])(v.x, axis=tuple(axes)), True, 1.0)
    name = draw.choice(["sum", "sum", "max", "min", "mean", "arg", "prod"])
    if name in ("max", "min", "arg") and count == 0:
        return None
    if name == "arg" and v.exact:
        return Made(draw.choice([lax.argmax, lax.argmin])(v.x, axes[0], jnp.int32), True, 8.0)
    if name == "sum" and (v.size * count <= LARGE or v.kind != "f"):
        x = lax.reduce_sum(v.x, axes)
        return Made(x, v.kind != "f", v.size * count)
    if name in ("max", "min"):
        return Made(getattr(lax, f"reduce_{name}")(v.x, axes), v.exact, v.size)
    if name == "mean" and v.kind == "f" and count:
        return Made(jnp.mean(v.x, axis=tuple(axes), keepdims=draw.random() < 0.5), False, v.size)
    if name == "prod" and (v.kind != "f" or (v.size <= 1 and not small)):
        return Made(lax.reduce_prod(v.x, axes), v.kind != "f", 1e4 if v.kind != "f" else 1.0)
    return None


def running(draw: random.Random, values: list[Made]) -> Made | None:
    v = _pick(draw, values, lambda v: v.x.ndim > 0 and v.kind != "b")
    if v is None:
        return None
    axis, name = draw.randrange(v.x.ndim), draw.choice(["cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"])
    sums, n = v.kind == "f", v.size * max(v.shape[axis], 1)
    if (name == "cumprod" and sums and v.size > 1) or (name == "cumlogsumexp" and not sums) or (sums and n > LARGE):
        return None
    exact = v.exact if name in ("cummax", "cummin") else v.kind != "f"
    return Made(getattr(lax, name)(v.x, axis, reverse=draw.random() < 0.3), exact, n if sums else 1e4)


def move(draw: random.Random, values: list[Made]) -> Made | None:
    v, kind = _pick(draw, values), draw.random()
    if v is None:
        return None
    x, n = v.x, v.x.ndim
    if kind < 0.4 and n > 1:
        x = lax.transpose(x, draw.sample(range(n), n))
    elif kind < 0.55:
        x = lax.expand_dims(x, [draw.randint(0, n)])
    elif kind < 0.65 and 1 in x.shape:
        x = lax.squeeze(x, [x.shape.index(1)])
    elif kind < 0.8 and n > 1:
        k = draw.randrange(n - 1)
        x = lax.reshape(x, (*x.shape[:k], x.shape[k] * x.shape[k + 1], *x.shape[k + 2 :]))
    elif n < 3:
        shape = (*x.shape[: (k := draw.randint(0, n))], draw.choice([1, 2, 3, 5]), *x.shape[k:])
        x = lax.broadcast_in_dim(x, shape, [a for a in range(n + 1) if a != k])
    else:
        return None
    return dataclasses.replace(v, x=x)


def gather(draw: random.Random, values: list[Made]) -> Made | None:
    """What indices, in or out of bounds, pick along one axis of a value, and a function of it."""
    v = _pick(draw, values, lambda v: v.x.ndim > 0 and v.x.size > 0)
    if v is None:
        return None
    x, axis = v.x, draw.randrange(v.x.ndim)
    n, dtype = x.shape[axis], draw.choice(["int32", "int32", "uint8", "int16", "uint32"])
    least = 0 if dtype[0] == "u" else -n - 1
    index = [draw.randint(least, n + 1) for _ in range(draw.choice([1, 3, 6]))]
    own = _pick(draw, values, lambda w: w.exact and w.kind in "iu" and 1 <= w.x.ndim <= 2 and w.x.size > 0)
    given = own.x if own and draw.random() < 0.5 else jnp.asarray(index, dtype)
    if draw.random() < 0.25:  # of each row its own element
        shape = [1 if a == axis else m for a, m in enumerate(x.shape)]
        of_rows = jnp.asarray([draw.randrange(n) for _ in range(int(np.prod(shape)))], jnp.int32)
        picked = jnp.take_along_axis(x, of_rows.reshape(shape), axis, mode=draw.choice(["clip", "fill"]))
    else:
        mode = draw.choice(["clip", "fill"])
        picked = jnp.take(x, given, axis=axis, mode=mode, fill_value=draw.choice([0, 1]))
    if v.kind == "f" and draw.random() < 0.7 and v.size < 100:
        fn, size = SMOOTH[draw.choice(["tanh", "logistic", "sin", "sqrt"])]
        return Made(fn(picked), False, size(max(v.size, 1.0)))
    return Made(picked, v.exact, max(v.size, 1.0))


def kept(draw: random.Random, values: list[Made]) -> Made | None:
    """What no kernel takes: it stands between them."""
    v = _pick(draw, values, lambda v: v.x.ndim > 0 and v.x.size > 0)
    if v is None:
        return None
    x, axis = v.x, draw.randrange(v.x.ndim)
    kind = draw.choice(["slice", "rev", "concatenate", "pad", "take", "dot", "sort", "update"])
    if kind == "slice":
        return dataclasses.replace(v, x=lax.slice_in_dim(x, 0, x.shape[axis], draw.choice([1, 2]), axis))
    if kind == "rev":
        return dataclasses.replace(v, x=lax.rev(x, [axis]))
    if kind == "concatenate":
        return dataclasses.replace(v, x=lax.concatenate([x, x], axis))
    if kind == "pad":
        ends = [(1, draw.choice([0, 1]), 0) if a == axis else (0, 0, 0) for a in range(x.ndim)]
        return dataclasses.replace(v, x=lax.pad(x, jnp.zeros((), x.dtype), ends))
    if kind == "take":
        index = np.asarray([draw.randrange(x.shape[axis]) for _ in range(3)], np.int32)
        return dataclasses.replace(v, x=jnp.take(x, index, axis=axis, mode="clip"))
    if kind == "sort" and v.exact and x.dtype != bool:
        return dataclasses.replace(v, x=lax.sort(x, dimension=axis))
    if kind == "dot" and x.ndim == 2 and v.kind == "f" and v.size**2 * x.shape[1] <= LARGE:
        return Made(lax.dot_general(x, x, (((1,), (1,)), ((), ()))), False, v.size**2 * x.shape[1])
    if kind == "update":
        start = [jnp.asarray(0, jnp.int32)] * x.ndim
        return dataclasses.replace(v, x=lax.dynamic_update_slice(x, lax.slice_in_dim(x, 0, 1, axis=axis), start))
    return None


def form(draw: random.Random, values: list[Made]) -> Made | None:
    """Softmaxes, norms, losses: several equations that belong together."""
    v = _float(draw, values)
    if v is None or not v.x.ndim or not v.x.size or v.size > 100:
        return None
    x, axis = v.x, draw.randrange(v.x.ndim)
    kind = draw.choice(["softmax", "log_softmax", "logsumexp", "norm", "rms", "var", "weighted"])
    if kind in ("softmax", "log_softmax"):
        return Made(getattr(jax.nn, kind)(x, axis=axis), False, 1.0 if kind == "softmax" else 2 * v.size + 6)
    if kind == "weighted":  # a product of a matrix that is computed and a vector
        if x.ndim < 2 or v.size**2 * x.shape[axis] > LARGE:
            return None
        weights = jnp.max(x, axis=[k for k in range(x.ndim) if k != axis])
        product = lax.dot_general(x * x.dtype.type(0.5), weights, (((axis,), (0,)), ((), ())))
        return Made(product, False, v.size**2 * x.shape[axis])
    if kind == "logsumexp":
        return Made(jax.nn.logsumexp(x, axis=axis, keepdims=draw.random() < 0.5), False, v.size + 6)
    if kind == "norm":
        mean = jnp.mean(x, axis=axis, keepdims=True)
        return Made((x - mean) * lax.rsqrt(jnp.var(x, axis=axis, keepdims=True) + x.dtype.type(0.5)), False, 3.0)
    if kind == "rms":
        return Made(x * lax.rsqrt(jnp.mean(lax.square(x), axis=axis, keepdims=True) + x.dtype.type(0.5)), False, 3.0)
    return Made(jnp.var(x, axis=axis), False, v.size**2) if v.size**2 <= LARGE else None


def control(draw: random.Random, values: list[Made]) -> Made | None:
    """Loops and branches."""
    v = _float(draw, values)
    if v is None or not v.x.ndim or not v.x.size or v.size > 100:
        return None
    x, kind = v.x, draw.choice(["scan", "fori", "cond", "remat"])
    half = lambda y: lax.mul(y, lax.full_like(y, 0.5))
    if kind == "scan":
        step = lambda c, y: ((new := lax.add(half(c), lax.tanh(y))), lax.exp(lax.neg(lax.abs(new))))
        carry, out = lax.scan(step, lax.full_like(x[0], 0), x, reverse=draw.random() < 0.3)
        return Made(*((carry, False, 2.0) if draw.random() < 0.3 else (out, False, 1.0)))
    if kind == "fori":
        return Made(lax.fori_loop(0, 3, lambda i, y: lax.sin(lax.add(y, half(x))), x), False, 1.0)
    if kind == "remat":
        return Made(jax.checkpoint(lambda y: half(lax.sin(y)))(x), False, 1.0)
    mask = _pick(draw, values, lambda m: m.kind == "b" and m.x.size > 0)
    if mask is None:
        return None
    which = lax.reduce_and(mask.x, range(mask.x.ndim))
    return Made(lax.cond(which, lambda y: lax.tanh(half(y)), lambda y: lax.add(lax.cos(y), half(y)), x), False, 101.0)


KINDS = (smooth, sharp, binary, compare, select, cast, reduction, running, move, gather, kept, form, control)
WEIGHTS = (4, 2, 5, 1, 2, 1.5, 3, 1, 3, 0.7, 0.7, 1, 0.3)
