"""Products with K-quants, whose bits stay as they are: y = x Wᵀ; the arrays and the formula are in super_blocks.py.

Few rows of x: codes go from memory into the sums, part by part of a super block. What all weights of a sub-block lack,
`zero` times their scale or their minimum, is taken from the sums at once, times the sum of x over the sub-block. Many
rows: a tile of W is dequantised once. GPUs take other tiles: k_lanes.py.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import k_lanes
from jtile.ops._shapes import fit, known
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet
from jtile.ops.epilogues import finished
from jtile.ops.frozen import gradients, saving
from jtile.ops.operands import NO_EPILOGUE, Epilogue
from jtile.ops.super_blocks import LAYOUTS, RUN, SUPER, Layout, SuperBlocks, as_bytes, integers


def _of_subs(weight: SuperBlocks, layout: Layout, r, rows: int, blocks: int, c):
    """Scales of the sub-blocks of a tile, and what is taken from their weights or None: [rows, blocks, subs]."""
    chunks = weight.scale.shape[1] // blocks
    tile = lambda a: None if a is None else a.tiles(rows, a.shape[1] // chunks)[r, c].reshape(rows, blocks, -1)
    steps, lows = integers(tile(weight.steps), tile(weight.lows), layout)
    scale = tile(weight.scale).astype(jnp.float32) * steps
    if lows is not None:
        return scale, tile(weight.minimum).astype(jnp.float32) * lows
    return scale, scale * np.float32(layout.zero) if layout.zero else None


def _codes(weight: SuperBlocks, layout: Layout, r, rows: int, blocks: int, c):
    """The parts of a tile as float32 [rows, blocks, runs, sub-blocks of a run, sub]."""
    chunks, shape = weight.scale.shape[1] // blocks, (rows, blocks, layout.runs, -1, layout.wide, layout.sub)
    planes = [
        plane.tiles(rows, plane.shape[1] // chunks)[r, c].reshape(shape)
        for plane in (weight.codes, weight.high)
        if plane is not None
    ]
    found = []
    for part in range(layout.parts):
        value, shift = None, 0
        for plane, bits in zip(planes, layout.bits):
            run, field = layout.place(part, bits)
            bits_of_part = (plane[:, :, :, run] >> np.uint8(bits * field)) & np.uint8((1 << bits) - 1)
            value = bits_of_part if value is None else value | (bits_of_part << np.uint8(shift))
            shift += bits
        found.append(value.astype(jnp.float32))
    return found


def _beside(numbers, layout: Layout) -> list:
    """Numbers [..., subs] of sub-blocks, shaped to meet the codes of each part."""
    parts = numbers.reshape(*numbers.shape[:-1], layout.parts, layout.runs, layout.wide)
    return [parts[..., part, :, :][..., None] for part in range(layout.parts)]


def row_product(weight: SuperBlocks, layout: Layout, X, sums, r, rows: int):
    """Y [rows] = W x for one row of x, X [blocks, *layout.axes] and its sums [blocks, subs] in the order of parts,
    as `row_of` gives them; nothing of W is stored."""
    blocks = weight.scale.shape[1]
    scale, low = _of_subs(weight, layout, r, rows, blocks, 0)
    total = None
    for part, (scales, codes) in enumerate(
        zip(_beside(scale, layout), _codes(weight, layout, r, rows, blocks, 0), strict=True)
    ):
        term = scales * (codes * X[None, :, :, part])
        total = term if total is None else total + term
    Y = jnp.sum(total, axis=(1, 2, 3, 4))
    return Y if low is None else Y - jnp.sum(low * sums[None], axis=(1, 2))


def row_of(x, i, layout: Layout):
    """Row i of x as `row_product` takes it, and its sums."""
    X = x[i, :].reshape(x.shape[1] // SUPER, *layout.axes)
    return X, X.sum(axis=4).swapaxes(1, 2).reshape(X.shape[0], layout.subs)


def dequantized_tile(weight: SuperBlocks, layout: Layout, r, rows: int, blocks: int, c=0):
    """W [rows, blocks * 256] of one tile in float32: chunk c of its columns."""
    scale, low = _of_subs(weight, layout, r, rows, blocks, c)
    W = [s * codes for s, codes in zip(_beside(scale, layout), _codes(weight, layout, r, rows, blocks, c), strict=True)]
    if low is not None:
        W = [part - lows for part, lows in zip(W, _beside(low, layout), strict=True)]
    W = [part.reshape(rows, blocks, layout.runs, RUN) for part in W]
    return jnp.concatenate(W, axis=3).reshape(rows, blocks * SUPER)


def _type(x, weights, *_, **__):
    return jax.ShapeDtypeStruct((x.shape[0], weights[0].scale.shape[0]), jnp.float32)


@jt.kernel(
    out_type=_type, grid=lambda x, weights, *_, rows, **__: (x.shape[0], jt.cdiv(weights[0].scale.shape[0], rows))
)
def k_gemv(x, weights: tuple[SuperBlocks, ...], epilogue: Epilogue, y, *, kind: str, activation, rows: int):
    """One row of x, `rows` of W in a program; with a second weight y = act(x Gᵀ) * (x Uᵀ)."""
    i, r, layout = jt.program_id(0), jt.program_id(1), LAYOUTS[kind]
    X, sums = row_of(x, i, layout)
    found = [row_product(w, layout, X, sums, r, rows)[None, :] for w in weights]
    y.tiles(1, rows)[i, r] = finished(found, epilogue, activation, i, r, 1, rows)


@jt.kernel(
    out_type=_type,
    grid=lambda x, weights, *_, rows, bm, **__: (jt.cdiv(weights[0].scale.shape[0], rows), jt.cdiv(x.shape[0], bm)),
)
def k_gemm(x, weights: tuple[SuperBlocks, ...], epilogue: Epilogue, y, *, kind: str, activation, rows: int, bm: int):
    """`bm` rows of x times `rows` rows of W in a program."""
    r, i, blocks = jt.program_id(0), jt.program_id(1), weights[0].scale.shape[1]
    X = x.tiles(bm, x.shape[1])[i, 0]
    found = [jt.dot(X, dequantized_tile(w, LAYOUTS[kind], r, rows, blocks).T) for w in weights]
    y.tiles(bm, rows)[i, r] = finished(found, epilogue, activation, i, r, bm, rows)


@jt.kernel(
    out_type=lambda g, weight, **_: jax.ShapeDtypeStruct((g.shape[0], weight.scale.shape[1] * SUPER), jnp.float32),
    grid=lambda g, weight, *, bm, chunks, **_: (jt.cdiv(g.shape[0], bm), chunks),
)
def k_dx(g, weight: SuperBlocks, dx, *, kind: str, rows: int, bm: int, chunks: int):
    """dx [m, in] for the cotangents g [m, out] of x Wᵀ: a chunk of W's columns in a program, `rows` rows at a time."""
    # dX = G W
    i, c, blocks = jt.program_id(0), jt.program_id(1), weight.scale.shape[1] // chunks
    G = g.tiles(bm, rows)
    acc = jt.zeros((bm, blocks * SUPER))
    for r in jt.range(G.shape[1]):
        acc = jt.dot(G[i, r], dequantized_tile(weight, LAYOUTS[kind], r, rows, blocks, c), acc)
    dx.tiles(bm, blocks * SUPER)[i, c] = acc


