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
from jtile.lowering.triton.compile import compile_kernel

KIB = 1024


def resident() -> int:
    """Bytes in memory; what the allocator could give back is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(("arch", "level"), [("sm_90", "block"), ("sm_80", "tile"), ("gfx942", "tile")])
def test_a_compilation_leaves_nothing_behind(arch, level):
    """Triton's own modules stay for ever: 90 to 190 KiB of each of these kernels, if nobody frees what they hold."""
    with jt.config(arch=arch):
        call = jax.make_jaxpr(ops.matmul)(*[jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 2)
        (program,) = dict.fromkeys(programs(call.jaxpr))
    kernel = passes.run_pipeline(pieces_of(program).kernels[0], passes.TILE)
    for _ in range(10):
        assert compile_kernel(kernel, arch).launch["level"] == level
    before = resident()
    for _ in range(20):
        compile_kernel(kernel, arch)
    assert resident() - before < 20 * 40 * KIB
