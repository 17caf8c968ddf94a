"""What a kernel's signature says: the names of its Refs, its meta-parameters and their checks; and its options."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import linecache
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jtile import _parts
from jtile._compat import is_symbolic
from jtile._errors import KernelTypeError, KernelValueError, Place
from jtile.primitive.options import OPTIONS

Structure = Any  # a jax.tree_util.PyTreeDef
REQUIRED = inspect.Parameter.empty


class Auto:
    """The type of `jt.auto`, which stands for a number that jtile chooses: the side of a tile, or `stages=` of a loop.

    As the default of a meta-parameter, or given at a call: `def matmul(a, b, o, *, bm: int = jt.auto)`. The choice
    depends on shapes, dtypes and the target alone; an entry of `jt.tune` goes before it.
    """

    def __repr__(self) -> str:
        return "jt.auto"

    def __reduce__(self) -> str:
        return "auto"


auto: Any = Auto()  # its type is Any, since it stands where a number is expected


def autos(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The meta-parameters that are `jt.auto`."""
    return tuple(name for name, value in meta.items() if value is auto)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Names of a kernel's Refs and meta-parameters.

    Attributes:
      name: the kernel's name, for messages.
      refs: names of the positional parameters.
      variadic: name of `*refs`, or None.
      optional: how many of `refs`, counted from the last, have the default None: a call may leave them out.
      meta: keyword-only parameters with their defaults (`REQUIRED` where there is none).
      open: whether the kernel takes `**meta` besides the parameters of `meta`.
      where: file and line of the `def`.
    """

    name: str
    refs: tuple[str, ...]
    variadic: str | None
    meta: Mapping[str, Any]
    open: bool
    where: Place
    optional: int = 0

    def takes(self, count: int) -> bool:
        """Whether the body can be called with so many Refs."""
        least = len(self.refs) - self.optional
        return count >= least if self.variadic else least <= count <= len(self.refs)

    def ref_name(self, k: int) -> str:
        return self.refs[k] if k < len(self.refs) else f"{self.variadic or 'ref'}{k - len(self.refs)}"

    def check_meta(self, given: Mapping[str, Any]) -> None:
        """Refuse meta-parameters that the kernel does not have, or whose values cannot be fixed at compile time."""
        for name, value in given.items():
            if name not in self.meta and not self.open:
                raise KernelTypeError(
                    f"kernel {self.name} has no meta-parameter {name!r}{self._instead(name, value)}", self.where
                )
            self._check_static(name, value)

    def _instead(self, name: str, value: Any) -> str:
        """What a keyword that is no meta-parameter was likely meant for."""
        if name in self.refs:
            return f": {name!r} is a Ref of it, and the arrays of a call are given by position"
        if name in OPTIONS:
            return f": {name} is an option, {self.name}.with_options({name}={value!r})(...)"
        return nearest(name, self.meta)

    def bind_meta(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The meta-parameters of one call, defaults filled in; sorted by the order of the signature."""
        self.check_meta(given)
        missing = [name for name, v in self.meta.items() if v is REQUIRED and name not in given]
        if missing:
            raise KernelTypeError(
                f"kernel {self.name} needs the meta-parameter {missing[0]!r}: it has no default, "
                f"so give it at the call, as in {self.name}(..., {missing[0]}=...)",
                self.where,
            )
        return {**self.meta, **given}

    def _check_static(self, name: str, value: Any) -> None:
        arrays = [x for x in jax.tree.leaves(value) if isinstance(x, Tracer | jax.Array | np.ndarray)]
        if arrays:
            raise KernelTypeError(
                f"meta-parameter {name!r} of kernel {self.name} is an array ({describe(arrays[0])}): meta-parameters "
                "are fixed at compile time; make it a positional argument, or name it in static_argnames of jax.jit; "
                "instead of a jax.vmap over it, call the kernel in a Python loop",
                self.where,
            )
        if is_symbolic(value):
            raise KernelTypeError(
                f"meta-parameter {name!r} of kernel {self.name} is {value}, a size that is known only when the kernel "
                "runs: meta-parameters are fixed at compile time; read the size from the shape of an argument in the "
                "kernel, or give a number that fits every size",
                self.where,
            )
        try:
            hash(value)
        except TypeError:
            raise KernelTypeError(
                f"meta-parameter {name!r} of kernel {self.name} is a {type(value).__name__}, which cannot be hashed: "
                "give a number, text, tuple or function",
                self.where,
            ) from None


def read_signature(fn: Callable[..., Any], name: str | None) -> Signature:
    """The `Signature` of a kernel function; raises KernelTypeError for one that no kernel can have."""
    where = place_of(fn)
    name = name or _kernel_name(fn)
    if not name.isidentifier():
        raise KernelValueError(f"name={name!r} is no name for a kernel: letters, digits and _ only", where)
    refs, meta, variadic, is_open, optional = [], {}, None, False, 0
    for p in inspect.signature(fn).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            variadic = p.name
        elif p.kind is p.VAR_KEYWORD:
            is_open = True
        elif p.kind is p.KEYWORD_ONLY:
            meta[p.name] = p.default
        elif p.default is not p.empty and p.default is not None:
            raise KernelTypeError(
                f"parameter {p.name}={p.default!r} of kernel {name} is positional, so it would be a Ref: "
                f"write `*, {p.name}={p.default!r}` to make it a meta-parameter (the default None alone marks a last "
                "Ref that out_type or scratch may leave out)",
                where,
            )
        else:
            refs.append(p.name)
            optional += p.default is None
    return Signature(name, tuple(refs), variadic, meta, is_open, where, optional)


def place_of(fn: Callable[..., Any]) -> Place:
    """File and line of the `def` itself (the code object points at the first decorator)."""
    code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
    if code is None:
        return None
    decorated = code.co_name != "<lambda>"
    for line in range(code.co_firstlineno, code.co_firstlineno + 30 * decorated):
        if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")):
            return code.co_filename, line
    return code.co_filename, code.co_firstlineno


def source_lines(fn: Callable[..., Any]) -> list[str]:
    """The lines of the file that a function is defined in, as they are now; none where there is no file."""
    fn = inspect.unwrap(getattr(fn, "func", fn))
    code = getattr(fn, "__code__", None)
    if code is None:
        return []
    linecache.checkcache(code.co_filename)
    return linecache.getlines(code.co_filename, getattr(fn, "__globals__", None))


def _kernel_name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", "kernel")
    return re.sub(r"\W+", "_", name).strip("_") or "kernel"


def check_dtype(sig: Signature, what: str, dtype: Any) -> None:
    """Refuse a dtype that the language does not have."""
    from jtile import ir

    name = str(getattr(dtype, "name", dtype))
    if name not in ir.DTYPES and name not in (_parts.KEY, _parts.COMPLEX.name):
        hint = ""
        if name.startswith("complex"):
            hint = "; convert it, x.astype(jnp.complex64), or pass x.real and x.imag as two arguments"
        elif name.startswith("key<"):
            hint = "; keys are those of the generator threefry2x32: jax.random.key(seed, impl='threefry2x32')"
        raise KernelTypeError(
            f"{what} of kernel {sig.name} has dtype {name}, which the tile language does not have{hint}", sig.where
        )


def describe(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)


def nearest(name: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(name), [str(k) for k in known], 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; it has {', '.join(map(repr, known))}" if known else "; it has none"
