"""Random programs of puts, gets, signals and waits between devices: one kernel that follows a script, what the script
comes to in NumPy, and faults to plant in it.

A script is a tuple of steps, each of which every device takes; step k has its own slot of memory and its own signals.
All numbers are whole and small, so that sums are exact in any order.
"""

from __future__ import annotations

import random

import numpy as np

import jtile as jt
from jtile.errors import DeadlockError, ProtocolError, RaceError, UninitializedReadError

WIDTH = 4
MODULUS = 31
STEPS = ("put", "get", "again", "broadcast", "chain", "count", "set", "own", "barrier")
# A fault: the steps that it can stand in, and what it has to be found as.
FAULTS = {
    "no wait": (("put", "get", "broadcast", "set"), (RaceError, UninitializedReadError, ProtocolError)),
    "no signal": (("put", "get", "again", "broadcast", "chain", "set"), DeadlockError),
    "a signal too many": (("put", "get", "broadcast"), (ProtocolError, RaceError)),
    "a wait for one more": (("put", "get", "broadcast", "set"), DeadlockError),
    "no acknowledgement": (("again",), (RaceError, ProtocolError)),
    "no meeting": (("count",), (RaceError, UninitializedReadError)),
    "before it is written": (("put", "broadcast"), (RaceError, UninitializedReadError)),
    "a cycle": (("chain",), DeadlockError),
}


def script(seed: int) -> tuple[tuple[str, int], ...]:
    """Some steps, each with a number."""
    rng = random.Random(seed)
    return tuple((rng.choice(STEPS), rng.randrange(1, 4)) for _ in range(rng.randrange(2, 6)))


def with_fault(seed: int, fault: str) -> tuple[tuple[str, int], ...]:
    """A random script for three devices with a step, at a random place, in which the fault stands."""
    rng = random.Random(seed)
    steps = list(script(seed))
    kind = rng.choice(FAULTS[fault][0])
    steps.insert(rng.randrange(len(steps) + 1), (f"{kind}: {fault}", rng.randrange(1, 3)))  # another device
    return tuple(steps)


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=lambda x, **_: x.shape[0],
    scratch=lambda x, *, steps, **_: [
        jt.symmetric((x.shape[0], max(len(steps), 1), WIDTH), x.dtype),
        jt.signals((x.shape[0], max(len(steps), 1), 2)),
    ],
)
def follow(x, o, box, came, *, axis, steps):
    """x [programs, WIDTH]: each program follows the script with programs of its own number."""
    p = jt.program_id(0)
    value = x[p]
    for k, (name, number) in enumerate(steps):
        kind, _, fault = name.partition(": ")
        value = _STEPS[kind](value, number, fault, axis, box, came, p, k) % MODULUS
    o[p] = value
    jt.axis_barrier(axis)


def _signal(came, fault, *at):
    for _ in range({"no signal": 0, "a signal too many": 2}.get(fault, 1)):
        jt.signal(came[at])


def _wait(came, fault, *at, at_least=1):
    if fault != "no wait":
        jt.wait(came[at], at_least + (fault == "a wait for one more"))


def _put(value, number, fault, axis, box, came, p, k):
    """Into the memory of the device `number` further on."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    to = (me + number) % n
    if fault == "before it is written":
        _signal(came.on(axis, to), fault, p, k, 0)
    box.on(axis, to)[p, k] = value
    if fault != "before it is written":
        _signal(came.on(axis, to), fault, p, k, 0)
    _wait(came, fault, p, k, 0)
    return value + box[p, k]


def _get(value, number, fault, axis, box, came, p, k):
    """Out of the memory of the device `number` further on, which says when it may be read."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    box[p, k] = value
    _signal(came.on(axis, (me + n * number - number) % n), fault, p, k, 0)
    _wait(came, fault, p, k, 0)
    return value + 2 * box.on(axis, (me + number) % n)[p, k]


