"""Attention over tokens that are cut over devices: keys and values travel round a ring (Liu et al. 2023).

In step s a device works on the keys of the device s places before it, and its programs push them on to the next one
first: what arrives there while it works goes to the other of two buffers. Softmaxes go on from step to step by their
running maxima and sums. Backwards, the gradients of keys and values travel along with them, and after a whole round
come home.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import exchanged_ring
from jtile.ops._shapes import check_rank, fit, machine, sums_in
from jtile.ops.attention_windows import LOG2_E, Window, at_edge, blocks, query_blocks, scores, visible, weights
from jtile.ops.collective_parts import varying_together
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op
from jtile.ops.flash_attention import attention, check_operands, check_softcap, window_of
from jtile.ops.online_softmax import NOTHING, log_sums, normalised, online

PROGRAMS = 4  # programs on a CPU, where each is a thread


def zigzag_order(tokens: int, devices: int) -> np.ndarray:
    """The order in which tokens are cut over devices so that causal attention is as much work on each: of twice as many
    chunks as devices, device r has chunks r and 2 devices - 1 - r.

    `x[:, zigzag_order(tokens, devices)]` brings tokens into this order, `np.argsort` of it brings them back.

    Args:
      tokens: a multiple of 2 devices.
    Returns:
      int32 [tokens].
    Raises:
      KernelValueError: tokens that do not divide into two equal chunks a device.
    """
    if devices < 1 or tokens % (2 * devices):
        raise KernelValueError(f"zigzag_order: {tokens} tokens are no two equal chunks for each of {devices} devices")
    chunks = np.arange(tokens, dtype=np.int32).reshape(2 * devices, -1)
    return np.concatenate([chunks[[r, 2 * devices - 1 - r]].reshape(-1) for r in range(devices)])


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis: str,
    *,
    causal: bool = False,
    zigzag: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`attention` over the tokens of all devices along an axis, each of which has as many of them. Differentiable.

    Args:
      q: float array [batch, t, heads, d], this device's queries.
      k, v: float arrays [batch, t, kv_heads, d] of q's dtype, its keys and values; kv_heads divides heads.
      axis: an axis of the mesh.
      causal, window, scale, softcap: see `attention`.
      zigzag: tokens stand in the order of `zigzag_order`, by which causal attention is as much work on each device;
        without, device r has the r-th part of them.
    Returns:
      An array like `q`, computed in float32 (float64 for float64).
    Raises:
      KernelTypeError, KernelValueError: dtypes, shapes or options that do not fit, no such axis, or outside of
      `shard_map`.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    check_rank("ring_attention", "q", q, 4, "[batch, t, heads, d]")
    check_operands("ring_attention", q, k, v)
    check_softcap("ring_attention", softcap)
    bounds = window_of("ring_attention", window, causal)
    t, d = q.shape[1], q.shape[3]
    if k.shape[1] != t:
        raise KernelValueError(f"ring_attention: a device has as many keys as queries, got {k.shape[1]} and {t}")
    if zigzag and t % 2:
        raise KernelValueError(f"ring_attention: in zigzag order a device has two equal chunks, got {t} tokens")
    scale, n = d**-0.5 if scale is None else float(scale), jt.axis_size(axis)
    if n == 1 or 0 in (q.size, k.size):
        return attention(q, k, v, causal=causal, window=window, scale=scale, softcap=softcap)
    return _ring(axis, scale, softcap, bounds, zigzag, *varying_together(axis, q, k, v))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _ring(axis: str, scale: float, softcap: float | None, window: Window, zigzag: bool, q, k, v):
    return _forward(axis, scale, softcap, window, zigzag, q, k, v)[0]


def _forward(axis, scale, softcap, window, zigzag, q, k, v):
    o, lse = _forwards(q, k, v, axis=axis, scale=scale, softcap=softcap, window=window, zigzag=zigzag)
    return o, (q, k, v, o, lse)


def _backward(axis, scale, softcap, window, zigzag, residuals, g):
    options = {"scale": scale, "softcap": softcap, "window": window, "zigzag": zigzag}
    return _backwards(*residuals, g, axis=axis, **options)


_ring.defvjp(_forward, _backward)


def _chunks(zigzag: bool, *arrays):
    """Arrays [batch, tokens, ...] as [batch, chunks, tokens of a chunk, ...]."""
    u = 1 + zigzag
    return [x.reshape(x.shape[0], u, x.shape[1] // u, *x.shape[2:]) for x in arrays]


def _forward_in_one_kernel(q, k, v, *, zigzag: bool, **options):
    """(o like q, lse [batch, heads, t]) by one kernel, whose programs pass keys on."""
    chunks = _chunks(zigzag, q, k, v)
    o, lse, *_ = ring_forward(*chunks, **options, **_tiles(chunks[0]))
    return o.reshape(q.shape), lse.reshape(*lse.shape[:2], -1)


def _backward_in_one_kernel(q, k, v, o, lse, g, *, zigzag: bool, **options):
    wide = lse.dtype
    delta = (o.astype(wide) * g.astype(wide)).sum(-1).swapaxes(1, 2)
    chunks = _chunks(zigzag, q, k, v, g)
    sums = [x.reshape(*x.shape[:2], 1 + zigzag, -1) for x in (lse, delta)]
    found = ring_backward(*chunks, *sums, **options, **_tiles(chunks[0]))
    return tuple(x.astype(q.dtype).reshape(y.shape) for x, y in zip(found, (q, k, v)))


def _op(name: str, steps, kernel) -> Op:
    return Op(
        name,
        Implementation("attention beside copies", steps, exchanged_ring.misfit, BLOCK_LEVEL),
        Implementation("one kernel", kernel),
    )


_forwards = _op("ring attention", exchanged_ring.forward, _forward_in_one_kernel)
_backwards = _op("ring attention backward", exchanged_ring.backward, _backward_in_one_kernel)


def _tiles(q) -> dict[str, int]:
    """Queries and keys of a tile, and the number of programs."""
    b, u, c, h, _ = q.shape
    bq, bk = (fit(c, 128), fit(c, 256)) if machine().whole else (min(64, jt.next_power_of_2(c)),) * 2
    programs = PROGRAMS if machine().whole else machine().programs // 8
    return {"bq": bq, "bk": bk, "programs": min(programs, b * u * h * jt.cdiv(c, bq))}


def _chunk(device, u, n: int, chunks: int):
    """The place of chunk u of a device among the chunks of all devices."""
    return device if chunks == 1 else jnp.where(u == 0, device, 2 * n - 1 - device)


def _places(t, *sizes: int):
    """The indices in a row-major array of these sizes of its element t, the first of any size."""
    found = []
    for size in reversed(sizes):
        found.append(jax.lax.rem(t, jnp.int32(size)))
        t = jax.lax.div(t, jnp.int32(size))
    return t, *reversed(found)


def _keys(q, k, *_, axis: str, **__):
    """Two buffers for keys and values; signals that all programs have sent a step's, and that its buffer is free."""
    steps = jt.axis_size(axis) + 1
    return [jt.symmetric((2, 2, *k.shape), k.dtype), jt.signals(steps), jt.signals(steps)]


