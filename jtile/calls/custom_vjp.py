"""`Kernel.defvjp`: a reverse rule of the user's, from pytrees to the flat arrays of the primitive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from jtile import _parts
from jtile._compat import is_symbolic
from jtile._errors import KernelTypeError
from jtile._parts import is_complex
from jtile.calls.boundary import in_memory, typed
from jtile.calls.signature import Signature, Structure, describe
from jtile.primitive.program import CustomVjp

if TYPE_CHECKING:
    from jtile.calls.layout import Layout


def custom_vjp(
    sig: Signature,
    rule: tuple[Callable[..., Any], Callable[..., Any]],
    in_tree: Structure,
    layout: Layout,
    operands: Sequence[Any],
    meta: dict[str, Any],
    key: Any,
) -> CustomVjp:
    """The rule `(fwd, bwd)` of one call: `in_tree` is the structure of its arguments, `operands` their types."""
    fwd, bwd = rule
    out_tree, results = layout.out_tree, tree_leaves(layout.outputs)
    seen: dict[str, Structure] = {}  # the structure of the residuals, which fwd decides
    kept: list[Any] = []  # the types of the residuals

    def flat_fwd(*arrays: Any) -> Sequence[Any]:
        args = tree_unflatten(in_tree, typed(arrays, operands))
        _takes(sig, "fwd", fwd, args, meta)
        given = fwd(*args, **meta)
        if not isinstance(given, tuple) or len(given) != 2:
            raise KernelTypeError(
                f"fwd of kernel {sig.name} gives {type(given).__name__}: expected a pair (result, residuals)", sig.where
            )
        outs, tree = tree_flatten(given[0])
        if tree != out_tree:
            raise KernelTypeError(
                f"fwd of kernel {sig.name} gives a result of structure {tree}: expected {out_tree}",
                sig.where,
            )
        for out, result in zip(outs, results, strict=True):
            if not _fits(jnp.shape(out), result.shape) or _dtype(out) != result.dtype:
                got = f"{_dtype(out)}{list(jnp.shape(out))}"
                raise KernelTypeError(
                    f"fwd of kernel {sig.name} gives {got} where the kernel gives {describe(result)}", sig.where
                )
        residuals, seen["residuals"] = tree_flatten(given[1])
        residuals = [jnp.asarray(x) for x in residuals]
        kept[:] = [jax.typeof(x) for x in residuals]
        return [in_memory(x) for x in (*outs, *residuals)]

    def flat_bwd(*arrays: Any) -> Sequence[Any]:
        n = seen["residuals"].num_leaves
        residuals = tree_unflatten(seen["residuals"], typed(arrays[:n], kept))
        cts = [_parts.cotangent(ct) if is_complex(t.dtype) else ct for ct, t in zip(arrays[n:], results, strict=True)]
        args = residuals, tree_unflatten(out_tree, cts)
        _takes(sig, "bwd", bwd, args, meta)
        back = bwd(*args, **meta)
        found = _cotangents(sig, back, in_tree, operands)
        return [_parts.of_parts(ct) if ct is not None and is_complex(ct.dtype) else ct for ct in found]

    return CustomVjp(flat_fwd, flat_bwd, (fwd, bwd, in_tree, key))


def _takes(sig: Signature, what: str, rule: Callable[..., Any], args: Sequence[Any], meta: dict[str, Any]) -> None:
    """Refuse a rule whose parameters do not take its arguments: meta-parameters are what is most often forgotten."""
    try:
        signature = inspect.signature(rule)
    except ValueError:  # a builtin has no signature that could be checked
        return
    try:
        signature.bind(*args, **meta)
    except TypeError as e:
        given = ", ".join(["*args" if what == "fwd" else "residuals, cotangent", *[f"{k}=" for k in meta]])
        raise KernelTypeError(
            f"{what} of kernel {sig.name} does not take its call, {what}({given}): {e}; meta-parameters that it does "
            "not need are **_",
            sig.where,
        ) from None


def _cotangents(sig: Signature, back: Any, in_tree: Structure, operands: Sequence[Any]) -> list[Any]:
    """What bwd gave, as one cotangent or None per operand; its shapes and dtypes are checked."""
    args = tree_unflatten(in_tree, operands)
    if not isinstance(back, tuple) or len(back) != len(args):
        got = f"{len(back)} entries" if isinstance(back, tuple | list) else type(back).__name__
        raise KernelTypeError(
            f"bwd of kernel {sig.name} gives {got}: expected a tuple of {len(args)}, one cotangent (or None) for each "
            "argument",
            sig.where,
        )
    out: list[Any] = []
    absent = lambda x: x is None  # a field of an argument without an array, or an array without a cotangent
    for k, (ct, arg) in enumerate(zip(back, args, strict=True)):
        leaves = tree_flatten_with_path(arg, is_leaf=absent)[0]
        found, tree = tree_flatten(ct, is_leaf=absent)
        if ct is None:
            found = [None] * len(leaves)
        if len(found) != len(leaves) or any(x is None and c is not None for (_, x), c in zip(leaves, found)):
            raise KernelTypeError(
                f"bwd of kernel {sig.name} gives a cotangent of structure {tree} for {sig.ref_name(k)}: expected that "
                "of the argument",
                sig.where,
            )
        for (path, x), c in zip(leaves, found, strict=True):
            if x is None:
                continue
            if c is not None and not (_fits(c.shape, x.shape) and c.dtype == x.dtype):
                raise KernelTypeError(
                    f"bwd of kernel {sig.name} gives {describe(c)} for {sig.ref_name(k)}{keystr(path)}, which is "
                    f"{describe(x)}: a cotangent has the shape and dtype of its argument",
                    sig.where,
                )
            out.append(c)
    return out


def _dtype(x: Any) -> Any:
    """The dtype of an array or a Python number."""
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _fits(shape: Sequence[int], wanted: Sequence[Any]) -> bool:
    """Whether a cotangent has the shape of its argument; a dynamic dimension may have any size."""
    return len(shape) == len(wanted) and all(n == m or is_symbolic(m) for n, m in zip(shape, wanted, strict=True))
