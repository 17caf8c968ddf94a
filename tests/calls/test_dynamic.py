"""Dynamic dimensions: one image for every size, the sizes that tile steps divide, transforms, export, errors."""

from __future__ import annotations

import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import tiled_matmul

import jtile as jt
from jtile import ir
from jtile.errors import KernelTypeError, KernelValueError

pytestmark = pytest.mark.usefixtures("by_numpy")

matmul = tiled_matmul(16, 32, 8, stages=3)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: x.shape[0])
def softmax(x, o, *, block=32):
    # two passes over a row of any length
    i, X, O = jt.program_id(0), x.tiles(None, block, pad=-jnp.inf), o.tiles(None, block)
    m, s = jnp.float32(-jnp.inf), jnp.float32(0)
    for k in jt.range(X.shape[1]):
        t = X[i, k]
        new = jnp.maximum(m, t.max())
        s = s * jnp.exp(m - new) + jnp.exp(t - new).sum()
        m = new
    for k in jt.range(X.shape[1]):
        O[i, k] = jnp.exp(X[i, k] - m) / s


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, block: jt.cdiv(x.shape[0], block))
def scale(x, o, *, block=64):
    # what a size is for the body: an int for comparisons that hold for all sizes, a scalar elsewhere
    i, n = jt.program_id(0), x.shape[0]
    assert n == o.shape[0] and n >= 1
    rows = i * block + jnp.arange(block)
    t = x.tiles(block)[i] * n
    if i == jt.cdiv(n, block) - 1:
        t = t + 1.0
    t = t + jnp.where(rows < n - 1, 0.0, 5.0).astype(x.dtype) + x[-1] + x[n - 1]
    o.tiles(block)[i] = t


