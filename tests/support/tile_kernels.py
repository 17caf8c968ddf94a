"""Kernels of the library at tile level, for any shape and tile, as Tile IR after the target-independent passes."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
from machines import machine

import jtile as jt
from jtile.interpret import interpret
from jtile.ir import Kernel
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.ops.attention_windows import Window

_products = importlib.import_module("jtile.ops.matmul")
_attention = importlib.import_module("jtile.ops.flash_attention")
_gates = importlib.import_module("jtile.ops.gated_mlp")
_MATMUL = jt.kernel(out_type=_products._out_type, grid=_products._grid, name="matmul")(_products._tile)
_ATTENTION = jt.kernel(out_type=_attention._types, grid=_attention._grid, name="attention")(
    _attention.flash_attention._fn
)
_GROUPS = importlib.import_module("jtile.ops.grouped_matmul").grouped_rows[False]
_SCALES = importlib.import_module("jtile.ops.scaled_matmul").scaled_products
_GROUPED = jt.kernel(out_type=_GROUPS._spec.out_type, grid=_GROUPS._spec.grid, name="grouped")(_GROUPS._fn)
_SCALED = jt.kernel(out_type=_SCALES._spec.out_type, grid=_SCALES._spec.grid, name="scaled")(_SCALES._fn)
_GATED = jt.kernel(out_type=_gates._types, grid=_gates._grid, name="gated")(_gates._tile)


def matmul(
    m: int, n: int, k: int, *, tile=(128, 128, 32), dtype=jnp.bfloat16, ta=False, tb=False, batch=1, bias=False,
    activation=None, save=False, out="bfloat16",
) -> Kernel:  # fmt: skip
    bm, bn, bk = tile
    a = jax.ShapeDtypeStruct((batch, k, m) if ta else (batch, m, k), dtype)
    b = jax.ShapeDtypeStruct((batch, n, k) if tb else (batch, k, n), dtype)
    extra = jax.ShapeDtypeStruct((1, n), dtype) if bias else None
    meta = {"activation": activation, "ta": ta, "tb": tb, "out_dtype": out, "bm": bm, "bn": bn, "bk": bk, "save": save}
    return _MATMUL.lower(a, b, extra, **meta).kernel


def attention(
    queries: int, keys: int, *, tile=(128, 64), d=64, batch=1, heads=2, groups=1, window: Window = (None, None),
    lengths=False, save=False, softcap=None, dtype=jnp.bfloat16,
) -> Kernel:  # fmt: skip
    q = jax.ShapeDtypeStruct((batch, queries, heads, d), dtype)
    kv = jax.ShapeDtypeStruct((batch, keys, groups, d), dtype)
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32) if lengths else None
    meta = {"bq": tile[0], "bk": tile[1], "scale": d**-0.5, "softcap": softcap, "window": window, "save": save}
    return _ATTENTION.lower(q, kv, kv, rows, None, None, **meta).kernel


def gated(m: int, n: int, k: int, *, tile=(128, 64, 32), tb=False, save=False) -> Kernel:
    bm, bn, bk = tile
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (n, k) if tb else (k, n)))
    return _GATED.lower(x, w, w, activation="silu", tb=tb, bm=bm, bn=bn, bk=bk, save=save).kernel


def operands(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    """Normal floats, and small integers."""
    rng = np.random.default_rng(seed)
    draw = {"i": lambda s: rng.integers(-8, 8, s), "u": lambda s: rng.integers(0, 8, s)}
    return [
        np.asarray(draw.get(v.type.info.kind, lambda s: rng.standard_normal(s).astype(np.float32))(v.shape)).astype(
            v.type.info.numpy
        )
        for v in kernel.inputs
    ]


def block_level(kernel: Kernel, processors: int, **options) -> Kernel:
    """The block-level kernel of a plan for so many processors, which gives what the kernel gives."""
    planned = steps(kernel, machine(processors=processors), options)
    assert not isinstance(planned, NoPlan), str(planned)
    inputs = operands(kernel)
    want = interpret(kernel, inputs)
    for seed in range(2):
        for w, g in zip(want, interpret(planned.kernel, inputs, seed=seed), strict=True):
            np.testing.assert_array_equal(g, w)
    return planned.kernel


def grouped(rows: int, groups: int, n: int, k: int, *, tile=(128, 64, 32), tw=False) -> Kernel:
    bm, bn, bk = tile
    x, w = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16), (groups, n, k) if tw else (groups, k, n)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    meta = {"out_dtype": "bfloat16", "tw": tw, "bm": bm, "bn": bn, "bk": bk}
    return _GROUPED.lower(x, jax.ShapeDtypeStruct(w, jnp.bfloat16), sizes, **meta).kernel


def scaled(m: int, n: int, k: int, *, tile=(128, 128, 128)) -> Kernel:
    bm, bn, bk = tile
    a, b = (jax.ShapeDtypeStruct(s, jnp.float8_e4m3fn) for s in ((m, k), (n, k)))
    parts = -(-k // 128)
    sa, sb = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((parts, m), (-(-n // 128), parts)))
    meta = {"tb": True, "out_dtype": "bfloat16", "block": 128, "bm": bm, "bn": bn, "bk": bk}
    return _SCALED.lower(a, b, sa, sb, **meta).kernel


@jt.kernel(out_type=lambda q, *_: jt.like(q), grid=lambda q, *_: (jt.cdiv(q.shape[0], 128),))
def _plain_attention(q, k, v, o):
    i, d = jt.program_id(0), q.shape[1]
    Q, K, V, O = q.tiles(128, d), k.tiles(64, d), v.tiles(64, d), o.tiles(128, d)
    top, total = jnp.full((128,), -jnp.inf, jnp.float32), jnp.zeros((128,), jnp.float32)
    acc, x = jnp.zeros((128, d), jnp.float32), Q[i, 0]
    for j in jt.range(K.shape[0], stages=2):
        s = jt.dot(x, K[j, 0].T) * d**-0.5
        most = jnp.maximum(top, s.max(1))
        p, fade = jnp.exp(s - most[:, None]), jnp.exp(top - most)
        total = total * fade + p.sum(1)
        acc = jt.dot(p.astype(v.dtype), V[j, 0], acc * fade[:, None])
        top = most
    O[i, 0] = (acc / total[:, None]).astype(o.dtype)


def plain_attention(queries: int, keys: int, d: int) -> Kernel:
    """One head, in tiles of all `d` features. `keys`: a multiple of 64."""
    q, kv = (jax.ShapeDtypeStruct((n, d), jnp.bfloat16) for n in (queries, keys))
    return _plain_attention.lower(q, kv, kv).kernel
