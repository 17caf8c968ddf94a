"""Derivatives of kernels under JAX's transformations, against the same function in jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from products import tiled_matmul

import jtile as jt
import jtile.ops
from jtile import testing
from jtile.testing.evaluate import evaluated
from jtile.trace.tracing import equations

pytestmark = pytest.mark.usefixtures("by_numpy")

rng = np.random.default_rng(0)


def assert_close(got, want, tolerance):
    """Relative norms; NumPy and JAX arrays alike."""
    testing.assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), tolerance=tolerance)


def normal(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


# -- kernels and what they compute -----------------------------------------------------------------------------------


matmul = tiled_matmul(8, 8, 4, stages=3)


@jt.kernel(out_type=lambda x, w, **_: jt.like(x), grid=lambda x, w, *, b, **_: jt.cdiv(x.shape[0], b))
def rms_norm(x, w, o, *, b=4):
    i = jt.program_id(0)
    X, O = x.tiles(b, x.shape[1]), o.tiles(b, x.shape[1])
    t = X[i, 0]
    O[i, 0] = t * lax.rsqrt(jnp.mean(t * t, 1, keepdims=True) + 1e-6) * w[:][None, :]


def rms_norm_reference(x, w):
    return x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6) * w[None, :]


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: x.shape[0])
def recurrence(x, o):
    """A carry that is not linear, around a loop inside a loop."""
    i = jt.program_id(0)
    t = x[i]
    for a in jt.range(3):
        u = t
        for _ in jt.range(a + 1):
            u = jnp.sin(u) * t
        t = t + u
    o[i] = t


def recurrence_reference(x):
    t = x
    for a in range(3):
        u = t
        for _ in range(a + 1):
            u = jnp.sin(u) * t
        t = t + u
    return t


@jt.kernel(out_type=lambda x, rows, **_: (jt.like(x), jt.like(rows)), grid=lambda x, rows, **_: x.shape[0])
def gather_and_count(x, rows, o, n):
    """A float and an integer operand, a float and an integer result."""
    i = jt.program_id(0)
    o[i] = x[rows[i]] * 2
    n[i] = rows[i] + 1


@jt.kernel(out_type=lambda x, y, **_: jt.like(x), grid=lambda x, y, **_: x.shape[0], alias={"x": "o"})
def scaled_in_place(x, y, o):
    i = jt.program_id(0)
    o[i] = o[i] * y[i] + o[i]


@jt.kernel(out_type=lambda x, **_: jt.like(x, shape=x.shape[1:]), grid=lambda x, **_: x.shape[0], init=0)
def summed(x, o):
    jt.atomic_add(o, (slice(None),), jnp.sin(x[jt.program_id(0)]))


CASES = {
    "matmul": (matmul, jnp.matmul, (normal(9, 7), normal(7, 10))),
    "rms_norm": (rms_norm, rms_norm_reference, (normal(9, 5), normal(5))),
    "recurrence": (recurrence, recurrence_reference, (normal(3, 4) / 2,)),
    "alias": (scaled_in_place, lambda x, y: x * y + x, (normal(4, 3), normal(4, 3))),
    "accumulate": (summed, lambda x: jnp.sin(x).sum(0), (normal(5, 3),)),
}
cases = pytest.mark.parametrize("name", CASES)


def loss(fn):
    """A scalar of a kernel's result that is not linear in it."""
    return lambda *args: jnp.sum(jnp.tanh(fn(*args)) ** 2)


def agree(transform, name, tol=2e-5, eager=False):
    """`eager`: as JAX runs it outside of programs, op by op."""
    kernel, reference, args = CASES[name]
    got = (transform(kernel) if eager else evaluated(transform(kernel)))(*args)
    assert_close(got, evaluated(transform(reference))(*args), tol)


every = lambda name: tuple(range(len(CASES[name][2])))

# -- transformations -------------------------------------------------------------------------------------------------


@cases
def test_value_and_grad(name):
    agree(lambda f: jax.value_and_grad(loss(f), every(name)), name, eager=True)


@cases
def test_grad_under_jit(name):
    agree(lambda f: jax.jit(jax.grad(loss(f), every(name))), name, eager=True)


@cases
def test_grad_of_one_operand(name):
    agree(lambda f: jax.grad(loss(f), len(every(name)) - 1), name, eager=True)


