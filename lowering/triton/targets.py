"""Targets whose code `lowering/triton` makes: from the facts of an architecture and the numbers of a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..targets import Gap, Memory, Scale, Target, without_devices
from .features import OCP, Features, features
from .ttir import MAX_TILE

Shape = tuple[int, int, int, str]


@dataclasses.dataclass(frozen=True)
class Card:
    """Numbers of one card, from its data sheet; matrix rates are dense, without sparsity.

    Attributes:
      units: multiprocessors or compute units.
      l2, dram: bytes of the second-level cache and of the memory, which gives `bandwidth` bytes a second.
      link: bytes a second from a card to the others of its host, one way, where all are joined by such links.
      f32, bf16, fp8, int8, f64: operations a second of matrix products by dtype, the first that of f32 arithmetic.
    """

    units: int
    l2: int
    dram: int
    bandwidth: float
    f32: float
    bf16: float
    fp8: float = 0.0
    int8: float = 0.0
    f64: float = 0.0
    link: float | None = None

    def with_units(self, units: int) -> Card:
        """A card of the same chip with more or fewer units: rates go along, memory stays."""
        share = units / self.units
        rates = {name: getattr(self, name) * share for name in ("f32", "bf16", "fp8", "int8", "f64")}
        return dataclasses.replace(self, units=units, **rates)


def target_of(
    platform: str, f: Features, card: Card, shapes: Sequence[Shape], *, warpgroups: bool = False,
    more: Sequence[str] = (),
) -> Target:  # fmt: skip
    """The target of an architecture, with the numbers of a card.

    Args:
      shapes: the shape of the widest matrix instruction of each dtype.
      warpgroups: four warps are a unit of the machine.
      more: features of the target besides those that follow from the architecture's.
    """
    memories = (Memory("registers", f.registers * 4), Memory("shared", f.shared), Memory("l2", card.l2),
                Memory("dram", card.dram, card.bandwidth))  # fmt: skip
    warps = f.max_threads // f.lanes
    scales = (
        Scale("thread", memory="registers"),
        Scale("warp", units=f.lanes),
        *([Scale("warpgroup", units=4)] if warpgroups else []),
        Scale("block", units=warps // 4 if warpgroups else warps, memory="shared"),
        *([Scale("cluster", units=8)] if f.clusters else []),
        Scale("device", units=card.units, memory="l2"),
        Scale("node", units=8, memory="dram", link=card.link),
    )
    rates = {"float32": card.f32, "bfloat16": card.bf16, "float16": card.bf16, "float64": card.f64, "int8": card.int8}
    rates |= dict.fromkeys(f.fp8, card.fp8)
    own = ["warpgroup products"] * f.warpgroup_products + ["peers"] * f.ptx
    return Target(
        name=f"{platform}:{f.arch}",
        platform=platform,
        arch=f.arch,
        scales=scales,
        memories=memories,
        matrix_shapes=tuple(shapes),
        limits=(("programs", 2**62), ("tile", MAX_TILE), *([("resident", card.units)] if f.ptx else [])),
        gaps=tuple(_gaps(f)),
        rates=tuple(rates.items()),
        features=("warps", *more, *own),
    )


def _gaps(f: Features) -> list[Gap]:
    wide = "cast the operands to bfloat16 or float16 first"
    return [*(Gap("dot", d, wide) for d in OCP if d not in f.fp8), *([] if f.ptx else without_devices())]


def features_of(target: Target) -> Features:
    """The facts of a target's architecture, with the sizes of memories that the target itself says."""
    f = features(target.arch)
    sizes = {"shared": target.memory("block"), "registers": target.memory("thread")}
    given = {name: m.size // (4 if name == "registers" else 1) for name, m in sizes.items() if m and m.size}
    return dataclasses.replace(f, **given)


def device_number(device: Any, name: str) -> int | None:
    """A number that JAX tells of a device, such as `core_count`; None where it does not."""
    try:
        value = getattr(device, name, None)
    except Exception:  # a plug-in of another version may not know the number
        return None
    return value if isinstance(value, int) and value > 0 else None
