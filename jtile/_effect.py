"""The effect of kernels that print or assert.

Exported programs name its class and this module, so `import jtile` makes it known, and it stays in this file.
"""

from __future__ import annotations

from jax.experimental import hijax
from jax.interpreters import mlir

from jtile._compat import Effect, allow_effect_everywhere


class KernelEffect(Effect):
    """The effect of a kernel that prints or asserts: its call may not be removed, nor merged with another."""

    def __str__(self) -> str:
        return "jtile_io"

    # jax.export writes an effect as the name of its class, and asks that a new one be equal.
    def __eq__(self, other: object) -> bool:
        return type(other) is KernelEffect

    def __hash__(self) -> int:
        return hash(KernelEffect)


KERNEL_EFFECT = KernelEffect()
hijax.control_flow_allowed_effects.add_type(KernelEffect)
mlir.lowerable_effects.add_type(KernelEffect)
allow_effect_everywhere(KernelEffect)
