"""A mixture of experts: every token goes through a few of many gated MLPs (Shazeer et al. 2017).

Tokens are sorted by expert, and every expert's rows stand together for `ops.grouped_matmul`. The sizes of the groups
stay on the device, so one compiled program serves every routing. The routers stand with their models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jtile import ops
from jtile.ops import QuantizedTensor, hopper_chosen
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op

from . import few_tokens, layers
from .config import WeightSource
from .parallel import ALONE, Axes, Term
from .sums import Unmade

Matrix = jax.Array | QuantizedTensor
PROJECTIONS = {name: f"{name}_proj" for name in ("gate", "up", "down")}


def mixture(x, experts, weights, gate_up, down, biases=(None, None), gated: Callable = ops.swiglu):
    """sum_j weights[t, j] MLP_e(x[t]) with e = experts[t, j] and MLP_e(x) = down_e (silu(gate_e x) * (up_e x)).

    Operands of the products have the dtype of the experts' weights, where these are float; the values between the
    products have the dtype of x; sums are float32. Differentiable in x, weights, and gate_up and down where they are
    float.

    Args:
      x: float [tokens, hidden].
      experts: int32 [tokens, k], in [0, E). weights: float32 [tokens, k].
      gate_up: [E, 2 f, hidden], the gate's rows before those of up; or both apart, a tuple. down: [E, hidden, f].
        Floats or `QuantizedTensor`s.
      biases: float32 [E, 2 f] and [E, hidden] of the two products, or None.
      gated: the function that joins gate and up, [rows, 2 f] -> [rows, f].
    Returns:
      [tokens, hidden] of x's dtype.
    """
    tokens, k = experts.shape
    if gated is ops.swiglu and biases == (None, None) and few_tokens.takes(tokens, k, gate_up, down):
        return few_tokens.mixture(x, experts, weights, gate_up, down)
    if ops.routes_unsorted(tokens * k, down):
        return _by_tokens(x, experts, weights, gate_up, down, biases, gated)
    rows, places, sizes = ops.route(x, experts, down.shape[0])
    shares = sorted_mixture(rows, sizes, gate_up, down, biases, gated)[places].astype(jnp.float32)
    return (shares * weights[:, :, None]).sum(1).astype(x.dtype)


def sorted_mixture(x, sizes, gate_up, down, biases=(None, None), gated: Callable = ops.swiglu):
    """MLP_e of each row of x [n, hidden]; the rows are sorted by e, and `sizes`, int32 [E], counts those of each
    expert. See `mixture`."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)

    def product(y, w, bias):
        if isinstance(w, tuple):
            return jnp.concatenate([product(y, part, None) for part in w], axis=1)
        y = ops.grouped_matmul(_beside(y, w), w, sizes, transpose_w=True, out_dtype=x.dtype)
        if bias is None:
            return y
        of = jnp.searchsorted(ends, rows, side="right", method="compare_all")
        return (y.astype(jnp.float32) + bias[jnp.minimum(of, sizes.size - 1)]).astype(y.dtype)

    if gated is ops.swiglu and biases[0] is None and not isinstance(gate_up, tuple):
        hidden = ops.grouped_matmul(
            _beside(x, gate_up), gate_up, sizes, transpose_w=True, activation="silu", out_dtype=x.dtype
        )
    else:
        hidden = gated(product(x, gate_up, biases[0]))
    return product(hidden, down, biases[1])


def _by_tokens(x, experts, weights, gate_up, down, biases, gated: Callable):
    """`mixture` for the few tokens of a step. Their rows are not sorted, since most experts have one of them at
    most."""

    def product(y, w, bias, **options):
        if isinstance(w, tuple):
            y = jnp.concatenate([product(y, part, None) for part in w], axis=-1)
        else:
            y = ops.routed_matmul(y, w, experts, out_dtype=x.dtype, **options)
        return y if bias is None else (y.astype(jnp.float32) + bias[experts]).astype(y.dtype)

    if gated is ops.swiglu and isinstance(gate_up, QuantizedTensor) and biases[0] is None:
        y = product(x, gate_up, None, activation="silu")
    else:
        y = gated(product(x, gate_up, biases[0]))
    shares = product(y, down, biases[1]).astype(jnp.float32) * weights[:, :, None]
    return shares.sum(1).astype(x.dtype)


def _streamed(x, residual, norm, router, gate_up, down, *, k: int, normalised: bool, eps: float):
    scores, total = hopper_chosen.normed_scores(x, residual, norm, router, eps=eps)
    experts, weights = few_tokens.most_probable_of(scores[None], k, normalised)
    return total, hopper_chosen.products(x, residual, norm, experts[0], weights[0], gate_up, down, eps=eps)


