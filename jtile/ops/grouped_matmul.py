"""Products of groups of rows, each group with its own matrix: a mixture of experts (MegaBlocks, Gale et al. 2022)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import dispatch, gpu_tiles, grouped_quantized, hopper_tiles
from jtile.ops._shapes import check_float, check_int, check_rank, fit, float_dtype, known, machine, sums_in, tuned
from jtile.ops.epilogues import ACTIVATIONS, check_activation
from jtile.ops.hopper_tiles import Form, Product
from jtile.ops.operands import Shaped
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.row_groups import joined, most_tiles, padded, place, tiles_of_groups


def _columns(w, tw: bool, activation: str | None):
    """Columns of the result."""
    n = w.shape[1 if tw else 2]
    return n if activation is None else n // 2


def _out_type(x, w, sizes, *, out_dtype, tw, activation=None, **_):
    return jax.ShapeDtypeStruct((x.shape[0], _columns(w, tw, activation)), out_dtype)


def _grid(x, w, sizes, *, tw, bm, bn, activation=None, **_):
    return most_tiles(x.shape[0], w.shape[0], bm), jt.cdiv(_columns(w, tw, activation), bn)


def _body(
    x, w, sizes, y,
    *, out_dtype, tw: bool, bm: int, bn: int, bk: int, stages: int = 4, band: int = 8, activation: str | None = None,
):  # fmt: skip
    """x [rows, k], w [groups, k, n] (`tw`: [groups, n, k]), sizes int32 [groups or more] -> y [rows, n]; with an
    activation y [rows, n / 2], and the first half of the columns of a matrix are gates of the others.

    Sizes behind those of the groups are 0: their number is a power of two, as tiles have to be on some targets.
    """
    # y_r = x_r W_g, or act(x_r G_g) * (x_r U_g)     for the rows r of group g; zero behind the groups
    rows, k = x.shape
    last, ends, tiles = tiles_of_groups(sizes[...], bm, rows)
    W = w.tiles(None, bn, bk) if tw else w.tiles(None, bk, bn)
    acc = other = jt.zeros((bm, bn), sums_in(x))
    beside = y.shape[1] // bn  # from a tile of gates to that of what they gate
    # Bands are of tiles that there are: programs without a tile come last, so that processors share the others evenly.
    t, j = jt.swizzle(jt.program_id(0), jt.program_id(1), tiles, group=band)
    if jt.program_id(0) * jt.num_programs(1) + jt.program_id(1) < tiles * jt.num_programs(1):
        g, first, end, inside = place(last, ends, w.shape[0], t, bm, rows)
        for p in jt.range(jnp.where(inside, jt.cdiv(k, bk), 0), stages=stages):
            a = x[jt.ds(first, bm), jt.ds(p * bk, bk)]
            acc = jt.dot(a, W[g, j, p].T if tw else W[g, p, j], acc)
            if activation is not None:
                other = jt.dot(a, W[g, beside + j, p].T if tw else W[g, p, beside + j], other)
        out = acc if activation is None else ACTIVATIONS[activation](acc) * other
        mine = (first + jt.arange(bm) < end)[:, None]
        jt.store(y, (jt.ds(first, bm), jt.ds(j * bn, bn)), out.astype(out_dtype), mask=jnp.broadcast_to(mine, (bm, bn)))


# The kernels by `tw`. Their sharding is given, since the order of the tiles hides that columns of y follow those of w.
grouped_rows = {
    tw: jt.kernel(
        out_type=_out_type, grid=_grid, name="grouped_rows", sharding=f"_ _, {'_ n _' if tw else '_ _ n'}, _ -> _ n"
    )(_body)
    for tw in (False, True)
}


def _outer_type(x, dy, sizes, *_, groups, out_dtype, **__):
    return jax.ShapeDtypeStruct((groups, x.shape[1], dy.shape[1]), out_dtype)


def _outer_grid(x, dy, sizes, *_, groups, bm, bn, **__):
    return groups, jt.cdiv(x.shape[1], bm), jt.cdiv(dy.shape[1], bn)


_READS = 96  # rows of a group, up to which a product is bound by reading the matrices
_GATES = 64  # columns of a tile of gates, and of what they gate


class LastRows[T: Shaped](NamedTuple):
    """The rows of each group behind its last whole block, of x [rows, k] and of dy [rows, n]; see `last_rows`."""

    x: T | None = None
    dy: T | None = None


@jt.kernel(out_type=_outer_type, grid=_outer_grid)
def grouped_outer(
    x, dy, sizes, last: LastRows, dw,
    *, groups: int, out_dtype, bm: int, bn: int, bk: int, stages: int = 3, step: int = 0, always: bool = False,
):  # fmt: skip
    """x [rows, k], dy [rows, n], sizes int32 [groups] -> dw [groups, k, n]: the products of each group's rows.

    With `step`, `last` has the rows behind the last whole `bk` of each group, and they are taken `step` at a time,
    without masks. Without, they are masked here; `always`: without asking whether there are any.
    """
    # dW_g = sum over the rows r of group g of x_r^T dy_r     A, B: tiles of last
    g, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    size = sizes[g]
    first = jnp.sum(jnp.where(jt.arange(sizes.shape[0]) < g, sizes[...], 0), dtype=jnp.int32)
    end = jnp.minimum(first + size, x.shape[0])
    count = jnp.maximum(end - first, 0)
    whole = count // bk
    part = lambda r: (x[jt.ds(r, bk), jt.ds(i * bm, bm)], dy[jt.ds(r, bk), jt.ds(j * bn, bn)])
    acc = jt.zeros((bm, bn), sums_in(x))
    for p in jt.range(whole, stages=stages):
        a, b = part(first + p * bk)
        acc = jt.dot(a.T, b, acc)
    rest = first + whole * bk
    if step:
        A, B = last.x.tiles(None, step, bm), last.dy.tiles(None, step, bn)
        for q in jt.range(jt.cdiv(count - whole * bk, step), stages=stages):
            acc = jt.dot(A[g, q, i].T, B[g, q, j], acc)
    elif always or rest < end:
        a, b = part(rest)
        mine = (rest + jt.arange(bk) < end)[:, None]
        # Both are masked, since rows of the next group may hold NaN.
        acc = jt.dot(jnp.where(mine, a, 0).T, jnp.where(mine, b, 0), acc)
    dw.tiles(None, bm, bn)[g, i, j] = acc.astype(out_dtype)


def last_rows(x, sizes, bk: int):
    """The rows of x [rows, n] behind the last whole `bk` of each group, and zeros behind them: [groups, bk, n]."""
    ends = jnp.cumsum(sizes)
    starts = jnp.minimum(ends - sizes, x.shape[0])
    ends = jnp.minimum(ends, x.shape[0])
    at = (ends - (ends - starts) % bk)[:, None] + jnp.arange(bk, dtype=sizes.dtype)[None, :]
    return jnp.where((at < ends[:, None])[..., None], jnp.take(x, at, axis=0, mode="clip"), 0)


def _tiles(rows: int, groups: int, n: int, k: int, itemsize: int) -> dict[str, int]:
    """The tile sizes of a product of groups that have about rows / groups rows each."""
    each = jt.cdiv(known(rows), max(groups, 1))
    if machine().whole:
        return {"bm": fit(each, 64), "bn": fit(n, 256), "bk": fit(k, 256)}
    if each <= _READS and itemsize == 2 and k >= 128:  # lines of 256 bytes
        return {"bm": 64, "bn": min(128, max(16, jt.next_power_of_2(n))), "bk": 128}
    sides = hopper_tiles.candidates(Product(max(each, 65), n, k, itemsize)) if gpu_tiles.warpgroups() else ()
    if not sides:
        return gpu_tiles.product(min(known(rows), max(each, 65)), n, k, itemsize)
    # The last tile of each group counts as half full.
    filled = lambda bm: Product(groups * (each + bm // 2), n, k, itemsize)
    bm, bn = min(sides, key=lambda s: hopper_tiles.predicted_us(filled(s[0]), Form(1, *s)))
    return {"bm": bm, "bn": bn, "bk": 64}


def _rows(x, w, sizes, *, out_dtype: str, tw: bool):
    n, k = (w.shape[1], w.shape[2]) if tw else (w.shape[2], w.shape[1])
    return _with_warps(
        x, w, sizes, out_dtype=out_dtype, tw=tw, **_tiles(x.shape[0], w.shape[0], n, k, x.dtype.itemsize)
    )


def _with_warps(x, w, sizes, *, tw: bool, bm: int, bn: int, **meta):
    kernel = tuned(grouped_rows[tw], **gpu_tiles.product_options(bm, bn, x.dtype.itemsize))
    if bn >= 2 * bm and dispatch.has(jt.target(), "warps"):
        meta = {"band": 16} | meta  # tiles that are worked on together are about square
    return kernel(x, w, sizes, tw=tw, bm=bm, bn=bn, **meta)


def _forward(x, w, sizes, **meta):
    return _with_warps(x, w, sizes, **meta), (x, w, sizes)


def _gates_at_once(x, w, sizes, **options):
    tiles = {"bm": 64, "bn": _GATES, "bk": 128}
    return _with_warps(x, w, sizes, **options, **tiles)


def _not_at_once(x, w, sizes, *, activation: str, tw: bool, **_) -> str | None:
    each, columns = jt.cdiv(known(x.shape[0]), w.shape[0]), _columns(w, tw, activation)
    return dispatch.first_unmet(
        (each <= _READS, f"matrices have {each} rows each, for which reading them is not what takes the time"),
        (x.dtype.itemsize == 2, f"operands are {x.dtype.name}, not 16-bit floats"),
        (x.shape[1] >= 128, f"sums have {x.shape[1]} terms"),
        (columns % _GATES == 0, f"{columns} columns are no multiple of {_GATES}"),
    )


def _gates_apart(x, w, sizes, *, activation: str, out_dtype: str, tw: bool):
    return joined(_rows(x, w, sizes, out_dtype=out_dtype, tw=tw), activation, out_dtype)


# Gated products of rows in the order of their groups.
_gates = dispatch.Op(
    "gated products of groups of rows",
    dispatch.Implementation("one kernel", _gates_at_once, _not_at_once, dispatch.WARPS),
    dispatch.Implementation("products, then gates", _gates_apart),
)


def _gradients(left, right, sizes, groups: int, out_dtype: str):
    """The gradients of the matrices: [groups, n, k] for left [rows, n] and right [rows, k], or the other way round."""
    each = jt.cdiv(known(left.shape[0]), groups)
    tiles = _tiles(left.shape[1], 1, right.shape[1], each, left.dtype.itemsize)
    tiles["bk"] = max(min(tiles["bk"], 64), 16)
    last = LastRows()
    if gpu_tiles.warpgroups():
        sides = known(left.shape[1]), known(right.shape[1])
        if each >= 512 and left.dtype.itemsize == 2 and sides[0] >= 128 and sides[1] >= 256:
            # Masks would take shared memory for every consumer, and time at the end of every tile.
            tiles |= {"bm": 128, "bn": 256, "bk": 64, "step": 16}
            last = LastRows(*(last_rows(r, sizes[:groups], tiles["bk"]) for r in (left, right)))
        else:
            tiles |= {"bm": min(tiles["bm"], 128), "bn": min(tiles["bn"], 128)}
    if dispatch.vector_cores():  # an NPU's compiler cannot move sums of a cube core in and out of a branch
        tiles["always"] = True
    kernel = tuned(grouped_outer, **gpu_tiles.product_options(tiles["bm"], tiles["bn"], left.dtype.itemsize))
    return kernel(left, right, sizes, last, groups=groups, out_dtype=out_dtype, **tiles)


def _backward(residuals, dy, *, tw: bool, out_dtype: str, activation: str | None = None, **_):
    x, w, sizes = residuals
    if activation is not None:
        apart = lambda x, w: joined(_rows(x, w, sizes, out_dtype=sums_in(x).name, tw=tw), activation, out_dtype)
        return *jax.vjp(apart, x, w)[1](dy), None
    dy = dy.astype(x.dtype)
    left, right = (dy, x) if tw else (x, dy)
    dw = _gradients(left, right, sizes, w.shape[0], w.dtype.name)
    return _rows(dy, w, sizes, out_dtype=x.dtype.name, tw=not tw), dw, None


for _kernel in grouped_rows.values():
    _kernel.defvjp(_forward, _backward)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array | QuantizedTensor,
    group_sizes: jax.Array,
    *,
    transpose_w: bool = False,
    activation: str | None = None,
    out_dtype=None,
) -> jax.Array:
    """`y[r] = x[r] @ w[g]` for the rows r of group g; rows stand in the order of their groups.

    The sizes stay on the device: no step waits for them, and one compiled program serves all of them. Differentiable in
    x, and in w where it is float: quantised matrices are frozen. The result is that of `jax.lax.ragged_dot`.

    Args:
      x: float array [rows, k].
      w: [groups, k, n] of x's dtype; [groups, n, k] with `transpose_w`. Or a `QuantizedTensor` [groups, n, k] of any
        kind, with `transpose_w`: a stack, see `QuantizedTensor.stack`. Beside 16-bit x, products of many rows round its
        weights to x's dtype.
      group_sizes: int [groups], none negative; their sum is at most `rows`.
      activation: of a gated layer, "silu", "gelu" (erf), "gelu_tanh" or "relu": the first half of the columns of the
        products are gates g, the others u, and the result is `activation(g) * u`. None: the products as they are.
      out_dtype: dtype of the result; default that of x.

    Returns:
      [rows, n], with an activation [rows, n / 2], summed in float32 (float64 for float64); zero in the rows behind the
      last group.

    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    quantised = isinstance(w, QuantizedTensor)
    x, sizes = map(jnp.asarray, (x, group_sizes))
    w = w if isinstance(w, QuantizedTensor) else jnp.asarray(w)
    check_float("grouped_matmul", x=x, w=None if quantised else w)
    check_int("grouped_matmul", group_sizes=sizes)
    check_rank("grouped_matmul", "x", x, 2, "[rows, k]")
    check_rank("grouped_matmul", "w", w, 3, "[groups, n, k]" if transpose_w or quantised else "[groups, k, n]")
    if quantised and not transpose_w:
        raise KernelValueError("grouped_matmul: quantised matrices are [groups, n, k]; call it with transpose_w=True")
    if not quantised and x.dtype != w.dtype:
        raise jt.errors.KernelTypeError(
            f"grouped_matmul: x and w have one dtype, got {x.dtype.name} and {w.dtype.name}; cast one"
        )
    groups, k, n = w.shape[0], *(w.shape[:0:-1] if transpose_w else w.shape[1:])
    if x.shape[1] != k or sizes.shape != (groups,):
        raise KernelValueError(
            f"grouped_matmul: x {x.shape} and group_sizes {sizes.shape} do not fit {groups} matrices of {k} rows "
            f"and {n} columns: x is [rows, {k}], group_sizes [{groups}]"
        )
    out_dtype = float_dtype("grouped_matmul", out_dtype, x.dtype)
    _check_gates(activation, n)
    if 0 in (groups, k) or math.prod((x.shape[0], n)) == 0:
        return jnp.zeros((x.shape[0], n if activation is None else n // 2), out_dtype)
    if isinstance(w, QuantizedTensor):
        options = {"activation": activation, "out_dtype": out_dtype.name}
        return grouped_quantized.product(x, w, padded(sizes), **options)
    if activation is not None:
        return _gates(x, w, padded(sizes), activation=activation, out_dtype=out_dtype.name, tw=transpose_w)
    return _rows(x, w, padded(sizes), out_dtype=out_dtype.name, tw=transpose_w)


def _check_gates(activation: str | None, n: int) -> None:
    if activation is not None:
        check_activation("grouped_matmul", activation)
        if n % 2:
            raise KernelValueError(
                f"grouped_matmul: with an activation half of the columns of w are gates of the others, got {n}; "
                "expected an even number"
            )


def grouped_matmul_reference(
    x, w, group_sizes, *, transpose_w: bool = False, activation: str | None = None, out_dtype=None
) -> jax.Array:
    """`grouped_matmul` in `jnp`: every row is multiplied with every matrix, and the right product chosen."""
    wide = sums_in(x)
    w = w.dequantize() if isinstance(w, QuantizedTensor) else w
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(x.shape[0])[:, None]
    mine = (rows < ends[None, :]) & (rows >= (ends - group_sizes)[None, :])
    spelling = "rk,gnk,rg->rn" if transpose_w else "rk,gkn,rg->rn"
    y = jnp.einsum(spelling, x.astype(wide), w.astype(wide), mine.astype(wide), precision="highest")
    out_dtype = out_dtype or x.dtype
    return y.astype(out_dtype) if activation is None else joined(y, activation, out_dtype)
