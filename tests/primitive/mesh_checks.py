"""Kernels that talk to other devices, on meshes of eight; run by test_mesh.py."""

import jax
import numpy as np
import pytest
from device_kernels import corner, gather, numbers, shift
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtile.errors import TransformError, UnsupportedError

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("x", "y"))
PERMUTED = Mesh(DEVICES[[3, 1, 0, 2, 7, 5, 6, 4]].reshape(4, 2), ("x", "y"))
BOTH = P("x", "y")
X = numbers(16, 6)


def shard(f, mesh=MESH, spec=BOTH, **kw):
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **kw)


def rolled(x, mesh=MESH, axis="x"):
    n = mesh.shape[axis]
    move = lambda x: jax.lax.ppermute(x, axis, [(k, (k + 1) % n) for k in range(n)])
    return np.asarray(jax.jit(shard(move, mesh))(x))


def check_the_interpreter_on_meshes():
    told = shift.with_options(interpret=True)
    for mesh, vma in ((MESH, True), (MESH, False), (PERMUTED, True)):
        for axis in ("x", "y"):
            f = shard(lambda x, axis=axis: told(x, axis=axis), mesh, check_vma=vma)
            np.testing.assert_array_equal(jax.jit(f)(X), rolled(X, mesh, axis))
    np.testing.assert_array_equal(shard(lambda x: told(x, axis="x"))(X), rolled(X))


def check_the_interpreter_under_vmap():
    told = shift.with_options(interpret=True)
    f = shard(jax.vmap(lambda row: told(row, axis="x")))
    np.testing.assert_array_equal(jax.jit(f)(X), rolled(X))


def check_the_interpreter_on_both_axes():
    told = corner.with_options(interpret=True)
    f = jax.jit(shard(lambda x: told(x, rows="x", columns="y")))
    want = np.roll(X, (-4, -3), (0, 1)) + 2
    np.testing.assert_array_equal(f(X), want)


def check_results_vary_along_the_axes_that_are_named():
    told = gather.with_options(interpret=True)
    f = lambda x: told(x, axis="x")
    got = jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P("x")))(X[:4])
    np.testing.assert_array_equal(got, np.broadcast_to(X[:4], (16, 4, 6)))
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P())(X[:4])


def check_an_axis_that_is_left_to_xla():
    f = jax.shard_map(lambda x: shift(x, axis="x"), mesh=MESH, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    with pytest.raises(TransformError, match="leaves the axis 'y' of the mesh to XLA"):
        jax.jit(f)(X)


def check_derivatives_are_refused():
    f = shard(lambda x: shift(x, axis="x"))
    for derive in (jax.grad(lambda x: f(x).sum()), lambda x: jax.jvp(f, (x,), (x,))):
        with pytest.raises(
            TransformError, match=r"talks to other devices \(along x\), and what it sends has no automatic"
        ):
            derive(X)


def check_a_target_that_has_no_devices():
    f = shard(lambda x: shift.lower(x, axis="x", target="cuda:sm_90").texts and x)
    with pytest.raises(
        UnsupportedError, match="target 'cuda:sm_90' cannot run op 'axis_index'; run it in the interpreter"
    ):
        f(X)
