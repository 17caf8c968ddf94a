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
