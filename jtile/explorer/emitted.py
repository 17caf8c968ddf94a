"""The levels of a back end with their places: the kernel is emitted once more with marks behind the lines, since what
runs is compiled without."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtile import ir
from jtile.explorer import links
from jtile.explorer.links import Linked
from jtile.ir import NOWHERE
from jtile.lowering import platforms
from jtile.lowering.emitting import Marks
from jtile.lowering.targets import Target

_TIMEOUT = 60.0  # seconds that an assembler may take


def linked(kernel: ir.Kernel, target: Target, options: Mapping[str, Any], artifact: Any) -> dict[str, Linked]:
    """The texts of an artifact with the places of their lines, as far as its back end tells them.

    Args:
      kernel: the kernel that the artifact was compiled from, after the passes of tiles.
    """
    texts: Mapping[str, str] = artifact.texts
    located = platforms.named(target.platform).located
    if located is not None:
        return _located(*located(kernel, target), texts)
    if "warps" not in target.features or "ttgir" not in texts:
        return {name: links.plain(text) for name, text in texts.items()}
    return _gpu(kernel, target, options, artifact)


# -- with places from the back end -------------------------------------------------------------------------------------


def _located(made: Mapping[str, str], places: list[ir.Loc], texts: Mapping[str, str]) -> dict[str, Linked]:
    found = {
        "llvm": Linked(made["llvm"].splitlines(), places),
        "llvm_opt": links.llvm(made["llvm_opt"], places),
        "asm": links.assembly(made["asm"], places),
    }
    own = links.assembly(texts["asm"], [])
    if _code(own.lines) != _code(found["asm"].lines):  # the places are those of other code than that which runs
        found |= {name: links.plain(texts[name]) for name in ("llvm_opt", "asm")}
    return found


def _code(lines: list[str]) -> list[str]:
    return [line.split("#")[0].strip() for line in lines if line.startswith("\t") and not line.startswith("\t.")]


# -- GPUs -------------------------------------------------------------------------------------------------------------

_LEVELS = {
    "ttir": links.mlir, "ttgir": links.mlir, "llir": links.llvm, "ptx": links.assembly, "amdgcn": links.assembly,
}  # fmt: skip


def _gpu(kernel: ir.Kernel, target: Target, options: Mapping[str, Any], artifact: Any) -> dict[str, Linked]:
    from jtile.lowering.triton.targets import features_of

    texts, f = artifact.texts, features_of(target)
    block = artifact.launch.get("level") == "block"
    if block:
        final = _block_kernel(kernel, target, options)
        emitted, places = _block(final, f)
    else:
        emitted, places = _tile(kernel, f, options)
    found = {}
    for name, text in texts.items():
        if name == "block" and block:
            found[name] = _with_layouts(final, text)
        elif name == "ttgir" and block:
            found[name] = Linked(emitted.splitlines(), places)
        elif name == "sass":
            found[name] = _sass(texts.get("ptx", ""), text, places)
        else:
            found[name] = _LEVELS[name](text, places) if name in _LEVELS else links.plain(text)
    return found


def _tile(kernel: ir.Kernel, f: Any, options: Mapping[str, Any]) -> tuple[str, list[ir.Loc]]:
    from jtile.lowering.triton import heuristics
    from jtile.lowering.triton.compile import emit_kernel

    choice, marks = heuristics.choose(kernel, f, options), Marks("//")
    depth = choice.num_stages if "num_stages" in choice.fixed else None
    text, _ = emit_kernel(kernel, f, num_stages=depth, marks=marks)
    return _unmarked(text), marks.places(text)


def _block(kernel: ir.Kernel, f: Any) -> tuple[str, list[ir.Loc]]:
    from jtile.lowering.triton.block.compile import emit_block_kernel

    marks = Marks("//")
    text, _, _ = emit_block_kernel(kernel, f, marks)
    return _unmarked(text), marks.places(text)


def _unmarked(text: str) -> str:
    return re.sub(r" // @\d+$", "", text, flags=re.MULTILINE)


def _block_kernel(kernel: ir.Kernel, target: Target, options: Mapping[str, Any]) -> ir.Kernel:
    from jtile.ir.block import level_of
    from jtile.lowering.triton.block.passes import NoPlan, block_level
    from jtile.lowering.triton.block.passes.plan import Machine

    if level_of(kernel) == "block":
        return kernel
    found = block_level(kernel, Machine.of(target), options)
    assert not isinstance(found, NoPlan), found
    return found


def _with_layouts(kernel: ir.Kernel, text: str) -> Linked:
    """The level `block`: the names of layouts, then Tile IR with the layout of every value."""
    lines, places = text.splitlines(), links.tile_ir(kernel).places
    return Linked(lines, [ir.NOWHERE] * (len(lines) - len(places)) + places)


def _sass(ptx: str, text: str, places: list[ir.Loc]) -> Linked:
    """Machine code with places: the PTX assembled once more with its lines, if that is the same code."""
    import triton.backends.nvidia as nvidia

    from jtile.lowering.triton import ptxas

    plain = links.plain(text)
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if arch is None:
        return plain
    tools = Path(nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source, image = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        assemblers = dict.fromkeys(str(tool.path) for tool in ptxas.tools() if tool is not None)
        for assembler in assemblers:
            made = _run(assembler, "-lineinfo", f"--gpu-name={arch[1]}", str(source), "-o", str(image))
            listed = made is not None and _run(str(tools / "nvdisasm"), "-c", "-g", str(image))
            found = links.sass(listed, places) if listed else plain
            if _instructions(found.lines) == _instructions(plain.lines):  # ptxas may number predicates anew
                of = [place for line, place in zip(found.lines, found.places, strict=True) if _INSTRUCTION.match(line)]
                ahead = iter(of)
                return Linked(plain.lines, [next(ahead) if _INSTRUCTION.match(x) else NOWHERE for x in plain.lines])
    return plain


_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s*(?:@!?\w+\s+)?([\w.]+)")


def _instructions(lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := _INSTRUCTION.match(line))]


def _run(*command: str) -> str | None:
    """What a tool prints; None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
