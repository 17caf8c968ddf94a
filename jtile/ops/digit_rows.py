"""Products of many rows with quantised weights by bytes, on CPUs whose tile registers multiply such.

A row of x is rounded to integers of 16 bits by one scale, and stands as two bytes a number, 256 h + l. The product is
one of float32 in whose precision a target has a choice (`precision="fast"` of `jt.dot`): a CPU rounds the weights to 16
bits of the largest of a row, too, and leaves out the product of both low bytes. That loses 1.5e-4 of a product's norm,
where integers of 16 bits with a scale for 32 numbers lose 2e-5 and integers of 8 bits 4e-3; but the sums of all of a
row stay in tile registers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops._shapes import known, programs_at_once
from jtile.ops.dispatch import first_unmet
from jtile.ops.epilogues import finished
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Norm, Weight
from jtile.ops.weight_codes import PANEL, codes_of_panels

TOP = 32512  # 127 * 256: high bytes end there
LEAST = 2.0**-111  # of the largest magnitudes, as for `rounded_rows.rounded`
LEAST_ROWS = 48  # of x: for fewer it is not worth while to take rows of W apart
_BYTES_OF_X, _MOST_ROWS = 800 << 10, 512  # of digits of x of a program
_RESULTS = 96 << 10  # numbers that a program makes
_PROGRAMS = 6  # for each core at least: the tile unit of one may be half as fast as another's for a while
_STEP = 32  # rows of W, two tiles
_NUMBERS = 4096  # of x of a program that makes digits: they stay in the first-level cache


def _digit_types(x, *, rows, **_):
    of_row = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    bytes_of = jax.ShapeDtypeStruct((rows, x.shape[1]), jnp.int8)
    return bytes_of, bytes_of, of_row


def digits(X):
    """(h int8, l int8, s float32 [m, 1]) of rows X float32 [m, k]: X is about s (256 h + l)."""
    top = largest(X, 1)
    # The maximum keeps the product apart from a sum behind it: one instruction for both would round some numbers
    # otherwise, and whether there is one depends on the sizes of an array.
    return *bytes_of(jnp.maximum(X * (TOP / top)[:, None], -TOP)), (top * (1 / TOP))[:, None]


def largest(X, axes):
    """The largest magnitudes of X along some axes, and at least `LEAST`; NaN is larger than all."""
    magnitude = jax.lax.bitcast_convert_type(X, jnp.int32) & np.int32(0x7FFFFFFF)  # in the order of magnitudes, too
    top = jnp.maximum(jnp.max(magnitude, axis=axes), np.float32(LEAST).view(np.int32))
    return jax.lax.bitcast_convert_type(top, jnp.float32)


def bytes_of(x):
    """(h, l), int8: the nearest integers of x, of at most `TOP`, are 256 h + l."""
    # The sum with 1.5 * 2**23 has the nearest integer in its last bits; what else is there reaches neither byte.
    whole = jax.lax.bitcast_convert_type(x + np.float32(1.5 * 2**23), jnp.int32)
    return ((whole + 128) >> 8).astype(jnp.int8), whole.astype(jnp.int8)


def numbers(high, low):
    """256 h + l, as float32. A CPU knows these steps (`lowering/cpu/digit_products.py`) and takes the bytes."""
    return high.astype(jnp.float32) * 256.0 + low.astype(jnp.float32)


@jt.kernel(out_type=_digit_types, grid=lambda x, *, rows, bm: (jt.cdiv(rows, bm),), name="row_digits")
def _digits(x, high, low, scale, *, rows: int, bm: int):
    """The digits of x [m, k] with rows of zeros behind it; they are `rows` in all."""
    i, k = jt.program_id(0), x.shape[1]
    high.tiles(bm, k)[i, 0], low.tiles(bm, k)[i, 0], scale.tiles(bm, 1)[i, 0] = digits(x.tiles(bm, k)[i, 0])


def _normed_types(x, residual, weight, *, rows, **_):
    total = None if residual is None else jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return total, *_digit_types(x, rows=rows)


@jt.kernel(out_type=_normed_types, grid=lambda x, *_, rows, bm, **__: (jt.cdiv(rows, bm),), name="row_digits_of_norm")
def _normed_digits(x, residual, weight, total, high, low, scale, *, rows: int, bm: int, eps: float):
    """The sum of x and the residual [m, k], and the digits of its RMS norm with a weight [k], as `_digits`."""
    i, k = jt.program_id(0), x.shape[1]
    X = x.tiles(bm, k)[i, 0]
    if residual is not None:
        X = X + residual.tiles(bm, k)[i, 0]
        total.tiles(bm, k)[i, 0] = X
    mean = (X * X).sum(1, keepdims=True) * (1.0 / k)
    X = X * jax.lax.rsqrt(mean + eps) * weight[...].astype(jnp.float32)[None, :]
    high.tiles(bm, k)[i, 0], low.tiles(bm, k)[i, 0], scale.tiles(bm, 1)[i, 0] = digits(X)


def of_rows(x, rows: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`digits` of x float32 [m, k], with rows of zeros behind them up to `rows`."""
    return _digits(x, rows=x.shape[0] if rows is None else rows, bm=_rows_of_x(x))


