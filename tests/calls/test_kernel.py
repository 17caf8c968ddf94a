"""jt.kernel and jt.call: what a call may look like and what it gives."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import tiled_matmul

import jtile as jt

pytestmark = pytest.mark.usefixtures("by_numpy")


@jt.kernel(out_type=lambda a, b, **_: jt.like(a), grid=lambda a, *, bm, **_: jt.cdiv(a.shape[0], bm))
def add(a, b, o, *, bm=4):
    """Adds."""
    i = jt.program_id(0)
    A, B, O = a.tiles(bm), b.tiles(bm), o.tiles(bm)
    O[i] = A[i] + B[i]


def f32(*shape):
    return jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape)


# -- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 4, 5, 16, 1000])
def test_a_kernel_is_a_jax_function(run, n):
    x, y = f32(n), jnp.ones(n)
    np.testing.assert_array_equal(run(add, x, y), x + y)
    np.testing.assert_array_equal(jax.jit(add)(x, y), x + y)


def test_meta_parameters_override_defaults(run):
    x, y = f32(10), jnp.ones(10)
    for bm in (1, 3, 10, 16):
        np.testing.assert_array_equal(run(add, x, y, bm=bm), x + y)
    jitted = jax.jit(add, static_argnames="bm")
    np.testing.assert_array_equal(jitted(x, y, bm=5), x + y)
    assert add.lower(x, y, bm=3).program.kernel.grid == (4,)
    assert add.lower(x, y).program.kernel.grid == (3,)


def test_wrapper_attributes():
    assert (add.__name__, add.__doc__, add.__module__) == ("add", "Adds.", __name__)
    assert add.__wrapped__.__code__.co_argcount == 3
    assert str(inspect.signature(add)) == "(*args, bm=4)"
    assert repr(add) == "<jtile.Kernel add(a, b, o)>"


def test_numpy_arrays_and_python_scalars(run):
    @jt.kernel(out_type=lambda x, s, **_: jt.like(x), grid=1)
    def scale(x, s, o):
        assert s.shape == ()
        o[...] = x[...] * s[...].astype(x.dtype)

    x = np.arange(5, dtype=np.float32)
    for s in (2.5, 3, True, np.float32(0.5), np.int8(7), jnp.float32(4)):
        np.testing.assert_array_equal(run(scale, x, s), x * np.float32(s))


def test_python_scalars_get_the_default_dtype():
    seen = []

    @jt.kernel(out_type=lambda s, **_: seen.append(s.dtype) or jt.like(s), grid=1)
    def copy(s, o):
        o[...] = s[...]

    got = [copy(v) for v in (2.5, 3, True)]
    assert seen == [jnp.float32, jnp.int32, jnp.bool_]
    assert [g.item() for g in got] == [2.5, 3, True]


def test_numpy_arrays_inside_a_trace():
    ones = np.ones(10, np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: add(x, ones))(f32(10)), f32(10) + 1)
    np.testing.assert_array_equal(jax.jit(lambda: add(ones, ones))(), ones + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: add(add(ones, ones), x))(f32(10)), f32(10) + 2)


def test_numpy_arrays_of_other_byte_order_and_width():
    x = np.arange(5, dtype=">f4")
    np.testing.assert_array_equal(add(x, np.ones(5)), np.arange(5) + 1)  # float64 is float32 in JAX here
    assert add(x, np.ones(5)).dtype == np.float32


class Foreign:
    """An array of another library: all it has is DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_objects_are_imported_without_a_copy():
    x = f32(1024)
    imported = jax.dlpack.from_dlpack(Foreign(x))
    assert imported.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    np.testing.assert_array_equal(add(Foreign(x), Foreign(x), bm=64), x + x)


def test_objects_with_jax_array():
    class Variable:
        def __jax_array__(self):
            return f32(8)

    np.testing.assert_array_equal(add(Variable(), f32(8)), f32(8) * 2)


