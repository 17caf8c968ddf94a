"""The launcher on an NVIDIA GPU, inside XLA programs."""

import concurrent.futures
import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ffi
from jtile._platform import gpu_arch

pytestmark = pytest.mark.gpu

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
    ],
)
def test_with_and_without_command_buffers(run_python, flags):
    env = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert run_python(SCRIPT, **env).splitlines()[-1] == "right"


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
        return jax.ffi.ffi_call(ffi.TARGET_CUDA, out)(x, image=image.image, record=changed)

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
    lowered = double.lower(x, target=f"cuda:{gpu_arch('cuda')}")
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(bare(lowered, **changes)(x))
    np.testing.assert_array_equal(np.asarray(bare(lowered)(x)), 2)  # the device still works
