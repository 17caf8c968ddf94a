"""Elements that programs hand over one by one: what comes, and the faults that the interpreter finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import (
    DeadlockError,
    KernelTypeError,
    KernelValueError,
    ProtocolError,
    RaceError,
    UnsupportedError,
)

X = np.arange(4 * 8 * 64, dtype=np.float32).reshape(32, 64) % 251


def _boxes(x, **_):
    return [jt.symmetric(x.shape, x.dtype)]


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=4, scratch=_boxes)
def turned(x, o, box, *, fault: str = ""):
    """Each program posts eight rows, and receives those of the next."""
    p = jt.program_id(0)
    with jt.role("one", warps=4):
        if fault != "nobody posts":
            jt.post(box.tiles(8, 64), (p, 0), x.tiles(8, 64)[p, 0])
        if fault == "twice":
            jt.post(box.tiles(8, 64), (p, 0), x.tiles(8, 64)[p, 0])
        if fault == "loads":
            o[...] = box[...]
        next_ = jnp.where(p == 3, 0, p + 1)
        o.tiles(8, 64)[p, 0] = jt.receive(box, (jt.ds(next_ * 8, 8), slice(None)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_posted_is_received(dtype):
    x = X.astype(jnp.dtype(dtype))
    for seed in range(4):
        got = turned.interpret(x, seed=seed)
        np.testing.assert_array_equal(got, np.roll(x, -8, 0))


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("nobody posts", DeadlockError, r"waits at .* for element \(\d+, 0\) of box to be posted"),
        ("twice", ProtocolError, "a second time in this call"),
        ("loads", KernelValueError, "is posted to and received from, and is loaded or stored, too"),
    ],
)
def test_planted_faults(fault, kind, words):
    with pytest.raises(kind, match=words):
        turned.interpret(X, fault=fault)


def test_masked_lanes_are_not_waited_for():
    @jt.kernel(out_type=jt.like, grid=2, scratch=_boxes)
    def some(x, o, box):
        p, row = jt.program_id(0), jt.arange(32)[:, None]
        with jt.role("one", warps=4):
            if p == 0:
                jt.post(box, (slice(None), slice(None)), x[...], mask=row < 20)
            else:
                o[...] = jt.receive(box, (slice(None), slice(None)), mask=row < 20)

    np.testing.assert_array_equal(some.interpret(X), np.where(np.arange(32)[:, None] < 20, X, 0))


def test_each_lane_of_vmap_has_memory_of_its_own():
    x = np.stack([X, 2 * X])
    run = jax.vmap(lambda x: turned.with_options(interpret=True)(x))
    np.testing.assert_array_equal(run(x), np.roll(x, -8, 1))


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (lambda x, o, box: jt.receive(x, (slice(None), slice(None))), KernelTypeError, "takes symmetric memory"),
        (lambda x, o, box: jt.post(o, (0, slice(None)), x[0, :]), KernelTypeError, "takes symmetric memory"),
        (lambda x, o, box: jt.post(box, (0, slice(None)), jnp.zeros((64,), jnp.int32)), KernelTypeError, "int32"),
        (lambda x, o, box: jt.receive(box, (jt.arange(8), 0)), KernelTypeError, "no gathered index"),
    ],
)
def test_wrong_uses(body, kind, words):
    @jt.kernel(out_type=jt.like, scratch=_boxes)
    def wrong(x, o, box):
        with jt.role("one", warps=4):
            body(x, o, box)
            o[...] = x[...]

    with pytest.raises(kind, match=words):
        wrong.interpret(X)


def test_integers_are_not_posted():
    @jt.kernel(out_type=jt.like, scratch=_boxes)
    def wrong(x, o, box):
        with jt.role("one", warps=4):
            jt.post(box, (slice(None), slice(None)), x[...])
            o[...] = x[...]

    with pytest.raises(KernelTypeError, match="takes memory of float32, bfloat16, float16, got box of int32"):
        wrong.interpret(X.astype(np.int32))


def test_an_early_role_posts_behind_its_wait():
    @jt.kernel(out_type=jt.like, scratch=_boxes)
    def early(x, o, box, *, waits):
        with jt.role("one", warps=4, early=True):
            if waits:
                jt.wait_for_kernels()
            jt.post(box, (slice(None), slice(None)), x[...])
            if not waits:
                jt.wait_for_kernels()
            o[...] = jt.receive(box, (slice(None), slice(None)))

    np.testing.assert_array_equal(early.interpret(X, waits=True), X)
    with pytest.raises(KernelValueError, match="before it is known which call this is"):
        early.interpret(X, waits=False)


def test_machine_code():
    """Whoever waits loads words until none of their halves is zero."""
    ptx = turned.lower(X.astype(jnp.bfloat16), target="cuda:sm_90").texts["ptx"]
    assert "ld.relaxed.gpu.global.v2.b32" in ptx and "JT_POLL" in ptx and "min.u16x2" in ptx


def test_machine_code_of_masks():
    """What one load brings is waited for together: where a mask parts it, each element has a load of its own."""

    @jt.kernel(out_type=jt.like, scratch=_boxes)
    def some(x, o, box, *, parted):
        which = jt.arange(64) >= 3 if parted else jt.arange(32)[:, None] < 20
        with jt.role("one", warps=4):
            jt.post(box, (slice(None), slice(None)), x[...])
            o[...] = jt.receive(box, (slice(None), slice(None)), mask=which)

    lower = lambda dtype, parted: some.lower(X.astype(dtype), parted=parted, target="cuda:sm_90").texts["ptx"]
    assert "ld.relaxed.gpu.global.v4.b32" in lower(np.float32, False)
    assert "ld.relaxed.gpu.global.b32" in (text := lower(np.float32, True)) and "gpu.global.v4" not in text
    with pytest.raises(UnsupportedError, match="and masks of whole lines"):
        lower(jnp.bfloat16, True)


def test_too_much_memory():
    @jt.kernel(out_type=jt.like, scratch=lambda x: [jt.symmetric((1 << 15, 1 << 13), x.dtype)])
    def far(x, o, box):
        with jt.role("one", warps=4):
            jt.post(box, (0, jt.ds(0, 64)), x[0, :])
            o[0, :] = jt.receive(box, (0, jt.ds(0, 64)))

    with pytest.raises(UnsupportedError, match="less than 512 MiB"):
        _ = far.lower(X, target="cuda:sm_90").image


def test_other_targets_have_no_form():
    with pytest.raises(UnsupportedError):
        turned.lower(X, target="cpu").image


def test_small_tiles_of_16_bits():
    """A load is of 32 bits at least, so that neighbours are one thread's where there are fewer of them than threads."""

    @jt.kernel(out_type=jt.like, scratch=_boxes)
    def small(x, o, box):
        with jt.role("one", warps=4):
            jt.post(box, (slice(None), slice(None)), x[...])
            o[...] = jt.receive(box, (slice(None), slice(None)))

    assert "v4.b32" in small.lower(X[:4, :32].astype(jnp.bfloat16), target="cuda:sm_90").texts["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_the_gpu(dtype):
    """Call after call of one site: its memory is zero again when it has its turn."""
    x = jnp.asarray(X, dtype)
    run = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: turned(y), x))
    for _ in range(3):
        np.testing.assert_array_equal(run(x), x)  # twice around


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=2,
    scratch=lambda x, **_: [jt.symmetric((jt.axis_size("x"), *x.shape), x.dtype)],
)
def handed_on(x, o, box, *, fault: str = ""):
    """Each device posts its rows to the next one, and receives those of the one before."""
    n, me, p = jt.axis_size("x"), jt.axis_index("x"), jt.program_id(0)
    there, before = (me + 1) % n, (me + n - 1) % n
    rows = (slice(None), jt.ds(p * 2, 2), slice(None))
    with jt.role("one", warps=4):
        if fault == "receives there":
            jt.receive(box.on("x", there), (before, *rows[1:]))
        jt.post(box.on("x", there), (me, *rows[1:]), x[rows[1:]])
        o[rows[1:]] = x[rows[1:]] if fault == "does not wait" else jt.receive(box, (before, *rows[1:]))


