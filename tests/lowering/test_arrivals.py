"""Arrivals in machine code: CPU threads and TTIR against the interpreter, the order that the text asks for, and what it
compiles to."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrival_kernels import TWICE_INPUT, TWICE_OUTPUT, rows, rows_input, rows_output, twice
from device import run_device
from machines import card
from native import run_artifact, run_native
from ttir import run_ttir

import jtile as jt
from jtile import ffi
from jtile.ir import parse_kernel, print_kernel
from jtile.lowering.cpu import compile_kernel as compile_cpu
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features
from jtile.transforms.batch import batch

RUNS = [run_native, run_ttir, pytest.param(run_device, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("run", RUNS)
def test_like_the_interpreter(run):
    x = rows_input()
    parts, o = run(rows(), [x])
    np.testing.assert_array_equal(parts, 2 * x.reshape(3, 4, 8))
    np.testing.assert_array_equal(o, rows_output(x))
    np.testing.assert_array_equal(run(twice(), [TWICE_INPUT])[1], TWICE_OUTPUT)


@pytest.mark.parametrize("run", RUNS)
def test_lanes(run):
    x = np.stack([rows_input(), -rows_input(), 3 * rows_input()])
    _, o = run(batch(rows(), 3, [True] * 3), [x])
    np.testing.assert_array_equal(o, np.stack([rows_output(y) for y in x]))


def test_on_threads():
    """Programs on 4 threads: 300 rows of 40 parts, each put together by whoever comes last."""
    text = print_kernel(rows()).replace("32xf32", "320xf32").replace("3x", "300x").replace("x4x8", "x40x8")
    text = text.replace("grid(4, 3)", "grid(40, 300)").replace("size=3", "size=300").replace("full 4 ", "full 40 ")
    text = text.replace("%c0:+4", "%c0:+40").replace("tile<4x8", "tile<40x8")
    kernel = parse_kernel(text)
    x = np.random.default_rng(0).integers(-9, 9, (300, 320)).astype(np.float32)
    artifact = compile_cpu(kernel)
    for _ in range(20):
        _, o = run_artifact(artifact, kernel, [x], threads=4)
        np.testing.assert_array_equal(o, 2 * x.reshape(300, 40, 8).sum(1))


def test_programs_that_never_come():
    kernel = parse_kernel(print_kernel(rows()).replace("full 4 ", "full 5 "))
    with pytest.raises(ffi.FfiError, match="4 programs have arrived at counter 0 when the call ends"):
        run_native(kernel, [rows_input()])


def test_memory_that_others_write_is_not_promised_to_be_private():
    """LLVM may keep stores to `noalias` memory from other threads, and what is read behind the atomic is read there."""
    text = compile_cpu(rows(), texts=True).texts["llvm"]
    assert "noalias" not in text
    behind = text.partition("atomicrmw add")[2]
    assert "acq_rel" in behind.partition("\n")[0] and "load <" in behind


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942"])
def test_order_in_ttir(arch):
    """All threads' stores, a barrier, one atomic that releases and acquires, a barrier, then loads."""
    text, record = emit_kernel(rows(), features(arch))
    order = re.findall(r"tt\.store|tt\.load|gpu\.barrier|tt\.atomic_rmw add, \w+", text)
    release = order.index("tt.atomic_rmw add, acq_rel")
    assert order[:release] == ["tt.load", "tt.store", "gpu.barrier"]
    assert order[release + 1 : release + 3] == ["gpu.barrier", "tt.atomic_rmw add, relaxed"]
    assert order[release + 3 :] in (["tt.load", "tt.store"], ["gpu.barrier", "tt.load", "tt.store"])
    assert record.params[-1] == {"kind": "counters", "count": 3}


