"""Elements that programs hand over one by one, in a world of devices: each is there or is not, and says what the calls
of its device had done before the call at hand, but nothing of what the program that posted it did in this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jtile._errors import ProtocolError
from jtile.ir import Post, Receive

from .turns import Standing

if TYPE_CHECKING:
    from .world import Part


def post(part: Part, op: Post) -> None:
    """Hand over elements, and what the device knew when its call began."""
    m = part.machine
    held, lanes = m.lanes(op)
    at, name = lanes.elements, op.ref.name or "memory"
    part.world.in_time(part, op, held.at, f"it posts to {name} of {part.world.device_text(held.at)}")
    if part.world.check and held.defined[at].any():
        element = held.unravel(int(at[np.argmax(held.defined[at])]))
        why = f"it posts element {element} a second time in this call, and someone may have received it"
        raise m.error(ProtocolError, op, why, op.ref)
    m.touch(op, held, lanes, "write")
    held.data[at] = m.env[op.value].reshape(-1)[lanes.active]
    held.defined[at] = True
    held.by = np.zeros(held.data.shape, np.int32) if held.by is None else held.by
    held.by[at] = part.rank
    held.known[part.rank] = part.begun


def receive(part: Part, op: Receive) -> Standing:
    """What stands until all elements are there."""
    held, lanes = part.machine.lanes(op)
    at = lanes.elements

    def what() -> str:
        missing = held.unravel(int(at[np.argmin(held.defined[at])]))
        return f"element {missing} of {op.ref.name or 'what is posted'} to be posted"

    return Standing(op, what, lambda: bool(held.defined[at].all()))


def received(part: Part, op: Receive) -> np.ndarray:
    """The elements, behind which the calls before those of who posted them are over."""
    held, lanes = part.machine.lanes(op)
    for rank in np.unique(held.by[lanes.elements]) if held.by is not None else ():
        part.learn(held.known[int(rank)])
    out = np.zeros(lanes.active.shape, held.data.dtype)
    out[lanes.active] = held.data[lanes.elements]
    return out.reshape(lanes.shape)
