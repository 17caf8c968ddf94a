"""Kernels that talk to other devices, on meshes of eight; run by test_mesh.py."""

import contextlib
import re

import device_programs
import jax
import numpy as np
import pytest
from device_kernels import corner, cycle, gather, numbers, own_programs, shift
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile.errors import TransformError, UnsupportedError

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("x", "y"))
PERMUTED = Mesh(DEVICES[[3, 1, 0, 2, 7, 5, 6, 4]].reshape(4, 2), ("x", "y"))
BOTH = P("x", "y")
X = numbers(16, 6)


def shard(f, mesh=MESH, spec=BOTH, **kw):
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **kw)


def rolled(x, mesh=MESH, axis="x"):
    """Each part is on the next device along an axis. By NumPy: XLA takes 0.1 s for each mesh and axis."""
    k = mesh.axis_names.index(axis)
    return np.roll(x, x.shape[k] // mesh.shape[axis], k)


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


def check_cpu_on_meshes_of_all_sizes():
    for rows, columns in ((1, 2), (2, 1), (2, 2), (4, 2), (1, 8)):
        mesh = Mesh(DEVICES[: rows * columns].reshape(rows, columns), ("x", "y"))
        x = numbers(16, 8)
        for axis in ("x", "y"):
            f = jax.jit(shard(lambda x, axis=axis: shift(x, axis=axis), mesh))
            np.testing.assert_array_equal(f(x), rolled(x, mesh, axis))
    f = jax.jit(shard(lambda x: shift(x, axis="x"), PERMUTED, check_vma=False))
    with jt.config(timeout=np.inf):
        np.testing.assert_array_equal(f(X), rolled(X, PERMUTED))


def check_cpu_programs_and_lanes():
    f = jax.shard_map(lambda x: gather(x, axis="x"), mesh=MESH, in_specs=P("x"), out_specs=P(("x", "y")))
    got = np.asarray(jax.jit(f)(X)).reshape(8, 4, 4, 6)  # on each device, the rows of each
    np.testing.assert_array_equal(got, np.broadcast_to(X.reshape(4, 4, 6), (8, 4, 4, 6)))
    np.testing.assert_array_equal(jax.jit(shard(lambda x: own_programs(x, axis="x")))(X), X)
    lanes = jax.jit(shard(jax.vmap(lambda row: shift(row, axis="x"))))
    np.testing.assert_array_equal(lanes(X), rolled(X))


def check_cpu_atomics_and_numbers_that_are_set():
    f = jax.jit(shard(lambda x: corner(x, rows="x", columns="y")))
    np.testing.assert_array_equal(f(X), np.roll(X, (-4, -3), (0, 1)) + 2)


@jt.kernel(out_type=lambda x, **_: x, scratch=lambda x, **_: jt.signals())
def first_row(x, o, came, *, axis):
    jt.signal(came.on(axis, (jt.axis_index(axis) + 1) % jt.axis_size(axis)))
    jt.wait(came, 1)
    o[0] = x[0]


def check_cpu_rows_that_no_program_writes():
    with jt.config(poison=True):
        found = np.asarray(jax.jit(shard(lambda x: first_row(x, axis="x")))(X)).reshape(4, 4, 6)
    np.testing.assert_array_equal(found[:, 0], X.reshape(4, 4, 6)[:, 0])
    assert np.isnan(found[:, 1:]).all()


def check_cpu_calls_in_a_row_and_at_once():
    def rounds(x):
        return jax.lax.fori_loop(0, 101, lambda _, x: shift(x, axis="x", barrier=False), x)

    f = jax.jit(shard(rounds))
    flights = [f(X + np.float32(k)) for k in range(8)]  # several executions under way
    for k, got in enumerate(flights):
        np.testing.assert_array_equal(got, np.roll(X, 4 * 101, 0) + np.float32(k))


def fails(words, f, x=X):
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jax.jit(f)(x))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # what JAX keeps of a call with effects fails once more
        jax.effects_barrier()


def check_cpu_waits_end():
    """A wait that nobody ends fails the call in a sentence, and the process goes on."""
    with jt.config(timeout=0.3):
        late = (
            r"(?s)kernel shift, device \(x=\d\), program .*waited 0.3 s for came to reach 2: it stands at [01].*py:24"
        )
        fails(late, shard(lambda x: shift(x, axis="x", at_least=2)))
        fails(r"waited 0.3 s for came\[0\] to reach 1: it stands at 0", shard(lambda x: cycle(x, axis="x")))
        fails("one does not come|all devices along 'x': 1 of 4 have come", shard(lambda x: alone(x, axis="x")))
    fails("stands at 2 at the end of the call, and nobody waited", shard(lambda x: shift(x, axis="x", signals=2)))
    fails(
        r"there is no device \d+ of 4 along 'x'\n  at .*mesh_checks.py",
        shard(lambda x: astray(x, x[0, 0])),
        X + 9,
    )
    wrong = r"it raises came\[2\] by 0: it is at least 1"
    for k, value, words in ((7, 1, "there is no such signal"), (2, 0, wrong)):
        of = np.array([k, value], np.int32)
        f = shard(lambda x, of=of: raises(x, jax.numpy.asarray(of)))
        fails(rf"kernel raises, device \(x=\d\).*{words}\n  at .*mesh_checks.py", f)
    np.testing.assert_array_equal(jax.jit(shard(lambda x: shift(x, axis="x")))(X), rolled(X))