@cases
def test_jacobians(name):
    agree(lambda f: jax.jacfwd(f, every(name)), name)
    agree(lambda f: jax.jacrev(f, every(name)), name)


@cases
def test_hessian(name):
    agree(lambda f: jax.hessian(loss(f)), name, 2e-4)
    agree(lambda f: jax.jacrev(jax.jacrev(loss(f))), name, 2e-4)


@cases
def test_linearize(name):
    def linear(f):
        def run(*args):
            out, tangent = jax.linearize(f, *args)
            return out, tangent(*args), jax.linear_transpose(tangent, *args)(out)

        return run

    agree(linear, name, eager=True)


@cases
def test_checkpoint(name):
    agree(lambda f: jax.grad(jax.checkpoint(loss(f)), every(name)), name)


@cases
def test_in_scan_and_cond(name):
    def transform(f):
        def total(*args):
            def step(c, k):
                moved = (args[0] * (1 + c), *args[1:])
                return c + lax.cond(k % 2 == 0, lambda: jnp.mean(f(*moved)), lambda: jnp.sum(moved[0]) / 99), None

            return lax.scan(step, jnp.float32(0), jnp.arange(3))[0]

        return jax.jit(jax.grad(total, every(name)))

    agree(transform, name, eager=True)


@cases
def test_vmap_of_grad_and_grad_of_vmap(name):
    args = CASES[name][2]
    many = tuple(np.stack([x, x * 2, x - 1]) for x in args)
    for axes in ([0] * len(args), [0, *[None] * (len(args) - 1)]):
        given = [m if a == 0 else x for m, x, a in zip(many, args, axes, strict=True)]
        for transform in (
            lambda f, axes=tuple(axes): jax.vmap(jax.grad(loss(f), every(name)), axes),
            lambda f, axes=tuple(axes): jax.grad(
                lambda *xs: jnp.sum(jax.vmap(loss(f), axes)(*xs) * jnp.arange(3.0)), every(name)
            ),
        ):
            kernel, reference, _ = CASES[name]
            assert_close(evaluated(transform(kernel))(*given), evaluated(transform(reference))(*given), 2e-5)


@cases
def test_second_order_of_vmap(name):
    def transform(f):
        many = lambda x, *rest: jax.vmap(f, (0, *[None] * len(rest)))(jnp.stack([x, x * x]), *rest)
        return lambda *args: jax.jvp(jax.grad(loss(many)), args, args)

    agree(transform, name, 2e-4)


def test_integers_have_no_tangent():
    x, rows = normal(5, 3), np.array([4, 0, 0, 2], np.int32)

    def run(x):
        o, n = gather_and_count(x[:4] * x[1:], rows % 4)
        return jnp.sum(o**2 * n[:, None].astype(o.dtype))

    def reference(x):
        p = (x[:4] * x[1:])[rows % 4] * 2
        return jnp.sum(p**2 * (rows % 4 + 1)[:, None].astype(p.dtype))

    assert_close(evaluated(jax.grad(run))(x), evaluated(jax.grad(reference))(x), 1e-5)
    both = lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))
    assert_close(both(run)(x), both(reference)(x), 1e-5)
    tangent = jax.jvp(lambda x: gather_and_count(x, rows), (x[:4],), (x[:4],))[1]
    assert tangent[1].dtype == jax.dtypes.float0


def test_only_what_is_asked_for_is_computed():
    a, b = normal(9, 7), normal(7, 10)
    text = str(jax.make_jaxpr(jax.grad(lambda a: matmul(a, b).sum()))(a))
    assert text.count("matmul_vjp") == 1
    (call,) = [e for e in jax.make_jaxpr(jax.grad(lambda a: matmul(a, b).sum()))(a).eqns if "vjp" in str(e.params)]
    assert len(call.outvars) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_narrow_gradients_are_rounded_once(dtype):
    x, w = jnp.asarray(normal(300, 8), dtype), jnp.asarray(1 + normal(8) / 8, dtype)
    wide = lambda f: lambda *args: f(*[jnp.asarray(v, np.float32) for v in args])
    got = jax.grad(lambda w: rms_norm(x, w).astype(jnp.float32).sum())(w)
    want = evaluated(jax.grad(lambda w: wide(rms_norm_reference)(x, w).sum()))(jnp.asarray(w, np.float32))
    assert got.dtype == dtype
    assert_close(got.astype(np.float32), want, {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-5}[dtype])


