"""Products of groups of rows with a stack of quantised matrices: a mixture of experts whose weights keep their bits.

Few rows, as a decoding step has them: every row goes through the matrix that an index names, straight from its codes.
Many rows stand in the order of their groups, and a tile of a group's matrix is dequantised once for a tile of its rows.
How codes become numbers is said where one matrix is multiplied: quantized.py and k_products.py; GPUs take the forms of
grouped_lanes.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dispatch, grouped_lanes, hopper_groups, k_products, quantized, quantized_rows
from jtile.ops._shapes import fit, known
from jtile.ops.dispatch import BLOCK_LEVEL, WARPS, Implementation, Op
from jtile.ops.epilogues import gate_derivative
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.row_groups import (
    gated,
    in_parts,
    joined,
    most_tiles,
    named,
    of_group,
    padded,
    parts,
    tile_of_rows,
    within,
)
from jtile.ops.super_blocks import LAYOUTS, SuperBlocks
from jtile.ops.weight_codes import unpack_codes

Stack = Weight | SuperBlocks  # the arrays of a weight with a leading axis of groups: [groups, out, …]


def product(x, weight: QuantizedTensor, sizes, *, activation: str | None, out_dtype: str) -> jax.Array:
    """The products of x [rows, in], [rows, out]; weights [groups, out, in], sizes int32 [groups or more]; with an
    activation those of a gated layer, [rows, out / 2]. See `grouped_matmul`."""
    rows, groups = x.shape[0], weight.shape[0]
    if few(rows, groups):
        ends = jnp.cumsum(sizes[:groups], dtype=jnp.int32)
        index = (ends[None, :] <= jnp.arange(rows, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
        y = _few_rows(x, _arrays(weight), index, kind=weight.kind, activation=None, out_dtype=out_dtype)
        return y if activation is None else joined(y, activation, out_dtype)
    options = {"kind": weight.kind, "out_dtype": out_dtype}
    if activation is None:
        return _many_rows(x, _arrays(weight), sizes, **options)
    return _many_gated_rows(x, _arrays(weight), sizes, activation=activation, **options)


def few(rows, groups: int) -> bool:
    """Whether rows are multiplied one by one, straight from the codes. On CPUs that is as fast as tiles where a
    matrix has two or three rows; on GPUs, whose tiles of 64 rows take as long for one row as for many, where most
    matrices have one row. An NPU's vector cores have no form for it."""
    most = groups // 2 if dispatch.small_tiles() else 2 * groups
    return known(rows) <= most and not dispatch.vector_cores()


def routed(x, weight: QuantizedTensor, index, *, activation: str | None, out_dtype: str) -> jax.Array:
    """The products [m, out] of few rows, x [m / n, in], each of which meets the n matrices that index int32 [m] names;
    with an activation, those of a gated layer, [m, out / 2]. See `routed_matmul`."""
    return _few_rows(x, _arrays(weight), index, kind=weight.kind, activation=activation, out_dtype=out_dtype)


def _arrays(weight: QuantizedTensor) -> Stack:
    """The arrays of a weight, by which nothing differentiates: quantised weights are frozen."""
    arrays = weight.super_blocks if weight.is_super else Weight(weight.codes, weight.scale, weight.minimum)
    return jax.lax.stop_gradient(arrays)


def _plain(weight: Stack, kind: str) -> Stack:
    """The arrays with codes in bytes."""
    if isinstance(weight, SuperBlocks):
        return k_products.in_bytes(weight)
    return weight._replace(codes=unpack_codes(weight.codes, kind))


def _row_product(weight: Stack, kind: str, x, i, r, rows: int):
    """W x [rows] for row i of x and the r-th `rows` rows of one matrix."""
    if isinstance(weight, SuperBlocks):
        layout = LAYOUTS[kind]
        return k_products.row_product(weight, layout, *k_products.row_of(x, i, layout), r, rows)
    return quantized_rows.row_product(weight, quantized_rows.row_of(x, i, weight, kind), r, rows, kind)


