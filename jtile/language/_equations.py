"""What every walk over a jaxpr needs: its equations bound again, and the arguments to trace it anew with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import core
from jax.extend import source_info_util
from jax.ref import AbstractRef


def ref_aval(shape: Sequence[int], dtype: Any) -> AbstractRef:
    """A fresh type of a Ref: one object that comes twice would be an alias for JAX."""
    return AbstractRef(core.ShapedArray(tuple(shape), dtype))


def argument(aval: Any) -> Any:
    """The argument with which a jaxpr's invar of this type is traced."""
    if isinstance(aval, AbstractRef):
        return ref_aval(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


@contextlib.contextmanager
def place(eqn: Any, pin: Any = None) -> Iterator[None]:
    """Equations that are traced inside get the source line of this one, or of the source info `pin`."""
    info = pin or eqn.source_info
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """The results of an equation for other operands."""
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def opened(closed: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or open, and the values of its constvars."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries the equation of a scan has."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return params["num_consts"], params["num_carry"]