@jt.function
def _begin(k, v, box, came, bk: int):
    """Step 0 begins with this device's own keys and values in the first buffer."""
    me = jt.program_id(0)
    K, V, B = (x.tiles(*(None,) * (len(x.shape) - 3), bk, None, x.shape[-1]) for x in (k, v, box))
    chunks, blocks_of, heads = k.shape[1], K.shape[2], k.shape[3]
    for t in jt.range(me, k.shape[0] * chunks * blocks_of * heads, jt.num_programs(0)):
        b, w, j, g = _places(t, chunks, blocks_of, heads)
        B[0, 0, b, w, j, g, 0] = K[b, w, j, g, 0]
        B[0, 1, b, w, j, g, 0] = V[b, w, j, g, 0]
    jt.signal(came[0])


@jt.function
def _pass_on(s, n: int, last: int, box, came, free, axis: str, bk: int):
    """Wait for the keys of step s, and push this program's share of them into the other buffer of the next device, as
    soon as that is free. `last`: a step behind it, whose free buffer is waited for too."""
    me, programs = jt.axis_index(axis), jt.num_programs(0)
    there = (me + 1) % n
    jt.wait(came[s], programs)
    if (s > 0) & (s + 1 < last):
        jt.wait(free[s + 1], programs)
    if s + 1 < n:
        to = box.on(axis, there)
        A, B = (x.tiles(None, None, None, None, bk, None, x.shape[-1]) for x in (box, to))
        chunks, blocks_of, heads = box.shape[3], A.shape[4], box.shape[5]
        for t in jt.range(jt.program_id(0), 2 * box.shape[2] * chunks * blocks_of * heads, programs):
            b, x, w, j, g = _places(t, 2, chunks, blocks_of, heads)
            B[(s + 1) % 2, x, b, w, j, g, 0] = A[s % 2, x, b, w, j, g, 0]
        jt.signal(came.on(axis, there)[s + 1])


