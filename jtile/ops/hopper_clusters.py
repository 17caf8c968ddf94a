"""Small products on Hopper at the block level, in one round of tiles, whose rows start inside of lines of memory.

Such a product takes as long to begin and to bring its operands as to multiply. So two blocks that need the same columns
bring half of them each, to both (`multicast`), one role of four warps starts the copies and multiplies, since roles of
their own take longer to begin, and the block prepares its barriers while the kernel in front of it ends.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import first_unmet

ROWS, COLUMNS, TERMS = 64, 128, 128  # of a tile, and of a round
SLOTS = 4  # of a ring: 192 KiB of shared memory


def _grid(x, w, *_) -> tuple[int, int]:
    return jt.cdiv(w.shape[1], COLUMNS), jt.cdiv(x.shape[0], ROWS)  # neighbours have the same columns


@jt.kernel(out_type=lambda x, w, *_: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype), grid=_grid)
def hopper_clusters(x, w, y):
    """y = x w of x [m, k] and w [k, n]."""
    j, i = jt.program_id(0), jt.program_id(1)
    rounds = jt.cdiv(x.shape[1], TERMS)
    slots = min(SLOTS, rounds)
    rows = jt.alloc((ROWS, TERMS), x.dtype, slots=slots)
    columns = jt.alloc((TERMS, COLUMNS), w.dtype, slots=slots)
    leaving = jt.alloc((ROWS, COLUMNS), y.dtype)
    full, empty = jt.barrier(slots), jt.barrier(slots)
    here, there = jt.ds(i * ROWS, ROWS), jt.ds(j * COLUMNS, COLUMNS)

    def bring(k):
        """Start to bring the operands of a round, when those in their place have been read."""
        empty.at(k).wait(before=True)
        full.at(k).expect(rows.nbytes + columns.nbytes)
        terms = jt.ds(k * TERMS, TERMS)
        jt.async_copy(x.at[here, terms], rows.at(k), full.at(k))
        jt.async_copy(w.at[terms, there], columns.at(k), full.at(k))

    def added(k, total, pending: int = 0):
        """The sums and the product of a round; `pending`: of products that may still run then."""
        full.at(k).wait()
        return jt.dot_wait(jt.dot_async(rows.at(k), columns.at(k), total), pending=pending)

    with jt.role("all", warps=4, early=True):
        jt.wait_for_kernels()
        for k in jt.range(slots):
            bring(k)
        total = added(jnp.int32(0), jnp.zeros((ROWS, COLUMNS), jnp.float32))
        empty.at(jnp.int32(0)).arrive()
        last = 1 + max(rounds - slots, 0)  # rounds behind which nothing is brought any more
        for k in jt.range(1, last):  # what is brought takes the place of a round before, which both blocks have read
            total = added(k, total)
            empty.at(k).arrive()
            bring(k - 1 + slots)
        for k in jt.range(last, rounds):
            total = added(k, total, 1)
            empty.at(k - 1).arrive(when=k != last)
        total = jt.dot_wait(total)
        if rounds > last:
            empty.at(jnp.int32(rounds - 1)).arrive()
        leaving.store(total.astype(y.dtype))
        jt.fence_shared()
        jt.async_copy(leaving, y.at[here, there])
        jt.store_wait()


def misfit(a, b, bias, *, ta: bool, tb: bool, activation: str | None, save: bool, out_dtype: str) -> str | None:
    """Why the kernel does not compute op(a) op(b) of [1, m, k] and [1, k, n]; None where it does, the quickest."""
    sizes = a.shape[0], b.shape[0], *a.shape[1:], *b.shape[1:]
    sixteen = a.dtype == b.dtype == jnp.dtype(out_dtype) and a.dtype in (jnp.bfloat16, jnp.float16)
    why = first_unmet(
        (all(isinstance(size, int) and size > 0 for size in sizes), "sizes are 0, or not known"),
        (sizes[:2] == (1, 1), "there are several products"),
        (not (ta or tb), "an operand lies transposed in memory"),
        (sixteen, f"{a.dtype.name} times {b.dtype.name} in {out_dtype} are not 16-bit floats alike"),
        (bias is None and activation is None and not save, "something follows the product"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
    )
    if why:
        return why
    m, k, n = a.shape[1], a.shape[2], b.shape[2]
    tile = gpu_tiles.product(m, n, k, 2, cut=True)
    shared = (tile["bm"], tile["bn"]) == (ROWS, COLUMNS) and gpu_tiles.neighbours(m, n, k, 2, ROWS, COLUMNS)
    return first_unmet(
        (not any(size % 8 for size in (k, n)), f"rows of {k} or {n} numbers are not in tensor maps"),
        (bool(shared), "blocks that are neighbours share no copies"),
    )


def product(a, b) -> jax.Array:
    """a b of a [1, m, k] and b [1, k, n]."""
    return hopper_clusters.with_options(multicast=2)(a[0], b[0])[None]
