"""Products with weights of which two of every four along a row are zero (2:4, semi-structured sparsity).

A weight [n, k] is kept as the two numbers of each group of four and their places: 9/16 of the bytes of a dense one in
16 bits, 17/32 in 32. With k = 4 G the groups stand in two halves h, group p of a half beside its like:

    values[j, 2 h + e, p]   number e, of places that ascend, of group (h, p) of row j
    codes[j, p]             places of both: bits 4 h + 2 e and on have that of number e of group (h, p)

so that no number moves along a row on its way to the product: with x in the same order, x_(h, c)[p] for place c,

    y_ij = sum_(h, c) sum_p x_(h, c)[i, p] W_(h, c)[j, p]       W_(h, c) = sum_e values_(h, e) where place_(h, e) = c

which is eight products of matrices that comparisons make, in registers. Programs read the small form and multiply as if
it were dense. Products of many rows on GPUs are those with a dense weight, which a kernel makes.

This order of the numbers is called "halves". The other one, "pairs", is that of the dense weight, and what instructions
for sparse matrices take (`jtile.ops.hopper_pairs`, on Hopper); elsewhere it is brought into halves first:

    values[j, 2 g + e]      number e of group g
    codes[j, p]             places of the numbers 4 p, 4 p + 1, ... of row j, two bits each, the first in the lowest
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles, hopper_pairs, hopper_sparse24
from jtile.ops._shapes import check_float, check_rank, check_shape, fit, float_dtype, known, machine, sums_in, tuned
from jtile.ops.dispatch import BLOCK_LEVEL, WARPS, Implementation, Op, first_unmet, has
from jtile.ops.matmul import matmul

HALVES, PLACES, KEPT = 2, 4, 2
UNIT = HALVES * PLACES  # numbers of a row that share a byte of codes
ORDERS = ("halves", "pairs")
DENSE = 512  # rows of x from which on a GPU makes a dense weight, and multiplies with that


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse24Tensor:
    """A weight [n, k] with two of four numbers, made by `sparse24`. It is a pytree, and passes through `jax.jit`,
    `jax.grad` (by its values) and checkpoints.

    Attributes:
      values: float [n, 4, k / 8] in halves, [n, k / 2] in pairs, the numbers that are kept.
      codes: uint8 [n, k / 8], their places.
      order: "halves" or "pairs"; the docstring of the module `jtile.ops.two_of_four` says which number stands where.
    """

    values: jax.Array
    codes: jax.Array
    order: str = dataclasses.field(default="halves", metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the dense weight."""
        return self.codes.shape[0], self.codes.shape[1] * UNIT

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.values.nbytes + self.codes.nbytes

    def dense(self) -> jax.Array:
        """The weight with its zeros.

        Returns:
          An array [n, k].
        """
        kept = self.ordered("halves")
        parts = [_dense(kept.values[:, 2 * h : 2 * h + 2], kept.codes, h) for h in range(HALVES)]
        return jnp.stack(parts, 1).reshape(self.shape)

    def ordered(self, order: str) -> Sparse24Tensor:
        """The same weight in another order.

        Args:
          order: "halves" or "pairs".
        Returns:
          A `Sparse24Tensor`; this one where it has the order.
        Raises:
          KernelValueError: another order, values that do not stand in that of the weight.
        """
        for one in (order, self.order):
            if one not in ORDERS:
                raise KernelValueError(f"the numbers of a 2:4 weight stand in {' or '.join(ORDERS)}, got {one!r}")
        (n, width), nibble = self.codes.shape, np.uint8(4)
        name = f"the values of a weight [{n}, {width * UNIT}] in {self.order}"
        check_shape("Sparse24Tensor", name, self.values, _values(n, width * UNIT, self.order))
        if order == self.order:
            return self
        if order == "halves":
            values = self.values.reshape(n, HALVES, width, KEPT).swapaxes(2, 3).reshape(n, HALVES * KEPT, width)
            # in two steps, which join and part axes: a reshape that does both is refused where rows are shared out
            groups = jnp.stack([self.codes & np.uint8(15), self.codes >> nibble], 2).reshape(n, HALVES * width)
            groups = groups.reshape(n, HALVES, width)
            return Sparse24Tensor(values, groups[:, 0] | groups[:, 1] << nibble)
        values = self.values.reshape(n, HALVES, KEPT, width).swapaxes(2, 3).reshape(n, HALVES * width * KEPT)
        groups = jnp.stack([self.codes & np.uint8(15), self.codes >> nibble], 1).reshape(n, HALVES * width)
        groups = groups.reshape(n, width, 2)
        return Sparse24Tensor(values, groups[:, :, 0] | groups[:, :, 1] << nibble, order)


