"""The options of jtile: one frozen dataclass, set by keyword, environment (`JTILE_...`) or context manager."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import importlib
import os
import threading
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jtile._errors import KernelValueError

_CODE = types.MappingProxyType(
    {"code": True}
)  # fields that change what a kernel compiles to, so part of jit's cache key


_PATHS = ("cache_dir", "dump")


def _default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says that a relative path is invalid, and to be ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "jtile")


@dataclasses.dataclass(frozen=True)
class Config:
    """Every option of jtile; `JTILE_<FIELD>` in the environment sets the default of each.

    Attributes:
      cache_dir: folder of the disk cache of compiled kernels; an empty text switches the cache off.
      cache_size: bytes that the disk cache may hold before its oldest entries go (the environment also takes 512M, 2G).
      dump: folder that receives the numbered text of every level of every kernel; None: nothing is written.
      verify: check types and the stage grammar of the IR after the passes; where they do not hold, name the pass.
      poison: fill outputs that have no `init` with NaN (integers: a pattern) before a kernel runs.
      interpret: run every kernel in the reference interpreter.
      seed: order of the programs in the interpreter, and of what the roles of a block do.
      isa: CPU instruction set to emit for (`"sse2"`, `"avx2"`, ...); None: this machine's.
      arch: architecture to compile for (`"sm_90"`, `"gfx942"`; for an export to several platforms
        `"sm_90,gfx942"`), and, the first, what library kernels choose their tiles for; None: that of JAX's devices.
      fallback: what happens to a kernel that its target cannot run: `"raise"`, or `"interpret"` it on the host.
      overlap: library kernels that read a matrix once may start to while the kernel in front of them still runs (on
        NVIDIA's GPUs from sm_90 on). True is a promise: no such matrix, weights of a norm, lengths or older slots of a
        cache are results of the kernel in front (of those in front, if it waits itself). Models promise it by
        themselves where they make tokens, whose weights are operands of the program; False forbids it them, too.
      steady: products of the library with quantised weights add up a row in one order on CPUs, whether it is alone or
        among others (with K-quants from three rows on); a row alone takes some 15 % longer then.
      autotune: search for meta-parameters that the call leaves out, instead of taking their defaults.
      debug: the command line shows tracebacks of jtile's own errors, which are one message otherwise; on GPUs each call
        of a kernel that talks to other devices, or of a graph, is waited for, so that it fails itself.
      optimize: let LLVM optimise code for CPUs; without, kernels compile two to three times faster, and run slower.
        Code for other platforms is always optimised.
      timeout: seconds for which a kernel waits for other devices before its call fails.
      cost_analysis: XLA's own `cost_analysis()` counts kernels, for which it has -1 otherwise. Each call becomes a
        branch of a conditional, so such programs are for counting, not for speed; `jt.cost` needs none of this.
      gpu_peers: kernels that talk to other devices run on NVIDIA's GPUs, too; False makes them a typed error there, and
        `jt.exchange` and models keep to XLA's collectives.
    """

    cache_dir: str = dataclasses.field(default_factory=_default_cache_dir)
    cache_size: int = 1 << 30
    dump: str | None = None
    verify: bool = False
    poison: bool = dataclasses.field(default=False, metadata=_CODE)
    interpret: bool = dataclasses.field(default=False, metadata=_CODE)
    seed: int = dataclasses.field(default=0, metadata=_CODE)
    isa: str | None = dataclasses.field(default=None, metadata=_CODE)
    arch: str | None = dataclasses.field(
        default=None, metadata={"code": True, "check": "jtile.lowering.platforms:check_arch"}
    )
    fallback: Literal["raise", "interpret"] = dataclasses.field(default="raise", metadata=_CODE)
    overlap: bool | None = dataclasses.field(default=None, metadata=_CODE)
    steady: bool = dataclasses.field(default=False, metadata=_CODE)
    autotune: bool = dataclasses.field(default=False, metadata=_CODE)
    debug: bool = dataclasses.field(default=False, metadata=_CODE)
    optimize: bool = dataclasses.field(default=True, metadata=_CODE)
    timeout: float = dataclasses.field(default=10.0, metadata=_CODE)
    cost_analysis: bool = dataclasses.field(default=False, metadata=_CODE)
    gpu_peers: bool = dataclasses.field(default=True, metadata=_CODE)

    @property
    def code_options(self) -> dict[str, Any]:
        """The options that change compiled code, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("code")}

    @property
    def code_key(self) -> tuple[Any, ...]:
        """The values of `code_options`; where they are equal, compiled kernels can be shared."""
        return tuple(self.code_options.values())


def current() -> Config:
    """The options in force here: the innermost `config(...)` of this thread, `configure`'s, the environment's."""
    return _override.get() or _process.value or from_environment()


def configure(**options: Any) -> Config:
    """Change options for the whole process, except inside of `with jt.config(...)`.

    Args:
      options: fields of `Config` and their new values.

    Returns:
      The `Config` after the change.
    """
    old = _process.value or from_environment()
    new = _replace(old, options)
    _process.value = new
    if new.code_key != old.code_key:
        _jit_context().set_global(new.code_key)
    return new


