"""Products of groups of rows with a stack of quantised matrices on GPUs; the public function is in grouped_matmul.py.

Codes are taken as where one matrix is multiplied, by quantized_lanes.py and k_lanes.py. Weights of products of many
rows are rounded to the dtype of x before they are multiplied, as they would be if they were stored dequantised.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import k_lanes, quantized_lanes
from jtile.ops._shapes import fit, known, tuned
from jtile.ops.operands import Weight
from jtile.ops.quantized_lanes import HALF, dequantized_halves, side
from jtile.ops.row_groups import gated, in_parts, most_tiles, named, of_group, parts, tile_of_rows
from jtile.ops.super_blocks import LAYOUTS, RUN, SUPER, SuperBlocks, as_bytes
from jtile.ops.weight_codes import BLOCK, FOUR_BIT, unpack_codes


def _few_type(x, weight, index, *, out_dtype, **_):
    return jax.ShapeDtypeStruct((index.shape[0], *weight.scale.shape[-3:-1]), out_dtype)


@jt.kernel(
    out_type=_few_type, grid=lambda x, weight, index, *_, **__: (weight.codes.shape[-3], index.shape[0]),
    name="quantized_routed_lanes",
)  # fmt: skip
def routed_lanes(x, weight: Weight, index, y, *, kind: str, activation, blocks: int, stages: int, out_dtype: str):
    """y [m, tiles, rows] of x [m / n, in], each row of which meets n matrices, and the numbers of these, index int32
    [m]; codes [groups, tiles, rows, bytes or words], scale (and minimum) [groups, tiles, rows, scales of a row]. With
    an activation, arrays have an axis of two (G, U) behind that of groups: y = act(x Gᵀ) * (x Uᵀ)."""
    # y_i = W_g x_(i / n)     g = index_i; zero where there is no such matrix
    tile, i, rows = jt.program_id(0), jt.program_id(1), weight.codes.shape[-2]
    g, inside = named(index, i, weight.codes.shape[0])
    of = (i // (index.shape[0] // x.shape[0]),)
    matrices = parts(weight, g, activation)
    found = gated(quantized_lanes.lane_products(x, of, matrices, tile, kind, blocks, stages), activation)
    y.tiles(None, None, rows)[i, tile, 0] = jnp.where(inside, found, 0).astype(y.dtype)


@jt.kernel(
    out_type=lambda x, weight, index, *, out_dtype, **_: jax.ShapeDtypeStruct(
        (index.shape[0], weight.scale.shape[-2]), out_dtype
    ),
    grid=lambda x, weight, index, *, rows, **_: (jt.cdiv(weight.scale.shape[-2], rows), index.shape[0]),
)
def k_routed_lanes(x, weight: SuperBlocks, index, y, *, kind: str, activation, rows: int, blocks: int, out_dtype: str):
    """`routed_lanes` for K-quants: x [m / n, super blocks, runs of a part, parts, 32], arrays as `k_lanes.split` gives
    them; y [m, out]."""
    r, i = jt.program_id(0), jt.program_id(1)
    g, inside = named(index, i, weight.scale.shape[0])
    of = (i // (index.shape[0] // x.shape[0]),)
    found = gated(k_lanes.lane_products(x, of, parts(weight, g, activation), r, kind, rows, blocks), activation)
    y.tiles(1, rows)[i, r] = jnp.where(inside, found, 0)[None, :].astype(y.dtype)


def _many_type(x, weight, *_, out_dtype, **__):
    return jax.ShapeDtypeStruct((x.shape[0], weight.scale.shape[1]), out_dtype)


def _many_grid(x, weight, *_, rows, bm, **__):
    groups, out = weight.scale.shape[:2]
    return jt.cdiv(out, rows), most_tiles(x.shape[0], groups, bm)


@jt.kernel(out_type=_many_type, grid=_many_grid, name="quantized_grouped_lanes")
def grouped_code_lanes(
    x, weight: Weight, sizes, y, *, kind: str, rows: int, bm: int, blocks: int, out_dtype: str, stages: int = 3
):
    """The products of each group: a program takes `bm` rows of a group of x, and `rows` rows of its matrix.

    x [m, blocks, 32] (of 4-bit codes [m, blocks, 2, 16]); codes [groups, out, blocks, stored], scale (and minimum)
    [groups, out, scales of a row]; sizes int32, zero behind the groups.
    """
    # y_i = W_g x_i     for the rows i of group g; zero behind the groups
    r, four = jt.program_id(0), kind in FOUR_BIT
    tile = tile_of_rows(sizes, weight.codes.shape[0], jt.program_id(1), bm, x.shape[0])
    if tile.exists:
        W, mine, dtype = of_group(weight, tile.group), jt.ds(tile.first, bm), x.dtype
        total = jnp.zeros((bm, rows), jnp.float32)
        for chunk in jt.range(jnp.where(tile.inside, jt.cdiv(x.shape[1], blocks), 0), stages=stages):
            part = jt.ds(chunk * blocks, blocks)
            halves = [x[mine, part, n, :] for n in range(2)] if four else [x[mine, part, :]]
            terms = dequantized_halves(W, r, chunk, kind, rows, blocks, dtype)
            for half, (term, *_) in zip(halves, terms):
                total = jt.dot(half.reshape(bm, -1), term.T, total)
        if weight.scaled_last(kind):
            total = total * W.scale.tiles(rows, 1)[r, 0][:, 0][None, :]
        jt.store(y, (mine, jt.ds(r * rows, rows)), total.astype(y.dtype), mask=tile.mine(bm, rows))


@jt.kernel(out_type=_many_type, grid=_many_grid)
def k_grouped_lanes(x, weight: SuperBlocks, sizes, y, *, kind: str, rows: int, bm: int, out_dtype: str):
    """`grouped_code_lanes` for K-quants; operands as those of `k_routed_lanes`."""
    r, layout = jt.program_id(0), LAYOUTS[kind]
    tile = tile_of_rows(sizes, weight.scale.shape[0], jt.program_id(1), bm, x.shape[0])
    if tile.exists:
        W, mine = of_group(weight, tile.group), jt.ds(tile.first, bm)
        total = jnp.zeros((bm, rows), jnp.float32)
        for chunk in jt.range(jnp.where(tile.inside, x.shape[1], 0)):
            for part, term in enumerate(k_lanes.dequantized_parts(W, layout, r, chunk, rows)):
                X = x[mine, chunk, :, part, :].reshape(bm, -1)
                total = jt.dot(X, term.astype(X.dtype).T, total)
        jt.store(y, (mine, jt.ds(r * rows, rows)), total.astype(y.dtype), mask=tile.mine(bm, rows))


@jt.kernel(
    out_type=lambda g, weight, *_, kind, **__: jax.ShapeDtypeStruct(
        (g.shape[0], weight.scale.shape[2], LAYOUTS[kind].runs, LAYOUTS[kind].parts, RUN), jnp.float32
    ),
    grid=lambda g, weight, *_, bm, **__: (
        weight.scale.shape[2], most_tiles(g.shape[0], weight.scale.shape[0], bm),
    ),
)  # fmt: skip
def k_grouped_dx(g, weight: SuperBlocks, sizes, dx, *, kind: str, rows: int, bm: int):
    """dx [m, super blocks, runs of a part, parts, 32] for the cotangents g [m, out] of rows in the order of groups."""
    # dX = G W
    chunk, layout = jt.program_id(0), LAYOUTS[kind]
    tile = tile_of_rows(sizes, weight.scale.shape[0], jt.program_id(1), bm, g.shape[0])
    if tile.exists:
        W, mine, width = of_group(weight, tile.group), jt.ds(tile.first, bm), layout.runs * RUN
        sums = tuple(jnp.zeros((bm, width), jnp.float32) for _ in range(layout.parts))
        for r in jt.range(jnp.where(tile.inside, jt.cdiv(g.shape[1], rows), 0)):
            G = g[mine, jt.ds(r * rows, rows)]
            parts = k_lanes.dequantized_parts(W, layout, r, chunk, rows)
            sums = tuple(jt.dot(G, part, total) for part, total in zip(parts, sums))
        mask = tile.mine(bm, width).reshape(bm, layout.runs, RUN)
        for part, total in enumerate(sums):
            jt.store(dx, (mine, chunk, slice(None), part, slice(None)), total.reshape(bm, layout.runs, RUN), mask=mask)


# -- implementations: x [m, in] and the arrays of a stack [groups, out, …] ---------------------------------------------


def few_rows(x, weight: Weight | SuperBlocks, index, *, kind: str, activation: str | None, out_dtype: str):
    """The products [m, out] of x [m / n, in] and index int32 [m]; with an activation [m, out / 2]."""
    gates = 1 if activation is None else 2
    out, m = weight.scale.shape[1] // gates, index.shape[0]
    options = dict(kind=kind, activation=activation, out_dtype=out_dtype)
    if isinstance(weight, SuperBlocks):
        tiles, warps = k_lanes.gemv_choice(gates, out, weight.scale.shape[2], kind)
        x, weight = _split_rows(x, kind), in_parts(k_lanes.split(weight, LAYOUTS[kind]), activation)
        return tuned(k_routed_lanes, num_warps=warps)(x, weight, index, **options, **tiles)
    x, weight = _whole_blocks(x, weight)
    x = x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
    rows, tiles, warps = _few_choice(out, x.shape[1] // BLOCK, kind, gates)
    weight = in_parts(weight, activation)
    weight = jax.tree.map(lambda a: quantized_lanes.in_groups(a, rows, gates), weight)
    return tuned(routed_lanes, num_warps=warps)(x, weight, index, **options, **tiles).reshape(m, out)


def many_rows(x, weight: Weight | SuperBlocks, sizes, *, kind: str, out_dtype: str):
    """The products [m, out] of x [m, in] in the order of groups, and sizes int32 [groups or more]."""
    groups, out = weight.scale.shape[:2]
    each = jt.cdiv(known(x.shape[0]), groups)
    if isinstance(weight, SuperBlocks):
        weight = k_lanes.split(weight._replace(codes=as_bytes(weight.codes), high=as_bytes(weight.high)), LAYOUTS[kind])
        sides = {"rows": side(out, 64), "bm": 64 if x.dtype == jnp.bfloat16 else side(each, 64)}
        return k_grouped_lanes(_split_rows(x, kind), weight, sizes, kind=kind, out_dtype=out_dtype, **sides)
    x, weight = _whole_blocks(x, weight._replace(codes=unpack_codes(weight.codes, kind)))
    x = x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
    m, blocks = x.shape[0], x.shape[1] // BLOCK
    x = x.reshape((m, blocks, 2, HALF) if kind in FOUR_BIT else (m, blocks, BLOCK))
    weight = weight._replace(codes=weight.codes.reshape(groups, out, blocks, -1))
    return grouped_code_lanes(
        x, weight, sizes, kind=kind, out_dtype=out_dtype, **_many_choice(out, each, kind, x.dtype)
    )


def _few_choice(out: int, blocks: int, kind: str, gates: int) -> tuple[int, dict[str, int], int]:
    """The choice for few rows, see `quantized_lanes.gemv_choice`. A program of a gated layer takes four rows of each
    part, in twice the threads: 24 and 19 us for eight experts of 2048 x 1536 in fp8 and Q4_1 on an H200, where two
    rows (eight) took 27 and 24."""
    if gates == 1:
        return quantized_lanes.gemv_choice(1, out, blocks, kind, False)
    warps = min(4, max(1, jt.next_power_of_2(blocks) // 16))
    tiles = {"blocks": min(16 * warps, jt.next_power_of_2(blocks))}
    rows = next(r for r in (4, 2, 1) if out % r == 0)
    return rows, tiles | {"stages": 2 if blocks > tiles["blocks"] else 1}, warps


def _many_choice(out: int, each: int, kind: str, dtype) -> dict[str, int]:
    """Tiles for groups of about `each` rows. Of 16-bit rows tensor cores take 64 at once: 311 us for 128 groups of
    32 rows with matrices of 2048 x 1536 in fp8 on an H200, 353 with tiles of 32."""
    if dtype == jnp.float32:
        return {"rows": side(out, 64), "bm": side(each, 64), "blocks": 1}
    if kind in FOUR_BIT:
        return {"rows": side(out, 64), "bm": 64, "blocks": 2}
    return {"rows": side(out, 128), "bm": 64, "blocks": 4}


def k_dx(g, weight: SuperBlocks, sizes, kind: str) -> jax.Array:
    """The cotangent of x, float32 [m, in], for the cotangents g [m, out] of rows in the order of groups."""
    groups, _, blocks = weight.scale.shape
    bm = fit(jt.cdiv(known(g.shape[0]), groups), 64)
    dx = k_grouped_dx(g, k_lanes.split(weight, LAYOUTS[kind]), sizes, kind=kind, rows=32, bm=bm)
    return dx.reshape(g.shape[0], blocks * SUPER)


def _split_rows(x, kind: str):
    """x [m, in] as kernels of K-quants take it."""
    layout, x = LAYOUTS[kind], x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    return x.reshape(x.shape[0], x.shape[1] // SUPER, layout.runs, layout.parts, RUN)


def _whole_blocks(x, weight: Weight) -> tuple[jax.Array, Weight]:
    """x and a weight with rows of whole blocks: where a row has one scale it may have any length, and gets zeros."""
    rest = -x.shape[1] % BLOCK
    if rest == 0:
        return x, weight
    more = lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, rest)])
    return more(x), weight._replace(codes=more(weight.codes))


def flat(x, weight: Weight | SuperBlocks, kind: str) -> tuple[jax.Array, Weight | SuperBlocks]:
    """Operands of these kernels brought back to x [m, in] and arrays [groups, out, …]."""
    groups, of_row = weight.scale.shape[0], weight.scale.shape[-1]
    out = weight.scale.size // groups // of_row
    as_rows = lambda a: None if a is None else a.reshape(groups, out, -1)
    return x.reshape(x.shape[0], -1), type(weight)(*map(as_rows, weight))
