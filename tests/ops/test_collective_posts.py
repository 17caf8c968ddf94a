"""Sums over devices whose elements say themselves that they have come: their kernels in the interpreter, whose races
and deadlocks it would find, and for sm_90."""

import expert_copies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.ops import collective_flows as flows
from jtile.ops import collective_norms as norms
from jtile.ops import collective_posts as posts
from jtile.ops import collective_row_posts as row_posts
from jtile.ops import exchanged_parts, hopper_gathered, hopper_normed_sums, hopper_summed
from jtile.ops.hopper_wide import Form


def whole(*shape, dtype=np.float32) -> np.ndarray:
    """Whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(shape).integers(-2, 3, shape).astype(dtype)


PARTS = {
    "gather_posts": (lambda n: whole(n, 13), lambda x: np.broadcast_to(x, (len(x), *x.shape))),
    "exchange_posts": (lambda n: whole(n, n, 13), lambda x: x.swapaxes(0, 1)),
    "sum_posts": (lambda n: whole(n, n, 13), lambda x: x.sum(0)),
    "sum_all_posts": (lambda n: whole(n, 13), lambda x: np.broadcast_to(x.sum(0), x.shape)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("n", [2, 3])
def test_parts(name, n):
    made, want = PARTS[name]
    x = made(n)
    got = getattr(posts, name).interpret(x, axis="x", bn=4, mesh={"x": n}, seed=n)
    np.testing.assert_array_equal(got, want(x))


@pytest.mark.parametrize(("n", "size"), [(2, 29), (3, 13), (4, 5)])
def test_sums_in_turn(n, size):
    """A tile for each role, fewer, and many; the last one is not full."""
    x, options = whole(n, n, size), dict(axis="x", bn=4, programs=2, mesh={"x": n}, seed=n)
    want = np.broadcast_to(x.sum(0), x.shape)
    np.testing.assert_array_equal(flows.sum_all_in_two_flow.interpret(x, **options), want)
    np.testing.assert_array_equal(flows.sum_all_flow.interpret(x[:, 0], **options), want[:, 0])
    np.testing.assert_array_equal(flows.exchange_flow.interpret(x, **options), x.swapaxes(0, 1))


@pytest.mark.parametrize(("n", "nbytes"), [(2, 2 << 20), (4, 512 << 10), (4, 64 << 20), (8, 64 << 20)])
def test_tiles_in_turn(n, nbytes):
    """Whole words for each thread, and at most as many programs as run at once."""
    parts = 1 if n == 2 else n
    x = jax.ShapeDtypeStruct((nbytes // 2,) if n == 2 else (n, nbytes // 2 // n), jnp.bfloat16)
    with jt.config(arch="sm_90"):
        chosen = flows.meta(x, n)
    tiles = nbytes // parts // 2 // chosen["bn"]
    assert chosen["programs"] == min(128, tiles) and n * chosen["bn"] <= 16384 and chosen["bn"] >= 1024


@pytest.mark.parametrize("n", [2, 8, 9, 16])
def test_large_sums_of_many_devices(n):
    """Sums of 64 MiB in one turn over more than eight devices need more memory than a receive reaches."""
    mesh = jax.sharding.AbstractMesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, found = jax.sharding.PartitionSpec("x"), {}

    def look(x):
        flat = jax.ShapeDtypeStruct((32 << 20,), jnp.bfloat16)
        found["once"] = exchanged_parts._sum_once.choice(flat, axis="x").implementation
        found["two"] = exchanged_parts._sum_all.choice(flat.update(shape=(n, flat.size // n)), axis="x").implementation
        return x

    with jt.config(arch="sm_90"):
        jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec), jnp.zeros(n))
    turns = "tiles that are posted in turn"
    assert found == {"once": turns if n <= 8 else "kernels in steps", "two": turns}


@pytest.mark.parametrize(
    ("name", "n", "size"),
    [
        ("sum_all_flow", 2, 1 << 22),
        ("sum_all_flow", 8, 32 << 20),  # the most memory that a receive reaches
        ("sum_all_in_two_flow", 4, 1 << 20),
        ("exchange_flow", 4, 1 << 20),
    ],
)
def test_tiles_in_turn_compile(name, n, size):
    pytest.importorskip("triton")
    x = jax.ShapeDtypeStruct((size,) if name == "sum_all_flow" else (n, size), jnp.bfloat16)
    kernel = getattr(flows, name)
    with jt.config(arch="sm_90", overlap=True):
        ptx = kernel.lower(x, axis="x", mesh={"x": n}, target="cuda:sm_90", **flows.meta(x, n)).texts["ptx"]
    assert "ld.relaxed.sys.global.v4" in ptx and "st.global.wt.v4" in ptx and "griddepcontrol.wait" in ptx
    assert "fence" not in ptx.replace("fence.acq_rel.sys; mov.b32 %jf", "")  # but in front of a report of a fault


@pytest.mark.parametrize(("n", "width"), [(2, 8), (3, 12)])
def test_a_sum_and_its_norm(n, width):
    x, r, w = whole(n, 3, width), np.broadcast_to(whole(3, width), (n, 3, width)), np.ones((n, width), np.float32)
    y, s = norms.posted_sum_of_row.interpret(x, r, w, axis="x", eps=0.5, mesh={"x": n}, seed=n)
    total = r[0] + x.sum(0)
    np.testing.assert_array_equal(s, np.broadcast_to(total, s.shape))
    want = total / np.sqrt((total * total).mean(1, keepdims=True) + 0.5)
    np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-5)


def _products(x, w) -> np.ndarray:
    """The sum over devices of x [m, k] times w [n, k] transposed."""
    return np.einsum("dmk,dnk->mn", x.astype(np.float32), w.astype(np.float32))


@pytest.mark.parametrize(("n", "parts", "turns"), [(2, 2, 1), (3, 1, 1), (3, 2, 2), (4, 1, 2)])
def test_products_before_a_norm(n, parts, turns):
    """In two turns every device sums up some of the rows, and the others take the rounded sums."""
    x, w = whole(n, 5, 256, dtype=jnp.bfloat16), whole(n, 128, 256, dtype=jnp.bfloat16)
    r, norm = np.broadcast_to(whole(5, 128, dtype=jnp.bfloat16), (n, 5, 128)), np.full((n, 128), 2, np.float32)
    form = Form(64, parts, 2, 64)
    y, scaled, squares, _ = hopper_normed_sums.sum_into_norm.interpret(
        x, w, r, norm, axis="x", mesh={"x": n}, form=form, turns=turns, seed=n
    )
    want = r[0].astype(np.float32) + _products(x, w)
    np.testing.assert_array_equal(y, np.broadcast_to(want, y.shape).astype(jnp.bfloat16))
    want = np.asarray(want.astype(jnp.bfloat16), np.float32) if turns == 2 else want
    np.testing.assert_array_equal(scaled, np.broadcast_to(2 * want, y.shape).astype(jnp.bfloat16))
    np.testing.assert_allclose(squares.sum(1)[:, :5], np.broadcast_to((want * want).sum(1), (n, 5)), rtol=1e-5)


@pytest.mark.parametrize(("n", "m", "tb"), [(2, 6, False), (3, 17, False), (2, 24, True)])
def test_products_of_few_rows(n, m, tb):
    """Fewer rows than a tile has, of which some are brought and some are zeros, and terms behind the end of a row."""
    x, w = whole(n, m, 40, dtype=jnp.bfloat16), whole(n, 16, 40, dtype=jnp.bfloat16)
    options = dict(axis="x", bn=8, bk=16, slots=2, tb=tb, bm=32, mesh={"x": n}, seed=n)
    got = hopper_summed.summed_rows.interpret(x, w if tb else w.swapaxes(1, 2), **options)
    np.testing.assert_array_equal(got, np.broadcast_to(_products(x, w), got.shape).astype(jnp.bfloat16))


@pytest.mark.parametrize(("n", "m", "parts"), [(2, 32, 2), (3, 7, 4), (4, 16, 2)])
def test_products_of_gathered_rows(n, m, parts):
    """Fewer rows than a tile has, no multiple of those that are posted at once, and all of them."""
    x, w = whole(n, m, 512, dtype=jnp.bfloat16), whole(n, 512, 64, dtype=jnp.bfloat16)
    got = hopper_gathered.gathered_rows.interpret(x, w, axis="x", bn=32, parts=parts, mesh={"x": n}, seed=n)
    want = np.einsum("rk,dkc->drc", x.reshape(-1, 512).astype(np.float32), w.astype(np.float32))
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_which_products_of_gathered_rows():
    """Those of few rows on more than two devices whose blocks fill the GPU; and what they compile to."""
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    found, spec = {}, jax.sharding.PartitionSpec("x")

    def look(x, n):
        for m, k, columns in ((64 // n, 7168, 4096 // n), (64, 7168, 1024), (16, 7168, 1040), (16, 7000, 1024)):
            found[n, m, k, columns] = hopper_gathered.misfit(of(m, k), of(k, columns), axis="x")
        return x

    with jt.config(arch="sm_90"):
        for n in (2, 4):
            mesh = jax.sharding.AbstractMesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
            of_n = jax.shard_map(lambda x, n=n: look(x, n), mesh=mesh, in_specs=spec, out_specs=spec)
            jax.eval_shape(of_n, jnp.zeros(n))
        assert [shape for shape, why in found.items() if why is None] == [(4, 16, 7168, 1024)]
        form = hopper_gathered._form(of(16, 7168), of(7168, 1024))
        assert form == {"bn": 32, "parts": 4}
        kernel, options = hopper_gathered.gathered_rows, dict(axis="x", mesh={"x": 4}, target="cuda:sm_90")
        texts = kernel.lower(of(16, 7168), of(7168, 1024), **form, **options).texts
    assert "0 bytes spilled" in texts["resources"] and "ld.relaxed.sys.global.v4" in texts["ptx"]


@pytest.mark.parametrize("n", [2, 3])
def test_norms_that_are_gathered(n):
    x, r, w = whole(n, 3, 4), whole(n, 3, 4)[::-1], np.ones((n, 4), np.float32)
    y, s = row_posts.norms_posted.interpret(x, r, w, axis="x", eps=0.5, mesh={"x": n}, seed=n)
    np.testing.assert_array_equal(s, x + r)
    want = s / np.sqrt((s * s).mean(2, keepdims=True) + 0.5)
    np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-5)


@pytest.mark.parametrize("n", [2, 3])
def test_sums_of_experts(n):
    operands, want = expert_copies.of_devices(n)
    got = row_posts.sums_posted.interpret(*operands, axis="x", count=2, bn=4, mesh={"x": n}, seed=n)
    np.testing.assert_array_equal(got, want)


def test_which_rows_and_products_are_posted():
    """Not those that would not compile: short rows of 16 bits, and products with more programs than run at once."""
    found = {}

    def look(x):
        for n in (16, 32, 40, 4096, 20000):
            found[n] = posts.not_in_rows(jax.ShapeDtypeStruct((4, n), jnp.bfloat16), "x")
        for n in (1056, 4096):
            w = jax.ShapeDtypeStruct((n, 4096), jnp.bfloat16)
            rows = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
            found["product", n] = hopper_normed_sums.misfit_of_first(rows, w, "x")
            found["sums", n] = hopper_summed.misfit(rows, w, axis="x", tb=True)
        found["sums of few"] = hopper_summed.misfit(rows.update(shape=(16, 4096)), w, axis="x", tb=True)
        return x

    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    with jt.config(arch="sm_90", overlap=True):
        jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec), jnp.zeros(2))
    assert {n: why for n, why in found.items() if why} == {
        16: "rows are short", 32: "rows are short", 20000: "rows are long, or no whole lines",
        ("product", 1056): "its programs do not run at once", "sums of few": "there are 16 rows",
    }  # fmt: skip
    row = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = dict(axis="x", eps=1e-5, mesh={"x": 2}, target="cuda:sm_90")
    assert norms.posted_sum_of_row.lower(row(1, 40), row(1, 40), row(40), **options).texts["ptx"]


@pytest.mark.parametrize(("m", "tb"), [(64, False), (40, True), (17, False)])
def test_products_of_few_rows_compile(m, tb):
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = dict(axis="x", bn=32, slots=8, tb=tb, mesh={"x": 2}, target="cuda:sm_90")
    w = of(4096, 1024) if tb else of(1024, 4096)
    ptx = hopper_summed.summed_rows.lower(of(m, 1024), w, **options).texts["ptx"]
    assert "JT_POLL" in ptx and "wgmma" in ptx


def test_machine_code():
    """Nothing of a row waits for what was stored; only whoever receives waits."""
    row = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = dict(axis="x", eps=1e-5, mesh={"x": 2}, target="cuda:sm_90")
    with jt.config(arch="sm_90"):
        ptx = norms.posted_sum_of_row.lower(row(1, 1024), row(1, 1024), row(1024), **options).texts["ptx"]
    assert "fence" not in ptx[: ptx.index("JT_POLL")] and "griddepcontrol.wait" in ptx