@jt.function
def _release(s, n: int, last: int, free, axis: str):
    """This program has done with the buffer of step s: the device before may fill it for step s + 2."""
    if s + 2 < last:
        jt.signal(free.on(axis, (jt.axis_index(axis) + n - 1) % n)[s + 2])


def _types(q, *_, **__):
    b, u, c, h, d = q.shape
    wide = lambda *shape: jax.ShapeDtypeStruct(shape, sums_in(q))
    return jt.like(q), wide(b, h, u, c), wide(b, h, u, c), wide(b, h, u, c, d)


@jt.kernel(out_type=_types, grid=lambda q, *_, programs, **__: programs, scratch=_keys)
def ring_forward(
    q, k, v, o, lse, m_run, acc_run, box, came, free,
    *, axis: str, bq: int, bk: int, programs: int, scale: float, softcap: float | None, window: Window,
):  # fmt: skip
    """q, o [batch, chunks, c, heads, d]; k, v [batch, chunks, c, kv heads, d]; lse [batch, heads, chunks, c], the
    log-sum-exp of scores in powers of two. m_run, acc_run: maxima and weighted values that go on from step to step;
    lse holds the sums so far.
    """
    # The formulas are those of flash_attention, for the keys of one device after another.
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    (batch, chunks, c, heads, d), group, wide = q.shape, q.shape[3] // k.shape[3], lse.dtype
    Q, O = (x.tiles(None, None, bq, None, d) for x in (q, o))
    B = box.tiles(None, None, None, None, bk, None, d)
    M, L, ACC = (
        m_run.tiles(None, None, None, bq),
        lse.tiles(None, None, None, bq),
        acc_run.tiles(None, None, None, bq, d),
    )
    count = batch * heads * chunks * Q.shape[2]
    _begin(k, v, box, came, bk)
    for s in jt.range(n):
        _pass_on(s, n, n, box, came, free, axis, bk)
        device = (me + n - s) % n
        for t in jt.range(jt.program_id(0), count, programs):
            b, h, u, i = _places(t, heads, chunks, Q.shape[2])
            q_i, kv = Q[b, u, i, h, 0], jax.lax.div(h, jnp.int32(group))
            m, l, acc = jt.full((bq,), NOTHING, wide), jt.zeros((bq,), wide), jt.zeros((bq, d), wide)
            if s > 0:
                m, l, acc = M[b, h, u, i], L[b, h, u, i], ACC[b, h, u, i, 0]
            for w in jt.range(chunks):
                first = (_chunk(me, u, n, chunks) - _chunk(device, w, n, chunks)) * c + i * bq
                rows = first + jt.arange(bq)[:, None]
                lo, inner_lo, inner_hi, hi = blocks(first, bq, bk, c, window)

                def step(j, m, l, acc, edge: bool, s=s, b=b, w=w, kv=kv, q_i=q_i, rows=rows):
                    x = scores(jt.dot(q_i, B[s % 2, 0, b, w, j, kv, 0].T), _unit(scale, softcap), softcap)
                    v_j = B[s % 2, 1, b, w, j, kv, 0]
                    if edge:
                        x, v_j = at_edge(x, v_j, j * bk, rows, c, window, cut=False)
                    return online(x, v_j, m, l, acc)

                if window[0] is not None:
                    for j in jt.range(lo, inner_lo):
                        m, l, acc = step(j, m, l, acc, edge=True)
                for j in jt.range(inner_lo, inner_hi, stages=2):
                    m, l, acc = step(j, m, l, acc, edge=False)
                for j in jt.range(inner_hi, hi):
                    m, l, acc = step(j, m, l, acc, edge=True)
            M[b, h, u, i], ACC[b, h, u, i, 0] = m, acc
            if s + 1 < n:
                L[b, h, u, i] = l
            else:
                O[b, u, i, h, 0] = normalised(acc, l).astype(o.dtype)
                L[b, h, u, i] = log_sums(m, l)
        _release(s, n, n, free, axis)


