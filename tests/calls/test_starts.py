"""What outputs start from: an input whose buffer they share (`alias`), or a value (`init`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt

pytestmark = pytest.mark.usefixtures("by_numpy")


def f32(*shape):
    return jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape)


@jt.kernel(out_type=lambda x, v, **_: jt.like(x), grid=1, alias={"x": "o"})
def first_row(x, v, o):
    o[0, :] = v[...]


def test_an_alias_starts_from_the_input(run):
    x = f32(3, 4)
    expected = x.at[0].set(9.0)
    np.testing.assert_array_equal(run(first_row, x, jnp.full(4, 9.0)), expected)
    np.testing.assert_array_equal(x, f32(3, 4))  # not donated: the input keeps its value
    np.testing.assert_array_equal(jax.jit(first_row)(x, jnp.full(4, 9.0)), expected)


def test_a_donated_alias_writes_in_place():
    """By what XLA compiled: the buffers' addresses are the allocator's, which copies an input that is still in use."""
    x, v = jnp.zeros((512, 128)), jnp.ones(128)
    step = jax.jit(first_row, donate_argnums=0).lower(x, v).compile()
    text = step.as_text()
    assert "input_output_alias={ {}: (0, {}, may-alias) }" in text
    assert "output_to_operand_aliasing={{}: (0, {})}" in text
    assert " copy(" not in text
    for _ in range(3):
        donated, x = x, step(x, v)
        assert donated.is_deleted()
    np.testing.assert_array_equal(x[:2], [np.ones(128), np.zeros(128)])


def test_an_alias_inside_a_scan_needs_no_copy_of_the_carry():
    def steps(x, vs):
        return jax.lax.scan(lambda c, v: (first_row(c, v), None), x, vs)[0]

    lowered = jax.jit(steps, donate_argnums=0).lower(jnp.zeros((256, 64)), jnp.ones((5, 64)))
    assert "f32[256,64]{1,0} copy(" not in lowered.compile().as_text()


@pytest.mark.parametrize("alias", [{"x": "o"}, {0: 0}, {"x": 0}, {0: "o"}])
def test_aliases_by_name_or_position(alias):
    k = jt.call(lambda x, o: None, out_type=lambda x: jt.like(x), grid=1, alias=alias)
    np.testing.assert_array_equal(k(f32(3)), f32(3))


def test_aliases_of_pytrees():
    @jt.kernel(out_type=lambda c, **_: c, grid=1, alias={"cache": "new"})
    def bump(cache, new):
        new["v"][0] = jnp.float32(-1)

    c = {"k": f32(2), "v": f32(3)}
    got = bump(c)
    np.testing.assert_array_equal(got["k"], c["k"])
    np.testing.assert_array_equal(got["v"], [-1, 1, 2])


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        (0, (0, 0)),
        (1.5, (1.5, 1.5)),
        ((2, 3), (2, 3)),
        ({"b": -1, "a": 4}, (4, -1)),
        ((np.inf, -np.inf), (np.inf, -np.inf)),
    ],
)
def test_init_values(run, init, expected):
    s = jax.ShapeDtypeStruct((3,), jnp.float32)
    k = jt.call(lambda x, a, b: b.__setitem__(1, x[1]), out_type=(s, s), grid=1, init=init)
    a, b = run(k, jnp.full(3, 7.0))
    np.testing.assert_array_equal(a, np.full(3, expected[0]))
    np.testing.assert_array_equal(b, [expected[1], 7, expected[1]])


@pytest.mark.parametrize(
    ("dtype", "init"),
    [("int8", -128), ("uint8", 255), ("bool", True), ("int32", 2**31 - 1), ("bfloat16", np.nan), ("float16", 65504)],
)
def test_init_of_other_dtypes(run, dtype, init):
    k = jt.call(lambda o: None, out_type=jax.ShapeDtypeStruct((2, 3), dtype), grid=1, init=init)
    got = run(k)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.full((2, 3), init, np.float64))


def test_init_beside_an_alias(run):
    k = jt.call(
        lambda x, o, c: c.__setitem__(0, x[0]), out_type=lambda x: (x, x), grid=1, alias={"x": "o"}, init={"c": 5}
    )
    o, c = run(k, f32(3) + 1)
    np.testing.assert_array_equal(o, [1, 2, 3])
    np.testing.assert_array_equal(c, [1, 5, 5])
