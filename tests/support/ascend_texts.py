"""A compiler for Ascend without the vendor's tools, for tests of what stands around it: every kernel becomes the text
that the tools made of `add`, tiles of 1024 of 10000 numbers."""

from __future__ import annotations

from pathlib import Path

from jtile.lowering.ascend import compile as compiling
from jtile.lowering.ascend import tools

HIVM = Path(__file__).resolve().parents[1] / "data" / "hivm" / "add.mlir"


def stored(monkeypatch) -> None:
    """Let `monkeypatch` put the stored text in the place of the tools."""
    hivm = HIVM.read_text()
    monkeypatch.setattr(tools, "needed", Path)
    monkeypatch.setattr(tools, "versions", lambda: ("stored", "texts"))
    monkeypatch.setattr(compiling, "to_linalg", lambda ttir, folder, kernel: "module {}\n")
    named = lambda kernel: hivm.replace("jtile_add", f"jtile_{kernel.name}")
    monkeypatch.setattr(compiling, "to_hivm", lambda linalg, target, folder, kernel: (named(kernel), 2))
