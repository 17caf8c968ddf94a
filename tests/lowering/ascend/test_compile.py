"""Kernels through the vendor's open compilers to HIVM, whose memories hold them, and their numbers on the CPU."""

from __future__ import annotations

import json

import ascend_table
import jax
import jax.numpy as jnp
import numpy as np
import op_matrix
import pytest
from ascend_cases import CASES, TARGETS, f32, kernels, longest, normalised, of, outcome, product, saxpy
from ascend_tools import needs_tools

import jtile as jt
from jtile.errors import UnsupportedError
from jtile.interpret import interpret
from jtile.lowering.ascend import hivm
from jtile.lowering.ascend.compile import compile_kernel, unpack
from jtile.lowering.ascend.targets import ARCHS, ascend_target, cores
from jtile.passes import TILE, run_pipeline

pytestmark = needs_tools
BRIEF = ("softmax", "matmul", "matmul with bias and gelu", "attention, heads of 64", "a user's gather of rows")


@pytest.mark.parametrize("case", BRIEF)
def test_cases_fit_the_memories(case):
    """The others, and their gradients, are in the table, see `test_table.py`."""
    for kernel in kernels(CASES[case].fn, CASES[case].args):
        found = outcome(case, kernel)
        assert not found.why, found.why
        assert found.kind == ("aiv" if case in BRIEF[::4] else "aic" if case == "matmul" else "mix")


def test_machines_are_those_of_the_compiler():
    (kernel,) = kernels(normalised, (f32(8, 64),))
    for name in ARCHS:
        target = ascend_target(name)
        found = hivm.machine(compile_kernel(kernel, target, texts=True).texts["hivm"])
        assert (found["CUBE_CORE_COUNT"], found["VECTOR_CORE_COUNT"]) == cores(target)
        sizes = {m.name: m.size for m in target.memories}
        for memory in ("ub", "l1", "l0a", "l0b", "l0c"):
            assert found[f"{memory.upper()}_SIZE"] == 8 * (sizes[memory] or 0)


def test_artifacts():
    """The same bytes each time; the image has what a bundle takes; the record says how it is launched."""
    args = (of(100, 200), of(200, 300))
    one = product.lower(*args, target="ascend:910b1")
    image = unpack(one.image)
    assert image["target"] == "Ascend910B1" and set(image["texts"]) == {"ttir", "linalg", "hivm"}
    (kernel,) = kernels(product, args)
    again = compile_kernel(kernel, ascend_target("910b1"), texts=True)
    assert unpack(again.image)["texts"] == again.texts
    assert again.image == compile_kernel(kernel, ascend_target("910b1")).image
    assert image["buffers"] == one.launch["buffers"] == 2
    record = json.loads(again.launch["record"])
    assert (record["kind"], record["grid"], len(record["params"])) == ("mix", 10, 3)
    assert record["workspace"] == again.launch["workspace"] > 0
    assert f"@{record['symbol']}_mix_aic" in again.texts["hivm"]


def test_the_compiler_makes_one_text_of_one():
    """It orders what it makes by addresses: four runs gave two texts of this kernel before they were fixed."""
    gradient = jax.grad(lambda a, b: product(a, b).astype(jnp.float32).sum())
    kernel = kernels(gradient, (of(100, 200), of(200, 300)))[-1]
    assert len({compile_kernel(kernel, ascend_target("910b1")).image for _ in range(4)}) == 1


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"bm": 128, "bn": 128}, r"take \d+ bytes of UB.*has 196608: make its tiles smaller, by a factor of 2"),
        ({"bm": 256, "bn": 256}, r"bytes of (UB|L0C).*make its tiles smaller"),
    ],
)
def test_tiles_that_do_not_fit(tiles, message):
    kernel = kernels(lambda a, b: product(a, b, **tiles), (of(1024, 512), of(512, 1024)))[0]
    with pytest.raises(UnsupportedError, match=message):
        compile_kernel(kernel, ascend_target(TARGETS[0]))


def equal(fn, *args, tolerance: float = ascend_table.CLOSE) -> None:
    for kernel in kernels(fn, args):
        got, want = ascend_table.run(kernel, [np.asarray(a) for a in args]), interpret(kernel, list(args))
        for x, y in zip(got, want, strict=True):
            assert jt.testing.relative_error(x, y) <= tolerance


def test_loops_over_programs_give_equal_numbers():
    x = np.random.default_rng(0).standard_normal((101, 70)).astype(np.float32)
    equal(normalised, x)
    equal(lambda x, y: saxpy(x, y, bn=64), *np.random.default_rng(1).standard_normal((2, 5000)).astype(np.float32))
    equal(longest, x[:50])


