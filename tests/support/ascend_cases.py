"""Kernels for Ascend: the library at sizes of models, with its gradients, and kernels as users write them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

import jtile as jt
from jtile import ir, ops, passes
from jtile.lowering.ascend import hivm
from jtile.lowering.ascend.compile import compile_kernel
from jtile.lowering.ascend.targets import resolve
from jtile.primitive.lowering import pieces_of

TARGETS = ("910b1", "910b3", "9382")
JAXPRS = (core.Jaxpr, core.ClosedJaxpr)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays, and their shapes and dtypes; `gradients`: its gradients are compiled too."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    gradients: bool = True


def of(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return of(*shape, dtype="float32")


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return of(*shape, dtype="int32")


def weight(kind: str, n: int, k: int) -> Any:
    return jax.eval_shape(lambda x: ops.quantize(x, kind), f32(n, k))


def weights(kind: str, groups: int, n: int, k: int) -> Any:
    return jax.eval_shape(jax.vmap(lambda x: ops.quantize(x, kind)), f32(groups, n, k))


def bound(fn: Callable[..., Any], **meta: Any) -> Callable[..., Any]:
    return lambda *args: fn(*args, **meta)


# -- kernels of users -------------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x, y, **_: jt.like(x), grid=lambda x, y, *, bn, **_: (jt.cdiv(x.shape[0], bn),))
def saxpy(x, y, o, *, bn=4096):
    i = jt.program_id(0)
    X, Y, O = x.tiles(bn), y.tiles(bn), o.tiles(bn)
    O[i] = 2.5 * X[i] + Y[i]


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: (x.shape[0],))
def normalised(x, o):
    """A softmax of one row a program."""
    r = jt.program_id(0)
    row = x[r, :]
    e = jnp.exp(row - row.max())
    o[r, :] = e / e.sum()


@jt.kernel(
    out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
    grid=lambda a, b, *, bm, bn, **_: (jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)),
)
def product(a, b, o, *, bm=64, bn=64, bk=64):
    """The product of matrices, with a SiLU behind it."""
    i, j = jt.program_id(0), jt.program_id(1)
    A, B, O = a.tiles(bm, bk), b.tiles(bk, bn), o.tiles(bm, bn)
    acc = jt.zeros((bm, bn), jnp.float32)
    for k in jt.range(A.shape[1]):
        acc = jt.dot(A[i, k], B[k, j], acc)
    O[i, j] = (acc * jax.nn.sigmoid(acc)).astype(o.dtype)


@jt.kernel(out_type=lambda table, rows: jt.like(table, shape=(rows.shape[0], table.shape[1])),
           grid=lambda table, rows: (jt.cdiv(rows.shape[0], 16),))  # fmt: skip
def picked(table, rows, o):
    """Rows of a table by their numbers."""
    i = jt.program_id(0)
    which = rows.tiles(16)[i]
    o.tiles(16, table.shape[1])[i, 0] = table[which, :]


@jt.kernel(out_type=lambda x: jt.like(x, shape=(x.shape[0],)), grid=lambda x: (x.shape[0],))
def longest(x, o):
    """The Euclidean length of each row, in blocks, with a scratch of partial sums."""
    r = jt.program_id(0)
    total = jt.zeros((1024,), jnp.float32)
    X = x.tiles(None, 1024)
    for k in jt.range(X.shape[1]):
        total = total + X[r, k].astype(jnp.float32) ** 2
    o[r] = jnp.sqrt(total.sum()).astype(o.dtype)


@jt.kernel(out_type=lambda x, y, **_: jt.like(x), grid=lambda x, y, *, bn, **_: (jt.cdiv(x.shape[0], bn),))
def multiplied(x, y, o, *, bn=128):
    """The product of complex numbers, whose halves are the last axis of a tile."""
    i = jt.program_id(0)
    o.tiles(bn)[i] = x.tiles(bn)[i] * y.tiles(bn)[i]


@jt.kernel(out_type=lambda key, x: jt.like(x), grid=lambda key, x: (jt.cdiv(x.shape[0], 1024),))
def dropped(key, x, o):
    """Elements that a random key leaves out."""
    i = jt.program_id(0)
    keep = jax.random.bernoulli(jax.random.fold_in(key[...], i), 0.9, (1024,))
    o.tiles(1024)[i] = jnp.where(keep, x.tiles(1024)[i] / 0.9, 0.0)


@jt.kernel(out_type=lambda x: jt.like(x), grid=24)
def persistent(x, o):
    """As many programs as cores, each with every 24th tile."""
    X, O = x.tiles(4, 1024), o.tiles(4, 1024)
    for t in jt.range(jt.program_id(0), X.shape[0], jt.num_programs(0)):
        O[t, 0] = jax.nn.silu(X[t, 0])


@jt.kernel(out_type=lambda x: jax.ShapeDtypeStruct((x.shape[0],), jnp.int32), grid=lambda x: (x.shape[0],))
def first_large(x, o):
    """The place of the first element above 3 of each row, -1 without one."""
    r, X = jt.program_id(0), x.tiles(None, 1024)
    place = jnp.int32(-1)
    for k in jt.range(X.shape[1]):
        at = jnp.where(X[r, k] > 3.0, k * 1024 + jt.arange(1024), 1 << 30).min()
        if at < (1 << 30):
            place = at
            break
    o[r] = place


# -- the table --------------------------------------------------------------------------------------------------------

HEADS = (of(1, 1024, 8, 128), of(1, 1024, 2, 128), of(1, 1024, 2, 128))

CASES: dict[str, Case] = {
    "swiglu": Case(ops.swiglu, (of(512, 4096), of(512, 4096))),
    "geglu": Case(ops.geglu, (f32(512, 4096),)),
    "bias_gelu_residual": Case(ops.bias_gelu_residual, (of(512, 4096), of(4096), of(512, 4096))),
    "softmax": Case(ops.softmax, (of(1024, 4096),)),
    "softmax, long rows": Case(ops.softmax, (f32(64, 32768),)),
    "softmax of columns": Case(bound(ops.softmax, axis=0), (f32(1024, 512),)),
    "log_softmax": Case(ops.log_softmax, (of(1024, 4096),)),
    "cross_entropy": Case(ops.cross_entropy, (of(256, 32000), i32(256))),
    "rms_norm": Case(ops.rms_norm, (of(1024, 4096), of(4096))),
    "rms_norm, float32": Case(ops.rms_norm, (f32(1024, 8192), f32(8192))),
    "layer_norm": Case(ops.layer_norm, (of(1024, 4096), of(4096), of(4096))),
    "matmul": Case(ops.matmul, (of(1024, 1024), of(1024, 1024))),
    "matmul, float16": Case(ops.matmul, (of(2048, 4096, dtype="float16"), of(4096, 2048, dtype="float16"))),
    "matmul, float32": Case(ops.matmul, (f32(512, 512), f32(512, 512))),
    "matmul, int8": Case(ops.matmul, (of(512, 512, dtype="int8"), of(512, 512, dtype="int8")), False),
    "matmul with bias and gelu": Case(
        lambda a, b, c: ops.matmul(a, b, bias=c, activation="gelu"), (of(1024, 1024), of(1024, 1024), of(1024))
    ),
    "matmul, transposed": Case(bound(ops.matmul, transpose_b=True), (of(1024, 1024), of(1024, 1024))),
    "matmul, batched": Case(ops.matmul, (of(8, 256, 256), of(8, 256, 256))),
    "matmul of one row": Case(ops.matmul, (of(1, 4096), of(4096, 4096))),
    "matmul of few rows": Case(ops.matmul, (of(16, 4096), of(4096, 4096))),
    "gated_mlp": Case(ops.gated_mlp, (of(256, 2048), of(2048, 4096), of(2048, 4096))),
    "grouped_matmul": Case(ops.grouped_matmul, (of(512, 256), of(8, 256, 256), i32(8))),
    "quantized_matmul, q8_0": Case(ops.quantized_matmul, (of(16, 4096), weight("q8_0", 4096, 4096)), False),
    "quantized_matmul, q4_0": Case(ops.quantized_matmul, (of(16, 4096), weight("q4_0", 4096, 4096)), False),
    "quantized_matmul of one row, q4_0": Case(ops.quantized_matmul, (of(1, 1024), weight("q4_0", 1024, 1024)), False),
    "quantized_matmul of many rows, q8_0": Case(
        ops.quantized_matmul, (of(512, 2048), weight("q8_0", 2048, 2048)), False
    ),
    "embedding": Case(ops.embedding, (of(32000, 1024), i32(4, 128))),
    "rope": Case(lambda x, p: ops.rope(x, positions=p), (of(2, 512, 8, 128), i32(2, 512))),
    "attention, causal": Case(bound(ops.attention, causal=True), HEADS),
    "attention, heads of 64": Case(ops.attention, (of(1, 1024, 8, 64),) * 3),
    "attention, float32": Case(bound(ops.attention, causal=True), (f32(1, 512, 4, 64),) * 3),
    "decode_attention": Case(
        ops.decode_attention, (of(2, 8, 128), of(2, 2048, 2, 128), of(2, 2048, 2, 128), i32(2)), False
    ),
    "mla_decode": Case(bound(ops.mla_decode, rank=256), (of(2, 8, 288), of(2, 512, 288), i32(2)), False),
    "convolution": Case(ops.convolution, (of(1, 32, 32, 64), of(3, 3, 64, 64))),
    "stencil_2d": Case(ops.stencil_2d, (f32(1, 256, 256), f32(3, 3))),
    "cumsum": Case(ops.cumsum, (f32(256, 4096),)),
    "transpose": Case(ops.transpose, (of(1024, 1024),)),
    "sort": Case(ops.sort, (f32(64, 1024),), False),
    "top_k": Case(bound(ops.top_k, k=8), (f32(64, 1024),), False),
    "histogram": Case(bound(ops.histogram, bins=64, range=(-1.0, 1.0)), (f32(65536),), False),
    "argsort": Case(ops.argsort, (f32(64, 1024),), False),
    "convolution_transpose": Case(bound(ops.convolution_transpose, stride=2), (of(1, 16, 16, 64), of(3, 3, 64, 64))),
    "convolution, depthwise": Case(bound(ops.convolution, groups=64), (of(1, 32, 32, 64), of(3, 3, 1, 64))),
    "convolution of few channels": Case(ops.convolution, (of(1, 64, 64, 3), of(7, 7, 3, 64))),
    "convolution, one axis": Case(ops.convolution, (of(1, 512, 64), of(3, 64, 64))),
    "convolution, three axes": Case(ops.convolution, (of(1, 8, 16, 16, 32), of(3, 3, 3, 32, 32))),
    "stencil, four steps": Case(bound(ops.stencil, steps=4), (f32(256, 256), f32(3, 3))),
    "stencil, three axes": Case(ops.stencil, (f32(32, 64, 64), f32(3, 3, 3))),
    "separable_filter": Case(lambda x, a, b: ops.separable_filter(x, (a, b)), (f32(256, 256), f32(5), f32(5))),
    "dilate": Case(bound(ops.dilate, size=(3, 3)), (f32(256, 256),)),
    "segment_sum": Case(bound(ops.segment_sum, num_segments=64), (f32(4096, 256), i32(4096))),
    "segment_max": Case(bound(ops.segment_max, num_segments=64), (f32(4096, 256), i32(4096))),
    "linear_attention": Case(ops.linear_attention, (of(1, 256, 4, 64),) * 3),
    "linear_attention, decay": Case(
        lambda q, k, v, g: ops.linear_attention(q, k, v, log_decay=g),
        (*(of(1, 256, 4, 64),) * 3, f32(1, 256, 4)),
        False,
    ),
    "linear_attention, delta rule": Case(
        lambda q, k, v, g, b: ops.linear_attention(q, k, v, log_decay=g, beta=b),
        (*(of(1, 256, 4, 64),) * 3, f32(1, 256, 4), f32(1, 256, 4)),
        False,
    ),
    "rwkv7": Case(ops.rwkv7, (of(1, 128, 4, 64), f32(1, 128, 4, 64), *(of(1, 128, 4, 64),) * 4)),
    "selective_scan": Case(
        ops.selective_scan, (of(1, 256, 256), of(1, 256, 256), f32(256, 16), of(1, 256, 16), of(1, 256, 16))
    ),
    "ssd": Case(ops.ssd, (of(1, 256, 4, 64), f32(1, 256, 4), f32(4), of(1, 256, 1, 64), of(1, 256, 1, 64))),
    "mla_attention": Case(
        ops.mla_attention, (of(1, 512, 4, 192), of(1, 512, 4, 128), of(1, 512, 64), of(1, 512, 4, 128))
    ),
    "linear_cross_entropy": Case(ops.linear_cross_entropy, (of(256, 1024), of(32000, 1024), i32(256))),
    "rms_norm_matmul": Case(
        lambda x, w, b, r: ops.rms_norm_matmul(x, w, b, residual=r),
        (of(16, 1024), of(1024), of(1024, 1024), of(16, 1024)),
    ),
    "rms_norm_gated_mlp": Case(
        lambda x, w, g, u, r: ops.rms_norm_gated_mlp(x, w, g, u, residual=r),
        (of(16, 1024), of(1024), of(1024, 1024), of(1024, 1024), of(16, 1024)),
    ),
    "adamw": Case(
        lambda p, g: ops.adamw(p, g, ops.adam_init(p), learning_rate=1e-3), (f32(1024, 1024), f32(1024, 1024)), False
    ),
    "newton_schulz": Case(bound(ops.newton_schulz, dtype="bfloat16"), (f32(512, 1024),)),
    "routed_matmul": Case(ops.routed_matmul, (of(64, 256), of(8, 256, 256), i32(64, 2))),
    "routed_matmul, q4_0": Case(ops.routed_matmul, (of(4, 256), weights("q4_0", 8, 256, 256), i32(4, 2)), False),
    "grouped_matmul, q8_0": Case(
        bound(ops.grouped_matmul, transpose_w=True), (of(512, 256), weights("q8_0", 8, 256, 256), i32(8)), False
    ),
    "quantized_matmul, mxfp4": Case(ops.quantized_matmul, (of(16, 1024), weight("mxfp4", 1024, 1024)), False),
    "quantized_matmul, fp8": Case(ops.quantized_matmul, (of(16, 1024), weight("fp8", 1024, 1024)), False),
    "scaled_matmul": Case(
        bound(ops.scaled_matmul, transpose_b=True), (of(256, 512), of(256, 512), f32(256, 4), f32(2, 4)), False
    ),
    "block_sparse_attention": Case(
        bound(ops.block_sparse_attention, causal=True),
        (of(1, 256, 16, 64), of(1, 256, 1, 64), of(1, 256, 1, 64), i32(1, 1, 256, 4)),
    ),
    "block_sparse_attention of blocks": Case(
        bound(ops.block_sparse_attention, causal=True, queries=16),
        (of(1, 512, 8, 64), of(1, 512, 2, 64), of(1, 512, 2, 64), i32(1, 2, 32, 4)),
    ),
    "attention with a score": Case(
        lambda q, k, v, slope: ops.attention(
            q, k, v, score=lambda x, b, h, i, j, s: x + s[h] * (j - i).astype(x.dtype), extras=(slope,)
        ),
        (*(of(1, 512, 8, 64),) * 3, f32(8)),
    ),
    "attention with a mask": Case(
        bound(ops.attention, mask=lambda b, h, i, j: (i >= j) & (i - j < 100)), (of(1, 512, 8, 64),) * 3
    ),
    "attention with sinks": Case(
        lambda q, k, v, s: ops.attention(q, k, v, causal=True, window=128, sinks=s),
        (*(of(1, 512, 8, 64),) * 3, f32(8)),
    ),
    "a user's complex product": Case(multiplied, (of(10000, dtype="complex64"),) * 2, False),
    "a user's dropout by a key": Case(
        lambda key, x: dropped(jax.random.wrap_key_data(key), x), (of(2, dtype="uint32"), f32(10000)), False
    ),
    "a user's persistent loop": Case(persistent, (of(1000, 1000),)),
    "a user's loop with a break": Case(first_large, (f32(100, 5000),), False),
    "a user's saxpy": Case(saxpy, (f32(100000), f32(100000))),
    "a user's softmax": Case(normalised, (f32(300, 1000),)),
    "a user's product with SiLU": Case(product, (of(1000, 500), of(500, 700))),
    "a user's gather of rows": Case(picked, (of(1000, 512), i32(300)), False),
    "a user's lengths of rows": Case(longest, (of(300, 5000),)),
}


def gradients(case: Case, *args: Any) -> Any:
    """The gradients of a case by its float arguments."""
    moved = [k for k, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def total(*some: Any) -> Any:
        out = case.fn(*(some[moved.index(k)] if k in moved else a for k, a in enumerate(args)))
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out))

    return jax.grad(total, tuple(range(len(moved))))(*(args[k] for k in moved))


def programs(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """The programs of all kernels of a jaxpr; of branches by the platform those of the others than CUDA."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jtile_call":
            yield eqn.params["program"]
            continue
        inner = list(eqn.params.values())
        if "branches_platforms" in eqn.params:
            inner = [eqn.params["branches"][-1]]
        for part in jax.tree.leaves(inner, is_leaf=lambda p: isinstance(p, JAXPRS)):
            if isinstance(part, JAXPRS):
                yield from programs(getattr(part, "jaxpr", part))


