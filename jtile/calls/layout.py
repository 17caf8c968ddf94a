"""How `out_type`, `grid`, `alias`, `init` and `scratch` of a kernel fit the inputs of one call.

Nothing here traces: abstract inputs and meta-parameters go in, a `Layout` comes out.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_structure

from jtile._compat import is_symbolic
from jtile._errors import JtileError, KernelTypeError, KernelValueError
from jtile._mesh import OnEveryDevice
from jtile._parts import is_complex, is_key
from jtile.calls.signature import Signature, Structure, check_dtype, describe, nearest, place_of

if TYPE_CHECKING:
    from jtile import ir  # Tile IR is loaded when the first kernel is called, not at import

MAX_GRID_AXES = 16
MAX_PROGRAMS_PER_AXIS = 2**31 - 1  # a program id is an int32


@dataclasses.dataclass(frozen=True)
class Spec:
    """What `@jt.kernel(...)` was given."""

    out_type: Any
    grid: Any
    alias: Mapping[Any, Any] | None
    init: Any
    scratch: Any
    dynamic: Any = None
    sharding: Any = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """One call of a kernel.

    Attributes:
      inputs, outputs, scratch: a pytree of ShapeDtypeStruct for each positional parameter of that role.
      names: the name of each flat Ref.
      out_tree: structure of the results.
      grid: number of programs per axis.
      axes: the names of the grid's axes, where they have names.
      aliases: (input, output) pairs, both flat.
      inits: per flat output, the number it starts from or None.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    scratch: tuple[Any, ...]
    names: tuple[str, ...]
    out_tree: Structure
    grid: tuple[int, ...]
    axes: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...]
    inits: tuple[int | float | bool | None, ...]


def shared_refs(layout: Layout) -> tuple[tuple[int, str], ...]:
    """The Refs of a call that every device has, with their roles."""
    first = count_leaves((layout.inputs, layout.outputs))
    roles = [getattr(x, "role", None) for x in jax.tree.leaves(layout.scratch)]
    return tuple((first + k, role) for k, role in enumerate(roles) if role)


def count_leaves(tree: Any) -> int:
    """The number of leaves of a pytree."""
    return len(tree_flatten(tree)[0])


def lay_out(sig: Signature, spec: Spec, args: tuple[Any, ...], meta: dict[str, Any]) -> Layout:
    """Fit a kernel's specification to abstract inputs (a tuple of pytrees of ShapeDtypeStruct)."""
    # More inputs than Refs: say so before out_type stumbles over them.
    if not sig.variadic and len(args) > len(sig.refs):
        raise _arity(sig, args, None, None)
    out_type = _evaluate(sig, "out_type", spec.out_type, args, meta)
    outs = _typed(sig, "out_type", out_type)
    scratch = _typed(sig, "scratch", _evaluate(sig, "scratch", spec.scratch, args, meta))
    params = (*args, *outs, *scratch)
    if not sig.takes(len(params)):
        raise _arity(sig, args, outs, len(scratch))
    names = tuple(n for k, p in enumerate(params) for n in _leaf_names(sig.ref_name(k), p))
    grid, axes = _grid(sig, _evaluate(sig, "grid", spec.grid, args, meta))
    groups = _Groups(sig, args, outs, names)
    aliases = _aliases(groups, spec.alias)
    return Layout(
        inputs=args,
        outputs=outs,
        scratch=scratch,
        names=names,
        out_tree=tree_structure(out_type),
        grid=grid,
        axes=axes,
        aliases=aliases,
        inits=_inits(groups, spec.init, {o for _, o in aliases}),
    )


