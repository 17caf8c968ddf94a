"""Eager functions of `jnp` and `lax` on the CPU, run by NumPy: what tests write around kernels is one or two ops each.

XLA takes 10 to 20 ms to compile a program of one op, for every shape and dtype. Only calls of JAX's own functions are
taken, and of jtile's that pack and unpack weights, in tests that ask for the fixture `by_numpy`, and only where NumPy
has a rule for every op in them (`jtile.testing.evaluate`); what else tests or jtile jit is compiled as ever.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jtile.language._equations import opened
from jtile.testing import evaluate

OWN = os.path.join(os.path.dirname(jax.__file__), "_src") + os.sep
PACKING = ("_dequantized", "_from_int4", "pack_codes", "unpack_codes")  # of jtile.ops: tests make many weights


class _NoRuleError(Exception):
    """A rule of NumPy's would call JAX after all."""


@contextlib.contextmanager
def by_numpy(kernels: bool = True) -> Iterator[None]:
    """Eager calls of JAX's functions are run so inside, in this process, and of kernels by their code alone."""
    module = importlib.import_module("jax._" + "src.pjit")  # nothing public stands between a call and its program
    compiled, bound = module._pjit_call_impl_python, evaluate._bind
    inside: set[int] = set()  # threads that are in a call of NumPy's

    @functools.wraps(compiled)
    def call(*args: Any, jaxpr: Any, **params: Any) -> Any:
        me = threading.get_ident()
        if me not in inside and _own(jaxpr) and not any(params["donated_invars"]) and all(map(_here, args)):
            inside.add(me)
            try:
                return _run(jaxpr, args), None, None, []
            except _NoRuleError:
                _known[id(jaxpr)] = jaxpr, False
            finally:
                inside.discard(me)
        return compiled(*args, jaxpr=jaxpr, **params)

    def bind(eqn: Any, *operands: Any) -> Any:
        if threading.get_ident() in inside:
            raise _NoRuleError
        return bound(eqn, *operands)

    module._pjit_call_impl_python, evaluate._bind = call, bind
    try:
        with _arrays_are_put(), _kernels_are_called() if kernels else contextlib.nullcontext():
            yield
    finally:
        module._pjit_call_impl_python, evaluate._bind = compiled, bound


@contextlib.contextmanager
def _arrays_are_put() -> Iterator[None]:
    """`jnp.asarray` of NumPy's arrays compiles no program that copies them, for each shape."""
    lax = importlib.import_module("jax._" + "src.lax.lax")
    staged = getattr(lax, "stage_p", None)
    if staged is None:  # an older JAX
        yield
        return
    compiled = staged.impl
    staged.def_impl(lambda x: jax.device_put(x) if _of_numpy(x) else compiled(x))
    try:
        yield
    finally:
        staged.def_impl(compiled)


@contextlib.contextmanager
def _kernels_are_called() -> Iterator[None]:
    """An eager call of a kernel for CPUs runs its code on the arrays, without a program of XLA around it, which takes
    20 to 30 ms to trace and compile. `tests/support/native_calls.py` says which cannot be."""
    import native_calls

    from jtile.primitive.jtile_call import jtile_call_p

    compiled = jtile_call_p.impl

    def call(*operands: Any, program: Any) -> Any:
        if jax.config.jax_debug_nans or not all(map(_here, operands)) or not native_calls.plain(program):
            return compiled(*operands, program=program)
        return jax.device_put(native_calls.call(program, list(map(np.asarray, operands))), _where(operands))

    jtile_call_p.def_impl(call)
    try:
        yield
    finally:
        jtile_call_p.def_impl(compiled)


def _of_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and not getattr(x, "weak_type", False)


_known: dict[int, tuple[Any, bool]] = {}  # by the identity of a program, which is kept


def _own(closed: Any) -> bool:
    """Whether a program is one of those functions, and NumPy can run it."""
    key = id(closed)
    if key not in _known:
        _known[key] = closed, _fits(closed)
    return _known[key][1]


def _fits(closed: Any) -> bool:
    jaxpr = opened(closed)[0]
    info = jaxpr.debug_info
    own = (info.func_filename or "").startswith(OWN) or info.func_name in PACKING
    weak = any(v.aval.weak_type for v in jaxpr.outvars)
    return own and not weak and not jaxpr.effects and _ruled(closed)


def _ruled(closed: Any) -> bool:
    jaxpr = opened(closed)[0]
    if any(_extended(v) for v in [*jaxpr.invars, *jaxpr.outvars]):
        return False
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name not in evaluate.RULES or name.startswith("jtile"):
            return False
        if any(_extended(v) for v in [*eqn.invars, *eqn.outvars]):
            return False
        for part in jax.tree.leaves(dict(eqn.params), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if (hasattr(part, "eqns") or hasattr(part, "jaxpr")) and not _ruled(part):
                return False
    return True


def _extended(v: Any) -> bool:
    """Whether a variable is a typed random key, or another thing that NumPy has not."""
    return not isinstance(v.aval.dtype, np.dtype)


def _here(x: Any) -> bool:
    """Whether an operand is an array of one CPU, or of NumPy."""
    if isinstance(x, jax.Array):
        return len(x.sharding.device_set) == 1 and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | bool | int | float)


def _run(closed: Any, args: Any) -> list[jax.Array]:
    with np.errstate(all="ignore"):
        outs = evaluate._walk(*opened(closed), args)
    outs = [np.array(x, v.aval.dtype) for x, v in zip(outs, opened(closed)[0].outvars, strict=True)]
    return jax.device_put(outs, _where(args))


def _where(args: Any) -> Any:
    """The device that operands are bound to, if they are."""
    return next((x.device for x in args if isinstance(x, jax.Array) and x.committed), None)
