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
from jtile.ops import gpu_tiles, held_words
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Norm, Weight
from jtile.ops.streamed_numbers import EIGHT, LANES, bits_of, field_planes, float_sums, floats_of, groups_of
from jtile.ops.streamed_operands import PIECE, Rows, by_block, of_piece

WARPS = 4
ROWS = (4, 8, 16)  # of a program
_WEIGHTS = 128  # that a thread has at most
_REGISTERS, _BLOCKS = (128, 200), (4, 2)  # of a thread, and of a multiprocessor, for up to half of these and for more
_WIDE = 152  # registers of a thread for a matrix of float32: a block stands beside one of `hopper_gemv` with them
_BYTES = 4 << 20  # of a matrix, or of two: a ring in shared memory is made for more
STRIPS = False  # whether packed weights lie in lanes word by word
_OF_X = 3  # what a piece of x takes, in rows of a warp; 16-bit weights, of which blocks hide it from each other, 0


def _load(weight: Weight, tile, rows: int, kind: str, inner: int, pieces: int) -> list:
    """All codes of the rows of a tile, and their scales (and minima), by piece: operands of `floats_of`. Groups behind
    the end of a row are left out: ptxas (12.9) knows that they are zero, and makes NaN of the upper half of such a word
    of 8-bit floats."""
    count = groups_of(kind)
    width = PIECE // groups_of(kind) * bits_of(kind) // (32 if weight.codes.dtype == jnp.uint32 else bits_of(kind))
    out = []
    for piece in range(pieces):
        places = range(piece * count, min((piece + 1) * count, jt.cdiv(inner * count, PIECE)))
        codes = [weight.codes.tiles(rows, width)[tile, at] for at in places]
        blocks = [[a.tiles(rows, of_piece(a, inner, kind))[tile, at] for at in places] for a in by_block(weight, kind)]
        out.append((codes, blocks))
    return out


@jt.function
def _made(stored, norm, rows: int, kind: str):
    """The weights of what `_load` gave, times those of the norm. They are made in a loop of one round, of which the
    compiler does not know that it has any: else it would make them when the kernel in front has ended. (No square is 5
    more than a multiple of 8.)"""
    time = jt.clock().astype(jnp.int32)
    once = jnp.where((time * time & 7) == 5, 0, 1)
    shape = (rows, LANES, 4)
    numbers = jax.tree.map(lambda _: jnp.zeros(shape, jnp.float32), _numbers(stored, norm, kind))
    for _ in jt.range(once):
        numbers = _numbers(stored, norm, kind)
    return numbers


@jt.function
def _made_of_words(stored, norm, kind: str):
    """`_made` of what `held_words.load` gave."""
    time = jt.clock().astype(jnp.int32)
    once = jnp.where((time * time & 7) == 5, 0, 1)
    numbers = jax.tree.map(jnp.zeros_like, _numbers_of_words(stored, norm, kind))
    for _ in jt.range(once):
        numbers = _numbers_of_words(stored, norm, kind)
    return numbers


def _numbers_of_words(stored, norm: list, kind: str):
    normed = lambda found, w: found if w is None else [field * plane[None] for field, plane in zip(found, w)]
    strip = lambda words, blocks, w: normed(held_words.fields(words, blocks, kind), w)
    return [[[strip(*one, w) for one, w in zip(of, norm)] for of in parts] for parts in stored]


def _numbers(stored, norm, kind: str):
    return [[_normed(floats_of(*one, kind), w, kind) for one, w in zip(pieces, norm)] for pieces in stored]


def _normed(fields: list[list], norm: list, kind: str) -> list[list]:
    """The fields of a piece, times the weights of the norm in tiles of `EIGHT`; None where there is no norm."""
    if norm[0] is None:
        return fields
    planes = iter(field_planes([w.astype(jnp.float32) for w in norm], kind))
    return [[field * plane[None] for field, plane in zip(of_group, planes)] for of_group in fields]


