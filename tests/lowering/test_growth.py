"""What a compilation leaves in the memory of the process."""

import ctypes
import gc
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from soak import programs

import jtile as jt
from jtile import ops, passes
from jtile._lowering import pieces_of
from jtile.lowering import cpu
from jtile.lowering.triton.compile import compile_kernel

KIB = 1024


def resident() -> int:
    """Bytes in memory; what the allocator could give back is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def left_by(compile, times: int) -> float:
    """Bytes that a compilation leaves behind, after ten that fill caches."""
    for _ in range(10):
        compile()
    before = resident()
    for _ in range(times):
        compile()
    return (resident() - before) / times


@pytest.mark.parametrize(("arch", "level"), [("sm_90", "block"), ("sm_80", "tile"), ("gfx942", "tile")])
def test_a_compilation_leaves_nothing_behind(arch, level):
    """Triton's own modules stay for ever: 90 to 190 KiB of each of these kernels, if nobody frees what they hold."""
    with jt.config(arch=arch):
        call = jax.make_jaxpr(ops.matmul)(*[jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 2)
        (program,) = dict.fromkeys(programs(call.jaxpr))
    kernel = passes.run_pipeline(pieces_of(program).kernels[0], passes.TILE)
    assert compile_kernel(kernel, arch).launch["level"] == level
    assert left_by(lambda: compile_kernel(kernel, arch), 20) < 40 * KIB


def test_a_compilation_for_cpus_leaves_nothing_behind():
    """llvmlite's pass managers free nothing by themselves: 60 KiB of each compilation stayed."""

    @jt.kernel(out_type=lambda x: jt.like(x), grid=4)
    def softmax(x, y):
        t = x.tiles(16, 64)[jt.program_id(0), 0]
        e = jnp.exp(t - t.max(axis=1, keepdims=True))
        y.tiles(16, 64)[jt.program_id(0), 0] = e / e.sum(axis=1, keepdims=True)

    kernel = softmax.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).program.kernel
    kernel = passes.run_pipeline(kernel, passes.TILE)
    assert left_by(lambda: cpu.compile_kernel(kernel), 60) < 20 * KIB
