"""`jt.fuse`: programs as kernels are the programs, under every transformation; random ones too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_programs import agree, array_program
from jax.sharding import PartitionSpec as P

import jtile as jt
from benchmarks.fuse import chain, layer_norm, mandelbrot, programs
from jtile.errors import KernelTypeError
from jtile.fusion import laying
from jtile.fusion.bodies import GroupKernel, kernel_of
from jtile.fusion.fused import _by_equations, evaluate
from jtile.fusion.groups import plan_of
from jtile.fusion.steps import program_of
from jtile.fusion.tilings import side_by_side
from jtile.testing.evaluate import evaluated, walked

rng = np.random.default_rng(0)


pytestmark = pytest.mark.usefixtures("any_size_and_rows")


def array(*shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def by_interpreter(group, args):
    return GroupKernel(group).interpret(args)


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), tolerance, tolerance)


def kernels(fused, *args):
    return len(fused.explain(*args).plan.units)


def norm_of(x, w):
    return layer_norm(x, w, w)


# -- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_numpy")
def test_a_norm_is_one_kernel_under_every_transformation():
    x, w = array(6, 40), array(40)
    fused = jt.fuse(norm_of)
    assert kernels(fused, x, w) == 1
    close(fused(x, w), norm_of(x, w))
    close(jax.jit(fused)(x, w), norm_of(x, w))
    close(jax.vmap(fused, (0, None))(array(0, 6, 40), w), jnp.zeros((0, 6, 40)))
    xs = array(3, 6, 40)
    close(jax.vmap(fused, (0, None))(xs, w), evaluated(jax.vmap(norm_of, (0, None)))(xs, w))
    loss = lambda f: lambda x, w: (f(x, w) ** 2).sum()
    slopes = evaluated(jax.grad(loss(norm_of), (0, 1)))(x, w)
    close(evaluated(jax.grad(loss(fused), (0, 1)))(x, w), slopes, 2e-4)
    close(*(evaluated(lambda x, w, f=f: jax.jvp(f, (x, w), (x, w)))(x, w) for f in (fused, norm_of)), 1e-4)
    whole = jt.fuse(jax.grad(loss(norm_of), (0, 1)))
    close(whole(x, w), slopes, 2e-4)
    assert kernels(whole, x, w) >= 1


def test_in_shard_map():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    x, w = array(6, 40), array(40)
    run = jax.shard_map(jt.fuse(norm_of), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    close(jax.jit(run)(x, w), norm_of(x, w))


@pytest.mark.usefixtures("by_numpy")
def test_rules_of_functions_are_theirs():
    """A group with `jax.nn.relu` and a function with `custom_vjp`: values by a kernel, derivatives by the rules."""

    @jax.custom_vjp
    def odd(x):
        return x * 3.0

    odd.defvjp(lambda x: (odd(x), None), lambda _, g: (g * 100.0,))

    def f(x):
        return jax.nn.relu(odd(x)) * jnp.exp(-x)

    x = array(5, 8)
    fused = jt.fuse(f)
    (group,) = fused.explain(x).plan.units
    assert group.by_equations
    close(fused(x), f(x))
    close(*(evaluated(jax.grad(lambda x, g=g: g(x).sum()))(x) for g in (fused, f)))


@pytest.mark.usefixtures("by_numpy")
def test_static_arguments_trees_and_decorators():
    @jt.fuse(static_argnums=1, static_argnames="shift")
    def f(tree, power, *, shift):
        return {"y": jnp.exp(tree["x"]) ** power + (1.0 if shift == "one" else 0.0)}

    x = array(4, 8)
    close(f({"x": x}, 2, shift="one"), {"y": jnp.exp(x) ** 2 + 1})
    assert repr(f) == "<jtile.Fused f>"
    assert f.__name__ == "f"
    assert len(f.explain({"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}, 2, shift="two").plan.units) == 1


@pytest.mark.usefixtures("by_numpy")
def test_closures_over_arrays_and_tracers():
    w = array(8)
    close(
        jax.grad(lambda w: jt.fuse(lambda x: jnp.tanh(x * w) + w)(w).sum())(w), 2 * w * (1 - jnp.tanh(w * w) ** 2) + 1
    )
    close(jt.fuse(lambda x: jnp.tanh(x * w) + w)(w), jnp.tanh(w * w) + w)


def test_what_is_no_function():
    with pytest.raises(KernelTypeError, match=r"jt\.fuse takes a function of arrays, got 5"):
        jt.fuse(5)


# -- cutting -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_numpy")
def test_values_that_are_needed_outside_leave_the_kernel():
    def f(x, w):
        e = jnp.exp(x)
        return e @ w, e / e.sum(-1, keepdims=True)

    x, w = array(8, 16), array(16, 4)
    assert kernels(jt.fuse(f), x, w) == 1
    close(jt.fuse(f)(x, w), f(x, w))


@pytest.mark.usefixtures("by_numpy")
def test_no_cycles():
    """Two kernels, where one would need what it gives to a product."""

    def f(x, w):
        e = jnp.exp(x) * 2
        return jnp.tanh(e @ w) * e + 1

    x, w = array(8, 8), array(8, 8)
    assert kernels(jt.fuse(f), x, w) == 2
    close(jt.fuse(f)(x, w), f(x, w))


@pytest.mark.usefixtures("by_numpy")
def test_two_kernels_that_need_each_other_stay_two():
    def f(x, y, w):
        a, b = jnp.exp(x), jnp.exp(y)
        c, d = jnp.tanh(a @ w) + 1, jnp.tanh(b @ w) + 1
        return (a + d) * 2, (b + c) * 3

    args = array(8, 8), array(8, 8), array(8, 8)
    close(jt.fuse(f)(*args), f(*args))


def test_rows_that_no_program_has_room_for_take_several_passes():
    x = jax.ShapeDtypeStruct((2, 40000), jnp.float32)
    text = str(jt.fuse(lambda x: jnp.cumsum(jax.nn.softmax(x), -1)).explain(x))
    assert "a program has no room for what it sums" in text
    assert "its programs share the axes that the last sums go along" in text


def test_what_is_left_to_xla_and_why():
    x = array(64, 64)
    part = lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 60)
    text = str(jt.fuse(lambda x, i: part(x, i) + 0.5 * part(x, 2 * i) - 0.25 * part(x, 3 * i)).explain(x, 1))
    assert "jt.fuse makes no kernels of dynamic_slice" in text
    assert "it reads parts of arrays, which XLA does without copies" in text
    assert "it is one reduction" in str(jt.fuse(lambda x: x.sum(-1)).explain(x))
    assert "it is one step" in str(jt.fuse(jnp.floor).explain(x))
    columns = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
    assert "it sums columns of cheap arithmetic" in str(jt.fuse(lambda x: (x * x + 1).sum(0)).explain(columns))
    if jax.default_backend() == "cpu":
        slow = lambda x, i: jnp.exp(part(x, i)) % 0.7 + 0.5 * part(x, 2 * i)
        assert "it reads parts of arrays" not in str(jt.fuse(slow).explain(x, 1))
        assert "in 1 kernels" in str(jt.fuse(lambda x: jax.lax.rem(x, 0.5 * x)).explain(x))
        assert "1 in 1 kernels" in str(jt.fuse(jnp.exp).explain(x))
        assert "computes erf less exactly" in str(jt.fuse(lambda x: jax.lax.erf(x) + 1).explain(x))


def test_chains_of_many_values_that_are_read_again_take_small_tiles():
    """So that these stay in the first cache of a CPU."""
    sides = {}
    for f in (chain, mandelbrot):
        x = jax.ShapeDtypeStruct((1 << 18,), jnp.float32)
        (group,) = jt.fuse(f).explain(x, x).plan.units
        sides[f] = np.prod(GroupKernel(group).tiling.sides)
    if jax.default_backend() == "cpu":
        assert sides[chain] == 4096
        whole = [side_by_side(*of) for of in ((1_000_000, 4096), (262_144, 341), (999_983, 4096), (50, 20))]
        assert whole == [4000, 256, 4096, 16]  # whole vectors, and as many tiles of them as the axis has
        assert 256 <= sides[mandelbrot] <= 512


def test_softmaxes_of_columns_are_one_kernel():
    """The maximum of columns alone is XLA's, and with the exponentials behind it part of their kernel."""
    for shape, axis in (((128, 64), 0), ((4, 64, 128), 1), ((64, 128), -1)):
        x = array(*shape)
        f = lambda x, axis=axis: jax.nn.softmax(3 * x, axis)
        (group,) = jt.fuse(f).explain(x).plan.units
        assert {"reduce_max", "reduce_sum"} <= {s.name for s in group.steps} and group.inputs[0].shape == shape
        close(jt.fuse(f)(x), f(x))
        (got,) = by_interpreter(group, [x])
        close(got, f(x))
    tops = lambda x: (jax.nn.softmax(x, 0), x.max(0))  # also a result: it stays outside
    x = array(128, 64)
    close(jt.fuse(tops)(x), tops(x))