def _not_streamed(x, residual, norm, router, gate_up, down, *, k: int, **_) -> str | None:
    if any(isinstance(w, QuantizedTensor | tuple) for w in (gate_up, down)):
        return "experts are quantised"
    return hopper_chosen.misfit(x, router, gate_up, down, k)


def _one_by_one(x, residual, norm, router, gate_up, down, *, k: int, normalised: bool, eps: float):
    normed, total = ops.rms_norm(x, norm, eps=eps, residual=residual)
    return total, mixture(normed, *few_tokens.choose(normed, router, k, normalised), gate_up, down)


# x + residual [tokens, hidden], and the mixture of its RMS norm, whose router takes the k most probable experts.
mixture_behind_norm = Op(
    "mixture behind an RMS norm",
    Implementation("streams of the chosen matrices", _streamed, _not_streamed, BLOCK_LEVEL, portable=False),
    Implementation("one kernel after the other", _one_by_one),
)


def _of_own(x, experts, weights, count: int, run: Callable):
    """`mixture` of the first `count` experts only: float32 [tokens, hidden] for x [tokens, hidden] and experts int32
    [tokens, k], in which numbers of other experts add nothing.

    run: takes rows [n, hidden] sorted by expert, with those of other experts behind them, and the sizes of the groups;
    gives [n, hidden]."""
    here = (experts >= 0) & (experts < count)
    rows, places, sizes = ops.route(x, experts, count)
    shares = jnp.where(here[..., None], run(rows, sizes)[places].astype(jnp.float32) * weights[:, :, None], 0)
    return shares.sum(1)


def _beside(x, weight):
    """Rows in the dtype of float weights; quantised ones take them as they are."""
    return x if isinstance(weight, QuantizedTensor | tuple) else x.astype(weight.dtype)


class Experts(nnx.Module):
    """The gated MLPs of a mixture, in one array each for what goes in and what comes out."""

    def __init__(
        self, weight: WeightSource, prefix: str, count: int, features: int, hidden: int,
        names: Mapping[str, str] = PROJECTIONS,
    ):  # fmt: skip
        """Takes the tensors `{prefix}{expert}.{name}.weight`, which `weight(name, shape)` reads, as the experts'
        weights; `names` gives the {name} of gate, up and down.

        Quantised weights stay quantised if all experts store them alike; otherwise they become bfloat16.

        Raises:
          ModelError: a tensor is missing.
        """
        every = lambda name, shape: [weight(f"{prefix}{e}.{names[name]}.weight", shape) for e in range(count)]
        read = lambda name, shape: [matrix for matrix in every(name, shape) if matrix is not None]
        gate, up = (read(name, (features, hidden)) for name in ("gate", "up"))
        self.gate_up = nnx.Param(_side_by_side(gate, up))
        self.down = nnx.Param(stacked(read("down", (hidden, features))))

    def __call__(self, x, experts, weights):
        """See `mixture`."""
        return mixture(x, experts, weights, self.gate_up.get_value(), self.down.get_value())

    def of_sorted(self, x, sizes):
        """See `sorted_mixture`."""
        return sorted_mixture(x, sizes, self.gate_up.get_value(), self.down.get_value())


def out_in(matrices: Matrix) -> Matrix:
    """The matrices of a checkpoint, [experts, in, out], as [experts, out, in]; quantised ones are stored so already."""
    return matrices if isinstance(matrices, QuantizedTensor) else matrices.swapaxes(1, 2)


def _side_by_side(gate: list[Matrix], up: list[Matrix]):
    """Gate and up as one [experts, 2 f, hidden], or, where each is quantised in its own way, as a tuple of two."""
    pairs = stacked([matrix for both in zip(gate, up, strict=True) for matrix in both])
    if isinstance(pairs, QuantizedTensor):
        return jax.tree.map(lambda a: a.reshape(len(gate), -1, a.shape[-1]), pairs)
    apart = stacked(gate), stacked(up)
    if all(isinstance(part, QuantizedTensor) for part in apart):
        return apart
    return pairs.reshape(len(gate), -1, pairs.shape[-1])


