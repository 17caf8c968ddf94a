"""Products of rows with quantised weights by integers, on CPUs that multiply pairs of int16.

Each block of 32 numbers of a row of x is rounded to integers of 16 bits, s q with s the largest magnitude / 32767. The
sums of integer products of a block are exact, so that all that is lost is that rounding: of weights d c + m

    y_r = sum_b d_rb s_b (sum_j c_rbj q_bj) + sum_b m_rb s_b (sum_j q_bj).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops._shapes import known, programs_at_once
from jtile.ops.dispatch import first_unmet
from jtile.ops.epilogues import finished
from jtile.ops.norms import rms
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Norm, Weight
from jtile.ops.weight_codes import BLOCK, PANEL, codes_of_panels

KINDS = ("q4_0", "q4_1", "q8_0")
HALF = BLOCK // 2
TOP = 32767
LEAST = 2.0**-111  # of the largest magnitudes: the scale of this one, and the inverse, are still normal numbers
INTEGERS = "int16"  # `QuantizedTensor.activations` of weights whose rows may be rounded so
_INTEGERS = 400 << 10  # bytes of integers of x of a program: they stay in the second-level cache
_ROWS, _ROWS_OF_FEW = 384, 1024  # rows of W of a program, at most; and beside few rows of x
_TILED = 128  # rows of x of a program by matrix tiles: so many, that columns are brought to tiles for little


@jt.function
def rounded(X):
    """(q int16 [m, in], s float32 [m, in / 32], the sums of the blocks [m, in / 32]) of rows X float32 [m, in]."""
    m, inner = X.shape
    B = X.reshape(m, inner // BLOCK, BLOCK)
    # Magnitudes are in order as integers, too, where NaN is the largest of all: a third of the instructions.
    magnitude = jax.lax.bitcast_convert_type(B, jnp.int32) & np.int32(0x7FFFFFFF)
    top = jnp.maximum(jnp.max(magnitude, axis=2), np.float32(LEAST).view(np.int32))
    top = jax.lax.bitcast_convert_type(top, jnp.float32)
    whole = jnp.round(B * (TOP / top)[:, :, None]).astype(jnp.int16)
    scale = top * (1 / TOP)
    return whole.reshape(m, inner), scale, whole.astype(jnp.int32).sum(2).astype(jnp.float32) * scale


def _codes(codes, r, rows: int, kind: str):
    """The codes of a tile of W, one a byte: [rows, in]."""
    tile = codes.tiles(rows, codes.shape[1])[r, 0]
    if codes.dtype == jnp.int32:
        return codes_of_panels(tile, rows, kind)
    if kind == "q8_0":
        return tile
    wide = (rows, codes.shape[1] // HALF, 2, HALF)
    pairs = jnp.broadcast_to(tile.reshape(rows, wide[1], 1, HALF), wide)
    shift = jax.lax.broadcasted_iota(jnp.uint8, wide, 2) * np.uint8(4)
    return ((pairs >> shift) & np.uint8(15)).reshape(rows, wide[1] * BLOCK)


@jt.function
def _product(of_x, weight: Weight, r, rows: int, kind: str):
    """Y float32 [m, rows]: the product of rows, as `rounded` gives them, with a tile of W."""
    q, s, sums = of_x
    groups, panels = weight.scale.shape[1], weight.codes.dtype == jnp.int32

    def of_group(a):
        tile = a.tiles(rows, groups)[r, 0]
        if not panels:
            return tile
        return tile.reshape(rows // PANEL, groups, PANEL).transpose(0, 2, 1).reshape(rows, groups)

    scale, codes = of_group(weight.scale), _codes(weight.codes, r, rows, kind)
    if kind == "q8_0":
        return jt.dot_scaled(q, s, codes.T, scale.T)
    # The lows come first: a CPU adds them in one pass with the codes where they are there by then. Codes of q4_0 stand
    # 8 too high, so that its lows are the scales, which are there anyway, and its sums are -8 times as large.
    low = (of_group(weight.minimum) if kind == "q4_1" else scale).astype(jnp.float32)
    of_groups = sums.reshape(q.shape[0], groups, sums.shape[1] // groups).sum(2)
    of_groups = of_groups if kind == "q4_1" else of_groups * -8.0
    return jt.dot(of_groups, low.T, jt.dot_scaled(q, s, codes.T, scale.T))


def _type(x, weights, *_, **__):
    return jax.ShapeDtypeStruct((x.shape[0], weights[0].codes.shape[0]), jnp.float32)


def _grid(x, weights, *_, rows, bm, **__):
    return jt.cdiv(x.shape[0], bm), jt.cdiv(weights[0].codes.shape[0], rows)


@jt.kernel(out_type=_type, grid=_grid, name="rounded_product")
def _kernel(x, weights: tuple[Weight, ...], epilogue: Epilogue, y, *, kind, activation, rows, bm):
    i, r = jt.program_id(0), jt.program_id(1)
    of_x = rounded(x.tiles(bm, x.shape[1])[i, 0])
    sums = [_product(of_x, weight, r, rows, kind) for weight in weights]
    y.tiles(bm, rows)[i, r] = finished(sums, epilogue, activation, i, r, bm, rows)


def _normed_types(x, residual, norm, weights, **_):
    total = None if residual is None else jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return total, _type(x, weights)


def _normed_grid(x, residual, norm, weights, *, rows, bm, **_):
    return _grid(x, weights, rows=rows, bm=bm)


@jt.kernel(out_type=_normed_types, grid=_normed_grid, name="rounded_product_of_norm")
def _normed(x, residual, norm, weights: tuple[Weight, ...], total, y, *, kind, activation, rows, bm, eps):
    """The sum of x and the residual [m, in], and the product of its RMS norm, which all programs of some rows compute
    alike: a worker on a CPU does so once."""
    i, r, k = jt.program_id(0), jt.program_id(1), x.shape[1]
    X = x.tiles(bm, k)[i, 0]
    if residual is not None:
        X = X + residual.tiles(bm, k)[i, 0]

        @jt.when(r == 0)
        def _():
            total.tiles(bm, k)[i, 0] = x.tiles(bm, k)[i, 0] + residual.tiles(bm, k)[i, 0]

    of_x = rounded(rms(X, norm[...], eps, 0.0))
    sums = [_product(of_x, weight, r, rows, kind) for weight in weights]
    y.tiles(bm, rows)[i, r] = finished(sums, NO_EPILOGUE, activation, i, r, bm, rows)


def product(x, weights, epilogue: Epilogue, *, kind, activation, out_dtype, **_):
    """The product of x [m, in] with one weight [out, in], or the gated one with two, with its epilogue."""
    inner, out = x.shape[1], weights[0].codes.shape[0]
    options = dict(kind=kind, activation=activation, **tiles(known(x.shape[0]), out, inner, len(weights)))
    return _kernel(x.astype(jnp.float32), weights, epilogue, **options).astype(out_dtype)


def normed_product(x, norm: Norm, weights, *, kind, eps, activation, out_dtype):
    """(`product` of the norm of x + residual, and that sum), of float32."""
    inner, out = x.shape[1], weights[0].codes.shape[0]
    options = dict(kind=kind, activation=activation, eps=eps, **tiles(known(x.shape[0]), out, inner, len(weights)))
    total, y = _normed(x, norm.residual, norm.weight, weights, **options)
    return y.astype(out_dtype), x if total is None else total


def tiles(m: int, out: int, inner: int, matrices: int) -> dict[str, int]:
    """The rows of x and of W that a program takes. What those of the same rows of x have in common, a worker computes
    once; so there are several for each core."""
    by_tiles = m > 8 and "int16 tiles" in jt.target().features
    most = _INTEGERS // (2 * inner)
    parts = -(-m // (min(_TILED, max(32, most)) if by_tiles else max(8, most)))
    bm = min(m, -(-m // parts // 8) * 8)
    cores = programs_at_once()
    programs = (4 if m <= 8 else 2) * cores
    most = out if by_tiles else _ROWS // matrices if m > 8 else _ROWS_OF_FEW
    most = min(most, max(out * -(-m // bm) // programs, 64))
    if out <= most:
        return {"bm": bm, "rows": out}
    if m <= 8 and (rows := _equal(out, cores, most)):
        return {"bm": bm, "rows": rows}
    whole = most // 16 * 16
    exact = next((rows for rows in range(whole, whole // 2, -16) if out % rows == 0), None)
    # Else the last program hangs over: small divisors would make many programs of few rows.
    return {"bm": bm, "rows": exact or -(-out // -(-out // whole) // 16) * 16}


def _equal(out: int, cores: int, most: int) -> int | None:
    """The rows of W of a program of few rows of x, where each core gets as many programs of whole panels: it takes
    several, so that another one which is done can help a core that is slow just now."""
    for each in (4, 3, 5, 6, 2):
        rows, rest = divmod(out, each * cores)
        if rest == 0 and rows % PANEL == 0 and 64 <= rows <= 4 * most // 3:
            return rows
    return None


def misfit(x, weights, epilogue, *, kind, activations, **_) -> str | None:
    """Why `product` does not take a call; None if it does."""
    if kind not in KINDS or activations != INTEGERS:
        return f"rows beside {kind} are not to be rounded to integers of 16 bits"
    sizes = *x.shape, *(n for w in weights for n in w.codes.shape)
    with jt.config() as now:
        steady = now.steady
    in_blocks = all(w.scale.shape[1] * BLOCK == x.shape[1] for w in weights)
    return first_unmet(
        (all(known(n) for n in sizes), "an operand is empty"),
        (not any(map(_is_cut, jax.tree.leaves((x, weights)))), "an operand is cut over devices by its type"),
        (all(w.codes.dtype != jnp.uint32 for w in weights), "the codes are packed in words"),
        (not steady or in_blocks or kind == "q8_0", "a row is to have the same bits in any company"),
    )


def _is_cut(x) -> bool:
    """Whether the type of an array says that it lies on several devices: the stand-in's result may be cut, too."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ()) if isinstance(x, jax.Array) else ()
    return any(axis is not None for axis in spec)