def _again(value, number, fault, axis, box, came, p, k):
    """Twice into the same memory, the second time when the first has been read."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    to, back = (me + number) % n, (me + n * number - number) % n
    box.on(axis, to)[p, k] = value
    _signal(came.on(axis, to), fault, p, k, 0)
    jt.wait(came[p, k, 0])
    first = box[p, k]
    if fault != "no acknowledgement":
        jt.signal(came.on(axis, back)[p, k, 1])
        jt.wait(came[p, k, 1])
    box.on(axis, to)[p, k] = value + 1
    jt.signal(came.on(axis, to)[p, k, 0])
    jt.wait(came[p, k, 0], 2)
    return value + first + box[p, k]


def _broadcast(value, number, fault, axis, box, came, p, k):
    """From one device to all."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)

    @jt.when(me == number % n)
    def _():
        for d in range(n):
            if fault == "before it is written":
                _signal(came.on(axis, d), fault, p, k, 0)
            box.on(axis, d)[p, k] = value
            if fault != "before it is written":
                _signal(came.on(axis, d), fault, p, k, 0)

    _wait(came, fault, p, k, 0)
    return value + box[p, k]


def _chain(value, number, fault, axis, box, came, p, k):
    """From device to device: each adds its own and hands on."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    box[p, k] = value  # of the first; of others what they get

    @jt.when((me > 0) | (fault == "a cycle"))
    def _():
        jt.wait(came[p, k, 0])
        box[p, k] = value + box.on(axis, (me + n - 1) % n)[p, k]

    if fault != "no signal":

        @jt.when((me < n - 1) | (fault == "a cycle"))
        def _():
            jt.signal(came.on(axis, (me + 1) % n)[p, k, 0])

    return box[p, k] + number


def _count(value, number, fault, axis, box, came, p, k):
    """All add to the memory of one device, between two meetings."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)

    @jt.when(me == number % n)
    def _():
        box[p, k] = jt.zeros((WIDTH,), value.dtype)

    jt.axis_barrier(axis)
    jt.atomic_add(box.on(axis, number % n), (p, k), value)
    if fault != "no meeting":
        jt.axis_barrier(axis)
    return value + box.on(axis, number % n)[p, k]


def _set(value, number, fault, axis, box, came, p, k):
    """Pieces one after another, each announced by the next number."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    to = (me + 1) % n
    for j in range(WIDTH):
        box.on(axis, to)[p, k, j] = value[j] + number
        if fault != "no signal":
            jt.signal(came.on(axis, to)[p, k, 0], j + 1, "set")
    total = value
    for j in range(WIDTH):
        last = j == WIDTH - 1
        _wait(came, fault if last or fault == "no wait" else "", p, k, 0, at_least=j + 1)
        total = total + box[p, k, j]
    return total


def _own(value, number, fault, axis, box, came, p, k):
    """Nothing that others see."""
    box[p, k] = value * number
    return box[p, k] + jt.axis_index(axis).astype(value.dtype)


def _barrier(value, number, fault, axis, box, came, p, k):
    jt.axis_barrier(axis)
    return value + number


_STEPS = {"put": _put, "get": _get, "again": _again, "broadcast": _broadcast, "chain": _chain, "count": _count,
          "set": _set, "own": _own, "barrier": _barrier}  # fmt: skip


def expected(x: np.ndarray, steps) -> np.ndarray:
    """x [devices, programs, WIDTH]."""
    n, v = len(x), x
    for name, number in steps:
        match name:
            case "put":
                v = v + np.roll(v, number, 0)
            case "get":
                v = v + 2 * np.roll(v, -number, 0)
            case "again":
                v = v + 2 * np.roll(v, number, 0) + 1
            case "broadcast":
                v = v + v[number % n]
            case "chain":
                v = np.cumsum(v, 0) + number
            case "count":
                v = v + v.sum(0)
            case "set":
                v = v + (np.roll(v, 1, 0) + number).sum(-1, keepdims=True)
            case "own":
                v = v * number + np.arange(n).reshape(n, 1, 1)
            case "barrier":
                v = v + number
        v = v % MODULUS
    return v.astype(x.dtype)


def inputs(devices: int, programs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 9, (devices, programs, WIDTH)).astype(np.float32)


__all__ = ["FAULTS", "expected", "follow", "inputs", "script", "with_fault"]


def main(first: int, last: int) -> None:
    """Compare scripts on the host devices of this process, `python device_programs.py 0 200`."""
    import jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    for seed in range(first, last):
        n = (2, 3, 8)[seed % 3]
        steps, x = script(seed), inputs(n, 1 + seed % 2, seed)
        mesh = Mesh(np.array(jax.devices()[:n]), ("x",))
        run = lambda x, steps=steps: follow(x[0], axis="x", steps=steps)[None]
        f = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
        for _ in range(3):
            np.testing.assert_array_equal(f(x), expected(x, steps), err_msg=f"seed {seed}: {steps}")


if __name__ == "__main__":
    import sys

    main(*map(int, sys.argv[1:]))