def scaled(x, block=64):
    n = len(x)
    last = np.arange(n) >= (-(-n // block) - 1) * block
    return x * np.float32(n) + last.astype("f") + np.where(np.arange(n) < n - 1, 0, 5).astype("f") + 2 * x[-1]


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("f")


def soft(x):
    e = np.exp(x - x.max(-1, keepdims=True))  # NumPy: JAX would compile the reference for every size
    return e / e.sum(-1, keepdims=True)


def static_bits(kernel, *args):
    return np.asarray(kernel(*args)).tobytes()


# -- images ----------------------------------------------------------------------------------------------------------


def test_two_images_serve_fifty_lengths(compilations):
    for n in range(1, 51):
        x = normal(n, 24)
        np.testing.assert_allclose(matmul(jt.dynamic(x, 0), normal(24, 40)), x @ normal(24, 40), atol=1e-4)
    assert compilations == ["matmul", "matmul"]  # any length, and multiples of 16


def test_one_image_serves_all_lengths_without_tiles_along_them(compilations):
    for n in range(1, 51, 4):
        x = normal(n, 40)
        np.testing.assert_allclose(softmax(jt.dynamic(x)), soft(x), atol=1e-6)
    assert compilations == ["softmax"]


def test_derivatives_of_many_lengths_share_images(compilations):
    last = softmax.with_options(dynamic={"x": 0})
    grad = jax.jit(jax.grad(lambda a, b: (last(matmul(jt.dynamic(a), b)) ** 2).sum(), (0, 1)))
    for n in (3, 5, 11, 16, 32):
        da, db = grad(normal(n, 24), normal(24, 32))
        assert np.isfinite(da).all() and np.isfinite(db).all()
    # matmul for any length, and for multiples of 16; its derivative is two kernels
    assert sorted(compilations) == ["matmul"] * 2 + ["matmul_vjp"] * 2 + ["matmul_vjp_b_bar"] * 2 + [
        "softmax",
        "softmax_vjp",
    ]


def test_a_length_in_the_middle_and_jit(compilations):
    step = jax.jit(lambda x, w: softmax(matmul(jt.dynamic(x, (0, 1)), jt.dynamic(w, 0))))
    for m, k in [(3, 5), (16, 8), (33, 64), (1, 2), (48, 40)]:
        a, b = normal(m, k), normal(k, 32)
        np.testing.assert_allclose(step(a, b), soft(a @ b), atol=1e-5)
    assert compilations.count("matmul") == 2


def test_the_same_bits_as_static_code():
    for m, k, n in [(1, 1, 1), (16, 8, 32), (17, 9, 33), (5, 30, 64)]:
        a, b = normal(m, k), normal(k, n)
        marked = matmul(jt.dynamic(a, (0, 1)), jt.dynamic(b, (0, 1)))
        assert np.asarray(marked).tobytes() == static_bits(matmul, a, b), (m, k, n)
        assert np.asarray(softmax(jt.dynamic(a, (0, 1)))).tobytes() == static_bits(softmax, a)


def test_sizes_that_the_tiles_divide_have_no_edge():
    text = lambda n: ir.print_kernel(_optimised(matmul.lower(jt.dynamic(normal(n, 24), 0), normal(24, 64)).program))
    assert text(20).count("checked=false") == 1  # of b, which is static
    assert text(32).count("checked=false") == 3
    assert "ref<{16*a_0}x24xf32>" in text(32) and text(48) == text(32)


def _optimised(program):
    from jtile import passes

    return passes.run_pipeline(program.kernel, passes.TILE)


def test_a_size_in_the_body():
    for n in (1, 2, 63, 64, 65, 128, 200):
        x = normal(n)
        np.testing.assert_allclose(scale(jt.dynamic(x)), scaled(x), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(scale.interpret(jt.dynamic(x)), scaled(x), rtol=1e-5, atol=1e-5)


def test_an_empty_dimension_is_static():
    assert matmul(jt.dynamic(normal(0, 24), 0), normal(24, 40)).shape == (0, 40)
    assert softmax(jt.dynamic(normal(3, 0), 1)).shape == (3, 0)
    np.testing.assert_array_equal(matmul(jt.dynamic(normal(3, 0), (0, 1)), jt.dynamic(normal(0, 8), 0)), 0)


def test_the_decorator_marks_too(compilations):
    kernel = matmul.with_options(dynamic={"a": (0, 1), 1: {0: "k", -1: "n"}})
    for m, k, n in [(3, 5, 7), (4, 6, 8), (6, 6, 6)]:
        np.testing.assert_allclose(kernel(normal(m, k), normal(k, n)), normal(m, k) @ normal(k, n), atol=1e-4)
    assert len(compilations) <= 2  # 6, 6, 6: three dimensions that happen to agree


def test_a_pytree_of_arrays():
    @jt.kernel(out_type=lambda p: jt.like(p["x"]), grid=lambda p: jt.cdiv(p["x"].shape[0], 8), dynamic={"p": 0})
    def add(p, o):
        i = jt.program_id(0)
        o.tiles(8)[i] = p["x"].tiles(8)[i] + p["y"].tiles(8)[i]

    for n in (1, 8, 13):
        np.testing.assert_array_equal(add({"x": normal(n), "y": normal(n)}), 2 * normal(n))
    kernel = add.lower({"x": normal(13), "y": normal(13)}).program.kernel
    assert [str(v.type) for v in kernel.params] == ["ref<{p_x_0}xf32>", "ref<{p_x_0}xf32>", "ref<{p_x_0}xf32, out>"]


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "int4", "float8_e4m3fn"])
def test_dtypes(dtype):
    @jt.kernel(out_type=lambda x: jt.like(x, shape=(x.shape[1], x.shape[0])), grid=lambda x: jt.cdiv(x.shape[0], 8))
    def transpose(x, o):
        i = jt.program_id(0)
        for k in jt.range(jt.cdiv(x.shape[1], 8)):
            o.tiles(8, 8)[k, i] = x.tiles(8, 8)[i, k].T

    for shape in [(3, 5), (8, 16), (17, 9)]:
        x = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 3).astype(dtype)
        y = transpose(jt.dynamic(x, (0, 1)))
        assert (y.dtype, y.shape) == (x.dtype, shape[::-1])
        np.testing.assert_array_equal(np.asarray(y.astype(jnp.float32)), np.asarray(x.astype(jnp.float32)).T)


def test_start_values_and_aliases():
    @jt.kernel(out_type=lambda x, y: (jt.like(y), jt.like(x)), grid=lambda x, y: 1, alias={"y": "s"}, init={"t": 7})
    def first(x, y, s, t):
        s[jt.ds(0, 2)] = x[jt.ds(0, 2)]

    for n in (3, 10):
        s, t = first(jt.dynamic(normal(n)), jt.dynamic(np.ones(n, "f")))
        np.testing.assert_array_equal(s, [*normal(n)[:2], *[1] * (n - 2)])
        np.testing.assert_array_equal(t, 7)


def test_gather_scatter_and_atomics():
    @jt.kernel(out_type=lambda x, at: jt.like(x), grid=lambda x, at: at.shape[0], init=0, dynamic={"x": 0, "at": 0})
    def spread(x, at, o):
        i = jt.program_id(0)
        jt.atomic_add(o, (at[i], jt.ds(0, 4)), x[at[i], 0:4])

    for n, m in [(1, 3), (9, 5), (20, 20)]:
        at = np.random.default_rng(n).integers(0, n, m).astype("i")
        want = np.zeros((n, 4), "f")
        np.add.at(want, at, normal(n, 4)[at])
        np.testing.assert_allclose(spread(normal(n, 4), at), want, rtol=1e-5)


# -- transforms ------------------------------------------------------------------------------------------------------


