"""Reverse mode of attention for Hopper, at the block level: two roles of 64 keys each and one that copies.

dk and dv stay in registers. dS goes through shared memory, so that each role makes half of every tile of dq, which
asynchronous copies add up in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dropouts, flex_lists, gpu_tiles, hopper_tiles
from jtile.ops._shapes import tuned
from jtile.ops.attention_windows import LOG2_E, Window, query_blocks, visible
from jtile.ops.dispatch import first_unmet
from jtile.ops.online_softmax import EMPTY

Function = Callable[..., Any] | None
KEYS = 64  # keys of one role; a program has two such roles
TURNS = 5  # of programs of two blocks of keys on all multiprocessors, at least
NEAR = 32 << 20  # bytes of queries, cotangents and gradients that the second cache holds beside keys and values


@jt.kernel(
    out_type=lambda o, g, lse, ct, *, n, **_: (
        *[jax.ShapeDtypeStruct((*lse.shape[:2], jt.cdiv(lse.shape[2], n) * n), jnp.float32) for _ in range(2)],
        jax.ShapeDtypeStruct(o.shape, jnp.float32),
    ),
    grid=lambda o, g, lse, ct, *, n, **_: (*lse.shape[:2], jt.cdiv(lse.shape[2], n)),
)
def attention_backward_start(o, g, lse, ct, s, dp, dq, *, n: int, unit: float, factor: float = 1.0):
    """The numbers that the sums of s and dp start from, [batch, heads, t rounded up to n], so that p = 2^(unit s) and
    ds = factor p dp; and dq = 0.

    o, g [batch, t, heads, d]; lse [batch, heads, t]; ct: its cotangent, or None. Queries behind t get p = 0.
    """
    # s_i = -lse_i / unit     dp_i = (log2(e) ct_i - sum_d g_id o_id) / factor
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    O, G = (x.tiles(None, n, None, o.shape[3])[b, i, h, 0].astype(jnp.float32) for x in (o, g))
    row = -(O * G).sum(1)
    top = jnp.where(i * n + jt.arange(n) < o.shape[1], lse.tiles(None, None, n)[b, h, i], EMPTY)
    s.tiles(None, None, n)[b, h, i] = top * (-1.0 / unit)
    row = row if ct is None else row + LOG2_E * ct.tiles(None, None, n)[b, h, i]
    dp.tiles(None, None, n)[b, h, i] = row if factor == 1 else row * (1.0 / factor)
    dq.tiles(None, n, None, o.shape[3])[b, i, h, 0] = jnp.zeros(O.shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Masks:
    """Which queries see which keys, and what scores are.

    Attributes:
      window, score, mask: as in `flash_attention` and `flex_attention`; counted: rows have lengths and offsets.
      extras: the operands of score and mask. lists, counts: those of `hopper_flex_backward`, else None.
    """

    window: Window
    counted: bool = False
    score: Function = None
    mask: Function = None
    extras: tuple[jt.Ref, ...] = ()
    lists: jt.Ref | None = None
    counts: jt.Ref | None = None

    def block(self, b, h, j, n):
        """The n-th block of queries that see block j of keys."""
        assert self.lists is not None
        some, heads, _, last = self.lists.shape
        return self.lists[b if some > 1 else 0, h if heads > 1 else 0, j, jnp.minimum(n, last - 1)]

    def count(self, b, h, j, n: int):
        """How many of these see all keys of block j, n = 0, or any, n = 1."""
        assert self.counts is not None
        some, heads = self.counts.shape[:2]
        return self.counts[b if some > 1 else 0, h if heads > 1 else 0, j, n]

    def seen(self, b, h, i, j, keys: int, hangs: bool):
        """Which of the keys j [keys, 1] the queries i [1, bq] see; `hangs`: whether j may be behind the keys."""
        return flex_lists.seen(b, h, i, j, self.extras, mask=self.mask, window=self.window, s=keys, hangs=hangs)

    def scored(self, s, b, h, i, j):
        """The scores of products s [keys, bq], and their derivatives."""
        score = self.score
        assert score is not None
        return jax.jvp(lambda s: score(s, b, h, i, j, *self.extras), (s,), (jnp.ones_like(s),))


def _times(p, gradient):
    return p if gradient is None else p * gradient


def _place(q, k, window: Window, several: int):
    """Row, kv head and first block of keys of this program. Programs that run at one time share what they read."""
    (batch, t, kvs, group, d), keys = q.shape, k.shape[1]
    program, blocks = jt.program_id(0), jt.cdiv(keys, 2 * KEYS * several)
    near = 1  # heads whose blocks run side by side: the first block of keys has the most queries, the last the fewest
    if window[0] is None and window[1] is not None:
        held = max(1, NEAR // (t * group * d * (2 * q.dtype.itemsize + 4)))
        near = max(n for n in range(1, min(batch * kvs, held) + 1) if batch * kvs % n == 0)
    together, side = jnp.divmod(program, near)
    first, block = jnp.divmod(together, blocks)
    b, kv = jnp.divmod(first * near + side, kvs)
    return b, kv, block if several == 1 else block * several


@jt.kernel(
    out_type=lambda q, k, v, *_, **__: (jax.ShapeDtypeStruct(q.shape, jnp.float32), jt.like(k), jt.like(v)),
    grid=lambda q, k, *_, several=1, **__: k.shape[0] * k.shape[2] * jt.cdiv(k.shape[1], 2 * KEYS * several),
    alias={"zeros": "dq"},
    sharding="b _ h n _, b _ h _, b _ h _, b _ h n _, b h n _, b h n _, b, b, b h n _, b _ h n _ "
    "-> b _ h n _, b _ h _, b _ h _",
)
def hopper_attention_backward(
    q, k, v, g, s0, dp0, lengths, offsets, seeds, zeros, dq, dk, dv,
    *, bq: int, scale: float, window: Window, counted: bool, dropout: float, several: int = 1,
):  # fmt: skip
    """A program: `several` times the keys `[j * 128, j * 128 + 128)` of one row and kv head, against all queries that
    see them.

    q, g [batch, t, kv heads, group, d]; k, v [batch, keys, kv heads, d]; s0, dp0 [batch, kv heads, group, t or more]
    and zeros as `attention_backward_start` gives them; lengths, offsets [batch], as in `flash_attention` if `counted`;
    seeds [batch, kv heads, group, 2], those of `dropouts.seeds` if something is dropped. dq is still to be multiplied
    with the scale, and with the factor of the weights that are kept.
    """
    masks = Masks(window=window, counted=counted)
    options = {"bq": bq, "scale": scale, "masks": masks, "dropout": dropout, "several": several}
    program(q, k, v, g, s0, dp0, lengths, offsets, seeds, dq, dk, dv, **options)


@jt.function
def program(
    q, k, v, g, s0, dp0, lengths, offsets, seeds, dq, dk, dv,
    *, bq: int, scale: float, masks: Masks, dropout: float, several: int = 1,
):  # fmt: skip
    """The roles of one program of either kernel."""
    # p_ij = 2^(unit s_ij)   s_ij = q_i . k_j + s0_i   dp_ij = g_i . v_j + dp0_i   ds_ij = p_ij dp_ij
    # dv_j = sum_i p_ij g_i   dk_j = scale sum_i ds_ij q_i   dq_i = sum_j ds_ij k_j     tiles are transposed: [keys, bq]
    # Where z_ij is 0 for a weight that is dropped, else 1: ds_ij = z_ij p_ij g_i . v_j + p_ij dp0_i
    # dv_j = factor sum_i z_ij p_ij g_i   dk_j = factor scale sum_i ds_ij q_i
    # b: row of the batch; kv: head of keys; j: block of keys, the x-th of several; w: role, which has half of its keys;
    # head: query head of the group; i: block of queries; rounds: how many of those a role has had, over all heads.
    window, counted = masks.window, masks.counted
    b, kv, block = _place(q, k, window, several)
    t, group, d, keys, dtype = q.shape[1], q.shape[3], q.shape[4], k.shape[1], q.dtype
    factor = dropouts.factor(dropout)
    listed, hangs = masks.lists is not None, keys % (2 * KEYS) != 0
    masked = listed or counted or window != (None, None) or hangs
    Q, G = jt.alloc((bq, d), dtype, slots=2), jt.alloc((bq, d), dtype, slots=2)
    S0, DP0 = jt.alloc((bq,), jnp.float32, slots=2), jt.alloc((bq,), jnp.float32, slots=2)
    K, V = jt.alloc((2 * KEYS, d), dtype), jt.alloc((2 * KEYS, d), dtype)
    DS, DQ = jt.alloc((KEYS, bq), dtype, slots=4), jt.alloc((64, 64), jnp.float32, slots=2)
    OUT = jt.alloc((KEYS, d), dtype, slots=2)
    k_empty, v_empty = jt.barrier(1, arrivals=2), jt.barrier(1, arrivals=2)
    k_full, v_full, clean, shared = jt.barrier(1), jt.barrier(1), jt.barrier(1, arrivals=2), jt.barrier(1, arrivals=2)
    q_full, g_full = jt.barrier(2), jt.barrier(2)
    q_empty, g_empty = jt.barrier(2, arrivals=2), jt.barrier(2, arrivals=2)

    def half(w):  # the keys of a role
        return slice(w * KEYS, (w + 1) * KEYS)

    def of_keys(w, j):
        return (2 * j + w) * KEYS + jt.arange(KEYS)[:, None]

    def rows(starts):  # numbers of queries, repeated in every key's row
        return jnp.broadcast_to(starts.load()[None, :], (KEYS, bq))

    def first(slot):  # what the sums of products start from
        return [rows(S0[slot])] if masks.score is None else []

    def bounds(j):  # of loops over blocks of queries, and what masks are to know: see `seen`
        if listed:
            whole, end = (masks.count(b, kv, j, n) for n in range(2))
            whole = jnp.where((j + 1) * 2 * KEYS > keys, 0, whole) if hangs else whole
            return keys, 0, jnp.int32(0), whole, end, end
        length = jnp.minimum(lengths[b], keys) if counted else keys
        offset = offsets[b] if counted else 0
        return length, offset, *query_blocks(j * 2 * KEYS, 2 * KEYS, bq, t, offset, length, window)

    def at(j, n):  # the block of queries of round n
        return masks.block(b, kv, j, n) if listed else n

    def zero_behind(j, length, w):  # keys and values behind it may hold anything, NaN too
        if (j + 1) * 2 * KEYS > length:
            for tile in (K, V):
                tile[half(w)].store(jnp.where(of_keys(w, j) < length, tile[half(w)].load(), jnp.zeros((), dtype)))
            jt.fence_shared()
            clean[0].arrive()
            clean[0].wait(0)

    def seen(w, j, n, i, p, length, offset, inner_lo, inner_hi):  # p without the keys that a query does not see
        if listed:
            if n >= inner_lo:
                queries, columns = i * bq + jt.arange(bq)[None, :], of_keys(w, j)
                p = jnp.where(masks.seen(b, kv, queries, columns, keys, hangs), p, 0.0)
            return p
        if i < inner_lo if window[0] is None else (i < inner_lo) | (i >= inner_hi):
            queries = offset + i * bq + jt.arange(bq)[None, :]
            p = jnp.where(visible(queries, of_keys(w, j), length, window), p, 0.0)
        return p

    def product_of_dq(h, w, rounds):  # by the keys of role h, half w of dq: of its columns, or, of short heads, queries
        ds, k_h, part = DS[(rounds & 1) * 2 + h], K[half(h)], slice(w * 64, w * 64 + 64)
        return (ds.T, k_h[:, part]) if d == 128 else (ds[:, part].T, k_h)

    def keep(w, j, i, seed):
        return dropouts.kept(
            seed, dropouts.places(i * bq, bq, 1), dropouts.places((2 * j + w) * KEYS, KEYS, 0), dropout
        )

    def weights(w, j, head, i, s, slot):  # p, and how much a score changes with its product, None for the scale itself
        if masks.score is None:
            return jnp.exp2(s * (scale * LOG2_E)), None
        queries, columns = i * bq + jt.arange(bq)[None, :], of_keys(w, j)
        s, gradient = masks.scored(s * scale, b, kv * group + head, queries, columns)
        return jnp.exp2(s * LOG2_E + rows(S0[slot])), gradient

    def step(w, j, rounds, head, n, s, dk_j, dv_j, edges, seed):
        """A round of role w: its n-th query block, of a head of the group; s: its products, finished. Gives those of
        the next round too."""
        slot, i = rounds & 1, at(j, n)
        g_full.at(rounds).wait()
        dp = jt.dot_async(V[half(w)], G[slot].T, *([] if seed else [rows(DP0[slot])]))
        p, gradient = weights(w, j, head, i, s, slot)
        p = seen(w, j, n, i, p, *edges) if masked else p
        if seed:  # both at once: registers do not hold p, with and without what is dropped, beside dp
            stays, dp = keep(w, j, i, seed), jt.dot_wait(dp, pending=0)
            ds = (_times(p, gradient) * (jnp.where(stays, dp, 0.0) + rows(DP0[slot]))).astype(dtype)
            dv_j = jt.dot_async(jnp.where(stays, p, 0.0).astype(dtype), G[slot], dv_j)
        else:
            dv_j = jt.dot_async(p.astype(dtype), G[slot], dv_j)
            ds = (_times(p, gradient) * jt.dot_wait(dp, pending=1)).astype(dtype)
        dk_j = jt.dot_async(ds, Q[slot], dk_j)
        DS[slot * 2 + w].store(ds)
        jt.fence_shared()
        shared[0].arrive()
        dv_j = jt.dot_wait(dv_j, pending=1)
        g_empty[slot].arrive()
        dq_i = jt.dot_async(*product_of_dq(w, w, rounds))
        shared[0].wait(slot)
        dq_i = jt.dot_async(*product_of_dq(1 - w, w, rounds), dq_i)
        dk_j = jt.dot_wait(dk_j, pending=2)
        q_empty[slot].arrive()
        q_full.at(rounds + 1).wait()
        s = jt.dot_async(K[half(w)], Q[slot ^ 1].T, *first(slot ^ 1))
        dq_i = jt.dot_wait(dq_i, pending=1)
        jt.store_wait(0)
        DQ[w].store(dq_i)
        jt.fence_shared()
        jt.role_barrier()
        row, column = (i, w) if d == 128 else (2 * i + w, 0)
        jt.async_copy(DQ[w], dq.tiles(None, 64, None, None, 64).at[b, row, kv, head, column], fn="add")
        return jt.dot_wait(s, pending=0), dk_j, dv_j

    def give(w, j, sums, out):
        jt.store_wait(0)
        OUT[w].store(sums.astype(out.dtype))
        jt.fence_shared()
        jt.role_barrier()
        jt.async_copy(OUT[w], out.tiles(None, KEYS, None, d).at[b, 2 * j + w, kv, 0])

    for w in range(2):
        with jt.role(f"keys_{w}", warps=4, registers=240):
            rounds = jnp.int32(0)
            for x in range(several):
                j = block + x
                length, offset, lo, inner_lo, inner_hi, hi = bounds(j)
                dk_j, dv_j = jt.zeros((KEYS, d), jnp.float32), jt.zeros((KEYS, d), jnp.float32)
                k_full[0].wait(x & 1)
                if counted:
                    v_full[0].wait(0)
                    zero_behind(j, length, w)
                if x == 0:  # those of the next block of keys have been waited for
                    q_full[0].wait(0)
                s = jt.dot_async(K[half(w)], Q.at(rounds).T, *first(rounds & 1))
                s = jt.dot_wait(s, pending=0)
                v_full[0].wait(x & 1)
                for head in jt.range(group):
                    seed = (seeds[b, kv, head, 0], seeds[b, kv, head, 1]) if dropout else None
                    edges = length, offset, inner_lo, inner_hi
                    for n in jt.range(lo, hi):
                        s, dk_j, dv_j = step(w, j, rounds, head, n, s, dk_j, dv_j, edges, seed)
                        rounds = rounds + 1
                if x + 1 < several:
                    k_empty[0].arrive()
                    v_empty[0].arrive()
                give(w, j, dv_j * factor if dropout else dv_j, dv)
                give(w, j, dk_j * (scale * factor), dk)
            jt.store_wait(0)

    def fetch(rounds, head, i, array, ring, start, starts, full, empty):
        empty.at(rounds).wait(before=True)
        full.at(rounds).expect(ring.nbytes + starts.nbytes)
        jt.async_copy(array.tiles(None, bq, None, None, d).at[b, i, kv, head, 0], ring.at(rounds), full.at(rounds))
        jt.async_copy(start.tiles(None, None, None, bq).at[b, kv, head, i], starts.at(rounds), full.at(rounds))

    def fetch_keys(x, j, array, buffer, full, empty):
        if x:
            empty[0].wait((x - 1) & 1)
        full[0].expect(buffer.nbytes)
        jt.async_copy(array.tiles(None, 2 * KEYS, None, d).at[b, j, kv, 0], buffer, full[0])

    with jt.role("copies", warps=1, registers=24):
        rounds = jnp.int32(0)
        for x in range(several):
            j = block + x
            length, offset, lo, inner_lo, inner_hi, hi = bounds(j)
            behind = at(j, lo) if x + 1 == several else bounds(j + 1)[2]
            fetch_keys(x, j, k, K, k_full, k_empty)
            if x == 0:
                fetch(rounds, 0, at(j, lo), q, Q, s0, S0, q_full, q_empty)
            fetch_keys(x, j, v, V, v_full, v_empty)
            for head in jt.range(group):
                for n in jt.range(lo, hi):
                    fetch(rounds, head, at(j, n), g, G, dp0, DP0, g_full, g_empty)
                    # Behind the last round comes the first of the next block of keys; behind those of the last block
                    # one more block of queries is multiplied, which nobody uses.
                    rounds, end, over = rounds + 1, n + 1 >= hi, head + 1 >= group
                    heads = jnp.where(end, jnp.where(over, 0, head + 1), head)
                    then = at(j, jnp.where(end, lo, n + 1))
                    fetch(rounds, heads, jnp.where(end & over, behind, then), q, Q, s0, S0, q_full, q_empty)


def misfit(q, k, *_, softcap: float | None, scale: float, **__) -> str | None:
    """Why `gradients` cannot compute the gradients of this call, None where it can."""
    known = all(isinstance(n, int) for n in (*q.shape, *k.shape))
    return first_unmet(
        (known, "sizes are not known"),
        (32 < q.shape[3] <= 128, f"heads have {q.shape[3]} features, not 33 to 128"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"operands are {q.dtype.name}, not 16-bit floats"),
        (softcap is None, "scores are capped"),
        (scale > 0, f"the scale is {scale}"),
    )


def gradients(
    q, k, v, o, lse, g, ct, lengths, offsets, seeds=None,
    *, scale: float, softcap: None, window: Window, dropout: float = 0.0,
):  # fmt: skip
    """(dq, dk, dv) for the cotangents g of o and ct of lse (or None); arguments as those of `attention_backward`."""
    del softcap
    return _of_rows(scale, window, dropout)(q, k, v, o, lse, g, ct, lengths, offsets, seeds)


@functools.lru_cache(maxsize=128)
def _of_rows(scale: float, window: Window, dropout: float):
    """A function that computes gradients by `hopper_attention_backward`. Batches of vmap become rows: a tensor map has
    five axes, and all are in use."""

    @jax.custom_batching.custom_vmap
    def run(*args):
        return of_batch(*args, scale=scale, window=window, dropout=dropout)

    @run.def_vmap
    def _(size: int, batched, *args):
        def fold(x, there):
            x = x if there else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        out = run(*jax.tree.map(fold, args, tuple(batched)))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True, True, True)

    return run


def _several(rows: int, t: int, keys: int, window: Window, counted: bool) -> int:
    """How many blocks of keys a program takes, one behind the other, of all `rows` of all heads of keys: two where some
    queries see each block, and programs remain for some turns of all multiprocessors. The keys of the second come while
    the gradients of the first leave."""
    blocks, at_once = jt.cdiv(keys, 2 * KEYS), gpu_tiles.processors()
    seen = t >= keys and (window[0] is None or window[0] >= 0) and window[1] in (None, 0)
    turns = lambda count: count * jt.cdiv(rows * blocks // count, at_once)
    many = rows * blocks >= 2 * TURNS * at_once and (window[1] is not None or turns(2) <= turns(1))
    return 2 if seen and many and not counted and blocks % 2 == 0 else 1


def operands(q, k, v, o, lse, g, ct, seeds, *, unit: float, dropout: float):
    """(q, k, v, g, s0, dp0, seeds, zeros) as the kernels take them, and the queries of a block. Heads are extended to
    the next power of two, since zeros add nothing; `unit`: see `attention_backward_start`."""
    (batch, t, heads, d), groups = q.shape, k.shape[2]
    whole = hopper_tiles.head(d)
    if d != whole:
        q, k, v, o, g = (jnp.pad(x, ((0, 0),) * 3 + ((0, whole - d),)) for x in (q, k, v, o, g))
    bq = 64 if whole == 128 else 128
    start = tuned(attention_backward_start, num_warps=8)
    s0, dp0, zeros = start(o, g, lse, ct, n=bq, unit=unit, factor=dropouts.factor(dropout))
    seeds = jnp.zeros((batch, heads, 2), jnp.uint32) if seeds is None else seeds
    of_group = lambda x: x.reshape(batch, t, groups, heads // groups, whole)
    s0, dp0, seeds = (x.reshape(batch, groups, heads // groups, -1) for x in (s0, dp0, seeds))
    return (of_group(q), k, v, of_group(g), s0, dp0, seeds, of_group(zeros)), bq


def finished(dq, dk, dv, q, *, scale: float, dropout: float):
    """The gradients of q [batch, t, heads, d], whose heads the kernels may have extended, of its keys and values."""
    (batch, t, heads, d), whole = q.shape, dk.shape[3]
    dq = (dq.reshape(batch, t, heads, whole) * (scale * dropouts.factor(dropout))).astype(q.dtype)
    return tuple(x if d == whole else x[..., :d] for x in (dq, dk, dv))


def of_batch(
    q, k, v, o, lse, g, ct, lengths, offsets, seeds=None, *, scale: float, window: Window, dropout: float = 0.0
):
    """The result of `gradients` by `hopper_attention_backward`, without a rule for vmap."""
    (batch, t), (keys, groups) = q.shape[:2], k.shape[1:3]
    given, bq = operands(q, k, v, o, lse, g, ct, seeds, unit=scale * LOG2_E, dropout=dropout)
    *args, seeds, zeros = given
    counted = lengths is not None or offsets is not None
    lengths = jnp.full((batch,), keys, jnp.int32) if lengths is None else lengths
    offsets = jnp.zeros((batch,), jnp.int32) if offsets is None else offsets
    several = _several(batch * groups, t, keys, window, counted)
    options = {"bq": bq, "scale": scale, "window": window, "counted": counted, "dropout": dropout, "several": several}
    found = hopper_attention_backward(*args, lengths, offsets, seeds, zeros, **options)
    return finished(*found, q, scale=scale, dropout=dropout)
