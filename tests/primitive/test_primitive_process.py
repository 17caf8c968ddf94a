"""What holds across processes and devices: equal bytes, caches that hit, shard_map on eight devices, costs."""

import sys
import textwrap

import forked
import jax
import pytest

from jtile.ffi import library_path

KERNELS = """
import jax, jax.numpy as jnp, numpy as np, sys, time
import jtile as jt

@jt.kernel(out_type=lambda a, b, **_: jt.like(a), grid=lambda a, b, *, bm, **_: jt.cdiv(a.shape[0], bm), init=0)
def add(a, b, o, *, bm=64):
    i = jt.program_id(0)
    A, B, O = a.tiles(bm), b.tiles(bm), o.tiles(bm)
    O[i] = A[i] + B[i]

@jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x, shape=())), grid=1)
def softmax(x, o, m):
    row = x[...]
    jt.assert_(jnp.isfinite(row).all(), "finite")
    e = jnp.exp(row - row.max())
    o[...] = e / e.sum()
    m[...] = row.max()

@jt.kernel(out_type=lambda x, w: jt.like(x), grid=1)
def scale(x, w, o):
    o[...] = x[...] * w[...]

x = jnp.arange(200, dtype=jnp.float32)

def calls(f):
    # how many functions f calls, built-in ones included: its cost, whatever the machine
    seen = []
    sys.setprofile(lambda frame, event, of: seen.append(of) if event in ("call", "c_call") else None)
    try:
        f()
    finally:
        sys.setprofile(None)
    return len(seen)
"""


@pytest.fixture
def child(tmp_path, subprocess_env):
    """Runs code after KERNELS in a fresh Python; gives the last line that it prints."""
    script = tmp_path / "child.py"  # a file, so that the kernels have source

    def run(code, devices=1, **environment):
        flags = f"{subprocess_env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        script.write_text(KERNELS + textwrap.dedent(code))
        env = subprocess_env | {"XLA_FLAGS": flags.strip()} | environment
        done = forked.run([sys.executable, script], env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1] if done.stdout else ""

    return run


def test_lowering_is_the_same_in_every_process(child, tmp_path):
    code = """
    import hashlib
    f = jax.jit(lambda x: (add(x, x), softmax(x), softmax.with_options(num_warps=4)(x)))
    print(hashlib.sha256(f.lower(x).as_text().encode()).hexdigest(), softmax.lower(x).program.fingerprint)
    """
    seen = {child(code, PYTHONHASHSEED=seed, JTILE_CACHE_DIR=str(tmp_path / f"cache{seed}")) for seed in ("1", "4711")}
    assert len(seen) == 1


def test_a_second_process_loads_kernels_without_llvm(child):
    code = """
    t = time.perf_counter()
    got = np.asarray(add(x, x)), float(softmax(x)[0].sum())
    assert (got[0] == 2 * np.arange(200)).all() and abs(got[1] - 1) < 1e-6
    from jtile.lowering import registry
    print("llvmlite" in sys.modules)
    """
    assert child(code) == "True"
    assert child(code) == "False"


LOAD = """
from jtile.primitive.lowering import compile_piece
from jtile.lowering import registry, targets
program = softmax.lower(x).program
target = targets.host_target()
compile_piece(program, 0, target)
registry.forget()
print(calls(lambda: compile_piece(program, 0, target)))
"""


def test_a_kernel_loads_with_few_calls(child):
    # a compilation takes some forty thousand; `python -m benchmarks cpu --only overhead` measures the time
    child(LOAD)
    assert int(child(LOAD)) < 450


def test_the_persistent_compilation_cache_hits_in_a_second_process(child, tmp_path):
    code = f"""
    events = []
    jax.monitoring.register_event_listener(lambda name, **kw: events.append(name))
    jax.config.update("jax_compilation_cache_dir", {str(tmp_path / "xla")!r})
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from jax.experimental.compilation_cache import compilation_cache
    compilation_cache.reset_cache()
    events.clear()
    got = jax.jit(lambda x: add(x, x) * 2)(x)
    assert (got == 4 * x).all()
    print(events.count("/jax/compilation_cache/cache_hits") > 0)
    """
    assert child(code) == "False"
    assert child(code) == "True"


SHARDED = """
from functools import partial
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
assert jax.device_count() == 8
X = jnp.arange(64, dtype=jnp.float32).reshape(16, 4)
W = jnp.arange(1, 5, dtype=jnp.float32).reshape(1, 4)
shard = partial(jax.shard_map, mesh=mesh)
"""


def test_shard_map_tracks_what_a_result_varies_over(child):
    code = (
        SHARDED
        + """
for interpret in (False, True):
    k = scale.with_options(interpret=interpret)
    for wrap in (lambda f: f, jax.jit):
        got = wrap(shard(k, in_specs=(P(("d", "e")), P()), out_specs=P(("d", "e"))))(X, W)
        assert (got == X * W).all()
    # operands that vary over different axes: the result varies over both
    seen = []
    def look(x, w):
        seen.append(jax.typeof(k(x, w)).manual_axis_type.varying)
        return k(x, w)
    rows = jnp.concatenate([W, 2 * W])
    got = jax.jit(shard(look, in_specs=(P("d"), P("e")), out_specs=P(("d", "e"))))(X, rows)
    assert seen[0] == {"d", "e"}, seen
    loop = lambda x, w: jax.lax.scan(lambda c, _: (k(c, w), None), x, None, length=3)[0]
    got = jax.jit(shard(loop, in_specs=(P("d"), P()), out_specs=P("d")))(X, W)
    assert (got == X * W**3).all()
    constant = np.ones((1, 4), np.float32)
    got = jax.jit(shard(lambda x: k(x, constant), in_specs=P("d"), out_specs=P("d")))(X)
    assert (got == X).all()
    # a result that varies must not pass as replicated
    for spec in (P(), P("e")):
        try:
            shard(k, in_specs=(P("d"), P()), out_specs=spec)(X, W)
        except ValueError as e:
            assert "replication" in str(e), e
        else:
            raise AssertionError("a wrong out_specs was accepted")
    got = jax.jit(shard(k, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False))(X, W)
    assert (got == X * W).all()
print("done")
"""
    )
    assert child(code, devices=8) == "done"