def _dense(values, codes, h: int):
    """values [n, 2, p] of half h -> [n, p, 4]."""
    at = jnp.arange(PLACES, dtype=jnp.uint8)[None, None, :]
    first, second = (_place(codes, h, e)[..., None] for e in range(KEPT))
    rest = jnp.where(second == at, values[:, 1, :, None], jnp.zeros((), values.dtype))
    return jnp.where(first == at, values[:, 0, :, None], rest)


def _place(codes, h: int, e: int):
    return (codes >> np.uint8(4 * h + 2 * e)) & np.uint8(3)


def sparse24(weight: jax.Array, mask: jax.Array | None = None, *, order: str | None = None) -> Sparse24Tensor:
    """The weight [n, k] with the two numbers of every four along a row that are largest in magnitude, the first
    ones where several are equal. NaN counts as infinite.

    Args:
      weight: float array [n, k], k a multiple of 8.
      mask: None, or bool [n, k]: numbers where it is False count as zero. With a mask, too,
        the largest two of a group are kept.
      order: how the numbers stand, "halves" or "pairs", see `Sparse24Tensor`; None: pairs where the target at hand
        multiplies them as they are (Hopper, 16-bit floats, n a multiple of 64 and k of 128; on a host with several
        devices only inside of `jax.shard_map`), else halves. Products take both everywhere, but pairs that are not read
        as they are have to be turned round in each of them.
    Returns:
      A `Sparse24Tensor` of weight's dtype. Derivatives go to the numbers that are kept.
    Raises:
      KernelTypeError: weight is no float array, mask not bool. KernelValueError: shapes that do not fit, another order.
    """
    op = "sparse24"
    check_float(op, weight=weight)
    check_rank(op, "weight", weight, 2, "[n, k]")
    n, k = weight.shape
    if k % UNIT:
        raise KernelValueError(f"{op}: a row of a weight has a multiple of {UNIT} numbers, got {k}")
    if mask is not None:
        check_shape(op, "mask", mask, weight.shape)
        if mask.dtype != jnp.bool_:
            raise KernelTypeError(f"{op}: mask is a bool array, got {mask.dtype.name}")
        weight = jnp.where(mask, weight, jnp.zeros((), weight.dtype))
    groups = weight.reshape(n, HALVES, k // UNIT, PLACES)
    size = jnp.abs(jax.lax.stop_gradient(groups).astype(sums_in(weight)))
    size = jnp.where(jnp.isnan(size), jnp.inf, size)  # what is wrong with a weight is not to vanish
    places = jnp.sort(jnp.argsort(-size, -1, stable=True)[..., :KEPT], -1)
    values = jnp.take_along_axis(groups, places, -1).swapaxes(2, 3).reshape(n, HALVES * KEPT, k // UNIT)
    weights = np.int32(4) ** np.arange(HALVES * KEPT, dtype=np.int32)
    codes = (places.swapaxes(2, 3).reshape(values.shape).astype(jnp.int32) * weights[None, :, None]).sum(1)
    kept = Sparse24Tensor(values, codes.astype(jnp.uint8))
    return kept.ordered(order or ("pairs" if _takes_pairs(n, k, weight.dtype) else "halves"))


def _takes_pairs(n: int, k: int, dtype) -> bool:
    """Whether the target at hand multiplies a weight in pairs as it is, as no product does that may be shared out."""
    here = has(jt.target(), *BLOCK_LEVEL) and gpu_tiles.on_one_device()
    return here and hopper_pairs.misfit_of_weight(n, k, dtype) is None


def _values(n: int, k: int, order: str) -> tuple[int, ...]:
    """The shape of the values of a weight [n, k]."""
    return (n, HALVES * KEPT, k // UNIT) if order == "halves" else (n, k // PLACES * KEPT)


# -- kernels: x [m, 8, p], g and y [m, n]; row 4 h + c of x holds the numbers in place c of half h -------------------


def _number(kept, code, h: int, c: int):
    """A tile of W_(h, c): the kept numbers of half h whose place is c, zero elsewhere."""
    first, second = (_place(code, h, e) == c for e in range(KEPT))
    return jnp.where(first, kept[0], jnp.where(second, kept[1], jnp.zeros((), kept[0].dtype)))


@jt.kernel(
    out_type=lambda x, values, codes, *, parts, **_: jax.ShapeDtypeStruct(
        (parts, x.shape[0], codes.shape[0]), sums_in(x)),
    grid=lambda x, values, codes, *, parts, bm, bn, **_: (
        parts, jt.cdiv(codes.shape[0], bn), jt.cdiv(x.shape[0], bm)),
)  # fmt: skip
def sparse24_tiles(x, values, codes, y, *, parts: int, bm: int, bn: int, bp: int):
    """Parts of the sums of the product, y [parts, m, n], which are to be added up."""
    # Y^T = sum_(h, c) W_(h, c) X_(h, c)^T: the matrix that is made in registers stands on the left
    # V, C: tiles of values and codes; s: part of the sums; h: half, c: place, e: number that is kept
    s, j, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    X, V, C = x.tiles(bm, None, bp), values.tiles(bn, None, bp), codes.tiles(bn, bp)
    count, total = jt.cdiv(C.shape[1], parts), jt.zeros((bn, bm), y.dtype)
    for p in jt.range(s * count, (s + 1) * count):
        code = C[j, p]
        for h in range(HALVES):
            kept = [V[j, KEPT * h + e, p].astype(x.dtype) for e in range(KEPT)]
            for c in range(PLACES):
                total = jt.dot(_number(kept, code, h, c), X[i, PLACES * h + c, p].T, total)
    y.tiles(None, bm, bn)[s, i, j] = total.T


@jt.kernel(
    out_type=lambda x, values, codes, **_: jax.ShapeDtypeStruct((1, x.shape[0], codes.shape[0]), sums_in(x)),
    grid=lambda x, values, codes, *, bn, **_: (jt.cdiv(codes.shape[0], bn), x.shape[0]),
)
def sparse24_rows(x, values, codes, y, *, bn: int):
    """The product for one or two rows: each number of the weight finds the one that it is multiplied with."""
    # y_j = sum_(h, e, p) values_(h, e)[j, p] x_(h, place_(h, e)[j, p])[p]
    j, i = jt.program_id(0), jt.program_id(1)
    width = codes.shape[1]
    code, total = codes.tiles(bn, width)[j, 0], jt.zeros((bn, width), y.dtype)
    for h in range(HALVES):
        of = [x[i, PLACES * h + c, :].astype(y.dtype)[None, :] for c in range(PLACES)]
        for e in range(KEPT):
            low, high = ((code & np.uint8(1 << 4 * h + 2 * e + bit)) != 0 for bit in range(2))
            met = jnp.where(high, jnp.where(low, of[3], of[2]), jnp.where(low, of[1], of[0]))
            total = total + values.tiles(bn, None, width)[j, KEPT * h + e, 0].astype(y.dtype) * met
    y.tiles(None, None, bn)[0, i, j] = total.sum(1)


@jt.kernel(
    out_type=lambda g, values, codes, **_: jt.like(g, shape=(g.shape[0], UNIT, codes.shape[1])),
    grid=lambda g, values, codes, *, bm, bp, **_: (jt.cdiv(g.shape[0], bm), jt.cdiv(codes.shape[1], bp), HALVES),
)
def sparse24_dx(g, values, codes, x, *, bm: int, bn: int, bp: int):
    """The cotangent of x for that of y."""
    # X_(h, c) = G W_(h, c)
    i, p, h = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    G, V, C = g.tiles(bm, bn), values.tiles(bn, None, bp), codes.tiles(bn, bp)
    sums = tuple(jt.zeros((bm, bp), sums_in(g)) for _ in range(PLACES))
    for j in jt.range(G.shape[1]):
        rows, code = G[i, j], C[j, p] >> (4 * h).astype(jnp.uint8)
        kept = [V[j, KEPT * h + e, p].astype(g.dtype) for e in range(KEPT)]
        sums = tuple(jt.dot(rows, _number(kept, code, 0, c), sums[c]) for c in range(PLACES))
    for c in range(PLACES):
        x.tiles(bm, None, bp)[i, PLACES * h + c, p] = sums[c].astype(x.dtype)


@jt.kernel(
    out_type=lambda g, x, codes, **_: jt.like(g, shape=(codes.shape[0], HALVES * KEPT, codes.shape[1])),
    grid=lambda g, x, codes, *, bn, bp, **_: (jt.cdiv(codes.shape[0], bn), jt.cdiv(codes.shape[1], bp), HALVES),
)
def sparse24_dvalues(g, x, codes, values, *, bm: int, bn: int, bp: int):
    """The cotangent of the values: the kept numbers of that of the dense weight, which is never in memory."""
    # S_c = G^T X_(h, c)     values_(h, e) = S_c where place_(h, e) = c
    j, p, h = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    G, X = g.tiles(bm, bn), x.tiles(bm, None, bp)
    sums = tuple(jt.zeros((bn, bp), sums_in(g)) for _ in range(PLACES))
    for i in jt.range(G.shape[0]):
        rows = G[i, j].T
        sums = tuple(jt.dot(rows, X[i, PLACES * h + c, p], sums[c]) for c in range(PLACES))
    code = codes.tiles(bn, bp)[j, p] >> (4 * h).astype(jnp.uint8)
    for e in range(KEPT):
        place = _place(code, 0, e)
        near, far = (jnp.where(place % np.uint8(2) == 1, sums[c + 1], sums[c]) for c in (0, 2))
        values.tiles(bn, None, bp)[j, KEPT * h + e, p] = jnp.where(place >= 2, far, near).astype(values.dtype)


@jt.kernel(
    out_type=lambda values, codes, **_: jt.like(values, shape=(codes.shape[0], UNIT * codes.shape[1])),
    grid=lambda values, codes, *, bn, bp: (jt.cdiv(codes.shape[0], bn), HALVES, jt.cdiv(codes.shape[1], bp)),
)
def sparse24_dense(values, codes, dense, *, bn: int, bp: int):
    """The weight with its zeros; p divides into blocks of `bp`."""
    j, h, p = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    code = codes.tiles(bn, bp)[j, p] >> (4 * h).astype(jnp.uint8)
    kept = [values.tiles(bn, None, bp)[j, KEPT * h + e, p] for e in range(KEPT)]
    numbers = jnp.stack([_number(kept, code, 0, c) for c in range(PLACES)], -1)
    dense.tiles(bn, PLACES * bp)[j, h * (codes.shape[1] // bp) + p] = numbers.reshape(bn, PLACES * bp)


# -- rules: all three are linear in both of their arrays, and each is the other two's derivative ----------------------


def _y_of_rows(x, values, codes):
    n, width = codes.shape
    return sparse24_rows(x, values, codes, bn=fit(n, max(1, 8192 // width)))[0]


def _not_of_rows(x, *_) -> str | None:
    return first_unmet(
        (machine().whole, "a program would have few threads"), (known(x.shape[0]) <= 2, f"there are {x.shape[0]} rows")
    )


def _y_of_tiles(x, values, codes):
    m, (n, width) = known(x.shape[0]), codes.shape
    if machine().whole:
        # a tile of more rows of the weight packs x less often; but every core wants several
        bm = fit(m, 256)
        bn = fit(n, 256 if jt.cdiv(m, bm) * jt.cdiv(n, 256) >= machine().programs else 128)
        return sparse24_tiles(x, values, codes, parts=1, bm=bm, bn=bn, bp=fit(width, 512))[0]
    bm, bn, bp = max(16, fit(m, 128)), 64 if m <= 128 else 128, max(16, fit(width, 64 // x.dtype.itemsize))
    tiles, steps = jt.cdiv(n, bn) * jt.cdiv(m, bm), jt.cdiv(width, bp)
    parts = max(1, min(machine().sums // tiles, steps // 4))
    return sparse24_tiles(x, values, codes, parts=parts, bm=bm, bn=bn, bp=bp).sum(0)


# The product of x, whose numbers stand as those of the weight do.
_y = Op(
    "product with the places of a 2:4 weight",
    Implementation("rows", _y_of_rows, _not_of_rows),
    Implementation("tiles", _y_of_tiles),
)


def _sides(m: int, n: int, width: int, dtype, whole: int = 128) -> dict[str, int]:
    if machine().whole:
        return {"bm": fit(m, 256), "bn": fit(n, 64), "bp": fit(width, whole)}
    return {"bm": max(16, fit(m, 64)), "bn": max(16, fit(n, 64)), "bp": max(16, fit(width, 128 // dtype.itemsize))}


def _dx(g, values, codes):
    return sparse24_dx(g, values, codes, **_sides(g.shape[0], *codes.shape, g.dtype))


def _dvalues(g, x, codes):
    return sparse24_dvalues(g.astype(x.dtype), x, codes, **_sides(g.shape[0], *codes.shape, x.dtype, 256))


def _of_y(residuals, ct, **_):
    x, values, codes = residuals
    g = ct[0].astype(x.dtype)  # the parts are added up at once, so that they all have one cotangent
    return _dx(g, values, codes), _dvalues(g, x, codes).astype(values.dtype), None


def _of_dx(residuals, ct, **_):
    g, values, codes = residuals
    return _y(ct, values, codes).astype(g.dtype), _dvalues(g, ct, codes).astype(values.dtype), None


def _of_dvalues(residuals, ct, **_):
    g, x, codes = residuals
    return _y(x, ct, codes).astype(g.dtype), _dx(g, ct, codes).astype(x.dtype), None


for _kernel, _rule in (
    (sparse24_tiles, _of_y), (sparse24_rows, _of_y), (sparse24_dx, _of_dx), (sparse24_dvalues, _of_dvalues),
):  # fmt: skip
    _kernel.defvjp(functools.partial(lambda kernel, *args, **meta: (kernel(*args, **meta), args), _kernel), _rule)


@functools.partial(jax.jit, static_argnames=("out_dtype",), inline=True)
def sparse24_matmul(x: jax.Array, weight: Sparse24Tensor, *, out_dtype=None) -> jax.Array:
    """`x @ weight.dense().T`, summed in float32 (float64 for float64), from the weight as it is in memory.

    A product that is bound by reading the weight takes 9/16 of the time of a dense one in 16 bits. On Hopper GPUs a
    weight in pairs is multiplied by the instructions for sparse matrices, whatever the number of rows; there, the two
    places of a group must ascend, as those do that `sparse24` gives. Elsewhere, and with a weight in halves, products
    of many rows take the time of those with a dense weight at best, which on GPUs is in memory meanwhile from 512 rows
    on. Differentiable in x and in the weight's values, whose cotangent is a `Sparse24Tensor`; codes have no cotangent.

    Args:
      x: float [..., k].
      weight: [n, k], of x's dtype or of an 8-bit float. See `sparse24`.
      out_dtype: dtype of the result, a float; default: that of x.
    Returns:
      [..., n].
    Raises:
      KernelTypeError: dtypes that do not fit, a weight that is dense. KernelValueError: shapes that do not fit.
    """
    op = "sparse24_matmul"
    check_float(op, x=x)
    if not isinstance(weight, Sparse24Tensor):
        raise KernelTypeError(f"{op}: weight is a Sparse24Tensor, got {type(weight).__name__}; see ops.sparse24")
    out_dtype = float_dtype(op, out_dtype, x.dtype)
    n, k = weight.shape
    check_shape(op, f"the values of a weight [{n}, {k}] in {weight.order}", weight.values, _values(n, k, weight.order))
    if x.ndim < 1 or x.shape[-1] != k:
        raise KernelValueError(f"{op}: x is [..., {k}] for a weight [{n}, {k}], got shape {tuple(x.shape)}")
    if x.dtype != weight.dtype and weight.dtype.itemsize > 1:
        raise KernelTypeError(f"{op}: x has dtype {x.dtype.name}, the weight {weight.dtype.name}; cast one")
    lead = x.shape[:-1]
    if 0 in (*lead, n, k):
        return jnp.zeros((*lead, n), out_dtype)
    y = _product(x.reshape(math.prod(lead), k), weight, out_dtype=out_dtype.name)
    return y.reshape(*lead, n)


def _dense_product(x, weight: Sparse24Tensor, *, out_dtype: str):
    return matmul(x, _whole(weight).astype(x.dtype), transpose_b=True, out_dtype=out_dtype)


def _not_dense(x, *_, **__) -> str | None:
    return None if known(x.shape[0]) >= DENSE else f"{x.shape[0]} rows are fewer than {DENSE}"


def _from_memory(x, weight: Sparse24Tensor, *, out_dtype: str):
    weight = weight.ordered("halves")
    return _few_rows(x, weight.values, weight.codes).astype(out_dtype)


_product = Op(
    "product with a 2:4 weight of any rows",
    Implementation("sparse tensor cores", hopper_pairs.product, hopper_pairs.misfit, BLOCK_LEVEL, portable=False),
    Implementation("the dense weight in memory", _dense_product, _not_dense, WARPS),
    Implementation("the weight as it is", _from_memory),
)


def _in_places(x, values, codes):
    """The product of x [m, k]."""
    rows = x.reshape(x.shape[0], HALVES, codes.shape[1], PLACES).swapaxes(2, 3).reshape(-1, UNIT, codes.shape[1])
    return _y(rows, values, codes)


_few_rows = Op(
    "product with a 2:4 weight",
    Implementation("roles", hopper_sparse24.product, hopper_sparse24.misfit, BLOCK_LEVEL, portable=False),
    Implementation("tiles", _in_places),
)


def _whole(weight: Sparse24Tensor) -> jax.Array:
    """The weight with its zeros, made by a kernel where its rows divide into blocks (H200: XLA took three times as
    long)."""
    bp, weight = math.gcd(weight.codes.shape[1], 64), weight.ordered("halves")
    return weight.dense() if bp < 16 else tuned(sparse24_dense, num_warps=4)(weight.values, weight.codes, bn=16, bp=bp)


def sparse24_matmul_reference(x, weight, *, out_dtype=None):
    """`sparse24_matmul` in jnp, with the dense weight."""
    wide = sums_in(x)
    y = jnp.matmul(x.astype(wide), weight.dense().astype(wide).T, precision="highest")
    return y.astype(out_dtype or x.dtype)
