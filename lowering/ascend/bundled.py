"""What the files of a bundle say; `jt.export_bundle` writes them."""

from __future__ import annotations

import importlib.metadata
import shlex
from pathlib import Path
from typing import Any

from jtile import ir
from jtile._errors import JtileError, UnsupportedError

from . import tools
from .compile import TO_HIVM

RUN = Path(__file__).with_name("run.py")  # goes into every bundle as it is

ABI = {
    "arguments": [
        "address of the flags between cores (8 bytes; of kernels of kind mix, else 0)",
        "address of locks (8 bytes, 0)",
        "address of the workspace (8 bytes): `workspace` bytes for each block",
        "record.params in order: addresses and i64 at multiples of 8 bytes, i32 at multiples of 4",
        "blocks along three axes (4 bytes each): record.grid, 1, 1",
    ],
    "buffers": "inputs (those of the program, starts, tables), then outputs, then extra (bytes of scratch)",
    "alignment": "the structure begins at a multiple of 8 bytes, and its size is one",
    "blocks": "record.grid: as many blocks as programs, or as cores, which then share the programs out",
}


def tools_of() -> dict[str, Any]:
    """Versions and digests of jtile and of the tools that made a bundle."""
    digests = dict(zip((tools.ADAPTER, tools.COMPILER), tools.versions(), strict=True))
    return {"jtile": importlib.metadata.version("jtile"), "jax": importlib.metadata.version("jax"),
            "sha256": digests}  # fmt: skip


def checked(text: str, record: dict[str, Any], kernel: ir.Kernel) -> str:
    """Run the checker of HIVM on a compiled kernel; returns what the manifest says of it. Raises the first defect.

    Args:
      record: the launch record; kernel: as it was compiled, with start values of outputs and tables as inputs.
    """
    from . import check

    first = 3  # number of the vendor's arguments, which stand in front of the kernel's own
    at = {p["buffer"]: first + k for k, p in enumerate(record["params"]) if p["kind"] == "buffer"}
    aliases = {at[len(kernel.inputs) + o]: at[i] for i, o in kernel.aliases}
    try:
        report = check.check(text, grid=(record["grid"],), aliases=aliases)
    except UnsupportedError as e:
        return f"not checked for races: {e.message}"
    if report.errors:
        error: JtileError = report.errors[0]
        raise type(error)(f"kernel {kernel.name}, compiled for Ascend: {error.message}")
    return "addresses, flags and races of HIVM: no defect found"


def build_script(manifest: dict[str, Any]) -> str:
    """The text of `build.sh`, which makes an object of each kernel's linalg by the tools of the user."""
    lines = [
        "#!/bin/sh",
        "# Makes the object of each kernel with bishengir-compile (AscendNPU-IR) and hivmc, a part of CANN:",
        "# source CANN's set_env.sh first. JTILE_BISHENGIR=/path/to/bishengir-compile names another one.",
        "set -e",
        'cd "$(dirname "$0")"',
        'compiler="${JTILE_BISHENGIR:-bishengir-compile}"',
        'command -v "$compiler" >/dev/null || { echo "$compiler was not found: install AscendNPU-IR" >&2; exit 1; }',
        'command -v hivmc >/dev/null || { echo "hivmc was not found: source the set_env.sh of CANN" >&2; exit 1; }',
        "fixed=",
        "! setarch -R true 2>/dev/null || fixed='setarch -R'  # what it makes depends on where its memory lies",
        "saved=$(mktemp -d)",
        "trap 'rm -rf \"$saved\"' EXIT",
        "facts() {  # HIVM: how it is launched",
        "  sed -n '/@[a-zA-Z0-9_]*_infer_/,/return/s/.*constant \\(-*[0-9]*\\) :.*/\\1/p' \"$1\"",
        "}",
        "build() {  # linalg, object, its HIVM as jtile has it, whether there are two buffers for what loops load",
        f'  $fixed "$compiler" "$1" {shlex.join(TO_HIVM)} "--enable-auto-multi-buffer=$4" \\',
        f'    {shlex.quote("--target=" + manifest["arch"])} "--save-temps=$saved" -o "$2" && [ -s "$2" ] ||',
        '    { echo "$1 was not compiled" >&2; return 1; }',
        '  [ "$(facts "$saved/module.hivm.opt.mlir")" = "$(facts "$3")" ] ||',
        '    { rm -f "$2"; echo "$1: the object is launched otherwise than manifest.json says: build it with the" \\',
        '      "AscendNPU-IR that made it" >&2; return 1; }',
        "}",
    ]
    for k in manifest["kernels"]:
        files = k["texts"]["linalg"], k["object"], k["texts"]["hivm"]
        lines.append(f"build {shlex.join(files)} {k['buffers'] > 1}")
    return "\n".join(lines) + "\n"


def readme(manifest: dict[str, Any]) -> str:
    """The text of the bundle's `README.md`."""
    takes = "\n".join(f"| `{a['name']}` | {a['dtype']} | {a['shape']} |" for a in manifest["inputs"])
    gives = "\n".join(f"| `{a['name']}` | {a['dtype']} | {a['shape']} |" for a in manifest["outputs"])
    kernels = "\n".join(
        f"- `{k['symbol']}`: {k['record']['grid']} blocks, kind {k['kind']}, {k['workspace']} bytes of workspace a "
        f"block; {k['checked']}"
        for k in manifest["kernels"]
    )
    return f"""# {manifest["program"]} for {manifest["arch"]}

Made by jtile from a kernel in Python. **Compiled and checked, not run on an NPU**: the vendor's open compiler took it
down to its last open form (HIVM), which fits the memories of {manifest["arch"]}; the last step, from HIVM to an object,
needs CANN, and neither that step nor a launch was ever tried by jtile's developers.

```sh
source /usr/local/Ascend/ascend-toolkit/set_env.sh   # of your CANN
sh build.sh                                          # makes an object of each kernel
python run.py                                        # runs them on random numbers; needs torch and torch_npu
```

```python
from run import Bundle
y = Bundle()(*tensors)     # contiguous, on an NPU; on torch_npu's current stream
```

| input | dtype | shape |
|---|---|---|
{takes}

| output | dtype | shape |
|---|---|---|
{gives}

{kernels}

`manifest.json` has the packed arguments of a launch (`abi`, `kernels[].record`) for other launchers, and digests of the
tools and texts; `kernels/` has every level: jaxpr, Tile IR, TTIR, linalg, HIVM.
"""
