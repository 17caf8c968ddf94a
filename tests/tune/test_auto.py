"""`jt.auto`: what it stands for, on which target and under which transformation; what is said where nothing fits."""

import dataclasses
import linecache

import auto_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from auto_kernels import attention, gated, matmul, softmax, spec, transpose, vector_add

import jtile as jt
from jtile import passes
from jtile.errors import KernelTypeError, KernelValueError
from jtile.lowering import targets
from jtile.lowering.ascend.targets import ascend_target
from jtile.ops import gpu_tiles, hopper_tiles
from jtile.primitive.lowering import pieces_of
from jtile.testing.evaluate import evaluated
from jtile.tune import device, nature, products, warpgroups
from jtile.tune.programs import trace
from jtile.tune.store import Entry, store
from jtile.tune.warpgroups import Product

HOPPER, AMPERE, AMD = (targets.resolve(name) for name in ("cuda:sm_90", "cuda:sm_80", "rocm:gfx942"))
BLOCK_LEVEL = "at the block level"


def chosen(kernel, *types, target=None, **meta):
    """The meta-parameters of a call that are numbers, and why."""
    program = kernel.lower(*types, target=target, **meta).program
    return {k: v for k, v in program.meta if type(v) is int}, program.choice.why


def product(m, n, k, dtype="bfloat16", ta=False, tb=False, target=HOPPER):
    types = [spec(*((k, m) if ta else (m, k)), dtype=dtype), spec(*((n, k) if tb else (k, n)), dtype=dtype)]
    return chosen(matmul, *types, target=target, ta=ta, tb=tb)


def program_of(f, *args):
    (program,) = trace(f, *args)[0]
    return program


# -- products ---------------------------------------------------------------------------------------------------------

PRODUCTS = [
    (4096, 4096, 4096, "bfloat16", False, False),
    (8192, 1024, 512, "float16", False, True),
    (1000, 1000, 1000, "bfloat16", True, True),
    (72, 14336, 4096, "bfloat16", False, True),
    (2048, 2048, 2048, "int8", False, True),
    (1024, 4096, 2048, "float8_e4m3fn", False, True),
    (512, 500, 512, "bfloat16", False, False),  # rows of no whole 16 bytes: tile level
    (16, 6144, 4096, "bfloat16", False, True),  # few rows: tile level
    (300, 200, 100, "float32", False, False),
]


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_on_hopper_take_the_tiles_of_the_library(case):
    m, n, k, dtype, ta, tb = case
    tiles, why = product(*case)
    with jt.config(arch="sm_90"):
        itemsize, fast = jnp.dtype(dtype).itemsize, dtype == "int8"
        assert tiles == gpu_tiles.product(m, n, k, itemsize, transposed=tb, left=ta, fast=fast)
        assert (BLOCK_LEVEL in why) == (hopper_tiles.tiles(Product(m, n, k, itemsize, 1, 1, tb, ta, fast)) is not None)
    assert "for cuda:sm_90: " in why and f"{m} x {n} x {k} of {dtype}" in why


def test_the_product_gets_roles():
    """What the choice expects is what is compiled: the plan of the block level."""
    low = matmul.lower(spec(512, 512), spec(512, 1024), target="cuda:sm_90")
    assert low.texts["choice"] == f"{low.program.choice.why}\n"
    assert low.texts["schedule"].startswith("block level: ")


def test_gates_count_as_products_beside_each_other():
    tiles, why = chosen(gated, spec(2048, 2048), spec(2048, 5632), spec(2048, 5632), target=HOPPER)
    assert tiles == warpgroups.tiles(Product(2048, 5632, 2048, gates=2), warpgroups.gpu(HOPPER))
    assert "2 gates of" in why


def test_a_target_of_other_facts_gets_other_tiles():
    """Half of the multiprocessors of an H200, at the same speed each: the model of time says what is best there."""
    scales = tuple(dataclasses.replace(s, units=66) if s.name == "device" else s for s in HOPPER.scales)
    rates = tuple((name, rate / 2) for name, rate in HOPPER.rates)
    half = dataclasses.replace(HOPPER, name="cuda:half", scales=scales, rates=rates)
    sizes = 1024, 2048, 4096
    assert product(*sizes, target=half)[0] == warpgroups.tiles(Product(*sizes), warpgroups.gpu(half))
    assert product(*sizes, target=half)[0] != product(*sizes)[0]
    assert "for cuda:half: " in product(*sizes, target=half)[1]