def test_call_without_decorator(run):
    k = jt.call(
        lambda x, o: o.__setitem__(..., x[...] + 1),
        out_type=jax.ShapeDtypeStruct((3,), jnp.float32),
        grid=1,
        name="increment",
    )
    assert k.name == "increment"
    np.testing.assert_array_equal(run(k, f32(3)), f32(3) + 1)


def test_kernel_of_a_partial_and_of_any_number_of_refs(run):
    def body(scale, *refs):
        *ins, o = refs
        o[...] = functools.reduce(lambda a, b: a + b, [r[...] for r in ins]) * scale

    k = jt.call(functools.partial(body, 2.0), out_type=lambda *xs, **_: jt.like(xs[0]), grid=1)
    for n in (1, 2, 4):
        np.testing.assert_array_equal(run(k, *[f32(6)] * n), f32(6) * n * 2)


def test_jit_of_jit_and_two_kernels_chained(run):
    @jax.jit
    def inner(x):
        return run(add, run(add, x, x), x)

    np.testing.assert_array_equal(jax.jit(lambda x: inner(x) + inner(x))(f32(9)), f32(9) * 6)


def test_kernels_in_control_flow(run):
    x = f32(7)
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, c: run(add, c, x), x))
    np.testing.assert_array_equal(looped(x), x * 6)

    def step(c, y):
        c = run(add, c, y)
        return c, c[:2]

    last, ys = jax.jit(lambda c, ys: jax.lax.scan(step, c, ys))(x, jnp.ones((3, 7)))
    np.testing.assert_array_equal(last, x + 3)
    np.testing.assert_array_equal(ys, [x[:2] + 1, x[:2] + 2, x[:2] + 3])
    counted = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[0] < 10, lambda c: run(add, c, jnp.ones(7)), c))
    np.testing.assert_array_equal(counted(x), x + 10)
    chosen = jax.jit(lambda p, c: jax.lax.cond(p, lambda c: run(add, c, c), lambda c: c, c))
    np.testing.assert_array_equal(chosen(True, x), x * 2)
    np.testing.assert_array_equal(chosen(False, x), x)


# -- out_type, grid, pytrees ----------------------------------------------------------------------------------------


def test_results_follow_the_pytree_of_out_type(run):
    def body(x, *outs):
        for k, o in enumerate(outs):
            o[...] = x[...] + k

    s = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    x = f32(2, 3)
    got = run(jt.call(body, out_type=(s, s), grid=1), x)
    assert isinstance(got, tuple)
    np.testing.assert_array_equal(got, [x, x + 1])
    got = run(jt.call(body, out_type=[s, s, s], grid=1), x)
    assert isinstance(got, list)
    np.testing.assert_array_equal(got, [x, x + 1, x + 2])


def test_pytrees_of_arguments_and_results(run):
    @jt.kernel(
        out_type=lambda p, s, **_: {"sum": jt.like(p["w"]), "parts": [jt.like(p["w"]), jt.like(p["b"][0])]}, grid=1
    )
    def tree(p, s, o):
        o["sum"][...] = p["w"][...] + p["b"][0][...]
        o["parts"][0][...] = p["w"][...] * s[...]
        o["parts"][1][...] = p["b"][0][...]

    p = {"w": f32(4), "b": (jnp.full(4, 2.0), None)}
    for fn in (tree, jax.jit(tree)):
        got = run(tree, p, 3.0) if fn is tree else fn(p, 3.0)
        assert set(got) == {"sum", "parts"}
        np.testing.assert_array_equal(got["sum"], p["w"] + 2)
        np.testing.assert_array_equal(got["parts"][0], p["w"] * 3)
        np.testing.assert_array_equal(got["parts"][1], p["b"][0])
    names = [v.name for v in tree.lower(p, 3.0).program.kernel.params]
    assert names == ["p_b_0", "p_w", "s", "o_parts_0", "o_parts_1", "o_sum"]


