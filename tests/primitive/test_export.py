"""Programs that outlive their process: jax.export and serialised executables, read where there is neither llvmlite nor
the source of a kernel."""

import os
import pickle
import sys

import ascend_texts
import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import jtile as jt
from jtile import ops

export = pytest.importorskip("jax.export")
pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export needs, is not installed")


@jt.kernel(out_type=lambda a, b, **_: jt.like(a), grid=lambda a, b, *, bm, **_: jt.cdiv(a.shape[0], bm), init=0)
def add(a, b, o, *, bm=3):
    i = jt.program_id(0)
    A, B, O = a.tiles(bm), b.tiles(bm), o.tiles(bm)
    O[i] = A[i] + B[i]


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def positive(x, o):
    i = jt.program_id(0)
    jt.assert_(x[i] > 0, "x is positive")
    jt.print("x is {}", x[i])
    o[i] = x[i]


@jt.kernel(
    out_type=lambda x, total: (jt.like(x), jt.like(total)), alias={"total": "sum_"}, grid=lambda x, total: x.shape[0],
    scratch=jax.ShapeDtypeStruct((2,), jnp.float32),
)  # fmt: skip
def accumulate(x, total, y, sum_, mine):
    i = jt.program_id(0)
    mine[:] = jnp.stack([x[i], -2 * x[i]])
    y[i] = mine[:].sum()
    jt.atomic_add(sum_, (), x[i])


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def first(x, o):
    o[0] = x[0]


@jt.kernel(out_type=jax.ShapeDtypeStruct((3,), jnp.int32), grid=3)
def counted(o):
    o[jt.program_id(0)] = jt.program_id(0)


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def doubled(x, o):
    o[...] = x[...] + x[...]


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape, np.float32))


X = jnp.arange(1, 9, dtype=jnp.float32)
loss = lambda a, b: (ops.matmul(a, b) ** 2).sum()
# name -> (function, arguments)
PROGRAMS = {
    "add": (lambda a: add(a, a) + 1, [X]),
    "library": (lambda q: ops.softmax(ops.rms_norm(q, jnp.ones(q.shape[-1]))), [normal(4, 33)]),
    "attention": (lambda q: ops.attention(q, q, q, causal=True), [normal(2, 40, 2, 8)]),
    "vmap": (jax.vmap(jax.vmap(ops.matmul, (0, None)), (None, 0)), [normal(3, 5, 6), normal(2, 6, 7)]),
    "alias, scratch, atomics": (accumulate, [X, jnp.float32(0.5)]),
    "bfloat16": (doubled, [normal(9, 3).astype("bfloat16")]),
    "int4": (doubled, [jnp.array([1, -3, 2, 0, 3], jnp.int4)]),
    "float8": (doubled, [jnp.array([1, -3, 2], jnp.float8_e4m3fn)]),
    "no operands": (lambda x: counted() + x, [jnp.int32(4)]),
    "no programs": (lambda x: add(x, x), [jnp.zeros((0,))]),
    "loop": (lambda x: jax.lax.scan(lambda c, _: (add(c, x), c[0]), x, None, length=3), [X]),
    "branch": (lambda x: jax.lax.cond(x[0] > 0, lambda x: add(x, x), lambda x: x, x), [X]),
    "effects": (lambda x: (positive(x), x * 2)[1], [X]),
    "gradient": (jax.grad(loss, argnums=(0, 1)), [normal(6, 5), normal(5, 4)]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds what this process writes: `*.exported`, `*.compiled`, and the arguments."""
    path = tmp_path_factory.mktemp("programs")
    for k, (f, args) in enumerate(PROGRAMS.values()):
        exported = export.export(jax.jit(f), disabled_checks=jt.export_checks())(*args)
        (path / f"{k}.exported").write_bytes(exported.serialize())
        compiled = jax.jit(f).lower(*args).compile()
        (path / f"{k}.compiled").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
        (path / f"{k}.args").write_bytes(pickle.dumps(jax.tree.map(np.asarray, args)))
    reverse = export.export(jax.jit(loss), disabled_checks=jt.export_checks())(normal(6, 5), normal(5, 4))
    (path / "reverse").write_bytes(reverse.serialize(vjp_order=1))
    (path / "reverse.args").write_bytes(pickle.dumps([np.asarray(normal(6, 5)), np.asarray(normal(5, 4))]))
    (b,) = export.symbolic_shape("b")
    several = export.export(jax.jit(jax.vmap(doubled)), disabled_checks=jt.export_checks())
    (path / "symbolic").write_bytes(several(jax.ShapeDtypeStruct((b, 3), jnp.float32)).serialize())
    for poison in (False, True):
        with jt.config(poison=poison):
            exported = export.export(jax.jit(first), disabled_checks=jt.export_checks())(X)
        (path / f"poison {poison}").write_bytes(exported.serialize())
    return path


READER = """
import sys
sys.modules["llvmlite"] = sys.modules["triton"] = None
import pickle, jax, jax.numpy as jnp, numpy as np
import jtile
from jax import export
from jax.experimental import serialize_executable

read = lambda name: open(name, "rb").read()
results = {}
for k in range(int(sys.argv[1])):
    args = [jnp.asarray(x) for x in pickle.loads(read(f"{k}.args"))]
    results["exported", k] = export.deserialize(read(f"{k}.exported")).call(*args)
    jitted = jax.jit(export.deserialize(read(f"{k}.exported")).call)
    results["under jit", k] = jitted(*args)
    loaded = serialize_executable.deserialize_and_load(*pickle.loads(read(f"{k}.compiled")))
    results["compiled", k] = loaded(*args)

args = [jnp.asarray(x) for x in pickle.loads(read("reverse.args"))]
f = export.deserialize(read("reverse"))
results["reverse"] = f.vjp().call(*args, jnp.float32(2))
results["grad"] = jax.grad(f.call, argnums=(0, 1))(*args)
several = export.deserialize(read("symbolic"))
results["symbolic"] = [several.call(jnp.ones((n, 3))) for n in (1, 4, 70)]
for poison in (False, True):
    results["poison", poison] = export.deserialize(read(f"poison {poison}")).call(jnp.ones(8))
name = int(sys.argv[2])
failing = export.deserialize(read(f"{name}.exported"))
try:
    jax.block_until_ready(failing.call(-jnp.ones(8)))
    jax.effects_barrier()
except Exception as e:
    results["failed"] = str(e)
late = [m for m in ("jtile.trace", "jtile.primitive.jtile_call", "jtile.lowering") if m in sys.modules]
assert not late, late
array = lambda x: np.asarray(x) if isinstance(x, jax.Array) else x
results = {k: jax.tree.map(array, v) for k, v in results.items()}
pickle.dump(results, open("results", "wb"))
"""


@pytest.fixture(scope="module")
def results(folder):
    """What a fresh process makes of the folder, where `import jtile` is all that it does for it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JTILE_")}
    env |= {"JTILE_CACHE_DIR": ""}
    effects = list(PROGRAMS).index("effects")
    command = [sys.executable, "-c", READER, str(len(PROGRAMS)), str(effects)]
    done = forked.run(command, cwd=folder, env=env, fresh=True)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "results").read_bytes()) | {"printed": done.stdout}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fresh_process_gets_the_same_results(results, name):
    f, args = PROGRAMS[name]
    expected = jax.tree.map(np.asarray, jax.jit(f)(*args))
    for kind in ("exported", "under jit", "compiled"):
        got = results[kind, list(PROGRAMS).index(name)]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def test_prints_and_asserts_work_there(results):
    assert results["printed"].count("[positive (7, 0, 0)] x is 8.0") == 3
    assert "kernel positive: assertion failed: x is positive" in results["failed"]
    assert "test_export.py" in results["failed"]


