"""`jtile info`: what is installed, what can be compiled for, and where compiled kernels are kept."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

from jtile import _cache
from jtile.tools import cachedir

_PACKAGES = ("jtile", "jax", "jaxlib", "numpy", "llvmlite", "triton", "flax", "jax-cuda13-plugin")


def show(*, as_json: bool) -> None:
    """Print the page, as tables or as one JSON document."""
    if as_json:
        print(json.dumps(collect(), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    page, console = collect(), Console()
    versions = Table(title="Versions", title_justify="left", show_header=False)
    for name, version in page["versions"].items():
        versions.add_row(name, version or "[dim]not installed[/dim]")
    console.print(versions)
    console.print(f"devices   {', '.join(page['devices'])}")
    console.print(f"cpu code  {page['cpu']['name']}, {page['cpu']['vector_bits']}-bit vectors", highlight=False)
    console.print(f"cache     {cachedir.describe(_cache.info())}", highlight=False, soft_wrap=True)


def collect() -> dict[str, Any]:
    """Everything the page shows: versions, devices, cpu, targets, capabilities, cache."""
    import jax

    from jtile.lowering.cpu.isa import host_isa

    isa, cache = host_isa(), _cache.info()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        "cpu": {"name": isa.cpu, "arch": isa.arch, "vector_bits": isa.vector_bits, "features": sorted(isa.features)},
        "cache": {"folder": cache.folder, "kernels": cache.entries, "bytes": cache.size, "limit": cache.limit},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
