"""What `jax.export` asks for before it takes a program that calls kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.export import DisabledSafetyCheck


def export_checks() -> list[DisabledSafetyCheck]:
    """The safety checks to disable, for `jax.export.export(f, disabled_checks=jt.export_checks())`.

    `jax.export` refuses every custom call that it does not know, since what a call means may change until the exported
    program is loaded. A call of jtile's carries its compiled kernel with it, so that it means the same in every process
    that has imported a jtile which reads that format.

    Returns:
      The checks, as a list.
    """
    from jax.export import DisabledSafetyCheck

    from jtile.lowering import platforms

    own = lambda p: (p.call, p.io_call, p.devices_call, p.graph_call, p.graph_devices_call)
    calls = [call for p in platforms.every() for call in own(p) if call]
    return [DisabledSafetyCheck.custom_call(call) for call in dict.fromkeys(calls)]  # a call may have two uses
