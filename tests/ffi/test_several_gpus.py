"""Several GPUs in one process: a program on any one of them, on all at once, and cut over them."""

import concurrent.futures
import contextlib
import functools
import time
from typing import NamedTuple

import device_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_kernels import numbers, pushed, shift
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile import ops
from jtile.ops import hopper_normed_sums, hopper_travelling
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


def by_cpu(f, *args):
    """What a reference gives, by a CPU where JAX has one: on a GPU XLA tries many ways of each product of float32."""
    with contextlib.suppress(RuntimeError):
        host = jax.devices("cpu")[0]
        with jax.default_device(host):
            return np.asarray(jax.jit(f)(*jax.device_put(args, host)), np.float32)
    return np.asarray(jax.jit(f)(*args), np.float32)


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
    assert relative_error(got, by_cpu(decode_attention_reference, *args)) < 4e-3


def test_all_at_once(gpus):
    """From a thread for each, counters of arrivals included."""
    want = by_cpu(decode_attention_reference, *decoding())

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
    assert relative_error(program(*args), by_cpu(decode_attention_reference, q, k, v, n)) < 4e-3


def test_products_and_attention_over_both(put):
    a, b = normal(3, 512, 384), normal(4, 384, 640)
    want = by_cpu(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32), a, b)
    for args in ((put(a, "x"), put(b)), (put(a), put(b, None, "x")), (put(a, None, "x"), put(b, "x"))):
        assert relative_error(jax.jit(ops.matmul)(*args), want) < 4e-3
    q, k, v = (normal(5 + j, 4, 256, 4, 128) for j in range(3))
    loss = lambda f: jax.grad(lambda *x: f(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2))
    exact = [by_cpu(lambda *x, j=j: loss(attention_reference)(*x)[j], q, k, v) for j in range(3)]
    for spec in (("x",), (None, None, "x")):
        program, text = compiled(loss(ops.attention), *[put(x, *spec) for x in (q, k, v)])
        assert "all-gather" not in text
        for got, want in zip(program(*[put(x, *spec) for x in (q, k, v)]), exact, strict=True):
            assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("spec", [("x",), (None, None, "x")], ids=["rows", "heads"])
def test_gradients_with_functions_over_both(put, spec):
    q, k, v = (normal(8 + j, 2, 256, 4, 128) for j in range(3))
    sloped = lambda s, b, h, i, j: s + (h + 1).astype(jnp.float32) * 0.1 * (j - i).astype(jnp.float32)
    loss = lambda f: jax.grad(lambda *x: f(*x, score=sloped, causal=True).astype(jnp.float32).sum(), (0, 1, 2))
    program, text = compiled(loss(ops.attention), *[put(x, *spec) for x in (q, k, v)])
    assert "all-gather" not in text and "all-reduce" not in text
    assert "jtile_hopper_flex_backward" in text or jt.architecture() != "sm_90"
    for j, got in enumerate(program(*[put(x, *spec) for x in (q, k, v)])):
        want = by_cpu(lambda *x, j=j: loss(attention_reference)(*x)[j], q, k, v)
        assert relative_error(got, want) < 1e-2


def test_inside_of_shard_map(put):
    q, k, v, n = decoding()
    args = [put(x, "x") for x in (q, k, v, n)]
    shards = jax.shard_map(ops.decode_attention, mesh=args[0].sharding.mesh, in_specs=(P("x"),) * 4, out_specs=P("x"))
    assert relative_error(jax.jit(shards)(*args), by_cpu(decode_attention_reference, q, k, v, n)) < 4e-3


class Talk(NamedTuple):
    """A mesh of so many GPUs in some order; calling it makes a function of the part of each device a program."""

    mesh: jax.sharding.Mesh

    def __call__(self, f):
        return jax.jit(jax.shard_map(f, mesh=self.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))

    @property
    def n(self) -> int:
        return self.mesh.size

    @property
    def x(self) -> np.ndarray:
        """Two rows for each device."""
        return numbers(2 * self.n, 2)

    def summed(self, x: np.ndarray) -> np.ndarray:
        """The sum of what the devices have, for each of them."""
        parts = x.reshape(self.n, -1, *x.shape[1:])
        return np.tile(parts.sum(0), (self.n,) + (1,) * (x.ndim - 1))