def test_ties_share_their_gradient_as_in_jnp():
    @jt.kernel(out_type=lambda x, **_: jt.like(x, shape=()))
    def k(x, o):
        t = x[:]
        o[...] = jnp.max(t) + jnp.maximum(t, 1.0).sum() + jax.nn.relu(t).sum() + jnp.clip(t, 0.0, 2.0).sum()

    def reference(t):
        return jnp.max(t) + jnp.maximum(t, 1.0).sum() + jax.nn.relu(t).sum() + jnp.clip(t, 0.0, 2.0).sum()

    x = np.array([0, 1, 2, 2, -1, 1], np.float32)
    assert_close(jax.grad(k)(x), jax.grad(reference)(x), 1e-6)


def test_custom_derivatives_inside_of_a_kernel_hold():
    @jax.custom_jvp
    def clipped(x):
        return jnp.minimum(x, 1.0)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), 7 * tangents[0]))

    @jt.kernel(out_type=lambda x, **_: jt.like(x))
    def k(x, o):
        o[...] = clipped(x[...]) + lax.stop_gradient(x[...]) * x[...]

    x = normal(5)
    assert_close(jax.grad(lambda x: k(x).sum())(x), 7 + x, 1e-6)


# -- what the reverse kernels look like ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["matmul", "rms_norm"])
def test_no_atomics(name):
    kernel, _, args = CASES[name]
    pieces = kernel.lower(*args).vjp().pieces
    text = "".join(p.texts["tile_ir_opt"] for p in pieces)
    assert "atomic" not in text and "store" in text
    assert len(pieces) == {"matmul": 2, "rms_norm": 1}[name]


@jt.kernel(
    out_type=lambda x, w: jt.like(x, shape=(x.shape[0] - w.shape[0] + 1, x.shape[1] - w.shape[1] + 1)),
    grid=lambda x, w: (jt.cdiv(x.shape[0] - w.shape[0] + 1, 8), jt.cdiv(x.shape[1] - w.shape[1] + 1, 8)),
)
def convolve(x, w, o):
    """A 2-D convolution, whose programs read windows that overlap."""
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jt.zeros((8, 8), jnp.float32)
    for a in jt.range(w.shape[0]):
        for b in jt.range(w.shape[1]):
            acc = acc + w[a, b] * x[jt.ds(i * 8 + a, 8), jt.ds(j * 8 + b, 8)]
    o.tiles(8, 8)[i, j] = acc


def convolve_reference(x, w):
    return lax.conv(x[None, None], w[None, None], (1, 1), "VALID")[0, 0]


def test_a_convolution_has_no_atomics():
    x, w = normal(33, 30), normal(3, 2)
    for piece in convolve.lower(x, w).vjp().pieces:
        assert "atomic" not in piece.texts["tile_ir_opt"]
    grads = lambda f: evaluated(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))(x, w)
    assert_close(grads(convolve), grads(convolve_reference), 1e-5)


def programs(jaxpr):
    return [e.params["program"] for e in equations(jaxpr) if e.primitive.name == "jtile_call"]


def no_atomics(lowered):
    assert all("atomic" not in piece.texts["tile_ir_opt"] for piece in lowered.pieces)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_convolution_of_the_library_has_no_atomics():
    """Its own rule has none; on a CPU the automatic reverse mode has none, either."""
    x, w = jax.ShapeDtypeStruct((2, 12, 13, 8), np.float32), jax.ShapeDtypeStruct((3, 3, 8, 16), np.float32)
    for arch in (None, "sm_90"):
        with jt.config(arch=arch):
            own = programs(jax.make_jaxpr(jax.grad(lambda x, w: jt.ops.convolution(x, w).sum(), (0, 1)))(x, w).jaxpr)
            assert len(own) >= 2
            for program in own:
                no_atomics(jt.Lowered(program, None))
    (forward,) = programs(jax.make_jaxpr(jt.ops.convolution)(x, w).jaxpr)
    no_atomics(jt.Lowered(forward, None).vjp())


