"""From tile level to block level, and passes on kernels at block level.

`block_level` is the way from a tile-level kernel, unchanged, to roles that work at the same time on Hopper: a plan, a
grid of blocks that take tiles, a producer and consumers, products that overlap with the rest. Each step is a function
of one file, and each may refuse, with a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jtile._collector import paused
from jtile._config import current
from jtile._memo import Recent
from jtile.ir import Kernel, print_kernel, verify
from jtile.ir.protocol import check_loaded
from jtile.passes.bounds import bounds
from jtile.passes.canonicalise import canonicalise
from jtile.passes.cse import cse
from jtile.passes.dce import dce
from jtile.passes.hoist import small

from .ahead import ahead
from .decide import Wish, check, plan
from .early import early
from .feeds import sink
from .join import join
from .masks import masks
from .overlap import run as overlapped
from .pairs import pairs
from .persist import persist
from .plan import Machine, NoPlan, Plan, Refusal
from .prefetch import prefetch
from .scales import scales
from .specialise import specialise
from .widen import widen

__all__ = ["Machine", "NoPlan", "Plan", "block_level", "steps"]

SMALL = 256  # elements of a tile that a block keeps for all its tiles: a register of a thread or two
LAST = "clean"  # the step whose kernel is always verified
_made: Recent[Any, Any] = Recent(8)
Step = tuple[str, str, Kernel]  # name, level ("tile" or "block"), the kernel after it


@dataclasses.dataclass(frozen=True)
class Planned:
    """A block-level kernel, its plan, and the kernel after each step."""

    kernel: Kernel
    plan: Plan
    steps: tuple[Step, ...]


def block_level(kernel: Kernel, machine: Machine, options: Mapping[str, Any]) -> Kernel | NoPlan:
    """A tile-level kernel, after the passes of that level, as a block-level kernel, or why it stays where it is.

    Args:
      options: for the compiler: `consumers` (warpgroups that compute), `num_stages` (slots of rings), `persistent`
        (blocks that take several tiles each), `specialize` (False: never; True: also tf32 products, and with wider
        tiles, see `widen`); None or absent leaves it to the plan.
    """
    planned = steps(kernel, machine, options)
    return planned if isinstance(planned, NoPlan) else planned.kernel


def steps(kernel: Kernel, machine: Machine, options: Mapping[str, Any]) -> Planned | NoPlan:
    """The kernel that `block_level` gives, with its plan and the kernel after each step. The last result is kept: a
    search for tiles asks for the kernel that is compiled next."""
    text = print_kernel(kernel, locations=True)
    key = text, machine, Wish.of(options), current().verify
    found = _made.get(key)
    return _made.put(key, _steps(kernel, machine, options)) if found is None else found


@paused()
def _steps(kernel: Kernel, machine: Machine, options: Mapping[str, Any]) -> Planned | NoPlan:
    """Verified behind the last step. Where a step or that fails, with the option `verify`, they are taken once more and
    verified one by one: the first one that breaks a rule is to blame."""
    try:
        return _taken(kernel, machine, options, each=False)
    except Exception:
        if not current().verify:
            raise
    return _taken(kernel, machine, options, each=True)


def _taken(kernel: Kernel, machine: Machine, options: Mapping[str, Any], each: bool) -> Planned | NoPlan:
    done: list[Step] = []

    def step(name: str, level: str, run: Callable[[Kernel], Kernel]) -> Kernel:
        after = run(done[-1][2] if done else kernel)
        if each or name == LAST:
            verify(after, level)
        if name == LAST:
            check_loaded(after)
        done.append((name, level, after))
        return after

    try:
        wish = Wish.of(options)
        check(kernel, wish)
        if wish.specialize:  # only where asked for: whether wider tiles pay for every kernel has not been measured
            step("widen", "tile", widen.run)
        step("scales", "tile", lambda k: dce.run(scales.run(k)))
        chosen = plan(step("masks", "tile", lambda k: sink(masks.run(k))), machine, wish)
        step("persist", "tile", lambda k: small(cse.run(persist(k, chosen.blocks, machine.cache, chosen.mixed)), SMALL))
        step("specialise", "block", lambda k: dce.run(cse.run(specialise(k, chosen))))
        step("join", "block", lambda k: dce.run(join.run(k)))
        step("pairs", "block", pairs.run)
        step("prefetch", "block", prefetch.run)
        step("early", "block", early.run)
        step("overlap", "block", lambda k: overlapped(k, turns=chosen.turns))
        step("ahead", "block", ahead.run)
        final = step(LAST, "block", lambda k: dce.run(cse.run(canonicalise.run(bounds.run(k)))))
    except Refusal as e:
        return e.no_plan
    return Planned(final, chosen, tuple(done))
