"""The products between two attentions of a decoder in one kernel, for one row of quantised weights, on Hopper.

A kernel for each product has a start and an end in which memory does nothing: its ring of weights is filled only when
the blocks in front have left, and x is brought into registers before the first sum. Here the blocks stay: one role
fills one ring with the weights of all products, one behind the other, whatever the others do, and the roles that
multiply wait between two products until the programs of all multiprocessors have written their part of x. What has
come into the ring meanwhile is as much as memory gives in that time.

The products are those of `hopper_gemv`: out of attention, gate and up behind a norm, down, and the projection of the
next layer behind its norm. All tiles are two halves of `rows` rows, of two matrices or of one, so that one ring serves.
A block leaves room on its multiprocessor for one of `hopper_step`, the attention in front of it and behind it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import first_unmet
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.hopper_gemv import BESIDE, NARROW
from jtile.ops.operands import Norm, Weight
from jtile.ops.streamed_numbers import (
    LANES,
    along,
    bits_of,
    bytes_of,
    groups_of,
    held,
    integers,
    is_ring,
    lane_sums,
    leaves,
    planes_of,
    put,
    room,
    spread,
)
from jtile.ops.streamed_operands import PIECE, Rows, by_block, in_lines, of_blocks, of_piece

ROLES = 4  # roles that multiply
HALVES = 2  # of a tile
_LEAST = 3  # rounds that the ring has room for, at least


@dataclasses.dataclass(frozen=True)
class _Product:
    """One of the products.

    Attributes:
      x, weights, y: its operands and its result, [1, out / n, n]; total: where the sum in front of its norm goes.
      activation: of gate.
      chunks: rounds of a tile; tiles: of this program, every `programs`-th; round, tile: how many are in front of it.
    """

    x: Rows
    weights: tuple[Weight, ...]
    y: jt.Ref
    total: jt.Ref | None
    activation: str | None
    chunks: int
    tiles: jax.Array
    round: jax.Array
    tile: jax.Array

    @property
    def gated(self) -> bool:
        return len(self.weights) > 1

    def place(self, half: int, tile) -> tuple:
        """Weight and place of a half of a tile, in tiles of half the rows."""
        return (self.weights[half], tile) if self.gated else (self.weights[0], tile * HALVES + half)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program: see `hopper_gemv`; go: all programs have written what x is made of."""

    words: list
    of_blocks: list
    numbers: list
    sums: list
    squares: list
    full: jt.Barrier
    empty: jt.Barrier
    done: jt.Barrier
    taken: jt.Barrier
    squared: jt.Barrier
    go: jt.Barrier


def _memory(products: list[_Product], kind: str, rows: int, slots: int, pairs: int) -> _Memory:
    weight, x = products[0].weights[0], products[0].x.x
    each, halves, groups = range(ROLES), range(HALVES), range(groups_of(kind))
    ring = lambda shape, dtype, n=slots: jt.alloc(shape, dtype, slots=n)
    width, inner = 512 // jnp.dtype(weight.codes.dtype).itemsize, x.shape[1] * x.shape[2]
    chunks = max(p.chunks for p in products)
    of_x = room(kind, bytes_of(x.dtype))
    if not integers(kind):  # floats lie there as 16-bit ones: those behind a norm as a sum of two
        of_x, chunks = jax.ShapeDtypeStruct(of_x.shape, x.dtype), max(chunks, 2)
    return _Memory(
        words=[[[ring((rows, width), weight.codes.dtype) for _ in groups] for _ in halves] for _ in each],
        of_blocks=[
            [[[ring((rows, of_piece(a, inner, kind)), a.dtype) for _ in groups] for a in of_blocks(weight, kind)]
             for _ in halves] for _ in each
        ],
        numbers=[jax.tree.map(lambda a: ring(a.shape, a.dtype, chunks), of_x) for _ in each],
        sums=[[ring((rows, LANES), jnp.float32, pairs) for _ in halves] for _ in each],
        squares=[ring((LANES,), jnp.float32, 1) for _ in each],
        full=jt.barrier(slots),
        empty=jt.barrier(slots, arrivals=ROLES),
        done=jt.barrier(pairs, arrivals=ROLES),
        taken=jt.barrier(pairs),
        squared=jt.barrier(1, arrivals=ROLES),
        go=jt.barrier(1),
    )  # fmt: skip