def test_the_gradient_of_a_tiled_matmul_is_two_tiled_matmuls():
    a = jax.ShapeDtypeStruct((256, 256), np.float32)  # too small for other tiles than the kernel's own
    left, right = matmul.lower(a, a, bm=128, bn=128, bk=64).vjp().pieces
    assert (left.kernel.grid, right.kernel.grid) == ((2, 4), (4, 2))
    for piece in (left, right):
        ops = [op.mnemonic for op in piece.kernel.body.walk()]
        assert (ops.count("dot"), ops.count("load"), ops.count("for"), ops.count("store")) == (1, 2, 1, 1)


def test_linear_carries_are_not_saved_and_others_are():
    assert "scratch in all: 0 bytes" in matmul.lower(*CASES["matmul"][2]).vjp().texts["resources"]
    text = recurrence.lower(normal(2, 4)).vjp().texts["resources"]
    assert "scratch: float32[3, 4]" in text  # `t` of three rounds


# -- what cannot be differentiated -----------------------------------------------------------------------------------


def test_other_atomics():
    @jt.kernel(out_type=lambda x, **_: jt.like(x, shape=x.shape[1:]), grid=lambda x, **_: x.shape[0], init=0)
    def highest(x, o):
        jt.atomic_max(o, (slice(None),), x[jt.program_id(0)])

    for run in (jax.grad(lambda x: highest(x).sum()), lambda x: jax.jvp(highest, (x,), (x,))):
        with pytest.raises(jt.errors.TransformError, match=r"atomic_max.*defvjp") as e:
            run(normal(3, 4))
        assert "test_derivatives.py" in str(e.value)


def test_outputs_of_integers():
    @jt.kernel(out_type=lambda x: jt.like(x, dtype=np.int32), grid=3)
    def signs(x, o):
        i = jt.program_id(0)
        o[i] = (x[i] > 0).astype(jnp.int32)

    x = normal(3)
    with pytest.raises(jt.errors.KernelValueError, match=r"signs has no derivative: .* \(o: int32\)") as e:
        signs.lower(x).vjp()
    assert "test_derivatives.py" in str(e.value)
    with pytest.raises(TypeError, match="int32"):  # JAX's own
        jax.grad(lambda x: signs(x).sum())(x)
    assert_close(jax.grad(lambda x: (x * signs(x).astype(np.float32)).sum())(x), (x > 0).astype(np.float32), 0)


def test_old_values_of_atomics():
    @jt.kernel(out_type=lambda x, **_: (jt.like(x), jt.like(x, shape=())), grid=lambda x, **_: x.shape[0], init=0)
    def ranks(x, o, n):
        i = jt.program_id(0)
        o[i] = jt.atomic_add(n, (), x[i]) * x[i]

    with pytest.raises(jt.errors.TransformError, match="old value"):
        jax.grad(lambda x: ranks(x)[0].sum())(normal(3))


def test_while_loops():
    @jt.kernel(out_type=lambda x, **_: jt.like(x))
    def halved(x, o):
        t = x[...]
        while jnp.max(t) > 1:
            t = t / 2
        o[...] = t

    x = np.array([3.0, 9.0], np.float32)
    assert_close(jax.jvp(halved, (x,), (x,))[1], x / 16, 1e-6)
    assert_close(jax.grad(lambda x: halved(x).sum())(x), np.full(2, 1 / 16, np.float32), 1e-6)


def test_loops_without_a_bound():
    @jt.kernel(out_type=lambda x, n, **_: jt.like(x))
    def power(x, n, o):
        t = x[...]
        for _ in jt.range(n[...]):
            t = jnp.sin(t) * x[...]
        o[...] = t

    x, n = normal(3), np.int32(4)
    with pytest.raises(jt.errors.TransformError, match=r"jnp\.minimum") as e:
        jax.grad(lambda x: power(x, n).sum())(x)
    assert "test_derivatives.py" in str(e.value)


def test_loops_with_a_bound():
    @jt.kernel(out_type=lambda x, n, **_: jt.like(x))
    def power(x, n, o):
        t = x[...]
        for _ in jt.range(jnp.minimum(n[...], 6)):
            t = jnp.sin(t) * x[...]
        o[...] = t

    def reference(x, n):
        t = x
        for _ in range(n):
            t = jnp.sin(t) * x
        return t

    x = normal(3)
    grad = lambda f, n: jax.grad(lambda x: f(x, np.int32(n)).sum())
    for n in (0, 1, 4):
        assert_close(evaluated(grad(power, n))(x), evaluated(grad(reference, n))(x), 1e-5)


