"""What the walks over a kernel's jaxpr share: the loops it has, and what has no derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.ref import AbstractRef

from jtile._errors import TransformError
from jtile.language._equations import scan_counts
from jtile.language._place import place_of
from jtile.trace.rules.control import bounded, counters


def refuse(message: str, eqn: Any) -> TransformError:
    return TransformError(message, place_of(eqn.source_info))


def refuse_memory(eqn: Any) -> None:
    """Refuse a function with a derivative of its own that loads or stores: its rule knows of values only."""
    if any(isinstance(v.aval, AbstractRef) for v in eqn.invars):
        raise refuse(
            f"a derivative is asked for of a function with {eqn.primitive.name.removesuffix('_call')} that loads from "
            "a Ref or stores to one: its rule knows of values only; load before the function is called, and pass the "
            "values",
            eqn,
        )


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `scan` or `while` equation.

    Attributes:
      eqn: the equation.
      body: its jaxpr, open: `(*consts, *carry, *xs) -> (*carry, *ys)`.
      body_consts: values of the body's constvars.
      consts, init, xs: the equation's operands in these roles.
      length: number of rounds, or None.
      counter: place of the carry that counts the rounds (None: none does), and its step.
      limit: for a `while` that counts, the variable or literal of the equation's operands that ends it.
      reverse: the xs are taken and the ys stored from the last to the first.
    """

    eqn: Any
    body: Any
    body_consts: Sequence[Any]
    consts: Sequence[Any]
    init: Sequence[Any]
    xs: Sequence[Any] = ()
    length: int | None = None
    counter: int | None = None
    step: int = 1
    limit: Any = None
    reverse: bool = False

    @property
    def carries(self) -> Sequence[Any]:
        """The body's variables of the carry."""
        return self.body.invars[len(self.consts) : len(self.consts) + len(self.init)]


def as_loop(eqn: Any) -> Loop | None:
    """The counted loop that an equation is; None for a `while` that does not count."""
    if eqn.primitive.name == "scan":
        n_consts, n_carry = scan_counts(eqn.params)
        closed = eqn.params["jaxpr"]
        loop = Loop(
            eqn, closed.jaxpr, closed.consts, eqn.invars[:n_consts], eqn.invars[n_consts : n_consts + n_carry],
            eqn.invars[n_consts + n_carry :], length=eqn.params["length"], reverse=eqn.params["reverse"],
        )  # fmt: skip
        found = counters(loop.body, loop.carries, loop.body.outvars[:n_carry])
        first = next((c for c in found if c.step > 0), None)
        return dataclasses.replace(loop, counter=first.place, step=first.step) if first else loop
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, closed = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"]
    found = bounded(cond, n_cond, closed.jaxpr, n_body)
    if found is None:
        return None
    counter, limit = found
    init = eqn.invars[n_cond + n_body :]
    if not hasattr(limit, "val"):
        limit = dict(zip(cond.invars, [*eqn.invars[:n_cond], *init], strict=True))[limit]
    return Loop(
        eqn, closed.jaxpr, closed.consts, eqn.invars[n_cond : n_cond + n_body], init,
        counter=counter.place, step=counter.step, limit=limit,
    )  # fmt: skip


def check_arrivals(equations: Iterator[Any]) -> None:
    """Refuse kernels whose programs arrive at counters: they have no derivative, as cotangents run the other way."""
    for eqn in equations:
        if eqn.primitive.name == "jtile_last_arrival":
            raise refuse(
                "a derivative is asked for of a kernel whose programs arrive at counters (jt.arrive): what the last of "
                "them does with the parts of all has none here; give the kernel a rule of its own (defvjp)",
                eqn,
            )