def test_tiles_of_transposed_arrays_have_two_sides():
    """A tile of one long row would read one element of each cache line of the transposed array."""

    def sides(f, *shapes):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        (group,) = jt.fuse(f).explain(*args).plan.units
        return GroupKernel(group).tiling.sides

    if jax.default_backend() == "cpu":
        assert sides(lambda x, y: 2 * x + y, (1024, 1024), (1024, 1024)) == (4096,)
        assert sides(lambda x, y: 2 * x.T + y, (1024, 1024), (1024, 1024)) == (32, 128)
        assert sides(lambda x, y: 2 * x.transpose(2, 1, 0) + y, (512, 8, 512), (512, 8, 512)) == (32, 1, 128)
        assert sides(lambda x, y: 2 * x.transpose(1, 0, 2) + y, (8, 64, 512), (64, 8, 512)) == (1, 8, 512)
    x, y = array(100, 70), array(70, 100)
    f = lambda x, y: (2 * jnp.exp(x).T + y, x - y.T)
    close(jt.fuse(f)(x, y), f(x, y))


def test_products_are_made_in_the_order_that_a_kernel_reads():
    """The gradient of `x @ w` for `w` is the transpose of a product in JAX's programs; XLA makes it without one."""

    def step(w, m, x, y):
        m = 0.9 * m + jax.grad(lambda w: ((x @ w - y) ** 2).sum())(w)
        return w - 0.1 * m, m

    w, m, x, y = array(64, 70), array(64, 70), array(20, 64), array(20, 70)
    plan = jt.fuse(step).explain(w, m, x, y).plan
    last = plan.units[-1]
    assert last.outputs[0].shape == (64, 70) and not any(s.name == "transpose" for s in last.steps)
    close(jt.fuse(step)(w, m, x, y), step(w, m, x, y), 1e-4)
    text = jax.jit(jt.fuse(step)).lower(w, m, x, y).compile().as_text()
    assert " transpose(" not in text
    both = lambda p, z: (jnp.exp(p.T) + 1, p + z)
    turned = lambda x, y, z: both(x @ y, z)  # another reads the product: the kernel turns it
    units = jt.fuse(turned).explain(x, w, y).plan.units
    assert any(s.name == "transpose" for unit in units for s in unit.steps)
    close(jt.fuse(turned)(x, w, y), turned(x, w, y), 1e-3)