def test_what_it_compiles_to():
    pytest.importorskip("triton")
    found = compile_kernel(rows(), card("sm_90"), {"num_warps": 4}, texts=True)
    kinds = [p["kind"] for p in json.loads(found.launch["record"])["params"]]
    assert kinds == ["buffer"] * 3 + ["counters"] + ["null"] * 2
    order = re.findall(r"MEMBAR\.[A-Z.]*GPU|ATOMG|CCTL\.IVALL|REDG|STG|LDG", found.texts["sass"])
    assert order[:2] == ["LDG", "STG"] and order[-2:] == ["LDG", "STG"]
    assert [x.split(".")[0] for x in order[2:-2]] == ["MEMBAR", "ATOMG", "CCTL", "REDG"]


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_for_amd(arch):
    pytest.importorskip("triton")
    found = compile_kernel(rows(), card(arch), texts=True)
    assert re.search(r"(global|flat|buffer)_atomic_add", found.texts["amdgcn"])


@jt.kernel(
    out_type=lambda x: (jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jt.like(x)), grid=lambda x: x.shape[0]
)  # fmt: skip
def in_roles(x, o, parts):
    """Two roles that each own half of the columns, and arrive for them."""
    k, half = jt.program_id(0), x.shape[1] // 2
    done = jt.counters("halves", 2)
    for h in range(2):
        with jt.role(f"half_{h}", warps=4):
            _half(x, o, parts, done, k, h, half)


@jt.function
def _half(x, o, parts, done, k, h: int, half: int):
    parts[k, jt.ds(h * half, half)] = x[k, jt.ds(h * half, half)] * 2.0
    if jt.arrive(done, h, x.shape[0]):
        s = jt.zeros((half,), jnp.float32)
        for i in jt.range(x.shape[0]):
            s = s + parts[i, jt.ds(h * half, half)]
        o[jt.ds(h * half, half)] = s


ROLES_INPUT = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (64, 512)), jnp.float32)


def test_roles_in_the_interpreter():
    for seed in range(3):
        np.testing.assert_array_equal(in_roles.interpret(ROLES_INPUT[:6], seed=seed)[0], 2 * ROLES_INPUT[:6].sum(0))


def test_roles_compile():
    pytest.importorskip("triton")
    found = in_roles.lower(ROLES_INPUT, target="cuda:sm_90")
    sass = found.texts["sass"]
    assert sass.count("ATOMG") == sass.count("CCTL.IVALL") == 2
    # Each role waits for its own threads alone.
    assert set(re.findall(r"BAR\.SYNC\S* (0x\w+)", sass[sass.index("ATOMG") :])) - {"0x1"}


@pytest.mark.gpu
def test_roles_on_the_gpu():
    run = jax.jit(in_roles)
    for _ in range(50):
        np.testing.assert_array_equal(run(ROLES_INPUT)[0], 2 * ROLES_INPUT.sum(0))


@pytest.mark.gpu
def test_on_the_gpu():
    """Under command buffers, loops and vmap the counters are at zero whenever a call begins."""
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (200, 1024)), jnp.float32)
    want = np.asarray(x.sum(1))

    @jax.jit
    def chain(x):
        s = jnp.zeros(200)
        for _ in range(12):
            s = sums(x + s[0] * 0)[0]
        return jax.lax.fori_loop(0, 100, lambda i, s: sums(x + s[0] * 0)[0], s)

    for _ in range(5):
        np.testing.assert_array_equal(chain(x), want)
    np.testing.assert_array_equal(jax.vmap(lambda x: sums(x)[0])(jnp.stack([x, -x])), np.stack([want, -want]))


@jt.kernel(
    out_type=lambda x: (jax.ShapeDtypeStruct(x.shape[:1], x.dtype), jax.ShapeDtypeStruct((x.shape[0], 16), x.dtype)),
    grid=lambda x: (16, x.shape[0]),
)
def sums(x, o, parts):
    k, i = jt.program_id(0), jt.program_id(1)
    parts[i, k] = x.tiles(None, x.shape[1] // 16)[i, k].sum()
    if jt.arrive(jt.counters("rows", x.shape[0]), i, 16):
        o[i] = parts[i, :].sum()
