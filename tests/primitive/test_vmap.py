"""jax.vmap of kernels: one launch with one more grid axis, equal to a Python loop of calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_calls import calls
from products import tiled_matmul

import jtile as jt
from jtile import ir
from jtile.primitive.program import CustomVjp, make_program

pytestmark = pytest.mark.usefixtures("by_numpy")


def f32(*shape, scale=1.0):
    """Small whole numbers: sums and products of them are exact, so results are equal bit for bit."""
    x = (np.arange(np.prod(shape, dtype=int), dtype=np.float32) * 7 + 3) % 11 - 5
    return jax.device_put(x.reshape(shape) * np.float32(scale))


def ints(*shape, top=5):
    return jax.device_put((np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape) * 7 + 3) % top)


def looped(f, args, in_axes, size):
    """`f` called once a lane; the results stacked in front."""
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)

    def lane(x, axis, k):
        if axis is None:
            return x
        if isinstance(axis, dict | list | tuple):
            return jax.tree.map(lambda v, a: lane(v, a, k), x, axis, is_leaf=lambda v: v is None)
        return jax.tree.map(lambda v: jax.device_put(np.asarray(v).take(k, axis)), x)

    outs = [f(*(lane(x, a, k) for x, a in zip(args, axes, strict=True))) for k in range(size)]
    return jax.tree.map(lambda *rows: np.stack(rows), *outs)


def check(f, args, in_axes, size, *, out_axes=0):
    """vmap eager, under jit and in the interpreter equal the loop bit for bit, and launch once."""
    expected = looped(f, args, in_axes, size)
    expected = jax.tree.map(lambda x: np.moveaxis(x, 0, out_axes), expected)
    mapped = jax.vmap(f, in_axes=in_axes, out_axes=out_axes)
    results = [mapped(*args), assert_one_launch(mapped, *args)(*args)]
    with jt.config(interpret=True):
        results.append(mapped(*args))
    for got in results:
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    return results[0]


def assert_one_launch(f, *args):
    """The program has one custom call and no loop, as lowered and as compiled, which is returned."""
    lowered = jax.jit(f).lower(*args)
    compiled = lowered.compile()
    for text in (lowered.as_text(), compiled.as_text()):
        assert calls(text) == 1, text
        assert "while" not in text.replace("while_loop_", "")
    return compiled


matmul = tiled_matmul(4, 3, 2)


@jt.kernel(out_type=lambda x, s: jt.like(x), grid=lambda x, s: x.shape[0])
def scale(x, s, o):
    i = jt.program_id(0)
    o[i, :] = x[i, :] * s[()]


# -- axes -----------------------------------------------------------------------------------------------------------

IN_AXES = [0, (0, None), (None, 0), (1, 2), (-1, 0), (2, -3), (None, 1)]


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_in_axes(in_axes):
    a, b = in_axes if isinstance(in_axes, tuple) else (in_axes, in_axes)
    shape = lambda rank2, axis: rank2 if axis is None else tuple(np.insert(rank2, axis if axis >= 0 else axis + 3, 5))
    check(matmul, (f32(*shape((6, 4), a)), f32(*shape((4, 7), b))), in_axes, 5)


@pytest.mark.parametrize("out_axes", [1, 2, -1])
def test_out_axes(out_axes):
    check(matmul, (f32(3, 6, 4), f32(4, 7)), (0, None), 3, out_axes=out_axes)


@jt.kernel(out_type=lambda p, n: {"sum": jt.like(p["w"]), "rest": (jt.like(p["b"]), jt.like(n))}, grid=2)
def trees(p, n, out):
    i = jt.program_id(0)
    out["sum"][i, :] = p["w"][i, :] + p["b"][i]
    out["rest"][0][i] = p["b"][i] * 2
    out["rest"][1][i] = n[i] + i


@pytest.mark.parametrize("in_axes", [(0, 0), ({"w": 1, "b": None}, 0), ({"w": None, "b": 1}, None)], ids=str)
def test_pytrees(in_axes):
    w, b, n = f32(2, 5), f32(2), ints(2)
    axes, last = in_axes if isinstance(in_axes[0], dict) else ({"w": 0, "b": 0}, 0)
    grow = lambda x, axis: x if axis is None else jnp.stack([x, 2 * x, 3 * x], axis)
    args = ({"w": grow(w, axes["w"]), "b": grow(b, axes["b"])}, grow(n, last))
    check(trees, args, (axes, last), 3)


def test_an_unbatched_operand_is_not_copied():
    text = jax.jit(jax.vmap(matmul, in_axes=(0, None))).lower(f32(3, 6, 4), f32(4, 7)).as_text()
    assert "broadcast" not in text
    program = batched_program(matmul, (f32(3, 6, 4), f32(4, 7)), (0, None))
    assert [v.shape for v in program.kernel.inputs] == [(3, 6, 4), (4, 7)]
    assert program.kernel.grid == (3, 2, 3)


def batched_program(f, args, in_axes=0):
    (eqn,) = [e for e in jax.make_jaxpr(jax.vmap(f, in_axes=in_axes))(*args).eqns if "program" in e.params]
    return eqn.params["program"]


@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(size):
    a, b = f32(size, 6, 4), f32(4, 7)
    got = jax.vmap(matmul, in_axes=(0, None))(a, b)
    assert got.shape == (size, 6, 7)
    np.testing.assert_array_equal(got, jnp.stack([matmul(x, b) for x in a]) if size else np.zeros((0, 6, 7)))
    with jt.config(interpret=True):
        np.testing.assert_array_equal(jax.vmap(matmul, in_axes=(0, None))(a, b), got)


def test_nested():
    a, b = f32(2, 3, 6, 4), f32(5, 4, 7)
    expected = jnp.stack([jnp.stack([jnp.stack([matmul(x, y) for y in b]) for x in row]) for row in a])
    f = jax.vmap(jax.vmap(jax.vmap(matmul, (None, 0)), (0, None)), (0, None))
    assert_one_launch(f, a, b)
    np.testing.assert_array_equal(f(a, b), expected)
    f = jax.vmap(jax.vmap(jax.vmap(matmul, (0, None)), (0, None), 2), (None, 0), -1)
    np.testing.assert_array_equal(f(a, b), jnp.moveaxis(expected, (0, 1, 2), (2, 0, 4)))
    with jt.config(interpret=True):
        np.testing.assert_array_equal(f(a, b), jnp.moveaxis(expected, (0, 1, 2), (2, 0, 4)))


@jt.kernel(out_type=lambda x: jax.ShapeDtypeStruct((2, 3, 4, 3), jnp.int32), grid=(2, 3, 4))
def ids(x, o):
    i, j, k = (jt.program_id(n) for n in range(3))
    o[i, j, k, 0] = 100 * i + 10 * j + k
    o[i, j, k, 1] = 100 * jt.num_programs(0) + 10 * jt.num_programs(1) + jt.num_programs(2)
    o[i, j, k, 2] = x[()]


def test_program_ids_stay_the_kernels_own():
    got = check(ids, (ints(7),), 0, 7)
    assert got[3, 1, 2, 3].tolist() == [123, 234, (3 * 7 + 3) % 5]
    f = jax.vmap(jax.vmap(ids))
    np.testing.assert_array_equal(f(ints(2, 3)).reshape(6, -1), jax.vmap(ids)(ints(6)).reshape(6, -1))


# -- operands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_scalars(in_axes):
    x = f32(4, 3, 5) if in_axes[0] == 0 else f32(3, 5)
    check(scale, (x, f32(4) if in_axes[1] == 0 else jnp.float32(2)), in_axes, 4)


def test_python_scalars_and_numpy_arrays():
    x = np.asarray(f32(4, 3, 5))
    np.testing.assert_array_equal(jax.vmap(lambda x: scale(x, 2.0))(x), x * 2)
    np.testing.assert_array_equal(jax.vmap(scale, (None, 0))(x[0], np.float32([1, 2])), [x[0], x[0] * 2])


@jt.kernel(out_type=lambda x, rows: jt.like(x, shape=(*rows.shape, x.shape[1])), grid=1)
def take_rows(x, rows, o):
    o[...] = x[rows[:], :]


@pytest.mark.parametrize("in_axes", [(0, 0), (None, 0), (0, None)])
def test_gathers_by_integer_operands(in_axes):
    x, rows = f32(3, 5, 4), ints(3, 6)
    check(take_rows, [v if a == 0 else v[0] for v, a in zip((x, rows), in_axes)], in_axes, 3)


@pytest.mark.parametrize("dtype", ir.DTYPES)
def test_every_dtype(dtype):
    with jax.enable_x64(True):
        k = jt.call(lambda x, o: o.__setitem__(..., x[...]), out_type=lambda x: jt.like(x), grid=1)
        x = np.tile(np.asarray([1, 2, 4, 1, 2], np.float32), (3, 1)).astype(ir.DTYPES[dtype].numpy)
        for axes in (0, 1):
            got = jax.vmap(k, in_axes=axes)(x if axes == 0 else x.T)
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(got).astype(np.float32), x.astype(np.float32))


@jt.kernel(out_type=lambda x, d: (jt.like(x), jt.like(d)), alias={"d": "total"}, grid=lambda x, d: x.shape[0])
def accumulate(x, d, y, total):
    i = jt.program_id(0)
    y[i, :] = x[i, :] + 1
    total[i, :] = total[i, :] + x[i, :]


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_aliased_operands(in_axes):
    args = [f32(3, 4, 5) if a == 0 else f32(4, 5) for a in in_axes]
    check(accumulate, args, in_axes, 3)
    if in_axes[1] is None:
        return  # shared by all lanes, it has the size of no result
    donated = jax.jit(jax.vmap(accumulate, in_axes), donate_argnums=1)
    expected = jax.vmap(accumulate, in_axes)(*args)
    jax.tree.map(np.testing.assert_array_equal, donated(*args), expected)
    assert args[1].is_deleted()


@jt.kernel(
    out_type=lambda x, ids: (jax.ShapeDtypeStruct((5,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)),
    grid=lambda x, ids: x.shape[0], init=(0.5, None), scratch=jax.ShapeDtypeStruct((2,), jnp.float32),
)  # fmt: skip
def scatter(x, ids, o, first, mine):
    i = jt.program_id(0)
    mine[:] = jnp.stack([x[i], 2 * x[i]])
    jt.atomic_add(o, ids[i], mine[:].sum())
    jt.when(i == 0)(lambda: first.__setitem__((), ids[0]))


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_atomics_accumulated_outputs_and_scratch(in_axes):
    x, ids = jnp.arange(24, dtype=jnp.float32).reshape(3, 8), ints(3, 8)
    check(scatter, [v if a == 0 else v[0] for v, a in zip((x, ids), in_axes)], in_axes, 3)


@jt.kernel(out_type=lambda n: (jt.like(n), jax.ShapeDtypeStruct(n.shape, jnp.float32)), grid=1)
def collatz(n, steps, sum_):
    v, count, total = n[()], 0, 0.0
    while v > 1:
        v = jnp.where(v % 2 == 0, v // 2, 3 * v + 1)
        count, total = count + 1, total + v.astype(jnp.float32)
    steps[()] = jnp.int32(count)
    sum_[()] = jnp.float32(total)


def test_loops_whose_trip_count_differs_by_lane():
    steps, _ = check(collatz, (jnp.arange(1, 28, dtype=jnp.int32),), 0, 27)
    assert steps[26] == 111 and steps[0] == 0


@jt.kernel(out_type=lambda x, n: jt.like(x), grid=1)
def branches(x, n, o):
    t = x[...]
    if n[()] > 2:
        t = t * 2
    for k in jt.range(n[()]):
        if k % 2 == 0:
            t = t + x[k]
    o[...] = t


def test_branches_and_bounds_that_differ_by_lane():
    check(branches, (f32(6, 5), jnp.arange(6, dtype=jnp.int32)), 0, 6)
    check(branches, (f32(5), jnp.arange(6, dtype=jnp.int32)), (None, 0), 6)


@jt.kernel(out_type=lambda data: jax.ShapeDtypeStruct((7,), jnp.float32), grid=1)
def noise(data, o):
    key = jax.random.wrap_key_data(data[...])
    o[...] = jax.random.uniform(key, (7,))


def test_random_keys():
    keys = jax.random.split(jax.random.key(3), 4)
    got = check(noise, (jax.random.key_data(keys),), 0, 4)
    np.testing.assert_array_equal(got, jax.vmap(lambda k: jax.random.uniform(k, (7,)))(keys))
    np.testing.assert_array_equal(jax.vmap(lambda k: noise(jax.random.key_data(k)))(keys), got)


def test_a_kernel_without_operands_is_called_once():
    k = jt.call(lambda o: o.__setitem__(..., jt.arange(4)), out_type=jax.ShapeDtypeStruct((4,), jnp.int32), grid=1)
    f = jax.vmap(lambda x: x + k())
    assert_one_launch(f, ints(3, 4))
    np.testing.assert_array_equal(f(ints(3, 4)), ints(3, 4) + jnp.arange(4, dtype=jnp.int32)[None])
    np.testing.assert_array_equal(jax.vmap(k, axis_size=3, out_axes=None)(), jnp.arange(4))
    np.testing.assert_array_equal(jax.vmap(k, axis_size=3)(), jnp.tile(jnp.arange(4), (3, 1)))


def test_overhanging_tiles_do_not_read_the_next_lane():
    k = jt.call(
        lambda x, o: o.tiles(4).__setitem__(jt.program_id(0), x.tiles(4, pad=-1)[jt.program_id(0)].sum(keepdims=True)
                                            + jt.zeros(4, jnp.float32)),
        out_type=lambda x: jt.like(x), grid=2,
    )  # fmt: skip
    got = check(k, (jnp.ones((3, 5)),), 0, 3)
    np.testing.assert_array_equal(got, np.float32([[4, 4, 4, 4, -2]] * 3))


def test_elements_that_nobody_writes_stay_poisoned():
    k = jt.call(lambda x, o: o.__setitem__(0, x[0]), out_type=lambda x: jt.like(x), grid=1)
    got = jax.vmap(k)(f32(3, 4))
    assert np.isnan(got[:, 1:]).all() and np.isfinite(got[:, 0]).all()


# -- what is around a kernel ----------------------------------------------------------------------------------------


def test_in_control_flow():
    x, b = f32(3, 4, 4), f32(4, 4, scale=0.25)
    step = lambda c, _: (matmul(c, b), c.sum())
    scanned = lambda x: jax.lax.scan(step, x, None, length=3)
    jax.tree.map(np.testing.assert_array_equal, jax.vmap(scanned)(x), looped(scanned, (x,), 0, 3))
    chosen = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: matmul(x, b), lambda x: scale(x, 2.0), x)
    np.testing.assert_array_equal(jax.jit(jax.vmap(chosen))(x), looped(chosen, (x,), 0, 3))
    until = lambda x: jax.lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: scale(c, 0.5), x)
    np.testing.assert_array_equal(jax.vmap(until)(x), looped(until, (x,), 0, 3))
    np.testing.assert_array_equal(
        jax.lax.map(lambda v: matmul(v, b), x, batch_size=2), jax.vmap(step, (0, None))(x, 0)[0]
    )


def test_under_jit_checkpoint_and_vectorize():
    a, b = f32(3, 6, 4), f32(3, 4, 7)
    expected = jax.vmap(matmul)(a, b)
    for f in (
        jax.vmap(jax.jit(matmul)),
        jax.vmap(jax.checkpoint(matmul)),
        jnp.vectorize(matmul, signature="(m,k),(k,n)->(m,n)"),
    ):
        np.testing.assert_array_equal(f(a, b), expected)


def test_collectives_over_the_mapped_axis():
    x = f32(3, 4, 4)
    f = lambda x: matmul(x, jax.lax.psum(x, "i")) + jax.lax.axis_index("i").astype(jnp.float32)
    expected = jnp.stack([matmul(v, x.sum(0)) + k for k, v in enumerate(x)])
    np.testing.assert_array_equal(jax.vmap(f, axis_name="i")(x), expected)


def test_equal_maps_are_one_program():
    a, b = f32(3, 6, 4), f32(4, 7)
    one, two = (batched_program(lambda a, b: matmul(a, b), (a, b), (0, None)) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != batched_program(matmul, (a, b[None] + jnp.zeros((3, 1, 1))), 0)
    assert one != batched_program(matmul, (f32(4, 6, 4), b), (0, None))


# -- errors and effects ---------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def small(x, o):
    i = jt.program_id(0)
    jt.print("x {}", x[i])
    jt.assert_(x[i] < 15, "x is small")
    o[i] = x[i]


@pytest.mark.parametrize("interpret", [False, True])
def test_prints_and_asserts_name_the_lane(interpret, capfd):
    k = small.with_options(interpret=interpret)
    x = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    jax.block_until_ready(jax.jit(jax.vmap(k))(x))
    jax.block_until_ready(jax.vmap(jax.vmap(k))(x[:, None]))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    one = [f"[small ({i}, 0, 0), lane {n}] x {2 * n + i}.0" for n in range(3) for i in range(2)]
    two = [f"[small ({i}, 0, 0), lane ({n}, 0)] x {2 * n + i}.0" for n in range(3) for i in range(2)]
    assert sorted(lines) == sorted(one + two)
    with pytest.raises(jt.errors.KernelAssertionError, match=r"program \(1\b.*lane 2\b") as e:
        jax.vmap(k)(x + 10.5)
    assert "x is small" in str(e.value) and 'jt.assert_(x[i] < 15, "x is small")' in str(e.value)
    with pytest.raises(jt.errors.KernelAssertionError, match=r"lane \(2, 0\)"):
        jax.vmap(jax.vmap(k))(x[:, None] + 10.5)
    assert_kept = jax.jit(lambda x: (jax.vmap(k)(x), x)[1])
    text = assert_kept.lower(x).compile().as_text()
    assert "callback" in text if interpret else calls(text)


def test_the_lowest_failing_program_is_reported():
    """Lanes are the outer axes of the grid."""
    x = jnp.zeros((64, 32)).at[40, 0].set(99).at[7, 31].set(99)
    for _ in range(3):
        with pytest.raises(jt.errors.KernelAssertionError, match=r"\(31, 0, 0\), lane 7\)"):
            jax.vmap(small)(x)


def test_a_meta_parameter_cannot_be_mapped_over():
    a, b = f32(6, 4), f32(4, 7)
    for f in (lambda n: matmul(a, b, bm=n), lambda n: matmul(a, b, bm=(n, 1))):
        with pytest.raises(jt.errors.KernelTypeError, match="meta-parameter 'bm' of kernel matmul is an array") as e:
            jax.vmap(f)(jnp.array([1, 2]))
        assert "positional argument" in str(e.value) and "Python loop" in str(e.value)
        assert "def matmul" in str(e.value)


# -- reverse rules --------------------------------------------------------------------------------------------------


def with_vjp(k, *args):
    """The program of a call with a reverse rule of its own: d(x * s)."""
    program = k.lower(*args).program
    fwd = lambda x, s: (scale(x, s), x, s)
    bwd = lambda x, s, ct: (scale(ct, s), (x * ct).sum())
    rule = CustomVjp(fwd, bwd, "scale")
    return make_program(program.jaxpr, program.spec, meta=program.meta, options=program.options, vjp=rule)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_the_batched_reverse_rule(in_axes):
    from jtile.primitive.jtile_call import bind

    x, s = f32(4, 3, 5), f32(4) + 2
    program = with_vjp(scale, x[0], s[0])
    args = [v if a == 0 else v[0] for v, a in zip((x, s), in_axes)]
    mapped = jax.make_jaxpr(jax.vmap(lambda *a: bind(program, a), in_axes))(*args).eqns[-1].params["program"]
    again = jax.make_jaxpr(jax.vmap(lambda *a: bind(program, a), in_axes))(*args).eqns[-1].params["program"]
    assert mapped == again and mapped.vjp.key != program.vjp.key
    y, *residuals = mapped.vjp.fwd(*args)
    ct = f32(4, 3, 5, scale=3)
    got = mapped.vjp.bwd(*residuals, ct)
    reference = lambda *a: jax.vmap(lambda x, s: x * s, in_axes)(*a)
    expected, pull = jax.vjp(reference, *args)
    np.testing.assert_array_equal(y, expected)
    for g, e in zip(got, pull(ct), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5)
