"""Reverse mode of the norms: one pass over the rows, the sums over rows kept a program and added up at the end."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops._shapes import fit, known, machine, rows_per_tile, sums_in, tuned, wide
from jtile.ops.dispatch import VECTOR_CORES, WARPS, Implementation, Op, first_unmet
from jtile.ops.operands import Shaped

_TILES = 32  # tiles of a program where the number of rows is not known
_UNKNOWN = 8192  # rows that a GPU's choices assume where their number is not known
_IN_CORE = 4096  # elements of the longest row whose sums an NPU's vector core has room for
_COLUMNS, _ROWS, _LONGEST = 1024, 4, 32  # sides of a tile of `norm_backward_sums`, and the most tiles of a program


class Cotangents[T: Shaped](NamedTuple):
    """The cotangents of y = norm(s) w + b and, where s = x_1 + ... is a result too, of s."""

    y: T
    s: T | None = None


class Statistics[T: Shaped](NamedTuple):
    """For every row, [rows]: the factor 1 / sqrt(...) of its norm and, for a layer norm, its mean."""

    factor: T
    mean: T | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """What `norm_backward_rows` gives.

    Attributes:
      dx: a cotangent like each term of the sum.
      sums: [chunks, n], the programs' shares of the gradients of w and of b; or of w alone, or none.
      statistics: the `Statistics` of the rows, or None.
    """

    dx: tuple[jax.Array, ...]
    sums: tuple[jax.Array, ...]
    statistics: Statistics | None


def _chunks(xs, weight, cts, *, br, per, **_):
    return jt.cdiv(jt.cdiv(xs[0].shape[0], br), per)


def _types(xs, weight, cts, *, br, per, sums, centre, statistics=False, **_):
    part = jax.ShapeDtypeStruct((_chunks(xs, weight, cts, br=br, per=per), xs[0].shape[1]), sums_in(xs[0]))
    of_row = jax.ShapeDtypeStruct(xs[0].shape[:1], sums_in(xs[0]))
    rows = Statistics(of_row, of_row if centre else None) if statistics else None
    return Gradients(tuple(jt.like(x) for x in xs), (part,) * sums, rows)


def _sums_of_rows(tiles, together: bool):
    """The sums of the rows of each of the tiles [rows, n], as [rows, 1]; `together`: in one reduction, so that warps
    that share rows wait for each other once."""
    if not together:
        return [t.sum(1, keepdims=True) for t in tiles]
    add = lambda a, b: tuple(x + y for x, y in zip(a, b))
    return [total[:, None] for total in jt.reduce(tuple(tiles), 1, add, (0.0,) * len(tiles))]


def _gradient(t, g, w, centre: bool, eps: float, together: bool):
    """For rows t and the cotangents g of their norms: (cotangents of t, normalised rows, factors, means)."""
    # u = t / sqrt(mean(t^2) + eps)     t = x - mean(x) for the layer norm     h = g w
    # dx = (h - mean(h) - u mean(h u)) / sqrt(...)     without mean(h) for the RMS norm
    n = t.shape[1]
    mean = t.sum(1, keepdims=True) * (1.0 / n) if centre else None
    t = t if mean is None else t - mean
    h = g * w.astype(g.dtype) if w is not None else g
    squares, products, *shifts = _sums_of_rows((t * t, h * t, *[h] * centre), together)
    r = jax.lax.rsqrt(squares * (1.0 / n) + eps)
    u = t * r
    gradient = h - u * (products * r * (1.0 / n))
    gradient = gradient - shifts[0] * (1.0 / n) if centre else gradient
    return gradient * r, u, r, mean


def _shifted(w, offset: float):
    return w + offset if offset else w  # adding 0 is an addition: it makes 0 of -0


def _total(terms):
    """The sum of the terms of x, in the dtype that it is computed in."""
    t = wide(terms[0])
    for other in terms[1:]:
        t = t + other.astype(t.dtype)
    return t


@jt.kernel(out_type=_types, grid=_chunks)
def norm_backward_rows(
    xs: tuple, weight, cts: Cotangents, out: Gradients,
    *, br: int, per: int, sums: int, centre: bool, eps: float, offset: float,
    statistics: bool = False, together: bool = False, ahead: bool = False, again: bool = False, apart: bool = False,
    stages: int | None = None,
):  # fmt: skip
    """The gradients of y = norm(x_1 + ...) w + b and s = x_1 + ...; `per` tiles of `br` rows in a program.

    Args:
      xs, weight: the terms of the sum [rows, n]; w [n] or None.
      sums: for how many parameters, w and then b, gradients are added up; statistics: whether to give `Statistics`.
      centre: True for a layer norm, False for an RMS norm.
      together: see `_sums_of_rows`.
      ahead: fetch the next tile into registers while one is worked on; stages: fetch so many into shared memory.
      again: fetch w with every tile, too: registers hold no copy of it.
      apart: a program's tiles lie as many apart as there are programs, not side by side: all programs read one stretch
        of memory at a time, and not places that are a power of two apart.
    """
    # dw = sum g u     db = sum g
    c, n = jt.program_id(0), xs[0].shape[1]
    X, DX = ([ref.tiles(br, n) for ref in refs] for refs in (xs, out.dx))
    CT = [ref.tiles(br, n) for ref in cts if ref is not None]
    first, step = (c, _chunks(xs, weight, cts, br=br, per=per)) if apart else (c * per, 1)
    count = jt.cdiv(X[0].shape[0] - c, step) if apart else jnp.minimum(X[0].shape[0] - first, per)
    place = lambda k: first + k * step
    fetch = lambda i: tuple(view[i, 0] for view in (*X, *CT))
    weights = lambda: None if weight is None else _shifted(wide(weight[...])[None, :], offset)
    held = None if again else weights()
    dw, db = (jnp.zeros((n,), sums_in(xs[0])) for _ in range(2))
    ragged = not isinstance(xs[0].shape[0], int) or xs[0].shape[0] % br
    tiles = fetch(first) if ahead else ()
    for k in jt.range(count, stages=stages):
        i = place(k)
        then = fetch(place(jnp.minimum(k + 1, count - 1))) if ahead else ()
        tiles = tiles if ahead else fetch(i)
        g = wide(tiles[len(xs)])
        gradient, u, *found = _gradient(
            _total(tiles[: len(xs)]), g, weights() if again else held, centre, eps, together
        )
        for ct in tiles[len(xs) + 1 :]:
            gradient = gradient + ct.astype(gradient.dtype)
        for ref, view in zip(out.dx, DX):
            view[i, 0] = gradient.astype(ref.dtype)
        for ref, value in zip(out.statistics or (), found):
            if ref is not None and value is not None:
                ref.tiles(br)[i] = value.reshape(br)
        if ragged:  # with eps = 0 the rows behind the last one are NaN
            u = jnp.where((i * br + jt.arange(br) < xs[0].shape[0])[:, None], u, jnp.zeros((), u.dtype))
        dw = dw + (g * u).sum(0) if sums else dw
        db = db + g.sum(0) if sums > 1 else db
        tiles = then
    for ref, total in zip(out.sums, (dw, db)):
        ref[c, :] = total


@jt.kernel(
    out_type=lambda xs, *_, sums, centre, **__: _types(
        xs, None, None, br=1, per=1, sums=0, centre=centre, statistics=bool(sums)
    ),
    grid=lambda xs, *_, br, **__: jt.cdiv(xs[0].shape[0], br),
)
def norm_backward_blocks(
    xs: tuple, weight, cts: Cotangents, out: Gradients,
    *, br: int, bn: int, sums: int, centre: bool, eps: float, offset: float,
):  # fmt: skip
    """The dx of `norm_backward_rows` for rows that a program has no room for: `br` rows in blocks of `bn` columns,
    which are read twice, or three times (`centre`). With `sums` it gives the statistics that these need."""
    i, n = jt.program_id(0), xs[0].shape[1]
    blocks, ragged = jt.cdiv(n, bn), n % bn
    X, DX = ([ref.tiles(br, bn) for ref in refs] for refs in (xs, out.dx))
    CT = [ref.tiles(br, bn) for ref in cts if ref is not None]
    total = lambda j: _total([view[i, j] for view in X])
    zeros = jnp.zeros((br, 1), sums_in(xs[0]))

    def parts(j, mean):
        """The rows without their mean and the weighted cotangents, of a block."""
        t = total(j)
        if centre:
            t = t - mean
            t = jnp.where((j * bn + jt.arange(bn) < n)[None, :], t, 0) if ragged else t
        h = wide(CT[0][i, j])
        return t, h if weight is None else h * _shifted(wide(weight.tiles(bn)[j])[None, :], offset).astype(h.dtype)

    mean = zeros
    if centre:
        for j in jt.range(blocks):
            mean = mean + total(j).sum(1, keepdims=True)
        mean = mean * (1.0 / n)
    squares, products, shifts = zeros, zeros, zeros
    for j in jt.range(blocks):
        t, h = parts(j, mean)
        squares = squares + (t * t).sum(1, keepdims=True)
        products = products + (h * t).sum(1, keepdims=True)
        shifts = shifts + h.sum(1, keepdims=True) if centre else shifts
    factor = jax.lax.rsqrt(squares * (1.0 / n) + eps)
    products = products * factor * (1.0 / n)
    for j in jt.range(blocks):
        t, h = parts(j, mean)
        gradient = h - t * factor * products
        gradient = (gradient - shifts * (1.0 / n) if centre else gradient) * factor
        for ct in CT[1:]:
            gradient = gradient + ct[i, j].astype(gradient.dtype)
        for ref, view in zip(out.dx, DX):
            view[i, j] = gradient.astype(ref.dtype)
    for ref, value in zip(out.statistics or (), (factor, mean)):
        if ref is not None:
            ref.tiles(br)[i] = value.reshape(br)


def _sum_grid(xs, ct, statistics, *, br, bc, per, **_):
    return jt.cdiv(jt.cdiv(xs[0].shape[0], br), per), jt.cdiv(xs[0].shape[1], bc)


def _sum_types(xs, ct, statistics, *, br, bc, per, sums):
    chunks, _ = _sum_grid(xs, ct, statistics, br=br, bc=bc, per=per)
    return tuple(jax.ShapeDtypeStruct((chunks, xs[0].shape[1]), sums_in(xs[0])) for _ in range(sums))


@jt.kernel(out_type=_sum_types, grid=_sum_grid)
def norm_backward_sums(
    xs, ct, statistics: Statistics, of_weight, of_bias=None, *, br: int, bc: int, per: int, sums: int
):  # fmt: skip
    """The `sums` of `norm_backward_rows` from the statistics that it wrote; `per` tiles [br, bc] in a program."""
    c, j = jt.program_id(0), jt.program_id(1)
    X, CT = [ref.tiles(br, bc) for ref in xs], ct.tiles(br, bc)
    factors, means = statistics.factor.tiles(br), None if statistics.mean is None else statistics.mean.tiles(br)
    dw, db = (jnp.zeros((bc,), sums_in(xs[0])) for _ in range(2))
    for k in jt.range(jnp.minimum(CT.shape[0] - c * per, per), stages=3):
        i = c * per + k
        t, g = _total([view[i, j] for view in X]), wide(CT[i, j])
        t = t if means is None else t - means[i][:, None]
        dw = dw + (g * t * factors[i][:, None]).sum(0)
        db = db + g.sum(0) if sums > 1 else db
    of_weight.tiles(None, bc)[c, j] = dw
    if of_bias is not None:
        of_bias.tiles(None, bc)[c, j] = db


def _in_rows(xs, weight, cts, *, sums: int, **options):
    """The gradients on a CPU, whose programs take rows one after the other."""
    rows = xs[0].shape[0]
    br = rows_per_tile(*xs[0].shape)
    tiles = jt.cdiv(rows, br)
    per = fit(tiles, jt.cdiv(tiles, machine().sums)) if isinstance(tiles, int) else _TILES
    out = norm_backward_rows(xs, weight, cts, br=br, per=per, sums=sums, **options)
    return out.dx, [part.sum(0) for part in out.sums]


def _in_core(xs, weight, cts, *, sums: int, **options):
    """The gradients on an NPU whose vector cores hold a few rows, and the sums beside them."""
    rows, n = _count(xs[0].shape[0]), known(xs[0].shape[1])
    br = fit(rows, max(1, machine().tile // n))
    per = jt.cdiv(jt.cdiv(rows, br), machine().sums)
    out = norm_backward_rows(xs, weight, cts, br=br, per=per, sums=sums, **options)
    return out.dx, [part.sum(0) for part in out.sums]


def _in_blocks(xs, weight, cts, *, sums: int, **options):
    """The gradients on an NPU, for rows that a vector core has no room for."""
    br, bn = fit(_count(xs[0].shape[0]), 8), fit(xs[0].shape[1], machine().tile // 2)
    out = norm_backward_blocks(xs, weight, cts, br=br, bn=bn, sums=sums, **options)
    return out.dx, _apart(xs, cts, out.statistics, sums)


def _not_in_core(xs, *_, **__) -> str | None:
    n = known(xs[0].shape[1])
    return first_unmet((n <= _IN_CORE, f"rows of {n} leave no memory for sums"))


def _held(xs, centre: bool) -> gpu_tiles.Choice | None:
    rows, n = xs[0].shape
    return gpu_tiles.gradients_of_rows(_count(rows), known(n), xs[0].dtype.itemsize, centre)


def _sums_in_registers(xs, weight, cts, *, sums: int, centre: bool, **options):
    how = _held(xs, centre)
    assert how is not None
    kernel = tuned(norm_backward_rows, **how.options)
    out = kernel(xs, weight, cts, sums=sums, centre=centre, **how.tiles, **options)
    return out.dx, [part.sum(0) for part in out.sums]


def _not_in_registers(xs, weight, cts, *, centre: bool, **_) -> str | None:
    return first_unmet((_held(xs, centre) is not None, f"rows of {xs[0].shape[1]} leave no registers for sums"))


def _count(rows) -> int:
    return rows if isinstance(rows, int) else _UNKNOWN


def _sums_apart(xs, weight, cts, *, sums: int, **options):
    """The gradients on a GPU, for rows that leave no registers for sums: another kernel makes these from statistics."""
    rows = _count(xs[0].shape[0])
    warps = min(gpu_tiles.warps_of_rows(2 * known(xs[0].shape[1]), weighted=True), 16)
    per = jt.cdiv(rows, gpu_tiles.processors())
    kernel = tuned(norm_backward_rows, num_warps=warps)
    out = kernel(
        xs, weight, cts, br=1, per=per, sums=0, statistics=bool(sums), again=True, apart=True, stages=3, **options
    )
    return out.dx, _apart(xs, cts, out.statistics, sums)


def _apart(xs, cts, statistics, sums: int) -> list[jax.Array]:
    """The sums, by a kernel of their own, from the statistics of the rows."""
    if not sums:
        return []
    tiles = jt.cdiv(_count(xs[0].shape[0]), _ROWS)
    per = min(jt.next_power_of_2(jt.cdiv(tiles, 32)), _LONGEST)
    kernel = tuned(norm_backward_sums, num_warps=4)
    parts = kernel(xs, cts.y, statistics, br=_ROWS, bc=_COLUMNS, per=per, sums=sums)
    return [part.sum(0) for part in parts]


_op = Op(
    "norm backward",
    Implementation("sums in a vector core", _in_core, _not_in_core, VECTOR_CORES),
    Implementation("rows in blocks", _in_blocks, needs=VECTOR_CORES),
    Implementation("sums in registers", _sums_in_registers, _not_in_registers, WARPS),
    Implementation("sums in a kernel of their own", _sums_apart, needs=WARPS),
    Implementation("rows", _in_rows),
)


def norm_backward(xs, weight, cts: Cotangents, *, sums: int, centre: bool, eps: float, offset: float = 0.0):
    """The cotangents of xs (a tuple), and `sums` of those of weight and bias (float32 [n], float64 for float64)."""
    return _op(xs, weight, cts, sums=sums, centre=centre, eps=eps, offset=offset)
