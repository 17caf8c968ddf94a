"""A sharding rule given by hand, `@jt.kernel(sharding="m k, k n -> m n")`, where index maps do not show one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtile._errors import KernelTypeError, KernelValueError, Place

GATHERED = "_"
Names = tuple[tuple[str | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A parsed rule: the name of each dimension of each array; None where it is written `_`."""

    text: str
    inputs: Names
    outputs: Names

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Hand:
    """A rule given by hand, for one program.

    Attributes:
      inputs, outputs: names of the dimensions of its Refs, without those of vmap.
      shard: the program of one of `parts[name]` shards along each name: the kernel resolved anew for smaller arrays.
    """

    inputs: Names
    outputs: Names
    shard: Callable[[Mapping[str, int]], Any] = dataclasses.field(compare=False)


def parse(text: Any, kernel: str, where: Place) -> Pattern:
    """Read `"m k, k n -> m n"`.

    Arrays are separated by commas, dimensions by spaces; `_` is a dimension that is never cut. A name that an output
    lacks is summed over, as in einsum.

    Raises:
      KernelTypeError: no text. KernelValueError: text that is no rule.
    """
    if not isinstance(text, str):
        raise KernelTypeError(
            f"sharding of kernel {kernel} is {text!r}: give text, such as sharding='m k, k n -> m n'", where
        )
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise _wrong(kernel, text, "it needs one '->' between inputs and outputs", where)
    inputs, outputs = _arrays(left, kernel, text, where), _arrays(right, kernel, text, where)
    known = {n for dims in inputs for n in dims if n}
    for name in (n for dims in outputs for n in dims if n):
        if name not in known:
            raise _wrong(
                kernel,
                text,
                f"axis {name!r} of an output is an axis of no input; write _ for one that is not cut",
                where,
            )
    return Pattern(text, inputs, outputs)


def _arrays(text: str, kernel: str, rule: str, where: Place) -> Names:
    if not text.strip():
        return ()
    out = []
    for part in text.split(","):
        names = part.replace("()", " ").split()
        for name in names:
            if name != GATHERED and not (name.isidentifier() and name.isascii() and name[0].isalpha()):
                raise _wrong(kernel, rule, f"{name!r} is no name of an axis: letters, digits and _, or _ alone", where)
        named = [n for n in names if n != GATHERED]
        if len(set(named)) < len(named):
            raise _wrong(kernel, rule, f"an array has one axis twice in {part.strip()!r}", where)
        out.append(tuple(None if n == GATHERED else n for n in names))
    return tuple(out)


def check_ranks(pattern: Pattern, kernel: str, arrays: Sequence[Any], n_in: int, names: Sequence[str], where: Place):
    """Raise KernelValueError unless the rule fits the arrays (inputs, then outputs) of a call.

    Args:
      arrays: what has a shape, in the order of the Refs.
      names: the names of the Refs, for messages.
    """
    for what, rule, given in (
        ("inputs", pattern.inputs, arrays[:n_in]),
        ("outputs", pattern.outputs, arrays[n_in:]),
    ):
        if len(rule) != len(given):
            raise _wrong(kernel, pattern.text, f"it names {len(rule)} {what}, this call has {len(given)}", where)
    for dims, x, name in zip((*pattern.inputs, *pattern.outputs), arrays, names):
        if len(dims) != len(x.shape):
            got = " ".join(n or GATHERED for n in dims)
            text = f"it gives {name} the axes '{got}', but {name} has {len(x.shape)}: shape {tuple(x.shape)}"
            raise _wrong(kernel, pattern.text, text, where)


def _wrong(kernel: str, text: str, why: str, where: Place) -> KernelValueError:
    return KernelValueError(f"sharding={text!r} of kernel {kernel}: {why}", where)