@pytest.fixture(scope="module", params=[[0, 1], [1, 0], [2, 0, 3, 1]], ids=["two", "turned", "four"])
def talk(request):
    """Two GPUs in one order or the other, and four."""
    found, order = jax.devices(), request.param
    if len(found) < len(order):
        pytest.skip(f"{len(found)} GPUs: {len(order)} are needed")
    chosen = [found[k] for k in order]
    if not jt.can_talk(chosen):
        pytest.skip("the memory of one GPU cannot be reached from another")
    return Talk(jax.make_mesh((len(order),), ("x",), axis_types=(AxisType.Auto,), devices=chosen))


def test_kernels_that_talk(talk):
    """Calls in a row, in a loop, and several in one round of it, which XLA may record as a graph."""
    x = talk.x
    moved = np.roll(x, 2, 0)
    once = talk(lambda x: shift(x, axis="x"))
    for _ in range(20):
        np.testing.assert_array_equal(once(x), moved)
    turns = 250 * talk.n + 1
    last = talk.n > 2  # each waits for one peer only, so that another one could be two calls behind
    rounds = talk(lambda x: jax.lax.fori_loop(0, turns, lambda _, x: shift(x, axis="x", barrier=last), x))
    np.testing.assert_array_equal(rounds(x), moved)

    def several(_, x):
        for _ in range(9):
            x = ops.collectives.all_reduce(shift(x, axis="x"), "x") / talk.n
        return x

    np.testing.assert_array_equal(talk(lambda x: jax.lax.fori_loop(0, 100, several, x))(x), talk.summed(x) / talk.n)


def test_ten_thousand_calls(talk):
    total = talk(lambda x: ops.collectives.all_reduce(x, "x") / talk.n)
    x = jnp.asarray(talk.x)
    for _ in range(10_000):
        x = total(x)
    np.testing.assert_array_equal(x, talk.summed(talk.x) / talk.n)


def test_the_same_bits(talk):
    x = np.asarray(normal(9, talk.n * 64, 1000))
    total = talk(lambda x: ops.collectives.all_reduce(x, "x"))
    first = np.asarray(total(x))
    assert relative_error(first, talk.summed(x.astype(np.float32))) < 4e-3
    assert all(np.array_equal(first, np.asarray(total(x))) for _ in range(100))


PROGRAMS, GROUP = 200, 10


def follow(talk, seeds, **options):
    """What random programs of a few seeds give, all of them in one program of XLA, and what they should."""
    steps = [device_programs.script(seed) for seed in seeds]
    inputs = [device_programs.inputs(talk.n, 1 + seed % 2, seed) for seed in seeds]

    def run(*parts):
        return [device_programs.follow(x[0], axis="x", steps=s)[None] for x, s in zip(parts, steps, strict=True)]

    program = talk(lambda parts: run(*parts))
    return program, inputs, [device_programs.expected(x, s) for x, s in zip(inputs, steps, strict=True)]


@pytest.mark.parametrize("first", range(0, PROGRAMS, GROUP))
def test_random_programs(talk, first):
    """Of puts, gets, signals and waits: what NumPy, the interpreter and CPUs make of them."""
    program, inputs, want = follow(talk, range(first, first + GROUP))
    for _ in range(5):
        for got, right in zip(program(inputs), want, strict=True):
            np.testing.assert_array_equal(got, right)


def fails(f, words: str, x) -> None:
    """Twice within the time-out, each time in a sentence; `debug` waits for each call."""
    with jt.config(debug=True, timeout=0.5):
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(jax.errors.JaxRuntimeError, match=words):
                jax.block_until_ready(f(x))
            assert time.monotonic() - began < 60  # compilation included


def test_a_signal_that_nobody_sends(talk):
    """The process goes on: with this kernel's other calls, and with other kernels."""
    with jt.config(debug=True, timeout=0.5):
        late = talk(lambda x: shift(x, axis="x", at_least=2)).lower(talk.x).compile()
    fails(late, r"device \(x=\d\), GPU \d, program .*: waited 0.5 s for came to reach 2: it stands at 1", talk.x)
    np.testing.assert_array_equal(talk(lambda x: shift(x, axis="x"))(talk.x), np.roll(talk.x, 2, 0))
    total = talk(lambda x: ops.collectives.all_reduce(x, "x"))
    np.testing.assert_array_equal(total(talk.x), talk.summed(talk.x))


@pytest.mark.parametrize("fault", [f for f, (_, found) in device_programs.FAULTS.items() if "Deadlock" in str(found)])
def test_planted_deadlocks(talk, fault):
    steps, x = device_programs.with_fault(1, fault), device_programs.inputs(talk.n, 1, 1)
    with jt.config(debug=True, timeout=0.5):
        follow = talk(lambda x: device_programs.follow(x[0], axis="x", steps=steps)[None]).lower(x).compile()
    fails(follow, "waited 0.5 s for ", x)