def _dx_in_bytes(g, weight: SuperBlocks, *, kind: str):
    sides = {"rows": fit(g.shape[1], 64), "chunks": chunks_of(weight)}
    return k_dx(g, weight, kind=kind, bm=fit(g.shape[0], 512), **sides)


# float32 [m, in] for cotangents g [m, out] of products with a weight in bytes.
_dx = Op(
    "gradient of products with a weight of super blocks",
    Implementation("codes in lanes", lambda g, weight, *, kind: k_lanes.dx(g, weight, kind), None, WARPS),
    Implementation("codes in bytes", _dx_in_bytes),
)


def chunks_of(weight: SuperBlocks) -> int:
    """The number of parts in which `k_dx` takes the columns of W: a part has two super blocks at most."""
    blocks = weight.scale.shape[-1]
    return next(n for n in range(jt.cdiv(blocks, 2), blocks + 1) if blocks % n == 0) if blocks else 1


def in_bytes(weight: SuperBlocks) -> SuperBlocks:
    return weight._replace(codes=as_bytes(weight.codes), high=as_bytes(weight.high))


def _forward(product, x, weights, epilogue: Epilogue, *, kind, activation, **_):
    y, saved = saving(functools.partial(product, kind=kind), x, weights, epilogue, activation)
    return y, (x, weights, epilogue, saved)