def test_reverse_mode_of_an_exported_program(results):
    a, b = normal(6, 5), normal(5, 4)
    expected = jax.grad(loss, argnums=(0, 1))(a, b)
    for g, h, e in zip(results["reverse"], results["grad"], expected, strict=True):
        np.testing.assert_allclose(g, 2 * e, rtol=1e-5)
        np.testing.assert_allclose(h, e, rtol=1e-5)


def test_a_symbolic_batch(results):
    for n, got in zip((1, 4, 70), results["symbolic"], strict=True):
        np.testing.assert_array_equal(got, np.full((n, 3), 2))


def test_poison_is_a_matter_of_the_exporting_process(folder, results):
    text = lambda poison: str(export.deserialize((folder / f"poison {poison}").read_bytes()).mlir_module())
    assert "poison = " in text(True)
    assert "poison = " not in text(False)  # what its memory holds then is undefined
    assert np.isnan(results["poison", True][1:]).all()
    assert results["poison", True][0] == results["poison", False][0] == 1


# -- what cannot be exported ----------------------------------------------------------------------------------------


def test_export_checks_name_every_target():
    targets = [
        "jtile_cpu",
        "jtile_cpu_devices",
        "jtile_cpu_graph",
        "jtile_cpu_graph_devices",
        "jtile_cuda",
        "jtile_cuda_io",
        "jtile_rocm",
        "jtile_rocm_io",
        "jtile_ascend",
    ]
    assert jt.export_checks() == [export.DisabledSafetyCheck.custom_call(name) for name in targets]
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        export.export(jax.jit(first))(X)


def test_a_callback_kernel():
    for f in (first.with_options(interpret=True), jax.vmap(first.with_options(interpret=True))):
        with pytest.raises(jt.errors.TransformError, match="kernel first runs in the interpreter") as e:
            export.export(jax.jit(f), disabled_checks=jt.export_checks())(X[None])
        assert "without interpret=True" in str(e.value)
        assert "def first" in str(e.value)
    with jt.config(interpret=True), pytest.raises(jt.errors.TransformError, match=r"jax\.export cannot store"):
        export.export(jax.jit(lambda x: first(x)), disabled_checks=jt.export_checks())(X)


