"""From the arrays of a call to those of the primitive, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jtile import _parts
from jtile._parts import is_complex, is_key


def is_split(dtype: Any) -> bool:
    """Whether the memory behind an array of this dtype has one more axis, at its end."""
    return is_complex(dtype) or is_key(dtype)


def in_memory(x: Any) -> Any:
    """An array in the form in which memory holds it."""
    return _parts.parts(x) if is_complex(x.dtype) else _parts.words(x)


def typed(arrays: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Arrays in memory as arrays of these types."""
    found = {True: _parts.whole, False: _parts.keys}
    return [found[is_complex(t.dtype)](x) if is_split(t.dtype) else x for x, t in zip(arrays, types, strict=True)]


def around(run: Callable[..., Sequence[Any]], inputs: Any, outputs: Any) -> Callable[..., Sequence[Any]]:
    """A function of arrays in memory as one of arrays of the types `inputs`, with results of the types `outputs` (both
    are pytrees of them); further arguments are passed on."""
    types, results = jax.tree.leaves(inputs), jax.tree.leaves(outputs)
    if not any(is_split(t.dtype) for t in (*types, *results)):
        return run
    return lambda arrays, *more: typed(run([in_memory(x) for x in arrays], *more), results)


def runner(program: Any, layout: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that runs a program on the flat arrays of a call; `layout` says their types."""
    from jtile.primitive.tangent import bind

    run = around(functools.partial(bind, program), layout.inputs, layout.outputs)
    if not any(is_complex(x.dtype) for x in jax.tree.leaves((layout.inputs, layout.outputs))):
        return run
    return functools.partial(_at_once, program, run, _jitted(program, run))


def _jitted(program: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    def call(arrays: Sequence[Any]) -> Sequence[Any]:
        return run(arrays)

    call.__name__ = call.__qualname__ = program.name
    return jax.jit(call)


def _at_once(program: Any, run: Callable[..., Any], jitted: Callable[..., Any], arrays: Sequence[Any]) -> Sequence[Any]:
    """An eager call with complex numbers is one XLA program, in which nothing is copied: to split arrays and to join
    them again would be others. A kernel that is interpreted, or that asserts, is called by itself for its errors."""
    from jtile.primitive.lowering import interpreted

    eager = not any(isinstance(x, Tracer) for x in arrays)
    if eager and not (program.io or interpreted(program) or jax.config.jax_disable_jit):
        return jitted(arrays)
    return run(arrays)
