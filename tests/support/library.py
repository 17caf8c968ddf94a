"""How the kernel library is tested: an op against its `jnp` reference, as native code and in the interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import hopper_gemv
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

FLOATS = ("float32", "bfloat16", "float16")
TOLERANCE = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-4}
ROUGH = 3e-4  # of sums of 8-bit floats: 128 terms at a time in a tensor core's own accumulator


def shapes_and_dtypes(shapes):
    """Every shape in float32, the first one in the other dtypes too."""
    return [(shape, "float32") for shape in shapes] + [(shapes[0], dtype) for dtype in FLOATS[1:]]


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    """Drawn by NumPy, and put: `jax.random` and `jnp.asarray` compile a program for each shape."""
    return jax.device_put(
        np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    )


def stored_weight(kind: str, out: int, inner: int, seed: int = 1) -> tuple[Weight, np.ndarray]:
    """A weight [out, inner] of a kind, and the matrix that it says; "float16" and "bfloat16" are no codes."""
    w = np.asarray(normal(seed, out, inner))
    if hopper_gemv.bits_of(kind) == 16:
        return Weight(w.astype(jnp.dtype(kind))), w.astype(jnp.dtype(kind)).astype(np.float32)
    w = QuantizedTensor.quantize(w, kind)
    return Weight(w.packed().codes, w.scale, w.minimum), evaluated(QuantizedTensor.dequantize)(w)


def of_sums(dtype: str, exact: float) -> float:
    """The tolerance of sums of products of a dtype on the default device; `exact` where sums are in float32."""
    return ROUGH if "float8" in dtype and jax.default_backend() == "gpu" else exact


def integers(seed: int, low: int, high: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng([seed, *shape]).integers(low, high, shape, np.int32))


def agree(op, reference, *args, tolerance: float | None = None, interpret: bool = False, **options) -> None:
    """`op` gives what `reference` gives: the same pytree of shapes and dtypes, and values within the tolerance of the
    dtype of the first argument. `interpret`: the reference interpreter does too."""
    expected = evaluated(lambda *operands: reference(*operands, **options))(*args)
    results = [evaluated(lambda *operands: op(*operands, **options))(*args)]
    if interpret:
        with jt.config(interpret=True):
            results.append(op(*args, **options))
    for got in results:
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        error = relative_error(got, expected)
        limit = TOLERANCE.get(jax.tree.leaves(args)[0].dtype.name, 0) if tolerance is None else tolerance
        assert error <= limit, f"relative error {error:.2g}, allowed {limit:.2g}"


# Cotangents: one more rounding of 16-bit tiles (weights, results) than values have.
SLOPE_TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 8e-3, "float16": 1e-3}


def gradients_agree(op, reference, *args, of: int | None = None, tolerance: float | None = None, **options) -> None:
    """`jax.vjp` of `op` by its first `of` arguments (default: all) gives what that of `reference` gives, for random
    cotangents: relative norms, each argument's on its own, within the tolerance of its dtype."""
    of = len(args) if of is None else of
    rest = args[of:]

    def pulled(fn):
        def run(*moved):
            out, pull = jax.vjp(lambda *m: fn(*m, *rest, **options), *moved)
            leaves, tree = jax.tree.flatten(out)
            return pull(
                jax.tree.unflatten(tree, [normal(90 + k, *x.shape).astype(x.dtype) for k, x in enumerate(leaves)])
            )

        return evaluated(run)

    got, expected = pulled(op)(*args[:of]), pulled(reference)(*args[:of])
    for k, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) == (args[k].shape, args[k].dtype)
        error = relative_error(ours, theirs)
        limit = SLOPE_TOLERANCE[args[k].dtype.name] if tolerance is None else tolerance
        assert error <= limit, f"argument {k}: relative error {error:.2g}, allowed {limit:.2g}"


def differences_agree(op, *args, of: int | None = None, step: float = 1e-5, tolerance: float = 1e-8, **options) -> None:
    """In float64: the gradient of `sum(w op(x))` along a random direction, against the central difference with `step`.

    The difference is off by step^2 from the third derivative and by 1e-16 / step from rounding."""
    of = len(args) if of is None else of
    rng = np.random.default_rng(0)
    like = lambda x: rng.normal(size=x.shape)
    moved = tuple(np.asarray(x, np.float64) for x in args[:of])
    weights = jax.tree.map(like, jax.eval_shape(lambda *xs: op(*xs, *args[of:], **options), *moved))
    directions = tuple(like(x) for x in moved)

    @jax.jit
    def f(*moved):
        out = op(*moved, *args[of:], **options)
        return sum((w * y).sum() for w, y in zip(jax.tree.leaves(weights), jax.tree.leaves(out), strict=True))

    assert f(*moved).dtype == jnp.float64
    ahead, behind = (f(*(x + sign * step * u for x, u in zip(moved, directions))) for sign in (1, -1))
    gradients = jax.jit(jax.grad(f, tuple(range(of))))(*moved)
    gradient = float(sum((np.asarray(s) * u).sum() for s, u in zip(gradients, directions)))
    expected = float(ahead - behind) / (2 * step)
    assert abs(gradient - expected) <= tolerance * max(1.0, abs(expected)), (
        f"{gradient} against a difference of {expected}"
    )
