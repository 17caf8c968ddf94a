"""jt.profile: the timelines of kernels with roles, in the interpreter and on a GPU."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile.errors import KernelValueError, UnsupportedError
from jtile.tune.programs import operands, trace


@jt.kernel(
    out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
    grid=lambda a, b, *, bm, bn, **_: (jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)),
)
def product(a, b, o, *, bm=128, bn=128, bk=64):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(bm, bk), b.tiles(bk, bn)
    acc = jt.zeros((bm, bn), jnp.float32)
    for k in jt.range(A.shape[1], stages=3):
        acc = jt.dot(A[i, k], B[k, j], acc)
    o.tiles(bm, bn)[i, j] = acc.astype(o.dtype)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: (1,))
def double(x, o):
    o[...] = x[...] * 2


MATRIX = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)


def test_a_kernel_with_roles_has_a_timeline():
    found = jt.profile(lambda a, b: double(product(a, b)), MATRIX, MATRIX, interpret=True, programs=2)
    (line,) = found.timelines
    assert (line.kernel, line.unit, line.dropped) == ("product", "steps", False)
    roles = {r.name: r for r in line.roles()}
    consumers = [r for name, r in roles.items() if name.startswith("consumer")]
    assert "producer" in roles and consumers
    # two of the four programs: each multiplies 128 x 128 x 256, and copies what that takes
    assert sum(r.multiplied for r in consumers) == 2 * 128 * 128 * 256
    assert roles["producer"].copied == 2 * (128 + 128) * 256 * 2
    assert 0 < line.busy() < 1 and all(0 < r.products < 1 for r in consumers)
    assert all("wait for products" in r.waits for r in consumers)
    assert found["product"] is line
    ((name, why),) = found.without
    assert name == "double" and why
    with pytest.raises(KernelValueError, match="no kernel 'double'"):
        found["double"]


def test_a_kernel_of_dynamic_sizes_has_no_roles():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0], dynamic={"x": 0})
    def rows(x, o):
        o[jt.program_id(0)] = x[jt.program_id(0)] * 2

    assert [name for name, _ in jt.profile(rows, MATRIX, interpret=True).without] == ["rows"]


@pytest.mark.parametrize("options", [{"programs": 0}, {"capacity": 0}, {"capacity": 1.5}])
def test_bad_counts(options):
    with pytest.raises(KernelValueError, match="is a Python int of at least 1"):
        jt.profile(product, MATRIX, MATRIX, interpret=True, **options)


def test_time_goes_on():
    (line,) = jt.profile(product, MATRIX, MATRIX, interpret=True, programs=1, seed=3).timelines
    whole = {s.site.role: s for s in line.spans if s.site.kind == "role"}
    for s in line.spans:
        assert whole[s.site.role].start <= s.start <= s.end <= whole[s.site.role].end


def test_slots_of_the_ring():
    """Each is asked for, read and given back, in turn; what is skipped by `when=` is not noted."""
    (line,) = jt.profile(product, MATRIX, MATRIX, interpret=True, programs=1).timelines
    rounds = {}
    for s in line.stages(0):
        rounds.setdefault(s.slot, []).append(s)
        assert s.asked < s.read < s.freed
    assert sum(map(len, rounds.values())) == 256 // 64 and len(rounds) > 1
    for own in rounds.values():
        assert all(a.freed <= b.asked for a, b in itertools.pairwise(own))
    consumer = next(s.site.role for s in line.spans if s.site.name == "consumer0")
    arrived = [s for s in line.spans if s.site.role == consumer and s.site.kind == "arrive"]
    assert len(arrived) == 256 // 64  # one a round, though one stands in the loop and one behind it


def test_kernels_are_those_of_the_gpu():
    """Tiles and branches are chosen for sm_90, though the interpreter runs on any machine."""
    (line,) = jt.profile(jt.ops.matmul, MATRIX, MATRIX, interpret=True, programs=1).timelines
    assert line.kernel == "matmul"

    def f(a, b):
        return jax.lax.platform_dependent(a, b, cuda=product, default=lambda a, b: double(a) + double(b))

    found = jt.profile(f, MATRIX, MATRIX, interpret=True, programs=1)
    assert ([t.kernel for t in found.timelines], found.without) == (["product"], ())
    assert {p.name for p in trace(f, MATRIX, MATRIX)[0]} == ({"product"} if jt.platform() == "cuda" else {"double"})


def test_kernels_inside_of_an_op_get_its_arguments():
    """Behind a function that is partitioned as a whole, a choice by platform, and a rule for vmap."""
    q, k = jnp.ones((4, 8, 64), jnp.bfloat16), jnp.ones((4, 256, 4, 64), jnp.bfloat16)
    lengths = jnp.array([20, 30, 40, 50], jnp.int32)
    with jt.config(arch="sm_90"):
        ((program, given),) = operands(jt.ops.decode_attention, q, k, k, lengths).items()
    assert program.name == "hopper_decode"
    assert given[3].tolist() == lengths.tolist()


@jt.kernel(out_type=lambda a, b, n: jt.like(a, shape=(a.shape[0], b.shape[1])), grid=(2, 2))
def first_terms(a, b, n, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jt.zeros((64, 64), jnp.float32)
    for k in jt.range(n[i], stages=2):
        acc = jt.dot(a.tiles(64, 64)[i, k], b.tiles(64, 64)[k, j], acc)
    o.tiles(64, 64)[i, j] = acc.astype(o.dtype)


def test_arrays_are_those_of_the_function():
    """How many rounds there are is computed from an argument, behind another kernel, in a jitted function."""

    @jax.jit
    def f(a, b, n):
        return first_terms(a, double(b), jnp.minimum(n, 3))

    a, b = jnp.ones((128, 512), jnp.bfloat16), jnp.ones((512, 128), jnp.bfloat16)
    line = jt.profile(f, a, b, jnp.array([7, 2]), interpret=True, programs=4)["first_terms"]
    assert sorted(len(line.stages(p)) for p in line.programs) == [2, 2, 3, 3]


def test_outputs_that_start_from_a_number():
    @jt.kernel(out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1])), grid=(2, 2), init=0)
    def added(a, b, o):
        i, j = jt.program_id(0), jt.program_id(1)
        acc = jt.zeros((64, 64), jnp.float32)
        for k in jt.range(2, stages=2):
            acc = jt.dot(a.tiles(64, 64)[i, k], b.tiles(64, 64)[k, j], acc)
        o.tiles(64, 64)[i, j] += acc.astype(o.dtype)

    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    (line,) = jt.profile(added, x, x, interpret=True, programs=1).timelines
    assert line.busy() > 0


def test_room_for_few_notes():
    (line,) = jt.profile(product, MATRIX, MATRIX, interpret=True, programs=1, capacity=6).timelines
    assert line.dropped and len([s for s in line.spans if s.site.role == 0]) <= 6


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(UnsupportedError, match="interpret=True"):
        jt.profile(product, MATRIX, MATRIX)


@pytest.mark.gpu
def test_on_the_device():
    big = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    (line,) = jt.profile(product, big, big).timelines
    assert line.unit == "ns" and not line.dropped
    total = max(r.total for r in line.roles())
    assert 1e3 < total < 1e8  # microseconds, not hours
    assert 0.05 < line.busy() <= 1
