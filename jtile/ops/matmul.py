"""Matrix product with what usually follows it: y = activation(op(a) op(b) + bias), over any leading batch axes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dispatch, gpu_tiles, hopper_columns, hopper_gemv, hopper_rows, hopper_small, spaces
from jtile.ops._shapes import check_shape, known, programs_at_once, tuned
from jtile.ops.columns import Columns, cut_columns
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, first_unmet, small_tiles
from jtile.ops.epilogues import ACTIVATIONS, activation_derivative, check_activation
from jtile.ops.operands import Epilogue, Weight
from jtile.ops.parts import BLOCK, product_in_parts
from jtile.ops.parts import panels as _panels
from jtile.tune import products


def matmul(
    a,
    b,
    *,
    bias=None,
    activation: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype=None,
) -> jax.Array:
    """`activation(a @ b + bias)`; floats are summed in float32 (float64 in float64), integers in int32.

    Differentiable in a, b and bias; integer products are not.

    Args:
      a: [..., m, k]; [..., k, m] with `transpose_a`.
      b: [..., k, n] or [k, n]; its last two axes swapped with `transpose_b`. Leading axes equal those of `a`, or none.
      bias: None or [n], added before the activation.
      activation: None, "relu", "silu", "gelu" (erf), "gelu_tanh"; floats only.
      out_dtype: dtype of the result; default: the dtype of `a` and `b` for floats, int32 for integers.

    Returns:
      [..., m, n].

    Raises:
      KernelTypeError: dtypes of different kinds.
      KernelValueError: shapes that do not fit, those of bias too, or an unknown activation.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    m, n, k = _sizes(a, b, transpose_a, transpose_b)
    check_activation("matmul", activation)
    _check_kinds(a, b, activation)
    if bias is not None:
        bias = jnp.asarray(bias)
        check_shape("matmul", "bias", bias, (n,))
    batch = a.shape[:-2]
    if b.ndim == 2 and batch and not transpose_a:
        a = a.reshape(1, math.prod(batch) * m, k)  # all rows have one weight: they make a single tall product
    a = a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:])
    b = b.reshape(math.prod(b.shape[:-2]), *b.shape[-2:])
    out_dtype = jnp.dtype(out_dtype or (_promoted(a, b) if jnp.issubdtype(a.dtype, jnp.floating) else jnp.int32))
    bias = None if bias is None else bias.reshape(1, n)
    y = _matmul(a, b, bias, activation=activation, ta=transpose_a, tb=transpose_b, out_dtype=out_dtype.name)
    return y.reshape(*batch, m, n)


