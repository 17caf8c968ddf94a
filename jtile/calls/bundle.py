"""`jt.export_bundle`: a kernel for Ascend NPUs as a folder that is used without jtile."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtile import ir
from jtile._errors import KernelTypeError, KernelValueError, UnsupportedError
from jtile.calls.kernel import Kernel
from jtile.calls.lowered import Lowered

FORMAT = 2
_SUFFIX = {"ttir": ".mlir", "linalg": ".mlir", "hivm": ".mlir"}
_TORCH = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
          "float32", "float64", "float8_e4m3fn", "float8_e5m2")  # fmt: skip


def export_bundle(
    kernel: Kernel | Lowered, *types: Any, target: Any = None, out: str | os.PathLike[str], overwrite: bool = False,
    **meta: Any,
) -> Path:  # fmt: skip
    """Write a kernel for Ascend NPUs into a folder that is used without jtile.

    The folder holds the text of every level of each kernel, from the jaxpr down to HIVM, `manifest.json` (arguments,
    grid, workspace, what the packed arguments of a launch are, digests of tools and texts), `build.sh` (which makes
    the objects with the user's own `bishengir-compile` and CANN) and `run.py` (which launches them on tensors of
    torch_npu). All of it is checked as far as a machine without an NPU goes, and was never run on one.

    Args:
      kernel: a kernel, or what its `lower` gave for an Ascend target, such as `k.lower(x, target=...).vjp()`.
      types: arrays or `jax.ShapeDtypeStruct`s, the arguments of a kernel; none of something that is lowered.
      target: `"ascend:910b1"`, or another target of that platform.
      out: the folder; it appears whole or not at all.
      overwrite: replace an existing folder that is not empty.
      meta: the kernel's meta-parameters.

    Returns:
      The folder.

    Raises:
      UnsupportedError: the target is of another platform, a dimension is dynamic, or torch has no such dtype.
      KernelValueError: the folder exists and is not empty.
      JtileError: what compiling raises; and the first defect that `jtile.lowering.ascend.check` finds in the result.
    """
    from jtile.lowering import targets

    if isinstance(kernel, Lowered):
        if types or meta or target is not None:
            raise KernelTypeError(
                f"kernel {kernel.program.name} is lowered already: export_bundle takes out= besides it, and no types"
            )
        lowered = kernel
    elif isinstance(kernel, Kernel):
        _check_platform(targets.resolve(target).platform, kernel.name)
        lowered = kernel.lower(*types, target=target, **meta)
    else:
        raise KernelTypeError(f"export_bundle was given {kernel!r}; expected a kernel, or what its lower(...) gives")
    _check_platform(lowered.target.platform, lowered.program.name)
    folder = Path(out)
    if not overwrite and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KernelValueError(f"{folder} exists and is not empty: name another folder, or pass overwrite=True")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(made, lowered)
        made.chmod(0o755)
        _replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _check_platform(platform: str, name: str) -> None:
    from jtile.lowering import platforms

    if platforms.named(platform).bundle is None:
        raise UnsupportedError(
            f"kernel {name}: bundles are made for Ascend, such as target='ascend:910b1', not for platform "
            f"{platform!r}, whose kernels XLA runs: store them with jax.export and jt.export_checks() (docs/export.md)"
        )


def _replace(made: Path, folder: Path) -> None:
    """Put the new folder in the place of the old one, which is gone only when the new one is there."""
    if not folder.exists():
        made.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    folder.rename(old / "was")
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write(folder: Path, lowered: Lowered) -> None:
    from jtile.lowering import platforms
    from jtile.primitive.lowering import pieces_of

    made = platforms.named(lowered.target.platform).bundle
    assert made is not None
    bundled = made()
    program = lowered.program
    if any(not isinstance(n, int) for v in (*program.kernel.inputs, *program.kernel.outputs) for n in v.shape):
        raise UnsupportedError(
            f"kernel {program.name} has dynamic dimensions, and a bundle is of fixed sizes: lower it for arrays of "
            "the size that is wanted, without jt.dynamic",
            program.where,
        )
    inputs, outputs = ([_array(v) for v in refs] for refs in (program.kernel.inputs, program.kernel.outputs))
    pieces = pieces_of(program)
    kernels = [_kernel(folder, piece, k, pieces.inputs[k], bundled.checked) for k, piece in enumerate(lowered.pieces)]
    manifest = {
        "format": FORMAT,
        "program": program.name,
        "target": lowered.target.name,
        "arch": lowered.target.arch,
        "inputs": inputs,
        "outputs": outputs,
        "kernels": kernels,
        "results": [{"kernel": r.piece, "output": r.output, "partials": r.partials} for r in pieces.results],
        "between": [{"kernel": r.piece, "output": r.output} for r in pieces.between],
        "abi": bundled.ABI,
        "made_by": bundled.tools_of(),
        "state": "compiled and checked, not run on an NPU",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / "build.sh").write_text(bundled.build_script(manifest))
    (folder / "build.sh").chmod(0o755)
    (folder / "README.md").write_text(bundled.readme(manifest))
    shutil.copyfile(bundled.RUN, folder / "run.py")


def _kernel(
    folder: Path, piece: Lowered, number: int, inputs: Sequence[int], checked: Callable[..., str]
) -> dict[str, Any]:
    """The texts of one kernel, and what the manifest says of it."""
    from jtile.primitive.lowering import pieces_of, with_starts, with_tables

    kernel = pieces_of(piece.program, piece.target).kernels[piece.piece]
    texts, launch = piece.texts, piece.launch
    whole, starts = with_starts(kernel)
    whole, tables = with_tables(whole)
    place = Path("kernels") / f"{number}-{launch['symbol']}"
    (folder / place).mkdir(parents=True)
    files = {}
    for level, text in texts.items():
        files[level] = str(place / (level + _SUFFIX.get(level, ".txt")))
        (folder / files[level]).write_text(text)
    stored = []
    for k, table in enumerate(tables):
        file, info = str(place / f"table{k}.npy"), ir.dtype_info(table.dtype)
        np.save(folder / file, np.frombuffer(np.ascontiguousarray(table).tobytes(), np.uint8))
        stored.append({"file": file, "dtype": _torch_dtype(info.name, kernel.name), "shape": list(table.shape)})
    record = json.loads(launch["record"])
    return {
        "name": kernel.name,
        "symbol": launch["symbol"],
        "object": str(place / "kernel.o"),
        "kind": launch["kind"],
        "task": launch["task"],
        "workspace": launch["workspace"],
        "buffers": launch["buffers"],
        "extra": list(launch["extra"]),
        "inputs": list(inputs),
        "starts": [_start(s) for s in starts],
        "tables": stored,
        "aliases": [list(pair) for pair in whole.aliases],
        "outputs": [_array(v) for v in kernel.outputs],
        "record": record,
        "memory": launch["resources"],
        "checked": checked(texts["hivm"], record, whole),
        "texts": files,
        "sha256": {level: hashlib.sha256(text.encode()).hexdigest() for level, text in texts.items()},
    }


def _array(v: Any) -> dict[str, Any]:
    return {"name": v.name or "out", "dtype": _torch_dtype(v.type.info.name, v.name), "shape": list(v.shape)}


def _torch_dtype(dtype: str, name: str) -> str:
    if dtype not in _TORCH:
        raise UnsupportedError(
            f"{name} is of {dtype}, which torch has no dtype for: view the bytes as uint8, and decode them inside"
        )
    return dtype


def _start(start: Any) -> dict[str, Any]:
    value = np.asarray(start.value)
    number = value.item() if value.dtype.kind in "biu" else float(value)
    text = number if not isinstance(number, float) or np.isfinite(number) else repr(number)
    return {"shape": list(start.shape), "dtype": np.dtype(start.dtype).name, "value": text}
