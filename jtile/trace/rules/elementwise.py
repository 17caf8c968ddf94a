"""Arithmetic, comparisons, bit operations, math functions, casts, choices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile import ir
from jtile.trace.lower import Lowering, rule
from jtile.trace.marks import MARK

# Functions that mean the same on every dtype that both have, and those of another name.
SAME = """
    add sub mul div rem max min atan2 nextafter eq ne lt le gt ge and or xor not sign square sqrt rsqrt cbrt floor
    ceil is_finite exp exp2 expm1 log log1p log2 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
    logistic erf erfc erf_inv lgamma digamma clz neg
"""
RENAMED = {
    "add_any": "add",
    "shift_left": "shl",
    "shift_right_logical": "shr_logical",
    "population_count": "popcount",
}


def _same(ours: str):
    # JAX lets a scalar stand beside a tile.
    return lambda c, *xs, **_: c.map(ours, *[c.splat(x, c.out.shape) for x in xs])


for _jax, _ours in [*((n, n) for n in SAME.split()), *RENAMED.items()]:
    rule(_jax)(_same(_ours))


@rule("abs")
def _(c: Lowering, x, **_):
    return x if x.type.info.kind == "u" else c.map("abs", x)


@rule("neg")
def _(c: Lowering, x, **_):
    # The negative of an unsigned number is taken modulo its width.
    return c.map("sub", c.full(0, x.type), x) if x.type.info.kind == "u" else c.map("neg", x)


@rule("shift_right_arithmetic")
def _(c: Lowering, x, n, **_):
    """The arithmetic shift: it copies the top bit of unsigned numbers too, as XLA's (jnp's `>>` is logical there)."""
    x, n = (c.splat(v, c.out.shape) for v in (x, n))
    if x.type.info.kind != "u":
        return c.map("shr", x, n)
    signed = x.type.dtype.removeprefix("u")
    out = c.map("shr", *[c.add(ir.Bitcast(v, signed)) for v in (x, n)])
    return c.add(ir.Bitcast(out, x.type.dtype))


@rule("sign")
def _(c: Lowering, x, **_):
    return c.map("min", x, c.full(1, x.type)) if x.type.info.kind == "u" else c.map("sign", x)


@rule("one_minus_square")
def _(c: Lowering, x, **_):
    return c.map("sub", c.full(1, x.type), c.map("square", x))


@rule("round")
def _(c: Lowering, x, *, rounding_method, **_):
    away = rounding_method == lax.RoundingMethod.AWAY_FROM_ZERO
    return c.map("round_away" if away else "round", x)


@rule("clamp")
def _(c: Lowering, lo, x, hi, **_):
    return c.map("clamp", *[c.splat(v, c.out.shape) for v in (lo, x, hi)])


@rule("integer_pow")
def _(c: Lowering, x, *, y: int, **_):
    """An integer power, by squaring; a negative one is the reciprocal."""
    if y == 0:
        return c.full(1, x.type)
    out: Any = None
    square, n = x, abs(y)
    while n:
        if n & 1:
            out = square if out is None else c.map("mul", out, square)
        n >>= 1
        square = c.map("mul", square, square) if n else square
    return c.map("div", c.full(1, x.type), out) if y < 0 else out


@rule("pow")
def _(c: Lowering, x, y, **_):
    if x.type.info.kind != "f":
        raise c.unsupported("an int to a traced int power; write x ** n with a Python int, or use floats")
    x, y = (c.splat(v, c.out.shape) for v in (x, y))
    return c.map("pow", x, c.b.cast(y, x.type.dtype))


@rule("convert_element_type")
def _(c: Lowering, x, *, new_dtype, **_):
    return c.b.cast(x, c.dtype(new_dtype))


@rule("bitcast_convert_type")
def _(c: Lowering, x, *, new_dtype, **_):
    dtype = c.dtype(new_dtype)
    if dtype == x.type.dtype:
        return x
    if ir.DTYPES[dtype].bits != x.type.info.bits:
        return _bitcast_width(c, x, dtype)
    return c.add(ir.Bitcast(x, dtype))


def _bitcast_width(c: Lowering, x: ir.Value, dtype: str):
    """A bitcast to another width: a last axis of parts appears or goes, least significant part first."""
    src, dst = x.type.info, ir.DTYPES[dtype]
    if src.kind == "b" or dst.kind == "b":
        raise c.unsupported("a bitcast between bool and another width")
    word = lambda bits: f"uint{bits}"
    if src.bits > dst.bits:
        raw = x if src.kind == "u" else c.add(ir.Bitcast(x, word(src.bits)))
        parts = src.bits // dst.bits

        def split(v):
            shifts = lax.broadcasted_iota(v.dtype, (*v.shape, parts), v.ndim) * np.array(dst.bits, v.dtype)
            return lax.shift_right_logical(lax.broadcast_in_dim(v, (*v.shape, parts), tuple(range(v.ndim))), shifts)

        (out,) = c.call(split, raw)
        out = c.b.cast(out, word(dst.bits))
    else:
        raw = c.b.cast(x if src.kind == "u" else c.add(ir.Bitcast(x, word(src.bits))), word(dst.bits))

        def join(v):
            shifts = lax.broadcasted_iota(v.dtype, v.shape, v.ndim - 1) * np.array(src.bits, v.dtype)
            return jnp.bitwise_or.reduce(lax.shift_left(v, shifts), axis=-1)

        (out,) = c.call(join, raw)
    return out if dst.kind == "u" else c.add(ir.Bitcast(out, dtype))


@rule("select_n")
def _(c: Lowering, which, *cases, **_):
    shape = c.out.shape
    cases = [c.splat(v, shape) for v in cases]
    which = c.splat(which, shape)
    if which.type.dtype == "bool":
        return c.add(ir.Select(which, cases[1], cases[0])) if len(cases) == 2 else cases[0]
    out = cases[-1]
    for k in range(len(cases) - 2, -1, -1):
        out = c.add(ir.Select(c.map("le", which, c.b.full(k, shape, which.type.dtype)), cases[k], out))
    return out


@rule("reduce_precision")
def _(c: Lowering, x, *, exponent_bits: int, mantissa_bits: int, **_):
    wide = c.b.cast(x, "float32") if x.type.info.bits < 32 else x
    (out,) = c.call(lambda v: _reduce_precision(v, exponent_bits, mantissa_bits), wide)
    return c.b.cast(out, x.type.dtype)


def _reduce_precision(x, exponent_bits: int, mantissa_bits: int):
    """Round to nearest even at `mantissa_bits`; too large becomes infinite, too small becomes zero of the same sign."""
    info = jnp.finfo(x.dtype)
    word = np.dtype(np.uint32 if info.bits == 32 else np.uint64)
    u = lambda v: np.array(v, word)
    bits = lax.bitcast_convert_type(x, word)
    drop = info.nmant - mantissa_bits
    if drop > 0:
        last = (bits >> u(drop)) & u(1)
        bits = (bits + u((1 << (drop - 1)) - 1) + last) & u(((1 << info.bits) - 1) ^ ((1 << drop) - 1))
    y = lax.bitcast_convert_type(bits, x.dtype)
    if exponent_bits < info.nexp:
        top, low = 2.0 ** (2 ** (exponent_bits - 1)), 2.0 ** (2 - 2 ** (exponent_bits - 1))
        sign = lax.bitcast_convert_type(bits & u(1 << (info.bits - 1)), x.dtype)
        signed = lambda v: lax.bitcast_convert_type(
            lax.bitcast_convert_type(jnp.full(x.shape, v, x.dtype), word) | lax.bitcast_convert_type(sign, word),
            x.dtype,
        )
        y = jnp.where(
            jnp.abs(y) >= x.dtype.type(top), signed(np.inf), jnp.where(jnp.abs(y) < x.dtype.type(low), sign, y)
        )
    return jnp.where(jnp.isnan(x), x, y)


@rule(
    "copy",
    "copy_p",
    "stop_gradient",
    "pvary",
    "pcast",
    "reshard",
    "sharding_constraint",
    "layout_constraint",
    "stage",
    "relayout",
    "device_put",
    "mesh_cast",
    "tie",
    "convert_weak_type",
)
def _(c: Lowering, x, *_, **__):
    return x


@rule("name")
def _(c: Lowering, x, *, name: str, **_):
    """A name of `jax.checkpoint` does nothing; a mark of the debugger's is a value of its own, which has the name."""
    if not name.startswith(MARK) or not isinstance(x, ir.Value):
        return x
    return c.b.value(ir.Reshape(x, x.shape), name.removeprefix(MARK))


