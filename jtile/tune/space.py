"""What can be chosen for a kernel, what the choice depends on, and one call that needs a choice."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from jtile._compat import is_symbolic
from jtile._config import current
from jtile._errors import KernelTypeError, KernelValueError
from jtile.calls.marks import strip
from jtile.calls.signature import REQUIRED, autos, nearest
from jtile.lowering.here import target
from jtile.primitive.options import COMPILER
from jtile.tune.store import store

# The calls that a trace makes, in a `Recorder`, while `jt.tune` looks for them.
recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("jtile_tune_recorder", default=None)

OPTIONS = COMPILER
Config = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Tuning:
    """The arguments of `jt.autotune` for a kernel, documented there; `compared`: what candidates have to agree in, as a
    function of their results, where these are parts that depend on the choice."""

    space: Any
    key: Any = None
    data: Callable[..., Any] | None = None
    override: bool = False
    compared: Callable[[Any], Any] | None = None

    def check(self, kernel: Any) -> None:
        """Raises KernelTypeError, KernelValueError for a space or key that does not fit the kernel."""
        sig = kernel._signature
        if not callable(self.space):
            for config in self.configs(sig, (), {}):
                check_names(sig, config)
        if self.data is not None and not callable(self.data):
            raise KernelTypeError(
                f"autotune: data is {self.data!r}: expected a function of the abstract inputs and meta-parameters that "
                "gives the arrays",
                sig.where,
            )
        if self.key is None or callable(self.key):
            return
        if isinstance(self.key, str) or not isinstance(self.key, Collection):
            raise KernelTypeError(
                f"autotune: key is {self.key!r}: expected a tuple of names, such as ('x', 'causal'), or a function of "
                "the abstract inputs and meta-parameters",
                sig.where,
            )
        known = {*sig.refs, *sig.meta} | ({sig.variadic} if sig.variadic else set())
        for name in self.key:
            if name not in known:
                raise KernelValueError(f"autotune: kernel {sig.name} has no {name!r}{nearest(name, known)}", sig.where)

    def configs(self, sig: Any, inputs: Sequence[Any], meta: Mapping[str, Any]) -> list[Config]:
        """Every point of the space for these abstract inputs and meta-parameters."""
        space = self.space(*inputs, **meta) if callable(self.space) else self.space
        if isinstance(space, Mapping):
            lists = {k: list(v) if isinstance(v, list | tuple | range) else None for k, v in space.items()}
            bad = next((k for k, v in lists.items() if not v), None)
            if bad is not None:
                raise KernelTypeError(
                    f"autotune: space[{bad!r}] is {space[bad]!r}: expected a list of values", sig.where
                )
            lists = {k: [_kept(k, v, sig) for v in values or ()] for k, values in lists.items()}
            return [dict(zip(lists, values)) for values in itertools.product(*lists.values())]
        if isinstance(space, list | tuple) and space and all(isinstance(c, Mapping) for c in space):
            return [{k: _kept(k, v, sig) for k, v in c.items()} for c in space]
        raise KernelTypeError(
            f"autotune: space is {space!r}: expected a dict from names to lists of values, a list of dicts, or a "
            "function that gives one of them",
            sig.where,
        )


def state() -> Any:
    """What a choice depends on besides the call: it is part of the keys that choices are remembered by."""
    options = current()
    device = options.arch, options.isa, options.cache_dir, jax.config.jax_default_device
    return store.version, options.autotune, options.interpret, device, recorder.get()


def _kept(name: str, value: Any, sig: Any) -> Any:
    """A value of a space, as the file of winners gives it back; raises KernelTypeError for what a file cannot hold."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, tuple):
        return tuple(_kept(name, v, sig) for v in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise KernelTypeError(
        f"autotune: space[{name!r}] has the value {value!r}: winners are kept in a file, so values are None, bools, "
        "numbers, strings and tuples of them; name the choice by one of these, and look it up in the kernel",
        sig.where,
    )


# The space of a kernel without `jt.autotune` that has meta-parameters which are `jt.auto`: what is near the choice.
around_choice = Tuning(())


def check_names(sig: Any, config: Mapping[str, Any]) -> None:
    """Refuse a name that is neither a meta-parameter nor an option."""
    for name in config:
        if name not in sig.meta and name not in OPTIONS and not sig.open:
            raise KernelValueError(
                f"autotune: kernel {sig.name} has no meta-parameter or option {name!r}"
                f"{nearest(name, [*sig.meta, *OPTIONS])}",
                sig.where,
            )


@dataclasses.dataclass(eq=False)
class Recorder:
    """Every call of a tunable kernel, and of every program of `jt.fuse` a function that searches its cut, by the names
    of their entries."""

    calls: dict[str, Call] = dataclasses.field(default_factory=dict)
    programs: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)


