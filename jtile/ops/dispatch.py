"""Which implementation of an op a call gets: the first of a table that fits.

Every op that can be computed in several ways has a table of `Implementation`s, the preferred ones first. One may need
features of the target (`jt.Target.features`: never the name of an architecture), and refuse calls by their types and
options. The target is a guess while a call is traced, which only the lowering can check: what runs on no other target
is bound to the platform then, with the next implementation that fits standing in elsewhere.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

import jtile as jt
from jtile.errors import UnsupportedError

VECTOR_CORES = ("vector cores",)  # the feature of NPUs, whose memory holds the tiles of a program
BLOCK_LEVEL = ("warpgroup products",)  # the feature that kernels at the block level need
WARPS = ("warps",)  # the feature that tiles in the registers of threads are chosen for
# NPUs have no threads, but programs of theirs hold few tiles with sides of powers of two, as those of GPUs do.
_STANDS_FOR = {"warps": "vector cores"}


def has(target: jt.Target, name: str) -> bool:
    """Whether a target has a feature, or one that implementations are chosen by in its place."""
    return name in target.features or _STANDS_FOR.get(name) in target.features


def vector_cores() -> bool:
    """Whether an NPU is at hand."""
    return has(jt.target(), "vector cores")


def small_tiles() -> bool:
    """Whether programs at hand hold few tiles, with sides of powers of two, as on GPUs and NPUs; on a CPU tiles are as
    large as its caches."""
    return has(jt.target(), "warps")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      name: what `choices` calls it.
      run: `run(*operands, **options)`, traceable by JAX.
      misfit: `misfit(*operands, **options)` says why it does not take a call, None where it does; None: it takes all.
      needs: features that the target has to have.
      portable: whether it runs on targets without them too, if not as fast as others.
      differentiated: `differentiated(*operands, **options)` computes the same, and its derivative is that of the op
        where this one is bound to a platform; None: that of its stand-in is.
    """

    name: str
    run: Callable[..., Any]
    misfit: Callable[..., str | None] | None = None
    needs: tuple[str, ...] = ()
    portable: bool = True
    differentiated: Callable[..., Any] | None = None

    def refuses(self, target: jt.Target, operands: Sequence[Any], options: dict[str, Any]) -> str | None:
        """Why a call on this target does not fit, or None."""
        missing = [name for name in self.needs if not has(target, name)]
        if missing:
            return f"target {target.name} has no {missing[0]}"
        return self.misfit and self.misfit(*operands, **options)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Run as a stand-in for another implementation: what this one chooses is not listed as a choice of the call."""
        token = _found.set(None)
        try:
            return self.run(*operands, **options)
        finally:
            _found.reset(token)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that one call of an op got, and why.

    Attributes:
      op: the name of the op, or of a step of one.
      target: the name of the target that it was chosen for.
      implementation: the name of what computes it.
      elsewhere: what stands in for it where the program is lowered for another platform; None: it runs there, too.
      refused: (implementation, why it does not fit) of all that are preferred to it.
    """

    op: str
    target: str
    implementation: str
    elsewhere: str | None = None
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        other = f", on other platforms {self.elsewhere}" if self.elsewhere else ""
        return "\n".join(
            [f"{self.op} on {self.target}: {self.implementation}{other}"]
            + [f"  not {name}: {why}" for name, why in self.refused]
        )


