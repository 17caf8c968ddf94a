"""Several GPUs in one process: a program on any one of them, on all at once, and cut over them."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_kernels import numbers, shift
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile import ops
from jtile.ops.flash_attention import attention_reference
from jtile.ops.split_attention import decode_attention_reference
from jtile.testing import relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus():
    found = jax.devices()
    if len(found) < 2:
        pytest.skip(f"{len(found)} GPU: two are needed")
    return found[:2]


@pytest.fixture(scope="module")
def put(gpus):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=gpus)
    return lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def decoding():
    n = jnp.asarray(np.random.default_rng(0).integers(1, 640, 6), jnp.int32)
    return normal(0, 6, 8, 128), normal(1, 6, 640, 4, 128), normal(2, 6, 640, 4, 128), n


def compiled(f, *args):
    """The program, and its text: what kernels and collectives it has."""
    program = jax.jit(f).lower(*args).compile()
    return program, program.as_text()


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_them(gpus, which):
    """The kernel is the one that a host with one GPU runs."""
    args = [jax.device_put(x, gpus[which]) for x in decoding()]
    program, text = compiled(ops.decode_attention, *args)
    if jt.architecture() == "sm_90":
        assert "jtile_hopper_decode" in text
    got = program(*args)
    assert got.devices() == {gpus[which]}
    assert relative_error(got, decode_attention_reference(*args)) < 4e-3


def test_all_at_once(gpus):
    """From a thread for each, counters of arrivals included."""
    want = decode_attention_reference(*decoding())

    def run(device):
        args = [jax.device_put(x, device) for x in decoding()]
        call = jax.jit(ops.decode_attention)
        return [np.asarray(call(*args)) for _ in range(50)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, gpus)
    assert all(np.array_equal(x, first[0]) for x in (*first, *second))
    assert relative_error(first[0], want) < 4e-3


@pytest.mark.parametrize("axis", ["rows", "heads"])
def test_decoding_over_both(put, axis):
    q, k, v, n = decoding()
    rows = axis == "rows"
    specs = (("x",),) * 4 if rows else ((None, "x"), (None, None, "x"), (None, None, "x"), ())
    args = [put(x, *s) for x, s in zip((q, k, v, n), specs, strict=True)]
    program, text = compiled(ops.decode_attention, *args)
    assert "all-gather" not in text and "all-reduce" not in text
    if jt.architecture() == "sm_90":
        assert "jtile_hopper_decode" in text
    assert relative_error(program(*args), decode_attention_reference(q, k, v, n)) < 4e-3


def test_products_and_attention_over_both(put):
    a, b = normal(3, 512, 384), normal(4, 384, 640)
    want = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    for args in ((put(a, "x"), put(b)), (put(a), put(b, None, "x")), (put(a, None, "x"), put(b, "x"))):
        assert relative_error(jax.jit(ops.matmul)(*args), want) < 4e-3
    q, k, v = (normal(5 + j, 4, 256, 4, 128) for j in range(3))
    loss = lambda f: jax.grad(lambda *x: f(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2))
    exact = loss(attention_reference)(q, k, v)
    for spec in (("x",), (None, None, "x")):
        program, text = compiled(loss(ops.attention), *[put(x, *spec) for x in (q, k, v)])
        assert "all-gather" not in text
        for got, want in zip(program(*[put(x, *spec) for x in (q, k, v)]), exact, strict=True):
            assert relative_error(got, want) < 1e-2


def test_inside_of_shard_map(put):
    q, k, v, n = decoding()
    args = [put(x, "x") for x in (q, k, v, n)]
    shards = jax.shard_map(ops.decode_attention, mesh=args[0].sharding.mesh, in_specs=(P("x"),) * 4, out_specs=P("x"))
    assert relative_error(jax.jit(shards)(*args), decode_attention_reference(q, k, v, n)) < 4e-3


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_kernels_that_talk(gpus, order):
    """Calls in a row, in a loop, and after one that failed: what `gpu_peers` lets run."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=[gpus[k] for k in order])
    on = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    x = numbers(4, 2)
    with jt.config(gpu_peers=True):
        for _ in range(20):
            np.testing.assert_array_equal(on(lambda x: shift(x, axis="x"))(x), np.roll(x, 2, 0))
        rounds = on(lambda x: jax.lax.fori_loop(0, 1001, lambda _, x: shift(x, axis="x", barrier=False), x))
        np.testing.assert_array_equal(rounds(x), np.roll(x, 2, 0))
        with jt.config(debug=True, timeout=0.5):
            late = on(lambda x: shift(x, axis="x", at_least=2))
            for _ in range(2):
                with pytest.raises(jax.errors.JaxRuntimeError, match=r"waited 0.5 s for came to reach 2"):
                    jax.block_until_ready(late(x))
        np.testing.assert_array_equal(on(lambda x: shift(x, axis="x"))(x), np.roll(x, 2, 0))
        total = on(lambda x: ops.collectives.all_reduce(x, "x"))
        np.testing.assert_array_equal(total(x), np.tile(x[:2] + x[2:], (2, 1)))