@pytest.mark.parametrize("target", [AMPERE, AMD], ids=lambda t: t.name)
@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (16, 4096, 4096)], ids=str)
def test_products_elsewhere_take_what_fills_the_gpu(sizes, target):
    units = next(s.units for s in target.scales if s.name == "device")
    assert product(*sizes, target=target)[0] == products.on_gpu(*sizes, 2, 1, False, units)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_products_on_an_npu_take_what_its_matrix_unit_holds(dtype):
    npu, itemsize = ascend_target("910b1"), jnp.dtype(dtype).itemsize
    size = {m.name: m.size for m in npu.memories}
    tiles, why = product(1000, 2000, 4000, dtype, target=npu)
    bm, bn, bk = (tiles[k] for k in ("bm", "bn", "bk"))
    assert "for ascend:910b1: " in why and all(n & (n - 1) == 0 for n in (bm, bn, bk))
    assert bm * bn * 8 == size["l0c"] and max(bm, bn) * bk * itemsize * 2 == size["l0a"] == size["l0b"]
    assert product(100, 200, 40, dtype, target=npu)[0] == {"bm": 32, "bn": 64, "bk": 64}
    types = [spec(4, 1024, 256, dtype=dtype)] * 3
    tiles, _ = chosen(attention, *types, target=npu)
    assert (tiles["bq"] * (tiles["bk"] + 256)) * 4 <= size["l0c"]
    assert chosen(vector_add, *[spec(1 << 20, dtype=dtype)] * 2, target=npu)[0] == {
        "block": min(16384 // itemsize, 4096)
    }


def test_products_on_a_cpu_share_out_their_sides_and_sum_at_once():
    tiles, why = product(500, 700, 300, "float32", target=None)
    cores = next(s.units for s in jt.host_target().scales if s.name == "device")
    assert tiles == {**products.on_cpu(500, 700, 300, cores), "bk": 300} and "all terms of a sum" in why
    a, b = (np.random.default_rng(0).standard_normal(s, np.float32) for s in ((500, 300), (300, 700)))
    np.testing.assert_allclose(matmul(a, b), a @ b, atol=1e-4)
    np.testing.assert_allclose(jax.jit(matmul)(a, b), a @ b, atol=1e-4)


def test_what_a_call_gives_stays_and_the_rest_is_chosen_for_it():
    tiles, _ = chosen(matmul, spec(4096, 4096), spec(4096, 4096), target=HOPPER, bn=128)
    ranked = warpgroups.ranked(Product(4096, 4096, 4096), warpgroups.gpu(HOPPER))
    assert tiles == next(t for t in ranked if t["bn"] == 128)
    plain = kernels.matmul.with_options(num_warps=8)
    assert plain.lower(spec(64, 64), spec(64, 64), target=AMPERE).program.options.num_warps == 8


@pytest.mark.cpu
def test_a_call_may_ask_for_it_where_the_kernel_has_a_number():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x, *, block: jt.cdiv(x.shape[0], block))
    def double(x, o, *, block=16):
        o.tiles(block)[jt.program_id(0)] = x.tiles(block)[jt.program_id(0)] * 2

    x = jnp.arange(1 << 21, dtype=jnp.float32)  # 4096 for each program, also of a machine with 64 cores
    assert dict(program_of(lambda x: double(x, block=jt.auto), x).meta)["block"] == 4096
    assert dict(program_of(double, x).meta)["block"] == 16
    np.testing.assert_array_equal(double(x, block=jt.auto), 2 * x)


# -- other kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_the_tiles_of_the_library(d, causal):
    types = spec(8, 1024, d), spec(8, 2048, d), spec(8, 2048, d)
    tiles, why = chosen(attention, *types, target=HOPPER, causal=causal)
    assert tiles == warpgroups.attention(1024, 2048, d, 2, causal)
    assert BLOCK_LEVEL in why
    tiles, _ = chosen(attention, *types, target=AMPERE, causal=causal)
    assert tiles == products.attention_on_gpu(1024, 2048, d, 2, causal, False)


def test_attention_on_a_cpu():
    q, k, v = (np.random.default_rng(i).standard_normal((2, n, 32), np.float32) for i, n in enumerate((200, 300, 300)))
    x = np.einsum("htd,hsd->hts", q, k) * 32**-0.5
    p = np.exp(x - x.max(-1, keepdims=True))
    np.testing.assert_allclose(attention(q, k, v), (p / p.sum(-1, keepdims=True)) @ v, atol=1e-5)
    assert chosen(attention, q, k, v)[0] == {"bq": 100, "bk": 150}


