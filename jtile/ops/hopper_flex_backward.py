"""Reverse mode of attention with functions for scores and masks, for Hopper: the roles of `hopper_backward_roles`,
by lists of the blocks of queries that see a block of keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_attention_backward
from jtile.ops.attention_windows import LOG2_E, Window
from jtile.ops.dispatch import first_unmet
from jtile.ops.flex_shards import lists_of_mask, reads
from jtile.ops.hopper_attention_backward import finished, in_shares, operands, shares
from jtile.ops.hopper_backward_roles import KEYS, Function, Masks, program

# Primitives whose results for a tile are those of its elements, one by one: functions of these alone are right for
# tiles whose rows are keys, too.
_ONE_BY_ONE = frozenset({
    "abs", "add", "and", "atan2", "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copy",
    "cos", "cosh", "div", "dynamic_slice", "eq", "erf", "exp", "exp2", "expm1", "floor", "gather", "ge", "gt",
    "integer_pow", "is_finite", "jit", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "not", "or", "pjit", "pow", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh",
    "xor",
})  # fmt: skip


def _hopper_flex_backward(
    q, k, v, g, s0, dp0, extras, lists, counts, seeds, numbers, zeros, dq, dk, dv,
    *, bq: int, scale: float, score: Function, mask: Function, window: Window, dropout: float,
):  # fmt: skip
    """`hopper_attention_backward` by lists and counts of `mask_lists`, [batch or 1, kv heads or 1, blocks of keys, n],
    of the blocks of queries that see the keys. With a score, s0 are the negative logarithms of sums themselves.
    numbers: `rows` and `heads` of `Masks`."""
    rows, heads = numbers
    masks = Masks(window, score=score, mask=mask, extras=extras, lists=lists, counts=counts, rows=rows, heads=heads)
    program(q, k, v, g, s0, dp0, None, None, seeds, dq, dk, dv, bq=bq, scale=scale, masks=masks, dropout=dropout)


@functools.lru_cache(maxsize=128)
def _kernel(sharding: str | None) -> jt.Kernel:
    """The kernel, with a rule of its own for each way in which functions read extras."""
    return jt.kernel(
        out_type=lambda q, k, v, *_, **__: (jax.ShapeDtypeStruct(q.shape, jnp.float32), jt.like(k), jt.like(v)),
        grid=lambda q, k, *_, **__: k.shape[0] * k.shape[2] * jt.cdiv(k.shape[1], 2 * KEYS),
        alias={"zeros": "dq"}, sharding=sharding, name="hopper_flex_backward",
    )(_hopper_flex_backward)  # fmt: skip


hopper_flex_backward = _kernel(None)


def misfit(
    q, k, v, extras, *_, scale: float, softcap: float | None, score: Function, mask: Function, by: tuple[bool, bool],
    **__,
) -> str | None:  # fmt: skip
    """Why `gradients` cannot compute the gradients of this call, None where it can."""
    why = hopper_attention_backward.misfit(q, k, softcap=softcap, scale=scale)
    return why or first_unmet(
        (softcap is None, "scores are capped"),
        (not by[1] or q.shape[2] == k.shape[2], "heads that share keys have masks of their own"),
        (score is None or _one_by_one(score, True, extras), "score does more than a function of one element would"),
        (mask is None or _one_by_one(mask, False, extras), "mask does more than a function of one element would"),
    )


def gradients(
    q, k, v, extras, seeds, o, lse, g, ct,
    *, scale: float, score: Function, mask: Function, window: Window, dropout: float, by: tuple[bool, bool], **_,
):  # fmt: skip
    """(dq, dk, dv) for the cotangents g of o and ct of lse (or None)."""
    options = {"scale": scale, "score": score, "mask": mask, "window": window, "dropout": dropout, "by": by}
    return _mapped(tuple(options.items()))(q, k, v, extras, seeds, o, lse, g, ct)


@functools.lru_cache(maxsize=128)
def _mapped(options: tuple[tuple[str, Any], ...]):
    """`of_batch` with a rule for vmap, one call behind the other: a tensor map has five axes, and all are in use."""

    @jax.custom_batching.custom_vmap
    def run(*args):
        return of_batch(*args, **dict(options))

    @run.def_vmap
    def _(size: int, batched, *args):
        del size
        leaves, tree = jax.tree.flatten(args)
        moved = [k for k, there in enumerate(jax.tree.leaves(batched)) if there]

        def one(some):
            now = dict(enumerate(leaves)) | dict(zip(moved, some, strict=True))
            return run(*jax.tree.unflatten(tree, now.values()))

        return jax.lax.map(one, [leaves[k] for k in moved]), (True, True, True)

    return run


def of_batch(
    q, k, v, extras, seeds, o, lse, g, ct,
    *, scale: float, score: Function, mask: Function, window: Window, dropout: float, by: tuple[bool, bool],
):  # fmt: skip
    """The result of `gradients`, without a rule for vmap."""
    (batch, t), (keys, groups) = q.shape[:2], k.shape[1:3]
    if (parts := shares(q, k)) > 1:
        given = {"scale": scale, "score": score, "mask": mask, "window": window, "dropout": dropout, "by": by}
        return in_shares(parts, of_batch, q, k, v, extras, seeds, o, lse, g, ct, **given)
    unit = scale * LOG2_E if score is None else 1.0
    given, bq = operands(q, k, v, o, lse, g, ct, seeds, unit=unit, dropout=dropout)
    *args, seeds, zeros = given
    lists, counts = _lists(extras, (batch, groups, keys, t), mask, window, by, bq)
    options = {"bq": bq, "scale": scale, "score": score, "mask": mask, "window": window, "dropout": dropout}
    kernel, numbers = hopper_flex_backward, (None, None)
    if not gpu_tiles.on_one_device():
        kernel, numbers = _cut(extras, lists, (batch, groups, q.shape[2] // groups), score, mask)
    found = kernel(*args, extras, lists, counts, seeds, numbers, zeros, **options)
    return finished(*found, q, scale=scale, dropout=dropout)


def _cut(extras, lists, sizes: tuple[int, int, int], score: Function, mask: Function):
    """The kernel that devices may share out along rows and heads, and its `numbers`; sizes: rows, heads of keys, and
    heads that share them."""
    batch, groups, group = sizes
    found = reads(score, mask, extras, batch, groups * group, group > 1)
    of_lists = f"{'b' if lists.shape[0] > 1 else '_'} {'h' if lists.shape[1] > 1 else '_'} _ _"
    names = ["b _ h n _", "b _ h _", "b _ h _", "b _ h n _", "b h n _", "b h n _", *map(" ".join, found.dims)]
    names += [of_lists, of_lists, "b h n _", *["b"] * found.row, *["h n"] * found.head, "b _ h n _"]
    rows = jnp.arange(batch, dtype=jnp.int32) if found.row else None
    heads = jnp.arange(groups * group, dtype=jnp.int32).reshape(groups, group) if found.head else None
    return _kernel(f"{', '.join(n or '()' for n in names)} -> b _ h n _, b _ h _, b _ h _"), (rows, heads)


def _lists(extras, sizes: tuple[int, int, int, int], mask: Function, window: Window, by: tuple[bool, bool], bq: int):
    """The lists and counts of the blocks of queries that see each block of keys; sizes: batch, heads, keys, queries."""
    left, right = window
    of = {"mask": mask and _turned(mask), "window": (right, left), "by": by, "bq": 2 * KEYS, "bk": bq}
    return lists_of_mask(extras, sizes=sizes, **of)[1:3]


@functools.lru_cache(maxsize=128)
def _turned(mask: Callable[..., Any]) -> Callable[..., Any]:
    """A mask of a tile whose rows are keys."""
    return lambda b, h, j, i, *extras: mask(b, h, i, j, *extras)


def _one_by_one(function: Callable[..., Any], scored: bool, extras: Any) -> bool:
    """Whether a score or mask takes tiles whose rows are keys as it takes those whose rows are queries."""
    return _turns(function, scored, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in extras))


@functools.lru_cache(maxsize=128)
def _turns(function: Callable[..., Any], scored: bool, extras: tuple[jax.ShapeDtypeStruct, ...]) -> bool:
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    scores = (jax.ShapeDtypeStruct((24, 40), jnp.float32),) if scored else ()
    turned = tuple(jax.ShapeDtypeStruct(x.shape[::-1], x.dtype) for x in scores)
    try:
        ways = [
            jax.make_jaxpr(function)(*scores, int32(), int32(), int32(24, 1), int32(1, 40), *extras),
            jax.make_jaxpr(function)(*turned, int32(), int32(), int32(1, 24), int32(40, 1), *extras),
        ]
    except (TypeError, ValueError, IndexError):
        return False
    steps, mirrored = ([*_steps(way.jaxpr)] for way in ways)
    alike = lambda a, b: a[0] == b[0] != "" and all(_mirrors(x, y) for x, y in zip(a[1], b[1], strict=True))
    return len(steps) == len(mirrored) and all(map(alike, steps, mirrored))


def _steps(jaxpr: Any) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """The primitive and the shapes of the results of each equation; "" for one that is not of `_ONE_BY_ONE`."""
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr")
        if inner is not None:
            yield from _steps(inner.jaxpr)
        last = eqn.primitive.name != "concatenate" or eqn.params["dimension"] == 2  # places of a gather, side by side
        name = eqn.primitive.name if eqn.primitive.name in _ONE_BY_ONE and last else ""
        yield name, [x.aval.shape for x in eqn.outvars]


def _mirrors(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a shape is that of the other way: of the same tile with its axes changed, or without any."""
    tile = any(n in (24, 40) for n in shape[:2])
    return other == (shape[1::-1] + shape[2:] if tile and len(shape) > 1 else shape)
