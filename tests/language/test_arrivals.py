"""`jt.arrive` in kernels: under jit, vmap, loops and derivatives; what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError, ProtocolError, TransformError
from jtile.transforms.factors import factors

pytestmark = pytest.mark.usefixtures("by_numpy")


def _types(x, *, n):
    return jax.ShapeDtypeStruct(x.shape[:1], x.dtype), jax.ShapeDtypeStruct((x.shape[0], n), x.dtype)


@jt.kernel(out_type=_types, grid=lambda x, *, n: (n, x.shape[0]))
def sums(x, o, parts, *, n):
    k, i = jt.program_id(0), jt.program_id(1)
    parts[i, k] = x.tiles(None, x.shape[1] // n)[i, k].sum()
    if jt.arrive(jt.counters("rows", x.shape[0]), i, n):
        o[i] = parts[i, :].sum()


X = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (6, 64)), jnp.float32)
total = functools.partial(lambda x, n: sums(x, n=n)[0], n=8)


@pytest.fixture(params=["native", "interpreter"])
def way(request):
    with jt.config(interpret=request.param == "interpreter"):
        yield


def test_sums(way):
    o, parts = sums(X, n=8)
    np.testing.assert_array_equal(o, X.sum(1))
    np.testing.assert_array_equal(parts, X.reshape(6, 8, 8).sum(2))


def test_one_program_is_the_last():
    np.testing.assert_array_equal(sums(X, n=1)[0], X.sum(1))


def test_vmaps(way):
    xs = jnp.stack([X, -X, 2 * X, X[::-1]]).reshape(2, 2, 6, 64)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(total))(xs), xs.sum(3))


def test_calls_in_a_loop():
    out = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, s: s + total(x + i), jnp.zeros(6)))(X)
    np.testing.assert_array_equal(out, 50 * X.sum(1) + 64 * sum(range(50)))


def test_results_that_nobody_uses():
    np.testing.assert_array_equal(jax.jit(lambda x: sums(x, n=8)[1])(X), X.reshape(6, 8, 8).sum(2))


@jt.kernel(
    out_type=lambda x: (jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((4, 3), jnp.int32)), grid=(4, 3)
)
def places(x, count, parts):
    """Counters of two axes, and of one name in two places; a second stage behind the first."""
    i, j = jt.program_id(0), jt.program_id(1)
    parts[i, j] = x[i, j]
    done = jt.counters("done", (5, 2))
    if jt.arrive(done, (i, 1), 3):
        parts[i, 0] = parts[i, :].sum()
        if jt.arrive(jt.counters("done", (5, 2)), (4, jnp.int32(0)), jt.num_programs(0)):
            count[0] = parts[:, 0].sum()
            count[1] = done.shape[0]


def test_stages(way):
    x = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    np.testing.assert_array_equal(places(x)[0], [66, 5])


@jt.kernel(out_type=lambda x: jt.like(x, shape=(1,)), grid=lambda x: x.shape[0], init=0)
def rounds(x, o):
    """Every program comes three times: three of all arrivals are the last of four."""
    for _ in jt.range(3):
        if jt.arrive(jt.counters("all", 1), 0, 4):
            jt.atomic_add(o, 0, x[0])


def test_rounds(way):
    np.testing.assert_array_equal(rounds(jnp.ones(4)), [3.0])


@jt.kernel(out_type=lambda x, *, programs: jt.like(x, shape=(2,)), grid=lambda x, *, programs: programs, init=7)
def marked(x, o, *, programs):
    if jt.arrive(jt.counters("all", 3), 2, 5):
        o[1] = x[0, 0]


def test_no_programs(way):
    np.testing.assert_array_equal(marked(X, programs=0), [7, 7])
    np.testing.assert_array_equal(marked(X, programs=5), [7, X[0, 0]])


def test_programs_that_never_come():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=3)
    def waits(x, o):
        if jt.arrive(jt.counters("all", 1), 0, 4):
            o[0, 0] = 1.0

    with pytest.raises(ProtocolError, match=r"3 of 4 programs arrived at all\[0\]"):
        waits.interpret(X)
    with pytest.raises(Exception, match="3 programs have arrived at counter 0 when the call ends"):
        jax.block_until_ready(waits(jax.device_put(X, jax.devices("cpu")[0])))  # a GPU does not look


def test_derivatives_need_a_rule():
    for derive in (lambda f: jax.jvp(f, (X,), (X,)), lambda f: jax.grad(lambda x: f(x).sum())(X)):
        with pytest.raises(TransformError, match=r"arrive at counters.*defvjp"):
            derive(total)


def test_a_rule_of_its_own():
    @jt.kernel(out_type=_types, grid=lambda x, *, n: (n, x.shape[0]))
    def own(x, o, parts, *, n):
        k, i = jt.program_id(0), jt.program_id(1)
        parts[i, k] = x.tiles(None, x.shape[1] // n)[i, k].sum()
        if jt.arrive(jt.counters("rows", x.shape[0]), i, n):
            o[i] = parts[i, :].sum()

    own.defvjp(lambda x, *, n: (own(x, n=n), x), lambda x, ct, **_: (jnp.broadcast_to(ct[0][:, None], x.shape),))
    np.testing.assert_array_equal(jax.grad(lambda x: (own(x, n=8)[0] * 3).sum())(X), jnp.full(X.shape, 3.0))


def refused(body, kind, words):
    with pytest.raises(kind, match=words):
        jt.call(body, out_type=jax.ShapeDtypeStruct((4,), jnp.float32), grid=(4,))(X)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: jt.counters("no name", 3), KernelTypeError, "have a name"),
        (lambda: jt.counters(3, 3), KernelTypeError, "have a name"),
        (lambda: jt.counters("c", 0), KernelValueError, "1 to 16777216"),
        (lambda: jt.counters("c", (4096, 8192)), KernelValueError, "1 to 16777216"),
        (lambda: jt.counters("c", 2.0), KernelTypeError, "Python ints"),
        (lambda: jt.arrive("c", 0, 2), KernelTypeError, "what jt.counters gives"),
        (lambda: jt.arrive(jt.counters("c", 3), 3, 2), KernelValueError, "no counter 3 of 3"),
        (lambda: jt.arrive(jt.counters("c", 3), (0, 0), 2), KernelValueError, "2 of 1 axes"),
        (lambda: jt.arrive(jt.counters("c", 3), 0, 0), KernelValueError, "at least 1, got 0"),
        (lambda: jt.arrive(jt.counters("c", 3), 0.5, 2), KernelTypeError, "int scalar"),
        (lambda: jt.arrive(jt.counters("c", 3), jt.arange(4), 2), KernelTypeError, r"a tile of shape \[4\]"),
        (lambda: jt.arrive(jt.counters("c", 3), 0, True), KernelTypeError, "int scalar"),
        (lambda: jax.vmap(lambda i: jt.arrive(jt.counters("c", 3), i, 2))(jt.arange(4)), TransformError, "jax.vmap"),
    ],
)
def test_what_is_refused(make, kind, words):
    refused(lambda x, o: make() and None, kind, words)


def test_outside_of_a_kernel():
    with pytest.raises(KernelTypeError, match=r"jt\.arrive means something only inside of a kernel"):
        jt.arrive(jt.counters("c", 3), 0, 2)


def test_two_sizes_of_one_name():
    def body(x, o):
        o[...] = 0.0
        jt.arrive(jt.counters("c", 3), 0, 2)
        jt.arrive(jt.counters("c", 4), 0, 2)

    refused(body, KernelValueError, "'c' are 3 in one place and 4 in another.*names of their own")


@jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x, shape=(1,))), grid=lambda x: x.shape[0])
def copied(x, o, last):
    o.tiles(1, x.shape[1])[jt.program_id(0), 0] = x.tiles(1, x.shape[1])[jt.program_id(0), 0]
    if jt.arrive(jt.counters("all", 1), 0, x.shape[0]):
        last[0] = 1.0


def test_no_dimension_is_cut():
    """Programs on several devices would not meet: automatic partitioning leaves such a kernel whole."""
    program = jax.make_jaxpr(copied)(X).eqns[0].params["program"]
    found = factors(program.kernel)
    assert not found.factors and "its programs arrive at counters" in found.reasons.values()
