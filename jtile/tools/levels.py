"""`jtile inspect`: finds a kernel by name, reads the types of its arguments, prints every level's text."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from jtile import Kernel, Lowered
from jtile._errors import JtileError, KernelTypeError, KernelValueError
from jtile.explorer import kernels
from jtile.explorer.kernels import no_kernel as no_kernel

_SHORT = {
    "pred": "bool", "bool": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "i2": "int2", "i4": "int4", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u2": "uint2", "u4": "uint4", "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e8m0": "float8_e8m0fnu", "f4e2m1": "float4_e2m1fn",
    "float8_e4m3": "float8_e4m3", "f8e3m4": "float8_e3m4", "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2fnuz": "float8_e5m2fnuz", "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
}  # fmt: skip
_TYPE = re.compile(r"\s*([a-z]\w*)\s*(?:\[([\d\s,]*)\])?\s*(?:,|$)")
_READ = "_jtile_read"  # attribute of a module read from a file: which file, and its time and size when it was read


def show(kernel: str, args: str, meta: list[str], *, target: str, only: list[str], transform: str = "") -> None:
    """Print the texts of `kernel` ("module:name"), or of the kernels that a function calls; `only`: these levels."""
    from rich.console import Console
    from rich.syntax import Syntax

    console, types = Console(), parse_types(args)
    with as_wide_as(types):
        function, options = checked(kernel, types, parse_meta(meta))
        found = lower(function, types, target, options)
        pieces = [piece for one in found for piece in derivative(one, transform).pieces]
        named = [(piece.program.name, piece.texts) for piece in pieces]
    for of, texts in named:
        missing = [name for name in only if name not in texts]
        if missing:
            raise KernelValueError(f"no level {missing[0]!r} for target {target!r}: it has {', '.join(texts)}")
        for name, text in texts.items():
            if only and name not in only:
                continue
            if len(only) != 1:
                console.rule(f"{of}: {name}")
            if console.is_terminal:
                console.print(Syntax(text, "llvm" if "llvm" in name else "text", word_wrap=True))
            else:
                sys.stdout.write(text if text.endswith("\n") else text + "\n")


def derivative(lowered: Lowered, transform: str) -> Lowered:
    """The kernel itself (""), or the kernel of its "jvp" or "vjp"."""
    if transform not in ("", "jvp", "vjp"):
        raise KernelValueError(f"transform {transform!r}: expected jvp or vjp")
    return getattr(lowered, transform)() if transform else lowered


def find(name: str) -> Any:
    """The kernel or function that "module:kernel" or "path/file.py:kernel" names; KernelValueError if there is none."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise KernelValueError(f"{name!r} names no kernel: write module:kernel, such as jtile.ops:softmax")
    module = _module(module_name)
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value) or isinstance(value, type):
        what = "is no kernel or function" if value is not None else "does not exist"
        raise KernelValueError(f"{attribute!r} {what}; {module_name} has: {', '.join(_offered(module)) or 'none'}")
    return value


def _offered(module: Any) -> list[str]:
    """The kernels of a module, and the functions that are its own or its submodules'."""
    own = lambda v: inspect.isroutine(v) and f"{getattr(v, '__module__', '')}.".startswith(f"{module.__name__}.")
    return sorted(k for k, v in vars(module).items() if not k.startswith("_") and (_is_kernel(v) or own(v)))


def checked(name: str, types: list[Any], meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What `find` finds, and `meta`. A function is one that takes these arguments, and its own errors are jtile's.

    Raises:
      KernelTypeError: the function takes other arguments.
    """
    function = find(name)
    given = ", ".join([*(f"{t.dtype.name}{list(t.shape)}" for t in types), *(f"{k}={v!r}" for k, v in meta.items())])
    if _is_kernel(function):  # a kernel checks its arguments itself, with errors that name its line
        return function, meta
    with contextlib.suppress(ValueError):  # a function without a signature cannot be checked
        try:
            inspect.signature(function).bind(*types, **meta)
        except TypeError as error:
            raise KernelTypeError(f"{name} does not take the arguments ({given}): {error}") from None

    @functools.wraps(function)
    def reported(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except JtileError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            raise KernelValueError(f"{name} fails for ({given}): {text} (JTILE_DEBUG=1 shows where)") from error

    return reported, meta


def as_wide_as(types: list[Any]) -> Any:
    """JAX's 64-bit types, where an argument has one: without them it would quietly become one of 32 bits."""
    import jax

    return jax.enable_x64(True) if any(t.dtype.itemsize == 8 for t in types) else contextlib.nullcontext()


def lower(function: Any, types: list[Any], target: str, meta: dict[str, Any]) -> list[Lowered]:
    """The kernel, or every kernel that a JAX function calls for arguments of `types`, once each."""
    return [found.lowered for found in kernels.lower(function, types, target, meta)]


def _is_kernel(value: Any) -> bool:
    return isinstance(value, Kernel)


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise KernelValueError(f"there is no file {name}")
        about = path.stat()
        read = str(path.resolve()), about.st_mtime_ns, about.st_size
        known = sys.modules.get(path.stem)
        if known is not None and getattr(known, _READ, None) == read:
            return known  # a file runs, and prints, once, however many of its functions a command names
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` does: the file may import its neighbours
        spec.loader.exec_module(module)  # errors of the user's own file keep their traceback
        setattr(module, _READ, read)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not look in the folder where it is called
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise KernelValueError(f"there is no module {name}") from None


def parse_types(text: str) -> list[Any]:
    """`"f32[128,256],bf16[256],i32"` -> the jax.ShapeDtypeStruct of each; no brackets: rank 0."""
    import jax
    import jax.numpy as jnp

    out, at = [], 0
    while at < len(text):
        match = _TYPE.match(text, at)
        if match is None:
            raise KernelTypeError(f"cannot read the types {text!r} at {text[at:]!r}: write f32[128,256],bf16[256]")
        name = _SHORT.get(match[1], match[1])
        if name not in _SHORT.values():
            raise KernelTypeError(f"{match[1]!r} is no dtype of a kernel: write one of {', '.join(_SHORT)}")
        shape = tuple(int(size) for size in (match[2] or "").replace(" ", "").split(",") if size)
        out.append(jax.ShapeDtypeStruct(shape, jnp.dtype(name)))
        at = match.end()
    return out


def parse_meta(items: list[str]) -> dict[str, Any]:
    """`["bm=64", "causal=True"]` -> keyword arguments; a value that is no Python literal stays text."""
    out: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise KernelValueError(f"cannot read the meta-parameter {item!r}: write name=value, such as bm=64")
        try:
            out[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[name] = value
    return out
