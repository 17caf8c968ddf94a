"""Attention of chunks of prompts over a cache in pages, for Hopper at the block level.

A tile is some consecutive tokens of one row, with all heads that share a kv head: twice as many queries as in
`hopper_decode`, for two consumers, which read each unit of keys once for both. Queries and outputs lie as models have
them, [tokens, heads, d]: a head's tokens are a copy of their own. What a query gets is the same, bit for bit, as from
`hopper_decode` with whole rows, whose order of sums this kernel shares.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_decode import ROWS, Work, copies, sums_of_row, units_of, zero_behind
from jtile.ops.hopper_shares import Units, row_of

CONSUMERS = 2
QUERIES = CONSUMERS * ROWS  # queries of a tile
_RING = 64 << 10  # bytes of keys that are on their way or looked at, and of values


@dataclasses.dataclass(frozen=True)
class _Work(Work):
    """`Work` of tiles.

    Attributes:
      group: the heads that share a kv head; first: the first tile's number among all tiles of t tokens.
      buffers, q_full, q_empty: the queries of each consumer, and their barriers; Q is the first buffer.
      cleared: the values behind a row's length are zeros.
    """

    group: int
    first: int
    buffers: tuple[jt.Shared, ...]
    cleared: jt.Barrier

    @property
    def heads(self) -> int:
        """The heads of a consumer."""
        return ROWS // self.t

    def positions(self, rows: int, length):
        return length - self.t + jt.arange(rows)[:, None] % self.t

    def queries(self, one: int):
        return self.buffers[one], self.q_full[one], self.q_empty[one]

    def tile(self, x, b, head, one: int, i: int):
        """The place of the i-th head of consumer `one` in x [tokens, heads, d], for row b and this kv head."""
        return x.tiles(self.t, None, x.shape[2]).at[self.first + b, head * self.group + one * self.heads + i, 0]

    def part(self, buffer, i: int):
        """The part of a consumer's buffer that belongs to its i-th head."""
        return buffer if self.heads == 1 else buffer[i * self.t : (i + 1) * self.t, :]

    def fetch_queries(self, r, b, head, turn):
        del r
        for one in range(CONSUMERS):
            buffer, full, empty = self.queries(one)
            empty.at(turn).wait(before=True)
            full.at(turn).expect(buffer.nbytes)
            for i in range(self.heads):
                jt.async_copy(self.tile(self.q, b, head, one, i), self.part(buffer.at(turn), i), full.at(turn))

    def clear(self, one: int, c, turn, key, length):
        if one == 0:
            zero_behind(self.V.at(c), key, length)
            self.cleared.at(turn).arrive()
        else:
            self.cleared.at(turn).wait()


@jt.function
def _products(w: _Work, one: int, O, o, *, scale: float, softcap: float | None):
    """The role of consumer `one`. r is a row-and-head, and c counts units of keys, as in `hopper_shares`."""
    begin, end, r, start, _ = w.share()
    c, turn, ahead = jnp.int32(0), jnp.int32(0), w.length(r)
    while start < end:
        length, ahead = ahead, w.length(r + 1)
        n = w.units.of(length)
        lo, hi = w.inside(begin, end, start, n)
        acc, _, l, c = sums_of_row(w, one, c, turn, lo, hi, start, length, scale=scale, softcap=softcap)
        acc = acc * jnp.where(l > 0, 1.0 / l, 0.0)[:, None]
        b = row_of(r, w.units)
        jt.store_wait()
        O.store(acc.astype(o.dtype))
        jt.fence_shared()
        for i in range(w.heads):
            jt.async_copy(w.part(O, i), w.tile(o, b, r - b * w.units.heads, one, i))
        r, start, turn = r + 1, start + n, turn + 1
    jt.store_wait()


@jt.kernel(
    out_type=lambda q, *_, **__: jt.like(q),
    grid=lambda *_, parts, **__: parts,
    alias={"into": "o"},
)
def hopper_chunks(
    q, k, v, lengths, table, into, o, *, parts: int, units: Units, t: int, scale: float, softcap: float | None
):  # fmt: skip
    """Attention of the last m t tokens of q, in m tiles of t tokens; those in front keep what `into` has.

    q, into [tokens, heads, d]; k, v [pages, slots of a page, kv heads, d]; lengths int32 [m], keys of the last token of
    each tile; table int32 [m, pages of a row]."""
    d, dtype = q.shape[2], q.dtype
    slots = _RING // (units.size * d * dtype.itemsize)
    buffers = tuple(jt.alloc((ROWS, d), dtype, slots=1) for _ in range(CONSUMERS))
    outputs = tuple(jt.alloc((ROWS, d), dtype) for _ in range(CONSUMERS))
    K, V = (jt.alloc((units.size, d), dtype, slots=slots) for _ in range(2))
    q_full, q_empty = (tuple(jt.barrier(1) for _ in range(CONSUMERS)) for _ in range(2))
    k_full, v_full, cleared = (jt.barrier(slots) for _ in range(3))
    k_empty, v_empty = (jt.barrier(slots, arrivals=CONSUMERS) for _ in range(2))
    group, first = q.shape[1] // units.heads, q.shape[0] // t - lengths.shape[0]
    w = _Work(q, k, v, lengths, table, units, parts, t, True, buffers[0], K, V, None, q_full, q_empty, k_full, k_empty,
              v_full, v_empty, group, first, buffers, cleared)  # fmt: skip
    for one in range(CONSUMERS):
        with jt.role(f"products{one}", warps=4):
            _products(w, one, outputs[one], o, scale=scale, softcap=softcap)
    with jt.role("copies", warps=1, registers=40):
        copies(w)


def misfit(q, k, v, lengths, table, *, tiles: tuple[int, int]) -> str | None:
    """Why `chunks` cannot run this call, None where it can: q [n + m t, heads, d], with tiles = (n, t)."""
    (_, heads, d), (_, page, kvs, _), (n, t) = q.shape, k.shape, tiles
    return first_unmet(
        (q.dtype in (jnp.bfloat16, jnp.float16), f"operands are {q.dtype.name}, not 16-bit floats"),
        (q.dtype == k.dtype == v.dtype, f"the cache is {k.dtype.name}, queries are {q.dtype.name}"),
        (d in (64, 128), f"heads have {d} features, not 64 or 128"),
        (t * (heads // kvs) == QUERIES, f"a tile has {t * (heads // kvs)} queries of a kv head, not {QUERIES}"),
        (t in (8, 16, 32, 64), f"tiles have {t} tokens, not 8, 16, 32 or 64"),
        (n % t == 0, f"{n} tokens in front of the tiles are no multiple of {t}"),
        (page % 64 == 0, f"pages have {page} slots, not a multiple of 64"),
    )


def chunks(q, k, v, lengths, table, into, *, t: int, scale: float, softcap: float | None):
    """The result of `hopper_chunks` with its meta-parameters."""
    options = {"parts": gpu_tiles.processors(), "units": units_of(k, table), "t": t, "scale": scale}
    return hopper_chunks(q, k, v, lengths, table, into, softcap=softcap, **options)