def test_long_chains_are_laid_out_a_few_times(monkeypatch):
    """Not anew for each of the 156 equations."""
    layouts, layout_of = [], laying.layout_of
    monkeypatch.setattr(laying, "layout_of", lambda *args, **named: layouts.append(args) or layout_of(*args, **named))
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    assert kernels(jt.fuse(mandelbrot), x, x) == 1
    assert len(layouts) < 10


def test_small_arrays_are_left_to_xla(monkeypatch):
    monkeypatch.undo()
    assert "has 48 elements, fewer than 4096" in str(jt.fuse(jax.nn.softmax).explain(array(6, 8)))


def test_an_explanation_names_kernels_arrays_and_lines():
    text = str(jt.fuse(norm_of).explain(array(6, 40), array(40)))
    assert text.startswith("20 equations: 20 in 1 kernels, 0 by XLA")
    assert "reads float32[40], float32[6, 40]" in text or "reads float32[6, 40], float32[40]" in text
    assert "writes float32[6, 40]" in text
    assert "benchmarks/fuse.py" in text


# -- meaning -----------------------------------------------------------------------------------------------------------

CASES = {
    "merged axes": (lambda x: jax.nn.softmax(x * 2, axis=(1, 2)), [(5, 6, 7)]),
    "leading axis": (lambda x: x - x.max(0), [(5, 6)]),
    "middle axis": (lambda x: jax.nn.softmax(x, axis=1), [(3, 5, 6)]),
    "transposed": (lambda x, y: jnp.exp(x.T) * y, [(6, 5), (5, 6)]),
    "transposed result": (lambda x: (jnp.exp(x) + 1).transpose(2, 0, 1), [(3, 4, 5)]),
    "causal mask": (lambda s: jnp.where(jnp.arange(6)[:, None] >= jnp.arange(6), s * 2, -jnp.inf), [(2, 3, 6, 6)]),
    "masked rows": (lambda s: jax.nn.softmax(jnp.where(jnp.arange(7) < 5, s, -jnp.inf)), [(4, 7)]),
    "arg": (lambda x: (jnp.exp(x).argmax(-1), x.argmin(1) + 1), [(4, 9)]),
    "arg of one": (lambda x: jnp.exp(x).argmax(-1) + 1, [(4, 1)]),
    "running": (lambda x: jnp.cumsum(x * x, axis=1) / jax.lax.cumlogsumexp(x, axis=1, reverse=True), [(4, 9)]),
    "several sums": (lambda x, w: ((x * w).sum(-1), (x * x).max(-1), (x + w).min(-1)), [(4, 9), (9,)]),
    "ones": (lambda x, y: jnp.exp(x[:, None, :] - y[None, :, :]).sum(-1), [(4, 3), (5, 3)]),
    "equal elements": (
        lambda x: (e := jnp.broadcast_to(jnp.exp(x)[None], (5, 8)), e.sum(0), e.prod(0) + 1, e.argmax(0), e.cumsum(0)),
        [(8,)],
    ),
    "one element": (lambda x: jax.nn.softmax(jnp.exp(x)), [(1, 1)]),
    "no elements": (lambda x: jnp.exp(x) * 2, [(0, 5)]),
    "none beside some": (lambda x, y: jnp.where(jnp.arange(8) > 2, jnp.exp(x) * y, 0).sum(1), [(8,), (0, 5, 8)]),
    "scalars": (lambda x, s: jnp.exp(x * s) + s, [(4, 5), ()]),
    "a scalar alone": (lambda s: jnp.exp(s) * 2 + 1, [()]),
    "nan": (lambda x: jnp.maximum(jnp.log(x), 0.0) + jnp.where(x > 0, x, jnp.nan).max(-1, keepdims=True), [(5, 9)]),
}


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("name", CASES)
def test_kinds_of_axes(name):
    f, shapes = CASES[name]
    args = [array(*shape) for shape in shapes]
    plan, tree, leaves = jt.fuse(f).planned(tuple(args), {})
    close(jax.tree.unflatten(tree, evaluate(plan, leaves, by_interpreter)), f(*args))