def _unit(scale: float, softcap: float | None) -> float:
    return scale if softcap is not None else scale * LOG2_E


def _gradients(q, k, *_, axis: str, programs: int, **__):
    """The memory of `_keys`, and two buffers for gradients that travel along, with a signal of each program for each
    step."""
    n = jt.axis_size(axis)
    return [*_keys(q, k, axis=axis), jt.symmetric((2, 2, *k.shape), sums_in(q)), jt.signals((n + 1, programs))]


@jt.kernel(
    out_type=lambda q, k, v, *_, **__: tuple(jt.like(x, dtype=sums_in(q)) for x in (q, k, v)),
    grid=lambda q, *_, programs, **__: programs,
    scratch=_gradients,
)
def ring_backward(
    q, k, v, g, lse, delta, dq, dk, dv, box, came, free, gradients, back,
    *, axis: str, bq: int, bk: int, programs: int, scale: float, softcap: float | None, window: Window,
):  # fmt: skip
    """q, g, dq [batch, chunks, c, heads, d]; k, v, dk, dv [batch, chunks, c, kv heads, d]; lse (in powers of two),
    delta [batch, heads, chunks, c]. A program has the same blocks of keys in every step, on every device."""
    # p_ij = 2^(s_ij - lse_i)   dv_j = sum_i p_ij g_i   ds_ij = p_ij (g_i . v_j - delta_i) s'_ij
    # dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    (batch, chunks, c, heads, d), groups = q.shape, k.shape[3]
    group = heads // groups
    Q, G, DQ = (x.tiles(None, None, bq, None, d) for x in (q, g, dq))
    DK, DV = (x.tiles(None, None, bk, None, d) for x in (dk, dv))
    L, D = (x.tiles(None, None, None, bq) for x in (lse, delta))
    there = (me + 1) % n
    B, MINE, NEXT = (x.tiles(None, None, None, None, bk, None, d) for x in (box, gradients, gradients.on(axis, there)))
    queries, keys = batch * heads * chunks * Q.shape[2], batch * chunks * groups * DK.shape[2]
    between = lambda device, u, w: (_chunk(me, u, n, chunks) - _chunk(device, w, n, chunks)) * c

    def pair(s, b, h, u, i, w, j, rows_from):
        """(p, ds, q_i, g_i, k_j) of a block of queries and one of keys; p and ds are [bq, bk]."""
        q_i, g_i, kv = Q[b, u, i, h, 0], G[b, u, i, h, 0], jax.lax.div(h, jnp.int32(group))
        k_j, v_j = B[s % 2, 0, b, w, j, kv, 0], B[s % 2, 1, b, w, j, kv, 0]
        x, capped = weights(jt.dot(q_i, k_j.T), L[b, h, u, i][:, None], scale, softcap)
        dp = jt.dot(g_i, v_j.T) - D[b, h, u, i][:, None]
        seen = visible(rows_from + i * bq + jt.arange(bq)[:, None], j * bk + jt.arange(bk)[None, :], c, window)
        x = jnp.where(seen, x, 0.0)
        ds = x * (dp if capped is None else dp * capped)
        return x.astype(q.dtype), jnp.where(seen, ds, 0.0).astype(q.dtype), q_i, g_i, k_j

    _begin(k, v, box, came, bk)
    for s in jt.range(n):
        _pass_on(s, n, n + 1, box, came, free, axis, bk)
        device = (me + n - s) % n
        for t in jt.range(p, queries, programs):
            b, h, u, i = _places(t, heads, chunks, Q.shape[2])
            acc = jt.zeros((bq, d), lse.dtype)
            if s > 0:
                acc = DQ[b, u, i, h, 0]
            for w in jt.range(chunks):
                rows_from = between(device, u, w)
                lo, _, _, hi = blocks(rows_from + i * bq, bq, bk, c, window)
                for j in jt.range(lo, hi):
                    _, ds, _, _, k_j = pair(s, b, h, u, i, w, j, rows_from)
                    acc = jt.dot((ds * scale).astype(q.dtype), k_j, acc)
            DQ[b, u, i, h, 0] = acc
        if s > 0:
            jt.wait(back[s, p])
        for t in jt.range(p, keys, programs):
            b, w, g_, j = _places(t, chunks, groups, DK.shape[2])
            dk_j, dv_j = jt.zeros((bk, d), lse.dtype), jt.zeros((bk, d), lse.dtype)
            if s > 0:
                dk_j, dv_j = MINE[s % 2, 0, b, w, j, g_, 0], MINE[s % 2, 1, b, w, j, g_, 0]
            for u in jt.range(chunks):
                rows_from = between(device, u, w)
                lo, _, _, hi = query_blocks(j * bk, bk, bq, c, rows_from, c, window)
                for member in jt.range(group):
                    for i in jt.range(lo, hi):
                        x, ds, q_i, g_i, _ = pair(s, b, g_ * group + member, u, i, w, j, rows_from)
                        dk_j, dv_j = jt.dot((ds * scale).astype(q.dtype).T, q_i, dk_j), jt.dot(x.T, g_i, dv_j)
            NEXT[(s + 1) % 2, 0, b, w, j, g_, 0] = dk_j
            NEXT[(s + 1) % 2, 1, b, w, j, g_, 0] = dv_j
        jt.signal(back.on(axis, there)[s + 1, p])
        _release(s, n, n + 1, free, axis)
    jt.wait(back[n, p])
    for t in jt.range(p, keys, programs):
        b, w, g_, j = _places(t, chunks, groups, DK.shape[2])
        DK[b, w, j, g_, 0] = MINE[n % 2, 0, b, w, j, g_, 0]
        DV[b, w, j, g_, 0] = MINE[n % 2, 1, b, w, j, g_, 0]


