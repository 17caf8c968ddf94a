"""Kernels written by hand at the block level, in the interpreter and under JAX's transforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from benchmarks.gpu import tutorial
from jtile.errors import KernelValueError, SharedRaceError, TransformError, UnsupportedError
from tests.support.block_language import attention, gemm

pytestmark = pytest.mark.usefixtures("by_numpy")


def normal(*shape, dtype=jnp.bfloat16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def wide(x):
    return np.asarray(x).astype(np.float32)


def close(got, want, tol=1e-2):
    assert np.linalg.norm(wide(got) - want) <= tol * np.linalg.norm(want)


def plain_attention(q, k, v):
    scores = np.einsum("hmd,hnd->hmn", wide(q), wide(k)) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hmn,hnd->hmd", p / p.sum(-1, keepdims=True), wide(v))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("at", [False, True])
@pytest.mark.parametrize("bt", [False, True])
def test_gemm(at, bt, dtype):
    a, b = (np.round(3 * normal(*shape, dtype=np.float32)).astype(dtype) for shape in ((100, 90), (90, 80)))
    got = gemm.interpret(a.T.copy() if at else a, b.T.copy() if bt else b, at=at, bt=bt, seed=2 * at + bt)
    np.testing.assert_array_equal(got, wide(a) @ wide(b))


@pytest.mark.parametrize("seed", range(3))
def test_attention(seed):
    q, k, v = (normal(2, n, 64, seed=s) for s, n in enumerate((200, 150, 150)))
    close(attention.interpret(q, k, v, seed=seed), plain_attention(q, k, v))


@pytest.mark.parametrize("step", tutorial.STEPS[1:], ids=lambda step: step.name)
def test_steps_of_the_tutorial(step):
    a, b = normal(200, 136), normal(136, 392, seed=1)
    more = {"blocks": 3} if "blocks" in step.__signature__.parameters else {}
    close(step.interpret(a, b, seed=tutorial.STEPS.index(step), **more), wide(a) @ wide(b))


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("step", tutorial.STEPS, ids=lambda step: step.name)
def test_steps_on_a_gpu(step):
    for m, n, k in ((512, 768, 320), (1000, 1544, 712)):
        a, b = normal(m, k), normal(k, n, seed=1)
        runs = [np.asarray(jax.jit(step)(a, b)) for _ in range(3)]
        close(runs[0], wide(a) @ wide(b))
        assert all((x == runs[0]).all() for x in runs)


@pytest.mark.gpu
@pytest.mark.parametrize("at", [False, True])
@pytest.mark.parametrize("bt", [False, True])
def test_gemm_on_a_gpu(at, bt):
    a, b = normal(520, 264, dtype=np.float16), normal(264, 392, dtype=np.float16, seed=1)
    close(jax.jit(functools.partial(gemm, at=at, bt=bt))(a.T if at else a, b.T if bt else b), wide(a) @ wide(b))


@pytest.mark.gpu
def test_attention_on_a_gpu():
    q, k, v = (normal(3, n, 128, seed=s) for s, n in enumerate((1000, 700, 700)))
    close(jax.jit(attention)(q, k, v), plain_attention(q, k, v))


# -- what goes wrong --------------------------------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((64, 64), jnp.float16)


def call(body):
    return jt.call(body, out_type=X, grid=(1,))


def test_a_deadlock_is_found():
    """The producer waits for the phase after the one that the consumer ends."""

    def kernel(x, o):
        A, full, empty = jt.alloc((64, 64), x.dtype), jt.barrier(), jt.barrier()
        with jt.role("consumer"):
            for k in jt.range(2):
                full.at(k).wait()
                o[...] = A.load()
                empty.at(k).arrive()
        with jt.role("producer", warps=1):
            for k in jt.range(2):
                empty.at(k).wait()
                full.at(k).expect(A.nbytes)
                jt.async_copy(x.at[:, :], A, full.at(k))

    with pytest.raises(KernelValueError, match=r"role consumer: waits for ever at %full\[0\]") as e:
        call(kernel).lower(X)
    assert e.value.where[0] == __file__


def test_a_race_is_found():
    """The producer does not wait until the buffer has been read."""

    def kernel(x, o):
        A, full = jt.alloc((64, 64), x.dtype), jt.barrier()
        with jt.role("consumer"):
            full[0].wait(0)
            o[...] = A.load()
        with jt.role("producer", warps=1):
            full[0].expect(A.nbytes)
            jt.async_copy(x.at[:, :], A, full[0])
            full[0].wait(0)
            A.store(jt.zeros((64, 64), x.dtype))

    with pytest.raises(SharedRaceError):
        for seed in range(8):
            call(kernel).interpret(normal(64, 64, dtype=np.float16), seed=seed)


# -- transforms -------------------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=1)
def double(x, o):
    A, full = jt.alloc(x.shape, x.dtype), jt.barrier()
    with jt.role("all"):
        full[0].expect(A.nbytes)
        jt.async_copy(x.tiles(*x.shape).at[0, 0], A, full[0])
        full[0].wait(0)
        A.store(2 * A.load())
        jt.fence_shared()
        jt.role_barrier()
        jt.async_copy(A, o.tiles(*x.shape).at[0, 0])
        jt.store_wait()


in_interpreter = double.with_options(fallback="interpret")


def test_elsewhere_it_is_refused_or_interpreted():
    x = jax.device_put(normal(64, 64, dtype=np.float16), jax.devices("cpu")[0])
    with pytest.raises(UnsupportedError, match=r"block level.*sm_90.*fallback='interpret'"):
        jax.jit(double)(x)
    np.testing.assert_array_equal(jax.jit(in_interpreter)(x), 2 * x)
    with pytest.raises(UnsupportedError, match="sm_90"):
        double.lower(x, target="cuda:sm_80").image


def test_vmap():
    x = normal(3, 2, 64, 64, dtype=np.float16)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(in_interpreter), in_axes=1, out_axes=1)(x), 2 * x)


def test_results_that_nobody_uses():
    def kernel(x, o, p):
        with jt.role("all"):
            o[...] = x[...]
            p[...] = -x[...]

    call = jt.call(kernel, out_type=(X, X), grid=(1,)).with_options(fallback="interpret")
    x = normal(64, 64, dtype=np.float16)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x)[1])(x), -x)
    calls = lambda f: "custom_call" in jax.jit(f).lower(x).as_text()
    assert calls(lambda x: call(x)[1]) and not calls(lambda x: (call(x), x)[1])


def test_derivatives_are_given_not_derived():
    x = jnp.asarray(normal(64, 64, dtype=np.float16))
    loss = lambda f: lambda x: (f(x).astype(jnp.float32) ** 2).sum()
    for transform in (jax.grad(loss(double)), lambda x: jax.jvp(double, (x,), (x,))):
        with pytest.raises(TransformError, match="defvjp"):
            transform(x)
    given = double.with_options(fallback="interpret")
    given.defvjp(lambda x: (given(x), None), lambda _, ct: (2 * ct,))
    np.testing.assert_array_equal(jax.grad(loss(given))(x), (8 * wide(x)).astype(np.float16))
    got = jax.vmap(jax.grad(loss(given)))(jnp.stack([x, -x]))
    np.testing.assert_array_equal(got[1], -(8 * wide(x)).astype(np.float16))
    with pytest.raises(TransformError, match="forward mode"):
        jax.jit(lambda x: jax.jvp(given, (x,), (x,)))(x)


def test_export_for_a_gpu_that_is_not_here():
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export needs, is not installed")
    pytest.importorskip("triton", reason="triton compiles kernels for GPUs")
    types = [jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)] * 2
    with jt.config(arch="sm_90"):
        made = export.export(jax.jit(tutorial.producer), platforms=["cuda"], disabled_checks=jt.export_checks())(*types)
    assert "jtile_cuda" in made.mlir_module() and "jtile_cuda_io" not in made.mlir_module()


def test_additions_stay_where_they_were_written():
    """The kernel of an output that starts from 0 is one piece, and adds both ways."""

    def kernel(x, o):
        A = jt.alloc((64, 64), x.dtype)
        with jt.role("all"):
            A.store(x[...])
            jt.fence_shared()
            jt.role_barrier()
            jt.async_copy(A, o.at[:, :], fn="add")
            jt.store_wait()
            jt.atomic_add(o, (0, 0), 1)

    x = normal(64, 64, dtype=np.float32)
    add = jt.call(kernel, out_type=jt.like(x), grid=3, init=0).with_options(fallback="interpret")
    want = 3 * x
    want[0, 0] += 3
    np.testing.assert_allclose(jax.jit(add)(x), want, rtol=1e-6)
    assert len(add.lower(x).pieces) == 1


def test_several_devices_cut_lanes_and_what_a_rule_says():
    from jtile.primitive.partition import can_cut, rule_of, shard_program

    x = normal(64, 64, dtype=np.float16)
    assert str(rule_of(double.lower(x).program)) == "_ _ -> _ _"
    (call,) = jax.make_jaxpr(jax.vmap(double))(np.stack([x] * 4)).eqns
    lanes = call.params["program"]
    assert str(rule_of(lanes)) == "vmap0 _ _ -> vmap0 _ _"
    assert can_cut(lanes, "vmap0", 2)
    assert shard_program(lanes, (("vmap0", 2),)).kernel.grid == (2, 1)
    cut = jt.kernel(out_type=lambda x: jt.like(x), grid=1, sharding="m n -> m n")(double.__wrapped__)
    assert str(rule_of(cut.lower(x).program)) == "m n -> m n"


def test_every_transform():
    """But forward mode, and the export of what runs in this process."""
    kernel = double.with_options(fallback="interpret")
    kernel.defvjp(lambda x: (kernel(x), None), lambda _, ct: (2 * ct,))
    why = {"jvp": "a schedule has none", "export": "see test_export_for_a_gpu_that_is_not_here"}
    jt.testing.check_kernel(kernel, lambda x: 2 * x, [normal(64, 64, dtype=np.float16)], skip=why)