@pytest.mark.parametrize(
    ("n", "dtype", "target", "block"),
    [
        (1 << 20, "float32", None, 4096),
        (1 << 20, "bfloat16", None, 8192),
        (5000, "float32", None, 250),  # twenty programs
        (1 << 24, "float32", HOPPER, 4096),
        (5000, "float32", HOPPER, 128),
        (1 << 24, "float32", AMD, 4096),
    ],
)
def test_elements_are_shared_out_by_bytes_and_programs(n, dtype, target, block):
    if target is None:
        scales = tuple(dataclasses.replace(s, units=2) if s.name == "device" else s for s in jt.host_target().scales)
        target = dataclasses.replace(jt.host_target(), scales=scales)
    tiles, why = chosen(vector_add, spec(n, dtype=dtype), spec(n, dtype=dtype), target=target)
    assert tiles == {"block": block}
    assert f"{block * jnp.dtype(dtype).itemsize} bytes" in why and f"{-(-n // block)} programs" in why


def test_rows_that_are_passed_over_several_times_are_few():
    rows = lambda r, n, target: chosen(softmax, spec(r, n, dtype="float32"), target=target)[0]["br"]
    assert [rows(1 << 16, n, HOPPER) for n in (32, 256, 1024, 32768)] == [32, 4, 1, 1]
    assert rows(1 << 16, 256, jt.host_target()) == 4


def test_two_sides_are_chosen_one_after_the_other():
    tiles, _ = chosen(transpose, spec(4096, 4096, dtype="float32"), target=HOPPER)
    assert tiles["br"] * tiles["bc"] * 4 == 16384 and min(tiles.values()) >= 32
    x = np.arange(60 * 70, dtype=np.float32).reshape(60, 70)
    np.testing.assert_array_equal(transpose(x), x.T)


def test_depths_of_pipelines_may_be_chosen_too():
    @jt.kernel(out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])), grid=1)
    def kernel(a, b, o, *, bk: int = jt.auto, stages: int = jt.auto):
        A, B = a.tiles(16, bk), b.tiles(bk, 32)
        acc = jt.zeros((16, 32), jnp.float32)
        for k in jt.range(A.shape[1], stages=stages):
            acc = jt.dot(A[0, k], B[k, 0], acc)
        o[...] = acc.astype(o.dtype)

    assert chosen(kernel, spec(16, 4096), spec(4096, 32), target=AMPERE)[0] == {"bk": 128, "stages": 4}


def test_products_of_unlike_sizes_take_the_shortest_predicted_time():
    @jt.kernel(out_type=lambda x, w, v: jt.like(x), grid=lambda x, *_, bm: jt.cdiv(x.shape[0], bm))
    def two_layers(x, w, v, o, *, bm: int = jt.auto):
        i = jt.program_id(0)
        h = jnp.maximum(jt.dot(x.tiles(bm, x.shape[1])[i, 0], w[...]), 0).astype(x.dtype)
        o.tiles(bm, v.shape[1])[i, 0] = jt.dot(h, v[...]).astype(o.dtype)

    types = spec(100000, 32), spec(32, 64), spec(64, 32)
    tiles, why = chosen(two_layers, *types, target=AMPERE)
    assert tiles["bm"] in (16, 32, 64, 128)
    x, w, v = (np.random.default_rng(i).standard_normal(t.shape, np.float32) for i, t in enumerate(types))
    np.testing.assert_allclose(two_layers(x[:100], w, v), np.maximum(x[:100] @ w, 0) @ v, atol=1e-4)
    assert why


# -- transformations --------------------------------------------------------------------------------------------------


def test_vmap_chooses_for_all_lanes_together():
    """One product of 256 rows fills half of the GPU with small tiles, 64 of them all of it with large ones."""
    one, many = (spec(*lanes, 256, 1024) for lanes in ((), (64,)))
    with jt.config(arch="sm_90"):
        alone = program_of(matmul, one, spec(1024, 512))
        lanes = program_of(jax.vmap(matmul, in_axes=(0, None)), many, spec(1024, 512))
        assert "64 x 256 x 512 x 1024" in lanes.choice.why
        expected = warpgroups.tiles(Product(256, 512, 1024, batch=64), warpgroups.gpu(HOPPER))
        assert dict(lanes.meta).items() >= expected.items()
        assert expected["bm"] > dict(alone.meta)["bm"]
    a, b = (np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(((5, 40, 60), (60, 30))))
    np.testing.assert_allclose(jax.vmap(matmul, in_axes=(0, None))(a, b), a @ b, atol=1e-4)


