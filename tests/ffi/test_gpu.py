"""The launcher on an NVIDIA GPU, inside XLA programs."""

import concurrent.futures
import gc
import json
import resource
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machines import card
from products import tiled_matmul

import jtile as jt
from jtile import ffi, ir
from jtile.lowering import platforms
from jtile.lowering.triton.compile import compile_kernel
from jtile.testing import relative_error

pytestmark = pytest.mark.gpu
PRODUCT = tiled_matmul(128, 128, 64)

RUN_FILE = "import runpy; runpy.run_path('kernel.py', run_name='__main__')"
SCRIPT = """
    import jax, jax.numpy as jnp, numpy as np
    import jtile as jt

    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: jt.cdiv(x.shape[0], 128))
    def step(x, o):
        i = jt.program_id(0)
        o.tiles(128)[i] = x.tiles(128)[i] + 1

    @jax.jit
    def chain(x):
        for _ in range(20):
            x = step(x)
        return jax.lax.fori_loop(0, 30, lambda _, x: step(step(x)), x)

    @jt.kernel(out_type=lambda x: (jt.like(x, shape=(8,)), jt.like(x, shape=(1,))), grid=8)
    def total(x, parts, o):
        i = jt.program_id(0)
        parts[i] = x.tiles(125)[i].sum()
        if jt.arrive(jt.counters("all", 1), 0, 8):
            o[0] = parts[...].sum()

    @jax.jit
    def apart(x):  # independent kernels, which may run at the same time
        return [total(x + k)[1] for k in range(12)]

    for n in range(4):
        for k, y in enumerate(apart(jnp.full(1000, float(n)))):
            np.testing.assert_array_equal(np.asarray(y), [1000.0 * (n + k)])

    for n in range(4):  # XLA records a command buffer on the second run, and again where buffers have moved
        x = jnp.full(1000, float(n))
        np.testing.assert_array_equal(np.asarray(chain(x)), n + 80.0)
    print("right")
"""


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: jt.cdiv(x.shape[0], 128))
def double(x, o):
    i = jt.program_id(0)
    o.tiles(128)[i] = x.tiles(128)[i] * 2


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: jt.cdiv(x.shape[0], 128))
def talk(x, o):
    i = jt.program_id(0)
    t = x.tiles(128)[i]
    total = t.sum()
    jt.print("sum {}", total)
    jt.assert_(total < 1000, "too large")
    o.tiles(128)[i] = t


def test_two_hundred_calls_share_one_module():
    loaded = ffi.modules_loaded()

    @jax.jit
    def chain(x):
        for _ in range(200):
            x = double(x) * 0.5
        return x

    x = jnp.arange(1000.0)
    np.testing.assert_array_equal(np.asarray(chain(x)), np.arange(1000.0))
    assert ffi.modules_loaded() <= loaded + 1  # none where an earlier test still holds it


def test_two_hundred_calls_in_a_loop():
    @jax.jit
    def chain(x):
        return jax.lax.fori_loop(0, 200, lambda _, x: double(x) * 0.5, x)

    x = jnp.arange(1000.0)
    for k in range(3):
        np.testing.assert_array_equal(np.asarray(chain(x + k)), np.arange(1000.0) + k)


def test_two_programs_in_flight():
    """Independent kernels, of one program and of several; nobody waits in between."""

    @jax.jit
    def both(x, y):
        for _ in range(50):
            x, y = double(x) * 0.5, double(y) * 0.5
        return x + y

    def single(x):
        return double(double(x))

    one, two = jax.jit(single), jax.jit(lambda x: single(x) + 1)
    xs = [jnp.full(1 << 20, float(k)) for k in range(8)]
    results = [(one(x), two(x), both(x, x)) for x in xs]
    for k, (a, b, c) in enumerate(results):
        assert (np.asarray(a) == 4 * k).all() and (np.asarray(b) == 4 * k + 1).all() and (np.asarray(c) == 2 * k).all()


CACHED = """
    import time
    import jax, jax.numpy as jnp, numpy as np
    import jtile as jt
    from jtile.lowering.triton import stages

    built = []
    build = stages.build
    stages.build = lambda *a, **k: built.append(1) or build(*a, **k)

    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: jt.cdiv(x.shape[0], 128))
    def triple(x, o):
        i = jt.program_id(0)
        o.tiles(128)[i] = x.tiles(128)[i] * 3

    np.testing.assert_array_equal(np.asarray(jax.jit(triple)(jnp.arange(999.0))), np.arange(999.0) * 3)
    print("built", len(built))
"""


def test_a_fresh_process_takes_the_image_from_the_disk(run_python, tmp_path):
    (tmp_path / "kernel.py").write_text(textwrap.dedent(CACHED))
    env = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JTILE_CACHE_DIR": str(tmp_path / "c")}
    assert [run_python(RUN_FILE, **env).splitlines()[-1] for _ in range(2)] == ["built 1", "built 0"]


