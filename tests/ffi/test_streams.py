"""Two kernels in flight on two streams of an NVIDIA GPU. That they are, the kernels see themselves: each says that
it is there, and waits until the other is."""

import concurrent.futures

import cuda_streams
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.lowering import platforms

pytestmark = pytest.mark.gpu
PATIENCE = 100_000  # looks at the other, some tenths of a second
PROGRAMS = 64


def _types(there, x):
    some = jax.ShapeDtypeStruct((1,), jnp.int32)
    return jt.like(there), some, jax.ShapeDtypeStruct((x.shape[0],), jnp.float32), jt.like(x, shape=(1,))


@jt.kernel(out_type=_types, grid=lambda there, x: x.shape[0], alias={"there": "here"})
def meeting(there, x, here, seen, parts, total):
    """Program 0 says that its kernel is here, and waits for the other; the last of the programs sums up."""
    i = jt.program_id(0)
    if i == 0:
        jt.atomic_add(here, 0, 1)
        n, tries = jt.atomic_max(here, 0, 0), jnp.int32(0)
        while (n < 2) & (tries < PATIENCE):
            n, tries = jt.atomic_max(here, 0, 0), tries + 1
        seen[0] = n
    parts[i] = x[i, :].sum()
    if jt.arrive(jt.counters("all", 1), 0, PROGRAMS):
        total[0] = parts[...].sum()


@jt.kernel(out_type=lambda there: (there, jt.like(there, shape=(2,))), grid=1, alias={"there": "here"})
def stamped(there, here, stamps):
    """The same without sums; the time when it begins and when it has met the other, nanoseconds modulo 2^32."""
    with jt.role("all", warps=4):
        stamps[0] = jt.clock().astype(jnp.int32)
        jt.atomic_add(here, 0, 1)
        n, tries = jt.atomic_max(here, 0, 0), jnp.int32(0)
        while (n < 2) & (tries < PATIENCE):
            n, tries = jt.atomic_max(here, 0, 0), tries + 1
        stamps[1] = jt.clock().astype(jnp.int32)


def launcher_of(kernel, *args) -> cuda_streams.Launcher:
    with jt.config(poison=False):  # whose start would be one more operand
        return cuda_streams.Launcher(kernel.lower(*args, target=platforms.named("cuda").here()))


@pytest.fixture(scope="module")
def launcher():
    made = launcher_of(meeting, jnp.zeros(1, jnp.int32), jnp.zeros((PROGRAMS, 256)))
    yield made
    made.close()


def arguments(k: int):
    """The arrays of launch k, but for the one where two meet."""
    x = jnp.full((PROGRAMS, 256), float(k + 1))
    outs = jnp.zeros(1, jnp.int32), jnp.zeros(PROGRAMS), jnp.zeros(1)
    return jax.block_until_ready((x, *outs))


def check(args, k: int, seen: int) -> None:
    _, found, parts, total = map(np.asarray, args)
    assert found[0] == seen
    np.testing.assert_array_equal(parts, 256.0 * (k + 1))
    assert total[0] == 256.0 * PROGRAMS * (k + 1)


def launch(launcher, stream, meet, args) -> None:
    cuda_streams.make_current()
    x, seen, parts, total = args
    launcher.launch(stream, meet, x, meet, seen, parts, total)


def test_two_kernels_of_one_call_run_at_the_same_time(launcher):
    """From two threads of the host; while they run, the programs of both arrive at counters of their own."""
    with cuda_streams.streams(2) as pair, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for k in range(20):
            meet = jax.block_until_ready(jnp.zeros(1, jnp.int32))
            args = arguments(k), arguments(k + 1)
            list(pool.map(lambda s, a, meet=meet: launch(launcher, s, meet, a), pair, args))
            for n, stream in enumerate(pair):
                cuda_streams.wait(stream)
                check(args[n], k + n, seen=2)


def test_on_one_stream_they_do_not_meet(launcher):
    with cuda_streams.streams(1) as (stream,):
        meet = jax.block_until_ready(jnp.zeros(1, jnp.int32))
        args = arguments(3), arguments(4)
        for a in args:
            launch(launcher, stream, meet, a)
        cuda_streams.wait(stream)
        check(args[0], 3, seen=1), check(args[1], 4, seen=2)


def test_a_graph_and_a_launch_at_the_same_time(launcher):
    """The third stream finds no counters made: they are while the graph is recorded."""
    with cuda_streams.streams(4) as (one, two, record, other):
        meet, args = jnp.zeros(1, jnp.int32), [arguments(k) for k in range(4)]
        for stream, a in ((one, args[2]), (two, args[3])):
            launch(launcher, stream, jax.block_until_ready(jnp.ones(1, jnp.int32)), a)
        with cuda_streams.captured(record) as graph:
            launch(launcher, record, jax.block_until_ready(meet), args[0])
        cuda_streams.ask("cuGraphLaunch", graph[0], one)
        launch(launcher, other, meet, args[1])
        for stream in (one, two, other):
            cuda_streams.wait(stream)
        for k in range(4):
            check(args[k], k, seen=2)


def test_what_the_clock_says():
    """Both run at once for most of their time; on one stream, one begins when the other has ended."""
    if platforms.named("cuda").here().arch != "sm_90":
        pytest.skip("roles need sm_90")
    kernel = launcher_of(stamped, jnp.zeros(1, jnp.int32))
    with cuda_streams.streams(2) as pair:
        for two in (pair, [pair[0], pair[0]]):
            meet, (a, b) = jnp.zeros(1, jnp.int32), [jnp.zeros(2, jnp.int32) for _ in range(2)]
            jax.block_until_ready((meet, a, b))
            for stream, stamps in zip(two, (a, b), strict=True):
                kernel.launch(stream, meet, meet, stamps)
            for stream in pair:
                cuda_streams.wait(stream)
            since = lambda t, first=int(a[0]): (int(t) - first + 2**31) % 2**32 - 2**31
            begin, end = zip(map(since, a), map(since, b), strict=True)
            shared = min(end) - max(begin)
            print(f"both run for {shared} ns, of {end[0] - begin[0]} and {end[1] - begin[1]} ns")
            assert (shared > 0) == (two is pair)
    kernel.close()
