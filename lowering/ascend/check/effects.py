"""What an op does to memory, and on which pipe.

Ops of HIVM say it by their `ins` and `outs`; the functions of the vendor's library that they become, by name and by the
order of their arguments: inputs, outputs, temporary buffers, numbers.
"""

from __future__ import annotations

import dataclasses
import re

from jtile._errors import UnsupportedError

from .read import Op, split

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")


@dataclasses.dataclass(frozen=True)
class Effect:
    """Values that are read and written on a pipe; `temps` are written for the op alone.

    `product`: the arguments of a matrix product in order: left, right, whether it starts from zero, three sizes, sum,
    and seven of the events that it waits for and sets.
    """

    pipe: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    temps: tuple[str, ...] = ()
    product: tuple[str, ...] = ()


# The beginning of a library function's name -> its pipe, and how many arguments stand before the output.
_LIBRARY = (
    (r"load_gm_to_(?:ubuf|ub|cbuf)", "MTE2", 1),
    (r"nd2nz", "MTE2", 1),
    (r"set_l1", "MTE2", 1),
    (r"store_(?:ubuf|ub)_to_gm", "MTE3", 1),
    (r"nz2nd", "MTE3", 1),
    (r"fixpipe", "FIX", 1),
    (r"v?arange", "V", 0),
    (r"copy_(?:ubuf|ub)_to_(?:ubuf|ub)", "V", 1),
    (r"(?:broadcast|brc|vbrc|transpose|vtranspose|(?:enablevc_)?reduce|vreduce|flip|vflip|pad|vpad)(?=_)", "V", 1),
    (r"(?:cumsum|cumprod|vcumsum|vcumprod)(?=_)", "V", 1),
    (r"v(?:abs|exp|ln|sqrt|rsqrt|rec|relu|tanh|sin|cos|erf|not|cast)(?=_)", "V", 1),
    (r"v(?:add|sub|mul|div|max|min|and|or|xor|shl|shr|mod|pow)s?(?=_)", "V", 2),
    (r"v?cmps?(?=_)", "V", 2),
    (r"v?gather(?=_)", "V", 2),
    (r"v(?:interleave|concat)(?=_)", "V", 2),
    (r"v?sel(?=_)", "V", 3),
)
_TABLE = [(re.compile(pattern), pipe, count) for pattern, pipe, count in _LIBRARY]

# Ops of HIVM, before they become calls -> their pipes; all others of this dialect that have outputs are vector ops.
_OPS = {"load": "MTE2", "nd2nz": "MTE2", "store": "MTE3", "nz2nd": "MTE3", "fixpipe": "FIX"}
_WITHOUT = ("set_mask_norm", "set_ffts_base_addr", "get_block_idx", "get_block_num", "get_sub_block_idx",
            "get_sub_block_num", "convert_layout", "pointer_cast", "set_flag", "wait_flag", "pipe_barrier",
            "sync_block_set", "sync_block_wait", "bitcast")  # fmt: skip


def effect(op: Op, callee: str = "", args: list[str] | None = None, kinds: list[str] | None = None) -> Effect | None:
    """What a call of the library, or an op of HIVM, does; None for one that touches no memory.

    Args:
      callee, args, kinds: the function that a call names, its arguments and their types.

    Raises:
      UnsupportedError: the checker does not know the function.
    """
    if args is not None:
        return _call(op, callee, args, kinds or [])
    name = op.name.removeprefix("hivm.hir.")
    if name in _WITHOUT or not op.name.startswith("hivm.hir."):
        return None
    ins, outs, temps = (_group(op.text, g) for g in ("ins", "outs", "temp_buffer"))
    if name == "mmadL1":
        events = _group(op.text, "sync_related_args") or ["-1"] * 7
        return Effect("M", product=(*ins[:6], outs[0], *events))
    if not outs:
        raise UnsupportedError(f"the checker of HIVM does not know the op of {op}")
    ins += _group(op.text, "indices")
    return Effect(_OPS.get(name, "V"), tuple(ins), tuple(outs), tuple(temps))


def _call(op: Op, callee: str, args: list[str], kinds: list[str]) -> Effect:
    if callee.startswith("mma_tile"):
        return Effect("M", product=tuple(args[:14]))
    for pattern, pipe, count in _TABLE:
        if pattern.match(callee):
            buffers = [a for a, k in zip(args, kinds, strict=True) if k.startswith("memref")]
            reads = [a for a in args[:count] if a in buffers]
            return Effect(pipe, tuple(reads), (args[count],), tuple(a for a in args[count + 1 :] if a in buffers))
    raise UnsupportedError(f"the checker of HIVM does not know the library function {callee!r} of {op}")


def _group(text: str, name: str) -> list[str]:
    """The values in `name(a, b : types)`."""
    found = re.search(rf"\b{name}\(([^:()]*)", text)
    return split(found[1]) if found else []