def stacked(matrices: list[Matrix]) -> Matrix:
    """Matrices of one shape as one array with a leading axis: quantised if all are quantised in one way. Otherwise
    quantised ones become bfloat16, and the array is float32 where dtypes differ."""
    kinds = {m.kind if isinstance(m, QuantizedTensor) else "" for m in matrices}
    if kinds == {"q4_0", "q4_1"}:  # some matrices are symmetric, others are not
        matrices = [m.with_minima() if isinstance(m, QuantizedTensor) else m for m in matrices]
    quantised = [m for m in matrices if isinstance(m, QuantizedTensor)]
    if len(quantised) == len(matrices) and len({m.storage for m in quantised}) == 1:
        return QuantizedTensor.stack(quantised)
    floats = [m.dequantize(jnp.bfloat16) if isinstance(m, QuantizedTensor) else m for m in matrices]
    alike = len({m.dtype for m in floats}) == 1
    return jnp.stack(floats if alike else [m.astype(jnp.float32) for m in floats])


class Mixture(nnx.Module):
    """The weighted sum of the experts that a router chooses, and the output of `shared`, an MLP for every token.

    router: x float [tokens, hidden] -> (experts int32 [tokens, k], their weights float32 [tokens, k]). On several
    devices each has an equal part of the experts, or of the features of each. `weighted_rows`: weights multiply the
    inputs of experts, not their outputs."""

    over: Axes = ALONE

    def __init__(self, router: Any, experts: Any, shared: Any = None, weighted_rows: bool = False):
        self.router, self.experts, self.shared, self.weighted_rows = router, experts, shared, weighted_rows

    def behind_norm(self, x, delta, norm, eps: float):
        """(x + delta, the output of this mixture for the norm of that sum)."""
        if delta is not None and not isinstance(delta, Term | Unmade) and self.shared is None:
            rows = x.reshape(-1, x.shape[-1])
            if self.over.gathers(rows):
                total, normed = self.over.of_all_normed(rows, delta.reshape(rows.shape), norm, eps)
                return total.reshape(x.shape), self.over.term(self._of_gathered(normed).reshape(x.shape))
        alone = self.over == ALONE and self.shared is None and not self.weighted_rows
        if delta is None or isinstance(delta, Term | Unmade) or not alone or not hasattr(self.router, "probable"):
            x, normed = layers.add_norm(x, delta, norm, eps)
            return x, self(normed)
        matrices = self.experts.gate_up.get_value(), self.experts.down.get_value()
        rows = (y.reshape(-1, y.shape[-1]) for y in (delta, x))
        options = self.router.probable | {"eps": float(eps)}
        total, y = mixture_behind_norm(*rows, norm, self.router.weight.get_value(), *matrices, **options)
        return total.reshape(x.shape), y.reshape(x.shape)

    def _count(self) -> int:
        """The number of experts on all devices together."""
        return self.router.weight.get_value().shape[0]

    def __call__(self, x):
        """x [..., hidden] -> [..., hidden], or a `Term`.

        If all devices together have few rows, every device takes all of them and computes what its own experts add.
        These two small collectives take less time than to send each row to the devices of its experts and back."""
        rows = x.reshape(-1, x.shape[-1])
        if self.over.gathers(rows):
            y = self._of_gathered(self.over.of_all(rows))
        else:
            y = self._unweighted(rows, self._run)
        y = y.astype(x.dtype).reshape(x.shape)
        return self.over.term(y if self.shared is None else y + self.shared(x))

    def _run(self, rows, chosen, weights):
        if self.over.expert is None:
            return self.experts(rows, chosen, weights)
        return self.over.dispatched(rows, chosen, weights, self._count(), self.experts.of_sorted)

    def _unweighted(self, rows, run: Callable):
        """`run(rows, chosen, weights)`, the weighted sums of experts; where weights multiply the inputs, as sums of
        weight 1."""
        chosen, weights = self.router(rows)
        if not self.weighted_rows:
            return run(rows, chosen, weights)
        tokens, k = chosen.shape
        weighted = (rows.astype(jnp.float32)[:, None, :] * weights[:, :, None]).astype(rows.dtype)
        ones = jnp.ones((tokens * k, 1), jnp.float32)
        y = run(weighted.reshape(tokens * k, -1), chosen.reshape(-1, 1), ones)
        return y if k == 1 else y.reshape(tokens, k, -1).astype(jnp.float32).sum(1)

    def _of_gathered(self, rows):
        """This device's rows of the output, from the rows of all devices that share experts."""
        count = self.over.share(self._count())
        first = self.over.first(self._count())
        if self.weighted_rows:
            run = lambda rows, chosen, weights: _of_own(rows, chosen - first, weights, count, self.experts.of_sorted)
            return self.over.own_sums(self._unweighted(rows, run)).astype(rows.dtype)
        chosen, weights = self.router(rows)
        sorted_rows, places, sizes = ops.route(rows, chosen, count, first)
        return self.over.own_sums_of(self.experts.of_sorted(sorted_rows, sizes), places, chosen, weights, count)