def test_derivatives_take_what_is_chosen_for_the_target():
    a, b = (np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(((40, 60), (60, 30))))
    f = lambda a, b: matmul(a, b).sum()
    for found, want in zip(evaluated(jax.grad(f, (0, 1)))(a, b), (np.ones((40, 30)) @ b.T, a.T @ np.ones((40, 30)))):
        np.testing.assert_allclose(found, want, atol=1e-4)
    low = matmul.lower(spec(512, 512), spec(512, 512), target=HOPPER)
    for derived in (low.vjp(), low.jvp()):
        assert derived.program.choice.why.startswith("as matmul: ") and "for cuda:sm_90" in derived.program.choice.why
    primal = evaluated(jax.vmap(jax.grad(lambda a: f(a, b))))(np.stack([a, a]))
    np.testing.assert_allclose(primal[1], np.ones((40, 30)) @ b.T, atol=1e-4)


def test_reverse_mode_on_hopper_takes_the_tiles_that_are_best_for_its_own_products():
    """The sides that cotangents sum over are 64 or 128 terms; the model expects all products together to be quicker."""
    types = spec(2048, 4096), spec(4096, 1024)
    with jt.config(arch="sm_90"):
        forward = chosen(matmul, *types, target=HOPPER)[0]
        f = lambda a, b: jax.vjp(lambda a, b: matmul(a, b), a, b)[1](matmul(a, b))
        reverse = next(p for p in trace(f, *types)[0] if p.name.endswith("_vjp"))
    own = {k: v for k, v in reverse.meta if type(v) is int}
    assert own != forward and {own["bm"], own["bn"]} <= {64, 128}
    assert "us for all products of the derivative" in reverse.choice.why
    low = matmul.lower(*types, target=HOPPER)
    assert low.vjp().program == reverse
    times = []
    for program in (reverse, matmul.lower(*types, target=HOPPER, **forward).vjp().program):
        wholes = [nature.whole_product(passes.run_pipeline(k, passes.TILE)) for k in pieces_of(program).kernels]
        times.append(sum(predicted(whole) for whole in wholes))
    assert len(wholes) == 2 and times[0] < times[1]


def predicted(whole):
    return warpgroups.predicted_us(whole.product, warpgroups.Form(1, *whole.tile[:2]), warpgroups.gpu(HOPPER))


def test_reverse_mode_with_other_tiles_is_the_same_derivative():
    a, b = (np.random.default_rng(i).standard_normal((2, 96, 96), np.float32) for i in range(2))
    with jt.config(arch="sm_90", interpret=True):
        f = lambda a, b: jax.vmap(matmul)(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)).astype(jnp.float32).sum()
        da, db = evaluated(jax.grad(f, (0, 1)))(a, b)
    np.testing.assert_allclose(da, np.ones((2, 96, 96)) @ b.swapaxes(1, 2), atol=0.3)
    np.testing.assert_allclose(db, a.swapaxes(1, 2) @ np.ones((2, 96, 96)), atol=0.3)


def test_a_rule_of_the_users_gets_the_numbers():
    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, block: jt.cdiv(x.shape[0], block))
    def double(x, o, *, block: int = jt.auto):
        o.tiles(block)[jt.program_id(0)] = x.tiles(block)[jt.program_id(0)] * 2

    seen = []

    def forward(x, *, block):
        seen.append(block)
        return double(x, block=block), ()

    double.defvjp(forward, lambda _, ct, **__: (3 * ct,))
    x = np.arange(64, dtype=np.float32)
    np.testing.assert_array_equal(evaluated(jax.grad(lambda x: double(x).sum()))(x), 3 * np.ones(64))
    np.testing.assert_array_equal(evaluated(jax.grad(lambda x: jax.vmap(double)(x[None]).sum()))(x), 3 * np.ones(64))
    assert all(type(n) is int for n in seen)


@pytest.mark.cpu
def test_a_program_is_chosen_again_for_the_platform_that_it_is_lowered_for(monkeypatch):
    """Traced on a CPU and lowered for two platforms, as an export is: each gets its own tiles."""
    from jtile.primitive import lowering

    compiled = []
    monkeypatch.setattr(lowering, "_compile", lambda program, *a, _was=lowering._compile, **k: (
        compiled.append(program), _was(program, *a, **k))[1])  # fmt: skip
    x = jnp.arange(1 << 21, dtype=jnp.float32)
    f = jax.jit(lambda x: vector_add(x, x))
    with jt.config(arch="sm_80"), jax.default_device(jax.devices("cpu")[0]):
        f.trace(x).lower(lowering_platforms=("cpu",))
        f.trace(x).lower(lowering_platforms=("cuda",))
    assert ["for cpu" in p.choice.why for p in compiled] == [True, False]
    assert compiled[0].kernel.grid != compiled[1].kernel.grid


