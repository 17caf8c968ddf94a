"""Platforms as records: all that jtile asks about one stands in a `Platform`, which its folder defines.

A back end is a folder with such a record, its driver in `ffi/csrc`, and a line of `_RECORDS`. One from outside jtile is
a package with an entry point of the group `jtile.platforms` that names its record; docs/architecture.md has an example.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtile import ir
from jtile._config import current
from jtile._errors import KernelValueError, UnsupportedError

if TYPE_CHECKING:
    from .artifact import Artifact
    from .targets import Target
    from .triton.features import Features

Options = Mapping[str, Any]
Backend = Callable[[ir.Kernel, "Target", Options, bool], "Artifact"]


@dataclasses.dataclass(frozen=True)
class Platform:
    """What jtile knows of a platform. Functions import what they need when they are called.

    Attributes:
      name: the first part of the names of its targets, and what `jt.platform()` says.
      hosts: XLA's platforms whose programs its kernels can be part of. A kernel that is lowered for the first of them
        comes to this platform; for the others, where the option `arch` names one of its architectures.
      call: the target of the custom calls that carry its kernels, `"jtile_cuda"`; `io_call`: that of kernels which
        print or assert, where it is another; `devices_call`: that of kernels which talk to other devices, whose last
        operand is the place of theirs (`jtile.primitive.devices.place`), where it is another; `graph_call`: that of
        several kernels as one execution graph (`jt.graph`), where the platform runs such; `graph_devices_call`: that of
        a graph with sums over devices, where it has such tasks.
      compile_graph: makes one image of all kernels of an execution graph, which runs as one launch: (kernels behind the
        passes, target, options of each, a `lowering.triton.emit_tasks.Shape`) -> Artifact; None where each task of a
        graph is an image of its own. graph_refusal: why a kernel can be no task of a graph on a target, or None.
      exchange_calls: those of `jt.exchange` where engines for copies move parts of arrays, and not XLA's collectives:
        the one that begins, and the one that waits.
      compile: the back end: (kernel, target, options, with texts) -> Artifact. Where the option `bands` is set, the
        kernel is a task of an execution graph: its image must have the programs of its grid, one by one.
      attributes: of the custom call: (artifact, kernel, values of the dynamic sizes) -> name -> value.
      resolve: the target of a name, or of the option `arch`; typed errors for names that there are not.
      names: of its targets.
      here: the target that kernels are compiled for now; UnsupportedError where nothing says which.
      owns: whether a device of JAX is one of its.
      kind: the name of the device at hand, for records; of the target at hand where there is no device.
      is_here: whether the target at hand is that of a device of this machine, so that it can measure.
      register: makes XLA know the custom calls.
      claims: whether a word of the option `arch` is one of its architectures.
      features: of the architectures whose code `lowering.triton` makes.
      tools: what else the image of a kernel depends on, such as the version of a compiler. The version of the package
        whose entry point brings the platform is known without it.
      by_units: whether images depend on how many units the levels of a target have, such as the cores of a device; else
        they are shared among targets that differ in these alone.
      literals: tables of literals are constants of its images; else they are further operands.
      fills: its calls fill results with poison, as the attribute `poison` says (`lowering.starts.poison_bytes`); else
        these are further operands, which share the memory of the results.
      fuses_slices: XLA's compiler for it fuses slices with custom calls, and forgets aliases of operands on the way.
      block_level: some of its targets run the ops of the block level.
      predicted_us: a rough time of a kernel on the machine at hand, in microseconds, where the platform has a model of
        it; elsewhere `jtile.tune` goes by the rates of the target.
      located: the texts of a kernel on a target by level, and the place in the source of each line of the first, where
        `jt.view` cannot tell them by itself.
      peers: calls of kernels that talk to other devices have the attributes `groups` (`jtile.primitive.devices.groups`)
        and `timeout` (milliseconds); those of the option `debug` are waited for, as an `io_call`.
      reach: why kernels on one device of JAX cannot access the memory of another one of this process; "" if they can.
      bundle: gives the module that says what the files of a bundle are, where kernels are handed over as bundles
        (`jt.export_bundle`).
      variables: names of the variables `JTILE_...` of the environment that its compilers read, beside those of options.
      status: "" where kernels run on machines of jtile's developers, or what has been checked instead.
    """

    name: str
    hosts: tuple[str, ...]
    call: str
    compile: Backend
    attributes: Callable[[Artifact, ir.Kernel, Mapping[str, Any]], dict[str, Any]]
    resolve: Callable[[str], Target]
    names: Callable[[], Sequence[str]]
    here: Callable[[], Target]
    owns: Callable[[Any], bool] = lambda device: False
    kind: Callable[[], str] | None = None
    is_here: Callable[[], bool] = lambda: False
    register: Callable[[], None] = lambda: None
    claims: Callable[[str], bool] = lambda arch: False
    features: Callable[[], Mapping[str, Features]] = dict
    tools: Callable[[], Sequence[Any]] = tuple
    by_units: bool = True
    io_call: str | None = None
    devices_call: str | None = None
    graph_call: str | None = None
    graph_devices_call: str | None = None
    exchange_calls: tuple[str, str] | None = None
    compile_graph: Callable[[Sequence[ir.Kernel], Target, Sequence[Options], Any], Artifact] | None = None
    graph_refusal: Callable[[ir.Kernel, Target], str | None] = lambda kernel, target: None
    literals: bool = False
    fills: bool = False
    fuses_slices: bool = False
    block_level: bool = False
    peers: bool = False
    reach: Callable[[Any, Any], str] = lambda device, other: ""
    predicted_us: Callable[[ir.Kernel], float] | None = None
    located: Callable[[ir.Kernel, Target], tuple[Mapping[str, str], list[ir.Loc]]] | None = None
    bundle: Callable[[], Any] | None = None
    variables: tuple[str, ...] = ()
    status: str = ""


_RECORDS = {
    "cpu": "jtile.lowering.cpu.platform:CPU",
    "cuda": "jtile.lowering.cuda.platform:CUDA",
    "rocm": "jtile.lowering.rocm.platform:ROCM",
    "ascend": "jtile.lowering.ascend.platform:ASCEND",
}
_added: dict[str, Platform] = {}


FOREVER = 1e9  # seconds: a longer time to wait counts as for ever, and clocks can still count this one


def milliseconds() -> np.int64:
    """How long a kernel waits for other devices, in milliseconds, as the handlers in ffi/csrc take it."""
    return np.int64(round(min(current().timeout, FOREVER) * 1000))


def register(platform: Platform) -> None:
    """Add a platform, or put it in the place of the one of its name, for this process."""
    _added[platform.name] = platform
    features_changed()


def unregister(name: str) -> None:
    """Take back what `register` did; KernelValueError where nothing of this name was registered."""
    if name not in _added:
        there = ", ".join(_added) or "none"
        raise KernelValueError(
            f"no platform {name!r} was registered in this process: expected one that `register` was given ({there})"
        )
    del _added[name]
    features_changed()


def features_changed() -> None:
    from .triton.features import features

    features.cache_clear()


def every() -> tuple[Platform, ...]:
    """All platforms: jtile's own, those of installed packages, and those that `register` was given."""
    found = {p.name: p for p in (*_own(), *(record for record, _ in _installed()))} | _added
    return tuple(found.values())