def _arity(sig: Signature, args: tuple[Any, ...], outs: Sequence[Any] | None, n_scratch: int | None) -> KernelTypeError:
    """A call that does not have as many arrays as the body has parameters."""
    first = len(sig.refs) - sig.optional
    refs = ", ".join([*sig.refs[:first], *(f"{n}=None" for n in sig.refs[first:])])
    refs += f", *{sig.variadic}" if sig.variadic else ""
    got = f"{len(args)} argument{'s' * (len(args) != 1)}"
    if outs is not None:
        got += f" and out_type makes {len(outs)} output{'s' * (len(outs) != 1)}"
        got += f" and {n_scratch} scratch" if n_scratch else ""
        nested = [k for k, o in enumerate(outs) if count_leaves(o) != 1]
        got += f"; output {nested[0]} is a structure of arrays, which is one parameter of the body" if nested else ""
    is_method = sig.refs[:1] == ("self",)
    method = "; a kernel is no method: make it a staticmethod, without self" if is_method else ""
    return KernelTypeError(
        f"kernel {sig.name} has {len(sig.refs)} Refs ({refs}), inputs then outputs then scratch; the call gives {got}"
        f"{method}{_list_among(sig, args)}",
        sig.where,
    )


def _list_among(sig: Signature, args: tuple[Any, ...]) -> str:
    """What to do about an argument that is a list of numbers."""
    for k, x in enumerate(args):
        if isinstance(x, list) and all(getattr(leaf, "shape", None) == () for leaf in tree_flatten(x)[0]):
            return (
                f"; argument {sig.ref_name(k)} is a list, a structure of {count_leaves(x)} arrays of one number each: "
                "np.asarray makes one array of it"
            )
    return ""


