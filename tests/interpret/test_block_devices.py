"""Roles that talk to other devices, in the interpreter: copies into the memory of others, and the faults it finds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_kernels import pushed

import jtile as jt
from jtile.errors import DeadlockError, KernelValueError, ProtocolError, RaceError, UninitializedReadError
from jtile.ops import hopper_travelling

X = np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)


@pytest.mark.parametrize("seed", range(4))
def test_results(seed):
    # each device waits for one other only, so that three calls need two devices
    np.testing.assert_array_equal(pushed.interpret(X[:2], mesh={"x": 2}, seed=seed), X[[1, 0]])


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("another role signals", (RaceError, UninitializedReadError), "role sender, a copy|which nobody wrote"),
        ("a signal before", (RaceError, UninitializedReadError), "race: it|which nobody wrote"),
        ("no wait", (RaceError, UninitializedReadError), "race: it|which nobody wrote"),
        ("no signal", DeadlockError, r"waits at .* for came of device \(x=.*\) to reach 1: it stands at 0"),
        ("one more", ProtocolError, "what is left is a signal too many"),
    ],
)
def test_planted_faults(fault, kind, words):
    for seed in range(4):
        with pytest.raises(kind, match=words):
            pushed.interpret(X[:2], mesh={"x": 2}, seed=seed, fault=fault)


def test_copies_from_other_devices_are_refused():
    @jt.kernel(out_type=jt.like, scratch=lambda x: [jt.symmetric(x.shape, x.dtype), jt.signals()])
    def pulled(x, o, box, came):
        A, full = jt.alloc(x.shape, x.dtype), jt.barrier()
        with jt.role("one", warps=4):
            jt.signal(came.on("x", 0))
            full[0].expect(A.nbytes)
            jt.async_copy(box.on("x", 0).at[:, :], A, full[0])
            full[0].wait(0)
            o[...] = A.load()

    with pytest.raises(KernelValueError, match="comes from this device's own memory"):
        pulled.interpret(X, mesh={"x": 3})


@pytest.mark.parametrize(("n", "k"), [(2, 40), (3, 16)])
def test_sums_of_products_over_devices(n, k):
    """Tiles that a part of the next one is made behind, and tiles of too few terms for that."""
    rng = np.random.default_rng(n)
    x, w = (rng.integers(-2, 3, s).astype(jnp.bfloat16) for s in ((n, n, 32, k), (n, k, 32)))
    sizes = dict(blocks=2, bm=16, bn=32, bk=8, slots=2)
    got = hopper_travelling.scattered.interpret(x, w, axis="x", mesh={"x": n}, seed=n, **sizes)
    want = np.einsum("edmk,ekn->dmn", x.astype(np.float32), w.astype(np.float32))
    np.testing.assert_array_equal(got.astype(np.float32), want)


def test_early_roles_meet_other_devices_behind_their_wait():
    """In front of it the number of the call is not known: the call before of the same site may still run."""

    @jt.kernel(out_type=jt.like, scratch=lambda x, **_: [jt.symmetric(x.shape, x.dtype), jt.signals()])
    def early(x, o, box, came, *, waits):
        there = (jt.axis_index("x") + 1) % jt.axis_size("x")
        with jt.role("sender", warps=4, early=True):
            if waits:
                jt.wait_for_kernels()
            box.on("x", there)[...] = x[...]
            jt.signal(came.on("x", there))
        with jt.role("receiver", warps=4):
            jt.wait(came)
            o[...] = box[...]

    np.testing.assert_array_equal(early.interpret(X[:2], mesh={"x": 2}, waits=True), X[[1, 0]])
    with pytest.raises(KernelValueError, match="in an early role meets other devices before it is known"):
        early.interpret(X[:2], mesh={"x": 2}, waits=False)


@jt.kernel(out_type=lambda x, **_: (jt.like(x), jt.like(x)), grid=3, scratch=lambda x, **_: [jt.signals((1,))])
def around(x, y, z, came, *, wanted):
    """z: what the next program of the grid has written to y."""
    p, n = jt.program_id(0), jt.num_programs(0)
    Y, rows = jt.barrier(1), x.shape[0] // 3
    with jt.role("writer", warps=4):
        y.tiles(rows)[p] = x.tiles(rows)[p] + 1
        jt.signal(came[0])
        jt.wait(came[0], wanted)
        Y[0].arrive()
    with jt.role("reader", warps=4):
        Y[0].wait(0)
        z.tiles(rows)[p] = y.tiles(rows)[(p + 1) % n]


def test_programs_of_one_device_wait_for_each_other():
    """Without an axis of a mesh: also under jit and vmap, where each lane has signals of its own."""
    x = jnp.arange(12, dtype=jnp.float32)
    want = np.roll(x, -4) + 1
    for seed in range(3):
        np.testing.assert_array_equal(around.interpret(x, seed=seed, wanted=3)[1], want)
    with jt.config(interpret=True):
        each = jax.jit(jax.vmap(lambda x: around(x, wanted=3)[1]))
        np.testing.assert_array_equal(each(jnp.stack([x, -x])), [want, np.roll(-x, -4) + 1])
    record = json.loads(around.lower(jnp.zeros(384), target="cuda:sm_90", wanted=3).launch["record"])
    assert record["devices"]["axes"] == [["one device", 1]] and record["devices"]["waits"]


@pytest.mark.parametrize(("wanted", "kind", "words"), [(1, RaceError, "race"), (4, DeadlockError, "came.*to reach 4")])
def test_faults_of_programs_of_one_device(wanted, kind, words):
    x = jnp.arange(12, dtype=jnp.float32)
    with pytest.raises(kind, match=words):
        for seed in range(4):
            around.interpret(x, seed=seed, wanted=wanted)