def test_a_device_with_another_shape(talk):
    """Each waits for what the other one never sends: the two calls have nothing in common."""

    def halves(x):
        some = lambda x: jnp.pad(shift(x[:1], axis="x"), ((0, 1), (0, 0)))
        return jax.lax.cond(jax.lax.axis_index("x") == 0, lambda x: shift(x, axis="x"), some, x)

    with jt.config(debug=True, timeout=0.5):
        program = talk(halves).lower(talk.x).compile()
    fails(program, "waited 0.5 s for ", talk.x)


def test_a_device_that_does_not_come(talk):
    """In time: it sleeps meanwhile."""

    def asleep(x):
        def sleep(x):
            time.sleep(2)
            return x

        late = lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return shift(jax.lax.cond(jax.lax.axis_index("x") == 1, late, lambda x: x, x), axis="x")

    with jt.config(debug=True, timeout=0.5):
        program = talk(asleep).lower(talk.x).compile()
    fails(program, "waited 0.5 s for ", talk.x)
    # a program with callbacks leaves a token on each device, for which JAX waits at the end of the process: in place of
    # those that have failed stand those of the last one
    again = talk(lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    np.testing.assert_array_equal(again(talk.x), talk.x)
    jax.effects_barrier()


def test_roles_that_talk(talk):
    """Copies into the memory of the next device; a signal that nobody sends to a role, behind which the process goes
    on."""
    x = numbers(talk.n, 64, 64)
    right = talk(lambda x: pushed(x[0])[None])
    for _ in range(3):
        np.testing.assert_array_equal(right(x), np.roll(x, 1, 0))
    with jt.config(debug=True, timeout=0.5):
        silent = talk(lambda x: pushed(x[0], fault="no signal")[None]).lower(x).compile()
    fails(silent, r"device \(x=\d\), GPU \d, program .*: waited 0.5 s for came to reach 1: it stands at 0", x)
    np.testing.assert_array_equal(right(x), np.roll(x, 1, 0))


@pytest.mark.parametrize("k", [64, 1024])
def test_tiles_that_travel(talk, k):
    """Sums of products over the devices, many calls with the same bits."""
    n, m, columns = talk.n, 512, 768
    x, w = normal(8, n * n * m, k), normal(9, n * k, columns)  # every device has rows for all
    run = lambda x, w: hopper_travelling.scattered_sums(x.reshape(n, m, k), w, axis="x")
    program = talk(run)
    first = np.asarray(program(x, w))
    for _ in range(20):
        np.testing.assert_array_equal(program(x, w), first)
    parts, weights = (np.asarray(v, np.float32) for v in (x.reshape(n, n, m, k), w.reshape(n, k, columns)))
    assert relative_error(first, np.einsum("edmk,ekc->dmc", parts, weights).reshape(-1, columns)) < 6e-3


@pytest.mark.parametrize("columns", [4096, 8192])
def test_products_around_a_norm(talk, columns):
    """The product in front of a norm sums over devices, 8192 columns over four of them in two turns; many calls with
    the same bits."""
    n, k = talk.n, 2048
    x, w, gate, up = (
        normal(i, n * rows, of) for i, rows, of in ((1, 64, k), (2, columns, k), (3, k, columns), (4, k, columns))
    )
    r, norm = jnp.tile(normal(5, 64, columns), (n, 1)), normal(6, columns)

    def run(args):
        x, w, r, gate, up = args
        return hopper_normed_sums.products(x, w, r, norm, (gate, up), "x", eps=1e-5, activation="silu")

    def reference(args):
        x, w, r, gate, up = (v.astype(jnp.float32) for v in args)
        y = r + jax.lax.psum(jnp.matmul(x, w.T, precision="highest"), "x")
        unit = y * jax.lax.rsqrt((y * y).mean(1, keepdims=True) + 1e-5) * norm.astype(jnp.float32)[None, :]
        of = lambda m: jnp.matmul(unit, m.T, precision="highest")
        return y, jax.nn.silu(of(gate)) * of(up)

    args = x, w, r, gate, up
    with jt.config(overlap=True):
        program = talk(run)
        first = jax.tree.map(np.asarray, program(args))
        for _ in range(100):
            jax.tree.map(np.testing.assert_array_equal, program(args), first)
    for got, want in zip(first, talk(reference)(args), strict=True):
        assert relative_error(got, np.asarray(want)) < 1e-2


@pytest.mark.parametrize("overlap", [False, True])
def test_few_rows(talk, overlap):
    """Products and the sums behind them in one kernel, whose roles are early where launches overlap, and what a mixture
    does with few rows, each in one kernel; many calls with the same bits."""
    n, k, columns, experts = talk.n, 2048, 4096, 4
    x, w = normal(1, n, k), normal(2, n * columns, k)
    many, right, weight = normal(3, n * 64, k), normal(4, n * k, columns), normal(5, k)
    rows, deltas, copies = normal(6, n * 8, k), normal(7, n * 8, k), normal(8, n * n * 16, k)
    chosen = jax.random.permutation(jax.random.key(9), n * 16).reshape(n * 8, 2) % (n * experts)
    places = jnp.arange(n * 16, dtype=jnp.int32).reshape(n * 8, 2)
    shares = normal(10, n * 8, 2).astype(jnp.float32)
    args = x, w, many, right, rows, deltas, copies

    def run(suffix, args):
        x, w, many, right, rows, deltas, copies = args
        of = lambda name: getattr(ops.collectives, name + suffix)
        product, tall = of("matmul_all_reduce")(x, w, "x", transpose_b=True), of("matmul_all_reduce")(many, right, "x")
        few = of("matmul_all_reduce")(many[:24], w, "x", transpose_b=True)
        normed, sums = of("all_gather_rms_norm")(deltas, weight, "x", residual=rows)
        return product, tall, few, normed, sums, of("chosen_sums")(copies, places, chosen, shares, "x", count=experts)

    with jt.config(overlap=overlap):
        program = talk(lambda args: run("", args))
        first = jax.tree.map(np.asarray, program(args))
        for _ in range(100):
            jax.tree.map(np.testing.assert_array_equal, program(args), first)
    for got, want in zip(first, talk(lambda args: run("_reference", args))(args), strict=True):
        assert relative_error(got, np.asarray(want, np.float32)) < 1e-2


# Rows of norms and their width: of one program and many, no power of two, and too short or too many to be posted.
ROWS = [(1, 40), (5, 72), (64, 4096), (3, 12008), (7, 16384), (200, 256), (2, 8)]


@pytest.mark.parametrize(
    ("dtype", "overlap"), [("float32", True), ("float32", False), ("bfloat16", False), ("float16", True)]
)
def test_what_is_posted(talk, dtype, overlap):
    """Small collectives of odd sizes, and rows that are normed or gathered, which are posted where they fit: XLA's
    values, and many calls with the same bits."""
    n = talk.n
    made = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape).astype(dtype)
    parts = [made(k, n * rows, columns) for k, (rows, columns) in enumerate([(3, 5), (7, 1023), (1, 300_001)])]
    cut = [made(k, n * n * rows, columns) for k, (rows, columns) in enumerate([(3, 5), (9, 1111)])]
    rows = [made(k, n * m, width) for k, (m, width) in enumerate(ROWS)]
    copies, shares = made(8, n * n * 6, 264), jax.random.uniform(jax.random.key(9), (n * 3, 2))
    places = jnp.arange(n * 6, dtype=jnp.int32).reshape(n * 3, 2)
    chosen = (places * 3 + places // 4) % (2 * n)

    def run(suffix, args):
        parts, cut, rows, copies = args
        of = lambda name: getattr(ops.collectives, name + suffix)
        found = [of(name)(x, "x") for x in parts for name in ("all_reduce", "all_gather")]
        found += [of(name)(x, "x") for x in cut for name in ("reduce_scatter", "all_to_all")]
        for x in rows:
            weight = (1 + jnp.arange(x.shape[1]) % 5).astype(dtype)
            residual = jnp.broadcast_to(weight / 8, x.shape)
            found += of("all_reduce_rms_norm")(x, weight, "x", residual=residual)
            found += of("all_gather_rms_norm")(x, weight, "x", residual=residual)
        return [*found, of("chosen_sums")(copies, places, chosen, shares, "x", count=2)]

    args = parts, cut, rows, copies
    with jt.config(overlap=overlap):
        program = talk(lambda args: run("", args))
        first = jax.tree.map(np.asarray, program(args))
        for _ in range(100):
            jax.tree.map(np.testing.assert_array_equal, program(args), first)
    wanted = talk(lambda args: run("_reference", args))(args)
    for k, (got, want) in enumerate(zip(first, wanted, strict=True)):
        assert relative_error(got, np.asarray(want, np.float32)) < (2e-6 if dtype == "float32" else 6e-3), k


def in_a_row(f, args, calls: int):
    """What `f(args)` gives, and how many numbers have other bits in so many further calls, one behind the other."""
    first = f(args)

    def turn(_, carry):
        bad, args = carry
        bits = lambda y: jax.lax.bitcast_convert_type(y, {2: jnp.int16, 4: jnp.int32}[y.dtype.itemsize])
        pairs = zip(jax.tree.leaves(f(args)), jax.tree.leaves(first), strict=True)
        return jax.lax.optimization_barrier((bad + sum((bits(x) != bits(y)).sum() for x, y in pairs), args))

    return first, jax.lax.fori_loop(0, calls, turn, (jnp.int32(0), args))[0][None]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_posted_in_turn(talk, overlap):
    """Large sums and exchanges of odd sizes: XLA's values, and a hundred calls in a row with the same bits."""
    n = talk.n
    sums = [("bfloat16", 200_003), ("float32", 1_500_001), ("float16", 3_000_001)]
    arrays = [jax.random.normal(jax.random.key(k), (n, size)).astype(dtype) for k, (dtype, size) in enumerate(sums)]
    cut = normal(3, n * n, 700_001)

    def run(suffix, args):
        of = lambda name: getattr(ops.collectives, name + suffix)
        return [*(of("all_reduce")(x, "x") for x in args[0]), of("all_to_all")(args[1], "x")]

    with jt.config(overlap=overlap):
        found, bad = talk(functools.partial(in_a_row, functools.partial(run, ""), calls=100))((arrays, cut))
    assert not np.asarray(bad).any()
    for got, want in zip(found, talk(lambda args: run("_reference", args))((arrays, cut)), strict=True):
        assert relative_error(got, np.asarray(want, np.float32)) < 6e-3


def test_decoding_over_a_cache_in_parts(talk):
    """By the kernels of one device, whose parts are put together: rows that several programs share and whole ones, one
    that a device has no keys of, and one without any."""
    n, rows, slots = talk.n, 5, 700
    latent, k, v = (
        normal(0, n * rows, slots, 576),
        normal(1, n * rows, slots, 2, 128),
        normal(2, n * rows, slots, 2, 128),
    )
    lengths = np.random.default_rng(0).integers(1, slots + 1, (n, rows)).astype(np.int32)
    lengths[0, 1] = lengths[:, 3] = 0
    ours, sinks = (normal(3, rows, 16, 576), normal(4, rows, 8, 128)), normal(5, 8)

    def run(suffix, args):
        latent, k, v, lengths = args
        of = lambda name: getattr(ops.collectives, name + suffix)
        decode = lambda **more: of("decode_attention")(ours[1], k, v, lengths, "x", **more)
        return [of("mla_decode")(ours[0], latent, lengths, "x", scale=0.05), decode(), decode(sinks=sinks, softcap=9.0)]

    args = latent, k, v, jnp.asarray(lengths.reshape(-1))
    found = talk(lambda args: run("", args))(args)
    for got, want in zip(found, talk(lambda args: run("_reference", args))(args), strict=True):
        assert relative_error(got, np.asarray(want, np.float32)) < 1e-2


def test_rows_that_are_gathered_while_a_matrix_comes(talk):
    """On more than two GPUs products of few rows of all of them are one kernel: XLA's values, and the same bits."""
    args = normal(0, 64, 2048), normal(1, talk.n * 2048, 2048)
    run = lambda args: ops.collectives.all_gather_matmul(*args, "x")
    got, bad = talk(functools.partial(in_a_row, run, calls=1000))(args)
    assert not np.asarray(bad).any()
    want = talk(lambda args: ops.collectives.all_gather_matmul_reference(*args, "x"))(args)
    assert relative_error(got, np.asarray(want, np.float32)) < 4e-3


def test_sums_of_products_many_times(talk):
    """What others have sent is loaded before the next copy comes to its place: over four devices one call of a thousand
    was wrong where nothing waited for these loads."""
    args = normal(0, talk.n * 2048, 1024), normal(1, talk.n * 1024, 4096)
    run = lambda args: ops.collectives.matmul_reduce_scatter(*args, "x")
    assert not np.asarray(talk(functools.partial(in_a_row, run, calls=20_000))(args)[1]).any()
