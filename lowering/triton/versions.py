"""What differs between the versions of triton that jtile knows (3.6 to 3.9): spellings, and defects to go around."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import TYPE_CHECKING, Any

from jtile._errors import UnsupportedError

if TYPE_CHECKING:
    from .features import Features

OLDEST = (3, 6)


@functools.cache
def version() -> tuple[int, int]:
    """The major and minor version of the installed triton.

    Raises:
      UnsupportedError: triton is missing, cannot be imported, or is older than 3.6.
    """
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "kernels for a GPU are compiled by the package triton, which is not installed: "
            "pip install 'jtile[cuda13]' (NVIDIA) or 'jtile[rocm]' (AMD)"
        )
    try:
        import triton

        found = tuple(int(re.match(r"\d+", part)[0]) for part in triton.__version__.split(".")[:2])  # type: ignore[index]
        if found >= OLDEST:
            import triton.backends.compiler
            import triton.compiler.compiler
    except Exception as error:
        raise UnsupportedError(
            f"the package triton is installed, but cannot be imported ({type(error).__name__}: {error}): "
            "pip install --force-reinstall 'triton>=3.6', or move what hides it: a folder named triton"
        ) from error
    if found < OLDEST:
        raise UnsupportedError(f"triton {triton.__version__} is too old for jtile: pip install -U 'triton>=3.6'")
    return found[0], found[1]


def tensordesc(shape: tuple[int, ...], elem: str, layout: Any = "") -> str:
    """The type of a tensor descriptor for tiles of a shape, at the block level with their layout in shared memory."""
    text = "x".join([*map(str, shape), elem]) + (f", {layout}" if layout else "")
    return f"!tt.tensordesc<tensor<{text}>>" if version() < (3, 9) else f"!tt.tensordesc<{text}>"


def eviction(policy: str) -> str:
    """The attribute of a `tt.load` that says when the cache forgets what it reads: "evict_last", "evict_first"."""
    if version() < (3, 9):
        return f" evictionPolicy = {policy}"
    return f" {{cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = {policy}>}}"


def modifier(name: str) -> str:
    """The attribute of a `tt.load` or `tt.store` with a cache modifier."""
    if version() < (3, 9):
        return f" cacheModifier = {name}"
    return f" {{cachePolicy = #tt.cache_policy<cache_modifier = {name}, eviction_policy = evict_normal>}}"


def forgets_modifiers() -> bool:
    """Whether triton drops the cache modifier of a load that becomes a copy to shared memory; 3.9 keeps it."""
    return version() < (3, 9)


def spreads_first_axis() -> bool:
    """Whether triton spreads a tensor whose last axis is as long as what a warp loads over its other warps along the
    first axis: triton 3.6 does, 3.9 takes the axis before the last one."""
    return version() < (3, 9)


def store_wait(pending: int) -> str:
    """The op that waits until all but `pending` asynchronous stores have read their buffers."""
    return f"ttng.async_tma_store_wait {{pendings = {pending} : i32{', read_only' if version() >= (3, 9) else ''}}}"


def gather_layout() -> str:
    """An attribute of `tt.gather`: triton 3.6 looks for a layout in which a warp finds all that it gathers, and fails
    an assertion where it finds none."""
    return ", efficient_layout" if version() < (3, 9) else ""


def constant_conditions() -> bool:
    """Whether a `scf.while` may be known never to run: triton 3.6 crashes on the loads and stores of its body."""
    return version() >= (3, 9)


def forgets_bounds() -> bool:
    """Whether values that a loop carries may stay what they were at first: triton 3.6, where it removes conversions of
    layouts, takes for dead what only bounds of loops inside depend on (triton-lang/triton#9036)."""
    return version() < (3, 9)


def reduces_any_layout() -> bool:
    """Whether `tt.reduce` is right in every layout; see `layouts.py`."""
    return version() >= (3, 9)


def converts_fp8(f: Features) -> bool:
    """Whether the instructions of an architecture that convert fp8 may be asked for.

    In a process that has compiled them for gfx950, triton 3.6 aborts when gfx1201 wants them too.
    """
    return not (f.backend == "amd" and f.lanes == 32) or version() >= (3, 9)
