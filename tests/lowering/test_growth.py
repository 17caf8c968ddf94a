"""What compilations leave in the memory of the process."""

import ctypes
import functools
import gc
import itertools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machines import card
from soak import programs

import jtile as jt
from jtile import _memo, ops, passes
from jtile.calls import kernel as calls
from jtile.lowering import cpu, registry
from jtile.lowering.triton.compile import compile_kernel
from jtile.primitive.lowering import pieces_of
from jtile.primitive.program import Program

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("compiled_anew")]
# Bytes: lld, in triton's `link_hsaco`, keeps some of every file: 2.4 KiB (triton 3.9) and 3.2 (3.6) of these, up to 4.3
# where other tests ran before.
LINKED = 8192


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` gives; `uordblks` and `hblkhd` are the bytes in use."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def in_use() -> int:
    """Bytes that are allocated: exact, where resident memory counts what the allocator has not given back."""
    try:
        mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        pytest.skip("mallinfo2 needs glibc 2.33: the older mallinfo counts 32 bits")
    mallinfo.restype = _Mallinfo
    gc.collect()
    found = mallinfo()
    return found.uordblks + found.hblkhd


@pytest.fixture(autouse=True)
def _earlier_tests_at_rest():
    """What earlier tests left is not walked through: in the whole suite, each of 64 collections took half a second."""
    gc.collect()
    gc.freeze()


def left_by(compile, times: int = 5) -> float:
    """Bytes that most compilations leave behind, after three that fill caches; a table that grows is none of them."""
    sizes = []
    for _ in range(times + 3):
        compile()
        sizes.append(in_use())
    return statistics.median(b - a for a, b in itertools.pairwise(sizes[2:]))


@pytest.mark.parametrize("libc", ["older", "none"])
def test_a_libc_without_counts_skips(monkeypatch, libc):
    def load(name):
        if libc == "none":
            raise OSError(name)
        return object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(pytest.skip.Exception, match=r"glibc 2\.33"):
        in_use()


@pytest.mark.parametrize(
    ("arch", "level", "side", "limit"),
    [("sm_90", "block", 256, 4096), ("sm_90", "tile", 24, 4096), ("gfx942", "tile", 64, LINKED)],
)
def test_a_compilation_leaves_nothing_behind(arch, level, side, limit):
    """Triton's own modules stay for ever: 90 to 190 KiB of each of these kernels, if nobody frees what they hold.
    Of others the allocator counts 1.5 to 1.7 KiB where nothing has run before, and none later."""
    with jt.config(arch=arch):
        call = jax.make_jaxpr(ops.matmul)(*[jax.ShapeDtypeStruct((side, side), jnp.bfloat16)] * 2)
        (program,) = dict.fromkeys(programs(call.jaxpr))
    kernel = passes.run_pipeline(pieces_of(program).kernels[0], passes.TILE)
    assert compile_kernel(kernel, card(arch)).launch["level"] == level
    assert left_by(lambda: compile_kernel(kernel, card(arch))) < limit


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=4)
def scaled_softmax(x, y, *, factor=1.0):
    t = x.tiles(4, 16)[jt.program_id(0), 0]
    e = jnp.exp(t * factor - t.max(axis=1, keepdims=True))
    y.tiles(4, 16)[jt.program_id(0), 0] = e / e.sum(axis=1, keepdims=True)


X = np.ones((16, 16), np.float32)


def test_a_compilation_for_cpus_leaves_nothing_behind():
    """llvmlite's pass managers free nothing by themselves, and LLVM's common context nothing at all: 60 and 1.2 KiB of
    each compilation stayed. The 2 to 3 that do are callbacks of its pass builder, one for each function and more."""
    kernel = passes.run_pipeline(scaled_softmax.lower(X).program.kernel, passes.TILE)
    assert left_by(lambda: cpu.compile_kernel(kernel), 20) < 8192


def test_new_programs_leave_nothing_behind():
    """Traced, compiled, run and forgotten: 25 KiB each stayed, and 8 to 11 are JAX's and the allocator's. In a process
    that never forgets, the caches are bounded: see below, the tests of `_memo.py`, and
    `test_the_memory_forgets_what_was_used_longest_ago`."""
    sizes = []
    for n in range(30):
        jax.jit(functools.partial(scaled_softmax, factor=1.0 + n))(X).block_until_ready()
        if n % 5 == 4:  # JAX's own tables come and go by 2 KiB a program, and jnp alone leaves 1
            jax.clear_caches()
            registry.forget()
            sizes.append(in_use())
    assert statistics.median(b - a for a, b in itertools.pairwise(sizes[1:])) / 5 < 16 * 1024


def test_calls_that_were_traced_are_forgotten():
    """jtile keeps the last of them, and JAX's cache of result types, of 2048 calls, keeps none alive."""
    kernel = scaled_softmax.with_options()

    def alive() -> int:
        gc.collect()
        return sum(type(o) is Program and o.name == "scaled_softmax" for o in gc.get_objects())

    before = alive()
    most = max(calls._TRACED, _memo.PROGRAMS)
    for n in range(most + 20):
        jax.make_jaxpr(functools.partial(kernel, factor=1000.0 + n))(X)
    assert len(kernel._bound) == calls._TRACED
    assert calls._TRACED <= alive() - before <= most
    jax.clear_caches()
    assert alive() == 0
