"""How the steps of a group are laid out: along which axes its programs take all, and which they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .costs import has_room, once_is_quicker
from .gathers import JOINS
from .layout import Layout, Said, layout_of
from .steps import REDUCTIONS, Step, Value
from .units import Group
from .windows import window_layout


def settled_of(group: Group | None) -> Layout | None:
    """The layout of a group to which elementwise steps may come without another choice of what programs take whole."""
    if group is None or group.last or group.windowed:
        return None
    layout = group.layout
    return layout if not layout.whole or len(layout.sizes) - 1 in layout.whole else None


def laid_out(
    steps: Sequence[Step], read: list[Value], written: list[Value], said: Said
) -> tuple[Layout | None, list[Step]]:
    """The layout of a kernel's steps, and those that sum along axes which its programs share. Such sums are kept for
    what no program has room for, or does not have side by side in memory. said: by the steps."""
    ends = _ends(steps)
    scatters = [step for step in steps if step.name in JOINS] if said.tables else []
    if scatters:
        return _scattered(steps, read, written, ends, scatters, said)
    whole = layout_of(steps, [*read, *written], said=said)
    if whole is None or not all(map(whole.covers, written)) or not has_room(whole) or not once_is_quicker(whole, steps):
        whole = None
    if not ends or (whole is not None and (not whole.whole or len(whole.sizes) - 1 in whole.whole)):
        return whole, []
    shared = layout_of(steps, [*read, *written], last=set(ends.values()), said=said)
    if shared is None or not shared.late or not has_room(shared):
        return whole, []
    axes = {v: set(shared.axes[v]) for step in ends.values() for v in (*step.ins, *step.outs) if isinstance(v, Value)}
    last = [step for step in ends.values() if shared.late & axes[step.ins[0]] - axes[step.outs[0]]]  # type: ignore[index]
    if all(shared.covers(v, shared.late if ends.get(v) in last else frozenset()) for v in written):
        return shared, last
    return whole, []


def laid_out_by_windows(steps: Sequence[Step], written: list[Value]) -> tuple[Layout | None, list[Step]]:
    """The layout of a kernel's steps that read windows of arrays, and those that sum."""
    last = [*_ends(steps).values()]
    return window_layout(steps, written, last), last


def _ends(steps: Sequence[Step]) -> dict[Value, Step]:
    """By what they give, the steps that reduce, and whose results no other step reads."""
    reductions = [step for step in steps if step.name in REDUCTIONS]
    inner = {x for step in steps for x in step.ins} if reductions else ()
    return {step.outs[0]: step for step in reductions if step.outs[0] not in inner}


def _scattered(
    steps: Sequence[Step],
    read: list[Value],
    written: list[Value],
    ends: Mapping[Value, Step],
    scatters: Sequence[Step],
    said: Said,
) -> tuple[Layout | None, list[Step]]:
    """The layout of a group that scatters: its programs share all axes of the updates that none takes whole."""
    last = [*ends.values(), *scatters]
    shared = layout_of(steps, [*read, *written], last={*last}, said=said)
    if shared is None or not shared.late or not has_room(shared):
        return None, []
    every = set(range(len(shared.sizes)))
    if any(set(shared.axes[v]) | shared.whole != every for step in scatters if isinstance(v := step.ins[-1], Value)):
        return None, []
    tables = {step.outs[0] for step in scatters}
    covered = all(shared.covers(v, shared.late if v in ends else frozenset()) for v in written if v not in tables)
    return (shared, last) if covered else (None, [])