class _Lanes:
    """Weights of 16 bits, or packed ones of which a lane has 16 bytes: see `streamed_numbers`."""

    parts = 1

    def __init__(self, x: Rows, weights, kind: str, rows: int, tile):
        self.x, self.kind, self.rows, self.tile = x, kind, rows, tile
        self.stored = [_load(w, tile, rows, kind, x.x.shape[1] * x.x.shape[2], x.pieces) for w in weights]
        self.norm = [x.weights(at, True) for at in range(x.pieces)]

    def make(self) -> None:
        self.held = _made(self.stored, self.norm, self.rows, self.kind)

    def planes(self, i: int, total):
        """Row i of x for `float_sums` by piece, and sums of its squares where a norm is in front. x + residual goes to
        `total`, at once, lest the kernel ends later for it."""
        x, squares = self.x, None
        parts = [x.parts(i, at, True) for at in range(x.pieces)]
        if total is not None:
            _write_sums(x, total, i, parts, self.tile)
        if x.norm is not None:
            squares = functools.reduce(jnp.add, [part * part for of in parts for part in of]).sum(1)
        return [field_planes(of, self.kind) for of in parts], squares

    def sums(self, part: int, planes: list) -> list:
        add = lambda found: functools.reduce(jnp.add, found)
        return [add([float_sums(w, p) for w, p in zip(numbers, planes)]).sum(1) for numbers in self.held]


class _Words:
    """Packed weights of which a lane has a word: see `held_words`."""

    rows = held_words.ROWS

    def __init__(self, x: Rows, weights, kind: str, rows: int, tile):
        self.x, self.kind, self.tile, self.parts = x, kind, tile, rows // held_words.ROWS
        inner = x.x.shape[1] * x.x.shape[2]
        self.strips, self.programs = held_words.strips_of(inner, kind), jt.cdiv(weights[0].codes.shape[0], rows)
        self.stored = [held_words.load(w, tile, rows, kind, inner) for w in weights]
        tiles = lambda k: held_words.tiles_of(x, x.norm.weight, (), k)
        self.norm = [None if x.norm is None else held_words.planes(tiles(k)) for k in self.strips]

    def make(self) -> None:
        self.held = _made_of_words(self.stored, self.norm, self.kind)

    def planes(self, i: int, total):
        x, squares = self.x, None
        found = [held_words.tiles_of(x, x.x, (i,), k) for k in self.strips]
        if x.norm is not None and x.norm.residual is not None:
            more = [held_words.tiles_of(x, x.norm.residual, (i,), k) for k in self.strips]
            found = [[a + b for a, b in zip(*of)] for of in zip(found, more)]
        if total is not None:
            _write_strips(total, i, found, self.tile, self.programs)
        planes = [held_words.planes(of) for of in found]
        if x.norm is not None:
            add = lambda found: functools.reduce(jnp.add, found)
            squares = add([add([p * p for p in of]) for of in planes])  # by strip: their chains are not one
        return planes, squares

    def sums(self, part: int, planes: list) -> list:
        return [held_words.sums(parts[part], planes) for parts in self.held]


@jt.function
def _write_strips(total, i: int, strips, tile, programs: int):
    """Row i of x + residual, to `total`: strip n by program n, of `programs`."""
    for k, tiles in enumerate(strips):
        if tile == k % programs:
            for q, part in enumerate(tiles):
                total.tiles(None, held_words.UNITS, EIGHT)[i, k, q] = part.astype(total.dtype)


@jt.function
def _write_sums(x: Rows, total, i: int, parts, tile):
    """Row i of x + residual, to `total`: piece n by program n."""
    for at, of in enumerate(parts):
        if tile == at:
            for place, part in zip(x.eights(at), of):
                total.tiles(None, LANES, EIGHT)[i, *place] = part.astype(total.dtype)


