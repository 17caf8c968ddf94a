"""Rows sorted by the groups that an index names: against a stable sort, in the interpreter and on any target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import routing
from jtile.ops.routing import route_reference, routed_rows
from jtile.testing.evaluate import evaluated

CASES = {  # tokens, k, groups, columns
    "few tokens and many groups": (3, 3, 40, 33),
    "many tokens and few groups": (30, 2, 5, 24),
    "a token": (1, 8, 16, 16),
}


def operands(tokens, k, groups, n, dtype="float32"):
    """Rows, and an index of which some numbers are no group."""
    index = np.random.default_rng(tokens).integers(-1, groups + 1, (tokens, k)).astype(np.int32)
    return np.asarray(normal(0, tokens, n, dtype=dtype)), index, groups


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


def in_programs(x, index, groups, bc, bn, run=routed_rows):
    return run(x, index, index.reshape(-1), None, groups=groups, bc=bc, bn=bn)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_against_a_sort(name, dtype):
    args = operands(*CASES[name], dtype=dtype)
    expected = route_reference(*args)
    _, index, groups = args
    flat = np.where((index >= 0) & (index < groups), index, groups).reshape(-1)
    order = np.argsort(flat, kind="stable")
    np.testing.assert_array_equal(np.asarray(expected[1]).reshape(-1)[order], np.arange(flat.size))
    same(jax.jit(ops.route, static_argnums=2)(*args), expected)
    same(in_programs(*args, 8, 16), expected)


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name):
    """Comparing several blocks of copies, and copying rows in several pieces."""
    args = operands(*CASES[name])
    same(in_programs(*args, 16, 16, routed_rows.interpret), route_reference(*args))


def test_gradients_and_batches():
    x, index, groups = operands(6, 2, 4, 12)
    weights = normal(2, 12, 12)
    total = lambda run: evaluated(jax.grad(lambda x: (run(x, index, groups)[0] * weights).sum()))(x)
    ours = total(lambda x, index, groups: in_programs(x, index, groups, 4, 16))
    np.testing.assert_allclose(ours, total(route_reference), rtol=1e-6)
    several = jax.vmap(lambda x: in_programs(x, index, groups, 4, 16)[0])(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(several[1], 2 * route_reference(x, index, groups)[0])


def test_groups_from_a_number_on():
    x, index, groups = operands(6, 2, 4, 12)
    expected = route_reference(x, index - 1, groups)
    same(route_reference(x, index, groups, 1), expected)
    for arch in ("sm_90", None):  # the kernel takes the number off, or it is taken off in front
        with jt.config(arch=arch, interpret=True):
            same(evaluated(lambda first: ops.route(x, index, groups, first))(jnp.int32(1)), expected)


@pytest.mark.usefixtures("on_the_cpu")
def test_what_computes_it():
    x, index = jax.ShapeDtypeStruct((32, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((32, 8), jnp.int32)
    of = lambda index: ops.choices(lambda *a: ops.route(*a, 128), x, index)[0].implementation
    assert of(index) == "programs of rows"
    assert of(jax.ShapeDtypeStruct((32, 17), jnp.int32)) == "XLA's sort"
    for arch in ("sm_80", "sm_90", "gfx942"):
        with jt.config(arch=arch):
            assert of(index) == "programs of rows"
            assert of(jax.ShapeDtypeStruct((32, 200), jnp.int32)) == "XLA's sort"
            flat = jax.ShapeDtypeStruct((256,), jnp.int32)
            assert routed_rows.lower(x, index, flat, None, groups=128, bc=256, bn=2048)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 500])
def test_on_the_gpu(tokens):
    args = operands(tokens, 8, 128, 2048, dtype="bfloat16")
    same(jax.jit(ops.route, static_argnums=2)(*args), route_reference(*args))


def test_edges_and_errors():
    empty = ops.route(np.zeros((0, 4), np.float32), np.zeros((0, 2), np.int32), 3)
    assert [a.shape for a in empty] == [(0, 4), (0, 2), (3,)] and not np.asarray(empty[2]).any()
    x, index, groups = operands(4, 2, 3, 8)
    with pytest.raises(KernelTypeError, match="float array"):
        ops.route(index, index, groups)
    with pytest.raises(KernelTypeError, match="integer array"):
        ops.route(x, x, groups)
    for bad in ((x, index[:3], groups), (x, index, 0), (x[0], index, groups)):
        with pytest.raises(KernelValueError, match="route"):
            ops.route(*bad)
    with jax.enable_x64(True):  # numbers that would be groups in 32 bits
        assert ops.route(x, np.array([[2**32 + 1, 1], [-(2**32), 0]] * 2), groups)[2].sum() == 4
    assert routing.MOST >= 256 * 8
