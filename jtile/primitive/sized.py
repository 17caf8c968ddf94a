"""Programs of JAX over symbolic sizes, run with numbers in the place of the symbols.

Every equation is bound as it stands, with the sizes among its parameters evaluated; kernels have dynamic sizes, and
read them from their operands. So the calls are ordinary ones for `jit`, `vmap` and derivatives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero

from jtile import ir
from jtile._compat import is_symbolic, resized
from jtile._errors import UnsupportedError
from jtile.primitive.program import CustomVjp
from jtile.primitive.sizes import sized

Refuse = Callable[[Exception], Exception]  # from what went wrong over symbols to what the caller is told


def run(jaxpr: Any, arrays: Sequence[Any], sizes: Mapping[str, Any], refuse: Refuse) -> list[Any]:
    """The results of a closed jaxpr over symbols, for arrays in which these have the values `sizes`."""
    return _Run(dict(sizes), refuse).closed(jaxpr, arrays)


class _Run:
    """One run: the values of the symbols, and the rules for equations in which sizes stand elsewhere than in plain
    parameters."""

    def __init__(self, sizes: dict[str, Any], refuse: Refuse):
        self.sizes, self.refuse = sizes, refuse
        self.rules: dict[str, Callable[..., Sequence[Any]]] = {
            "dim_as_value": self._value,
            "custom_jvp_call": self._custom_jvp,
            "custom_vjp_call": self._no_rule,
            "shard_map": self._no_rule,
            "jtile_call": self._call,
            "jtile_tangent": self._tangent,
        }

    def closed(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        return self.open(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), arrays)

    def open(self, jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = {}
        read = lambda v: v.val if isinstance(v, jexc.Literal) else env[v]
        env.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))
        for eqn in jaxpr.eqns:
            bind = self.rules.get(eqn.primitive.name, self._bind)
            with eqn.ctx.manager:
                outs = bind(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    # -- parameters ---------------------------------------------------------------------------------------------------
    def size(self, n: Any) -> Any:
        return sized(ir.parse_size(str(n)), self.sizes) if is_symbolic(n) else n

    def parameter(self, p: Any) -> Any:
        """A parameter of an equation without symbols: sizes, types and jaxprs, alone or in tuples."""
        if isinstance(p, jexc.ClosedJaxpr | jexc.Jaxpr):
            return self.jaxpr(p)
        if isinstance(p, tuple | list):
            items = [self.parameter(x) for x in p]
            return type(p)(*items) if hasattr(p, "_fields") else type(p)(items)
        if isinstance(p, ShapedArray):
            return p.update(shape=tuple(map(self.size, p.shape)))
        return self.size(p)

    def jaxpr(self, p: Any) -> Any:
        """A jaxpr over symbols, traced again with numbers."""
        closed = isinstance(p, jexc.ClosedJaxpr)
        jaxpr = p.jaxpr if hasattr(p, "jaxpr") else p
        types = [resized(v.aval, tuple(map(self.size, v.aval.shape))) for v in jaxpr.invars]
        made = jax.make_jaxpr(lambda *xs: self.closed(p, xs))(*types)
        return made if closed else made.jaxpr

    # -- equations ----------------------------------------------------------------------------------------------------
    def _bind(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        outs = eqn.primitive.bind(*values, **{name: self.parameter(p) for name, p in eqn.params.items()})
        return outs if eqn.primitive.multiple_results else [outs]

    def _value(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        return [jnp.asarray(self.size(eqn.params["dim"]), eqn.outvars[0].aval.dtype)]

    def _no_rule(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        raise self.refuse(UnsupportedError(f"it contains a {eqn.primitive.name} over them"))

    def _custom_jvp(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        """A function with a forward rule: the rule is traced over symbols too."""
        rule, n = eqn.params["jvp_jaxpr_fun"], eqn.params["num_consts"]

        @jax.custom_jvp
        def call(*primals):
            return self.closed(eqn.params["call_jaxpr"], primals)

        def jvp(primals, tangents):
            tangents = tangents[n:]
            zeros = [type(t) is SymbolicZero for t in tangents]
            try:
                jaxpr, consts, zero_outs = rule.call_wrapped(*zeros)
            except Exception as error:
                raise self.refuse(error) from error
            given = [t for t in tangents if type(t) is not SymbolicZero]
            outs = self.open(jaxpr, consts, (*primals[n:], *given))
            results, moved = outs[: len(zero_outs)], iter(outs[len(zero_outs) :])
            zero = lambda x: SymbolicZero(jax.typeof(x).to_tangent_aval())
            return results, [zero(x) if z else next(moved) for x, z in zip(results, zero_outs, strict=True)]

        call.defjvp(jvp, symbolic_zeros=True)
        return call(*values)

    # -- kernels ------------------------------------------------------------------------------------------------------
    def _call(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        """A kernel's own reverse rule is a function of arrays as well; it is traced over symbols when it is needed."""
        program, types = eqn.params["program"], [v.aval for v in eqn.invars]
        vjp = program.vjp and self._vjp(program.vjp, types, None, [v.aval for v in eqn.outvars])
        return eqn.primitive.bind(*values, program=self._program(program, vjp))

    def _tangent(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        from jtile.primitive.tangent import outs_of

        linear, types = eqn.params["linear"], [v.aval for v in eqn.invars]
        primals, _, residuals = linear.split(types)
        vjp = linear.vjp and self._vjp(linear.vjp, primals, residuals, outs_of(linear, primals))
        lanes = tuple(dataclasses.replace(w, size=self.size(w.size)) for w in linear.lanes)
        program = self._program(linear.program, linear.program.vjp)
        changed = dataclasses.replace(linear, program=program, lanes=lanes, vjp=vjp)
        return eqn.primitive.bind(*values, linear=changed)

    def _program(self, program: Any, vjp: CustomVjp | None) -> Any:
        """A program with numbers for the lanes of its vmaps. Equality of programs goes by the fingerprint."""
        levels = tuple(dataclasses.replace(w, size=self.size(w.size)) for w in program.levels)
        if vjp is program.vjp and levels == program.levels:
            return program
        lanes = "".join(f" {w.size}" for w, old in zip(levels, program.levels) if w != old)
        return dataclasses.replace(program, levels=levels, vjp=vjp, fingerprint=program.fingerprint + lanes)

    def _vjp(self, vjp: CustomVjp, operands: Sequence[Any], residuals: Any, outs: Sequence[Any]) -> CustomVjp:
        """A kernel's reverse rule, whose functions are traced over symbols.

        Args:
          operands, outs: the types of the kernel's operands and results, with symbols.
          residuals: the types of what its `fwd` keeps; None: `fwd` runs before `bwd`, and says it.
        """
        kept: list[Any] = [] if residuals is None else list(residuals)

        def fwd(*arrays: Any) -> Sequence[Any]:
            traced = self._traced(vjp.fwd, operands)
            kept[:] = traced.out_avals[len(outs) :]
            return self.closed(traced, arrays)

        def bwd(*arrays: Any) -> Sequence[Any]:
            types = [*kept, *outs]
            given = [k for k, x in enumerate(arrays) if x is not None]
            absent: list[bool] = []

            def some(*xs):
                at = dict(zip(given, xs, strict=True))
                back = vjp.bwd(*[at.get(k) for k in range(len(arrays))])
                absent[:] = [ct is None for ct in back]
                return [ct for ct in back if ct is not None]

            traced = self._traced(some, [types[k] for k in given])
            found = iter(self.closed(traced, [arrays[k] for k in given]))
            return [None if no else next(found) for no in absent]

        return CustomVjp(fwd, bwd, (vjp.key, "sized", tuple(self.sizes.items())))

    def _traced(self, fn: Callable[..., Any], types: Sequence[Any]) -> Any:
        try:
            return jax.make_jaxpr(fn)(*[resized(t, t.shape) for t in types])
        except Exception as error:
            raise self.refuse(error) from error