def _tile(weight: Stack, kind: str, r, rows: int, inner: int, c=0, chunks: int = 1):
    """The r-th `rows` rows of one matrix in float32, of its columns chunk c."""
    if isinstance(weight, SuperBlocks):
        return k_products.dequantized_tile(weight, LAYOUTS[kind], r, rows, weight.scale.shape[1] // chunks, c)
    return quantized_rows.dequantized_tile(weight, r, rows, kind, inner, c, chunks)


@jt.kernel(
    out_type=lambda x, weight, index, *, out_dtype, **_: jax.ShapeDtypeStruct(
        (index.shape[0], weight.scale.shape[-2]), out_dtype
    ),
    grid=lambda x, weight, index, *, rows, **_: (index.shape[0], jt.cdiv(weight.scale.shape[-2], rows)),
)
def routed_rows(x, weight: Stack, index, y, *, kind: str, activation, rows: int, out_dtype: str):
    """y [m, out] of x [m / n, in], each row of which meets n matrices, and the numbers of these, index int32 [m]. With
    an activation, arrays have an axis of two (G, U) behind that of groups: y = act(x Gᵀ) * (x Uᵀ)."""
    # y_i = W_g x_(i / n)     g = index_i; zero where there is no such matrix
    i, r = jt.program_id(0), jt.program_id(1)
    g, inside = named(index, i, weight.scale.shape[0])
    y.tiles(1, rows)[i, r] = jnp.zeros((1, rows), y.dtype)
    if inside:
        row = i // (index.shape[0] // x.shape[0])
        Y = gated([_row_product(W, kind, x, row, r, rows) for W in parts(weight, g, activation)], activation)
        y.tiles(1, rows)[i, r] = Y[None, :].astype(y.dtype)


@jt.kernel(
    out_type=lambda x, weight, *_, out_dtype, **__: jax.ShapeDtypeStruct(
        (x.shape[0], weight.scale.shape[1]), out_dtype
    ),
    grid=lambda x, weight, sizes, *, rows, bm, **_: (
        most_tiles(x.shape[0], weight.scale.shape[0], bm), jt.cdiv(weight.scale.shape[1], rows),
    ),
)  # fmt: skip
def grouped_codes(x, weight: Stack, sizes, y, *, kind: str, rows: int, bm: int, out_dtype: str):
    """`bm` rows of a group of x [m, in] and `rows` of its matrix in a program; sizes int32, zero behind the groups."""
    # y_i = W_g x_i     for the rows i of group g; zero behind the groups
    r, groups = jt.program_id(1), weight.scale.shape[0]
    tile = tile_of_rows(sizes, groups, jt.program_id(0), bm, x.shape[0])
    if tile.exists:
        Y = jnp.zeros((bm, rows), jnp.float32)
        if tile.inside:
            W = _tile(of_group(weight, tile.group), kind, r, rows, x.shape[1])
            Y = jt.dot(x[jt.ds(tile.first, bm), :], W.T)
        jt.store(y, (jt.ds(tile.first, bm), jt.ds(r * rows, rows)), Y.astype(y.dtype), mask=tile.mine(bm, rows))


@jt.kernel(
    out_type=lambda g, *_, inner, **__: jax.ShapeDtypeStruct((g.shape[0], inner), jnp.float32),
    grid=lambda g, weight, sizes, *, chunks, bm, **_: (most_tiles(g.shape[0], weight.scale.shape[0], bm), chunks),
)
def grouped_dx(g, weight: Stack, sizes, dx, *, kind: str, inner: int, rows: int, bm: int, chunks: int):
    """dx [m, in] for the cotangents g [m, out]: a chunk of a matrix' columns in a program, `rows` rows at a time."""
    # dX = G W
    c, groups, width = jt.program_id(1), weight.scale.shape[0], inner // chunks
    tile = tile_of_rows(sizes, groups, jt.program_id(0), bm, g.shape[0])
    if tile.exists:
        acc = jt.zeros((bm, width))
        for r in jt.range(jnp.where(tile.inside, jt.cdiv(g.shape[1], rows), 0)):
            W = _tile(of_group(weight, tile.group), kind, r, rows, inner, c, chunks)
            acc = jt.dot(g[jt.ds(tile.first, bm), jt.ds(r * rows, rows)], W, acc)
        jt.store(dx, (jt.ds(tile.first, bm), jt.ds(c * width, width)), acc, mask=tile.mine(bm, width))


# -- implementations ---------------------------------------------------------------------------------------------------


def _rows_of_codes(x, weight: Stack, index, *, activation: str | None, **options):
    weight = in_parts(_plain(weight, options["kind"]), activation)
    rows = quantized.tiles(1, weight.scale.shape[-2], x.shape[1])["rows"]
    return routed_rows(x.astype(jnp.float32), weight, index, activation=activation, rows=rows, **options)


def _tiles_of_codes(x, weight: Stack, sizes, *, kind: str, out_dtype: str):
    (groups, out), m = weight.scale.shape[:2], known(x.shape[0])
    sides = {"rows": quantized.tiles(m, out, x.shape[1])["rows"], "bm": fit(jt.cdiv(m, groups), 64)}
    return grouped_codes(x.astype(jnp.float32), _plain(weight, kind), sizes, kind=kind, out_dtype=out_dtype, **sides)


def _gates_behind(x, weight: Stack, sizes, *, activation: str, out_dtype: str, **options):
    return joined(_many_rows(x, weight, sizes, out_dtype=out_dtype, **options), activation, out_dtype)


_few_rows = Op(
    "few rows with a stack of quantised matrices",
    Implementation("codes in lanes", grouped_lanes.few_rows, None, WARPS),
    Implementation("rows of codes", _rows_of_codes),
)
_many_rows = Op(
    "groups of rows with a stack of quantised matrices",
    Implementation("warpgroups", hopper_groups.products, hopper_groups.misfit, BLOCK_LEVEL, portable=False),
    Implementation("codes in lanes", grouped_lanes.many_rows, None, WARPS),
    Implementation("tiles of codes", _tiles_of_codes),
)


_many_gated_rows = Op(
    "gated products of groups of rows with a stack of quantised matrices",
    Implementation("warpgroups", hopper_groups.products, hopper_groups.misfit, BLOCK_LEVEL, portable=False),
    Implementation("products, then gates", _gates_behind),
)


# -- rules: matrices are frozen ----------------------------------------------------------------------------------------


def _dx(g, weight: Stack, sizes, kind: str, inner: int) -> jax.Array:
    """float32 [m, in] for cotangents g [m, out] of rows in the order of their groups."""
    weight = k_products.in_bytes(weight) if isinstance(weight, SuperBlocks) else weight
    return _gradient_of_rows(g.astype(jnp.float32), weight, sizes, kind=kind, inner=inner)


def _dx_in_lanes(g, weight, sizes, *, kind: str, inner: int):
    del inner
    return grouped_lanes.k_dx(g, weight, sizes, kind)


def _no_super_blocks(g, weight, sizes, **_) -> str | None:
    return None if isinstance(weight, SuperBlocks) else "weights have no super blocks"


def _dx_of_codes(g, weight, sizes, *, kind: str, inner: int):
    if isinstance(weight, SuperBlocks):
        sides = {"rows": fit(g.shape[1], 64), "chunks": k_products.chunks_of(weight)}
    else:
        weight, sides = quantized.in_chunks(weight, kind, inner, known(g.shape[1]))
    each = jt.cdiv(known(g.shape[0]), weight.scale.shape[0])
    return grouped_dx(g, weight, sizes, kind=kind, inner=inner, bm=fit(each, 64), **sides)


_gradient_of_rows = Op(
    "gradient of groups of rows",
    Implementation("codes in lanes", _dx_in_lanes, _no_super_blocks, WARPS),
    Implementation("tiles of codes", _dx_of_codes),
)


def routed_dx(g, weight: Stack, index, kind: str, shape: tuple[int, int]) -> jax.Array:
    """float32 `shape`, that of x, for cotangents g [m, out] of `routed_rows`: the rows are sorted for it."""
    groups, (rows, inner) = weight.scale.shape[0], shape
    index = within(index, groups)
    order = jnp.argsort(index, stable=True)
    sizes = padded(jnp.zeros((groups,), jnp.int32).at[index].add(1, mode="drop"))
    dx = _dx(g[order], weight, sizes, kind, inner)
    return jnp.zeros_like(dx).at[order].set(dx, unique_indices=True).reshape(rows, -1, inner).sum(1)


def _of_index(run, flat):
    """The rule of reverse mode of a kernel `run` for few rows; `flat` brings its operands to the form of
    `routed_rows`."""

    def forward(x, weight, index, *, activation, **meta):
        if activation is None:
            return run(x, weight, index, activation=None, **meta), (x, weight, index, None)
        rows, plain = flat(x, weight, meta["kind"])
        z = _few_rows(rows, plain, index, kind=meta["kind"], activation=None, out_dtype="float32")
        shape = jax.eval_shape(functools.partial(run, activation=activation, **meta), x, weight, index)
        y = gated(jnp.split(z, 2, axis=1), activation)
        return y.reshape(shape.shape).astype(shape.dtype), (x, weight, index, z)

    def backward(residuals, ct, *, kind, activation, **_):
        x, weight, index, z = residuals
        rows, plain = flat(x, weight, kind)
        ct = ct.reshape(ct.shape[0], -1).astype(jnp.float32)
        if z is not None:
            ct = jnp.concatenate(gate_derivative(*jnp.split(z, 2, axis=1), ct, activation), axis=1)
        dx = routed_dx(ct, plain, index, kind, rows.shape)
        return dx.reshape(x.shape).astype(x.dtype), None, None

    return forward, backward


def _of_sizes(run, flat):
    """The rule of reverse mode of a kernel `run` for rows in the order of their groups; `flat`: see `_of_index`."""

    def forward(x, weight, sizes, **meta):
        return run(x, weight, sizes, **meta), (x, weight, sizes)

    def backward(residuals, ct, *, kind, **_):
        x, weight, sizes = residuals
        rows, plain = flat(x, weight, kind)
        return _dx(ct, plain, sizes, kind, rows.shape[1]).reshape(x.shape).astype(x.dtype), None, None

    return forward, backward


def _hopper_forward(x, weight: Weight, sizes, **meta):
    return hopper_groups.hopper_grouped_product(x, weight, sizes, **meta), (x, weight, sizes)


def _hopper_backward(residuals, ct, *, kind, activation, **_):
    x, weight, sizes = residuals
    weight, ct = weight if kind == "q4_1" else weight._replace(minimum=None), ct.astype(jnp.float32)
    if activation is not None:
        z = _many_rows(x, weight, sizes, kind=kind, out_dtype="float32")
        ct = jnp.concatenate(gate_derivative(*jnp.split(z, 2, axis=1), ct, activation), axis=1)
    return _dx(ct, weight, sizes, kind, x.shape[1]).astype(x.dtype), None, None


def _as_it_is(x, weight, kind):
    """x, and the arrays with an axis of two, of gate and up, as those of one matrix with the rows of both."""
    lead, rows = weight.scale.shape[0], weight.scale.ndim - 1
    join = lambda a: None if a is None else a.reshape(lead, -1, *a.shape[rows:])
    return x, type(weight)(*map(join, weight))


routed_rows.defvjp(*_of_index(routed_rows, _as_it_is))
grouped_codes.defvjp(*_of_sizes(grouped_codes, _as_it_is))
hopper_groups.hopper_grouped_product.defvjp(_hopper_forward, _hopper_backward)
for _kernel in (grouped_lanes.routed_lanes, grouped_lanes.k_routed_lanes):
    _kernel.defvjp(*_of_index(_kernel, grouped_lanes.flat))
for _kernel in (grouped_lanes.grouped_code_lanes, grouped_lanes.k_grouped_lanes):
    _kernel.defvjp(*_of_sizes(_kernel, grouped_lanes.flat))
