"""`jtile info`: what is installed, what can be compiled for, and where compiled kernels are kept."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

from jtile import _cache
from jtile.tools import cachedir, support

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
    told = ", ".join(name if status == "runs" else f"{name} ({status})" for name, status in page["platforms"].items())
    console.print(f"platforms {told}", highlight=False)
    console.print(_targets(page["targets"]))
    for line in support.gaps():
        console.print(line, highlight=False)
    console.print(f"devices   {', '.join(page['devices'])}")
    console.print(f"cache     {cachedir.describe(_cache.info())}", highlight=False, soft_wrap=True)


def _targets(targets: dict[str, Any]) -> Any:
    from rich.table import Table

    out = Table(
        "target", "processor", "vectors", "matrix instructions", "dtypes", title="Targets", title_justify="left"
    )
    for name, target in targets.items():
        arch, processor, bits, *_ = *target["arch"].split(":"), "", ""  # a GPU's is one word
        shapes = "\n".join(f"{m}x{n}x{k} {dtype}" for m, n, k, dtype in target["matrix_shapes"])
        vectors = f"{bits} bits" if bits else "-"
        out.add_row(name, f"{arch} {processor}".strip(), vectors, shapes or "-", support.dtypes(target["dtypes"]))
    return out


def collect() -> dict[str, Any]:
    """Everything the page shows: versions, devices, targets with what they can run, cache."""
    import jax

    from jtile.lowering import platforms, targets

    cache = _cache.info()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        "platforms": {p.name: p.status or "runs" for p in platforms.every()},
        "targets": {name: dataclasses.asdict(targets.resolve(name)) for name in targets.names()},
        "cache": {"folder": cache.folder, "kernels": cache.entries, "bytes": cache.size, "limit": cache.limit},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