def test_a_shard_of_a_shard_map_is_a_call_of_its_own():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    rows = jax.sharding.PartitionSpec("x")
    f = jax.shard_map(vector_add, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    x = jnp.arange(1000.0)
    np.testing.assert_array_equal(jax.jit(f)(x, x), 2 * x)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x, x).sum()))(x), 2 * jnp.ones(1000))


def test_sizes_that_are_known_when_the_kernel_runs_count_as_large():
    add = vector_add.with_options(dynamic={"x": 0, "y": 0})
    programs = {program_of(add, *[jnp.ones(n)] * 2) for n in (100, 1000)}
    assert len(programs) == 1
    for n in (100, 1000):
        np.testing.assert_array_equal(add(jnp.ones(n), jnp.ones(n)), 2 * jnp.ones(n))
    (n,) = jax.export.symbolic_shape("n")
    jax.make_jaxpr(vector_add)(spec(n, dtype="float32"), spec(n, dtype="float32"))


# -- the choice as others see it --------------------------------------------------------------------------------------


def test_the_choice_is_the_same_in_every_kernel_of_one_source():
    """Nothing but shapes, dtypes and the target: not what was called before, nor the object."""
    again = kernels.matmul.with_options()
    types = spec(640, 768), spec(768, 896)
    assert again.lower(*types).program == matmul.lower(*types).program
    explicit = matmul.lower(*types, **chosen(matmul, *types)[0]).program
    assert explicit.choice is None and explicit != matmul.lower(*types).program


def test_explain_says_what_was_chosen():
    text = str(jt.explain(vector_add, jnp.ones(5000), jnp.ones(5000), run=False))
    (line,) = [x for x in text.splitlines() if x.startswith("vector_add: ")]
    assert line.startswith("vector_add: block=") and f" for {device.target().name}: " in line


def test_an_entry_of_the_tuner_goes_first_under_vmap_too():
    x = jnp.arange(4096.0)
    (call,) = trace(vector_add, x, x)[1]
    store.put(device.kind(), call.name, Entry({"block": 64}, 1.5, 2.5))
    program = program_of(vector_add, x, x)
    assert dict(program.meta)["block"] == 64
    assert (
        program.choice.why
        == f"block=64 for {device.kind()}: the tuner measured 1.5 us, and 2.5 with the model's choice"
    )
    assert dict(program_of(jax.vmap(vector_add), x[None], x[None]).meta)["block"] == 64
    elsewhere = vector_add.lower(x, x, target=AMPERE).program
    assert dict(elsewhere.meta)["block"] != 64 and "cuda:sm_80" in elsewhere.choice.why
    assert dict(program_of(lambda x: vector_add(x, x, block=32), x).meta)["block"] == 32


def test_the_tuner_searches_around_the_choice():
    x = jnp.arange(4096.0)
    first = dict(program_of(vector_add, x, x).meta)["block"]
    (found,) = jt.tune(vector_add, x, x, progress=False).kernels
    assert {c.config["block"] for c in found.candidates if c.config} == {first // 2, first, 2 * first}
    with jt.config(arch="sm_90"):
        (call,) = trace(matmul, spec(1024, 4096), spec(4096, 2048))[1]
        points = call.candidates
        assert {"bm", "bn", "bk"} == set(points[0]) and points[0].items() <= dict(call.bound({}).program.meta).items()
        assert len(points) >= warpgroups.ALWAYS


# -- errors -----------------------------------------------------------------------------------------------------------


def line_of(error):
    return linecache.getline(*error.value.where).strip()


def test_a_number_that_is_no_side_of_a_tile_is_refused():
    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=1)
    def turns(
        x,
        o,
        *,
        often: int = jt.auto,
    ):
        o[...] = x[...] * often

    with pytest.raises(KernelValueError, match=r"'often' of kernel turns is jt.auto, but it is the side of no") as e:
        turns(jnp.ones(8))
    assert line_of(e) == "often: int = jt.auto," and "give it a number, as in often=64" in str(e.value)