class Call:
    """A call of a tunable kernel with arguments of given types.

    Attributes:
      kernel: the kernel.
      tree, types: structure of the arguments, and shape and dtype of each array.
      given: meta-parameters of the call, which are not tuned.
      defaults: what is taken where there is no entry.
      name: what its entry is stored under; empty where a size is known only when the kernel runs.
    """

    def __init__(
        self, kernel: Any, tree: Any, leaves: Sequence[Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
    ):
        sig = kernel._signature
        check_names(sig, defaults)
        asked = autos({**sig.meta, **given})
        given, defaults = dict(given), dict(defaults)
        defaults |= {name: given.pop(name) for name in asked if name in given}  # the model chooses them
        self.kernel, self.tree, self.given = kernel, tree, given
        self.types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        options = {n: v for n in OPTIONS if (v := getattr(kernel._options, n)) is not None}
        inputs, marks = strip(tree_unflatten(tree, self.types))
        static = not any(marks) and not kernel._spec.dynamic
        static = static and not any(is_symbolic(n) for x in self.types for n in x.shape)
        configs: list[Config] = []
        if kernel._tuning is around_choice:
            configs = [dict.fromkeys(asked, 1)] * static  # only the names count: `candidates` has the values
        elif static:
            configs = kernel._tuning.configs(sig, inputs, {**_known(sig.meta), **defaults, **given})
            for config in configs:
                check_names(sig, config)
            if "warps" not in target().features:
                options = {}
                configs = [{k: v for k, v in config.items() if k not in OPTIONS} for config in configs]
        if kernel._tuning.override:  # values that the call gives count as defaults, too
            names = {name for config in configs for name in config}
            take = lambda d: {k: v for k, v in d.items() if k in names}
            defaults = {**defaults, **take(options), **take(given)}
            options, self.given = {}, {k: v for k, v in given.items() if k not in names}
        self.options = options
        fixed = options | self.given
        self.defaults = {k: v for k, v in defaults.items() if k not in fixed}
        self._listed = list(_agreeing(configs, fixed))
        self.tuned = tuple(dict.fromkeys(name for config in self._listed for name in config))
        self.name = self._name(inputs) if self._listed and self.tuned else ""

    @functools.cached_property
    def candidates(self) -> list[Config]:
        """The points of the space that agree with what is given, without the names given."""
        if self.kernel._tuning is not around_choice or not self._listed:
            return self._listed
        from jtile.tune.resolve import around

        return around(self.kernel._variant({}), self.tree, self.types, {**self.kernel._signature.meta, **self.given})

    def has(self, config: Mapping[str, Any]) -> bool:
        """Whether an entry sets names of today's space, to values of its types."""
        kinds = {(name, type(value)) for point in self._listed for name, value in point.items()}
        return {(name, type(value)) for name, value in config.items()} <= kinds

    def config(self, config: Mapping[str, Any]) -> Config:
        """The defaults with a point of the space on top."""
        return {**self.defaults, **config}

    def bound(self, config: Mapping[str, Any]) -> Any:
        """The kernel with everything fixed: `.program`, and `.run(arrays)`."""
        full = self.config(config)
        options = {k: v for k, v in full.items() if k in OPTIONS}
        meta = {k: v for k, v in full.items() if k not in OPTIONS}
        return self.kernel._variant(options)._resolve(self.tree, self.types, {**self.given, **meta})

    def compared(self, results: Any) -> Any:
        """What the results of candidates have to agree in."""
        of = self.kernel._tuning.compared
        return results if of is None else of(results)

    def data(self) -> Any:
        """Arrays to measure with that the kernel's author gives, flat; None: random ones."""
        make = self.kernel._tuning.data
        if make is None:
            return None
        inputs, _ = strip(tree_unflatten(self.tree, self.types))
        given = make(*inputs, **{**_known(self.kernel._signature.meta), **self.defaults, **self.given})
        leaves = tree_flatten(given)[0]
        facts = lambda xs: [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in xs]
        if facts(leaves) != facts(self.types):
            show = lambda xs: ", ".join(_types(x) if hasattr(x, "dtype") else repr(x) for x in xs) or "none"
            raise KernelValueError(
                f"autotune: data= of kernel {self.kernel.name} gives arrays {show(leaves)}, expected {show(self.types)}"
            )
        return leaves

    def _name(self, inputs: Sequence[Any]) -> str:
        sig, key = self.kernel._signature, self.kernel._tuning.key
        meta = {**_known(sig.meta), **self.given, **self.options}
        meta = {k: v for k, v in meta.items() if k not in self.tuned}
        if callable(key):
            what = [_lasting(key(*inputs, **meta), sig)]
        else:
            names = [sig.ref_name(k) for k in range(len(inputs))]
            wanted = lambda name: key is None or name in key or (name not in sig.refs and sig.variadic in key)
            what = [f"{n}={_types(x)}" for n, x in zip(names, inputs) if wanted(n) and tree_flatten(x)[0]]
            what += [f"{k}={_text(v)}" for k, v in sorted(meta.items()) if key is None or k in key]
        precision = jax.config.jax_default_matmul_precision
        what += [f"precision={precision}"] if precision else []
        return f"{self.kernel.name}#{source_hash(self.kernel)} {' '.join(what)}"


def source_hash(kernel: Any) -> str:
    """Twelve digits that change with the text of the kernel's function, from its `def` to its end, and with the numbers
    and names that it closes over. What the function calls, the decorators and jtile itself do not count: an entry may
    become a poor choice, never a wrong result."""
    return _source_hash(kernel._fn, tuple(kernel._lines), kernel._signature.where)


@functools.lru_cache(maxsize=256)
def _source_hash(fn: Callable[..., Any], lines: tuple[str, ...], where: tuple[str, int] | None) -> str:
    if lines and where:
        text = "".join(inspect.getblock(list(lines[where[1] - 1 :])))
    else:
        code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
        text = (
            f"{code.co_code!r} {code.co_names} {[c for c in code.co_consts if not hasattr(c, 'co_code')]}"
            if code
            else ""
        )
    cells = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__closure__", None) or ()
    around = [_text(c.cell_contents) if _is_plain(c) else "" for c in cells]
    return hashlib.sha256("\n".join([text, *around]).encode()).hexdigest()[:12]


def _is_plain(cell: Any) -> bool:
    """Whether what a function closes over reads the same in every process."""
    try:
        v = cell.cell_contents
    except ValueError:  # the cell is not bound yet
        return False
    return v is None or isinstance(v, bool | int | float | str) or inspect.isfunction(v)


def _agreeing(configs: Sequence[Config], fixed: Mapping[str, Any]) -> Iterator[Config]:
    """The points that agree with what is fixed, without these names, once each."""
    seen = set()
    for config in configs:
        if any(fixed.get(k, v) != v for k, v in config.items()):
            continue
        left = {k: v for k, v in config.items() if k not in fixed}
        if (mark := repr(sorted(left.items()))) not in seen:
            seen.add(mark)
            yield left


def _known(meta: Mapping[str, Any]) -> Config:
    return {k: v for k, v in meta.items() if v is not REQUIRED}


def _types(x: Any) -> str:
    leaves = tree_flatten(x)[0]
    texts = [f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in leaves]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _lasting(v: Any, sig: Any) -> str:
    """What a `key` function gives, as text that is the same in every process."""
    text = _text(v)
    if re.search(r" at 0x[0-9a-f]+>", text):
        raise KernelTypeError(
            f"autotune: key gives {text}, which prints its address: no other process would find the entry; give "
            "numbers, strings or tuples of them",
            sig.where,
        )
    return text


def _text(v: Any) -> str:
    if callable(v):
        return f"{getattr(v, '__module__', '?')}.{getattr(v, '__qualname__', type(v).__name__)}"
    return repr(v)