PARTS = X.reshape(-1)[: 3 * 4 * 8].reshape(3, 4, 8)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_posted_to_another_device(seed):
    # each device waits for one other only, so that three calls need two devices
    got = handed_on.interpret(PARTS[:2], mesh={"x": 2}, seed=seed)
    np.testing.assert_array_equal(got, PARTS[[1, 0]])


def test_planted_faults_between_devices():
    with pytest.raises(
        RaceError, match=r"it posts to box of device .*, which may still be in the call before the last"
    ):
        handed_on.interpret(PARTS[:2], mesh={"x": 2}, fault="does not wait")
    with pytest.raises(
        KernelValueError, match="is of another device, and programs receive what is posted to their own"
    ):
        handed_on.interpret(PARTS[:2], mesh={"x": 2}, fault="receives there")


def test_machine_code_of_posts_to_another_device():
    """Whoever waits looks at what other devices have written, and nobody waits until it has come there."""
    shape = jax.ShapeDtypeStruct((4, 8), np.float32)
    ptx = handed_on.lower(shape, mesh={"x": 2}, target="cuda:sm_90").texts["ptx"]
    posts = ptx[ptx.index("st.global") :]
    assert "ld.relaxed.sys.global" in ptx and "fence" not in posts[: posts.index("JT_POLL")]
