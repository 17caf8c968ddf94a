"""Python function to jaxpr over Refs."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core
from jax.ref import AbstractRef

from jtile._collector import paused
from jtile._compat import make_jaxpr
from jtile._errors import JtileError, KernelTypeError, KernelValueError
from jtile._parts import is_complex, is_key, stored
from jtile.language._axes import named_axes
from jtile.language._level import BlockLevelError, Level, tracing
from jtile.language._place import hidden, hide_own_frames, place_of
from jtile.language._primitives import allow_effects
from jtile.language.devices import Signals
from jtile.language.keys import KeyRef
from jtile.language.refs import Ref
from jtile.trace.rewrite import why_plain

CONST_LIMIT = 4096  # elements of a captured NumPy array that still become a literal of the kernel


def trace(fn, inputs, outputs, scratch=(), *, meta=None, name="", grid=(), axes=(), aliases=(), inits=()):
    """The jaxpr of a kernel body over Refs, flat in the order inputs, outputs, scratch.

    Args:
      fn: the kernel function (rewritten by `rewrite_loops`); it takes one positional parameter per entry below.
      inputs, outputs, scratch: sequences of pytrees of shape-dtype structs; each pytree becomes the same pytree of
        Refs.
      meta: keyword arguments of `fn`.
      name: the name of the kernel, for errors.
      grid: number of programs per axis; checked against the `program_id`s of the body.
      axes: the names of the grid's axes, for `program_id`s by name.
      aliases: pairs (flat input, flat output) that share a buffer: such an input can be stored to.
      inits: what each flat output starts from, or None; () where nothing is said of it.
    Returns:
      A closed jaxpr with Ref inputs and no outputs.
    Raises:
      KernelTypeError, KernelValueError, KernelSyntaxError: with the kernel's source line.
    """
    hide_own_frames()
    allow_effects()
    name = name or getattr(fn, "__name__", "kernel")
    groups = (tuple(inputs), tuple(outputs), tuple(scratch))
    params = [p for g in groups for p in g]
    leaves, treedef = jax.tree.flatten(tuple(params))
    counts = [len(jax.tree.leaves(g)) for g in groups]
    roles = [r for r, n in zip(("in", "out", "scratch"), counts, strict=True) for _ in range(n)]
    roles = [getattr(x, "role", r) for x, r in zip(leaves, roles, strict=True)]
    aliased = {i for i, _ in aliases}
    names = ref_names(fn, params)

    def body(*tracers):
        described = zip(tracers, names, roles, leaves, strict=True)
        refs = [_parameter(t, n, role, x.dtype, k in aliased) for k, (t, n, role, x) in enumerate(described)]
        out = fn(*treedef.unflatten(refs), **(meta or {}))
        if out is not None:
            raise KernelTypeError(
                f"kernel {name} returns a value ({_short(out)}), but a kernel stores its results to its output Refs "
                "and returns nothing",
                _definition(fn),
            )

    memory = [stored(x) for x in leaves]
    avals = [AbstractRef(core.ShapedArray(tuple(x.shape), np.dtype(x.dtype))) for x in memory]
    try:
        with named_axes(tuple(axes)):
            closed = _made(body, avals)
    except Exception as e:
        nones = [n for n, p in zip(inspect.signature(fn).parameters, params) if p is None]
        _say_where(e, fn, name, zip(names, leaves, strict=True), nones)
        raise
    _check_consts(fn, name, closed)
    _check_axes(closed, len(grid), name)
    first = counts[0]
    given = {o for _, o in aliases} | {k for k, start in enumerate(inits) if start is not None}
    undefined = [k for k in range(len(inits)) if k not in given and 0 not in leaves[first + k].shape]
    _check_written(fn, name, closed, {first + k: names[first + k] for k in undefined} if not given else {})
    return _of_reals(closed)


def _check_written(fn, name: str, closed, outputs: Mapping[int, str]) -> None:
    """Refuse a kernel that leaves all outputs (place -> name) as they start, which is undefined. Some of several may be
    for other calls."""
    used = {v for eqn in closed.jaxpr.eqns for v in eqn.invars if not hasattr(v, "val")}
    if outputs and not any(closed.jaxpr.invars[k] in used for k in outputs):
        output = next(iter(outputs.values()))
        raise KernelTypeError(
            f"kernel {name} does not write to its output {output}, which starts undefined: store to it, "
            f"{output}[...] = value (`{output} = value` only gives a value a name), or let it start from a number, "
            "init=0",
            _definition(fn),
        )


def _say_where(e: Exception, fn, name: str, refs: Iterable[tuple[str, Any]], nones: Sequence[str]) -> None:
    """Raise a typed error in the place of what JAX or Python raised in a body, or note the kernel on it, with the types
    of its Refs and the parameters that are None."""
    if (why := _explained(e)) is not None:
        raise KernelTypeError(why + _plain(e), _place_in(e, fn)) from e
    if isinstance(e, OverflowError):  # an int beside a tile is too large, in an operation of JAX
        text = "a Python int in it fits no dtype that it meets; write a float, or a NumPy scalar of a wider dtype"
        raise KernelValueError(f"kernel {name}: {text} ({_plain(e)})", _place_in(e, fn)) from e
    if not isinstance(e, JtileError):
        types = [f"{n}: {x.dtype.name}{list(x.shape)}" for n, x in refs]
        types += [f"{n}: None" for n in nones]
        file, line = _place_in(e, fn) or ("?", 0)
        e.add_note(f"jtile: while kernel {name} was traced for {', '.join(types)}, at {file}:{line}")


def _parameter(tracer, name, role, dtype, aliased):
    """The object that the body of a kernel gets for one parameter: a Ref, or signals."""
    if role == "signal":
        return Signals(tracer, name)
    return (KeyRef if is_key(dtype) else Ref)(tracer, name, role, role != "in" or aliased)


def _of_reals(closed):
    """The jaxpr with complex numbers as pairs of real ones."""
    variables = (v for eqn in equations(closed.jaxpr) for v in (*eqn.invars, *eqn.outvars))
    if not any(is_complex(getattr(v.aval, "dtype", None)) for v in (*closed.jaxpr.invars, *variables)):
        return closed
    from jtile.trace import pairs  # loads all rules for Tile IR, and is seldom needed

    with paused():
        return pairs.without_complex(closed)


@paused()
def _made(body, avals):
    """The jaxpr, traced a second time where the kernel turns out to be at block level only after memory was made."""
    try:
        with tracing(Level()):
            return make_jaxpr(body)(*avals)
    except BlockLevelError as e:
        otherwise = e.otherwise
    with tracing(Level(block=True)) as level:
        try:
            return make_jaxpr(body)(*avals)
        finally:
            if otherwise is not None and not level.roles:
                raise otherwise


def ref_names(fn, params) -> list[str]:
    """A name for every flat Ref: the parameter's, with the path inside of a pytree."""
    try:
        positional = [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        rest = [p.name for p in inspect.signature(fn).parameters.values() if p.kind == p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        positional, rest = [], []
    out = []
    for k, p in enumerate(params):
        base = positional[k] if k < len(positional) else f"{rest[0]}[{k - len(positional)}]" if rest else f"ref{k}"
        out += [base + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(p)]
    return out


def _short(x: Any) -> str:
    leaves = jax.tree.leaves(x)
    return str(getattr(leaves[0], "aval", type(leaves[0]).__name__)) if len(leaves) == 1 else type(x).__name__


def _definition(fn) -> tuple[str, int] | None:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else None


def _explained(e: Exception) -> str | None:
    """What an error of JAX means in a kernel, and the way out; None for one that says it as well itself."""
    if isinstance(e, jax.errors.TracerArrayConversionError):
        return (
            "a tile is given to NumPy, which computes on arrays that are there while the kernel is traced; take the "
            "function of jnp, or compute with NumPy on what is no tile"
        )
    if isinstance(e, jax.errors.ConcretizationTypeError | jax.errors.TracerIntegerConversionError):
        return (
            f"a traced value is needed as a Python value here: {str(e).splitlines()[0].rstrip('.')}; write jnp.where, "
            "jt.when or jt.cond for a choice, jt.range for a loop bound, jt.ds for the start of a slice, jt.assert_ "
            "for an assert, or make the number a meta-parameter"
        )
    if isinstance(e, RecursionError):
        return (
            "a function calls itself without end while the kernel is traced, since both sides of a branch are traced "
            "where its condition is; write a loop, or let a Python value end the recursion"
        )
    if isinstance(e, jax.errors.InconclusiveDimensionOperation) or (isinstance(e, TypeError) and "_DimExpr" in str(e)):
        return _size_needed(e)
    if isinstance(e, ValueError) and "__jax_array__" in str(e) and not isinstance(e, KernelValueError):
        return "a Ref is used as a value here; load it first: x[...]"
    if isinstance(e, jax.errors.UnexpectedTracerError):
        return "a value of a finished loop or branch is used: " + _LEAK
    return None


def _plain(e: Exception) -> str:
    """What to add where a function asks for the truth of a traced value in Python, since it was not rewritten."""
    if not isinstance(e, jax.errors.TracerBoolConversionError):
        return ""
    place: tuple[Any, int] | None = None
    tb = e.__traceback__
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(hidden()):
            place = tb.tb_frame.f_code, tb.tb_lineno or 0
        tb = tb.tb_next
    why = place and why_plain(*place)
    return f"; {why}" if why else ""


def _size_needed(e: Exception) -> str:
    why = str(e).splitlines()[0].rstrip(".").replace("'_DimExpr' object", "a dynamic size")
    return (
        f"the size of a dynamic dimension is needed while the kernel is traced: {why}; write jt.range for a loop, "
        "jt.when or jnp.where on jnp.asarray(n) for a choice, or mark fewer dimensions dynamic"
    )


_LEAK = (
    "if the value was made inside a tile loop or branch (appended to a list, set as an attribute, assigned through "
    "nonlocal) and is used after it, assign it to a name of the kernel there"
)


def _place_in(e: BaseException, fn) -> tuple[str, int] | None:
    """The innermost line of an exception's traceback that stands in the file of `fn`."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    place, tb = None, e.__traceback__
    while tb is not None:
        if (
            code is not None
            and tb.tb_frame.f_code.co_filename == code.co_filename
            and tb.tb_frame.f_code.co_name != "<module>"
        ):
            place = (code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    return place or _definition(fn)


# -- what a kernel may close over ----------------------------------------------------------------------------------


def _check_consts(fn, name: str, closed) -> None:
    captured = _captured(fn)
    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        called = next((n for n, v in captured if v is const), None)
        what = f"the array {called!r}" if called else "an array"
        place = _first_use(closed.jaxpr, var) or _definition(fn)
        shape = f"{var.aval.str_short()}" if hasattr(var.aval, "str_short") else str(var.aval)
        if isinstance(const, core.Tracer) or (isinstance(const, jax.Array) and _is_device_array(const) and const.ndim):
            leak = "" if called else f"; or, {_LEAK}"
            raise KernelTypeError(
                f"kernel {name} closes over {what} ({shape}); pass it as an argument of the kernel{leak}", place
            )
        if math.prod(var.aval.shape) > CONST_LIMIT:
            raise KernelTypeError(
                f"kernel {name} closes over {what} ({shape}) of more than {CONST_LIMIT} elements; pass it as an "
                "argument",
                place,
            )


def _is_device_array(x) -> bool:
    return hasattr(x, "devices") and not isinstance(x, np.ndarray)


def _captured(fn) -> list[tuple[str, Any]]:
    """Names and values of arrays that the function (or one defined in it) can see outside of itself."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return []
    out = []
    for n, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            out.append((n, cell.cell_contents))
        except ValueError:  # the cell is not bound yet
            continue
    names, stack = set(), [code]
    while stack:
        c = stack.pop()
        names |= set(c.co_names)
        stack += [k for k in c.co_consts if inspect.iscode(k)]
    return out + [(n, fn.__globals__[n]) for n in sorted(names) if n in fn.__globals__]


def _first_use(jaxpr, var):
    for eqn in jaxpr.eqns:
        if any(v is var for v in eqn.invars):
            return place_of(eqn.source_info)
    return None


def _check_axes(closed, rank: int, name: str) -> None:
    for eqn in equations(closed.jaxpr):
        if eqn.primitive.name in ("jtile_program_id", "jtile_num_programs") and eqn.params["axis"] >= rank:
            raise KernelValueError(
                f"kernel {name} has a grid of {rank} {'axis' if rank == 1 else 'axes'}, so there is no "
                f"{eqn.primitive.name.removeprefix('jtile_')}({eqn.params['axis']})",
                place_of(eqn.source_info),
            )


_RULED = ("stop_gradient", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def derivative_rules(jaxpr) -> Any:
    """What is equal where two kernel bodies that compute the same have the same derivative, as far as that can be seen:
    None without `stop_gradient` and derivatives of their own; a digest of the text with those that JAX has; the jaxpr
    itself with those of other people, whose functions may differ though they look alike."""
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in _RULED]
    if not found:
        return None
    return hashlib.sha256(str(jaxpr).encode()).hexdigest() if all(map(_is_known, found)) else jaxpr


def _is_known(eqn) -> bool:
    """Whether the name and the body of a function with a derivative of its own say what the derivative is."""
    if eqn.primitive.name == "stop_gradient":
        return True
    closed = next(eqn.params[k] for k in ("call_jaxpr", "fun_jaxpr", "jaxpr") if k in eqn.params)
    name, _, place = (closed.jaxpr.debug_info.func_src_info or "").partition(" at ")
    jaxs, *jtiles = hidden()
    # jtile.trace.pairs wraps what is computed of complex numbers, and calls it by the name of the primitive
    return place.startswith(jaxs) or (place.startswith(tuple(jtiles)) and name not in _RULED)


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside it."""
    from jax.extend.core import jaxprs_in_params

    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(sub)


__all__ = ["CONST_LIMIT", "equations", "ref_names", "trace"]