# -- rules of the user's ---------------------------------------------------------------------------------------------


def doubled():
    """A kernel whose reverse rule gives three times its gradient, so that it shows."""

    @jt.kernel(out_type=lambda x, w, **_: jt.like(x), grid=lambda x, w, **_: x.shape[0])
    def k(x, w, o):
        i = jt.program_id(0)
        o[i] = x[i] * w[...]

    def fwd(x, w):
        return k(x, w), (x, w)

    def bwd(residuals, g):
        x, w = residuals
        return 3 * g * w, 3 * jnp.sum(g * x)

    k.defvjp(fwd, bwd)
    return k


def test_defvjp():
    k, x, w = doubled(), normal(4, 3), np.float32(2)
    dx, dw = jax.grad(lambda x, w: k(x, w).sum(), (0, 1))(x, w)
    assert_close(dx, np.full_like(x, 6), 1e-6)
    assert_close(dw, 3 * x.sum(), 1e-5)
    assert_close(jax.jvp(k, (x, w), (x, w))[1], 2 * x * w, 1e-6)  # forward mode stays what it is


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_defvjp_under_vmap(axes):
    k, x, w = doubled(), normal(5, 4, 3), normal(5)
    x, w = x if axes[0] == 0 else x[0], w if axes[1] == 0 else w[0]
    reference = lambda x, w: x * w
    total = lambda f: lambda x, w: jnp.sum(jax.vmap(f, axes)(x, w) ** 2)
    got = evaluated(jax.grad(total(k), (0, 1)))(x, w)
    want = evaluated(jax.grad(total(reference), (0, 1)))(x, w)
    thrice = lambda tree: jax.tree.map(lambda v: 3 * np.asarray(v), tree)
    assert_close(got, thrice(want), 1e-5)
    each = lambda f: evaluated(jax.vmap(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)), axes))
    assert_close(each(k)(x, w), thrice(each(reference)(x, w)), 1e-5)


def test_defvjp_in_scan_checkpoint_and_hessian():
    k, x, w = doubled(), normal(4, 3), np.float32(2)

    def total(x):
        return lax.scan(lambda c, _: (jax.checkpoint(k)(c, w), None), x, None, length=2)[0].sum()

    assert_close(jax.jit(jax.grad(total))(x), np.full_like(x, 36), 1e-5)
    # d/dw (3 w sum(x) + k(x, w).sum()), the second part by forward mode
    assert_close(jax.hessian(lambda w: k(x, w).sum() * w)(w), 4 * x.sum(), 1e-4)


def test_what_a_rule_gives_is_checked():
    k, x, w = doubled(), normal(4, 3), np.float32(2)
    k.defvjp(lambda x, w: (k(x, w), None), lambda r, g: (g, g))
    with pytest.raises(jt.errors.KernelTypeError, match=r"bwd of kernel k gives float32\[4, ?3\] for w"):
        jax.grad(lambda x, w: k(x, w).sum(), (0, 1))(x, w)
    k.defvjp(lambda x, w: (k(x, w), None), lambda r, g: g)
    with pytest.raises(jt.errors.KernelTypeError, match="tuple of 2"):
        jax.grad(lambda x: k(x, w).sum())(x)
    k.defvjp(lambda x, w: k(x, w), lambda r, g: (g, None))
    with pytest.raises(jt.errors.KernelTypeError, match="pair"):
        jax.grad(lambda x: k(x, w).sum())(x)
    k.defvjp(lambda x, w: (k(x, w)[0], None), lambda r, g: (g, None))
    with pytest.raises(jt.errors.KernelTypeError, match=r"gives float32\[3\] where the kernel gives float32\[4, 3\]"):
        jax.grad(lambda x: k(x, w).sum())(x)
    k.defvjp(lambda x: (k(x, w), None), lambda r, g: (g, None))
    with pytest.raises(jt.errors.KernelTypeError, match=r"fwd of kernel k does not take its call, .*too many"):
        jax.grad(lambda x: k(x, w).sum())(x)
    with pytest.raises(jt.errors.KernelTypeError, match="bwd of kernel k is a function, got None"):
        k.defvjp(lambda x, w: (k(x, w), None), None)