@pytest.mark.parametrize("platforms", [["cpu", "tpu"], ["tpu"]])
def test_platforms_without_a_compiler(platforms):
    make = export.export(jax.jit(first), disabled_checks=jt.export_checks(), platforms=platforms)
    with pytest.raises(jt.errors.UnsupportedError, match=f"cannot run on platform '{platforms[-1]}'") as e:
        make(X)
    assert "export it with platforms=['cpu']" in str(e.value)
    assert "def first" in str(e.value)


@pytest.mark.parametrize(("platform", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")])
def test_programs_for_gpus_that_are_not_here(platform, arch):
    with jt.config(arch=arch):
        make = export.export(jax.jit(PROGRAMS["gradient"][0]), disabled_checks=jt.export_checks(), platforms=[platform])
        exported = make(*PROGRAMS["gradient"][1])
    again = export.deserialize(exported.serialize())
    assert again.platforms == (platform,)
    assert str(again.mlir_module()).count(f"@jtile_{platform}") >= 3


def test_one_program_for_every_platform():
    platforms = ["cpu", "cuda", "rocm"]
    with jt.config(arch="sm_80,gfx942"):
        exported = export.export(jax.jit(first), disabled_checks=jt.export_checks(), platforms=platforms)(X)
    text = str(exported.mlir_module())
    assert all(f"@jtile_{name}(" in text for name in platforms)
    assert exported.call(jax.device_put(X, jax.devices("cpu")[0]))[0] == 1


def test_a_block_level_kernel_in_the_branch_of_its_platform():
    @jt.kernel(out_type=lambda x: x, grid=1)
    def copied(x, o):
        A, full = jt.alloc((64, 64), x.dtype), jt.barrier(1)
        with jt.role("all", warps=4):
            full[0].expect(A.nbytes)
            jt.async_copy(x.tiles(64, 64).at[0, 0], A, full[0])
            full[0].wait(0)
            jt.async_copy(A, o.tiles(64, 64).at[0, 0])
            jt.store_wait(0)

    x, double = jnp.ones((64, 64)), lambda x: 2 * x
    f = jax.jit(lambda x: jax.lax.platform_dependent(x, cuda=copied, default=double))
    with jt.config(arch="sm_90"):
        exported = export.export(f, disabled_checks=jt.export_checks(), platforms=["cpu", "cuda"])(x)
    assert "@jtile_cuda(" in str(exported.mlir_module())
    assert exported.call(jax.device_put(x, jax.devices("cpu")[0]))[0, 0] == 2


def test_tables_of_a_kernel_for_gpus_are_operands_of_its_calls():
    table = np.random.default_rng(0).integers(-8, 8, (64, 64)).astype(np.float32)

    @jt.kernel(out_type=lambda x: x, grid=(2,))
    def shifted(x, o):
        i = jt.program_id(0)
        o.tiles(64, 64)[i, 0] = x.tiles(64, 64)[i, 0] + jnp.asarray(table)

    x = jnp.ones((128, 64))
    assert (jax.jit(shifted)(x) == 1 + np.tile(table, (2, 1))).all()
    with jt.config(arch="sm_90", poison=False):
        make = export.export(
            jax.jit(lambda x: shifted(shifted(x))), disabled_checks=jt.export_checks(), platforms=["cuda"]
        )
        text = str(export.deserialize(make(x).serialize()).mlir_module())
    assert text.count("(tensor<128x64xf32>, tensor<64x64xf32>) -> tensor<128x64xf32>") == 2
    assert text.count("stablehlo.constant") == 1


@pytest.mark.cpu
@pytest.mark.parametrize("platforms", [["ascend"], ["cpu", "ascend"]])
def test_programs_for_ascend(monkeypatch, platforms):
    """JAX has no such platform, and exports for it: a call for an NPU, beside one for the CPU of whoever reads it."""
    ascend_texts.stored(monkeypatch)
    a = jnp.arange(10.0)
    f = jax.jit(lambda a: add(a * 2, a) + 1)
    with jt.config(arch="910b1"):
        exported = export.export(f, platforms=platforms, disabled_checks=jt.export_checks())(a)
    read = export.deserialize(exported.serialize())
    assert list(read.platforms) == platforms
    text = read.mlir_module()
    assert [text.count(f"@jtile_{p}(") for p in ("ascend", "cpu")] == [1, len(platforms) - 1]
    assert "Ascend910B1" in text
    assert "hivm.hir.set_flag" in text
    if "cpu" in platforms:
        np.testing.assert_array_equal(jax.jit(read.call)(a), a * 3 + 1)
    with pytest.raises(jt.errors.UnsupportedError, match=r"for an NPU that is named: set JTILE_ARCH=910b1"):
        export.export(f, platforms=platforms, disabled_checks=jt.export_checks())(a)
