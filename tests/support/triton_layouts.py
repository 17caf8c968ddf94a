"""What triton says of layouts: of each `[platform, arch, lanes, type, shape]` of a file the linear map, as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend


def linear(platform: str, arch: Any, lanes: int, type_: str, shape: list[int], path: Path) -> list[Any]:
    """Of a tile the bases of registers, lanes and warps; of a buffer those of places."""
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget(platform, arch, lanes)).load_dialects(context)
    head = f'"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, "ttg.threads-per-warp" = {lanes} : i32'
    path.write_text(f"module attributes {{{head}}} {{ tt.func public @f(%arg0: {type_}) {{ tt.return }} }}")
    module, b = ir.parse_mlir_module(str(path), context), gluon_ir.GluonOpBuilder(context)
    value, tile = module.get_function("f").args(0), type_.startswith("tensor")
    layout = (b.get_gluon_layout_from_tensor if tile else b.get_gluon_layout_from_memdesc)(value)
    found = b.to_linear_layout(layout._to_ir(b), shape)
    return [[x for x in found.reg_bases if any(x)], found.lane_bases, found.warp_bases] if tile else found.offset_bases


if not hasattr(gluon_ir.GluonOpBuilder, "to_linear_layout"):
    os._exit(3)
with tempfile.TemporaryDirectory() as folder:
    asked = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([linear(*one, Path(folder, "one.mlir")) for one in asked]), flush=True)
os._exit(0)  # triton's bindings complain of what they leave behind