class Op:
    """An op, or a step of one, with its implementations: `op(*operands, **options)`.

    Operands are pytrees of arrays, options hashable Python values. The derivative of an implementation that is bound to
    a platform is that of its stand-in, or of `differentiated`, for a schedule has none.
    """

    def __init__(self, name: str, *implementations: Implementation):
        self.name, self.implementations = name, implementations

    def __call__(self, *operands: Any, **options: Any) -> Any:
        chosen, other, choice = self._choose(operands, options)
        found = _found.get()
        if found is not None:
            found.append(choice)
        if other is None:
            return chosen.run(*operands, **options)
        fixed = tuple((name, type(value), value) for name, value in sorted(options.items()))
        like = other if chosen.differentiated is None else chosen.differentiated
        return _on(jt.target().platform, _with(chosen.run, fixed), _with(other, fixed), _with(like, fixed), operands)

    def choice(self, *operands: Any, **options: Any) -> Choice:
        """The choice that a call would get; operands may be `jax.ShapeDtypeStruct`s.

        Raises:
          UnsupportedError: no implementation takes the call.
        """
        return self._choose(operands, options)[2]

    def _choose(
        self, operands: Sequence[Any], options: dict[str, Any]
    ) -> tuple[Implementation, Implementation | None, Choice]:
        target, refused = jt.target(), []
        fits = lambda one: one.refuses(target, operands, options)
        for k, one in enumerate(self.implementations):
            why = fits(one)
            if why is None:
                behind = () if one.portable else self.implementations[k + 1 :]
                other = next((i for i in behind if i.portable and fits(i) is None), None)
                return one, other, Choice(self.name, target.name, one.name, other and other.name, tuple(refused))
            refused.append((one.name, why))
        reasons = "; ".join(f"{name}: {why}" for name, why in refused)
        raise UnsupportedError(f"{self.name}: nothing computes this call on target {target.name} ({reasons})")


def choices(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Choice]:
    """Which implementation each function of the library uses that `fn(*args, **kwargs)` calls, and why.

    Nothing runs. The target is `jt.target()`:
    `with jt.config(arch="sm_90"): print(*jt.ops.choices(jt.ops.matmul, a, b), sep="\\n")`.

    Args:
      fn: a function of the library, or one that calls some.
      args, kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      A `Choice` for each call, in the order of the calls.
    """
    found: list[Choice] = []
    token = _found.set(found)
    try:
        with _apart()(object()):  # functions that JAX has traced before are traced once more
            jax.eval_shape(functools.partial(fn, **kwargs), *args)
    finally:
        _found.reset(token)
    return found


_found: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("jtile_ops_choices", default=None)


@functools.cache
def _apart() -> Any:
    return jax.make_user_context(None)


@functools.lru_cache(maxsize=1024)
def _with(run: Callable[..., Any], options: tuple[tuple[str, type, Any], ...]) -> Callable[..., Any]:
    """`run` with these options; equal arguments give the same object, by which JAX remembers what it traced."""
    return functools.partial(run, **{name: value for name, _, value in options})


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _on(
    platform: str, here: Callable[..., Any], elsewhere: Callable[..., Any], like: Callable[..., Any], operands: Any
) -> Any:
    """`here(*operands)` where the program is lowered for the platform, `elsewhere(*operands)` on others; the derivative
    is that of `like(*operands)`."""
    return jax.lax.platform_dependent(*operands, default=elsewhere, **{platform: here})


@functools.partial(_on.defjvp, symbolic_zeros=True)
def _on_jvp(platform, here, elsewhere, like, primals, tangents):
    _, out = derivative(lambda operands: like(*operands), primals[0], tangents[0])
    return _on(platform, here, elsewhere, like, primals[0]), out


def derivative(of: Callable[[Any], Any], operands: Any, tangents: Any) -> tuple[Any, Any]:
    """`of(operands)` and its derivative by the operands that have a tangent. Those of others are `SymbolicZero`s:
    those, such as frozen weights, may have no derivative."""
    leaves, tree = jax.tree.flatten(operands)
    gradients = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))
    moved = {k: t for k, t in enumerate(gradients) if not isinstance(t, SymbolicZero) and _is_float(t)}

    def of_moved(*some):
        now = dict(enumerate(leaves)) | dict(zip(moved, some, strict=True))
        return of(jax.tree.unflatten(tree, now.values()))

    return jax.jvp(of_moved, tuple(leaves[k] for k in moved), tuple(moved.values()))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def first_unmet(*conditions: tuple[bool, str]) -> str | None:
    """The text beside the first condition that does not hold, None where all hold."""
    return next((why for holds, why in conditions if not holds), None)