def _program(x: Rows, weights, epilogue: Epilogue, y, total, *, kind: str, activation, rows: int, hold: bool):
    # y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj)
    tile, inner, m = jt.program_id(0), x.x.shape[1] * x.x.shape[2], x.x.shape[0]
    last = bits_of(kind) < 16 and weights[0].scaled_last(kind)
    registers = _REGISTERS[_weights_of_thread(rows, _numbers_of_lane(inner, kind), len(weights)) > _WEIGHTS // 2]
    registers = _WIDE if weights[0].codes.dtype == jnp.float32 else registers
    with jt.role("rows", warps=WARPS, registers=registers, early=True):
        own = (
            _Words(x, weights, kind, rows, tile)
            if in_words(weights, inner, kind)
            else _Lanes(x, weights, kind, rows, tile)
        )
        of_rows = [w.scale.tiles(own.rows, 1) for w in weights] if last else []
        at = [tile * own.parts + part for part in range(own.parts)]
        of_rows = [[view[k, 0][:, 0] for view in of_rows] for k in at]
        bias = None if epilogue.bias is None else epilogue.bias.tiles(None, own.rows)
        bias = [None if bias is None else bias[0, k].astype(jnp.float32) for k in at]
        own.make()
        jt.wait_for_kernels(hold=hold)
        for i in range(m):
            planes, squares = own.planes(i, total)
            unit = None if squares is None else x.scale([squares])
            for part, k in enumerate(at):
                sums = own.sums(part, planes)
                sums = sums if unit is None else [one * unit for one in sums]
                sums = [one * scale for one, scale in zip(sums, of_rows[part])] if last else sums
                out = ACTIVATIONS[activation](sums[0] if bias[part] is None else sums[0] + bias[part])
                out = out * sums[1] if len(sums) > 1 else out
                if epilogue.residual is not None:
                    out = out + epilogue.residual.tiles(None, own.rows)[i, k].astype(jnp.float32)
                y.tiles(None, own.rows)[i, k] = out.astype(y.dtype)


def in_words(weights, inner: int, kind: str) -> bool:
    """Whether packed weights lie in lanes word by word."""
    return STRIPS and all(held_words.fits(w, inner, kind) for w in weights)


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
    _program(Rows(x), weights, epilogue, y, None, kind=kind, activation=activation, rows=rows, hold=hold)


def _normed_body(x, weights: tuple[Weight, ...], norm: Norm, y, total=None, *, kind: str, activation, out_dtype: str,
                 eps: float, rows: int, hold: bool = False):  # fmt: skip
    """The same behind an RMS norm of x, or of x + residual, whose sum it writes to `total`."""
    options = dict(kind=kind, activation=activation, rows=rows, hold=hold)
    _program(Rows(x, norm, eps), weights, NO_EPILOGUE, y, total, **options)


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
    numbers, found = _numbers_of_lane(inner, kind), []
    if m > 2 or (1 + gated) * out * inner * bits_of(kind) > 8 * _BYTES:
        return None
    for rows in ROWS:
        turns, weights = jt.cdiv(jt.cdiv(out, rows), processors), _weights_of_thread(rows, numbers, 1 + gated)
        if weights <= _WEIGHTS and turns <= _BLOCKS[weights > _WEIGHTS // 2]:
            of_x = 0 if bits_of(kind) == 16 else _OF_X
            found.append((turns * (of_x + (1 + gated) * rows // WARPS), rows))
    return min(found)[1] if found else None


def _numbers_of_lane(inner: int, kind: str) -> int:
    words = STRIPS and bits_of(kind) < 16
    return held_words.numbers_of_lane(inner, kind) if words else jt.cdiv(inner, PIECE) * PIECE // LANES


def _weights_of_thread(rows: int, numbers: int, weights: int) -> int:
    return weights * numbers * rows // WARPS


def choice(x, weights: tuple[Weight, ...], kind: str) -> int | None:
    """The rows of a program where these kernels compute the product of x [m, in], else None."""
    if not gpu_tiles.overlaps() or x.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    m, inner = x.shape
    if not all(of_piece(a, inner, kind) for w in weights for a in by_block(w, kind)):
        return None
    return rows_of(m, weights[0].codes.shape[0], inner, kind, len(weights) > 1, gpu_tiles.processors())