def test_several_outputs_of_different_types(run):
    @jt.kernel(out_type=lambda x: (jt.like(x, shape=()), jt.like(x, dtype=jnp.int32)), grid=())
    def stats(x, total, rounded):
        total[...] = jnp.sum(x[...])
        rounded[...] = x[...].astype(jnp.int32)

    total, rounded = run(stats, f32(6) + 0.75)
    assert total.item() == 19.5
    assert rounded.dtype == jnp.int32
    np.testing.assert_array_equal(rounded, np.arange(6))


@pytest.mark.parametrize("grid", [(), 1, (3,), [2, 2], (2, 3, 4), np.int64(5), lambda x: x.shape[0], 0, (3, 0)])
def test_grids(run, grid):
    def body(x, o):
        axes = [jt.program_id(k) for k in range(rank)]
        jt.atomic_add(o, (), sum(axes, jnp.int32(1)))

    value = grid(f32(5)) if callable(grid) else grid
    shape = tuple(value) if isinstance(value, tuple | list) else (value,)
    rank = len(shape)
    k = jt.call(body, out_type=jax.ShapeDtypeStruct((), jnp.int32), grid=grid, init=10)
    expected = 10 + sum(1 + sum(i) for i in np.ndindex(*shape))
    assert run(k, f32(5)).item() == expected


def test_zero_size_arrays_and_empty_grids(run):
    empty = jnp.zeros((0,), jnp.float32)
    assert run(add, empty, empty).shape == (0,)
    k = jt.call(lambda x, o: None, out_type=lambda x: jt.like(x, shape=(0, 3)), grid=2)
    assert run(k, f32(3)).shape == (0, 3)
    into = jt.call(lambda x, o: o.__setitem__(..., jnp.full(3, jnp.sum(x[...]))), out_type=jt.like(f32(3)), grid=1)
    np.testing.assert_array_equal(run(into, empty), np.zeros(3))
    assert jax.jit(add)(empty, empty).shape == (0,)


def test_out_type_may_be_a_value_or_take_what_it_names(run):
    body = lambda x, y, o: o.__setitem__(..., x[...] + y[...])
    forms = [
        jax.ShapeDtypeStruct((4,), jnp.float32),
        f32(4),
        lambda x: jt.like(x),
        lambda x, y: jt.like(y),
        lambda *xs: jt.like(xs[1]),
        lambda x, **_: jt.like(x),
    ]
    for form in forms:
        np.testing.assert_array_equal(run(jt.call(body, out_type=form, grid=1), f32(4), f32(4)), f32(4) * 2)


def test_out_type_may_name_meta_parameters(run):
    @jt.kernel(out_type=lambda x, n: jt.like(x, shape=(n, *x.shape)), grid=lambda x, *, n: n)
    def repeat(x, o, *, n):
        o[jt.program_id(0), :] = x[...]

    np.testing.assert_array_equal(run(repeat, f32(3), n=4), np.tile(f32(3), (4, 1)))


def test_kernel_without_inputs(run):
    @jt.kernel(out_type=jax.ShapeDtypeStruct((8,), jnp.int32), grid=2)
    def count(o):
        i = jt.program_id(0)
        o.tiles(4)[i] = jt.arange(4) + i * 4

    np.testing.assert_array_equal(run(count), np.arange(8))
    np.testing.assert_array_equal(jax.jit(count)(), np.arange(8))


def test_scratch_is_private_to_a_program(run):
    @jt.kernel(
        out_type=lambda x: jt.like(x),
        grid=lambda x: x.shape[0],
        scratch=lambda x: [jax.ShapeDtypeStruct((x.shape[1],), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)],
    )
    def through(x, o, row, number):
        i = jt.program_id(0)
        row[...] = x[i, :]
        number[...] = i
        o[i, :] = row[...] + number[...].astype(jnp.float32)

    x = f32(5, 6)
    np.testing.assert_array_equal(run(through, x), np.asarray(x) + np.arange(5)[:, None])