def kernels(fn: Callable[..., Any], args: tuple[Any, ...], arch: str = TARGETS[0]) -> list[ir.Kernel]:
    """The kernels of a function as it is traced for an NPU, after the passes."""
    with jt.config(arch=arch):
        found = dict.fromkeys(programs(jax.make_jaxpr(fn)(*args).jaxpr))
        return [passes.run_pipeline(k, passes.TILE) for p in found for k in pieces_of(p).kernels]


def all_kernels(names: Iterator[str] | None = None) -> Iterator[tuple[str, ir.Kernel]]:
    """(case, kernel) of every case and its gradients; a kernel that two cases share comes once."""
    seen: set[str] = set()
    for name in names or CASES:
        case = CASES[name]
        fns = [case.fn, functools.partial(gradients, case)] if case.gradients else [case.fn]
        for fn in fns:
            for kernel in kernels(fn, case.args):
                text = ir.print_kernel(kernel)
                if text not in seen:
                    seen.add(text)
                    yield name, kernel


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a kernel on all targets: its launch facts, or why not."""

    case: str
    kernel: str
    kind: str = ""
    used: dict[str, int] = dataclasses.field(default_factory=dict)
    why: str = ""


def outcome(case: str, kernel: ir.Kernel, targets: tuple[str, ...] = TARGETS) -> Outcome:
    """Compile a kernel for targets; the memory that its buffers reach is asserted to be what they have."""
    used: dict[str, int] = {}
    kind = ""
    for name in targets:
        target = resolve(f"ascend:{name}")
        try:
            artifact = compile_kernel(kernel, target, texts=True)
        except jt.errors.JtileError as e:
            return Outcome(case, kernel.name, why=str(e))
        sizes = {m.name: m.size for m in target.memories}
        facts = hivm.facts(artifact.texts["hivm"], artifact.launch["symbol"])
        assert all(n <= (sizes[memory] or 0) for memory, n in facts.used.items()), facts
        assert artifact.launch["workspace"] == facts.workspace
        used = {m: max(n, used.get(m, 0)) for m, n in facts.used.items()}
        kind = facts.kind
    return Outcome(case, kernel.name, kind, used)