def squares(fn):
    return lambda *args: (fn(*args) ** 2).sum()


def test_vmap_jvp_grad():
    f = lambda a, b: matmul(jt.dynamic(a, (0, 1)), jt.dynamic(b, 0))
    for m, k in [(5, 9), (16, 8)]:
        a, b = normal(m, k), normal(k, 24)
        many = np.stack([a, 2 * a])
        np.testing.assert_allclose(jax.vmap(f, in_axes=(0, None))(many, b), many @ b, atol=1e-4)
        np.testing.assert_allclose(jax.vmap(f, (2, None), 1)(many.transpose(1, 2, 0), b)[:, 1], 2 * a @ b, atol=1e-4)
        np.testing.assert_allclose(jax.jvp(f, (a, b), (a, b))[1], 2 * a @ b, atol=1e-4)
        got, want = (jax.grad(squares(fn), (0, 1))(a, b) for fn in (f, jnp.matmul))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


def test_inside_other_transforms():
    a, b = normal(6, 16), normal(16, 32)
    f = lambda x: matmul(jt.dynamic(x, (0, 1)), b)
    rows = jax.sharding.PartitionSpec("d")
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    shards = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)
    want = jax.grad(lambda x: ((x @ b) ** 2).sum())(a)
    for fn in (jax.checkpoint(f), shards, lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x[None])[1][0]):
        np.testing.assert_allclose(jax.jit(jax.grad(squares(fn)))(a), want, rtol=1e-4, atol=1e-3)
    many = np.stack([a, 2 * a])
    np.testing.assert_allclose(jax.vmap(jax.grad(squares(f)))(many), [want, 2 * want], rtol=1e-4, atol=1e-3)
    marked = jax.vmap(matmul, in_axes=(0, None))(jt.dynamic(many), b)  # axis 0 of one example
    np.testing.assert_allclose(marked, many @ b, atol=1e-4)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_the_interpreter_behind_a_call(jit):
    kernel = jit(matmul.with_options(interpret=True))
    np.testing.assert_allclose(kernel(jt.dynamic(normal(5, 9)), normal(9, 8)), normal(5, 9) @ normal(9, 8), atol=1e-5)


def test_prints_and_asserts(capfd):
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8), dynamic={"x": 0})
    def shown(x, o):
        i = jt.program_id(0)
        jt.print("of {}", jnp.asarray(x.shape[0]))
        jt.assert_(i * 8 < x.shape[0] - 1, "the last one")
        o.tiles(8)[i] = x.tiles(8)[i]

    shown(normal(10))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[shown (0, 0, 0)] of 10", "[shown (1, 0, 0)] of 10"]
    with pytest.raises(jt.errors.KernelAssertionError, match=r"the last one \(program \(1, 0, 0\)\)"):
        shown(normal(9))


def test_a_reverse_rule_of_the_users():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8), dynamic={"x": 0})
    def double(x, o):
        i = jt.program_id(0)
        o.tiles(8)[i] = x.tiles(8)[i] * 2

    double.defvjp(lambda x: (double(x), x), lambda x, ct: (ct * x,))
    for n in (3, 8):
        np.testing.assert_allclose(jax.grad(lambda x: double(x).sum())(normal(n)), normal(n))


# -- export ----------------------------------------------------------------------------------------------------------


def test_export_over_a_symbolic_batch_with_its_derivative():
    pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export needs, is not installed")
    from jax import export

    (b,) = export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct
    f = jax.jit(lambda a, w: softmax(matmul(a, w)))
    exported = export.export(f, disabled_checks=jt.export_checks())(spec((b, 24), "f"), spec((24, 40), "f"))
    again = export.deserialize(exported.serialize(vjp_order=1))
    for n in (3, 16):
        a, w, ct = normal(n, 24), normal(24, 40), normal(n, 40)
        np.testing.assert_allclose(again.call(a, w), soft(a @ w), atol=1e-5)
        got, want = (jax.vjp(fn, a, w)[1](ct) for fn in (again.call, lambda a, w: jax.nn.softmax(a @ w)))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


FRESH = """
import sys
sys.modules["llvmlite"] = None  # nothing can be compiled here
import jax, jax.export, numpy as np, jtile
exported = jax.export.deserialize(open("program", "rb").read())
for n in (1, 7, 64, 300):
    x, w, u = (np.load(f"{name}{n}.npy") for name in "xwu")
    np.testing.assert_allclose(exported.call(x, w, u), np.load(f"y{n}.npy"), atol=1e-5)
print("done")
"""


