"""jtile: a tile language for JAX. `import jtile as jt`; the whole public API is here.

A kernel is a short function over tiles of arrays, decorated with `jt.kernel`; it is called like any JAX function. See
docs/language.md for what a kernel body may say, `jtile.ops` for the kernel library, `jtile.models` for language models.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jtile import _effect as _effect
from jtile import errors as errors

try:
    from jtile import ffi as _ffi
except ImportError as e:
    if importlib.util.find_spec("jtile.ffi") is None:  # a checkout: only an installation maps the folders beside jtile/
        raise ImportError(
            "jtile is imported from a checkout that is not installed, so that its folders ffi, lowering and models are "
            "not found: run `pip install -e .` there (`make test` does it in .venv), or leave the folder"
        ) from None
    raise e
from jtile._config import Config as Config
from jtile._config import config as config
from jtile._config import configure as configure
from jtile.calls.kernel import Kernel as Kernel
from jtile.calls.kernel import call as call
from jtile.calls.kernel import kernel as kernel
from jtile.calls.kernel import tuned as tuned
from jtile.calls.lowered import Lowered as Lowered
from jtile.calls.marks import dynamic as dynamic
from jtile.calls.signature import auto as auto
from jtile.primitive.options import Options as Options

_ffi.register_early()

if TYPE_CHECKING:
    from jtile import interpret as interpret
    from jtile import ir as ir
    from jtile import models as models
    from jtile import ops as ops
    from jtile import testing as testing
    from jtile._sizes import bounds_of as bounds_of
    from jtile.calls.bundle import export_bundle as export_bundle
    from jtile.calls.over_sizes import takes_marks as takes_marks
    from jtile.calls.partitioned import partitioned as partitioned
    from jtile.execution import graph as graph
    from jtile.explorer import View as View
    from jtile.explorer import view as view
    from jtile.fusion import fuse as fuse
    from jtile.fusion.source import tile as tile
    from jtile.language import Barrier as Barrier
    from jtile.language import BarrierRound as BarrierRound
    from jtile.language import BarrierSlot as BarrierSlot
    from jtile.language import Counters as Counters
    from jtile.language import Ref as Ref
    from jtile.language import Shared as Shared
    from jtile.language import Signals as Signals
    from jtile.language import TileView as TileView
    from jtile.language import alloc as alloc
    from jtile.language import arange as arange
    from jtile.language import arrive as arrive
    from jtile.language import assert_ as assert_
    from jtile.language import associative_scan as associative_scan
    from jtile.language import async_copy as async_copy
    from jtile.language import atomic_add as atomic_add
    from jtile.language import atomic_and as atomic_and
    from jtile.language import atomic_cas as atomic_cas
    from jtile.language import atomic_max as atomic_max
    from jtile.language import atomic_min as atomic_min
    from jtile.language import atomic_or as atomic_or
    from jtile.language import atomic_xchg as atomic_xchg
    from jtile.language import atomic_xor as atomic_xor
    from jtile.language import axis_barrier as axis_barrier
    from jtile.language import axis_index as axis_index
    from jtile.language import axis_size as axis_size
    from jtile.language import barrier as barrier
    from jtile.language import cdiv as cdiv
    from jtile.language import clock as clock
    from jtile.language import cond as cond
    from jtile.language import counters as counters
    from jtile.language import dot as dot
    from jtile.language import dot_async as dot_async
    from jtile.language import dot_scaled as dot_scaled
    from jtile.language import dot_wait as dot_wait
    from jtile.language import ds as ds
    from jtile.language import fence_shared as fence_shared
    from jtile.language import fori as fori
    from jtile.language import full as full
    from jtile.language import like as like
    from jtile.language import load as load
    from jtile.language import next_power_of_2 as next_power_of_2
    from jtile.language import num_programs as num_programs
    from jtile.language import ones as ones
    from jtile.language import prefetch as prefetch
    from jtile.language import print as print
    from jtile.language import program_id as program_id
    from jtile.language import range as range
    from jtile.language import reduce as reduce
    from jtile.language import role as role
    from jtile.language import role_barrier as role_barrier
    from jtile.language import signal as signal
    from jtile.language import signals as signals
    from jtile.language import store as store
    from jtile.language import store_wait as store_wait
    from jtile.language import swizzle as swizzle
    from jtile.language import symmetric as symmetric
    from jtile.language import wait as wait
    from jtile.language import wait_for_kernels as wait_for_kernels
    from jtile.language import when as when
    from jtile.language import zeros as zeros
    from jtile.lowering.here import architecture as architecture
    from jtile.lowering.here import platform as platform
    from jtile.lowering.here import target as target
    from jtile.lowering.targets import Target as Target
    from jtile.lowering.targets import host_target as host_target
    from jtile.primitive.devices import can_talk as can_talk
    from jtile.primitive.exchange import Travelling as Travelling
    from jtile.primitive.exchange import exchange as exchange
    from jtile.primitive.exchange import exchanged as exchanged
    from jtile.primitive.export import export_checks as export_checks
    from jtile.primitive.same import same_along as same_along
    from jtile.trace import function as function
    from jtile.tune import autotune as autotune
    from jtile.tune import bench as bench
    from jtile.tune import explain as explain
    from jtile.tune import profile as profile
    from jtile.tune import tune as tune
    from jtile.tune.totals import cost as cost
    from jtile.tune.whole import profile_program as profile_program

# Loaded when a name of theirs is first used: `import jtile` stays cheap, and models need packages that kernels do not.
_MODULES = ("interpret", "ir", "models", "ops", "testing", "tune")
_LANGUAGE = [
    "Barrier", "BarrierRound", "BarrierSlot", "Counters", "Ref", "Shared", "Signals", "TileView", "alloc", "arange",
    "arrive", "assert_", "associative_scan", "async_copy", "atomic_add", "atomic_and", "atomic_cas", "atomic_max",
    "atomic_min", "atomic_or", "atomic_xchg", "atomic_xor", "axis_barrier", "axis_index", "axis_size", "barrier",
    "cdiv", "clock", "cond", "counters", "dot", "dot_async", "dot_scaled", "dot_wait", "ds",
    "fence_shared", "fori", "full", "like", "load", "next_power_of_2", "num_programs", "ones", "post", "prefetch",
    "print", "program_id", "range", "receive", "reduce", "role", "role_barrier", "signal", "signals", "store",
    "store_wait", "swizzle", "symmetric", "wait", "wait_for_kernels", "when", "zeros",
]  # fmt: skip
_NAMES = dict.fromkeys(_LANGUAGE, "jtile.language") | {
    "Target": "jtile.lowering.targets",
    "Travelling": "jtile.primitive.exchange",
    "View": "jtile.explorer.document",
    "architecture": "jtile.lowering.here",
    "autotune": "jtile.tune",
    "bench": "jtile.tune",
    "bounds_of": "jtile._sizes",
    "can_talk": "jtile.primitive.devices",
    "cost": "jtile.tune.totals",
    "exchange": "jtile.primitive.exchange",
    "exchanged": "jtile.primitive.exchange",
    "explain": "jtile.tune",
    "export_bundle": "jtile.calls.bundle",
    "export_checks": "jtile.primitive.export",
    "function": "jtile.trace",
    "fuse": "jtile.fusion",
    "graph": "jtile.execution",
    "partitioned": "jtile.calls.partitioned",
    "host_target": "jtile.lowering.targets",
    "platform": "jtile.lowering.here",
    "profile": "jtile.tune",
    "profile_program": "jtile.tune.whole",
    "same_along": "jtile.primitive.same",
    "takes_marks": "jtile.calls.over_sizes",
    "target": "jtile.lowering.here",
    "tile": "jtile.fusion.source",
    "view": "jtile.explorer.document",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jtile.{name}")
    if name in _NAMES:
        value = globals()[name] = getattr(importlib.import_module(_NAMES[name]), name)
        return value
    if name == "__version__":
        from importlib.metadata import version

        return version("jtile")
    raise AttributeError(f"module 'jtile' has no attribute {name!r}{_elsewhere(name)}")


def _elsewhere(name: str) -> str:
    """Where a function that jtile does not repeat is to be found: inside of a kernel, tiles are JAX arrays."""
    if name.startswith("_"):
        return ""
    for module in ("jax.numpy", "jax.lax", "jax.nn"):
        if callable(getattr(importlib.import_module(module), name, None)):
            return f": tiles are JAX arrays, so take {module}.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_NAMES, "__version__"})