def package(name: str) -> tuple[str, ...]:
    """Name and version of the installed package that brings a platform: part of the keys of its artifacts, since a new
    version may compile otherwise. Empty for jtile's own, and for those that `register` was given."""
    found = {} if name in _added else {record.name: origin for record, origin in _installed()}
    return found.get(name, ())


@functools.cache
def _own() -> tuple[Platform, ...]:
    return tuple(_load(where) for where in _RECORDS.values())


def _load(where: str) -> Platform:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _installed() -> tuple[tuple[Platform, tuple[str, ...]], ...]:
    """The platforms of installed packages, found by their entry points, each with name and version of its package."""
    found = []
    for point in importlib.metadata.entry_points(group="jtile.platforms"):
        try:
            record = point.load()
        except Exception as e:  # the package may miss what it needs: kernels of other platforms must not fail for that
            warnings.warn(
                f"the platform {point.name} = {point.value} of an installed package cannot be loaded and is left out "
                f"({type(e).__name__}: {e}): repair or uninstall the package",
                stacklevel=2,
            )
            continue
        if not isinstance(record, Platform):
            raise KernelValueError(
                f"the entry point {point.name} = {point.value} of the group jtile.platforms gives {record!r}; expected "
                "a jtile.lowering.platforms.Platform"
            )
        found.append((record, (point.dist.name, point.dist.version) if point.dist else ()))
    return tuple(found)


def named(name: str) -> Platform:
    """The platform of a name; UnsupportedError where there is none."""
    for platform in every():
        if platform.name == name:
            return platform
    raise UnsupportedError(f"there is no platform {name!r}; there are {', '.join(p.name for p in every())}")


def hosts() -> tuple[str, ...]:
    """XLA's platforms that kernels can be lowered for."""
    return tuple(dict.fromkeys(host for p in every() for host in p.hosts))


def on(host: str, *, own: bool = False) -> Platform:
    """The platform of kernels that are lowered for a platform of XLA: the one that the option `arch` names, if its
    calls can be part of programs there; else the host's own.

    Args:
      own: the host's own platform comes first, as in exports, where `arch` is about the other platforms of the list.
    """
    able = [p for p in every() if host in p.hosts]
    asked = [p for p in able if asked_of(p.claims)]
    owners = [p for p in able if p.hosts[0] == host]
    return (owners or asked or able if own else asked or owners or able)[0]


def asked_of(claims: Callable[[str], bool]) -> str | None:
    """The first word of the option `arch` that a platform claims; None where it claims none."""
    words = (current().arch or "").split(",")
    return next((word for word in words if word and claims(word)), None)


def claiming(arch: str) -> Platform:
    """The platform that an architecture is one of; KernelValueError where there is none."""
    for platform in every():
        if platform.claims(arch):
            return platform
    raise KernelValueError(unknown_arch(arch))


def check_arch(option: str) -> str | None:
    """A sentence that says what is wrong with a value of the option `arch`; None where it is right."""
    wrong = [word for word in option.split(",") if not any(p.claims(word) for p in every())]
    return unknown_arch(option) if wrong else None


def variables() -> tuple[str, ...]:
    """Names of environment variables that platforms read themselves: those of jtile's platforms and of the ones that
    this process registered. Plug-ins are left out, since they are loaded later than options are."""
    return tuple(name for p in (*_own(), *_added.values()) for name in p.variables)


def slug(name: str) -> str:
    """A device's name as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def unknown_arch(option: str) -> str:
    known = [(p, name.partition(":")[2]) for p in every() for name in p.names()]
    listed = ", ".join(dict.fromkeys(arch for p, arch in known if arch and p.claims(arch)))
    return (
        f"option arch={option!r}: expected an architecture, such as 'sm_90' or 'gfx942', or one for each platform of "
        f"an export: 'sm_90,gfx942'; jtile knows {listed}"
    )