def _backward(residuals, g, *, kind, activation, **_):
    x, weights, epilogue, saved = residuals
    dx = lambda d, w: _dx(d, in_bytes(w), kind=kind)
    of_x, of_epilogue = gradients(weights, epilogue, saved, g, activation, dx)
    return of_x.astype(x.dtype), None, of_epilogue


def _on_cpu(x, weights, epilogue: Epilogue = NO_EPILOGUE, *, kind: str, activation=None):
    """The product on CPUs: one or two rows of x meet codes as they are, more rows meet dequantised tiles of W."""
    weights, x = tuple(map(in_bytes, weights)), x.astype(jnp.float32)
    (m, inner), out = x.shape, weights[0].scale.shape[0]
    if known(m) <= 2:
        rows = fit(out, max(8, (128 << 10) // max(inner, 1)))
        return k_gemv(x, weights, epilogue, kind=kind, activation=activation, rows=rows)
    rows, bm = fit(out, 64 if known(m) > 32 else 16), m if known(m) <= 512 else math.ceil(m / math.ceil(m / 512))
    return k_gemm(x, weights, epilogue, kind=kind, activation=activation, rows=rows, bm=bm)


def _lanes_forward(x, weights, epilogue: Epilogue, **meta):
    """The forward rule of kernels whose arrays have axes of super blocks and parts."""
    return _forward(k_lanes.product, x.reshape(x.shape[0], -1), tuple(map(k_lanes.flat, weights)), epilogue, **meta)


def _lanes_backward(residuals, g, *, kind, **meta):
    dx, _, depilogue = _backward(residuals, g, kind=kind, **meta)
    x, layout = residuals[0], LAYOUTS[kind]
    return dx.reshape(x.shape[0], x.shape[1] // SUPER, layout.runs, layout.parts, RUN), None, depilogue


for _kernel in (k_gemv, k_gemm):
    _kernel.defvjp(functools.partial(_forward, _on_cpu), _backward)
for _kernel in (k_lanes.k_gemv_lanes, k_lanes.k_gemm_lanes):
    _kernel.defvjp(_lanes_forward, _lanes_backward)


def _rounded(run):
    """An implementation of the op by a product `run` whose result is float32: it is rounded to `out_dtype`."""

    def rounded(x, weights, epilogue, *, out_dtype, **options):
        return run(x, weights, epilogue, **options).astype(out_dtype)

    return rounded


def _not_in_lanes(x, weights, epilogue, **_) -> str | None:
    sizes = (*x.shape, weights[0].scale.shape[0])
    return first_unmet((all(known(n) for n in sizes), "an operand is empty"))


# The product of x [m, in] with a weight, or the gated product with two, and its epilogue.
product = Op(
    "product with K-quants",
    Implementation("codes in lanes", _rounded(k_lanes.product), _not_in_lanes, WARPS),
    Implementation("rows of codes", _rounded(_on_cpu)),
)
