"""Which ptxas assembles a kernel, where one of those that triton brings is wrong."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jtile._errors import UnsupportedError

# Where two roles besides the first have the same products, ptxas 12.8 works out a descriptor of their operands in the
# code of one of them and reads it in that of the other, which other warps run: wrong numbers, or an illegal address.
MENDED = (12, 9)


class _Wanted(threading.local):
    """The ptxas that assembles this thread's kernel; None for triton's own choice."""

    tool: Any = None


_wanted = _Wanted()


def mended() -> Any:
    """The ptxas for kernels with several roles of products: triton's own choice for sm_90, or the newer one beside it.

    Raises:
      UnsupportedError: neither is new enough.
    """
    found = tools()
    for tool in found:
        if tool is not None and tuple(map(int, tool.version.split(".")[:2])) >= MENDED:
            return tool
    raise UnsupportedError(
        f"several roles with products need ptxas {'.'.join(map(str, MENDED))} or newer, got {found[0].version} "
        f"({found[0].path}): ptxas 12.8 mixes up their operands; set TRITON_PTXAS_PATH to a newer one, or leave such "
        "products to two roles, one of which is the first"
    )


def tools() -> list[Any]:
    """Triton's choice for sm_90, and the one that it brings for later architectures."""
    import triton.backends.nvidia.compiler as module
    from triton import knobs

    return [module.get_ptxas(90), knobs.nvidia.ptxas_blackwell]


@contextlib.contextmanager
def assembled_by(tool: Any) -> Iterator[None]:
    """Kernels that this thread assembles inside go through `tool`; None leaves the choice to triton."""
    import triton.backends.nvidia.compiler as module

    if not hasattr(module.get_ptxas, "of_triton"):
        own = module.get_ptxas

        def get_ptxas(*args: Any, **options: Any) -> Any:
            return own(*args, **options) if _wanted.tool is None else _wanted.tool

        get_ptxas.of_triton = own  # type: ignore[attr-defined]
        module.get_ptxas = get_ptxas
    before, _wanted.tool = _wanted.tool, tool
    try:
        yield
    finally:
        _wanted.tool = before