def sum_of_tiles(x, y, o, *, bm):
    i = jt.program_id(0)
    o.tiles(bm)[i] = x.tiles(bm)[i] + y.tiles(bm)[i]


@pytest.mark.parametrize("grid", [lambda x, bm, **_: jt.cdiv(x.shape[0], bm), lambda bm, x: jt.cdiv(x.shape[0], bm)])
def test_parameters_of_the_grid_with_names_of_meta_parameters(grid):
    """They are these, wherever they stand; the others are the inputs in their order."""
    tiled = jt.kernel(out_type=lambda x, **_: jt.like(x), grid=grid)(sum_of_tiles)
    np.testing.assert_array_equal(tiled(f32(10), f32(10), bm=4), 2 * f32(10))


# -- aliases, init, donation ----------------------------------------------------------------------------------------


POISONED = ("float32", "int32", "bool", "bfloat16", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "int4", "float64")


def test_outputs_that_nobody_writes_are_poisoned():
    with jax.enable_x64(True):
        s = [jax.ShapeDtypeStruct((3,), d) for d in POISONED]
        k = jt.call(lambda x, *o: o[0].__setitem__(1, x[1]), out_type=s, grid=1)
        with jt.config(poison=True):
            f, i, b, h, u, *floats8, i4, d = jax.jit(k)(f32(3))
    np.testing.assert_array_equal(f, [np.nan, 1, np.nan])
    np.testing.assert_array_equal(i, np.full(3, np.uint32(0xAAAAAAAA).view(np.int32)))
    assert b.all()
    np.testing.assert_array_equal(u, np.full(3, 0xAA))
    np.testing.assert_array_equal(np.asarray(i4).astype(np.int32), np.full(3, 0xA - 16))
    for x in (h, *floats8, d):
        assert np.isnan(np.asarray(x).astype(np.float32)).all(), x.dtype


def test_poison_of_any_size():
    """The call fills its result, whatever size it has when it runs; the rest of a result is what a program wrote."""
    (n,) = jax.export.symbolic_shape("n")
    with jt.config(poison=True):
        k = jt.call(lambda x, o: o.__setitem__(0, x[0]), out_type=lambda x: x, grid=1)
        exported = jax.export.export(jax.jit(k), disabled_checks=jt.export_checks())(jax.ShapeDtypeStruct((n, 4), "f4"))
    for rows in (1, 5, 300_000):
        found = np.asarray(exported.call(np.ones((rows, 4), np.float32)))
        np.testing.assert_array_equal(found[0], np.ones(4))
        assert np.isnan(found[1:]).all()


