"""What is kept where a compiler fails: the IR of the kernel, so that nobody has to find it again."""

from __future__ import annotations

import hashlib
import traceback
import warnings
from pathlib import Path

from jtile import _cache, ir
from jtile._config import current
from jtile._errors import DefectWarning

from .targets import Target


def kept(kernel: ir.Kernel, target: Target, error: Exception) -> str:
    """Write the IR of a kernel that a compiler failed on into a file, and return a sentence that says where it is and
    how to compile it again."""
    text = ir.print_kernel(kernel, locations=True)
    trace = "".join(traceback.format_exception(error))
    notes = [f"target {target.name} {target.arch}", f"config {current()}", *trace.splitlines()]
    try:
        path = _cache.failures() / f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.tile_ir"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(f"// {line}" for line in notes) + "\n" + text)
    except OSError as e:
        return f"its Tile IR could not be kept ({e})"
    return f"its Tile IR is kept in {path}; `{_again(path, target)}` compiles it again"


def warn(kernel: ir.Kernel, target: Target, error: Exception, instead: str) -> None:
    """Say that a compiler failed on a kernel which has another form; once for each kernel, as warnings are.

    Args:
      instead: what is done with the kernel now, and what that costs.
    """
    warnings.warn(
        f"kernel {kernel.name}: a defect of jtile, {type(error).__name__}: {error}; {instead}. Please report it with "
        f"the file: {kept(kernel, target, error)}",
        DefectWarning,
        stacklevel=2,
    )


def _again(path: Path, target: Target) -> str:
    return f"python -m jtile.lowering.registry {path} {target.name}"
