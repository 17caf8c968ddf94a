"""jtile_call under JAX's machinery: effects, the interpreter inside jit, platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_calls import calls

import jtile as jt
from jtile import ir
from jtile.primitive.jtile_call import jtile_call_p

pytestmark = pytest.mark.usefixtures("by_numpy")


@jt.kernel(out_type=lambda a, b, **_: jt.like(a), grid=lambda a, *, bm, **_: jt.cdiv(a.shape[0], bm))
def add(a, b, o, *, bm=4):
    i = jt.program_id(0)
    A, B, O = a.tiles(bm), b.tiles(bm), o.tiles(bm)
    O[i] = A[i] + B[i]


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def positive(x, o):
    i = jt.program_id(0)
    jt.assert_(x[i] > 0, "x is positive")
    o[i] = x[i]


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def shown(x, o):
    jt.print("x is {}", x[...])
    o[...] = x[...]


X = jnp.arange(10, dtype=jnp.float32)
Y = jnp.ones(10)


def jit_of(k):
    return jax.jit(lambda *a: k(*a))


# -- the primitive itself ---------------------------------------------------------------------------------------------


def test_one_equation_that_takes_and_returns_arrays():
    jaxpr = jax.make_jaxpr(add)(X, Y)
    (eqn,) = jaxpr.eqns
    assert eqn.primitive is jtile_call_p
    assert [v.aval for v in eqn.invars] == [jax.typeof(X)] * 2
    assert list(eqn.params) == ["program"]
    assert str(eqn.params["program"]).startswith("add(3,)#")


def test_at_once_while_another_function_is_traced():
    """`jax.ensure_compile_time_eval` runs what has no traced operands, such as the number of a program."""

    @jax.jit
    def f(x):
        with jax.ensure_compile_time_eval():
            once, gradient = add(X, Y), jax.grad(lambda x: (add(x, Y) ** 2).sum())(X)
            many = jax.vmap(add, (0, None))(jnp.stack([X, X]), Y)
        assert not any(isinstance(y, jax.core.Tracer) for y in (once, gradient, many))
        return x + once + gradient + many[1]

    np.testing.assert_array_equal(f(X), X + 4 * (X + 1))


def test_results_are_never_weakly_typed():
    k = jt.kernel(out_type=lambda x: jt.like(x), grid=1)(lambda x, o: o.__setitem__(..., x[...]))
    weak = jnp.asarray(2.0)
    assert jax.typeof(weak).weak_type
    assert not jax.eval_shape(k, weak).weak_type
    assert not jax.typeof(jax.jit(k)(weak)).weak_type


def test_equal_calls_compile_once():
    traces = []

    @jt.kernel(out_type=lambda x: traces.append(1) or jt.like(x), grid=1)
    def copy(x, o):
        o[...] = x[...]

    for _ in range(3):
        copy(X)
        jax.jit(lambda x: copy(x))(X)
    assert len(traces) == 1


def test_disable_jit():
    with jax.disable_jit():
        np.testing.assert_array_equal(add(X, Y), X + 1)
        np.testing.assert_array_equal(jax.jit(add)(X, Y), X + 1)


@pytest.mark.parametrize("dtype", ir.DTYPES)
@pytest.mark.parametrize("interpret", [False, True])
def test_every_dtype_passes_through(dtype, interpret):
    with jax.enable_x64(True):
        k = jt.call(lambda x, o: o.__setitem__(..., x[...]), out_type=lambda x: jt.like(x), grid=1)
        k = k.with_options(interpret=interpret)
        x = np.asarray([1, 2, 4, 1, 2], np.float32).astype(ir.DTYPES[dtype].numpy)
        for got in (k(x), jax.jit(k)(x)):
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(got).astype(np.float32), x.astype(np.float32))


# -- effects ----------------------------------------------------------------------------------------------------------


def unused(k):
    return jax.jit(lambda x: (k(x), x * 2)[1])


def test_a_kernel_that_asserts_is_kept_where_its_result_is_unused():
    assert "jtile_call" in str(jax.make_jaxpr(unused(positive))(X + 1))
    assert calls(unused(positive).lower(X + 1).compile().as_text())
    assert not calls(unused(lambda x: add(x, x)).lower(X).compile().as_text())


def test_a_kernel_that_asserts_is_called_as_often_as_it_stands_there():
    twice = jax.jit(lambda x: positive(x) + positive(x))
    assert calls(twice.lower(X + 1).compile().as_text()) == 2
    np.testing.assert_array_equal(twice(X + 1), 2 * (X + 1))


def test_effects_inside_control_flow_and_checkpoint():
    scanned = jax.jit(lambda x: jax.lax.scan(lambda c, _: (positive(c), None), x, None, length=3)[0])
    np.testing.assert_array_equal(scanned(X + 1), X + 1)
    chosen = jax.jit(lambda x: jax.lax.cond(x[0] > 0, positive, lambda x: x, x))
    np.testing.assert_array_equal(chosen(X), X)
    looped = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[1] < 4, lambda c: positive(c) + 1, x))
    np.testing.assert_array_equal(looped(X + 1), X + 3)
    np.testing.assert_array_equal(jax.checkpoint(positive)(X + 1), X + 1)


def test_a_failed_assert_is_a_typed_error():
    np.testing.assert_array_equal(positive(X + 1), X + 1)
    with pytest.raises(jt.errors.KernelAssertionError, match="x is positive") as e:
        positive(X)
    assert "test_primitive.py" in str(e.value)
    assert 'jt.assert_(x[i] > 0, "x is positive")' in str(e.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="x is positive"):
        jax.block_until_ready(jax.jit(positive)(X))


def test_print_reaches_the_terminal(capfd):
    jax.block_until_ready(jax.jit(shown)(jnp.asarray([1.5, -2.0])))
    out = capfd.readouterr()
    assert "x is" in out.out + out.err
    assert "-2" in out.out + out.err


@pytest.mark.parametrize("interpret", [False, True])
def test_a_kernel_may_have_no_output(capfd, interpret):
    k = jt.call(lambda x: jt.print("got {}", x[jt.program_id(0)]), out_type=(), grid=2).with_options(
        interpret=interpret
    )
    assert k(X) == ()
    jax.jit(k)(X)
    jax.effects_barrier()
    out = capfd.readouterr()
    assert (out.out + out.err).count("got 1") == 2


# -- the interpreter inside jit ---------------------------------------------------------------------------------------


def interpreted(k):
    return k.with_options(interpret=True)


def test_the_interpreter_runs_inside_jit():
    k = interpreted(add)
    compiled = jax.jit(k).lower(X, Y).compile().as_text()
    assert not calls(compiled)
    assert "callback" in compiled
    np.testing.assert_array_equal(jax.jit(k)(X, Y), X + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: k(c, Y), x))(X), X + 3)


def test_interpret_by_configuration():
    def text():
        return jax.jit(lambda x, y: add(x, y)).lower(X, Y).as_text()

    assert calls(text())
    with jt.config(interpret=True):
        assert not calls(text())
        assert calls(jax.jit(add.with_options(interpret=False)).lower(X, Y).as_text())
    assert calls(text())


def test_a_jitted_function_follows_the_configuration():
    f = jax.jit(lambda x: positive(x))
    np.testing.assert_array_equal(f(X + 1), X + 1)
    with jt.config(interpret=True), pytest.raises(jax.errors.JaxRuntimeError, match="KernelAssertionError"):
        jax.block_until_ready(f(X))


def test_large_arrays_through_the_host_callback():
    x = jnp.ones((1 << 20,))
    k = interpreted(add)
    np.testing.assert_array_equal(jax.jit(lambda x: k(x * 2, x, bm=1 << 18) + 1)(x), np.full(1 << 20, 4.0))


def test_errors_of_the_interpreter_are_typed_eagerly_and_named_under_jit():
    race = jt.call(lambda x, o: o.__setitem__(0, x[jt.program_id(0)]), out_type=lambda x: jt.like(x), grid=4)
    with pytest.raises(jt.errors.RaceError, match="test_primitive"):
        interpreted(race)(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RaceError"):
        jax.block_until_ready(jax.jit(interpreted(race))(X))


def test_interpreted_effects():
    k = interpreted(positive)
    with pytest.raises(jt.errors.KernelAssertionError, match="x is positive"):
        k(X)
    f = unused(k)
    np.testing.assert_array_equal(f(X + 1), (X + 1) * 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="x is positive"):
        jax.block_until_ready(f(X))
        jax.effects_barrier()


# -- transforms that pass a kernel by, platforms -----------------------------------------------------------------------


def test_a_custom_vjp_around_a_kernel():
    @jax.custom_vjp
    def plus(a, b):
        return add(a, b)

    plus.defvjp(lambda a, b: (add(a, b), None), lambda _, g: (g, g))
    np.testing.assert_array_equal(jax.grad(lambda a: plus(a, Y).sum())(X), Y)


def test_transforms_over_other_arguments_pass():
    np.testing.assert_array_equal(jax.vmap(lambda s: s * add(X, Y).sum())(Y), Y * (X + 1).sum())
    np.testing.assert_array_equal(jax.grad(lambda s: (s * add(X, Y)).sum())(Y), X + 1)


def test_other_platforms_are_refused_by_name():
    with pytest.raises(jt.errors.UnsupportedError, match="kernel add cannot run on platform 'tpu'") as e:
        jax.jit(add).trace(X, Y).lower(lowering_platforms=("tpu",))
    assert "def add" in str(e.value)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU to compile for")
@pytest.mark.parametrize(("platform", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")])
def test_a_gpu_that_is_not_here_needs_a_name(platform, arch):
    lower = lambda: jax.jit(add).trace(X, Y).lower(lowering_platforms=(platform,))
    with pytest.raises(jt.errors.UnsupportedError, match=f"no GPU of platform {platform!r}.*JTILE_ARCH={arch}"):
        lower()
    with jt.config(arch=arch):
        assert f"jtile_{platform}" in lower().as_text()


def test_fallback_interprets_what_the_target_cannot_run(monkeypatch):
    from jtile.lowering import registry

    def refuse(kernel, target):
        raise jt.errors.UnsupportedError("this target has no such op")

    monkeypatch.setattr(registry.targets, "check_capabilities", refuse)
    k = jt.call(lambda x, o: o.__setitem__(..., x[...] * 3 + 0.125), out_type=lambda x: jt.like(x), grid=1)
    with pytest.raises(jt.errors.UnsupportedError, match="no such op"):
        jax.jit(k)(X)
    np.testing.assert_array_equal(k.with_options(fallback="interpret")(X), X * 3 + 0.125)
    with jt.config(fallback="interpret"):
        np.testing.assert_array_equal(jax.jit(k)(X), X * 3 + 0.125)


# -- outputs in the buffer of an operand, where XLA fuses slices with custom calls -----------------------------------


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0], init=1.0)
def one_more(x, o):
    i = jt.program_id(0)
    o[i, :] = o[i, :] + x[i, :]


@jt.kernel(out_type=lambda x, z: jt.like(z), grid=lambda x, z: z.shape[0], alias={"z": "o"})
def added_to(x, z, o):
    i = jt.program_id(0)
    o[i, :] = o[i, :] + x[i, :]


def test_slices_before_and_behind_a_kernel_in_place():
    x = jax.random.normal(jax.random.key(0), (3, 64, 64))
    np.testing.assert_array_equal(jax.jit(lambda x: one_more(x[1]))(x), 1 + x[1])
    _, rows = jax.jit(lambda x: jax.lax.scan(lambda c, row: (c, one_more(row)), 0, x))(x)
    np.testing.assert_array_equal(rows, 1 + x)
    turn = lambda k, z: z.at[k].set(added_to(x[k], z[2 - k]))
    z = jax.jit(lambda z: jax.lax.fori_loop(0, 3, turn, z))(2 * x)
    np.testing.assert_array_equal(z[0], x[0] + 2 * x[2])
    np.testing.assert_array_equal(z[2], x[2] + z[0])


def test_xla_for_gpus_sees_no_slice_beside_a_kernel_in_place():
    x = jnp.zeros((3, 64, 64))
    with jt.config(arch="sm_90"):
        make = jax.export.export(
            jax.jit(lambda x: one_more(x[1])), platforms=["cuda"], disabled_checks=jt.export_checks()
        )
        assert str(make(x).mlir_module()).count("stablehlo.optimization_barrier") == 3