def test_a_thousand_compilations_leave_no_memory_behind():
    """Of small kernels: contexts, modules and texts of the compiler go when a kernel is done."""
    arch = platforms.named("cuda").here().arch

    def one(k: int) -> None:
        text = f"""kernel @k{k}(%x: ref<128xf32>, %o: ref<128xf32, out>) {{
          %z = full 0 : i32
          %t = load %x[tile(%z, 128)] : tile<128xf32>
          %c = full {k}.0 : tile<128xf32>
          %y = add %t, %c : tile<128xf32>
          store %o[tile(%z, 128)], %y
        }}"""
        compile_kernel(ir.parse_kernel(text), card(arch), {"num_warps": 1})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))
        gc.collect()
        before = resident()
        list(pool.map(one, range(200, 1200)))
        gc.collect()
    assert resident() - before < 64 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_modules_go_with_their_programs():
    jax.clear_caches()
    gc.collect()
    alive = ffi.modules_alive()
    call = jax.jit(lambda x: double(x) + 1)
    np.testing.assert_array_equal(np.asarray(call(jnp.ones(77))), 3)
    assert ffi.modules_alive() >= alive
    del call
    jax.clear_caches()
    gc.collect()
    assert ffi.modules_alive() <= alive


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,WHILE,CONDITIONAL --xla_gpu_graph_min_graph_size=1",
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_graph_enable_concurrent_region=true",
    ],
)
def test_with_and_without_command_buffers(run_python, tmp_path, flags):
    (tmp_path / "kernel.py").write_text(textwrap.dedent(SCRIPT))  # a kernel with an `if` needs its source
    env = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert run_python(RUN_FILE, **env).splitlines()[-1] == "right"


def test_programs_on_many_threads():
    def run(k):
        x = jnp.full(1000 + k, float(k))
        call = jax.jit(lambda x: double(x) + double(x * 2))
        return all(np.array_equal(np.asarray(call(x)), np.full(1000 + k, 6.0 * k)) for _ in range(20))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(16)))


def test_prints_and_assertions(capfd):
    call = jax.jit(talk)
    x = jnp.repeat(jnp.arange(3.0), 128)
    jax.block_until_ready(call(x))
    expected = [f"[talk ({k}, 0, 0)] sum {128.0 * k}" for k in range(3)]
    assert capfd.readouterr().out.splitlines() == expected
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"kernel talk: assertion failed: too large \(program \(1, 0, 0\)\)"
    ):
        jax.block_until_ready(call(x * 100))
    jax.block_until_ready(call(x))  # the device still works


def bare(image, **changes):
    """A call of a kernel with a changed record."""
    changed = json.dumps(json.loads(image.launch["record"]) | changes)

    def call(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("jtile_cuda", out)(x, image=image.image, record=changed)

    return jax.jit(call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_75"}, "its code is for sm_75, and device 0 is sm_"),
        ({"shared": 1 << 20}, "take smaller tiles or fewer stages"),
        ({"symbol": "other"}, "cuModuleGetFunction failed with CUDA_ERROR_NOT_FOUND"),
        ({"threads": 1024, "cluster": 16, "grid": 1}, "kernel double: cu"),
        ({"threads": 0}, "its threads is 0"),
    ],
)
def test_errors(changes, message):
    x = jnp.ones(1000)
    with jt.config(poison=False):  # whose start would be one more operand
        lowered = double.lower(x, target=platforms.named("cuda").here())
        assert lowered.image and lowered.launch
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(bare(lowered, **changes)(x))
    np.testing.assert_array_equal(np.asarray(bare(lowered)(x)), 2)  # the device still works


@pytest.mark.parametrize("attributes", [{"cooperative": True}, {"programmatic": True}])
def test_attributes_of_a_launch_on_the_device(attributes):
    """Launches in a row, so that a programmatic one has a kernel before it."""
    x = jnp.arange(1000.0)
    with jt.config(poison=False):
        lowered = double.lower(x, target=platforms.named("cuda").here())
        assert lowered.image and lowered.launch
    call = bare(lowered, attributes=attributes)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(call(call(call(x)))), np.arange(1000.0) * 8)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 16))
def softmax_of_rows(x, o):
    i, X, O = jt.program_id(0), x.tiles(16, x.shape[1]), o.tiles(16, x.shape[1])
    e = jnp.exp(X[i, 0] - X[i, 0].max(1, keepdims=True))
    O[i, 0] = e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("name", ["elements", "rows", "product"])
def test_clusters_on_the_device(name, blocks):
    """Programs of several blocks: elements apart, sums and maxima over a cluster, and a product."""
    if int(platforms.named("cuda").here().arch.removeprefix("sm_")) < 90:
        pytest.skip("no clusters before sm_90")
    x, a = jnp.arange(10_000.0), jax.random.normal(jax.random.key(0), (300, 260), jnp.float32)
    b = a.astype(jnp.bfloat16)
    kernel, args = {"elements": (double, (x,)), "rows": (softmax_of_rows, (a,)), "product": (PRODUCT, (b, b.T))}[name]
    kernel = kernel.with_options(num_ctas=blocks)
    want = kernel.with_options(interpret=True, num_ctas=None)(*args)
    assert json.loads(kernel.lower(*args, target=platforms.named("cuda").here()).launch["record"])["cluster"] == blocks
    call = jax.jit(kernel)
    for _ in range(3):
        assert relative_error(call(*args), want) < {"elements": 1e-9, "rows": 1e-6, "product": 4e-3}[name]


@pytest.mark.parametrize("grid", [(70_000, 3), (3, 70_000, 1), (2, 3, 70_001), (1 << 21,), (5, 0, 3)])
def test_grids_on_the_device(grid):
    """More blocks than an axis of y or z has, of every rank, and none."""

    @jt.kernel(out_type=jax.ShapeDtypeStruct(grid, jnp.int32), grid=grid)
    def numbered(o):
        at = [jt.program_id(k) for k in range(len(grid))]
        number = at[0]
        for n, i in zip(grid[1:], at[1:], strict=True):
            number = number * n + i
        o[tuple(at)] = number

    np.testing.assert_array_equal(np.asarray(jax.jit(numbered)()), np.arange(np.prod(grid)).reshape(grid))
