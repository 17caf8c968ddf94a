"""Products of some dozens to 256 rows of x on Hopper, at the block level: yᵀ = W xᵀ.

A warpgroup's product has 64 rows and any number of columns. So rows of W, of which there are many, are its rows, and
those of x, 144 for example, its columns, in widths that are powers of two, 128 and 16: fewer are computed for nothing
than in tiles of 64 rows of x, and every tile of W is read once or by few blocks.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile import cdiv
from jtile.ops import gpu_tiles
from jtile.ops.epilogues import ACTIVATIONS

ROWS = 64  # of W, of a consumer
COLUMNS = 64  # of the result's tile that leave together
_SHARED = (227 << 10) - 1024  # bytes; what is left are barriers
_SLOTS = 12  # of the rings at most


def widths_of(columns: int) -> tuple[int, ...]:
    """Of the products that compute so many columns together: powers of two from 16 to 256, the longest first, which
    read and write the least shared memory."""
    ways = (w for n in (1, 2, 3) for w in itertools.combinations_with_replacement((256, 128, 64, 32, 16), n))
    # A step of 64 terms, in units of 128 bytes: 4 instructions read 64 rows of W and the columns, a copy writes columns.
    cost = lambda w: sum(4 * (16 + n // 4) + n for n in w)
    return min((w for w in ways if sum(w) >= columns), key=cost)


def _types(x, w, *_, tb, out_dtype, **__):
    return jax.ShapeDtypeStruct((x.shape[0], w.shape[0 if tb else 1]), jnp.dtype(out_dtype))


def _pieces(x, w, *, tb, high, parts) -> int:
    """Tiles of the result: so many parts of the rows of x for every `high * 64` rows of W."""
    return cdiv(w.shape[0 if tb else 1], ROWS * high) * parts


def _grid(x, w, *_, tb, high, parts, blocks, **__):
    return min(blocks, _pieces(x, w, tb=tb, high=high, parts=parts))


def _tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


@jt.function
def _consume(W, X, full, empty, rounds: int, it, tb: bool):
    """The sums of 64 rows of W with each buffer of X, and the number of the round after them."""
    acc = tuple(jt.zeros((ROWS, x.shape[0]), jnp.float32) for x in X)
    for k in jt.range(rounds):
        full.at(it).wait()
        a = W.at(it) if tb else W.at(it).T
        acc = tuple(jt.dot_async(a, x.at(it).T, c, keep=k > 0) for x, c in zip(X, acc))
        acc = _tuple(jt.dot_wait(*acc, pending=len(X)))
        empty.at(it + full.count - 1).arrive(when=k > 0)
        it += 1
    acc = _tuple(jt.dot_wait(*acc))
    empty.at(it + full.count - 1).arrive()
    return it, acc


def _columns(t, n: int) -> list:
    """The tile in parts of at most n columns."""
    half = t.shape[1] // 2
    return [t] if t.shape[1] <= n else [*_columns(t[:, :half], n), *_columns(t[:, half:], n)]


def _write(sums, C, y, bias, row, first, activation):
    """Sums [64, columns] to y, from its row `first` on, by way of the buffers C."""
    at = first
    for n, part in enumerate(p for t in sums for p in _columns(t, COLUMNS)):
        part = part if bias is None else part + bias[:, None]
        buffer, rows = C[n % len(C)], part.shape[1]
        buffer = buffer if rows == COLUMNS else buffer[0:rows, :]
        jt.store_wait(min(n, len(C) - 1))
        buffer.store(ACTIVATIONS[activation](part).astype(y.dtype).T)
        jt.fence_shared()
        jt.async_copy(buffer, y.at[jt.ds(at, rows), jt.ds(row * ROWS, ROWS)])
        at = at + rows


@jt.function
def _fill(x, w, W, X, full, empty, tile, first, rounds: int, it, tb: bool):
    bk = X[0].shape[1]
    for k in jt.range(rounds):
        empty.at(it).wait(before=True)
        full.at(it).expect(sum(r.nbytes for r in (*W, *X)))
        for h, ring in enumerate(W):
            row = tile * len(W) + h
            jt.async_copy(w.tiles(ROWS, bk).at[row, k] if tb else w.tiles(bk, ROWS).at[k, row], ring.at(it), full.at(it))
        at = first
        for ring in X:
            jt.async_copy(x.at[jt.ds(at, ring.shape[0]), jt.ds(k * bk, bk)], ring.at(it), full.at(it))
            at = at + ring.shape[0]
        it += 1
    return it


@jt.kernel(out_type=_types, grid=_grid, sharding=None)
def turned_product(
    x, w, *refs, tb: bool, widths: tuple[int, ...], parts: int, high: int, bk: int, slots: int, buffers: int,
    blocks: int,
    activation: str | None = None, out_dtype: str = "bfloat16",
):  # fmt: skip
    """y [m, n] of x [m, k], w [n, k] (`tb`) or [k, n] and bias [1, n], if any.

    A program computes tiles of `high * 64` rows of W by `widths` of the rows of x, the part of them that is its own.
    """
    # Yᵀ = act(W Xᵀ + bias)
    *bias, y = refs
    rounds, pieces = cdiv(x.shape[1], bk), _pieces(x, w, tb=tb, high=high, parts=parts)
    W = [jt.alloc((ROWS, bk) if tb else (bk, ROWS), w.dtype, slots=slots) for _ in range(high)]
    X = [jt.alloc((n, bk), x.dtype, slots=slots) for n in widths]
    C = [[jt.alloc((COLUMNS, ROWS), y.dtype) for _ in range(buffers)] for _ in range(high)]
    full, empty = jt.barrier(slots), jt.barrier(slots, arrivals=high)
    first, step = jt.program_id(0), jt.num_programs(0)
    mine = (pieces - first + step - 1) // step
    for h in range(high):
        with jt.role(f"consumer{h}", warps=4, registers={1: 232, 2: 232, 3: 160, 4: 112}[high]):
            it = jnp.int32(0)
            for r in jt.range(mine):
                piece = first + r * step
                it, sums = _consume(W[h], X, full, empty, rounds, it, tb)
                row = piece // parts * high + h
                b = bias[0].tiles(None, ROWS)[0, row].astype(jnp.float32) if bias else None
                _write(sums, C[h], y, b, row, piece % parts * sum(widths), activation)
            jt.store_wait(0)
    with jt.role("producer", warps=1, registers=24):
        it = jnp.int32(0)
        for r in jt.range(mine):
            piece = first + r * step
            it = _fill(x, w, W, X, full, empty, piece // parts, piece % parts * sum(widths), rounds, it, tb)


@functools.lru_cache(maxsize=1024)
def form(m: int, high: int, parts: int, bk: int = 64, itemsize: int = 2) -> dict[str, Any] | None:
    """Meta-parameters for `parts` of m rows of x; None where shared memory does not hold four rounds of them."""
    widths = widths_of(cdiv(cdiv(m, parts), 16) * 16)
    slot = (sum(widths) + high * ROWS) * bk * 2
    most = lambda buffers: min((_SHARED - high * buffers * ROWS * COLUMNS * itemsize) // slot, _SLOTS)
    buffers = 1 if most(2) < 6 and most(1) > most(2) else 2
    sizes = dict(slots=most(buffers), buffers=buffers, blocks=gpu_tiles.PROCESSORS)
    return dict(widths=widths, parts=parts, high=high, bk=bk, **sizes) if most(buffers) >= 3 else None