@jt.function
def _weights(weight: Weight, r, rows: int, kind: str):
    """A tile of W in panels as float32 [rows, in]."""
    groups = weight.scale.shape[1]
    inner = weight.codes.shape[1] * (4 if kind == "q8_0" else 8)

    def of_group(a):
        tile = a.tiles(rows, groups)[r, 0].reshape(rows // PANEL, groups, PANEL)
        return tile.transpose(0, 2, 1).reshape(rows, groups).astype(jnp.float32)[:, :, None]

    codes = codes_of_panels(weight.codes.tiles(rows, weight.codes.shape[1])[r, 0], rows, kind)
    W = codes.astype(jnp.float32).reshape(rows, groups, inner // groups)
    W = (W - 8.0 if kind == "q4_0" else W) * of_group(weight.scale)
    W = W + of_group(weight.minimum) if kind == "q4_1" else W
    return W.reshape(rows, inner)


def _type(high, low, scale, weights, *_, m, **__):
    return jax.ShapeDtypeStruct((m, weights[0].codes.shape[0]), jnp.float32)


def _grid(high, low, scale, weights, *_, rows, bm, **__):
    return jt.cdiv(high.shape[0], bm), jt.cdiv(weights[0].codes.shape[0], rows)


@jt.kernel(out_type=_type, grid=_grid, name="digit_product")
def _kernel(high, low, scale, weights: tuple[Weight, ...], epilogue: Epilogue, y, *, kind, activation, m, rows, bm):
    i, r, k = jt.program_id(0), jt.program_id(1), high.shape[1]
    X = numbers(high.tiles(bm, k)[i, 0], low.tiles(bm, k)[i, 0]) * scale.tiles(bm, 1)[i, 0]
    products = [jt.dot(X, _weights(weight, r, rows, kind).T, precision="fast") for weight in weights]
    y.tiles(bm, rows)[i, r] = finished(products, epilogue, activation, i, r, bm, rows)


def product(x, weights, epilogue: Epilogue, *, kind, activation, out_dtype, **_):
    """The product of x [m, in] with one weight [out, in], or the gated one with two, with its epilogue."""
    m, rows, sizes = _sizes(x, weights)
    of_x = of_rows(x.astype(jnp.float32), rows)
    return _kernel(*of_x, weights, epilogue, kind=kind, activation=activation, m=m, **sizes).astype(out_dtype)


def normed_product(x, norm: Norm, weights, *, kind, eps, activation, out_dtype):
    """(`product` of the norm of x + residual, and that sum), all float32."""
    m, rows, sizes = _sizes(x, weights)
    total, *of_x = _normed_digits(x, norm.residual, norm.weight, rows=rows, bm=_rows_of_x(x), eps=eps)
    y = _kernel(*of_x, weights, NO_EPILOGUE, kind=kind, activation=activation, m=m, **sizes)
    return y.astype(out_dtype), x if total is None else total


def _rows_of_x(x) -> int:
    """The rows of x of a program that makes digits."""
    return 1 << max(1, (_NUMBERS // x.shape[1]).bit_length() - 1)


def _sizes(x, weights) -> tuple[int, int, dict[str, int]]:
    """The rows of x, those of its digits, and the tiles of a product."""
    sizes = tiles(x.shape[0], weights[0].codes.shape[0], x.shape[1], len(weights))
    return x.shape[0], -(-x.shape[0] // sizes["bm"]) * sizes["bm"], sizes


def tiles(m: int, out: int, inner: int, matrices: int) -> dict[str, int]:
    """The rows of x and of W that a program takes: rows of W become digits for many rows of x, whose digits stay in the
    second-level cache together with the results."""
    most = max(_BYTES_OF_X // (2 * inner) // 16, 4) * 16
    parts = -(-m // min(most, _MOST_ROWS))
    bm = -(-m // parts // 16) * 16
    cores = programs_at_once()
    count = max(-(-out * bm * matrices // _RESULTS), -(-_PROGRAMS * cores // parts))
    steps = -(-out // _STEP)
    most = -(-steps // count)
    even = (n for n in range(most, (most - 1) // 2, -1) if steps % n == 0 and steps // n * parts % cores == 0)
    each = next(even, most)  # rows in steps: each core has as many programs as another, where that is possible
    return {"bm": bm, "rows": min(each * _STEP, out)}


def misfit(x, weights, *, kind: str) -> str | None:
    """Why `product` does not take a call of `rounded_rows.product`; None if it does."""
    with jt.config() as now:
        steady = now.steady
    k = x.shape[1]
    return first_unmet(
        ("byte tiles" in jt.target().features, "this machine has no tile registers of bytes"),
        (isinstance(x.shape[0], int), "how many rows there are is not known"),
        (known(x.shape[0]) >= LEAST_ROWS and k % 64 == 0, "so few rows, or rows that are no whole tiles"),
        (all(w.codes.dtype == jnp.int32 for w in weights), "the weights are not in panels"),
        (all(w.scale.shape[1] > 1 for w in weights), "a row of the weights is one group"),
        (not steady, "a row is to have the same bits in any company, small ones, too"),
    )
