"""Operands of kernels that belong together, by name: a kernel's body takes these structures with a Ref for every array.

What is absent is None. The structures are pytrees, so that calls, `vmap` and derivatives see plain arrays. Outside of a
kernel's body they hold arrays, `Weight[jax.Array]`; inside, they hold Refs, `Weight[Ref]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Shaped(Protocol):
    """What arrays, their types and Refs have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class Weight[T: Shaped](NamedTuple):
    """The right matrix of a product, [out, in], quantised or not.

    Attributes:
      codes: the numbers as they are stored; quantised ones as in `QuantizedTensor`.
      scale: what codes are multiplied with, or None for plain numbers.
      minimum: what is added, or None for kinds without.
    """

    codes: T
    scale: T | None = None
    minimum: T | None = None

    @property
    def of_blocks(self) -> tuple[T, ...]:
        """The arrays that have a number for each group of weights: scales, and minima."""
        return tuple(x for x in self[1:] if x is not None)

    def scaled_last(self, kind: str) -> bool:
        """Whether a row has one scale, with which sums are multiplied."""
        return kind == "int8" or (kind == "fp8" and self.scale.shape[-1] == 1)

    def shared_by(self, blocks: int) -> int:
        """How many of the `blocks` blocks of 32 of a row share a scale."""
        return max(blocks // self.scale.shape[-1], 1)


class Epilogue[T: Shaped](NamedTuple):
    """What is added to a product: `activation(product + bias) + residual`.

    Attributes:
      bias: one number a column, or None.
      residual: like the result, or None.
    """

    bias: T | None = None
    residual: T | None = None


NO_EPILOGUE = Epilogue()


class Norm[T: Shaped](NamedTuple):
    """An RMS norm in front of a product, whose rows are those of `norm(x + residual)`.

    Attributes:
      weight: float [in].
      residual: like x, or None.
    """

    weight: T
    residual: T | None = None