def test_the_library_over_a_symbolic_batch_in_a_fresh_process(tmp_path):
    pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export needs, is not installed")
    from jax import export

    from jtile import ops

    (b,) = export.symbolic_shape("b")
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, "f")
    f = jax.jit(lambda x, w, u: ops.softmax(ops.matmul(ops.rms_norm(x, w), u)))
    exported = export.export(f, disabled_checks=jt.export_checks())(spec(b, 32), spec(32), spec(32, 48))
    (tmp_path / "program").write_bytes(exported.serialize())
    for n in (1, 7, 64, 300):
        x, w, u = normal(n, 32), normal(32), normal(32, 48)
        y = soft(x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w @ u)
        for name, value in zip("xwuy", (x, w, u, y), strict=True):
            np.save(tmp_path / f"{name}{n}.npy", value)
    command = [sys.executable, "-c", FRESH]
    done = forked.run(command, cwd=tmp_path)
    assert done.stdout.strip() == "done", done.stderr


def test_export_of_vmap_over_a_symbolic_axis():
    from jax import export

    b, n = export.symbolic_shape("b, 16*n")
    spec = jax.ShapeDtypeStruct((b, n, 24), "f")
    f = jax.jit(jax.vmap(matmul, in_axes=(0, None)))
    exported = export.export(f, disabled_checks=jt.export_checks())(spec, jax.ShapeDtypeStruct((24, 64), "f"))
    for shape in [(1, 16, 24), (3, 48, 24)]:
        np.testing.assert_allclose(
            exported.call(normal(*shape), normal(24, 64)), normal(*shape) @ normal(24, 64), atol=1e-4
        )


# -- errors ----------------------------------------------------------------------------------------------------------


def failing(body, **spec):
    given = {"out_type": lambda x: jt.like(x), "grid": lambda x: 1} | spec
    return jt.call(body, **given)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x, o: o.__setitem__(slice(None), x[:]), "static"),
        (lambda x, o: x[...], "static"),
        (lambda x, o: x[jt.ds(0, x.shape[0])], "static"),
        (lambda x, o: x.tiles(x.shape[0]), "static"),
        (lambda x, o: jt.zeros(x.shape), "static"),
        (lambda x, o: jt.arange(x.shape[0]), "static"),
        (lambda x, o: len(x), r"shape\[0\]"),
        (lambda x, o: [x[k] for k in range(x.shape[0])], "dynamic"),
        (lambda x, o: x[0] if x.shape[0] > 5 else x[1], "dynamic"),
        (lambda x, o: x[[-1, 0]], "dynamic"),
    ],
)
def test_bodies_that_need_a_static_size(body, words):
    with pytest.raises((KernelTypeError, KernelValueError), match=words) as e:
        failing(body)(jt.dynamic(normal(20)))
    assert __file__ in str(e.value)


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ({"grid": lambda x: 1 if x.shape[0] > 8 else 2}, KernelTypeError, "asks for the size"),
        ({"grid": lambda x: int(x.shape[0])}, KernelTypeError, "asks for the size"),
        ({"grid": lambda x: 1 if x.shape[0] == 20 else 2}, KernelTypeError, "grid of kernel body gives"),
        ({"out_type": lambda x: jt.like(x, shape=(3 if x.shape[0] == 20 else 4,))}, KernelTypeError, "out_type of"),
        ({"dynamic": {"y": 0}}, KernelValueError, "which is no input"),
        ({"dynamic": {"x": 1}}, KernelValueError, "none of its 1 axes"),
        ({"dynamic": {"x": "n"}}, KernelTypeError, "a dynamic axis is an int"),
        ({"dynamic": {"x": {0: "a b"}}}, KernelTypeError, "identifier"),
        ({"dynamic": 0}, KernelTypeError, "expected a dict"),
    ],
)
def test_specifications_that_do_not_fit(spec, kind, words):
    def body(x, o):
        o[0] = x[0]

    with pytest.raises(kind, match=words):
        failing(body, **spec)(jt.dynamic(normal(20)))


def test_a_meta_parameter_is_no_size():
    with pytest.raises(KernelTypeError, match=r"'bm' of kernel matmul is n, a size that is known only when"):
        jax.export.export(jax.jit(lambda a: matmul(a, np.ones((4, 4), "f"), bm=a.shape[0])))(
            jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), "f")
        )


def test_names_must_agree():
    with pytest.raises(KernelValueError, match=r"'k' .* has 3 elements in one argument and 4 in another"):
        matmul(jt.dynamic(normal(2, 3), {1: "k"}), jt.dynamic(normal(4, 2), {0: "k"}))


def test_scratch_of_dynamic_size_is_refused():
    kernel = jt.call(
        lambda x, o, s: (s.__setitem__(1, x[0]), o.__setitem__(0, s[1]))[:0] or None,
        out_type=lambda x: jt.like(x),
        scratch=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    )
    with pytest.raises(jt.errors.UnsupportedError, match="no memory of dynamic size"):
        kernel(jt.dynamic(normal(4)))
