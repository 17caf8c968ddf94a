"""Factors of kernels, and the kernels of shards: together these give the result of the whole kernel (interpreter)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import tiled_matmul
from shards import run_shards

import jtile as jt
from jtile import ir
from jtile.passes.axes import regroup
from jtile.primitive.lowering import run_interpreter
from jtile.primitive.partition import can_cut, rule_of, shard_program
from jtile.transforms.factors import factors

f32 = jnp.float32


def array(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def run_program(program, arrays, parts):
    """What the shards of a program give together."""
    rule, outs = rule_of(program), program.out_avals
    local = shard_program(program, tuple(sorted(parts.items()))).kernel
    ir.verify(local, "tile")
    return run_shards(local, arrays, rule.inputs, rule.outputs, rule.partial, [o.shape for o in outs], parts)


def check(lowered, arrays, *cuts, tolerance=0.0):
    """Cut along each of `cuts` (factor -> shards), the program gives what it gives as a whole."""
    whole = run_interpreter(lowered.program, arrays)
    for parts in cuts:
        for got, want in zip(run_program(lowered.program, arrays, parts), whole, strict=True):
            np.testing.assert_allclose(got, np.asarray(want, np.float64), rtol=tolerance, atol=tolerance)


def rule(kernel, *types, **meta):
    types = [jax.ShapeDtypeStruct(t, f32) if isinstance(t, tuple) else t for t in types]
    return str(rule_of(kernel.lower(*types, **meta).program))


# -- products -------------------------------------------------------------------------------------------------------


matmul = tiled_matmul(8, 8, 4)


def test_matmul_is_cut_along_every_axis():
    a, b = array(32, 24), array(24, 16, seed=1)
    lowered = matmul.lower(a, b)
    assert str(rule_of(lowered.program)) == "a b, b c -> a c; sum over b"
    check(lowered, [a, b], {"a": 2}, {"a": 4}, {"b": 2}, {"b": 3}, {"b": 6}, {"c": 2}, {"a": 2, "b": 2, "c": 2})


def test_tiles_become_smaller_where_a_shard_is():
    a, b = array(32, 24), array(24, 16, seed=1)
    lowered = matmul.lower(a, b, bm=32, bn=16, bk=8)
    assert shard_program(lowered.program, (("a", 8),)).kernel.grid == (1, 1)
    check(lowered, [a, b], {"a": 8}, {"b": 8}, {"c": 4}, {"a": 4, "b": 4, "c": 2})


def test_a_size_that_does_not_divide_is_not_cut():
    program = matmul.lower(array(32, 24), array(24, 16)).program
    assert can_cut(program, "b", 3) and not can_cut(program, "b", 5)
    # 2 * 61 rows in tiles of 8: tiles of 1 would divide them, but rows may hang over; a sum may not
    program = matmul.lower(array(122, 122), array(122, 16), bk=8).program
    assert can_cut(program, "a", 2) and not can_cut(program, "b", 2)
    check(matmul.lower(array(122, 8), array(8, 16)), [array(122, 8), array(8, 16)], {"a": 2})


def test_reverse_mode_sums_what_the_forward_gathers():
    a, b, g = array(16, 24), array(24, 8, seed=1), array(16, 8, seed=2)
    back = matmul.lower(a, b).vjp()
    assert str(rule_of(back.program)) == "a b, b c, a c -> a b, b c; sum over a, c"
    check(back, [a, b, g], {"a": 2}, {"b": 2}, {"c": 2}, {"a": 2, "c": 2})
    ahead = matmul.lower(a, b).jvp()
    assert str(rule_of(ahead.program)) == "a b, b c, a b, b c -> a c; sum over b"
    check(ahead, [a, b, a, b], {"a": 2, "b": 3}, {"c": 2})


def test_sums_over_shards_are_rounded_once():
    a, b = (array(16, 64).astype(jnp.bfloat16), array(64, 8).astype(jnp.bfloat16))
    local = shard_program(matmul.lower(a, b).program, (("b", 2),))
    assert local.kernel.outputs[0].dtype == "float32"
    assert shard_program(matmul.lower(a, b).program, (("a", 2),)).kernel.outputs[0].dtype == "bfloat16"


@jt.kernel(out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1])), grid=lambda a, b: jt.cdiv(a.shape[0], 4))
def whole_product(a, b, o):
    i = jt.program_id(0)
    o.tiles(4, o.shape[1])[i, 0] = jt.dot(a.tiles(4, a.shape[1])[i, 0], b[...]) * 2.0


def test_axes_that_are_read_as_a_whole_are_cut():
    a, b = array(8, 12), array(12, 6, seed=1)
    lowered = whole_product.lower(a, b)
    assert str(rule_of(lowered.program)) == "a b, b c -> a c; sum over b"
    check(lowered, [a, b], {"a": 2}, {"b": 3}, {"c": 2}, {"a": 2, "b": 2, "c": 3})


@jt.kernel(out_type=lambda x: jt.like(x, shape=(x.shape[0],) * 2), grid=lambda x: (x.shape[0] // 4,) * 2)
def gram(x, o):
    i, j = jt.program_id(0), jt.program_id(1)
    X = x.tiles(4, x.shape[1])
    o.tiles(4, 4)[i, j] = jt.dot(X[i, 0], X[j, 0].T)


def test_one_array_walked_twice_is_not_cut():
    assert rule(gram, (16, 8)) == "_ a -> _ _; sum over a"
    check(gram.lower(array(16, 8)), [array(16, 8)], {"a": 4})


# -- rows, sums, gathers -----------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x, w, **_: jt.like(x), grid=lambda x, w, *, br, **_: jt.cdiv(x.shape[0], br))
def norm(x, w, y, *, br=4):
    i, n = jt.program_id(0), x.shape[1]
    t = x.tiles(br, n)[i, 0]
    y.tiles(br, n)[i, 0] = t * jax.lax.rsqrt((t * t).sum(1, keepdims=True) / n + 1e-6) * w[...][None, :]


def test_rows_are_cut_and_what_is_normalised_is_not():
    x, w = array(16, 8), array(8, seed=1)
    lowered = norm.lower(x, w)
    assert str(rule_of(lowered.program)) == "a _, _ -> a _"
    check(lowered, [x, w], {"a": 2}, {"a": 4}, {"a": 8}, tolerance=1e-6)
    back = lowered.vjp()
    assert str(rule_of(back.program)) == "a _, _, a _ -> a _, _; sum over a"
    check(back, [x, w, array(16, 8, seed=2)], {"a": 2}, {"a": 8}, tolerance=1e-5)


@jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x, shape=(x.shape[0] // 4,))), grid=lambda x: x.shape[0] // 4)
def quantise(x, q, s):
    i = jt.program_id(0)
    t = x.tiles(4)[i]
    s[i] = jnp.abs(t).max()
    q.tiles(4)[i] = t / (jnp.abs(t).max() + 1)


def test_blocks_that_mean_something_stay_whole():
    program = quantise.lower(array(32)).program
    assert str(rule_of(program)) == "a -> a, a"
    assert can_cut(program, "a", 4) and not can_cut(program, "a", 16)
    check(quantise.lower(array(32)), [array(32)], {"a": 2}, {"a": 8}, tolerance=1e-7)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def over_tile_sum(x, o):
    i = jt.program_id(0)
    t = x.tiles(8)[i]
    o.tiles(8)[i] = t - t.sum()


def test_a_tile_whose_lanes_meet_keeps_its_size():
    program = over_tile_sum.lower(array(32)).program
    assert can_cut(program, "a", 4) and not can_cut(program, "a", 8)
    check(over_tile_sum.lower(array(32)), [array(32)], {"a": 2})


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[1:]), grid=lambda x: x.shape[0] // 4, init=0)
def column_sums(x, o):
    i = jt.program_id(0)
    jt.atomic_add(o, (slice(None),), x.tiles(4, x.shape[1])[i, 0].sum(0))


@jt.kernel(out_type=lambda x: jt.like(x, shape=()), grid=lambda x: x.shape[0] // 4, init=0)
def programs(x, o):
    jt.atomic_add(o, (), x.tiles(4)[jt.program_id(0)].sum() * 0 + 1)


def test_accumulated_outputs_are_sums_over_shards():
    x = array(16, 6)
    assert rule(column_sums, (16, 6)) == "a b -> b; sum over a"
    check(column_sums.lower(x), [x], {"a": 2}, {"a": 8}, {"b": 3}, {"a": 2, "b": 2})
    # the number of programs counts: tiles must not become smaller
    program = programs.lower(array(16)).program
    assert can_cut(program, "a", 4) and not can_cut(program, "a", 8)
    check(programs.lower(array(16)), [array(16)], {"a": 2}, {"a": 4})


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[1:]), grid=lambda x: 4, init=-9)
def column_maxima(x, o):
    jt.atomic_max(o, (slice(None),), x.tiles(x.shape[0] // 4, x.shape[1])[jt.program_id(0), 0].max(0))


def test_other_atomics_are_not_cut_across_programs():
    assert rule(column_maxima, (16, 6)) == "_ a -> a"
    check(column_maxima.lower(array(16, 6)), [array(16, 6)], {"a": 2})


@jt.kernel(out_type=lambda x, i: jt.like(x, shape=(i.shape[0], x.shape[1])), grid=lambda x, i: i.shape[0] // 4)
def rows_of(x, i, o):
    p = jt.program_id(0)
    o.tiles(4, o.shape[1])[p, 0] = x[i.tiles(4)[p], :]


def test_gathers_cut_the_indices_and_the_columns():
    x, i = array(8, 6), np.arange(16, dtype=np.int32) % 8
    lowered = rows_of.lower(x, i)
    assert str(rule_of(lowered.program)) == "_ a, b -> b a"
    check(lowered, [x, i], {"a": 2}, {"b": 2}, {"b": 8, "a": 3})
    back = lowered.vjp()
    assert str(rule_of(back.program)) == "a b, c, c d -> _ d; sum over c"  # x is not read
    check(back, [x, i, array(16, 6, seed=3)], {"d": 2}, {"c": 4}, {"a": 2, "c": 2})


# -- loops -------------------------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x: (jt.like(x, shape=x.shape[:1]),) * 2, grid=lambda x: x.shape[0])
def folds(x, total, top):
    i = jt.program_id(0)
    X = x.tiles(None, 4)
    s, m = jt.zeros((4,)), jt.full((4,), -100.0)
    for k in jt.range(X.shape[1]):
        s = s + X[i, k]
        m = jnp.maximum(m, X[i, k])
    total[i], top[i] = s.sum(), m.max()


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x: x.shape[0])
def decay(x, o):
    i, s = jt.program_id(0), jt.zeros((4,))
    for k in jt.range(x.shape[1] // 4):
        s = s * 0.5 + x.tiles(None, 4)[i, k]
    o[i] = s.sum()


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def running(x, o):
    i, s = jt.program_id(0), jt.zeros((4,))
    for k in jt.range(x.shape[1] // 4):
        s = s + x.tiles(None, 4)[i, k]
        o.tiles(None, 4)[i, k] = s


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def mapped(x, o):
    i = jt.program_id(0)
    for k in jt.range(x.shape[1] // 4):
        o.tiles(None, 4)[i, k] = x.tiles(None, 4)[i, k] * 2


@jt.kernel(
    out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x: x.shape[0], scratch=jax.ShapeDtypeStruct((4,), f32)
)
def scratch_sum(x, o, s):
    i = jt.program_id(0)
    s[...] = jt.zeros((4,))
    for k in jt.range(x.shape[1] // 4):
        s[...] = s[...] + x.tiles(None, 4)[i, k]
    o[i] = s[...].sum()


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x: x.shape[0])
def crossed(x, o):
    i, s, t = jt.program_id(0), jt.zeros((4,)), jt.zeros((4,))
    for k in jt.range(x.shape[1] // 4):
        s, t = t + x.tiles(None, 4)[i, k], s
    o[i] = s.sum() - t.sum()


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (crossed, "a _ -> a"),  # each carry goes into the other
        (folds, "a _ -> a, a"),  # a maximum is carried
        (decay, "a _ -> a"),  # what a round leaves depends on how many follow
        (running, "a _ -> a _"),
        (mapped, "a b -> a b"),
        (scratch_sum, "a _ -> a"),  # a sum in memory
    ],
)
def test_loops_whose_carry_is_no_sum_are_not_cut(kernel, expected):
    x = array(4, 16)
    assert rule(kernel, (4, 16)) == expected
    check(kernel.lower(x), [x], {"a": 2}, *([{"b": 2}, {"a": 2, "b": 8}] if "b" in expected else []))


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: 1)
def backwards(x, o):
    n = x.shape[0] // 4
    for k in jt.range(n):
        o.tiles(4)[n - 1 - k] = x.tiles(4)[n - 1 - k] + 1


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: 1)
def turned(x, o):
    n = x.shape[0] // 4
    for k in jt.range(n):
        o.tiles(4)[k] = x.tiles(4)[n - 1 - k] + 1


def test_loops_from_the_end():
    x = array(16)
    assert rule(backwards, (16,)) == "a -> a"
    check(backwards.lower(x), [x], {"a": 2}, {"a": 8})
    assert rule(turned, (16,)) == "_ -> _"


# -- grids -------------------------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda q, k: jt.like(q), grid=lambda q, k: q.shape[0])
def grouped(q, k, o):
    h = jt.program_id(0)
    o[h, :] = q[h, :] * k[h // (q.shape[0] // k.shape[0]), :]


def test_grouped_heads():
    for kv in (4, 2):
        q, k = array(8, 4), array(kv, 4, seed=1)
        assert str(rule_of(grouped.lower(q, k).program)) == "a b, a b -> a b"
        check(grouped.lower(q, k), [q, k], {"a": 2}, {"a": kv}, {"b": 4})
        assert not can_cut(grouped.lower(q, k).program, "a", 8)
        check(grouped.lower(q, k).vjp(), [q, k, q], {"a": 2}, {"b": 2})
    assert rule(grouped, (8, 4), (1, 4)) == "a b, _ b -> a b"
    check(grouped.lower(array(8, 4), array(1, 4)), [array(8, 4), array(1, 4)], {"a": 8})


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0] * x.shape[1])
def flattened(x, o):
    p, n = jt.program_id(0), x.shape[1]
    o[p // n, p % n, :] = x[p // n, p % n, :] + 1


def test_a_flattened_grid():
    x = array(4, 6, 3)
    assert rule(flattened, (4, 6, 3)) == "a _ b -> a _ b"
    check(flattened.lower(x), [x], {"a": 2}, {"a": 4, "b": 3})


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0] // 8)
def nested(x, o):
    p = jt.program_id(0)
    for k in jt.range(2):
        o.tiles(4)[p * 2 + k] = x.tiles(4)[p * 2 + k] + 1


def test_a_loop_inside_of_what_a_program_owns():
    assert rule(nested, (32,)) == "a -> a"
    check(nested.lower(array(32)), [array(32)], {"a": 2}, {"a": 4})
    assert not can_cut(nested.lower(array(32)).program, "a", 8)


def test_positions_and_counts_close_an_axis():
    types = {"out_type": lambda x: jt.like(x), "grid": lambda x: x.shape[0] // 4}

    def masked(x, o):
        i = jt.program_id(0)
        rows = i * 4 + jnp.arange(4)
        o.tiles(4)[i] = jnp.where(rows < 5, x.tiles(4)[i], 0.0)

    def counted(x, o):
        i = jt.program_id(0)
        o.tiles(4)[i] = x.tiles(4)[i] * jt.num_programs(0).astype(f32)

    def shifted(x, o):
        i = jt.program_id(0)
        o.tiles(4)[i] = x[jt.ds((i + 1) * 4 % x.shape[0], 4)]

    def windows(x, o):
        i = jt.program_id(0)
        o.tiles(4)[i] = x.tiles(8, step=4)[i][:4]

    for body in (masked, counted, shifted, windows):
        assert rule(jt.call(body, **types), (32,)) == "_ -> _", body


def test_reasons_are_given():
    found = factors(norm.lower(array(16, 8), array(8)).program.kernel)
    assert set(found.reasons) == {(0, 1), (1, 0), (2, 1)}
    text = norm.lower(array(16, 8), array(8)).texts["sharding"]
    assert text.startswith("a _, _ -> a _\n") and "x, dimension 1: " in text and "test_factors.py" in text


def test_vmapped_axes_are_factors():
    program = None

    def look(a, b):
        nonlocal program
        jaxpr = jax.make_jaxpr(jax.vmap(matmul, in_axes=(0, None)))(a, b).jaxpr
        program = jaxpr.eqns[-1].params["program"]

    a, b = array(4, 8, 8), array(8, 8)
    look(a, b)
    assert str(rule_of(program)) == "a b c, c d -> a b d; sum over c"


def test_aliased_and_started_outputs():
    @jt.kernel(out_type=lambda x, y: jt.like(x), grid=lambda x, y: y.shape[0], alias={"x": "o"})
    def add_rows(x, y, o):
        jt.atomic_add(o, (slice(None),), y[jt.program_id(0), :])

    assert rule(add_rows, (8,), (4, 8)) == "a, _ a -> a"  # every shard would add x
    check(add_rows.lower(array(8), array(4, 8)), [array(8), array(4, 8)], {"a": 2})

    @jt.kernel(out_type=lambda x: jt.like(x, shape=()), grid=lambda x: x.shape[0], init=1)
    def from_one(x, o):
        jt.atomic_add(o, (), x[jt.program_id(0)])

    assert rule(from_one, (8,)) == "_ -> ()"


def test_kernels_that_print_or_assert_run_whole():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def asserting(x, o):
        i = jt.program_id(0)
        jt.assert_(x[i] < 9, "small")
        o[i] = x[i]

    assert rule(asserting, (8,)) == "_ -> _"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((2, 3), (2, 3), [([0], [0]), ([1], [1])]),
        ((2, 1, 3), (2, 3, 1), [([0], [0]), ([2], [1])]),
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 4), (2, 12), [([0, 1], [0, 1])]),
        ((1,), (), []),
    ],
)
def test_which_axes_a_reshape_keeps(old, new, expected):
    assert regroup(old, new) == expected
