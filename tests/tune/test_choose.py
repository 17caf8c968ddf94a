"""What a call gets: entries, defaults, what is given; jit caches do not go stale; nothing is measured in a trace."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tunable as kernels

import jtile as jt
from jtile.errors import CacheWarning, KernelTypeError, KernelValueError
from jtile.tune import choose, device, search
from jtile.tune.programs import trace
from jtile.tune.store import Entry, new_generation, store

X = kernels.X


def bm_of(f, *args):
    (program,) = trace(f, *args)[0]
    return dict(program.meta)["bm"]


def keep(kernel, x, **config):
    """An entry for `kernel(x)`, as a search would have stored it."""
    (call,) = trace(kernel, x)[1]
    store.put(device.kind(), call.name, Entry(config, 1.0, 2.0))
    return call.name


def test_an_entry_is_taken_by_eager_calls_at_once_and_by_jitted_ones_after_a_generation():
    double, traces = kernels.double_kernel(), []

    @jax.jit
    def f(x):
        traces.append(bm_of_call(double, x))
        return double(x)

    def bm_of_call(kernel, x):
        return dict(kernel._resolve(jax.tree.structure((x,)), [x], {}).program.meta)["bm"]

    trace(double, X)  # makes JAX's context variable, once in a process; that alone makes every function trace again
    f(X), double(X)
    assert bm_of_call(double, X) == 2
    keep(double, X, bm=16)
    assert bm_of_call(double, X) == 16
    f(X)
    assert traces == [2]
    new_generation()
    f(X), f(X)
    assert traces == [2, 16]
    np.testing.assert_array_equal(f(X), 2 * X)


def test_what_is_given_is_not_tuned():
    double = kernels.double_kernel()
    keep(double, X, bm=16)
    assert bm_of(lambda x: double(x, bm=4), X) == 4
    assert bm_of(lambda x: double(x, plus=1.0), X) == 2  # another key
    assert bm_of(double, X[:32]) == 2
    assert bm_of(double, X.astype(jnp.float16)) == 2
    assert bm_of(double, X) == 16


def test_defaults_of_a_heuristic_hold_without_an_entry():
    double = kernels.double_kernel()
    f = lambda x: jt.tuned(double, {"bm": 32, "num_warps": 8}, x)
    assert bm_of(f, X) == 32
    (program,) = trace(f, X)[0]
    assert program.options.num_warps == 8
    keep(f, X, bm=16)
    assert bm_of(f, X) == 16
    assert bm_of(lambda x: jt.tuned(double, {"bm": 32}, x, bm=4), X) == 4
    np.testing.assert_array_equal(f(X), 2 * X)
    with pytest.raises(KernelValueError, match="bn"):
        jt.tuned(double, {"bn": 3}, X)


def test_defaults_of_a_kernel_without_a_space():
    plain = kernels.double_kernel()._variant({})
    f = lambda x: jt.tuned(plain, {"bm": 32, "num_warps": 8}, x)
    (program,) = trace(f, X)[0]
    assert (dict(program.meta)["bm"], program.options.num_warps) == (32, 8)
    assert bm_of(lambda x: jt.tuned(plain, {"bm": 32}, x, bm=4), X) == 4


def test_a_key_by_name_or_function():
    by_name = kernels.double_kernel(key=("x",))
    keep(by_name, X, bm=16)
    assert bm_of(lambda x: by_name(x, plus=1.0), X) == 16
    rounded = kernels.double_kernel(key=lambda x, **_: x.shape[0] // 100)
    keep(rounded, X, bm=16)
    assert bm_of(rounded, X[:10]) == 16
    with pytest.raises(KernelValueError, match="has no 'z'"):
        kernels.double_kernel(key=("z",))


def test_an_entry_that_the_kernel_refuses_is_a_warning():
    double = kernels.double_kernel()
    keep(double, X, bm=0)
    with pytest.warns(CacheWarning, match="does not fit the kernel"):
        np.testing.assert_array_equal(double(X), 2 * X)


def test_an_entry_that_the_target_refuses_is_a_warning():
    double = kernels.double_kernel()
    with jt.config(arch="sm_90"):
        keep(double, X, bm=1 << 21)
        with pytest.warns(CacheWarning, match="defaults are taken: .*a tile of 2097152 elements"):
            assert bm_of(double, X) == 2


def test_a_key_that_no_other_process_would_find_is_refused():
    lost = kernels.double_kernel(key=lambda x, **_: object())
    with pytest.raises(KernelTypeError, match="which prints its address"):
        lost(X)


def test_an_entry_that_the_authors_own_code_refuses_is_a_warning():
    choosy = kernels.choosy_kernel()
    keep(choosy, X, bm=48)
    with pytest.warns(CacheWarning, match="defaults are taken: AssertionError: tiles of 48"):
        np.testing.assert_array_equal(choosy(X), X)


def test_the_name_knows_what_a_function_closes_over():
    def make(factor):
        @jt.autotune(space={"bm": [4, 8]})
        @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, bm, **_: jt.cdiv(x.shape[0], bm))
        def scaled(x, y, *, bm=2):
            y.tiles(bm)[jt.program_id(0)] = x.tiles(bm)[jt.program_id(0)] * factor

        return scaled

    names = [trace(make(factor), X)[1][0].name for factor in (2.0, 3.0, 2.0)]
    assert names[0] == names[2] != names[1]


def test_an_entry_that_the_space_does_not_have_is_none():
    double = kernels.double_kernel()
    keep(double, X, block=16)
    assert bm_of(double, X) == 2


@pytest.mark.parametrize("value", [(4,), "16", 16.0])
def test_an_entry_with_a_value_of_another_type_is_none(value):
    double = kernels.double_kernel()
    keep(double, X, bm=value)
    assert bm_of(double, X) == 2


def test_stages_that_the_compiler_at_hand_refuses_are_a_warning():
    x = jnp.zeros((2048, 2048), jnp.bfloat16)
    with jt.config(arch="sm_80"):
        (call,) = trace(deep_product, x)[1]
        store.put(device.kind(), call.name, Entry({"num_stages": 9}, 1.0, 2.0))
        with pytest.warns(CacheWarning, match="defaults are taken: .*shared memory"):
            (program,) = trace(deep_product, x)[0]
        assert program.options.num_stages is None


@jt.autotune(space={"num_stages": [3, 9]})
@jt.kernel(out_type=lambda x: jt.like(x), grid=(16, 16))
def deep_product(x, o):
    i, j = jt.program_id(0), jt.program_id(1)
    X, acc = x.tiles(128, 128), jt.zeros((128, 128))
    for k in jt.range(16):
        acc = jt.dot(X[i, k], X[k, j], acc)
    o.tiles(128, 128)[i, j] = acc.astype(o.dtype)


def test_transforms_take_entries_too():
    double = kernels.double_kernel()
    keep(double, X, bm=16)
    np.testing.assert_array_equal(jax.grad(lambda x: double(x).sum())(X), jnp.full_like(X, 2))
    np.testing.assert_array_equal(jax.vmap(double)(jnp.stack([X, X + 1])), 2 * jnp.stack([X, X + 1]))
    assert bm_of(jax.vmap(double), jnp.stack([X, X])) == 16
    lowered = double.lower(X).program
    assert dict(lowered.meta)["bm"] == 16
    np.testing.assert_array_equal(double.interpret(X), 2 * X)


def test_sizes_known_only_at_run_time_take_the_defaults():
    double = kernels.double_kernel()
    keep(double, X, bm=16)
    np.testing.assert_array_equal(double(jt.dynamic(X)), 2 * X)
    assert trace(lambda x: double(jt.dynamic(x)), X)[1] == []


def test_nothing_is_measured_unless_asked(monkeypatch):
    def never(call, **_):
        raise AssertionError("a search by surprise")

    monkeypatch.setattr(search, "search", never)
    double = kernels.double_kernel()
    jax.jit(double)(X), double(X), jax.grad(lambda x: double(x).sum())(X)
    with jt.config(autotune=True, interpret=True):
        double(X)


@pytest.mark.parametrize("jitted", [False, True])
def test_autotune_searches_outside_of_the_trace_and_once(monkeypatch, jitted):
    real, seen = search.search, []

    def spy(call, **options):
        seen.append((threading.current_thread(), isinstance(jnp.ones(3) + 1, jax.core.Tracer)))
        return real(call, **options)

    monkeypatch.setattr(search, "search", spy)
    double = kernels.double_kernel()
    f = jax.jit(lambda x: double(x) + 0.0) if jitted else double
    with jt.config(autotune=True), jax.numpy_rank_promotion("raise"):
        for _ in range(2):
            np.testing.assert_array_equal(f(X), 2 * X)
    ((thread, traced),) = seen
    assert thread is not threading.current_thread()
    assert not traced
    assert len(store.entries(device.kind())) == 1
    assert not choose._busy.held()


def test_x64_holds_in_the_search():
    double = kernels.double_kernel()
    with jax.enable_x64(True), jt.config(autotune=True):
        assert double(jnp.ones(8, jnp.float64)).dtype == jnp.float64
    (name,) = store.entries(device.kind())
    assert "float64[8]" in name


def test_options_of_a_cpu_kernel_are_no_choice():
    plain = kernels.double_kernel()._variant({})
    only = plain.autotune(space={"num_warps": [4, 8]})
    assert trace(only, X)[1] == []
    with jt.config(arch="sm_90"):
        (call,) = trace(only, X)[1]
        assert call.tuned == ("num_warps",)
        (call,) = trace(kernels.double_kernel().with_options(num_warps=8), X)[1]
        assert call.tuned == ("bm",)
        assert {c["bm"] for c in call.candidates} == {4, 16, 64}
        assert "num_warps=8" in call.name


def test_the_name_changes_with_the_source():
    def other(x, y, *, bm=2, plus=0.0):
        y.tiles(bm)[jt.program_id(0)] = x.tiles(bm)[jt.program_id(0)]

    spec = {"out_type": lambda x, **_: jt.like(x), "grid": 1, "name": "double"}
    calls = [kernels.double_kernel(), jt.kernel(**spec)(other).autotune(space={"bm": [4, 8]})]
    names = {trace(k, X)[1][0].name for k in calls}
    assert len(names) == 2
    again = trace(kernels.double_kernel(), X)[1][0].name
    assert again in names


@pytest.mark.parametrize(
    ("space", "error", "match"),
    [
        ({"bn": [1]}, KernelValueError, "no meta-parameter or option 'bn'"),
        ({"bm": 3}, KernelTypeError, "list of values"),
        ({"bm": []}, KernelTypeError, "list of values"),
        (3, KernelTypeError, "a dict from names"),
        ([{"bm": 2}, {"num_warp": 3}], KernelValueError, "did you mean 'num_warps'"),
        ({"bm": [[1, 2], [3, 4]]}, KernelTypeError, "winners are kept in a file"),
        ({"bm": [jnp.float32]}, KernelTypeError, "winners are kept in a file"),
        ([{"bm": jnp.int32(4)}], KernelTypeError, "winners are kept in a file"),
        ({"plus": [(1.0, abs)]}, KernelTypeError, "winners are kept in a file"),
    ],
)
def test_a_space_that_does_not_fit_is_refused(space, error, match):
    with pytest.raises(error, match=match):
        kernels.double_kernel()._variant({}).autotune(space=space)


def test_numbers_of_numpy_are_numbers_of_a_file():
    double = kernels.double_kernel()._variant({}).autotune(space={"bm": [*np.arange(4, 6), 8]})
    assert [type(c["bm"]) for c in double._tuning.configs(double._signature, (), {})] == [int] * 3


@pytest.mark.parametrize("key", ["x", 3])
def test_a_key_that_is_no_tuple_of_names_is_refused(key):
    with pytest.raises(KernelTypeError, match="a tuple of names"):
        kernels.double_kernel(key=key)


def test_autotune_decorates_kernels_only():
    with pytest.raises(KernelTypeError, match="above @jt"):
        jt.autotune(space={"bm": [1]})(lambda x: x)


def test_a_space_by_function_sees_inputs_and_meta_parameters():
    seen = []

    def space(x, **meta):
        seen.append((x.shape, meta))
        return [{"bm": 4}]

    plain = kernels.double_kernel()._variant({})
    plain.autotune(space=space)(X, plus=1.0)
    assert seen == [((64,), {"bm": 2, "plus": 1.0})]


def test_an_entry_goes_before_what_a_heuristic_gives():
    plain = kernels.double_kernel()._variant({})
    double = plain.autotune(space=kernels.SPACE, override=True)
    heuristic = lambda x: double.with_options(num_warps=8)(x, bm=32, plus=1.0)
    (call,) = trace(heuristic, X)[1]
    assert " x=float32[64] plus=1.0" in call.name
    (program,) = trace(heuristic, X)[0]
    assert (dict(program.meta)["bm"], program.options.num_warps) == (32, 8)
    keep(heuristic, X, bm=16)
    assert bm_of(heuristic, X) == 16
    np.testing.assert_array_equal(heuristic(X), 2 * X + 1)