@contextlib.contextmanager
def config(**options: Any) -> Iterator[Config]:
    """Change options inside of a `with` block, for this thread: `with jt.config(poison=True): ...`.

    Args:
      options: fields of `Config` and their new values.

    Returns:
      A context manager, which gives the changed `Config`.
    """
    old = current()
    new = _replace(old, options)
    token = _override.set(new)
    try:
        with _jit_context()(new.code_key) if new.code_key != old.code_key else contextlib.nullcontext():
            yield new
    finally:
        _override.reset(token)


def jit_key(more: Any) -> contextlib.AbstractContextManager[Any]:
    """A block in which JAX's caches also go by `more`, besides the options in force."""
    return _jit_context()((current().code_key, more))


@functools.cache
def from_environment() -> Config:
    """The defaults with what the `JTILE_...` variables say, read once; KernelValueError on a bad one."""
    names = {"JTILE_" + f.name.upper(): f.name for f in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    for variable in sorted(v for v in os.environ if v.startswith("JTILE_")):
        if variable not in names:
            if variable in importlib.import_module("jtile.lowering.platforms").variables():
                continue
            raise KernelValueError(f"{variable} is set, but jtile has no such option{_nearest(variable, names)}")
        field = names[variable]
        values[field] = _parse(variable, field, os.environ[variable])
    return Config(**{name: _checked(name, value) for name, value in values.items()})


class _Process:
    """What `configure` set for the whole process, if anything."""

    value: Config | None = None


_process = _Process()
_override: contextvars.ContextVar[Config | None] = contextvars.ContextVar("jtile_config", default=None)


def _jit_context() -> Any:
    """JAX's context variable whose value is part of every jit cache key; holds `Config.code_key`."""
    with _jit_context_lock:
        return _new_jit_context()


@functools.cache
def _new_jit_context() -> Any:
    # Made on first use, not at import: a new context variable makes every earlier jitted function trace again.
    import jax

    return jax.make_user_context(from_environment().code_key)


_jit_context_lock = threading.Lock()


def _replace(old: Config, options: dict[str, Any]) -> Config:
    known = {f.name for f in dataclasses.fields(Config)}
    for name in options:
        if name not in known:
            raise KernelValueError(f"jtile has no option {name!r}{_nearest(name, known)}")
    return dataclasses.replace(old, **{name: _checked(name, value) for name, value in options.items()})


@functools.cache
def _field_types() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _checked(name: str, value: Any) -> Any:
    """`value` as option `name` keeps it; raises KernelValueError where it does not fit."""
    wanted = _field_types()[name]
    if isinstance(value, str | Path) and name in _PATHS and value:  # absolute, since the folder may change
        value = os.path.abspath(value)
    choices = typing.get_args(wanted)
    if typing.get_origin(wanted) is Literal:
        if value not in choices:
            raise KernelValueError(f"option {name}={value!r}: expected one of {', '.join(map(repr, choices))}")
        return value
    kinds = choices or (wanted,)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is an int in Python, but `seed=True` is a mistake
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise KernelValueError(f"option {name}={value!r}: expected {' or '.join(_kind_name(k) for k in kinds)}")
    if isinstance(value, int | float) and not value >= 0:
        raise KernelValueError(f"option {name}={value!r}: expected a number that is not negative")
    wrong = _wrong(name, value) if value else None
    if wrong:
        raise KernelValueError(wrong)
    return value


def _wrong(name: str, value: Any) -> str | None:
    """What is wrong with a value, as a function says that the field of the option names."""
    module, _, function = Config.__dataclass_fields__[name].metadata.get("check", "").partition(":")
    return getattr(importlib.import_module(module), function)(value) if module else None


def _kind_name(kind: type) -> str:
    return "None" if kind is types.NoneType else kind.__name__


_FLAGS = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
    "": False,
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _parse(variable: str, field: str, text: str) -> Any:
    wanted = _field_types()[field]
    if wanted is bool or wanted == bool | None:
        if text.strip().lower() not in _FLAGS:
            raise KernelValueError(f"{variable}={text!r}: expected 1 or 0")
        return _FLAGS[text.strip().lower()]
    if wanted is int:
        number = text.strip().upper().removesuffix("B")
        unit = number[-1:] if number[-1:] in _UNITS else ""
        if not number.removesuffix(unit).isdecimal() or (unit and field != "cache_size"):
            example = "bytes, such as 1073741824 or 512M" if field == "cache_size" else "a whole number"
            raise KernelValueError(f"{variable}={text!r}: expected {example}")
        return int(number.removesuffix(unit)) * _UNITS[unit]
    if wanted is float:
        try:
            return float(text)
        except ValueError:
            raise KernelValueError(f"{variable}={text!r}: expected a number") from None
    if field in _PATHS and text:  # no shell has expanded a `~` in it
        text = os.path.expanduser(text)
    if types.NoneType in typing.get_args(wanted):
        return text or None
    return text


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {close[0]}?" if close else f"; it knows {', '.join(sorted(known))}"