def test_threads_that_compile_see_the_options_of_the_call():
    """The two products of a gradient are compiled in threads. Those knew the process's options only: with poison there,
    and none in the block, kernels that take it were called without it."""
    matmul = tiled_matmul(24, 16, 8)
    a, b = f32(24, 16), f32(16, 24)
    with jt.config(poison=False):  # `tests/conftest.py` sets it for the process
        found = jax.jit(jax.grad(lambda a, b: matmul(a, b).sum(), (0, 1)))(a, b)
    for got, want in zip(found, (np.tile(b.sum(1), (24, 1)), np.tile(a.sum(0)[:, None], (1, 24))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_poison_adds_nothing_to_a_program():
    """It is an attribute of the call: XLA neither compiles nor copies anything for it, and the kernel is the same."""
    k = jt.call(lambda x, o: o.__setitem__(0, x[0]), out_type=lambda x: x, grid=1)
    lowered = {}
    for poison in (False, True):
        with jt.config(poison=poison):
            lowered[poison] = jax.jit(k).lower(np.ones((3, 4), np.float32)).as_text()
    assert "poison = dense<255> : tensor<1xi64>, " in lowered[True]
    assert lowered[True].replace("poison = dense<255> : tensor<1xi64>, ", "") == lowered[False]


def test_poison_spares_aliases_and_inits():
    k = jt.call(lambda x, o, c: None, out_type=lambda x: (x, x), grid=1, alias={"x": "o"}, init={"c": 5})
    with jt.config(poison=True):
        o, c = jax.jit(k)(f32(3))
    np.testing.assert_array_equal(o, f32(3))
    np.testing.assert_array_equal(c, np.full(3, 5))


# -- the rest of a kernel object ------------------------------------------------------------------------------------


def test_lower_shows_every_level():
    types = [jax.ShapeDtypeStruct((40,), jnp.float32)] * 2
    lowered = add.lower(*types, bm=16)
    assert list(lowered.texts)[:3] == ["jaxpr", "tile_ir", "tile_ir_opt"]
    assert {"llvm", "asm"} <= set(lowered.texts)
    assert "kernel @add" in lowered.texts["tile_ir"]
    assert "jtile_entry" in lowered.texts["llvm"]
    assert lowered.image[:4] == b"\x7fELF"
    assert lowered.launch["programs"] == 3
    assert add.lower(*types, bm=16).image == lowered.image


def test_lower_for_another_target():
    types = [jax.ShapeDtypeStruct((40,), jnp.float32)] * 2
    sse, avx = (add.lower(*types, target=t, bm=16) for t in ("cpu:sse2", "cpu:avx512"))
    assert "zmm" in avx.texts["asm"]
    assert "zmm" not in sse.texts["asm"]
    assert "ymm" not in sse.texts["asm"]
    assert sse.launch["isa"].startswith("x86_64:")
    assert "avx" not in sse.launch["isa"]


def test_lower_goes_by_the_options_of_its_making():
    """Image and record belong together, whenever they are read."""
    lower = lambda: add.lower(*[jax.ShapeDtypeStruct((40,), jnp.float32)] * 2, bm=16)
    with jt.config(optimize=True):
        first, second = lower(), lower()
        image = first.image
    with jt.config(optimize=False):
        assert second.image == second.pieces[0].image == image
        assert lower().image != image


def test_kernels_compute_the_same_without_optimisation():
    for optimize in (True, False):
        with jt.config(optimize=optimize):
            np.testing.assert_array_equal(add(f32(100), f32(100), bm=16), 2 * np.arange(100))


def test_interpret_gives_numpy_arrays():
    got = add.interpret(f32(10), np.ones(10, np.float32), seed=5)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, np.arange(10) + 1)


def test_options_are_part_of_a_kernel():
    k = add.with_options(num_warps=8, interpret=True)
    assert k is not add
    a, b = (f.lower(f32(4), f32(4)).program for f in (add, k))
    assert a != b
    assert a == add.with_options().lower(f32(4), f32(4)).program


def test_meta_parameters_that_compare_equal_are_told_apart():
    @jt.kernel(out_type=lambda x, *, v: jax.ShapeDtypeStruct((), jnp.result_type(type(v))), grid=1)
    def constant(x, o, *, v):
        o[...] = jnp.asarray(v)

    x = f32(1)
    got = [constant(x, v=v) for v in (1, 1.0, True, 0.0, -0.0)]
    assert [g.dtype.name for g in got] == ["int32", "float32", "bool", "float32", "float32"]
    assert [bool(np.signbit(g)) for g in got[3:]] == [False, True]


def test_the_x64_mode_is_part_of_what_a_call_is_remembered_by():
    @jt.kernel(out_type=lambda x, **_: jt.like(x, dtype=jnp.result_type(float)), grid=1)
    def widen(x, o):
        o[...] = x[...].astype(o.dtype)

    x = f32(3)
    assert widen(x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert widen(x).dtype == jnp.float64
    assert widen(x).dtype == jnp.float32