def _prepare(mem: _Memory, p: _Product, s: int, j: int, kind: str) -> None:
    """Puts role j's part of x of product s into shared memory, when it is there."""
    whole, x = integers(kind), p.x
    weights = [x.weights(chunk * ROLES + j, whole) for chunk in range(p.chunks)]
    if s == 0:
        jt.wait_for_kernels()
    else:
        mem.go.at(s - 1).wait()
    pieces = [x.parts(0, chunk * ROLES + j, whole) for chunk in range(p.chunks)]
    if x.norm is not None:
        squares = functools.reduce(jnp.add, [part * part for parts in pieces for part in parts])
        mem.squares[j].at(0).store(squares.reshape(LANES, -1).sum(1))
    if s > 0:
        jt.role_barrier()
    for chunk, (parts, of_norm) in enumerate(zip(pieces, weights)):
        parts = [part if w is None else part * w.astype(jnp.float32) for part, w in zip(parts, of_norm)]
        if not whole:
            planes = planes_of(parts[0], kind)
            high = planes.astype(x.x.dtype)
            mem.numbers[j].at(chunk).store(high)
            if x.norm is not None:
                mem.numbers[j].at(1).store((planes - high.astype(jnp.float32)).astype(x.x.dtype))
        else:
            put(mem.numbers[j], chunk, parts, kind, bytes_of(x.x.dtype))
    jt.role_barrier()
    if x.norm is not None:
        mem.squared.at(0 if s == 1 else 1).arrive()


def _held(mem: _Memory, p: _Product, j: int, chunk, kind: str):
    """x of a round in registers."""
    if integers(kind):
        return held([jax.tree.map(lambda ring: ring.at(chunk), mem.numbers[j], is_leaf=is_ring)])
    load = lambda k: [one.astype(jnp.float32) for one in along(mem.numbers[j].at(k).load(), 0)]
    high = load(chunk)
    return [high if p.x.norm is None else [a + b for a, b in zip(high, load(1))]]


@jt.function
def _consume(mem: _Memory, p: _Product, j: int, kind: str, rows: int):
    """Role j: adds up, in its lanes, the products of each tile of rows."""
    words, blocks, chunks = mem.words[j], mem.of_blocks[j], p.chunks
    load = lambda k: jax.tree.map(lambda ring: ring.at(k).load(), (words, blocks), is_leaf=is_ring)
    x = _held(mem, p, j, 0, kind) if chunks == 1 else None
    zero = lambda: jnp.zeros((rows, LANES), jnp.float32)
    for n in jt.range(p.tiles):
        sums = tuple(zero() for _ in words)
        for chunk in jt.range(chunks):
            k = p.round + n * chunks + chunk
            mem.full.at(k).wait()
            stored, copied = load(k)
            scales = [[[spread(one, rows) for one in a] for a in of_half] for of_half in copied]
            mem.empty.at(k).arrive()
            now = _held(mem, p, j, chunk, kind) if x is None else x
            found = [lane_sums(pieces, d, now, kind)[0] for pieces, d in zip(stored, scales)]
            sums = tuple(a + b for a, b in zip(sums, found))
        at = p.tile + n
        mem.taken.at(at).wait(before=True)
        for ring, total in zip(mem.sums[j], sums):
            ring.at(at).store(total)
        mem.done.at(at).arrive()


@jt.function
def _produce(mem: _Memory, p: _Product, kind: str):
    """Fills the ring with the weights of a product."""
    buffers, first, programs = leaves((mem.words, mem.of_blocks)), jt.program_id(0), jt.num_programs(0)
    for k in jt.range(p.tiles * p.chunks):
        n, chunk, at = first + k // p.chunks * programs, k % p.chunks, p.round + k
        mem.empty.at(at).wait(before=True)
        mem.full.at(at).expect(sum(ring.nbytes for ring in buffers))
        for j in range(ROLES):
            for half, (words, blocks) in enumerate(zip(mem.words[j], mem.of_blocks[j])):
                weight, tile = p.place(half, n)
                for array, rings in zip((weight.codes, *of_blocks(weight, kind)), (words, *blocks)):
                    for group, ring in enumerate(rings):
                        piece = (chunk * ROLES + j) * len(rings) + group
                        source = array.tiles(*ring.shape).at[tile, piece]
                        jt.async_copy(source, ring.at(at), mem.full.at(at), evict="first")


