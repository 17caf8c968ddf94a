"""JAX's derivatives of functions of tiles, taken inside of a kernel: what `jax.jvp`, `jax.vjp` and `jax.vmap` make of
the support table lowers to Tile IR and gives, in the interpreter and as native code, what it gives outside."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from native import run_native

from jtile.interpret import interpret
from jtile.testing.evaluate import evaluated
from jtile.trace import rewrite_loops, to_tile_ir, trace

pytestmark = pytest.mark.usefixtures("by_numpy")

R = np.random.default_rng(0)
X, Y = R.standard_normal((2, 4, 6)).astype("f")
P = np.abs(X) + np.float32(0.1)  # positive
U = 1 / (1 + np.exp(-X))  # in (0, 1)
S = np.round(X)  # with ties
I, ONCE = np.asarray([3, 0, 3, 1], "i4"), np.asarray([3, 0, 2, 1], "i4")
V = R.standard_normal((2, 4, 6)).astype("f")
IMAGE, FILTER = R.standard_normal((1, 2, 4, 3)).astype("f"), R.standard_normal((2, 2, 2, 2)).astype("f")
EVEN, EDGES = [(2, 1), (0, 1)], [(1, 2, 0), (0, 0, 2)]


def simple(names: str, x, module=jnp) -> dict:
    return {n: (getattr(module, n), x) for n in names.split()}


def scan_body(c, v):
    return jnp.tanh(c + v), c * v


def pool(x, fn, start, *args):
    return lax.reduce_window(x, np.asarray(start, x.dtype), fn, *args)


def attention(q, k):
    q, k = q[None, :, None], k[None, :, None]
    return jax.nn.dot_product_attention(q, k, k)


conv = lax.conv_general_dilated

FUNCTIONS = {
    "smooth": simple("exp exp2 expm1 sin cos tan arctan sinh cosh tanh arcsinh square sinc", X)
    | simple("erf erfc logistic", X, lax)
    | simple("log log1p log2 sqrt cbrt reciprocal arcsin arccos arctanh", U)
    | simple("rsqrt erf_inv lgamma digamma", U, lax)
    | {
        "arccosh": (jnp.arccosh, P + np.float32(1.5)),
        "power": (jnp.power, P, Y),
        "integer_pow": (lambda x: x**3, X),
        "negative_pow": (lambda x: x**-2, P),
        "pow_of_int": (lambda x: lax.pow(x, jnp.full(x.shape, 3)), X),
        "arctan2": (jnp.arctan2, X, Y),
        "hypot": (jnp.hypot, X, Y),
        "logaddexp": (jnp.logaddexp, X, Y),
        "xlogy": (jax.scipy.special.xlogy, P, U),
        "by_zeros": (lambda x: x * jnp.zeros_like(x) + x, X),
        "second_order": (lambda x: jax.grad(lambda v: (jnp.sin(v) ** 2).sum())(x), X),
    },
    "steps": simple("abs negative sign floor ceil round nan_to_num", X)
    | {
        "mod": (jnp.mod, X, P),
        "rem": (lax.rem, X, P),
        "floor_divide": (jnp.floor_divide, X, P),
        "maximum": (jnp.maximum, S, np.round(Y)),
        "minimum": (jnp.minimum, S, np.round(Y)),
        "clip": (lambda x: x.clip(-0.5, 0.5), X),
        "clamp": (lax.clamp, X - 1, X, X + 1),
        "where": (lambda x, y: jnp.where(x > 0, x, y), X, Y),
        "select_n": (lambda i, x, y, z: lax.select_n(i, x, y, z), np.arange(24, dtype="i4").reshape(4, 6) % 3, X, Y, P),
        "copysign": (jnp.copysign, X, Y),
        "cast": (lambda x: x.astype("bfloat16").astype(x.dtype), X),
        "cast_to_int": (lambda x: x.astype("int32").astype(x.dtype) * x, X),
        "stop_gradient": (lambda x: lax.stop_gradient(x) * x, X),
        "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), X),
    },
    "special": {
        "polygamma": (lambda x: jax.scipy.special.polygamma(2, x), P + 1),
        "digamma_below_zero": (lax.digamma, -P * 2),
        "zeta": (lambda x: jax.scipy.special.zeta(jnp.full_like(x, 3.0), x), P + 1),
        "betaln": (jax.scipy.special.betaln, P, U),
    },
    "incomplete": {
        "igamma": (lax.igamma, P[:1], U[:1]),
        "igammac": (lax.igammac, P[:1], U[:1]),
        "betainc": (lambda x: jax.scipy.special.betainc(jnp.full_like(x, 2), jnp.full_like(x, 3), x), U[:1]),
    },
    "reductions": {
        "sum": (lambda x: x.sum(0), X),
        "mean": (lambda x: x.mean(1), X),
        "std": (lambda x: x.std(1), X),
        "prod": (lambda x: x.prod(1), X),
        "prod_of_all": (lambda x: x.prod(), X),
        "max_with_ties": (lambda x: x.max(1), S),
        "min_with_ties": (lambda x: x.min(), S),
        "argmax": (lambda x: x * x.argmax(1)[:, None].astype(x.dtype), X),
        "norm": (lambda x: jnp.linalg.norm(x, axis=1), X),
        "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), X),
        "reduce": (lambda x: lax.reduce(x, jnp.ones((), x.dtype), lambda a, b: a * b, (1,)), X),
        "median": (lambda x: jnp.median(x, axis=1), X),
        "softmax": (lambda x: jax.nn.softmax(x, 1), X),
        "log_softmax": (lambda x: jax.nn.log_softmax(x, 0), X),
        "standardize": (lambda x: jax.nn.standardize(x, 1), X),
    },
    "scans": {n: (lambda x, n=n: getattr(lax, n)(x, 1), X) for n in ("cumsum", "cumprod", "cumlogsumexp")}
    | {n + "_reverse": (lambda x, n=n: getattr(lax, n)(x, 0, reverse=True), S) for n in ("cummax", "cummin")}
    | {
        "associative_scan": (lambda x: lax.associative_scan(jnp.multiply, x, axis=1), X),
        "fori": (lambda x: lax.fori_loop(0, 4, lambda k, c: jnp.sin(c) * x[k][None], x), X),
        "scan": (lambda x: lax.scan(scan_body, x[0], x), X),
        "scan_reverse": (lambda x: lax.scan(scan_body, x[0], x, reverse=True), X),
        "scan_of_checkpoint": (lambda x: lax.scan(jax.checkpoint(scan_body), x[0], x), X),
        "map": (lambda x: lax.map(lambda v: jnp.sin(v).sum(), x), X),
        "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X),
        "switch": (lambda x, i: lax.switch(i[3], [jnp.sin, jnp.cos, jnp.square], x), X, I),
        "checkpoint": (lambda x: jax.checkpoint(lambda v: jnp.sin(jnp.sin(v)))(x), X),
    },
    "order": {
        "sort": (lambda x: jnp.sort(x, 1), X),
        "sort_pairs": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), X, Y),
        "sort_two_keys": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=2), S, Y),
        "argsort": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1), X),
        "top_k": (lambda x: lax.top_k(x, 3)[0], X),
    },
    "products": {
        "matmul": (lambda a, b: a @ b.T, X, Y),
        "batched": (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), V, V[::-1].copy()),
        "two_axes": (lambda a, b: jnp.tensordot(a, b, 2), X, Y),
        "outer": (lambda a, b: jnp.outer(a[0], b[0]), X, Y),
        "narrow": (lambda a, b: lax.dot_general(
            a.astype("bfloat16"), b.astype("bfloat16"), (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32), np.round(X * 4) / 4, np.round(Y * 4) / 4),
        "attention": (attention, X, Y),
    },
    "windows": {
        "conv": (lambda x, w: conv(x, w, (2, 1), [(1, 1), (0, 2)], rhs_dilation=(1, 2)), IMAGE, FILTER),
        "conv_transpose": (lambda x, w: conv(x, w, (1, 1), EVEN, lhs_dilation=(2, 1)), IMAGE, FILTER),
        "conv_groups": (lambda x, w: conv(x, w, (1, 1), "SAME", feature_group_count=2), IMAGE, FILTER[:, :1]),
        "convolve": (lambda x, w: jnp.convolve(x[0], w[0, :3]), X, Y),
        "max_pool": (lambda x: pool(x, lax.max, -math.inf, (2, 3), (1, 2), "VALID"), X),
        "max_pool_with_ties": (lambda x: pool(x, lax.max, -math.inf, (3, 3), (1, 2), "SAME"), np.sign(X)),
        "min_pool": (lambda x: pool(x, lax.min, math.inf, (2, 3), (2, 2), "SAME"), X),
        "sum_pool": (lambda x: pool(x * x, lax.add, 0, (2, 2), (1, 2), "SAME"), X),
    },
    "shapes": {
        "reshape": (lambda x: x.reshape(3, 8), X),
        "transpose": (lambda x: x.T, X),
        "rev": (lambda x: lax.rev(x, (1,)), X),
        "pad": (lambda x, y: lax.pad(x, y[0, 0], EDGES), X, Y),
        "pad_negative": (lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((-1, 2, 1), (1, -2, 0))), X),
        "reflect": (lambda x: jnp.pad(x, 2, mode="reflect"), X),
        "concatenate": (lambda x, y: jnp.concatenate([x, y, x], 1), X, Y),
        "split": (lambda x: jnp.split(x, 3, 1), X),
        "roll": (lambda x: jnp.roll(x, 2, 1), X),
        "slice": (lambda x: x[1:3, ::2], X),
        "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i[1], i[3]), (2, 3)), X, I),
        "dynamic_update_slice": (lambda x, y, i: lax.dynamic_update_slice(x, y[:2, :2], (i[1], i[3])), X, Y, I),
        "repeat": (lambda x: jnp.repeat(x, 2, 1), X),
        "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (4, 2, 6)), X),
        "diagonal": (lambda x: jnp.diag(x[:, :4]), X),
        "unstack": (jnp.unstack, X),
    },
    "indices": {
        "rows": (lambda x, i: x[i], X, I),
        "elements": (lambda x, i: x[i, i], X, I),
        "along_axis": (lambda x, i: jnp.take_along_axis(x, i[:, None], 1), X, I),
        "fill": (lambda x, i: jnp.take(x, i + 2, 0, mode="fill", fill_value=3), X, I),
        "clipped": (lambda x, i: jnp.take(x, i + 2, 0, mode="clip"), X, I),
        "set": (lambda x, y, i: x.at[i].set(y), X, Y, ONCE),
        "add": (lambda x, y, i: x.at[i].add(y), X, Y, I),
        "multiply": (lambda x, y, i: x.at[i].multiply(y, unique_indices=True), X, Y, ONCE),
        "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 4), X, I),
        "one_hot": (lambda x, i: jax.nn.one_hot(i, 4, dtype=x.dtype) @ x, X, I),
    },
    "networks": simple(
        "relu relu6 sigmoid softplus soft_sign silu log_sigmoid leaky_relu hard_sigmoid hard_tanh elu celu selu gelu "
        "squareplus mish",
        X,
        jax.nn,
    )
    | {
        "gelu_exact": (lambda x: jax.nn.gelu(x, approximate=False), X),
        "glu": (lambda x: jax.nn.glu(x, 1), X),
        "normal": (lambda x: x * jax.random.normal(jax.random.key(3), x.shape, x.dtype), X),
        "dropout": (lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0), X),
    },
}  # fmt: skip


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, np.floating)


def derivatives(f, arrays):
    """`(function, operands)` that give the jvp and the vjp with respect to every float operand of `f`."""
    floats = [k for k, x in enumerate(arrays) if is_float(x)]

    def of_floats(all_args):
        def g(*values):
            args = list(all_args)
            for k, v in zip(floats, values, strict=True):
                args[k] = v
            return [v for v in jax.tree.leaves(f(*args)) if is_float(v)]

        return g

    outs = jax.eval_shape(of_floats(arrays), *[arrays[k] for k in floats])
    rng = np.random.default_rng(1)
    some = [jnp.asarray(rng.standard_normal(v.shape), v.dtype) for v in (*[arrays[k] for k in floats], *outs)]

    def run(*args):
        xs, more = args[: len(arrays)], args[len(arrays) :]
        g, values = of_floats(xs), [xs[k] for k in floats]
        return jax.jvp(g, values, list(more[: len(floats)]))[1], jax.vjp(g, *values)[1](list(more[len(floats) :]))

    return run, [*arrays, *some]


def batched(f, arrays):
    """The function over a batch that is the last axis of every operand."""
    return jax.vmap(f, -1, 0), [jnp.stack([x, x[::-1]], -1) for x in arrays]


def agree(group: str, make, dtype=None, tol=1e-4, native=True):
    """All functions of a group in one kernel."""
    runs, operands, counts = [], [], []
    for f, *arrays in FUNCTIONS[group].values():
        arrays = [jnp.asarray(x, dtype if dtype and is_float(x) else x.dtype) for x in arrays]
        run, args = make(f, arrays)
        runs.append(run)
        operands += args
        counts.append(len(args))
    ends = np.cumsum([0, *counts])

    def everything(*args):
        return [run(*args[a:b]) for run, a, b in zip(runs, ends, ends[1:], strict=False)]

    wanted = evaluated(everything)(*operands)
    labels = [n for n, w in zip(FUNCTIONS[group], wanted, strict=True) for _ in jax.tree.leaves(w)]
    wanted = [np.asarray(v) for v in jax.tree.leaves(wanted)]

    def kernel(*refs):
        found = jax.tree.leaves(everything(*[r[...] for r in refs[: len(operands)]]))
        for r, v in zip(refs[len(operands) :], found, strict=True):
            r[...] = v

    types = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs] for xs in (operands, wanted)]
    lowered = to_tile_ir(
        trace(rewrite_loops(kernel), *types), name=group, n_in=len(operands), n_out=len(wanted), grid=()
    )
    inputs = [np.asarray(x) for x in operands]
    for run in (interpret, run_native) if native else (interpret,):
        for label, got, want in zip(labels, run(lowered, inputs), wanted, strict=True):
            got, want = got.astype("f8"), want.astype("f8")
            scale = max(1, np.abs(want[np.isfinite(want)]).max(initial=0))
            np.testing.assert_allclose(
                got / scale, want / scale, rtol=tol, atol=tol, err_msg=f"{label}, {run.__name__}"
            )


@pytest.mark.parametrize("group", FUNCTIONS)
def test_derivatives(group):
    agree(group, derivatives, native=group not in ("special", "incomplete"))  # long code, slow to compile


@pytest.mark.parametrize("group", [g for g in FUNCTIONS if g not in ("smooth", "special", "incomplete")])
def test_batches(group):
    agree(group, batched, native=False)


@pytest.mark.parametrize("group", ["steps", "indices"])
def test_bfloat16(group):
    agree(group, derivatives, dtype="bfloat16", tol=0.05, native=False)


@pytest.mark.parametrize(("group", "tol"), [("order", 1e-12), ("special", 1e-6)])
def test_float64(group, tol):
    with jax.enable_x64(True):
        agree(group, derivatives, dtype="float64", tol=tol, native=group == "order")
