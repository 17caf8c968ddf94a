"""What a compiled GPU function takes: registers, spills, shared memory, occupancy; and its machine code as text."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..rocm.disassembly import facts
from .features import Features

_TIMEOUT = 60  # seconds for a disassembler


def sass(image: bytes) -> str:
    """The machine code of a cubin; a sentence where triton's nvdisasm is missing."""
    return _tool("nvdisasm", ["-c"], image)


def resources(image: bytes, texts: dict[str, str], f: Features, threads: int, shared: int) -> dict[str, Any]:
    """`registers` and `spills` (bytes) of a thread, `shared` (bytes) and `threads` of a block, `blocks` of a
    multiprocessor, and the `occupancy` that they make: warps there are over those that there can be."""
    if f.ptx:
        registers, spills, static = _cuda(image)
    else:  # shared memory that is asked for at the launch is not in the text
        read = facts(texts.get("amdgcn", ""))
        registers, spills, static = read.registers, read.spills, 0
    blocks = _blocks(f, registers, threads, shared + static)
    limit = f.warps * f.lanes
    return {
        "registers": registers, "spills": spills, "shared": shared + static, "threads": threads, "blocks": blocks,
        "occupancy": round(min(1.0, blocks * threads / limit), 3),
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """The resources in one line."""
    return (
        f"{found['registers']} registers, {found['spills']} bytes spilled, {found['shared']} bytes of shared memory, "
        f"{found['threads']} threads a block, {found['blocks']} blocks a multiprocessor, "
        f"occupancy {found['occupancy']:.0%}"
    )


def _blocks(f: Features, registers: int, threads: int, shared: int) -> int:
    """Blocks that fit on one multiprocessor (compute unit) at a time; registers come in eights a thread."""
    by_threads = f.warps * f.lanes // threads
    per_thread = -(-max(registers, 1) // 8) * 8
    by_registers = f.registers // (per_thread * threads)
    by_memory = f.multiprocessor_shared // (shared + f.reserved) if shared else by_threads
    return max(0, min(by_threads, by_registers, by_memory, 32))


def _cuda(image: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack, static shared memory of a cubin."""
    text = _tool("cuobjdump", ["--dump-resource-usage"], image)
    number = lambda name: int(found[1]) if (found := re.search(rf"\b{name}:(\d+)", text)) else 0
    return number("REG"), number("STACK") + number("LOCAL"), number("SHARED")


def _tool(name: str, options: list[str], image: bytes) -> str:
    """The output of one of the tools that come with triton for a cubin, or a comment line that says why it failed."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / name
    handle, path = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(image)
        done = subprocess.run([tool, *options, path], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except OSError as e:
        return f"// {name} of triton cannot be run: {e}\n"
    finally:
        os.unlink(path)
    return done.stdout or f"// {name}: {done.stderr}"