@pytest.mark.usefixtures("by_numpy")
def test_programs_of_the_benchmark(monkeypatch):
    """All of them, small, by kernels on this machine."""
    monkeypatch.setattr("benchmarks.fuse.normal", lambda _, *shape: array(*shape))
    some = {name: one for name, one in programs(64).items() if name not in ("heat", "PageRank", "selective scan")}
    ours = evaluated(lambda args: {name: jt.fuse(f)(*args[name]) for name, (f, _) in some.items()})
    plain = evaluated(lambda args: {name: f(*args[name]) for name, (f, _) in some.items()})
    args = {name: args for name, (_, args) in some.items()}
    close(ours(args), plain(args), 1e-3)


# -- random programs ---------------------------------------------------------------------------------------------------


def inside_too(unit, args):
    """By the interpreter; in the bodies of loops that XLA runs, by the equations."""
    traced = any(isinstance(x, jax.core.Tracer) for x in args)
    return _by_equations(unit, args) if traced else kernel_of(unit).interpret(args)


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("part", range(10))
def test_random_programs(part, request):
    """470 in all, by the interpreter against NumPy, a step at a time."""
    count = 300 if request.config.getoption("--runslow") else 47
    made = 0
    for seed in range(part * count, (part + 1) * count):
        f, arrays = array_program(seed)
        closed = jax.make_jaxpr(f)(*arrays)
        plan = plan_of(program_of(closed))
        made += len(plan.units)
        agree(seed, closed, evaluate(plan, arrays, inside_too), walked(closed, arrays))
    assert made > count / 2


@pytest.mark.usefixtures("by_numpy")
def test_random_programs_on_this_machine():
    """Thirty more, compiled together, against NumPy and against XLA's program of them."""
    seeds = range(10_000, 10_030)
    some = [array_program(seed) for seed in seeds]
    args = [arrays for _, arrays in some]
    ours = evaluated(lambda args: [jt.fuse(f)(*xs) for (f, _), xs in zip(some, args)])(args)
    xla = jax.jit(lambda args: [f(*xs) for (f, _), xs in zip(some, args)])(args)
    for seed, (f, arrays), got, theirs in zip(seeds, some, ours, xla, strict=True):
        closed = jax.make_jaxpr(f)(*arrays)
        agree(seed, closed, got, walked(closed, arrays))
        agree(seed, closed, got, theirs)