def test_masked_elements_may_stand_in_front_of_an_array():
    """The adapter refuses negative offsets that it knows, as of the only program of a kernel."""

    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 64))
    def moved(x, y):
        here = 64 * jt.program_id(0) + jt.arange(64)
        jt.store(y, (here,), jt.load(x, (here - 3,), mask=here >= 3, other=1.0), mask=here < x.shape[0])

    for n in (50, 150):
        equal(moved, np.random.default_rng(0).standard_normal(n).astype(np.float32))


def test_functions_keep_their_digits():
    """Near zero, where the compiler's own forms cancel, and far from it."""

    @jt.kernel(out_type=lambda x: (jt.like(x),) * 6, grid=1)
    def body(x, *outs):
        t = x[...]
        for o, fn in zip(outs, (jnp.tanh, jnp.expm1, jnp.log1p, jnp.exp2, jnp.sinh, jnp.arcsinh), strict=True):
            o[...] = fn(t)

    for scale in (1e-4, 1.0, 60.0):
        x = (np.linspace(-0.98, 1, 128) * scale).astype(np.float32)
        (kernel,) = kernels(body, (x,))
        got, want = ascend_table.run(kernel, [x]), interpret(kernel, [x])
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-38)


STARTS = ("gather-", "cumulative-int32", "arg_reduce-int64", "arg_reduce-bfloat16", "arg_reduce-float32")
MATRIX = (
    *(f"elementwise-{d}" for d in ("uint32", "int64", "bfloat16", "float8_e4m3fn")),
    *(n for n in op_matrix.CASES if n.startswith(STARTS) and not n.endswith("float64")),
)


@pytest.mark.parametrize("name", MATRIX)
def test_ops_give_equal_numbers(name):
    op_matrix.check(op_matrix.CASES[name](), lambda k, inputs: ascend_table.run(run_pipeline(k, TILE), list(inputs)))


@jt.kernel(out_type=lambda x, i, **_: jt.like(x, shape=(20,)), grid=lambda x, i, **_: jt.cdiv(x.shape[0], 16), init=0)
def scattered(x, i, o, *, fn):
    p = jt.program_id(0)
    inside = p * 16 + jt.arange(16) < x.shape[0]
    getattr(jt, f"atomic_{fn}")(o, i.tiles(16)[p], x.tiles(16)[p], mask=inside)


@pytest.mark.parametrize(("fn", "dtype"), [("add", "float32"), ("max", "int32"), ("min", "int32")])
def test_atomics_touch_no_lane_that_is_left_out(fn, dtype):
    """Numbers outside of the array among them, which the compiler by itself would follow."""
    r = np.random.default_rng(3)
    x, i = r.integers(-9, 9, 37).astype(dtype), r.integers(-3, 25, 37).astype(np.int32)
    (kernel,) = kernels(lambda x, i: scattered(x, i, fn=fn), (x, i))
    np.testing.assert_array_equal(ascend_table.run(kernel, [x, i])[0], interpret(kernel, [x, i])[0])


def test_old_values_of_atomics_are_refused():
    @jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x)), grid=1, init=0)
    def body(x, o, old):
        old[...] = jt.atomic_add(o, jt.arange(8), x[...])

    (kernel,) = kernels(body, (f32(8),))
    with pytest.raises(UnsupportedError, match="no atomic add whose old value is used: only the update is atomic"):
        compile_kernel(kernel, ascend_target(TARGETS[0]))


def test_sizes_that_are_known_when_it_runs():
    x = np.random.default_rng(2).standard_normal((37, 50)).astype(np.float32)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 50"), jnp.float32)
    (kernel,) = kernels(normalised, (shape,))
    got, want = ascend_table.run(kernel, [x]), interpret(kernel, [x])
    assert jt.testing.relative_error(got[0], want[0]) <= ascend_table.CLOSE


@jt.kernel(out_type=lambda x: jt.like(x), grid=4)
def by_scalars(x, o):
    """Scalars that the adapter takes in other forms only: floats that become integers, the element of a tile of one."""
    i = jt.program_id(0)
    place = jnp.sqrt((i * i).astype(jnp.float32)).astype(jnp.int32)
    first = jax.lax.dynamic_slice(x.tiles(8)[i], (place,), (1,)).reshape(())
    o.tiles(8)[place] = x.tiles(8)[place] * first


def test_scalars():
    x = np.arange(32, dtype=np.float32)
    (kernel,) = kernels(by_scalars, (f32(32),))
    assert not outcome("scalars", kernel, TARGETS[:1]).why
    (got,) = ascend_table.run(kernel, [x])
    np.testing.assert_array_equal(got, interpret(kernel, [x])[0])