def test_results_whose_shapes_depend_on_it_are_refused():
    @jt.kernel(
        out_type=lambda x, *, block: jt.like(x, shape=(jt.cdiv(x.shape[0], block),)),
        grid=lambda x, *, block: jt.cdiv(x.shape[0], block),
    )
    def sums(x, o, *, block: int = jt.auto):
        o[jt.program_id(0)] = x.tiles(block)[jt.program_id(0)].sum()

    with pytest.raises(KernelValueError, match="shapes or dtypes of its results depend on block") as e:
        sums(jnp.ones(4096))
    assert "block: int = jt.auto" in line_of(e)


def test_what_the_kernel_itself_refuses_is_said_as_it_is():
    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=1)
    def wrong(x, o, *, block: int = jt.auto):
        o.tiles(block)[0] = x.tiles(block)[0] + jnp.ones(7)

    with pytest.raises((KernelTypeError, KernelValueError), match=r"traced with block=64 for jt.auto"):
        wrong(jnp.ones(64))

    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, block: jt.cdiv(x.shape[0], block))
    def choosy(x, o, *, block: int = jt.auto):
        assert block in (16, 32)
        o.tiles(block)[jt.program_id(0)] = x.tiles(block)[jt.program_id(0)]

    np.testing.assert_array_equal(choosy(jnp.arange(100.0)), jnp.arange(100.0))


def test_it_reads_as_it_is_written():
    assert repr(jt.auto) == "jt.auto"


def test_kernels_whose_product_nobody_needs_or_that_have_no_work():
    """The rules for products are for products that are there."""
    assert matmul(jnp.ones((0, 8)), jnp.ones((8, 8))).shape == (0, 8)
    np.testing.assert_array_equal(matmul(jnp.ones((8, 0)), jnp.ones((0, 8))), jnp.zeros((8, 8)))


def test_a_kernel_that_refuses_small_sides_gets_those_that_it_takes():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x, *, rows: jt.cdiv(x.shape[0], rows))
    def double(x, o, *, rows: int = jt.auto):
        assert rows % 8 == 0
        i = jt.program_id(0)
        o.tiles(rows, x.shape[1])[i, 0] = x.tiles(rows, x.shape[1])[i, 0] * 2

    x = jnp.ones((64, 4096))
    np.testing.assert_array_equal(double(x), 2 * x)


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x, *, br, **_: jt.cdiv(x.shape[0], br))
def sums_of_rows(x, o, *, br: int = jt.auto, bc: int = jt.auto):
    i, X, total = jt.program_id(0), x.tiles(br, bc), jt.zeros((br,), jnp.float32)
    for k in jt.range(X.shape[1]):
        total = total + X[i, k].sum(1)
    o.tiles(br)[i] = total


def test_small_arrays_say_nothing_where_a_large_one_does():
    """Rows whose sums are a vector are few in a tile, so that all multiprocessors have some; the side of a loop does
    not make programs fewer, and is as long as a tile may be."""
    for shape, found in {(1000, 1_000_000): (1, 1024), (8192, 4096): (1, 1024), (100_000, 32): (64, 32)}.items():
        assert chosen(sums_of_rows, spec(*shape, dtype="float32"), target=HOPPER)[0] == dict(zip(("br", "bc"), found))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 300)), jnp.float32)
    np.testing.assert_allclose(sums_of_rows(x), x.sum(1), atol=1e-4)


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[1:]), grid=lambda x, *, bc, **_: jt.cdiv(x.shape[1], bc))
def sums_of_columns(x, o, *, br: int = jt.auto, bc: int = jt.auto):
    i, X, total = jt.program_id(0), x.tiles(br, bc), jt.zeros((bc,), jnp.float32)
    for k in jt.range(X.shape[0]):
        total = total + X[k, i].sum(0)
    o.tiles(bc)[i] = total


def test_few_programs_that_loop_read_much_at_a_time():
    """A program waits for one tile after the other: 64 programs with tiles of 4 KiB read 0.55 TB/s on an H200."""
    assert chosen(sums_of_rows, spec(64, 1_000_000, dtype="float32"), target=HOPPER)[0] == {"br": 1, "bc": 8192}
    tiles, why = chosen(sums_of_columns, spec(8192, 4096, dtype="float32"), target=HOPPER)
    assert tiles == {"br": 256, "bc": 32} and "128 programs for 132 units" in why
    x = jnp.asarray(np.random.default_rng(0).normal(size=(300, 50)), jnp.float32)
    np.testing.assert_allclose(sums_of_columns(x), x.sum(0), atol=1e-4)