def _evaluate(sig: Signature, what: str, value: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> Any:
    """`value`, or what it gives for the abstract inputs and the meta-parameters that it has parameters for: parameters
    with the name of a meta-parameter take that one, the others the inputs in their order."""
    if not callable(value):
        return value
    params = inspect.signature(value).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in params)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in params)
    named = () if variadic else [p.name for p in params if p.kind is not p.POSITIONAL_ONLY and p.name in meta]
    positional = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in named]
    keywords = {p.name for p in params if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    inputs = args if variadic else args[: len(positional)]
    by_position = {p.name for p in positional[: len(inputs)]}
    given = {k: v for k, v in meta.items() if (takes_any or k in keywords) and k not in by_position}
    # Inputs go by name where a parameter allows that: parameters of meta-parameters may stand before it.
    apart = [p for p in positional if p.kind is p.POSITIONAL_OR_KEYWORD and not variadic]
    front = inputs[: len(inputs) if variadic else len(positional) - len(apart)]
    by_name = {p.name: x for p, x in zip(apart, inputs[len(front) :])}
    needed = [
        p.name for k, p in enumerate(positional) if k >= len(inputs) and p.name not in given and p.default is p.empty
    ]
    needed += [p.name for p in params if p.kind is p.KEYWORD_ONLY and p.name not in given and p.default is p.empty]
    if needed and needed[0] in sig.refs and needed[0] not in sig.meta:
        raise KernelTypeError(
            f"kernel {sig.name} is called with {len(args)} argument{'s' * (len(args) != 1)}, but its {what} takes "
            f"{len(positional)} inputs ({', '.join(p.name for p in positional)})",
            sig.where,
        )
    if needed:
        raise KernelTypeError(
            f"{what} of kernel {sig.name} wants {needed[0]!r}, which is neither one of the {len(args)} inputs of this "
            f"call nor a meta-parameter{nearest(needed[0], meta)}",
            place_of(value) or sig.where,
        )
    try:
        return value(*front, **by_name, **given)
    except (JtileError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        given_as = [_type_text(x) for x in inputs] + [f"{k}={v!r}" for k, v in given.items()]
        fails = f"{what} of kernel {sig.name} fails for ({', '.join(given_as)}):"
        if isinstance(e, JtileError):
            raise type(e)(f"{fails} {e.message}{_list_among(sig, args)}", e.where) from e
        kind = KernelTypeError if isinstance(e, AttributeError | TypeError) else KernelValueError
        raise kind(
            f"{fails} {type(e).__name__}: {e}{_list_among(sig, args)}",
            place_of(value) or sig.where,
        ) from e


def _type_text(x: Any) -> str:
    return describe(x) if hasattr(x, "dtype") else type(x).__name__


def _typed(sig: Signature, what: str, tree: Any) -> tuple[Any, ...]:
    """A pytree of things with shape and dtype, as one pytree of ShapeDtypeStruct per Ref parameter.

    The elements of a tuple or list are one parameter each; anything else is one parameter.
    """
    if tree is None:
        return ()
    per_param = tuple(tree) if isinstance(tree, tuple | list) else (tree,)

    def convert(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise KernelTypeError(
                f"{what} of kernel {sig.name} is {leaf!r}{keystr(path) and ' at ' + keystr(path)}: expected a "
                "jax.ShapeDtypeStruct, or jt.like(x, shape=..., dtype=...), or a pytree of them",
                sig.where,
            )
        check_dtype(sig, f"{what}{keystr(path)}", leaf.dtype)
        shape = tuple(_size(sig, what, s) for s in leaf.shape)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        if dtype != leaf.dtype:
            raise KernelTypeError(
                f"{what}{keystr(path)} of kernel {sig.name} has dtype {np.dtype(leaf.dtype).name}, which JAX would "
                f"narrow to {dtype.name}: set jax_enable_x64, or ask for {dtype.name}",
                sig.where,
            )
        if isinstance(leaf, OnEveryDevice):
            return _on_every_device(sig, what, OnEveryDevice(shape, dtype, leaf.role))
        return jax.ShapeDtypeStruct(shape, dtype)

    return tuple(jax.tree_util.tree_map_with_path(convert, p) for p in per_param)


def _on_every_device(sig: Signature, what: str, leaf: OnEveryDevice) -> OnEveryDevice:
    if what != "scratch":
        call = "jt.symmetric" if leaf.role == "symmetric" else "jt.signals"
        raise KernelTypeError(f"{what} of kernel {sig.name} is memory of {call}, which belongs into scratch", sig.where)
    if any(is_symbolic(n) for n in leaf.shape):
        raise KernelTypeError(
            f"memory that every device has is of one size on all of them, known when kernel {sig.name} is traced: "
            f"{leaf.shape} is dynamic; mark fewer dimensions dynamic",
            sig.where,
        )
    if is_complex(leaf.dtype) or is_key(leaf.dtype):
        raise KernelTypeError(
            f"symmetric memory of kernel {sig.name} holds no complex numbers and no random keys: make two of it for "
            "the two parts",
            sig.where,
        )
    return leaf


def _size(sig: Signature, what: str, size: Any) -> Any:
    if is_symbolic(size):
        return size
    try:
        n = operator.index(size)
    except TypeError:
        raise KernelTypeError(f"{what} of kernel {sig.name} has a side {size!r}: expected an int", sig.where) from None
    if n < 0:
        raise KernelValueError(f"{what} of kernel {sig.name} has the negative side {n}", sig.where)
    return n


def _grid(sig: Signature, grid: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The number of programs per axis, and the names of the axes of a grid that is a dict."""
    names = tuple(grid) if isinstance(grid, Mapping) else ()
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise KernelTypeError(
                f"the grid of kernel {sig.name} calls an axis {name!r}: a name of letters, digits and _ was expected",
                sig.where,
            )
    if isinstance(grid, Mapping):
        sides = tuple(grid.values())
    else:
        sides = tuple(grid) if isinstance(grid, tuple | list) else (grid,)
    if len(sides) > MAX_GRID_AXES:
        raise KernelValueError(
            f"the grid of kernel {sig.name} has {len(sides)} axes: at most {MAX_GRID_AXES} are possible, besides those "
            "of vmap; compute several ids from one, with // and %",
            sig.where,
        )
    return _sides(sig, sides, names or range(len(sides))), names


def _sides(sig: Signature, sides: Sequence[Any], names: Sequence[str | int]) -> tuple[int, ...]:
    out = []
    for k, n in zip(names, sides, strict=True):
        if is_symbolic(n):
            out.append(n)
            continue
        if isinstance(n, bool | Tracer) or not hasattr(n, "__index__"):
            kind = "traced: the grid is static" if isinstance(n, Tracer) else "no int"
            raise KernelTypeError(f"axis {k} of the grid of kernel {sig.name} is {n!r}, which is {kind}", sig.where)
        n = operator.index(n)
        if n < 0:
            raise KernelValueError(
                f"axis {k} of the grid of kernel {sig.name} is {n}: a grid has no negative axes (0 means no program)",
                sig.where,
            )
        if n > MAX_PROGRAMS_PER_AXIS:
            raise KernelValueError(
                f"axis {k} of the grid of kernel {sig.name} is {n}: at most {MAX_PROGRAMS_PER_AXIS} programs an axis",
                sig.where,
            )
        out.append(n)
    if math.prod(n for n in out if isinstance(n, int)) >= 2**62:
        raise KernelValueError(
            f"the grid {tuple(out)} of kernel {sig.name} has more programs than fit 62 bits", sig.where
        )
    return tuple(out)


def _leaf_names(name: str, tree: Any) -> list[str]:
    paths = [path for path, _ in tree_flatten_with_path(tree)[0]]
    return [re.sub(r"\W+", "_", name + keystr(p)).strip("_") for p in paths]


class _Groups:
    """Which flat inputs and outputs belong to which parameter; finds parameters by name or position."""

    def __init__(self, sig: Signature, args: Sequence[Any], outs: Sequence[Any], names: Sequence[str]):
        self.sig, self.n_in = sig, len(args)
        self.args, self.outs, self.names = args, outs, names
        self.in_at = _offsets(args)
        self.out_at = _offsets(outs)
        self.flat_inputs = sum(map(len, self.in_at))

    def find(self, what: str, key: Any, side: str) -> int:
        first, n = (0, self.n_in) if side == "input" else (self.n_in, len(self.outs))
        if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < n:
            return key
        known = [self.sig.ref_name(first + k) for k in range(n)]
        if key in known:
            return known.index(key)
        raise KernelValueError(
            f"{what} of kernel {self.sig.name} names {key!r}, which is no {side}; {side}s are: {', '.join(known)}",
            self.sig.where,
        )


def _offsets(trees: Sequence[Any]) -> list[range]:
    out, at = [], 0
    for tree in trees:
        n = tree_structure(tree).num_leaves
        out.append(range(at, at + n))
        at += n
    return out


def _aliases(groups: _Groups, alias: Mapping[Any, Any] | None) -> tuple[tuple[int, int], ...]:
    if alias is not None and not isinstance(alias, Mapping):
        raise KernelTypeError(f'alias={alias!r}: expected a dict such as {{"x": "o"}}', groups.sig.where)
    pairs: list[tuple[int, int]] = []
    for key, value in (alias or {}).items():
        i, o = groups.find("alias", key, "input"), groups.find("alias", value, "output")
        if tree_structure(groups.args[i]) != tree_structure(groups.outs[o]):
            raise KernelValueError(
                f"alias {key!r} -> {value!r} of kernel {groups.sig.name}: the two are pytrees of different structure",
                groups.sig.where,
            )
        for a, b, p, q in zip(
            groups.in_at[i], groups.out_at[o], tree_flatten(groups.args[i])[0], tree_flatten(groups.outs[o])[0]
        ):
            if (p.shape, p.dtype) != (q.shape, q.dtype):
                raise KernelValueError(
                    f"alias {key!r} -> {value!r} of kernel {groups.sig.name}: the input is {describe(p)} and the "
                    f"output {describe(q)}; two Refs that share a buffer need one shape and dtype",
                    groups.sig.where,
                )
            pairs.append((a, b))
    for side in zip(*pairs):
        if len(set(side)) != len(side):
            raise KernelValueError(f"alias of kernel {groups.sig.name} uses one Ref twice: {alias}", groups.sig.where)
    return tuple(sorted(pairs))


def _inits(groups: _Groups, init: Any, aliased: set[int]) -> tuple[int | float | bool | None, ...]:
    sig, flat = groups.sig, tree_flatten(tuple(groups.outs))[0]
    out: list[Any] = [None] * len(flat)
    for k, value in _per_output(groups, init):
        for at in groups.out_at[k]:
            name = groups.names[groups.flat_inputs + at]
            if value is None or (at in aliased and _is_number(init)):
                continue
            if at in aliased:
                raise KernelValueError(
                    f"output {name!r} of kernel {sig.name} has an init and an alias: it starts from the aliased input",
                    sig.where,
                )
            out[at] = _start(sig, name, value, flat[at].dtype)
    return tuple(out)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | complex | np.number | np.bool_)


def _per_output(groups: _Groups, init: Any) -> list[tuple[int, Any]]:
    """`init` as (output parameter, number) pairs: one number for all, a sequence in their order, or a dict by name."""
    if init is None:
        return []
    if _is_number(init):
        return [(k, init) for k in range(len(groups.outs))]
    if isinstance(init, Mapping):
        return [(groups.find("init", key, "output"), v) for key, v in init.items()]
    if isinstance(init, tuple | list):
        if len(init) != len(groups.outs):
            raise KernelValueError(
                f"init of kernel {groups.sig.name} has {len(init)} entries for {len(groups.outs)} outputs",
                groups.sig.where,
            )
        return list(enumerate(init))
    raise KernelTypeError(
        f"init={init!r} of kernel {groups.sig.name}: expected a number, a tuple with one number (or None) for each "
        "output, or a dict by output name",
        groups.sig.where,
    )


def _start(sig: Signature, name: str, value: Any, dtype: np.dtype) -> int | float | bool:
    """The number an output starts from, as a Python number that its dtype can hold."""
    if not _is_number(value):
        raise KernelTypeError(
            f"init of output {name!r} of kernel {sig.name} is {value!r}: expected a number", sig.where
        )
    if is_key(dtype):
        raise KernelTypeError(
            f"output {name!r} of kernel {sig.name} holds random keys, which cannot start from the number {value!r}: "
            "leave init out, or alias the output with an input",
            sig.where,
        )
    if is_complex(dtype):
        if value == 0 or value != value:
            return 0.0 if value == 0 else math.nan
        raise KernelValueError(
            f"output {name!r} of kernel {sig.name} is of complex numbers, which start from 0 or nan, not from "
            f"{value!r}: alias the output with an input that holds this number",
            sig.where,
        )
    from jtile import ir

    info = ir.dtype_info(dtype)
    if isinstance(value, complex | np.complexfloating):
        pass  # the error below says that the value does not fit the dtype
    elif info.kind == "f":
        with np.errstate(all="ignore"):
            held = float(np.asarray(value, np.float64).astype(info.numpy).astype(np.float64))
        if math.isfinite(held) == math.isfinite(value) and math.isnan(held) == math.isnan(value):
            return float(value)
    elif math.isfinite(value) and value == int(value):
        low, high = _int_range(info)
        if low <= value <= high:
            return bool(value) if info.kind == "b" else int(value)
    raise KernelValueError(
        f"init={value!r} does not fit output {name!r} of kernel {sig.name}, which is {info.name}", sig.where
    )


def _int_range(info: ir.DType) -> tuple[int, int]:
    if info.kind == "b":
        return 0, 1
    return (0, 2**info.bits - 1) if info.kind == "u" else (-(2 ** (info.bits - 1)), 2 ** (info.bits - 1) - 1)
