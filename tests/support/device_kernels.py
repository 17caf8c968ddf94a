"""Kernels that talk to other devices of a mesh, right ones and with planted faults."""

import numpy as np

import jtile as jt


def _same(x, **_):
    return jt.like(x)


def _box_and_signal(x, **_):
    return [jt.symmetric(x.shape, x.dtype), jt.signals()]


@jt.kernel(out_type=_same, scratch=_box_and_signal)
def shift(x, o, box, came, *, axis, wait=True, barrier=True, at_least=1, signals=1):
    """The array of the device in front; the meta-parameters plant faults."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    box.on(axis, (me + 1) % n)[...] = x[...]
    for _ in range(signals):
        jt.signal(came.on(axis, (me + 1) % n))
    if wait:
        jt.wait(came, at_least)
    o[...] = box[...]
    if barrier:
        jt.axis_barrier(axis)


@jt.kernel(
    out_type=lambda x, *, axis: jt.like(x, shape=(jt.axis_size(axis), *x.shape)),
    grid=lambda x, **_: x.shape[0],
    scratch=lambda x, *, axis: [
        jt.symmetric((jt.axis_size(axis), *x.shape), x.dtype),
        jt.signals((x.shape[0], jt.axis_size(axis))),
    ],
)
def gather(x, o, box, came, *, axis):
    """Each program sends a row to all devices, and takes that row of each as it comes. The next call but one is after
    all of it, since a device needs something of every other one in each call."""
    n, me, k = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for d in jt.range(n):
        box.on(axis, d)[me, k] = x[k]
        jt.signal(came.on(axis, d)[k, me])
    for d in jt.range(n):
        jt.wait(came[k, d])
        o[d, k] = box[d, k]


@jt.kernel(
    out_type=_same,
    scratch=lambda x, **_: [jt.symmetric(x.shape, x.dtype), jt.symmetric((1,), np.int32), jt.signals(2)],
)
def corner(x, o, box, count, came, *, rows, columns):
    """On two axes: the array of the device that is one further along both; a counter of atomic additions, and a signal
    that is set to higher numbers."""
    i, j = jt.axis_index(rows), jt.axis_index(columns)
    n, m = jt.axis_size(rows), jt.axis_size(columns)
    to = lambda ref: ref.on(rows, (i + n - 1) % n).on(columns, (j + m - 1) % m)
    to(box)[...] = x[...]
    for k in jt.range(3):
        jt.signal(to(came)[0], k + 1, "set")
    jt.wait(came[0], 3)

    @jt.when(jt.axis_index(columns) == 0)
    def _():
        count[0] = 0

    jt.axis_barrier(columns)
    jt.atomic_add(count.on(columns, 0), (0,), 1)
    jt.axis_barrier(columns)
    o[...] = box[...] + count.on(columns, 0)[0].astype(o.dtype)
    jt.axis_barrier(columns)
    jt.axis_barrier(rows)
    jt.axis_barrier(columns)


@jt.kernel(out_type=_same, scratch=lambda x, **_: [jt.signals(2)])
def cycle(x, o, came, *, axis):
    """The first two devices wait for each other before they signal."""
    me = jt.axis_index(axis)

    @jt.when(me < 2)
    def _():
        jt.wait(came[0])
        jt.signal(came.on(axis, 1 - me)[0])

    o[...] = x[...]


@jt.kernel(out_type=_same, grid=2, scratch=_box_and_signal)
def own_programs(x, o, box, came, *, axis):
    """Programs of one device hand over to each other by its own signals."""
    jt.axis_index(axis)

    @jt.when(jt.program_id(0) == 0)
    def _():
        box[...] = x[...]
        jt.signal(came)

    @jt.when(jt.program_id(0) == 1)
    def _():
        jt.wait(came)
        o[...] = box[...]


def numbers(*shape) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def shifted(x: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.roll(x, 1, axis)


@jt.kernel(out_type=_same, scratch=_box_and_signal)
def pushed(x, o, box, came, *, fault=""):
    """The array of the device in front, by a copy from shared memory; one role copies and signals, another waits."""
    n, me = jt.axis_size("x"), jt.axis_index("x")
    A, ready = jt.alloc(x.shape, x.dtype), jt.barrier()
    there = (me + 1) % n
    with jt.role("sender", warps=4):
        A.store(x[...])
        jt.fence_shared()
        if fault == "another role signals":
            jt.async_copy(A, box.on("x", there).at[:, :])
            ready[0].arrive()
        elif fault == "a signal before":
            jt.signal(came.on("x", there))
            jt.async_copy(A, box.on("x", there).at[:, :])
        else:
            jt.async_copy(A, box.on("x", there).at[:, :])
            if fault != "no signal":
                jt.signal(came.on("x", there), 2 if fault == "one more" else 1)
        jt.store_wait(0)
    with jt.role("receiver", warps=4):
        if fault == "another role signals":
            ready[0].wait(0)
            jt.signal(came.on("x", there))
        if fault != "no wait":
            jt.wait(came)
        o[...] = box[...]
