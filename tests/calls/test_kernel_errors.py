"""Bad input to kernels: each gives a typed error that names the kernel and the line of its source."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import (
    CacheWarning,
    CompileError,
    KernelSyntaxError,
    KernelTypeError,
    KernelValueError,
    UnsupportedError,
)

X = jnp.arange(6, dtype=jnp.float32)
S = jax.ShapeDtypeStruct((6,), jnp.float32)
CAPTURED = jnp.arange(6, dtype=jnp.float32)


@jt.kernel(out_type=lambda a, b, **_: jt.like(a), grid=lambda a, b, *, bm, **_: jt.cdiv(a.shape[0], bm))
def plus(a, b, o, *, bm, scale=1.0):
    i = jt.program_id(0)
    o.tiles(bm)[i] = a.tiles(bm)[i] + b.tiles(bm)[i] * scale


def copy(x, o):
    o[...] = x[...]


make = functools.partial(jt.call, copy, out_type=S, grid=1)


def fails(kind, match, call, line="def "):
    """`call` raises `kind` with a message that matches and shows this file and a source line with `line` in it."""
    with pytest.raises(kind, match=match) as e:
        call()
    text = str(e.value)
    assert isinstance(e.value, jt.errors.JtileError)
    assert "test_kernel_errors.py:" in text, text
    shown = [t for t in text.splitlines() if line in t]
    assert shown, text
    assert text.splitlines()[-1].strip() == "^"


# -- arity ------------------------------------------------------------------------------------------------------------


def test_too_few_arguments():
    fails(
        KernelTypeError, "kernel plus is called with 1 argument, but its out_type takes 2 inputs", lambda: plus(X, bm=2)
    )
    fails(KernelTypeError, r"kernel copy has 2 Refs \(x, o\).* gives 0 arguments", lambda: make()())


def test_too_many_arguments():
    fails(KernelTypeError, r"kernel copy has 2 Refs \(x, o\).* gives 3 arguments", lambda: make()(X, X, X))
    fails(KernelTypeError, r"kernel copy has 2 Refs .* gives 2 arguments and out_type makes 1", lambda: make()(X, X))
    method = jt.call(lambda self, x, o: None, out_type=S)
    fails(KernelTypeError, "a kernel is no method: make it a staticmethod", lambda: method(X), line="lambda")


def test_out_type_and_scratch_of_another_number():
    fails(KernelTypeError, "gives 1 argument and out_type makes 2 outputs", lambda: make(out_type=(S, S))(X))
    fails(KernelTypeError, "out_type makes 0 outputs", lambda: make(out_type=())(X))
    fails(KernelTypeError, "out_type makes 1 output and 1 scratch", lambda: make(scratch=S)(X))


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda k, x: k(x), lambda k, x: jax.jit(k)(x), lambda k, x: k.interpret(x)])
def test_dtypes_that_the_language_lacks(call):
    k = make()
    key = jax.random.key(0, impl="rbg")
    fails(KernelTypeError, r"dtype key<rbg>.*the generator threefry2x32", lambda: call(k, key))


@pytest.mark.parametrize(
    "x", ["text", object(), np.array(["a"]), np.array([None]), {1, 2}, S, np.array(["2020"], "M8")]
)
def test_arguments_that_are_no_arrays(x):
    fails(KernelTypeError, "argument x of kernel copy", lambda: make()(x))


def test_arguments_inside_a_pytree_are_named_by_their_path():
    k = jt.call(copy, out_type=lambda x: S, grid=1)
    fails(KernelTypeError, r"argument x\['w'\]\[1\] of kernel copy is a str", lambda: k({"w": [X, "text"]}))


def test_refs_are_no_arguments():
    fails(KernelTypeError, r"argument x of kernel copy is a Ref .* pass x\[\.\.\.\]", lambda: make()(jax.new_ref(X)))
    nested = jt.call(lambda x, o: make()(x), out_type=S, grid=1, name="outer")
    with pytest.raises(KernelTypeError, match=r"argument x.* of kernel copy is a Ref .* @jt\.function"):
        nested(X)


def test_integers_that_do_not_fit():
    fails(KernelValueError, "argument x of kernel copy is 2147483648, which does not fit int32", lambda: make()(2**31))


def test_a_dlpack_object_that_cannot_be_imported():
    class Broken:
        def __dlpack__(self, **_):
            raise RuntimeError("the device is gone")

        def __dlpack_device__(self):
            return (1, 0)

    fails(KernelTypeError, "a Broken that DLPack cannot import: the device is gone", lambda: make()(Broken()))


# -- meta-parameters --------------------------------------------------------------------------------------------------


def test_missing_and_unknown_meta_parameters():
    fails(KernelTypeError, "kernel plus needs the meta-parameter 'bm'", lambda: plus(X, X))
    fails(KernelTypeError, "kernel plus has no meta-parameter 'bmm'; did you mean 'bm'", lambda: plus(X, X, bmm=2))
    fails(KernelTypeError, r"an option, plus.with_options\(interpret=True\)", lambda: plus(X, X, bm=2, interpret=True))
    fails(KernelTypeError, "'a' is a Ref of it, .* given by position", lambda: plus(a=X, b=X))


def test_meta_parameters_that_are_not_static():
    fails(KernelTypeError, r"'scale' of kernel plus is an array \(float32\[6\]\)", lambda: plus(X, X, bm=2, scale=X))
    fails(
        KernelTypeError, "'scale' of kernel plus is an array", lambda: jax.jit(lambda s: plus(X, X, bm=2, scale=s))(1.0)
    )
    fails(
        KernelTypeError, "'scale' of kernel plus is a list, which cannot be hashed", lambda: plus(X, X, bm=2, scale=[1])
    )


def test_meta_parameters_under_jit_need_static_argnames():
    fails(KernelTypeError, "static_argnames", lambda: jax.jit(plus)(X, X, bm=2))


def test_a_positional_parameter_with_a_default():
    def wrong(x, o, bm=128):
        pass

    fails(
        KernelTypeError,
        r"parameter bm=128 of kernel wrong is positional.*`\*, bm=128`",
        lambda: make.func(wrong, out_type=S),
    )


# -- out_type, grid, alias, init --------------------------------------------------------------------------------------


def test_out_type_that_is_no_type():
    fails(KernelTypeError, "out_type of kernel copy is 'f32'", lambda: make(out_type="f32")(X))
    fails(
        KernelTypeError,
        r"out_type of kernel copy is \(6,\)|out_type of kernel copy is 6",
        lambda: make(out_type=lambda x: x.shape)(X),
    )
    fails(
        KernelTypeError,
        "out_type of kernel copy has dtype complex128",
        lambda: make(out_type=jt.like(S, dtype=np.complex128))(X),
    )
    fails(
        KernelTypeError,
        "float64, which JAX would narrow to float32",
        lambda: make(out_type=jt.like(S, dtype=np.float64))(X),
    )
    fails(
        KernelTypeError,
        "wants 'y', which is neither",
        lambda: make(out_type=lambda x, *, y: S)(X),
        line="lambda x, *, y",
    )


def test_functions_of_the_specification_that_raise():
    k = jt.call(copy, out_type=lambda x: jt.like(x), grid=lambda x: x.shape[1])
    fails(KernelValueError, r"grid of kernel copy fails for \(float32\[6\]\): IndexError", lambda: k(X), "k = ")
    fails(KernelTypeError, r"out_type of kernel copy fails for \(NoneType\): jt.like takes", lambda: k(None), "k = ")
    k = jt.call(copy, out_type=lambda x: x.nothing)
    fails(KernelTypeError, r"out_type of kernel copy fails for \(.*\): AttributeError", lambda: k(X), "k = ")
    with pytest.raises(KernelValueError, match="ZeroDivisionError"):
        plus(X, X, bm=0)


def test_masked_arrays():
    fails(KernelTypeError, "x of kernel copy is a masked array", lambda: make()(np.ma.masked_array(np.ones(6))))


def test_out_type_that_does_not_fit_what_is_stored():
    fails(
        (KernelTypeError, KernelValueError),
        "float32",
        lambda: make(out_type=jax.ShapeDtypeStruct((6,), jnp.int32))(X),
        line="o[...] = x[...]",
    )
    fails(
        (KernelTypeError, KernelValueError),
        r"\(?5",
        lambda: make(out_type=jax.ShapeDtypeStruct((5,), jnp.float32))(X),
        line="o[...]",
    )


@pytest.mark.parametrize(
    ("grid", "kind", "match"),
    [
        (-1, KernelValueError, "axis 0 of the grid of kernel copy is -1"),
        ((2, -3), KernelValueError, "axis 1 of the grid of kernel copy is -3"),
        ((1,) * 17, KernelValueError, "has 17 axes"),
        (2**31, KernelValueError, "at most 2147483647"),
        ((2**30, 2**30, 2**30), KernelValueError, "more programs than"),
        (1.5, KernelTypeError, "is 1.5, which is no int"),
        (True, KernelTypeError, "is True, which is no int"),
        ("ab", KernelTypeError, "is 'ab', which is no int"),
        (None, KernelTypeError, "is None, which is no int"),
    ],
)
def test_grids_that_are_none(grid, kind, match):
    fails(kind, match, lambda: make(grid=grid)(X))


def test_a_traced_grid():
    fails(KernelTypeError, "traced: the grid is static", lambda: jax.jit(lambda n: make(grid=n)(X))(3))


@pytest.mark.parametrize(
    ("alias", "match"),
    [
        ({"y": "o"}, "names 'y', which is no input; inputs are: x"),
        ({"x": "x"}, "names 'x', which is no output; outputs are: o"),
        ({"x": 1}, "names 1, which is no output"),
        (("x", "o"), "expected a dict"),
    ],
)
def test_aliases_that_name_nothing(alias, match):
    fails((KernelTypeError, KernelValueError), match, lambda: make(alias=alias)(X))


def test_aliases_that_do_not_match():
    fails(
        KernelValueError,
        r"input is float32\[6\] and the output float32\[5\]",
        lambda: make(alias={"x": "o"}, out_type=jt.like(S, shape=5))(X),
    )
    fails(
        KernelValueError,
        r"input is float32\[6\] and the output int32\[6\]",
        lambda: make(alias={"x": "o"}, out_type=jt.like(S, dtype=jnp.int32))(X),
    )
    two = jt.call(lambda x, y, o: None, out_type=S, grid=1, alias={"x": "o", "y": "o"})
    fails(KernelValueError, "uses one Ref twice", lambda: two(X, X), line="two =")
    tree = jt.call(lambda x, o: None, out_type=S, grid=1, alias={"x": "o"})
    fails(KernelValueError, "pytrees of different structure", lambda: tree([X]), line="tree =")


@pytest.mark.parametrize(
    ("init", "dtype", "match"),
    [
        (1.5, "int32", "init=1.5 does not fit output 'o' of kernel copy, which is int32"),
        (300, "uint8", "init=300 does not fit"),
        (-1, "uint8", "init=-1 does not fit"),
        (float("nan"), "int8", "init=nan does not fit"),
        (1e10, "float16", "does not fit output 'o' of kernel copy, which is float16"),
        (1e3, "float8_e4m3fn", "does not fit"),
        (2, "bool", "does not fit"),
        ("0", "float32", "init='0' of kernel copy"),
        ((0, 0), "float32", "has 2 entries for 1 output"),
        ({"p": 0}, "float32", "names 'p', which is no output"),
        ({"o": "a"}, "float32", "expected a number"),
        ({"o": X}, "float32", "expected a number"),
    ],
)
def test_inits_that_do_not_fit(init, dtype, match):
    fails((KernelTypeError, KernelValueError), match, lambda: make(init=init, out_type=jt.like(S, dtype=dtype))(X))


def test_an_init_beside_an_alias_of_one_output():
    fails(KernelValueError, "has an init and an alias", lambda: make(alias={"x": "o"}, init={"o": 0})(X))


def test_a_decorator_without_its_arguments():
    fails(KernelTypeError, r"write @jt\.kernel\(out_type=", lambda: jt.kernel(copy))
    with pytest.raises(KernelTypeError, match="needs out_type"):
        jt.kernel(grid=1)


def test_names_and_options():
    fails(KernelValueError, "name='a b' is no name for a kernel", lambda: make(name="a b"))
    with pytest.raises(KernelValueError, match="no option 'num_warp'; did you mean 'num_warps'"):
        make(num_warp=4)
    with pytest.raises(KernelValueError, match="num_warps=3: "):
        make(num_warps=3)
    with pytest.raises(KernelValueError, match="fallback='jnp': this option of a kernel is 'raise' or 'interpret'; "):
        plus.with_options(fallback="jnp")
    with pytest.raises(KernelTypeError, match="decorates a function"):
        jt.call(3, out_type=S)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("num_warps", [3, 0, 64, "8", True, 8.0], "a Python int, 1 or 2 or 4 or 8 or 16 or 32; leave it out"),
        ("num_stages", [0, 17, "2", True, -1], "a Python int, from 1 to 16; leave it out"),
        ("num_ctas", [3, 0, 32, "2"], "a Python int, 1 or 2 or 4 or 8 or 16; leave it out"),
        ("consumers", [0, 5, True], "a Python int, 1 or 2 or 3 or 4; leave it out"),
        ("persistent", [1, "no"], "True or False; leave it out"),
        ("specialize", [0, "never"], "True or False; leave it out"),
        ("interpret", [1, "yes"], "True or False; leave it out"),
    ],
)
def test_values_of_options(name, values, expected):
    for value in values:
        message = re.escape(f"{name}={value!r}: this option of a kernel is {expected}")
        with pytest.raises(KernelValueError, match=message):
            plus.with_options(**{name: value})
        with pytest.raises(KernelValueError, match=message):
            make(**{name: value})


# -- the body ---------------------------------------------------------------------------------------------------------


def test_closing_over_an_array():
    def closes(x, o):
        o[...] = x[...] + CAPTURED

    fails(
        KernelTypeError, "kernel closes closes over", lambda: jt.call(closes, out_type=S, grid=1)(X), line="+ CAPTURED"
    )


def test_closing_over_a_tracer():
    def outer(y):
        def closes(x, o):
            o[...] = x[...] + y

        return jt.call(closes, out_type=S, grid=1)(X)

    fails(KernelTypeError, "kernel closes closes over", lambda: jax.jit(outer)(X), line="")


def test_returning_a_value():
    def returns(x, o):
        return x[...] * 2

    fails(KernelTypeError, "kernel returns returns a value", lambda: jt.call(returns, out_type=S, grid=1)(X))


def test_a_store_to_an_input():
    def writes(x, o):
        x[0] = o[0]

    fails(
        (KernelTypeError, KernelValueError), "input", lambda: jt.call(writes, out_type=S, grid=1)(X), line="x[0] = o[0]"
    )


def test_a_raise_in_a_tile_loop():
    def raises(x, o):
        for i in jt.range(6):
            if i > 3:
                raise IndexError(i)
            o[i] = x[i]

    fails(KernelSyntaxError, "jt.assert_", lambda: jt.call(raises, out_type=S, grid=1)(X), line="raise IndexError")


def test_a_carry_that_changes_shape():
    def grows(x, o):
        acc = jt.zeros((2,), jnp.float32)
        for _ in jt.range(6):
            acc = jnp.concatenate([acc, acc])
        o[...] = x[...]

    with pytest.raises((KernelTypeError, KernelValueError, KernelSyntaxError), match="acc") as e:
        jt.call(grows, out_type=S, grid=1)(X)
    assert "test_kernel_errors.py:" in str(e.value)


def test_a_tile_index_of_the_wrong_rank():
    def ranks(x, o):
        o.tiles(2)[0, 0] = x.tiles(2)[0]

    fails(
        (KernelTypeError, KernelValueError),
        "ind",
        lambda: jt.call(ranks, out_type=S, grid=1)(X),
        line="o.tiles(2)[0, 0]",
    )


def test_a_program_id_of_an_axis_that_the_grid_has_not():
    def axes(x, o):
        o[...] = x[...] * jt.program_id(1).astype(jnp.float32)

    fails(
        KernelValueError,
        r"kernel axes has a grid of 1 axis, so there is no program_id\(1\)",
        lambda: jt.call(axes, out_type=S, grid=1)(X),
        line="program_id(1)",
    )


# -- the target and the compiler --------------------------------------------------------------------------------------


def test_a_dtype_that_the_target_lacks():
    import dataclasses

    small = dataclasses.replace(jt.host_target(), name="small", dtypes=("float32", "int32", "bool"))
    k = jt.call(copy, out_type=lambda x: x, grid=1)
    bf16 = jax.ShapeDtypeStruct((6,), jnp.bfloat16)
    fails(
        UnsupportedError,
        "kernel copy: target 'small' cannot run Ref 'x' with dtype bfloat16; use float32",
        lambda: k.lower(bf16, target=small).image,
    )
    assert k.lower(S, target=small).image[:4] == b"\x7fELF"


def test_targets_that_do_not_exist():
    with pytest.raises(UnsupportedError, match="no target 'gpu'"):
        make().lower(X, target="gpu")
    with pytest.raises(KernelValueError, match="unknown instruction set 'mmx'"):
        make().lower(X, target="cpu:mmx")
    with pytest.raises(KernelTypeError, match="expected a Target"):
        make().lower(X, target=3)


def test_an_internal_failure_keeps_the_ir(monkeypatch, tmp_path):
    import jtile.lowering.cpu as backend

    def stumble(*args, **kwargs):
        raise ZeroDivisionError("in the depths")

    monkeypatch.setattr(backend, "compile_kernel", stumble)
    with jt.config(cache_dir=str(tmp_path)):
        fails(
            CompileError, "kernel copy: .* failed with ZeroDivisionError: in the depths", lambda: make().lower(X).image
        )
    (kept,) = (tmp_path / "failures").iterdir()
    text = kept.read_text()
    assert "// ZeroDivisionError: in the depths" in text
    assert "kernel @copy" in text
    assert jt.ir.parse_kernel(text).name == "copy"
    monkeypatch.undo()
    from jtile.lowering import registry

    assert registry.main([str(kept)]) == 0


def test_a_corrupt_cache_file_is_compiled_anew(tmp_path):
    from jtile.lowering import registry

    def body(x, o):
        o[...] = x[...] * 3

    with jt.config(cache_dir=str(tmp_path)):
        k = jt.call(body, out_type=S, grid=1)
        k(X)
        (entry,) = [p for p in (tmp_path / "kernels").iterdir() if p.stat().st_size > 1000]
        good = entry.read_bytes()
        entry.write_bytes(good[:-100] + bytes(100))
        registry.forget()
        with pytest.warns(CacheWarning, match="is damaged"):
            np.testing.assert_array_equal(jax.jit(lambda x: k(x))(X), X * 3)
        assert entry.read_bytes() == good


@pytest.mark.parametrize(("name", "place"), [("sum", "jax.numpy"), ("fori_loop", "jax.lax"), ("gelu", "jax.nn")])
def test_functions_of_jax_are_pointed_at(name, place):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': tiles are JAX arrays, so take {place}\.{name}$"):
        getattr(jt, name)


def test_names_that_nobody_has():
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_thing'$"):
        _ = jt.no_such_thing
    assert not hasattr(jt, "__wrapped__")


@pytest.mark.parametrize(("grid", "shown"), [(lambda x: x, "float32[6]"), (lambda x: 2.5, "2.5")])
def test_cdiv_of_no_whole_numbers(grid, shown):
    with pytest.raises(KernelTypeError, match=re.escape(f"cdiv takes whole numbers, got {shown}")):
        jt.call(copy, out_type=S, grid=lambda x: jt.cdiv(grid(x), 2))(X)