def check_cpu_a_peer_that_fails():
    """What one device finds wrong ends the waits of all at once."""
    with jt.config(debug=True, timeout=np.inf):  # nothing else ends them
        fails("assertion failed: a number is bad", shard(lambda x: picky(x, axis="x")))


def check_cpu_grids_that_do_not_wait():
    many = numbers(16, 3000)
    f = jax.jit(shard(lambda x: own_memory(x, axis="x")))
    np.testing.assert_array_equal(f(many), many + np.arange(16)[:, None] // 4)


def check_cpu_random_programs():
    device_programs.main(0, 6)


def check_cpu_finds_planted_faults():
    """Those that no order of the programs hides."""
    x = device_programs.inputs(3, 1, 0)
    mesh = Mesh(DEVICES[:3], ("x",))
    with jt.config(timeout=0.2):
        for fault in ("no signal", "a signal too many", "a wait for one more", "a cycle"):
            steps = device_programs.with_fault(0, fault)
            run = lambda x, steps=steps: device_programs.follow(x[0], axis="x", steps=steps)[None]
            fails("waited 0.2 s for|a signal too many", shard(run, mesh, P("x")), x)


def check_grids_that_are_too_large():
    many = numbers(4 * 2000, 1)
    with pytest.raises(UnsupportedError, match="2000 programs that wait for each other; at most 256 run at once"):
        jax.jit(jax.shard_map(lambda x: gather(x, axis="x"), mesh=MESH, in_specs=P("x"), out_specs=P("x"))).lower(many)


@jt.kernel(out_type=lambda x, **_: jt.like(x))
def alone(x, o, *, axis):
    @jt.when(jt.axis_index(axis) == 0)
    def _():
        jt.axis_barrier(axis)

    o[...] = x[...]


@jt.kernel(out_type=lambda x, **_: jt.like(x), scratch=[jt.signals()])
def picky(x, o, came, *, axis):
    me = jt.axis_index(axis)
    jt.assert_(me != 1, "a number is bad")
    jt.wait(came)
    o[...] = x[...]


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=lambda x, **_: x.shape,
    scratch=lambda x, **_: [jt.symmetric(x.shape, x.dtype)],
)
def own_memory(x, o, box, *, axis):
    i, j = jt.program_id(0), jt.program_id(1)
    box[i, j] = x[i, j] + jt.axis_index(axis).astype(x.dtype)
    o[i, j] = box[i, j]


@jt.kernel(out_type=lambda x, i: jt.like(x), scratch=lambda x, i: [jt.symmetric((1,), x.dtype)])
def astray(x, i, o, box):
    box.on("x", i[()].astype(np.int32))[0] = x[0, 0]
    o[...] = x[...]


@jt.kernel(out_type=lambda x, of: jt.like(x), scratch=lambda x, of: [jt.signals(3)])
def raises(x, of, o, came):
    jt.signal(came.on("x", jt.axis_index("x"))[of[0]], of[1])
    o[...] = x[...]


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
    for target, words in (("rocm:gfx942", "op 'axis_index'"), ("cuda:sm_90", "a kernel that talks to other devices")):
        f = shard(lambda x, target=target: shift.lower(x, axis="x", target=target).texts and x)
        found = pytest.raises(UnsupportedError, match=f"target '{target}' cannot run {words}.*in the interpreter")
        with jt.config(gpu_peers=False), found:
            f(X)


def check_calls_for_gpus_name_their_devices():
    """Group by group, by the numbers of this process; in place of the operand that says where a device is."""
    lane = np.vectorize(lambda device: device.local_hardware_id)
    f = jax.jit(shard(lambda x: shift(x, axis="x"), PERMUTED))
    with jt.config(arch="sm_90", timeout=0.25, poison=False):
        text = f.trace(X).lower(lowering_platforms=("cuda",)).as_text()
        for debug in (False, True):
            with jt.config(debug=debug):
                name = f.trace(X).lower(lowering_platforms=("cuda",)).as_text()
                assert ("@jtile_cuda_io(" in name) == debug
    groups = lane(PERMUTED.devices).T.reshape(-1)  # along x, once for each place along y
    assert f"groups = dense<[{', '.join(map(str, groups))}]>" in text
    assert "timeout = 250 : i64" in text
    assert re.search(r"@jtile_cuda\(%\w+\) ", text)  # one operand
