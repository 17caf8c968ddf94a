"""Activity: which values and Refs of a kernel depend on the inputs that are differentiated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import dtypes
from jax.ref import AbstractRef

from jtile.language._equations import scan_counts


def is_ref(v: Any) -> bool:
    return isinstance(v.aval, AbstractRef)


def is_literal(v: Any) -> bool:
    return hasattr(v, "val")


def is_float(v: Any) -> bool:
    return dtypes.issubdtype(v.aval.dtype, np.inexact)


class Activity:
    """Active variables of a pruned kernel jaxpr (calls are inlined, so every inner jaxpr runs at one place only).

    Attributes:
      active: values with a derivative, and the top-level variables of Refs that hold such values.
      roots: Ref variable of an inner jaxpr -> the variable that made the Ref.
      loaded: Refs (roots) that some equation reads.
      read: variables whose value something uses.
    """

    def __init__(self, jaxpr: Any, inputs: Iterable[Any], shared: Iterable[tuple[Any, Any]] = ()):
        """`inputs`: the invars (Refs) that are differentiated; `shared`: pairs of invars that are one memory, of which
        the second stands for both."""
        self.active: set[Any] = set()
        self.loaded: set[Any] = set()
        self.read: set[Any] = set()
        self.roots: dict[Any, Any] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
        self.roots |= dict(shared)
        self.active |= {self.roots[v] for v in inputs}
        self._changed = True
        while self._changed:
            self._changed, before = False, len(self.read)
            self._visit(jaxpr)
            self._changed |= len(self.read) > before  # a load stands in front of what reads its value

    def __contains__(self, v: Any) -> bool:
        """Whether a variable (of any inner jaxpr) is active."""
        return not is_literal(v) and self.roots.get(v, v) in self.active

    def _mark(self, v: Any) -> None:
        root = self.roots.get(v, v)
        if root not in self.active:
            self.active.add(root)
            self._changed = True

    def _link(self, outer: Iterable[Any], inner: Iterable[Any]) -> None:
        """Join operands with the variables that stand for them inside."""
        for a, b in zip(outer, inner, strict=True):
            if is_literal(a) or is_literal(b):
                continue
            if is_ref(b):
                self.roots[b] = self.roots[a]
            elif a in self:
                self._mark(b)

    def _visit(self, jaxpr: Any) -> None:
        self.read |= {v for v in jaxpr.outvars if not is_literal(v)}
        for eqn in jaxpr.eqns:
            self.read |= {v for v in eqn.invars if not is_literal(v)}
            _RULES.get(eqn.primitive.name, Activity._plain)(self, eqn)

    def _plain(self, eqn: Any) -> None:
        for v in eqn.outvars:
            if is_ref(v):
                self.roots.setdefault(v, v)
        if any(v in self for v in eqn.invars):
            for v in eqn.outvars:
                if not is_ref(v) and is_float(v):
                    self._mark(v)

    def _write(self, eqn: Any) -> None:
        """A store or an atomic: the Ref becomes active with the value; what is read back is active with the Ref."""
        ref, *rest = eqn.invars
        if any(v in self for v in rest) and is_float(ref):
            self._mark(ref)
        self._load(eqn)

    def _load(self, eqn: Any) -> None:
        ref = eqn.invars[0]
        if any(v in self.read for v in eqn.outvars):
            self.loaded.add(self.roots[ref])
        for v in eqn.outvars:
            if ref in self and is_float(v):
                self._mark(v)

    def _scan(self, eqn: Any) -> None:
        inner = eqn.params["jaxpr"].jaxpr
        n_consts, n_carry = scan_counts(eqn.params)
        self._link(eqn.invars, inner.invars)
        self._loop(eqn, inner, inner.invars[n_consts : n_consts + n_carry], n_carry)

    def _while(self, eqn: Any) -> None:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        carry = eqn.invars[n_cond + n_body :]
        self._link([*eqn.invars[:n_cond], *carry], cond.invars)
        self._link([*eqn.invars[n_cond : n_cond + n_body], *carry], body.invars)
        self._visit(cond)
        self._loop(eqn, body, body.invars[n_body:], len(carry))

    def _loop(self, eqn: Any, body: Any, carries: Any, n_carry: int) -> None:
        self._visit(body)
        self._link(body.outvars[:n_carry], carries)
        self._link(carries, eqn.outvars[:n_carry])  # a loop of no round gives its first carries
        self._link(body.outvars, eqn.outvars)

    def _cond(self, eqn: Any) -> None:
        for branch in eqn.params["branches"]:
            self._link(eqn.invars[1:], branch.jaxpr.invars)
            self._visit(branch.jaxpr)
            self._link(branch.jaxpr.outvars, eqn.outvars)


def active_outputs(
    jaxpr: Any, n_in: int, n_out: int, aliases: Iterable[tuple[int, int]], perturbed: Iterable[bool]
) -> tuple[int, ...]:
    """Which outputs of a pruned kernel jaxpr have a derivative, where the `perturbed` inputs are differentiated."""
    ins, outs = jaxpr.invars[:n_in], jaxpr.invars[n_in : n_in + n_out]
    shared = [(ins[i], outs[o]) for i, o in aliases]
    activity = Activity(jaxpr, [v for v, p in zip(ins, perturbed, strict=True) if p], shared)
    return tuple(k for k, v in enumerate(outs) if v in activity)


_RULES = {
    "jtile_load": Activity._load,
    "jtile_store": Activity._write,
    "jtile_atomic": Activity._write,
    "scan": Activity._scan,
    "while": Activity._while,
    "cond": Activity._cond,
}
