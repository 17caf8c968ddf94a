"""One or two rows of x times a small matrix, on Hopper at the block level: yᵀ = W xᵀ, W in registers before x is there.

Where a matrix is so small that all multiprocessors together hold it at once, a product waits for latencies only: those
of memory, of barriers between roles, and of the end of the kernel in front. So a program has a few rows of W, which it
loads while that kernel still runs, and a single role, which passes nothing through shared memory: each warp has all of
x, and sums over the lanes by shuffles. Blocks take few registers, so that those of the kernel behind stand beside them.

It stands in for `hopper_gemv` where `jt.config(overlap=True)` promises that the kernel in front does not make W.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.held_rows import Rows, fits, made, numbers_of_lane
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Norm, Weight
from jtile.ops.streamed_numbers import EIGHT, bits_of

WARPS = 4
ROWS = (4, 8, 16)  # of a program
_WEIGHTS = 128  # that a thread has at most
_REGISTERS, _BLOCKS = (128, 200), (4, 2)  # of a thread, and of a multiprocessor, for up to half of these and for more
_WIDE = 152  # registers of a thread for a matrix of float32: a block stands beside one of `hopper_gemv` with them
_BYTES = 4 << 20  # of a matrix, or of two: a ring in shared memory is made for more
_OF_X = 3  # what a piece of x takes, in rows of a warp; 16-bit weights, of which blocks hide it from each other, 0


@jt.function
def _write_sums(form: Rows, total, i: int, tiles, tile, programs: int):
    """Row i of x + residual, to `total`, at once, lest the kernel ends later for it: strip n by program n, of
    `programs`."""
    for k, (places, of) in enumerate(zip(form.places, tiles)):
        if tile == k % programs:
            for place, part in zip(places, of):
                total.tiles(None, form.side, EIGHT)[i, *place] = part.astype(total.dtype)


def _row(form: Rows, x, norm: Norm | None, i: int) -> list:
    """The tiles of row i of x, or of x + norm.residual."""
    tiles = form.of(x, i)
    if norm is None or norm.residual is None:
        return tiles
    return [[a + b for a, b in zip(*of)] for of in zip(tiles, form.of(norm.residual, i))]


def _unit(form: Rows, tiles, planes, eps: float):
    """1 / sqrt(mean of the squares + eps) of a row."""
    return jax.lax.rsqrt(form.squares(tiles, planes).sum() * jnp.float32(1 / form.inner) + eps)


def _program(x, weights, epilogue: Epilogue, y, total=None, norm: Norm | None = None, eps: float = 0.0, *, kind: str,
             activation, rows: int, hold: bool):  # fmt: skip
    # y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj)
    tile, form = jt.program_id(0), Rows(kind, x.shape[1] * x.shape[2], rows)
    last = form.packed and weights[0].scaled_last(kind)
    programs, at, each = jt.cdiv(y.shape[1], rows), form.at(tile), form.each
    with jt.role("rows", warps=WARPS, registers=_registers(weights, form), early=True):
        stored = [form.load(w, tile) for w in weights]
        planes = None if norm is None else form.planes(form.of(norm.weight))
        of_rows = [[w.scale.tiles(each, 1)[k, 0][:, 0] for w in weights] if last else [] for k in at]
        bias = None if epilogue.bias is None else epilogue.bias.tiles(None, each)
        bias = [None if bias is None else bias[0, k].astype(jnp.float32) for k in at]
        numbers = made(form, stored, planes)
        jt.wait_for_kernels(hold=hold)
        for i in range(x.shape[0]):
            tiles = _row(form, x, norm, i)
            if total is not None:
                _write_sums(form, total, i, tiles, tile, programs)
            planes = form.planes(tiles)
            unit = None if norm is None else _unit(form, tiles, planes, eps)
            for part, k in enumerate(at):
                sums = [form.sums(of_weight[part], planes) for of_weight in numbers]
                sums = sums if unit is None else [one * unit for one in sums]
                sums = [one * scale for one, scale in zip(sums, of_rows[part])] if last else sums
                out = ACTIVATIONS[activation](sums[0] if bias[part] is None else sums[0] + bias[part])
                out = out * sums[1] if len(sums) > 1 else out
                if epilogue.residual is not None:
                    out = out + epilogue.residual.tiles(None, each)[i, k].astype(jnp.float32)
                y.tiles(None, each)[i, k] = out.astype(y.dtype)


def _registers(weights, form: Rows) -> int:
    """The registers of a thread."""
    if weights[0].codes.dtype == jnp.float32:
        return _WIDE
    return _REGISTERS[
        _weights_of_thread(form.rows, numbers_of_lane(form.inner, form.kind), len(weights)) > _WEIGHTS // 2
    ]


def _outputs(x, weights, *_, out_dtype, **__):
    return jax.ShapeDtypeStruct((x.shape[0], weights[0].codes.shape[0]), jnp.dtype(out_dtype))


def _normed_outputs(x, weights, norm, **options):
    y = _outputs(x, weights, **options)
    return y if norm.residual is None else (y, jt.like(norm.residual))


def _grid(x, weights, *_, rows: int, **__) -> int:
    return jt.cdiv(weights[0].codes.shape[0], rows)


def _body(x, weights: tuple[Weight, ...], epilogue: Epilogue, y, *, kind: str, activation, out_dtype: str, rows: int,
          hold: bool = False):  # fmt: skip
    """`hopper_gemv` of a small matrix, with `rows` rows of it for each program; hold: see `gpu_tiles.holding`."""
    _program(x, weights, epilogue, y, kind=kind, activation=activation, rows=rows, hold=hold)


def _normed_body(x, weights: tuple[Weight, ...], norm: Norm, y, total=None, *, kind: str, activation, out_dtype: str,
                 eps: float, rows: int, hold: bool = False):  # fmt: skip
    """The same behind an RMS norm of x, or of x + residual, whose sum it writes to `total`."""
    options = dict(kind=kind, activation=activation, rows=rows, hold=hold)
    _program(x, weights, NO_EPILOGUE, y, total, norm, eps, **options)


@functools.cache
def kernel(arrays: int, has_bias: bool, has_residual: bool) -> jt.Kernel:
    specs = ["m _ _", *["o _"] * arrays, *["_ o"] * has_bias, *["m o"] * has_residual]
    spec = f"{', '.join(specs)} -> m o"
    return jt.kernel(out_type=_outputs, grid=_grid, sharding=spec, name="hopper_held")(_body)


@functools.cache
def normed_kernel(arrays: int, summed: bool = True) -> jt.Kernel:
    """The kernel behind a norm; summed: the norm has a residual."""
    specs = f"m _ _, {', '.join(['o _'] * arrays)}, _ _{', m _ _' * summed} -> m o{', m _ _' * summed}"
    return jt.kernel(out_type=_normed_outputs, grid=_grid, sharding=specs, name="hopper_norm_held")(_normed_body)


@functools.lru_cache(maxsize=1024)
def rows_of(m: int, out: int, inner: int, kind: str, gated: bool, processors: int) -> int | None:
    """The rows of a program, or None where the matrix is too large: what a multiprocessor has to do in turn is least,
    which is x for each of its programs, and their rows."""
    numbers, found = numbers_of_lane(inner, kind), []
    if m > 2 or (1 + gated) * out * inner * bits_of(kind) > 8 * _BYTES:
        return None
    for rows in ROWS:
        turns, weights = jt.cdiv(jt.cdiv(out, rows), processors), _weights_of_thread(rows, numbers, 1 + gated)
        if weights <= _WEIGHTS and turns <= _BLOCKS[weights > _WEIGHTS // 2]:
            of_x = 0 if bits_of(kind) == 16 else _OF_X
            found.append((turns * (of_x + (1 + gated) * rows // WARPS), rows))
    return min(found)[1] if found else None


def _weights_of_thread(rows: int, numbers: int, weights: int) -> int:
    return weights * numbers * rows // WARPS


def choice(x, weights: tuple[Weight, ...], kind: str) -> int | None:
    """The rows of a program where these kernels compute the product of x [m, in], else None."""
    if not gpu_tiles.overlaps() or x.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    m, inner = x.shape
    if not all(fits(w, inner, kind) for w in weights):
        return None
    return rows_of(m, weights[0].codes.shape[0], inner, kind, len(weights) > 1, gpu_tiles.processors())