@rule("optimization_barrier")
def _(c: Lowering, *xs, **_):
    return list(xs)


@rule("dce_sink")
def _(c: Lowering, *_, **__):
    return []


@rule("mulhi")
def _(c: Lowering, x, y, **_):
    if x.type.info.bits > 32:
        raise c.unsupported("the high half of a 64-bit product; use 32-bit ints")
    wide = "int64" if x.type.info.kind == "i" else "uint64"
    x, y = (c.splat(v, c.out.shape) for v in (x, y))
    p = c.map("mul", c.b.cast(x, wide), c.b.cast(y, wide))
    return c.b.cast(c.map("shr", p, c.b.full(x.type.info.bits, p.type.shape, wide)), x.type.dtype)


@rule("polynomial")
def _(c: Lowering, x, *coefficients, **_):
    """A polynomial, by Horner's scheme; the constant coefficient comes first."""
    x, *parts = (c.splat(v, c.out.shape) for v in (x, *coefficients))
    out = parts[-1]
    for a in reversed(parts[:-1]):
        out = c.map("add", c.map("mul", out, x), a)
    return out


def _total_order(fn: str):
    """Comparison in the total order of IEEE floats: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""

    def run(c: Lowering, x, y, **_):
        x, y = (c.splat(v, c.out.shape) for v in (x, y))
        if x.type.info.kind != "f":
            return c.map(fn, x, y)
        bits = x.type.info.bits
        word = ir.TileType(x.type.shape, f"int{bits}")
        sign, low = c.full(bits - 1, word), c.full((1 << (bits - 1)) - 1, word)

        def key(v):
            raw = c.add(ir.Bitcast(v, word.dtype))  # sign and magnitude, turned into two's complement
            return c.map("xor", raw, c.map("and", c.map("shr", raw, sign), low))

        return c.map(fn, key(x), key(y))

    return run


for _ours in ("eq", "lt", "le"):
    rule(f"{_ours}_to")(_total_order(_ours))
