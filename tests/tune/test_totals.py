"""`jt.cost`: kernels beside what XLA counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import tiled_matmul

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError

X = jnp.ones((64, 64))
CALL = 2 * 64**3  # operations of one product
BYTES = 4 * 64**2
matmul = tiled_matmul(64, 32, 16)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8), dynamic={"x": 0})
def sines(x, o):
    at = jt.program_id(0), 0
    o.tiles(8, 64)[at] = jnp.sin(x.tiles(8, 64)[at]) * 2


def xla(f, *args):
    found = jax.jit(f).lower(*args).cost_analysis()
    return tuple(found.get(name, 0.0) for name in ("flops", "transcendentals", "bytes accessed"))


def numbers(c):
    return c.flops, c.transcendentals, c.bytes


def test_xla_does_not_count_kernels():
    """If this fails, XLA has learned of custom calls, and `jt.cost` may ask it."""
    with jt.config(poison=False):
        assert xla(matmul, X, X) == (-1.0, 0.0, -1.0)


def test_a_kernel_alone():
    c = jt.cost(matmul, X, X)
    assert numbers(c.xla) == (0, 0, 0)
    assert (c.flops, c.transcendentals, c.bytes) == numbers(c.kernels[0].counts) == (CALL, 0, 3 * BYTES)
    assert (c.kernels[0].name, c.kernels[0].calls, c.exact) == (matmul.name, 1, True)


def test_kernels_and_the_rest():
    rest = lambda x: jnp.exp(x) @ x
    c = jt.cost(jax.jit(lambda x: rest(sines(x))), X)
    assert numbers(c.xla) == xla(rest, X)
    assert numbers(c.kernels[0].counts) == (64**2, 64**2, 2 * BYTES)
    assert numbers(c) == tuple(a + b for a, b in zip(numbers(c.xla), numbers(c.kernels[0].counts), strict=True))


def test_loops_count_as_often_as_they_run():
    """Kernels and XLA's part, also where one loop stands in another or in a call."""
    step = lambda c, _: (matmul(c, X) @ X, None)
    nest = lambda c, _: (jax.jit(lambda c: jax.lax.scan(step, c, None, length=3)[0])(c), None)
    c = jt.cost(lambda x: jax.lax.scan(nest, x, None, length=5)[0] + 1, X)
    assert (c.kernels[0].calls, len(c.kernels)) == (15, 1)
    assert c.xla.flops == 15 * CALL + 64**2
    assert c.flops == 30 * CALL + 64**2


def test_branches_and_while_loops():
    branch = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: matmul(x, x) @ x, lambda x: x, x)
    assert jt.cost(branch, X).xla.flops == pytest.approx(CALL, abs=4)
    loop = lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 0, lambda c: sines(c) @ X, x)
    c = jt.cost(loop, X)
    assert c.xla.flops == pytest.approx(CALL, abs=4)
    assert c.kernels[0].calls == 1