def ring_attention_reference(q, k, v, axis, *, causal=False, zigzag=False, window=None, scale=None, softcap=None):
    """`ring_attention` by XLA: each device gets the keys and values of all, and computes the whole matrix of scores.
    Arguments and result are those of `ring_attention`.
    """
    left, right = window_of("ring_attention", window, causal)
    (batch, t, heads, d), groups, n = q.shape, k.shape[2], jt.axis_size(axis)
    k, v = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
    order = zigzag_order(n * t, n) if zigzag else np.arange(n * t, dtype=np.int32)
    columns = jnp.asarray(order)[None, :]
    rows = jnp.asarray(order).reshape(n, t)[jax.lax.axis_index(axis)][:, None]
    seen = jnp.ones((t, n * t), bool)
    seen = seen if right is None else seen & (columns <= rows + right)
    seen = seen if left is None else seen & (columns >= rows - left)
    wide = sums_in(q)
    grouped = q.reshape(batch, t, groups, heads // groups, d).astype(wide)
    x = jnp.einsum("btghd,bsgd->bghts", grouped, k.astype(wide), precision="highest")
    x = x * (d**-0.5 if scale is None else scale)
    x = x if softcap is None else softcap * jnp.tanh(x / softcap)
    p = jax.nn.softmax(jnp.where(seen[None, None, None], x, -jnp.inf), -1)
    o = jnp.einsum("bghts,bsgd->btghd", p, v.astype(wide), precision="highest")
    return o.reshape(q.shape).astype(q.dtype)