def matmul_reference(
    a, b, *, bias=None, activation=None, transpose_a=False, transpose_b=False, out_dtype=None
) -> jax.Array:
    """`matmul` in `jnp`, at the highest precision."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    floating = jnp.issubdtype(a.dtype, jnp.floating)
    out_dtype = out_dtype or (_promoted(a, b) if floating else jnp.int32)
    acc = jnp.float64 if jnp.float64 in (a.dtype, b.dtype) else jnp.float32 if floating else jnp.int32
    a, b = (x.swapaxes(-1, -2) if t else x for x, t in ((a, transpose_a), (b, transpose_b)))
    y = jnp.matmul(a.astype(acc), b.astype(acc), precision="highest")
    y = y if bias is None else y + jnp.asarray(bias).astype(acc).reshape((1,) * (y.ndim - 1) + (-1,))
    return ACTIVATIONS[activation](y).astype(out_dtype)


def _promoted(a, b):
    return a.dtype if a.dtype == b.dtype else jnp.promote_types(a.dtype, b.dtype)


def _sizes(a, b, transpose_a: bool, transpose_b: bool) -> tuple[int, int, int]:
    """(m, n, k), checked."""
    if a.ndim < 2 or b.ndim < 2:
        raise jt.errors.KernelValueError(
            f"matmul takes arrays of two or more axes, got {a.shape} and {b.shape}; add an axis"
        )
    m, k = (a.shape[-1], a.shape[-2]) if transpose_a else a.shape[-2:]
    k2, n = (b.shape[-1], b.shape[-2]) if transpose_b else b.shape[-2:]
    if k != k2 or (b.ndim > 2 and b.shape[:-2] != a.shape[:-2]):
        flags = f" (transpose_a={transpose_a}, transpose_b={transpose_b})" if transpose_a or transpose_b else ""
        raise jt.errors.KernelValueError(
            f"matmul cannot contract {tuple(a.shape)} with {tuple(b.shape)}{flags}: inner sizes {k} and {k2}, "
            "and leading axes must be equal, or absent in b"
        )
    return m, n, k


def _check_kinds(a, b, activation) -> None:
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in (a, b)):
        raise jt.errors.KernelTypeError(
            f"matmul takes float or integer arrays, got {a.dtype} and {b.dtype}: jt.dot takes complex tiles, in a "
            "kernel of your own"
        )
    kinds = {jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b)}
    if len(kinds) == 2 or (activation and kinds != {True}):
        raise jt.errors.KernelTypeError(
            f"matmul takes two float or two integer arrays (and an activation floats only), got {a.dtype} and "
            f"{b.dtype}; cast one"
        )


def tiles(
    m: int, n: int, k: int, itemsize: int, gates: int = 1, transposed: bool = False, parts: bool = False, **of
) -> dict[str, int]:
    """The tile sizes of `gates` products [m, k] [k, n] of elements of `itemsize` bytes, on the target at hand.

    `transposed`: the right operand lies in memory as [n, k]; `parts`: see `in_parts`; `of`: see `gpu_tiles.product`.
    """
    m, n, k = known(m), known(n), known(k)
    if small_tiles():
        return gpu_tiles.product(m, n, k, itemsize, gates, transposed, **of)
    if parts:
        return {**products.in_parts_on_cpu(m, n, programs_at_once()), "bk": 0}
    return {**products.on_cpu(m, n, k, programs_at_once()), "bk": 0}


def _tiles(a, b, ta: bool, tb: bool) -> dict[str, int]:
    """The tile sizes of op(a) op(b), for arrays [batch or 1, rows, columns]."""
    m, n, k = _sides(a, b, ta, tb)
    of = dict(transposed=tb, batch=known(max(a.shape[0], b.shape[0])))
    of |= dict(left=ta, fast=_whole(a), cut=True) if small_tiles() else dict(parts=not ta and in_parts(a, b, m, n, k))
    return tiles(m, n, k, a.dtype.itemsize, **of)


def in_parts(a, b, m: int, n: int, k: int) -> bool:
    """Whether float32 rows [m, k] of `a` meet a bfloat16 matrix in tile registers, on CPUs that have such: as sums of
    three bfloat16 numbers each."""
    matrices = {shape[3] for shape in jt.target().matrix_shapes if shape[0] > 1}
    fits = known(m) >= 12 and known(n) > 0 and known(n) % 16 == 0 and known(k) % 32 == 0
    return (a.dtype, b.dtype) == (jnp.float32, jnp.bfloat16) and fits and "bfloat16" in matrices


def _whole(a) -> bool:
    """Whether an array holds integers, whose sums are exact."""
    return not jnp.issubdtype(a.dtype, jnp.floating)


def _sums(a, b):
    """The dtype of the sums."""
    if _whole(a):
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float64 if jnp.float64 in (a.dtype, b.dtype) else jnp.float32)


def _out_type(a, b, *_, ta, tb, out_dtype, save, **__):
    m, n, _ = _sides(a, b, ta, tb)
    y, z = (jax.ShapeDtypeStruct((max(a.shape[0], b.shape[0]), m, n), jnp.dtype(d)) for d in (out_dtype, _sums(a, b)))
    return (y, z) if save else y


def _grid(a, b, *_, ta, tb, bm, bn, **__):
    m, n, _ = _sides(a, b, ta, tb)
    return max(a.shape[0], b.shape[0]), jt.cdiv(m, bm), jt.cdiv(n, bn)


def _sides(a, b, ta: bool, tb: bool) -> tuple[Any, Any, Any]:
    """m, n and k of op(a) op(b), arrays [batch or 1, rows, columns]."""
    return a.shape[2 if ta else 1], b.shape[1 if tb else 2], a.shape[1 if ta else 2]


def _tile(a, b, bias, y, sums=None, *, activation, ta, tb, out_dtype, bm, bn, bk=0, stages=3, save=False, cut=False):
    # y_ij = act(s_ij)     s_ij = sum_p A_ip B_pj + bias_j, an output too with `save`; `bk` terms at a time, all for 0
    e, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    of_a, of_b = (e if x.shape[0] != 1 else 0 for x in (a, b))
    k = a.shape[1 if ta else 2]
    whole = isinstance(k, int) and (bk == 0 or bk >= k)
    bk = k if whole else bk or BLOCK
    columns = cut_columns(y.shape[2], bn, j) if cut else [Columns(bn, j)]
    panels = [_panels(a, b, (of_a, i), (of_b, c.at), ta, tb, bm, c.width, bk) for c in columns]
    A, B = panels[0][0], [right for _, right in panels]
    totals = [jnp.zeros((bm, c.width), _sums(a, b)) for c in columns]
    if whole:
        totals = [jt.dot(A(0), B_c(0)) for B_c in B]
    else:
        for p in jt.range(jt.cdiv(k, bk), stages=stages):
            A_p = A(p)
            totals = [jt.dot(A_p, B_c(p), total) for B_c, total in zip(B, totals)]
    for c, total in zip(columns, totals):
        if bias is not None:
            total = total + bias.tiles(None, c.width)[0, c.at][None, :].astype(total.dtype)
        if sums is not None:
            c.store(sums, (e, i), total)
        c.store(y, (e, i), ACTIVATIONS[activation](total).astype(out_dtype))


_untuned = jt.kernel(out_type=_out_type, grid=_grid, name="matmul")(_tile)
_kernel = _untuned.autotune(space=spaces.products, key=spaces.PRODUCT, override=True)


def _whole_sums(a, b, bias, *, ta: bool, tb: bool, bm: int, bn: int, bk: int, **meta):
    """Run the kernel with these tiles."""
    kernel = _kernel
    if dispatch.has(jt.target(), "warps"):
        few = gpu_tiles.few_rows(bm, bn, bk, a.dtype.itemsize)
        of = dict(transposed=tb, left=ta, batch=known(max(a.shape[0], b.shape[0])))
        shared = gpu_tiles.neighbours(*_sides(a, b, ta, tb), a.dtype.itemsize, bm, bn, **of)
        kernel = tuned(kernel, **gpu_tiles.product_options(bm, bn, a.dtype.itemsize) | few.options | shared)
        meta |= few.tiles | _cut(bn)
    return kernel(a, b, bias, ta=ta, tb=tb, bm=bm, bn=bn, bk=bk, **meta)


def _sums_in_parts(a, b, bias, *, ta: bool, tb: bool, bm: int, bn: int, bk: int, **meta):
    """The product, where several programs make parts of the sums of a tile; the parts have tiles of their own."""
    parts, sides = _parts(a, b, ta, tb)
    return product_in_parts(a, b, bias, parts=parts, ta=ta, tb=tb, **sides, **meta)


def _not_in_parts(a, b, bias, *, ta: bool, tb: bool, **_) -> str | None:
    return None if _parts(a, b, ta, tb)[0] > 1 else "whole sums fill the target"


def _in_columns(a, b, bias, *, tb: bool, out_dtype: str, **_):
    """The product, in tiles whose columns are no power of two."""
    return hopper_columns.product(a, b, bias, tb=tb, out_dtype=out_dtype)


def _not_in_columns(a, b, bias, *, ta: bool, tb: bool, activation, save: bool, out_dtype: str, **_) -> str | None:
    return hopper_columns.misfit(a, b, ta=ta, tb=tb, activation=activation, save=save, out_dtype=out_dtype)


def _in_one_round(a, b, bias, *, ta: bool, tb: bool, **_):
    """The product, whose tiles are one round."""
    return hopper_small.product(a, b, bias, ta=ta, tb=tb)


def _not_in_one_round(a, b, bias, *, ta: bool, tb: bool, activation, save: bool, out_dtype: str, **_) -> str | None:
    return hopper_small.misfit(a, b, ta=ta, tb=tb, activation=activation, save=save, out_dtype=out_dtype)


_product = Op(
    "product of matrices",
    Implementation("one round of tiles", _in_one_round, _not_in_one_round, BLOCK_LEVEL, portable=False),
    Implementation("tiles of any columns", _in_columns, _not_in_columns, BLOCK_LEVEL, portable=False),
    Implementation("sums in parts", _sums_in_parts, _not_in_parts, needs=("warps",)),
    Implementation("whole sums", _whole_sums),
)


def _run(a, b, bias=None, *, ta: bool, tb: bool, save: bool = False, **meta):
    """`activation(op(a) op(b) + bias)`, and with `save` also the sums that the activation is applied to."""
    return _product(a, b, bias, ta=ta, tb=tb, save=save, **meta, **_tiles(a, b, ta, tb))


def _extended(a, b, bias, *, ta: bool, tb: bool, **meta):
    """The product, bias and activation. Rows that no tensor map takes are first copied, with zeros behind them, where
    that costs less than it saves."""
    sizes = _sides(a, b, ta, tb)
    m, n, k = wide = sizes
    if a.dtype == b.dtype and all(isinstance(x, int) for x in (*a.shape, *sizes)):
        of = dict(left=ta, transposed=tb, batch=max(a.shape[0], b.shape[0]), fast=_whole(a), cut=True)
        m, n, k = wide = gpu_tiles.extended(*sizes, a.dtype.itemsize, **of)
    if wide != sizes:
        behind = lambda x, *shape: jnp.pad(x, [(0, 0), *((0, s - have) for s, have in zip(shape, x.shape[1:]))])
        a, b = behind(a, *((k, m) if ta else (m, k))), behind(b, *((n, k) if tb else (k, n)))
        bias = None if bias is None else jnp.pad(bias, [(0, 0), (0, n - bias.shape[1])])
    y = _run(a, b, bias, ta=ta, tb=tb, **meta)
    return y if wide == sizes else y[:, : sizes[0], : sizes[1]]


def _streamed(a, b, bias, *, activation, ta: bool, tb: bool, out_dtype: str):
    """The product of one or two rows a [1, m, k] with b [1, n, k], which is read once."""
    kind, epilogue = a.dtype.name, Epilogue(bias)
    return hopper_gemv.product(a[0], (Weight(b[0]),), epilogue, kind=kind, activation=activation, out_dtype=out_dtype)[
        None
    ]


def _one_product(a, b, ta: bool, tb: bool) -> str | None:
    return first_unmet(
        (tb and not ta, "the right operand does not lie in memory as [n, k], or the left one as [k, m]"),
        (a.shape[0] == b.shape[0] == 1, "there are several products"),
    )


def _not_streamed(a, b, bias, *, ta: bool, tb: bool, **_) -> str | None:
    layout = _one_product(a, b, ta, tb) or first_unmet(
        (
            a.shape[1] != 1 or known(a.shape[2]) < products.LONG or gpu_tiles.overlaps(),
            f"one row of {a.shape[2]} is quicker in tiles of few rows",
        ),
    )
    row, matrix = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (a, b))
    return layout or hopper_gemv.misfit(row, Weight(matrix), a.dtype.name)


def _few_rows(a, b, bias, *, activation, ta: bool, tb: bool, out_dtype: str):
    """The product of few rows a [1, m, k], more than two, with b [1, n, k], which is read once."""
    del ta, tb
    return hopper_rows.product(a[0], (b[0],), bias, activation=activation, out_dtype=out_dtype)[None]


def _not_few_rows(a, b, bias, *, ta: bool, tb: bool, **_) -> str | None:
    rows, matrix = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (a, b))
    return _one_product(a, b, ta, tb) or hopper_rows.misfit(rows, (matrix,))


# What `matmul` computes of a [e, m, k], b [e, k, n], bias [1, n] or None.
_matmul = Op(
    "matmul",
    Implementation("rows against a stream of the matrix", _streamed, _not_streamed, BLOCK_LEVEL, portable=False),
    Implementation("few rows against it, by tensor cores", _few_rows, _not_few_rows, BLOCK_LEVEL, portable=False),
    Implementation("tiles", _extended),
)


def in_tiles(
    a, b, *, transpose_a: bool = False, transpose_b: bool = False, out_dtype=None, parts: int = 1, **given: int
):
    """`op(a) op(b)` of [e, m, k] and [e, k, n] with tiles that are given, not chosen: to measure choices.

    Args:
      parts: the number of parts in which the sums are made.
      given: `bm`, `bn`, `bk` and other meta-parameters of the kernel, and options of the compiler such as `num_warps`.
    """
    options = dict(activation=None, ta=transpose_a, tb=transpose_b, out_dtype=jnp.dtype(out_dtype or a.dtype).name)
    if parts > 1:
        return product_in_parts(a, b, parts=parts, save=False, **options, **given)
    warps = {k: given.pop(k) for k in ("num_warps",) if k in given}
    kernel = _untuned.with_options(**warps) if warps else _untuned
    return kernel(a, b, None, save=False, **options, **given, **_cut(given["bn"]))


def _cut(bn: int) -> dict[str, bool]:
    """Whether the columns of a tile are cut in powers of two: on GPUs, where threads hold no others."""
    return {"cut": True} if dispatch.has(jt.target(), "warps") and bn & (bn - 1) else {}


def _parts(a, b, ta: bool, tb: bool) -> tuple[int, dict[str, int]]:
    """The number of parts in which a product of two matrices is summed on a GPU (1: not split), and the tiles."""
    sizes = _sides(a, b, ta, tb)
    matrices = all(x.shape[0] == 1 and jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b))
    if not matrices or not all(isinstance(n, int) for n in sizes):
        return 1, {}
    return gpu_tiles.parts_of_product(*sizes, max(a.dtype.itemsize, b.dtype.itemsize), transposed=tb, left=ta, cut=True)


def product(a, b, out_dtype, *, ta: bool = False, tb: bool = False):
    """`op(a) op(b)` of arrays [batch or 1, rows, columns], without checks; `ta`, `tb`: op transposes."""
    return _run(a, b, activation=None, ta=ta, tb=tb, out_dtype=jnp.dtype(out_dtype).name)


def cotangents(a, b, g, *, ta: bool, tb: bool):
    """The cotangents of a and b for g [batch, m, n], that of `product(a, b)`: products too; no transpose is copied."""
    # dA = G B^T     dB = A^T G     for op(a) = a^T the transposes of these
    da = product(b, g, a.dtype, ta=tb, tb=True) if ta else product(g, b, a.dtype, tb=not tb)
    wide = _sums(a, b) if b.shape[0] < g.shape[0] else b.dtype  # a shared b: sum first, then round
    db = product(g, a, wide, ta=True, tb=ta) if tb else product(a, g, wide, ta=not ta)
    return da, db if db.shape == b.shape else db.sum(0, keepdims=True).astype(b.dtype)


def _forward(a, b, bias, *, activation, save, **meta):
    if activation is None and not save:
        return _product(a, b, bias, activation=None, save=False, **meta), (a, b, bias, None)
    y, sums = _product(a, b, bias, activation=activation, save=True, **meta)
    return (y, sums) if save else y, (a, b, bias, sums)


def _backward(residuals, ct, *, activation, ta, tb, save, **_):
    a, b, bias, sums = residuals
    g = ct[0] if save else ct
    g = g if activation is None else activation_derivative(sums, g, activation)
    g = g + ct[1].astype(g.dtype) if save else g
    dbias = None if bias is None else g.astype(_sums(a, b)).sum((0, 1))[None, :].astype(bias.dtype)
    return *cotangents(a, b, g, ta=ta, tb=tb), dbias


_kernel.defvjp(_forward, _backward)