def test_derivatives_and_sizes():
    """A derivative is counted as the kernels that it is made of; of one program with dynamic sizes, each size."""
    g = jt.cost(jax.grad(lambda a, b: matmul(a, b).sum(), (0, 1)), X, X)
    assert sum(k.counts.flops * k.calls for k in g.kernels) in (2 * CALL, 3 * CALL)
    c = jt.cost(lambda x: (sines(x), sines(x[:8]), sines(x[8:16])), X)
    assert [(k.calls, k.counts.bytes) for k in c.kernels] == [(1, 2 * BYTES), (2, BYTES // 4)]
    assert jt.cost(sines, jax.ShapeDtypeStruct((128, 64), jnp.float32)).kernels[0].counts.bytes == 4 * BYTES


def test_a_batch_of_gradients_under_jit():
    """Kernels and what XLA computes between them: of five lanes, five times that of one."""
    gradient = jax.grad(lambda x: (jnp.exp(sines(x)) @ x).sum())
    one, five = jt.cost(gradient, X), jt.cost(jax.jit(jax.vmap(gradient)), jnp.ones((5, 64, 64)))
    assert [k.name for k in five.kernels] == [k.name for k in one.kernels] and len(one.kernels) == 2
    for few, many in zip(one.kernels, five.kernels, strict=True):
        assert numbers(many.counts) == tuple(5 * n for n in numbers(few.counts))
    assert numbers(five)[:2] == tuple(5 * n for n in numbers(one)[:2])


def test_guesses_and_the_table():
    @jt.kernel(out_type=lambda x, n: jt.like(x), grid=1)
    def repeated(x, n, o):
        acc = x[...]
        for _ in jt.range(n[...]):
            acc = jnp.sqrt(acc)
        o[...] = acc

    c = jt.cost(lambda x, n: repeated(x, n) * 2, X, jnp.int32(3))
    assert not c.exact
    lines = str(c).splitlines()
    assert lines[0].split() == ["calls", "flops", "transcendentals", "bytes"]
    assert [line.split()[0] for line in lines[1:]] == ["repeated", "XLA", "total"]
    assert lines[2].split() == ["XLA", "4,096", "0", f"{xla(lambda x: x * 2, X)[2]:,.0f}"]
    assert lines[3].split()[2].startswith("~")


@pytest.mark.cpu
def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    f = jax.shard_map(
        lambda x: jax.lax.psum(sines(x) @ X, "d"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
    )
    c = jt.cost(f, X)
    assert c.kernels[0].calls == 1
    assert c.xla.flops == pytest.approx(CALL, abs=64**2 + 4)


def test_what_is_no_function():
    with pytest.raises(KernelTypeError, match=r"jt.cost .* take a function and its arguments, got 3"):
        jt.cost(3)
    with pytest.raises(KernelTypeError, match=r"jt.cost .* outside of jax.jit"):
        jax.jit(lambda x: jt.cost(matmul, x, x))(X)


COUNTED = {
    "product": (matmul, (X, X)),
    "gradient": (jax.value_and_grad(lambda a, b: matmul(a, b).sum(), (0, 1)), (X, X)),
    "batch, of dynamic size": (jax.vmap(sines), (jnp.ones((3, 10, 64)),)),
    "integers": (ops.cumsum, (jnp.arange(60).reshape(6, 10),)),
    "complex numbers": (ops.fft, (jnp.ones((4, 32), jnp.complex64),)),
    "nothing": (matmul, (X[:0], X)),
}


@pytest.mark.parametrize("case", COUNTED)
def test_xla_counts_kernels_where_it_is_asked_to(case):
    """Before and after it compiles, with results as they are otherwise."""
    f, args = COUNTED[case]
    want, cost = f(*args), jt.cost(f, *args)
    with jt.config(cost_analysis=True, poison=False):
        assert jt.cost(f, *args) == cost
        lowered = jax.jit(f).lower(*args)
        compiled = lowered.compile()
        jax.tree.map(np.testing.assert_array_equal, compiled(*args), want)
    for found in (lowered.cost_analysis(), compiled.cost_analysis()):
        found = found or {}
        assert found.get("flops", 0) == pytest.approx(cost.flops, abs=16, rel=0.02)
        assert found.get("transcendentals", 0) == cost.transcendentals
        if case in ("product", "batch, of dynamic size"):
            moved = sum(x.nbytes for x in jax.tree.leaves((args, want)))
            assert moved <= found["bytes accessed"] <= moved + 1000


def test_what_xla_cannot_count():
    """A kernel that prints has an effect, which a branch may not have: it runs as it would."""

    @jt.kernel(out_type=lambda x: jt.like(x), grid=1)
    def prints(x, o):
        jt.print("sum {}", jnp.sum(x[...]))
        o[...] = x[...]

    with jt.config(cost_analysis=True, poison=False):
        assert xla(prints, X) == (-1.0, 0.0, -1.0)
        np.testing.assert_array_equal(jax.jit(prints)(X), X)
