"""The levels of a lowered kernel: what it is at each, and where its lines come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jtile import Lowered, passes
from jtile._config import config
from jtile.explorer import emitted, links
from jtile.explorer.access import walked
from jtile.explorer.kernels import Found
from jtile.explorer.layouts import layouts
from jtile.explorer.links import Linked
from jtile.explorer.passes import steps
from jtile.explorer.places import Places
from jtile.explorer.record import Level, Piece
from jtile.explorer.roles import roles
from jtile.explorer.speed import Timed, speed
from jtile.lowering import platforms, starts
from jtile.primitive.lowering import compiler_options, complete, pieces_of

_TITLES = {
    "jaxpr": ("jaxpr", "What JAX traced: the form that gradients and vmap are made from."),
    "tile_ir": ("Tile IR, traced", "The kernel in jtile's own representation, before any pass."),
    "tile_ir_opt": ("Tile IR, simplified", "After the passes that all targets share."),
    "block": ("Block level", "Roles, rings of shared memory and barriers, with the layout of every value."),
    "ttir": ("TTIR", "Triton's representation of tiles."),
    "ttgir": ("TTGIR", "Triton's representation with layouts: which thread holds which element."),
    "llir": ("LLVM IR", "What one thread of the GPU does."),
    "ptx": ("PTX", "NVIDIA's virtual instructions."),
    "sass": ("Machine code (SASS)", "The instructions that the GPU runs."),
    "amdgcn": ("Machine code (AMDGCN)", "The instructions that the GPU runs."),
    "llvm": ("LLVM IR, emitted", "What jtile gives to LLVM: vectorised and unrolled."),
    "llvm_opt": ("LLVM IR, optimised", "After LLVM's passes."),
    "asm": ("Machine code", "The instructions that the CPU runs."),
    "linalg": ("Linalg", "The form that the vendor's compiler starts from."),
    "hivm": ("HIVM", "The vendor's representation of the instructions of the NPU."),
}
_FACTS = ("choice", "sharding", "resources", "schedule")  # texts of sentences, which the page shows elsewhere


def piece(lowered: Lowered, found: Found, places: Places, group: str, calls: int, timed: Timed) -> Piece:
    """All that a record has of a kernel that runs.

    Args:
      lowered: one of the pieces of `found`.
      timed: what is known of its speed, and whether this machine may be measured.
    """
    with config(**lowered.options):
        program, target = lowered.program, lowered.target
        traced = pieces_of(program, target).kernels[lowered.piece]
        options = compiler_options(program, lowered.piece, target)
        made = starts.without_idle_aliases(complete(traced, platforms.named(target.platform)).kernel)
        artifact, texts = lowered.artifact, lowered.texts
        own = emitted.linked(passes.run_pipeline(made, passes.TILE), target, options, artifact)
        texts_of: dict[str, Linked] = {
            "jaxpr": links.jaxpr(program.jaxpr),
            "tile_ir": links.tile_ir(program.kernel),
            "tile_ir_opt": links.tile_ir(lowered.kernel),
        } | own
        levels = [_level(name, linked, places) for name, linked in texts_of.items() if name not in _FACTS]
        refs = [_ref(v) for v in traced.params]
        grid = [n if isinstance(n, int) else str(n) for n in traced.grid]
        done = steps(traced, target, options, places)
        data = _inputs(found.data, pieces_of(program, target).inputs[lowered.piece])
        concrete = found.concrete(lowered.kernel)
        access = walked(concrete, data, places)
        fast = speed(concrete, target, artifact, timed)
        lay = layouts(own, target, places)
        shared = roles(traced, target, options, data, places, run=timed.run)
    facts = {name: texts[name].strip() for name in _FACTS if texts.get(name)}
    return Piece(traced.name, group, calls, grid, refs, levels, done, facts, access, fast, shared, lay)


def _inputs(data: Sequence[Any] | None, positions: Sequence[int]) -> list[Any] | None:
    """The inputs of a piece among those of its program; what other pieces make is not known."""
    return None if data is None else [data[k] if k < len(data) else None for k in positions]


def _level(name: str, linked: Linked, places: Places) -> Level:
    title, about = _TITLES.get(name, (name, ""))
    if not linked.any:
        about = f"{about} Its compiler does not say where its lines come from.".strip()
    return Level(name, title, about, linked.any, places.text(linked))


def _ref(v: Any) -> dict[str, Any]:
    shape = [n if isinstance(n, int) else str(n) for n in v.shape]
    return {"name": v.name or "_", "role": v.type.role, "dtype": v.dtype, "shape": shape}
