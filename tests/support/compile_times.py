"""Where the time goes that kernels take to compile for Hopper, at the sizes of the benchmarks; needs no GPU.

python tests/support/compile_times.py [NAME ...]      CPU seconds of each stage, the better of two compilations

Columns: `tile` the passes of the tile level, `block` those to the block level and the verifier, `emit` the text of it,
`mlir` triton's passes to LLVM IR, `llvm` its optimisation, `ptx` its code generator, `ptxas` the assembler.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import triton.backends.nvidia.compiler as nvidia
from machines import card
from soak import programs

import jtile as jt
from jtile import ops, passes
from jtile.lowering.artifact import Artifact
from jtile.lowering.triton import block, stages
from jtile.lowering.triton.block import compile as block_compile
from jtile.lowering.triton.compile import compile_kernel
from jtile.primitive.lowering import pieces_of

BF16, FP8, I32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def shape(*sides: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, dtype)


def product(m: int, n: int, k: int, dtype: Any = BF16, **options: Any) -> Call:
    run = lambda a, b: ops.matmul(a, b, transpose_b=True, out_dtype=BF16, **options)
    return run, (shape(m, k, dtype=dtype), shape(n, k, dtype=dtype))


def attention(batch: int, t: int, heads: int, d: int, *, gradients: bool = False, **options: Any) -> Call:
    q = shape(batch, t, heads, d)
    run = lambda *qkv: ops.attention(*qkv, **options)
    return ((lambda g, *qkv: jax.vjp(run, *qkv)[1](g)), (q,) * 4) if gradients else (run, (q,) * 3)


def decode() -> Call:
    cache = shape(64, 8192, 8, 128)
    return ops.decode_attention, (shape(64, 1, 32, 128), cache, cache, shape(64, dtype=I32))


def latent_decode() -> Call:
    args = shape(132, 1, 128, 576), shape(132, 8192, 576), shape(132, dtype=I32)
    return (lambda q, cache, lengths: ops.mla_decode(q, cache, lengths, rank=512)), args


def latent_prefill() -> Call:
    heads = shape(1, 4096, 128, 128)
    args = shape(1, 4096, 128, 192), heads, shape(1, 4096, 64), heads
    return (lambda *args: ops.mla_attention(*args, causal=True)), args


def gated() -> Call:
    args = shape(4096, 4096), shape(4096, 14336), shape(4096, 14336)
    return (lambda *args: ops.gated_mlp(*args, activation="silu")), args


CASES: dict[str, Call] = {
    "product": product(8192, 8192, 8192),
    "product_gelu": product(4096, 4096, 4096, activation="gelu"),
    "product_fp8": product(8192, 8192, 8192, FP8),
    "gated": gated(),
    "attention": attention(4, 4096, 32, 128),
    "attention_causal": attention(4, 4096, 32, 128, causal=True),
    "attention_64": attention(4, 4096, 32, 64, causal=True),
    "attention_256": attention(2, 4096, 16, 256, causal=True),
    "attention_window": attention(4, 4096, 32, 128, causal=True, window=1024),
    "attention_softcap": attention(4, 4096, 32, 128, causal=True, softcap=20.0),
    "attention_gradients": attention(4, 4096, 32, 128, causal=True, gradients=True),
    "decode": decode(),
    "latent_decode": latent_decode(),
    "latent_prefill": latent_prefill(),
}


def cpu_seconds() -> float:
    """Of this process, and of those that it has waited for: ptxas."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def timed(spent: Counter[str], stage: str, f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        before = cpu_seconds()
        try:
            return f(*args, **options)
        finally:
            spent[stage] += cpu_seconds() - before  # type: ignore[assignment]

    return run


@contextlib.contextmanager
def watched(spent: Counter[str]) -> Iterator[None]:
    """CPU seconds of the stages inside are added to `spent`."""
    stages_of = stages._stages
    names = {"llir": "mlir", "ptx": "ptx", "cubin": "ptxas"}

    def watched_stages(*args: Any) -> dict[str, Any]:
        return {n: timed(spent, names.get(n, n), f) for n, f in stages_of(*args).items()}

    with contextlib.ExitStack() as on:
        replace = lambda where, name, f: on.enter_context(mock.patch.object(where, name, f))
        replace(block, "steps", timed(spent, "block", block.steps))
        replace(block_compile, "emit_block_kernel", timed(spent, "emit", block_compile.emit_block_kernel))
        replace(stages, "_stages", watched_stages)
        optimise = timed(spent, "llvm", nvidia.llvm.optimize_module)
        replace(nvidia, "llvm", SimpleNamespace(**vars(nvidia.llvm) | {"optimize_module": optimise}))
        yield
    spent["mlir"] -= spent["llvm"]


def measured(program: Any, piece: int) -> tuple[float, Counter[str], Artifact]:
    """Seconds of a compilation, CPU seconds of its stages, and what came of it."""
    options = {k: v for k, v in program.options.compiler.items() if v is not None}
    spent: Counter[str] = Counter()
    start = time.perf_counter()
    with watched(spent):
        tile = timed(spent, "tile", passes.run_pipeline)(pieces_of(program).kernels[piece], passes.TILE)
        artifact = compile_kernel(tile, card("sm_90"), options)
    return time.perf_counter() - start, spent, artifact


def report(name: str) -> None:
    run, args = CASES[name]
    with jt.config(arch="sm_90"):
        found = dict.fromkeys(programs(jax.make_jaxpr(run)(*args).jaxpr))
    for program in found:
        for piece in range(len(pieces_of(program).kernels)):
            runs = [measured(program, piece) for _ in range(2)]
            seconds, spent, artifact = min(runs, key=lambda r: sum(r[1].values()))
            parts = "  ".join(f"{s} {spent[s]:.2f}" for s in ("tile", "block", "emit", "mlir", "llvm", "ptx", "ptxas"))
            where = f"{artifact.launch['level']}  {len(artifact.image) >> 10} KiB"
            print(f"{name:18} {program.name:28} {seconds:5.2f} s  {parts}  {where}", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        report(name)