def test_gradients_under_shard_map_equal_the_unsharded_ones(child):
    # Through a user's custom_vjp for now: the psum over devices comes from the cast of the replicated weight.
    code = (
        SHARDED
        + """
@jax.custom_vjp
def product(x, w):
    return scale(x, w)
product.defvjp(lambda x, w: (scale(x, w), (x, w)), lambda r, g: (scale(g, r[1]), scale(g, r[0]).sum(0, keepdims=True)))

def layer(x, w):
    w = jax.lax.pcast(w, ("d", "e"), to="varying")
    return product(x, w)

sharded = shard(layer, in_specs=(P(("d", "e")), P()), out_specs=P(("d", "e")))
loss = lambda f, x, w: (f(x, w) ** 2).sum()
for wrap in (lambda f: f, jax.jit):
    got = wrap(jax.grad(partial(loss, sharded), argnums=(0, 1)))(X, W)
    expected = jax.grad(partial(loss, lambda x, w: x * w), argnums=(0, 1))(X, W)
    for g, e in zip(got, expected):
        np.testing.assert_allclose(g, e, rtol=1e-6)
print("done")
"""
    )
    assert child(code, devices=8) == "done"


def test_vmap_inside_and_around_shard_map(child):
    code = (
        SHARDED
        + """
@jt.kernel(out_type=lambda x, d: jt.like(d), alias={"d": "o"}, grid=1)
def add_to(x, d, o):
    o[...] = o[...] + x[...]

B = jnp.stack([X, X + 1, 2 * X, -X])
for check in (True, False):
    over = partial(shard, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check)
    inside = shard(jax.vmap(scale, (0, None)), in_specs=(P(None, "d"), P()), out_specs=P(None, "d"), check_vma=check)
    for wrap in (lambda f: f, jax.jit):
        for f in (inside, jax.vmap(over(scale), (0, None)), jax.vmap(over(scale), (0, None), spmd_axis_name="e")):
            assert (wrap(f)(B, W) == B * W[None]).all()
        shared = jax.vmap(over(scale), (None, 0), spmd_axis_name="e")
        weights = jnp.stack([W, 2 * W])
        assert (wrap(shared)(X, weights) == X[None] * weights).all()
        # an aliased operand that all lanes share, and that varies over fewer axes
        f = jax.vmap(over(add_to), (0, None), spmd_axis_name="e")
        assert (wrap(f)(B, X[:4]) == B + jnp.tile(X[:4], (4, 1))[None]).all()
explicit = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
with jax.set_mesh(explicit):
    b = jax.device_put(B, jax.sharding.NamedSharding(explicit, P("d")))
    for name in (None, "d"):
        f = jax.vmap(scale, (0, None), spmd_axis_name=name)
        for got in (f(b, W), jax.jit(f)(b, W)):
            assert (np.asarray(got) == np.asarray(B) * np.asarray(W)[None]).all()
print("done")
"""
    )
    assert child(code, devices=8) == "done"


def test_sharded_operands_under_jit_and_explicit_axes(child):
    code = (
        SHARDED
        + """
from jax.sharding import NamedSharding
x = jax.device_put(X, NamedSharding(mesh, P("d")))
assert (jax.jit(scale)(x, W) == X * W).all() and (scale(x, W) == X * W).all()
explicit = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    x = jax.device_put(X, NamedSharding(explicit, P("d")))
    w = jax.device_put(W, NamedSharding(explicit, P()))
    for got in (scale(x, w), jax.jit(scale)(x, w)):
        assert (np.asarray(got) == np.asarray(X * W)).all()
x = jax.device_put(X, jax.devices()[3])
assert scale(x, jax.device_put(W, jax.devices()[3])).devices() == {jax.devices()[3]}
print("done")
"""
    )
    assert child(code, devices=8) == "done"


COST = """
y = jnp.ones(200)
for _ in range(3):
    scale(x, y).block_until_ready()
print(calls(lambda: scale(x, y)))
"""


def test_an_eager_call_takes_few_calls(child):
    # `python -m benchmarks cpu --only overhead` measures the time
    assert int(child(COST)) < 130


CHAIN = """
def chain(x, y):
    for _ in range(100):
        x = scale(x, y)
    return x
compiled = jax.jit(chain).lower(x, jnp.ones(200)).compile()
text = compiled.as_text()
entry = text[text.index("ENTRY"):]
print(*(entry.count(f" {op}(") for op in ("custom-call", "copy", "fusion", "call", "while")))
"""


def test_a_kernel_inside_a_program_costs_one_call_and_nothing_else(child):
    # `python -m benchmarks cpu --only overhead` measures the time
    assert child(CHAIN) == "100 0 0 0 0"


def test_the_library_is_there():
    assert library_path().exists()
    assert jax.devices("cpu")
