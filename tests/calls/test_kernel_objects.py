"""Kernels as objects: equal, copied, pickled, and defined in files that change; the names of the package."""

import copy
import importlib.util
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt

pytestmark = pytest.mark.usefixtures("by_numpy")

X = jnp.arange(6, dtype=jnp.float32)

SOURCE = """
import jtile as jt

@jt.kernel(out_type=lambda x: jt.like(x))
def climb(x, o):
    v = x[...]
    for _ in jt.range(2):
        v = v + {}
    o[...] = v
"""


@jt.kernel(out_type=lambda x: jt.like(x))
def negate(x, o):
    o[...] = -x[...]


@jt.kernel(out_type=lambda x: jt.like(x))
def undefined(x, o):
    o[...] = x[...] * 0 / 0


def test_copies_and_pickles_are_the_kernel():
    assert copy.deepcopy({"k": negate})["k"] is negate
    assert copy.copy(negate) is negate
    if __name__ in sys.modules:
        assert pickle.loads(pickle.dumps(negate)) is negate
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(negate.with_options(interpret=True))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes a module of one kernel that adds `step` twice, and imports it."""
    path = tmp_path / "changing_module.py"
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(step):
        path.write_text(SOURCE.format(step) + "#" * step)  # another size: linecache goes by size and time

    def run(step):
        write(step)
        spec = importlib.util.spec_from_file_location("changing_module", path)
        module = importlib.util.module_from_spec(spec)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        return module.climb

    return run, write


def test_a_redefined_kernel_is_the_new_one(load):
    run, _ = load
    for step in (1, 2, 3):
        k = run(step)
        np.testing.assert_array_equal(k(X), X + 2 * step)
        np.testing.assert_array_equal(jax.jit(k)(X), X + 2 * step)


def test_a_kernel_is_the_source_that_it_was_defined_by(load):
    run, write = load
    k = run(1)
    write(50)
    np.testing.assert_array_equal(k(X), X + 2)


def test_nan_checks_of_jax_name_the_kernel():
    with jax.debug_nans(True):
        np.testing.assert_array_equal(negate(X), -X)
        with pytest.raises(FloatingPointError, match="undefined"):
            undefined(X)
        with pytest.raises(FloatingPointError, match="undefined"):
            jax.jit(lambda x: undefined(x) + 1)(X)


PADS = [0, 0.3, 65519.0, 464.1, 1e9, -1e9, 1e-9, 3.39e38, float("inf"), float("nan")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_a_pad_is_an_element_of_the_array(dtype):
    x = jnp.ones(5).astype(dtype)

    def body(x, *outs):
        for o, pad in zip(outs, PADS, strict=True):
            o[...] = x.tiles(7, pad=pad)[0].astype(jnp.float32)

    k = jt.call(body, out_type=(jax.ShapeDtypeStruct((7,), jnp.float32),) * len(PADS))
    for pad, native, meant in zip(PADS, k(x), k.interpret(x), strict=True):
        np.testing.assert_array_equal(native, meant)
        if pad != 0:
            with np.errstate(over="ignore"):
                want = np.float64(pad).astype(x.dtype).astype(np.float32)
            np.testing.assert_array_equal(native[5:], np.broadcast_to(want, 2))
        else:
            assert native[6] <= 2.0**-127


def test_equal_kernels_hash_equal():
    def make():
        @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=1)
        def twice(x, o, *, by=2.0):
            o[...] = x[...] * by

        return twice

    types = jax.ShapeDtypeStruct((4,), jnp.float32)
    a, b = (make().lower(types).program for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    others = [make().lower(types, by=3.0), make().lower(jax.ShapeDtypeStruct((5,), jnp.float32))]
    assert all(o.program != a for o in others)


def test_public_names():
    from jtile import language

    assert set(language.__all__) - {"Range"} <= set(dir(jt))
    for name in dir(jt):
        if name not in ("models", "ops"):
            getattr(jt, name)
    from jtile import _errors

    classes = {name for name, v in vars(_errors).items() if isinstance(v, type) and v.__module__ == _errors.__name__}
    assert classes == {name for name in vars(jt.errors) if name[0].isupper()}
    with pytest.raises(AttributeError, match="no_such_thing"):
        jt.no_such_thing
