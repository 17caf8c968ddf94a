"""Tile IR kernel -> TTIR in pointer form -> linalg -> HIVM, and the facts of its launch.

The image of an artifact is a JSON text of these three, from which a user's own installation of the vendor's tools
makes an object (see `jt.export_bundle`); `unpack` reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jtile import ir
from jtile._errors import CompileError, UnsupportedError

from ..artifact import Artifact
from ..targets import Target
from ..triton.compile import emit_kernel, symbol
from ..triton.record import Record
from . import hivm, tools
from .emitter import NpuEmitter
from .targets import features

FORMAT = 2  # version of the format of an image
LONGEST = 49  # characters of a kernel's name, at most, in the vendor's run time
LEVELS = ("ttir", "linalg", "hivm")
_TO_LINALG = (
    "--discrete-mask-access-conversion=compile-on-910-95=False force-simt-template=False",
    "--triton-to-annotation",
    "--triton-to-unstructure=compile-on-910-95=False force-simt-template=False",
    "--triton-to-hivm",
    "--triton-to-hfusion",
    "--triton-to-llvm",
    "--bubble-up-operation",
    "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False enable-select-analysis=True "
    "compile-on-910-95=False",
)
TO_HIVM = (
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-auto-bind-sub-block=True",
)
_OVERFLOW = re.compile(r"error: (\w+) overflow, requires (\d+) bits while (\d+) bits")
_ERROR = re.compile(r"error: (.*)|(LLVM ERROR: .*)|(.*Assertion .*)")
_PLACE = re.compile(r' ?loc\("[^"\n]*"(?::\d+:\d+)?\)')
_MEMORIES = {"ub": "UB, the memory of a vector core", "cbuf": "L1, the memory of a cube core's operands",
             "L1": "L1, the memory of a cube core's operands", "cc": "L0C, the memory of a cube core's sums",
             "ca": "L0A", "cb": "L0B"}  # fmt: skip


def compile_kernel(
    kernel: ir.Kernel, target: Target, options: Mapping[str, Any] | None = None, texts: bool = False
) -> Artifact:
    """Compile a kernel (after the passes) for an Ascend NPU.

    Args:
      kernel: Tile IR at tile level.
      target: one of `lowering.ascend.targets`, or a changed one.
      options: those of GPU kernels, which mean nothing here.
      texts: keep the text of every level: `ttir`, `linalg` and `hivm`.

    Returns:
      An artifact. Its `launch`: `name`, `symbol` (of the function), `record` (JSON, see `lowering/triton/record.py`;
      without what only GPUs have, and with `arch`, `task`, `kind` and `workspace`), `extra` (bytes of further results),
      `workspace` (bytes a block), `task`, `kind` ("aiv", "aic", "mix"), `buffers` (of what loops load, 1 or 2) and
      `resources` (bytes of each memory).

    Raises:
      UnsupportedError: the tools are missing, or the tiles of the kernel do not fit a memory of the NPU.
      CompileError: a tool refuses the kernel; the message names the file that keeps what it was given.
    """
    del options
    for name in (tools.ADAPTER, tools.COMPILER):
        tools.needed(name)
    ttir, record, name = emit(kernel, target)
    with tempfile.TemporaryDirectory(prefix="jtile-ascend-") as folder:
        linalg = to_linalg(ttir, Path(folder), kernel)
        text, buffers = to_hivm(linalg, target, Path(folder), kernel)
    facts = hivm.facts(text, name)
    levels: dict[str, str] = dict(zip(LEVELS, (ttir, linalg, text), strict=True))
    launch = {
        "name": kernel.name,
        "symbol": name,
        "record": _record(record, kernel, target, name, facts),
        "extra": record.extra,
        "workspace": facts.workspace,
        "task": facts.task,
        "kind": facts.kind,
        "buffers": buffers,
        "resources": facts.used,
        "level": "tile",
    }
    image = {"format": FORMAT, "target": target.arch, "symbol": name, "buffers": buffers, "texts": levels}
    return Artifact(target.name, json.dumps(image, sort_keys=True).encode(), levels if texts else {}, launch)


def unpack(image: bytes) -> dict[str, Any]:
    """What an image holds: `target` (for `bishengir-compile --target`), `symbol`, the `texts` by level, and how many
    `buffers` there are for what loops load, 1 or 2."""
    return json.loads(image)


def emit(kernel: ir.Kernel, target: Target) -> tuple[str, Record, str]:
    """TTIR text of a kernel in the forms that the adapter takes, its launch record, and the name of its function."""
    short = dataclasses.replace(kernel, name=_short(kernel.name))
    products = any(isinstance(op, ir.Dot | ir.DotScaled) for op in kernel.body.walk())
    text, record = emit_kernel(short, features(target, products=products), emitter=NpuEmitter)
    return text, record, symbol(short)


def _short(name: str) -> str:
    """A name whose symbol the run time takes: a long name is cut to its beginning and a digest."""
    if len("jtile_") + len(name) <= LONGEST:
        return name
    return f"{name[:30]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _record(record: Record, kernel: ir.Kernel, target: Target, name: str, facts: hivm.Facts) -> str:
    fields = {k: getattr(record, k) for k in ("params", "grid", "zeroed", "dims", "attributes")}
    fields |= {"name": kernel.name, "symbol": name, "arch": target.arch}
    return json.dumps(fields | facts.of_launch, sort_keys=True)


# -- the tools --------------------------------------------------------------------------------------------------------


def to_linalg(ttir: str, folder: Path, kernel: ir.Kernel) -> str:
    """TTIR to linalg on tensors, by triton-adapter-opt."""
    source, result = folder / "kernel.ttir", folder / "kernel.linalg.mlir"
    source.write_text(ttir)
    files = f"{tools.HERE}/{source.name}", "-o", f"{tools.HERE}/{result.name}"
    done = tools.run(tools.ADAPTER, [*files, *_TO_LINALG], folder)
    if done.returncode or not result.is_file():
        _refused(tools.ADAPTER, done.stderr, kernel, ttir, "ttir")
    return result.read_text()


def arguments(source: str, out: str, arch: str, buffers: int) -> list[str]:
    """The arguments of bishengir-compile, which writes HIVM into `out`, and `kernel.o` too where it finds hivmc."""
    here = lambda name: f"{tools.HERE}/{name}"
    return [here(source), *TO_HIVM, f"--enable-auto-multi-buffer={buffers > 1}", f"--target={arch}",
            f"--save-temps={here(out)}", "-o", here("kernel.o")]  # fmt: skip


def saved(out: Path) -> str | None:
    """The HIVM that bishengir-compile wrote into a folder, if it came so far."""
    result = out / "module.hivm.opt.mlir"
    return _PLACE.sub("", result.read_text()) if result.is_file() else None


def to_hivm(linalg: str, target: Target, folder: Path, kernel: ir.Kernel) -> tuple[str, int]:
    """Linalg to HIVM with planned addresses and synchronisation, by bishengir-compile: with two buffers for what loops
    load, or where these do not fit, with one. Gives the text, and how many there are."""
    source = folder / "kernel.mlir"
    source.write_text(linalg)
    errors = ""
    for buffers in (2, 1):
        out = folder / f"out{buffers}"
        out.mkdir()
        done = tools.run(tools.COMPILER, arguments(source.name, out.name, target.arch, buffers), folder)
        text = saved(out)
        if text is not None:
            return text, buffers
        errors = done.stderr
        if not _OVERFLOW.search(errors):
            break
    overflow = _OVERFLOW.search(errors)
    if overflow:
        _too_large(kernel, target, overflow)
    _refused(tools.COMPILER, errors, kernel, linalg, "linalg")


def _too_large(kernel: ir.Kernel, target: Target, found: re.Match[str]) -> NoReturn:
    """UnsupportedError with the factor by which tiles are too large."""
    memory, needed, there = found[1], int(found[2]) // 8, int(found[3]) // 8
    factor = -(-needed // there)
    raise UnsupportedError(
        f"kernel {kernel.name}: the tiles of a program take {needed} bytes of {_MEMORIES.get(memory, memory)}, and "
        f"target {target.name!r} has {there}: make its tiles smaller, by a factor of {factor} at least, with a loop "
        "over the rest",
        (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
    )


def _refused(tool: str, errors: str, kernel: ir.Kernel, text: str, level: str) -> NoReturn:
    """CompileError with the first thing that a tool complains of; its input is kept."""
    from jtile import _cache

    lines = [next(filter(None, m)) for m in _ERROR.findall(errors)]
    lines = [line for line in lines if not line.startswith(("Failed to run BiShengHIR", "run BiShengHIR"))]
    why = lines[0].strip() if lines else "it crashed"
    path = _cache.failures() / f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.{level}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        kept = f"what it was given is kept in {path}"
    except OSError as e:
        kept = f"what it was given could not be kept ({e})"
    raise CompileError(
        f"kernel {kernel.name}: {tool}, the vendor's compiler, cannot translate it: {why[:400]}; {kept}. Other "
        "tiles, dtypes or a simpler kernel may pass: docs/ascend.md lists what is known",
        (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
    )