@jt.function
def _write(mem: _Memory, p: _Product, s: int, kind: str, rows: int):
    """Adds up the lanes' sums of product s, and applies the scale of the norm and what follows the product."""
    first, programs = jt.program_id(0), jt.num_programs(0)
    last = p.weights[0].scaled_last(kind)
    fine = p.y.tiles(None, None, rows)
    across = p.y.shape[2] // rows
    whole = jt.cdiv(p.weights[0].codes.shape[0], rows * (1 if p.gated else HALVES)) - 1

    def of_tile(n):
        """The scales of the rows of tile n."""
        tile = jnp.minimum(first + n * programs, whole)
        places = [p.place(half, tile) for half in range(HALVES)] if last else []
        return [weight.scale.tiles(rows, 1)[at, 0][:, 0] for weight, at in places]

    ahead = [of_tile(0), of_tile(1)]
    unit = None
    if p.x.norm is not None:
        mem.squared.at(0 if s == 1 else 1).wait()
        unit = p.x.scale([mem.squares[j].at(0).load() for j in range(ROLES)])
    for n in jt.range(p.tiles):
        tile, at = first + n * programs, p.tile + n
        now, ahead = ahead[0], [ahead[1], of_tile(n + 2)]
        mem.done.at(at).wait()
        found = [functools.reduce(jnp.add, [mem.sums[j][half].at(at).load() for j in range(ROLES)])
                 for half in range(HALVES)]  # fmt: skip
        mem.taken.at(at).arrive()
        sums = [of_half.sum(1) for of_half in found]
        sums = sums if unit is None else [total * unit for total in sums]
        sums = [total * scale for total, scale in zip(sums, now)] if last else sums
        outs = [ACTIVATIONS[p.activation](sums[0]) * sums[1]] if p.gated else sums
        for half, out in enumerate(outs):
            column = tile if p.gated else tile * HALVES + half
            fine[0, column // across, column % across] = out.astype(p.y.dtype)


@jt.function
def _write_sums(x: Rows, total):
    """x + residual, to `total`: a program takes every `programs`-th piece."""
    for at in jt.range(jt.program_id(0), x.pieces, jt.num_programs(0)):
        x.view(total)[0, at, 0] = x.before(0, at).astype(total.dtype)


def _types(x, residual, norms, weights, **_):
    of = lambda w: jax.ShapeDtypeStruct((1, w[0].codes.shape[0] // x.shape[2], x.shape[2]), x.dtype)
    return tuple(of(w) for w in weights), tuple(jt.like(residual) for _ in norms)


def _scratch(x, residual, norms, weights, **_):
    return [jt.signals((len(weights) - 1,))]


@jt.kernel(out_type=_types, grid=lambda *_, programs, **__: programs, scratch=_scratch)
def hopper_chain(x, residual, norms, weights, ys, totals, came, *, kind: str, activation: str, eps: float, rows: int,
                 slots: int, pairs: int, programs: int):  # fmt: skip
    """x, residual [1, in / n, n], n weights to a lane; norms: the weights [in / n, n] of the norms in front of products
    1 and 3; weights: for each product one, or two of product 1; ys: their results [1, out / n, n]; totals: the sums in
    front of the norms. came: how many programs have written all of their part of a product."""
    # y0 = x Oᵀ   t0 = y0 + r   y1 = act(norm(t0) Gᵀ) norm(t0) Uᵀ   y2 = y1 Dᵀ   t1 = y2 + t0   y3 = norm(t1) Qᵀ
    products = _products(x, residual, norms, weights, ys, totals, activation, eps, rows)
    mem = _memory(products, kind, rows, slots, pairs)
    mine, aside = BESIDE
    for j in range(ROLES):
        with jt.role(f"consumer{j}", warps=4, registers=mine, early=True):
            for s, p in enumerate(products):
                _prepare(mem, p, s, j, kind)
                _consume(mem, p, j, kind, rows)
    with jt.role("producer", warps=1, registers=aside, early=True):
        for p in products:
            _produce(mem, p, kind)
    with jt.role("writer", warps=2, registers=aside):
        for s, p in enumerate(products):
            if s > 0:
                jt.wait(came[s - 1], programs)
                mem.go.at(s - 1).arrive()
            if p.total is not None:
                _write_sums(p.x, p.total)
            _write(mem, p, s, kind, rows)
            if s < len(products) - 1:
                jt.signal(came[s])


def _products(x, residual, norms, weights, ys, totals, activation: str, eps: float, rows: int) -> list[_Product]:
    """The products, one behind the other."""
    first, programs = jt.program_id(0), jt.num_programs(0)
    products, before, rounds, done = [], residual, jnp.int32(0), jnp.int32(0)
    for s, of_product in enumerate(weights):
        row, total = Rows(x if s == 0 else ys[s - 1]), None
        if s % 2:
            row, total = Rows(row.x, Norm(norms[s // 2], before), eps), totals[s // 2]
            before = total
        chunks = jt.cdiv(row.x.shape[1] * row.x.shape[2], PIECE * ROLES)
        height = rows * (1 if len(of_product) > 1 else HALVES)
        tiles = (jt.cdiv(of_product[0].codes.shape[0], height) - first + programs - 1) // programs
        products.append(_Product(row, of_product, ys[s], total, activation, chunks, tiles, rounds, done))
        rounds, done = rounds + tiles * chunks, done + tiles
    return products


def _rows(kind: str) -> int:
    """The rows of half a tile."""
    return 8 if bits_of(kind) == 4 else 4


def form(longest: int, weight: Weight, inner: int, kind: str, count: int) -> dict[str, int] | None:
    """The meta-parameters for products whose longest rows have `longest` numbers; None where shared memory has no room.

    weight: one of the weights, with rows of `inner`; count: see `bytes_of`.
    """
    rows = _rows(kind)
    chunks = jt.cdiv(longest, PIECE * ROLES)
    of_x = jax.tree.leaves(room(kind, count))
    numbers = 4 * sum(a.size for a in of_x) * chunks if integers(kind) else 2 * of_x[0].size * max(chunks, 2)
    scales = sum(of_piece(a, inner, kind) * jnp.dtype(a.dtype).itemsize for a in of_blocks(weight, kind))
    slot = ROLES * HALVES * rows * groups_of(kind) * (512 + scales)
    found = []
    for pairs in (2, 1):
        sums = ROLES * HALVES * rows * LANES * 4 * pairs
        found.append(dict(rows=rows, pairs=pairs, slots=(NARROW - 2048 - ROLES * numbers - sums) // slot))
    best = max(found, key=lambda one: one["slots"])
    return best if best["slots"] >= _LEAST else None


def misfit(x, norms, weights: tuple[tuple[Weight, ...], ...], kind: str) -> str | None:
    """Why `chain` does not compute these products of x [1, in]; None where it does. weights, norms: see there."""
    if bits_of(kind) == 16 or x.dtype not in (jnp.bfloat16, jnp.float16):
        return "numbers are not 16-bit floats beside quantised weights"
    n, every = 128 // bits_of(kind), [w for of_product in weights for w in of_product]
    inner = lambda w: w.codes.shape[1] * 32 // bits_of(kind)
    lines = lambda w: (
        in_lines(w, kind)
        and all(
            (size := of_piece(a, inner(w), kind) * jnp.dtype(a.dtype).itemsize) >= 16 and _rows(kind) * size % 128 == 0
            for a in by_block(w, kind)
        )
    )
    alike = lambda w: [(a.dtype, of_piece(a, inner(w), kind)) for a in by_block(w, kind)]
    return first_unmet(
        (x.shape[0] == 1, f"there are {x.shape[0]} rows"),
        (gpu_tiles.overlaps(), "kernels do not overlap"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
        (len(norms) == len(weights) // 2 and 3 <= len(weights) <= 4, "the products are not those of a layer"),
        (all(w.codes.dtype == jnp.uint32 for w in every), "codes are not in packed words"),
        (all(inner(w) >= PIECE and inner(w) % n == 0 for w in every), f"rows are shorter than {PIECE}, or no lines"),
        (all(w.codes.shape[0] % n == 0 for w in every), f"results are not a multiple of {n} numbers"),
        (all(map(lines, every)), "scales are not in lines of copies"),
        (all(alike(w) == alike(every[0]) for w in every), "groups or scales are not alike"),
        (
            form(max(map(inner, every)), every[0], inner(every[0]), kind, bytes_of(x.dtype)) is not None,
            "the longest rows leave no room in shared memory",
        ),
    )


def chain(x, residual, norms, weights: tuple[tuple[Weight, ...], ...], *, kind: str, activation: str, eps: float):
    """The products of a layer, each of what the one in front of it gives, for one row x [1, in].

    Args:
      residual: [1, out of the first product], added in front of the first norm.
      norms: for the gated product, and for a fourth one, the weight of the norm in front of it.
      weights: of x, of the gated product, of its result, and if there is a fourth one of that product.
    Returns:
      The last product [1, ...], and the sum in front of the last norm.
    """
    n, w = 128 // bits_of(kind), weights[0][0]
    cut = lambda a: a.reshape(*a.shape[:-1], a.shape[-1] // n, n)
    longest = max(one.codes.shape[1] * 32 // bits_of(kind) for of_product in weights for one in of_product)
    meta = form(longest, w, x.shape[1], kind, bytes_of(x.dtype))
    assert meta is not None, "misfit has said that it fits"
    ys, totals = hopper_chain(
        cut(x), cut(residual), tuple(map(cut, norms)), weights, kind=kind, activation=activation, eps=eps,
        programs=gpu_tiles.processors(), **meta,
    )  # fmt: skip
    return ys[-1].reshape(1, -1), totals[-1].reshape(1, -1)
