"""The record of the platform of Ascend NPUs: compiled ahead of time, for bundles and exports; XLA has no such platform.

On a machine with CANN, programs of XLA's CPU platform send kernels to an NPU where the option `arch` names one: their
arrays are copied there and back by `ffi/csrc/ascend.cc`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtile import ir
from jtile._errors import UnsupportedError

from .. import platforms
from ..platforms import Options, Platform
from .tools import VARIABLES

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..targets import Target


def _compile(kernel: ir.Kernel, target: Target, options: Options, texts: bool) -> Artifact:
    from .compile import compile_kernel

    return compile_kernel(kernel, target, options, texts)


def _attributes(artifact: Artifact, kernel: ir.Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the custom call, as the handler in ffi/csrc/ascend.cc declares them."""
    from .objects import for_launch

    image, record = for_launch(artifact.image, artifact.launch["record"])
    return {"image": image, "record": record, "device": np.int64(0)}


def _resolve(name: str) -> Target:
    from .targets import resolve

    return resolve(name)


def _names() -> Sequence[str]:
    from .targets import names

    return names()


def _claims(arch: str) -> bool:
    from .targets import ARCHS

    return arch in ARCHS


def _tools() -> Sequence[Any]:
    from .tools import versions

    return versions()


def _here() -> Target:
    asked = platforms.asked_of(ASCEND.claims)
    if asked is None:
        raise UnsupportedError(
            "kernels are compiled for Ascend for an NPU that is named: set JTILE_ARCH=910b1, or write "
            "`with jt.config(arch='910b1'):` around the export"
        )
    return _resolve(f"ascend:{asked}")


def _bundle() -> Any:
    from . import bundled

    return bundled


def _register() -> None:
    from jtile import ffi

    ffi.register("ascend")


ASCEND = Platform(
    name="ascend",
    hosts=("ascend", "cpu"),
    call="jtile_ascend",
    compile=_compile,
    attributes=_attributes,
    resolve=_resolve,
    names=_names,
    here=_here,
    register=_register,
    claims=_claims,
    tools=_tools,
    bundle=_bundle,
    variables=tuple(VARIABLES.values()),
    status="compiled only",
)
