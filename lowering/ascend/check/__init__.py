"""A checker of compiled Ascend kernels: `module.hivm.opt.mlir` run without data on a machine of pipes, flags and
addresses.

It is for the vendor's compiler what `jtile.interpret` is for kernels of roles: it finds buffers that do not fit or
overlap while both live, accesses of two pipes that nothing orders, flags that are set twice or never waited for, and
waits that never end. It has no hardware to compare with: what it knows are the rules of pipes and flags.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jtile._errors import DeadlockError, JtileError, ProtocolError, SharedRaceError, VerificationError

from .machine import Core, Machine
from .memory import extents
from .read import Function, Module, read
from .regions import LOCAL
from .run import Run

_ALIGN = {"ub": 32, "cbuf": 32, "ca": 512, "cb": 512, "cc": 512}
_SIZES = {"ub": "UB_SIZE", "cbuf": "L1_SIZE", "ca": "L0A_SIZE", "cb": "L0B_SIZE", "cc": "L0C_SIZE"}
_ERRORS = {"memory": VerificationError, "overlap": VerificationError, "race": SharedRaceError,
           "flag": ProtocolError, "deadlock": DeadlockError}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
      errors: one typed error for each defect, with the ops and their lines.
      functions: the functions that ran.
      used: bytes of each memory that buffers reach up to: {"UB": 8192, ...}.
    """

    errors: tuple[JtileError, ...]
    functions: tuple[str, ...]
    used: dict[str, int]


def check(
    text: str,
    *,
    capacities: dict[str, int] | None = None,
    grid: Sequence[int] = (4, 1, 1),
    blocks: Sequence[int] | None = None,
    aliases: dict[int, int] | None = None,
) -> Report:
    """Run a compiled module and say what is wrong with it.

    Args:
      text: the text of `module.hivm.opt.mlir`.
      capacities: bytes of "UB", "L1", "L0A", "L0B", "L0C"; None: the sizes that the text itself says.
      grid: programs along three axes.
      blocks: which programs to run, by number; None: the first and the last.
      aliases: arguments that share a buffer: number of the one -> number of the other, in the function's signature.

    Raises:
      ParseError: the text is not HIVM text.
      UnsupportedError: it has an op or library function that the checker does not know.
    """
    module = read(text)
    sizes = capacities or declared(module)
    x, y, z = (*grid, 1, 1, 1)[:3]
    found: dict[str, str] = {}
    used: dict[str, int] = {}
    entries = [f for f in module.functions.values() if _on_device(f)]
    for entry in _together(entries):
        for block in blocks if blocks is not None else sorted({0, x * y * z - 1}):
            for unknown in (2, 3):
                if not _run(module, entry, block, (x, y, z), unknown, aliases or {}, sizes, found, used):
                    break  # no branch depends on data, so that another guess would run the same events
    errors = tuple(_ERRORS[kind](message) for message, kind in found.items())
    return Report(errors, tuple(f.name for f in entries), used)


def verify(text: str, **options: Any) -> Report:
    """Check a compiled module as `check` does, and raise the first error."""
    report = check(text, **options)
    if report.errors:
        raise report.errors[0]
    return report


def declared(module: Module) -> dict[str, int]:
    """The capacities that a module's target says, in bytes."""
    found = {k: re.search(rf'"{name}", (\d+)', module.attributes) for k, name in _SIZES.items()}
    return {LOCAL[k]: int(m[1]) // 8 for k, m in found.items() if m}


def _on_device(f: Function) -> bool:
    return "hacc.entry" in f.attributes and "function_kind<HOST>" not in f.attributes


def _kind(f: Function) -> str:
    return "aic" if "core_type<AIC>" in f.attributes else "aiv"


def _together(entries: list[Function]) -> list[list[Function]]:
    """Functions that run at the same time: the halves of a kernel on both kinds of cores."""
    stems: dict[str, list[Function]] = {}
    for f in entries:
        stems.setdefault(re.sub(r"_mix_ai[cv]$", "", f.name), []).append(f)
    return list(stems.values())


def _run(
    module: Module, entry: list[Function], block: int, grid: tuple[int, int, int], unknown: int,
    aliases: dict[int, int], sizes: dict[str, int], found: dict[str, str], used: dict[str, int],
) -> bool:  # fmt: skip
    """Run the cores of one program; `found`: message -> kind. Returns whether a branch depended on data."""
    runs, cores = [], []
    for f in entry:
        halves = range(2) if _kind(f) == "aiv" and len(entry) > 1 else range(1)
        for half in halves:
            names = [a for a, _ in f.args]
            bases = {names[k]: names[v] for k, v in aliases.items()}
            run = Run(module, f, block=block, sub_block=half, grid=grid, unknown=unknown, bases=bases)
            name = "the cube core" if _kind(f) == "aic" else f"vector core {half}" if len(entry) > 1 else "the core"
            cores.append(Core(len(cores), name, _kind(f), run.events()))
            runs.append(run)

    mine: dict[str, str] = {}

    def report(kind: str, message: str) -> None:
        mine.setdefault(message, kind)

    Machine(cores, report).run()
    guessed = any(run.guessed for run in runs)
    if not (guessed and len(cores) > 1):  # several cores would each meet other data
        found |= {message: kind for message, kind in mine.items() if message not in found}
    for run in runs:
        for region, first, end in extents(list(run.buffers.values())):
            _place(region, first, end, sizes, found, used)
    return guessed


def _place(region: Any, first: int, end: int, sizes: dict[str, int], found: dict[str, str], used: dict[str, int]):
    if region.space not in LOCAL:
        return
    name = LOCAL[region.space]
    used[name] = max(used.get(name, 0), end)
    buffer = f"line {region.base}: the buffer of {end - first} bytes at byte {first} of {name}"
    if name in sizes and end > sizes[name]:
        found[f"{buffer} ends behind its {sizes[name]} bytes: take smaller tiles"] = "memory"
    if first % _ALIGN[region.space]:
        found[f"{buffer} does not begin at a multiple of {_ALIGN[region.space]} bytes"] = "memory"
