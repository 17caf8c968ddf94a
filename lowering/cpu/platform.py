"""The record of the CPU platform."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtile import ir
from jtile._config import current
from jtile._cores import cores_here

from ..platforms import Options, Platform, milliseconds, slug

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..targets import Target


def _compile(kernel: ir.Kernel, target: Target, options: Options, texts: bool) -> Artifact:
    from . import compile_kernel
    from .targets import parse_isa

    return compile_kernel(kernel, parse_isa(target.arch), texts=texts, coarse=not options.get("bands"))


def _attributes(artifact: Artifact, kernel: ir.Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the custom call, as the handler in ffi/csrc/cpu.cc declares them."""
    from .cost import cost_of_call

    launch = artifact.launch | cost_of_call(kernel, values)
    numbers = {k: np.int64(launch[k]) for k in ("workspace", "cost")}
    texts = {k: str(launch[k]) for k in ("name", "isa", "sites")}
    if kernel.devices:
        texts["devices"] = str(launch["devices"])
        numbers["memory"] = np.int64(launch["memory"])
        numbers["timeout"] = milliseconds()
    if "dims" in launch:  # the image counts the programs itself
        numbers |= {"programs": np.int64(-1), "dims": np.asarray(launch["dims"], np.int64)}
    else:
        numbers["programs"] = np.int64(launch["programs"])  # fewer than the grid has, where some of them run as one
    return {"image": artifact.image, **numbers, **texts}


def _resolve(name: str) -> Target:
    from .targets import cpu_target

    return cpu_target(name.partition(":")[2] or None)


def _names() -> Sequence[str]:
    from .isa import ISAS

    return ["cpu", *(f"cpu:{name}" for name in sorted(ISAS))]


def _here() -> Target:
    from .targets import cpu_target

    return cpu_target(current().isa)


@functools.cache
def _kind_of(isa: str | None) -> str:
    from .targets import cpu_target

    arch = cpu_target(isa).arch.split(":")
    return slug(f"cpu-{arch[1] or arch[0]}-{cores_here()}t")


def _predicted_us(kernel: ir.Kernel) -> float:
    from .cost import predicted_us

    return predicted_us(kernel)


def _located(kernel: ir.Kernel, target: Target) -> tuple[Mapping[str, str], list[ir.Loc]]:
    from .located import located_levels
    from .targets import parse_isa

    return located_levels(kernel, parse_isa(target.arch))


def _register() -> None:
    from jtile import ffi

    ffi.register("cpu")


CPU = Platform(
    name="cpu",
    hosts=("cpu",),
    call="jtile_cpu",
    devices_call="jtile_cpu_devices",
    graph_call="jtile_cpu_graph",
    graph_devices_call="jtile_cpu_graph_devices",
    compile=_compile,
    attributes=_attributes,
    resolve=_resolve,
    names=_names,
    here=_here,
    owns=lambda device: device.platform == "cpu",
    kind=lambda: _kind_of(current().isa),
    is_here=lambda: True,
    register=_register,
    by_units=False,
    literals=True,
    fills=True,
    predicted_us=_predicted_us,
    located=_located,
    tools=lambda: () if current().optimize else ("not optimised",),
)
