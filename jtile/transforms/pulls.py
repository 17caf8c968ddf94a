"""Cotangents of the commonest equations, written out: `jax.vjp` of one equation traces it three times, and the reverse
mode of a long kernel has hundreds of them. The equations are those that `jax.vjp` would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from jtile.language._equations import bind

# (equation, its operands, its result, the cotangent of the result, the operand that is asked for) -> its cotangent
Rule = Callable[[Any, Sequence[Any], Any, Any, int], Any]


def pull_of(eqn: Any) -> Rule | None:
    """The rule for an equation; None where `jax.vjp` knows it."""
    name, params = eqn.primitive.name, eqn.params
    if name == "reshape" and params.get("dimensions") is not None:
        return None
    if name in ("reshape", "broadcast_in_dim") and len(eqn.invars) > 1:  # sizes that are values
        return None
    return RULES.get(name)


def _fitted(eqn: Any, ct: Any, k: int) -> Any:
    """A cotangent of the result summed over the axes along which operand k was repeated."""
    shape = eqn.invars[k].aval.shape
    if ct.shape == shape:
        return ct
    summed = lax.reduce_sum(ct, [d for d in range(ct.ndim) if not shape or shape[d] != ct.shape[d]])
    return lax.reshape(summed, shape) if shape else summed


def _mul(eqn: Any, args: Sequence[Any], _: Any, ct: Any, k: int) -> Any:
    return _fitted(eqn, bind(eqn, [ct, args[1]] if k == 0 else [args[0], ct])[0], k)


def _select(eqn: Any, args: Sequence[Any], _: Any, ct: Any, k: int) -> Any:
    nothing = lax.full_like(ct, 0)
    return lax.select_n(args[0], *[ct if j == k else nothing for j in range(1, len(args))])


def _broadcast(eqn: Any, _: Sequence[Any], __: Any, ct: Any, ___: int) -> Any:
    shape, dims = eqn.invars[0].aval.shape, eqn.params["broadcast_dimensions"]
    same = {d for n, d in zip(shape, dims, strict=True) if n == ct.shape[d]}
    summed = lax.reduce_sum(ct, [d for d in range(ct.ndim) if d not in same]) if len(same) < ct.ndim else ct
    return summed if summed.shape == shape else lax.reshape(summed, shape)


def _slice(eqn: Any, _: Sequence[Any], __: Any, ct: Any, ___: int) -> Any:
    starts, shape = eqn.params["start_indices"], eqn.invars[0].aval.shape
    steps = eqn.params["strides"] or (1,) * len(shape)
    ends = [a + (n - 1) * s + 1 if n else a for a, n, s in zip(starts, ct.shape, steps, strict=True)]
    pads = [(a, n - end, s - 1) for a, end, n, s in zip(starts, ends, shape, steps, strict=True)]
    return lax.pad(ct, lax.full_like(ct, 0, shape=()), pads)


def _sum(eqn: Any, _: Sequence[Any], __: Any, ct: Any, ___: int) -> Any:
    shape = eqn.invars[0].aval.shape
    return lax.broadcast_in_dim(ct, shape, [d for d in range(len(shape)) if d not in eqn.params["axes"]])


RULES: dict[str, Rule] = {
    "add": lambda eqn, args, out, ct, k: _fitted(eqn, ct, k),
    "sub": lambda eqn, args, out, ct, k: _fitted(eqn, ct if k == 0 else lax.neg(ct), k),
    "neg": lambda eqn, args, out, ct, k: lax.neg(ct),
    "mul": _mul,
    "exp": lambda eqn, args, out, ct, k: lax.mul(ct, out),
    "select_n": _select,
    "reshape": lambda eqn, args, out, ct, k: lax.reshape(ct, eqn.invars[0].aval.shape),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "reduce_sum": _sum,
}
