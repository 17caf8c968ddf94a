"""`jtile debug`: a kernel in the interpreter, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jtile import Kernel
from jtile._errors import KernelValueError
from jtile.debug import Debugger
from jtile.primitive.lowering import run_interpreter
from jtile.tools import levels
from jtile.tune.measure import random_array


def debug(
    what: str,
    args: str,
    meta: list[str],
    *,
    data: str | None,
    kernel: str | None,
    seed: int,
    commands: list[str],
) -> None:
    """Hold "module:kernel" at its first op, or a kernel that "module:function" calls, and ask what to do."""
    arrays = None if data is None else _read(data)
    types = levels.parse_types(args) if arrays is None else [_Type(x.shape, x.dtype) for x in arrays]
    if not types:
        raise KernelValueError("say what the arguments are: --args 'f32[8,16],f32[16]', or --data FILE.npz")
    with levels.as_wide_as(types):
        function, options = levels.checked(what, types, levels.parse_meta(meta))
        arrays = [np.asarray(random_array(t, seed + k)) for k, t in enumerate(types)] if arrays is None else arrays
        if isinstance(function, Kernel):
            debugger = function.debug(*arrays, seed=seed, **options)
        else:
            debugger = _of_function(what, function, types, options, kernel, seed)
        with debugger:
            debugger.prompt(commands)


def _of_function(what: str, function: Any, types: list[Any], options: Any, kernel: str | None, seed: int) -> Debugger:
    """One of the kernels that a function calls, on random arrays of its own."""
    found = {one.program.name: one.program for one in levels.lower(function, types, "cpu", options)}
    if kernel is None and len(found) > 1:
        raise KernelValueError(f"{what} calls several kernels: choose one by --kernel, of {', '.join(found)}")
    name = next(iter(found)) if kernel is None else kernel
    if name not in found:
        raise KernelValueError(f"{what} calls no kernel {name!r}: it calls {', '.join(found)}")
    program = found[name]
    inputs = [_Type(v.shape, v.type.info.numpy) for v in program.kernel.inputs]
    arrays = [np.asarray(random_array(t, seed + k)) for k, t in enumerate(inputs)]
    return Debugger(lambda: run_interpreter(program, arrays, seed), name, dict(program.meta))


class _Type:
    """The type of an argument."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self.shape, self.dtype = shape, dtype


def _read(path: str) -> list[np.ndarray]:
    if not Path(path).is_file():
        raise KernelValueError(f"there is no file {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in file.files]
    except (OSError, ValueError, TypeError) as error:
        raise KernelValueError(f"{path} is no .npz file of arrays: {error}") from None
