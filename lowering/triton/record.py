"""What the launcher needs besides the image: the launch record, JSON text that `ffi/csrc` reads.

A record is an object with
  name      of the kernel, for messages
  symbol    of the function in the image
  arch      what the image was compiled for: "sm_90", "gfx942"
  threads   of a block
  shared    bytes of dynamic shared memory
  cluster   blocks of a cluster along x: 1, or how many run a program together
  grid      how many programs: an expression; `grid * cluster` blocks are launched
  params    the function's parameters in order, each one of
            {"kind": "buffer", "buffer": k}          the address of array k: operands, then results
            {"kind": "tensormap", "buffer": k, "dtype": CUtensorMapDataType, "dims": [expressions, innermost first],
             "strides": [bytes, expressions, without the innermost], "box": [innermost first], "swizzle": 0..3,
             "fill": "zero" | "nan"}                 a CUtensorMap by value; "device": rank, "offset": bytes
                                                     instead of "buffer": of the block of a device (-1: its own)
            {"kind": "i32" | "i64", "value": expression}
            {"kind": "counters", "count": n}         the address of n int32 of the launcher, one such parameter at most:
                                                     zeros, which every launch leaves as zeros
            {"kind": "devices"}                      the address of this device's block, see `emit_devices.py`
            {"kind": "null"}                         a null pointer
  zeroed    arrays whose bytes the launcher sets to zero before the launch: [k, ...]
  sites     null, or {"buffer": k, "bytes": n, "grid": [expressions], "list": [...]}: see `emit_debug.py`
  devices   where the kernel talks to other devices: {"axes": [[name, size], ...], "signals": [[name, shape], ...],
            "table": bytes in front of it in the block, "counters": likewise, "memory": likewise, "bytes": of the block,
            "waits": whether programs wait for each other, "grid": [sides], "list": [sites that reports name]}
  dims      four numbers for each dynamic dimension of an operand: operand, axis, symbol, multiple
  attributes  of the launch: {"programmatic": true, "cooperative": true, ...}; "node": it is one of the command buffer
            itself, so that what stands behind it may start early

An expression is a number, or a list in postfix order: numbers, "s0" for the value of symbol 0, and the operators
"add" "sub" "mul" "floordiv" "cdiv" "mod" "max" "min".
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jtile import ir
from jtile._config import current

from .features import Features

Expression = int | list[int | str]


@dataclasses.dataclass
class Record:
    """A launch record under construction; `extra` are results that the call gets besides the kernel's outputs.

    Attributes:
      params, grid, zeroed, sites, devices, dims, attributes: see the module.
      extra: bytes of each further result (an expression): workspace, sites.
      evict: position of a parameter, a tensor map -> how soon the cache forgets what its copies read; see `ptx.py`.
      columns: columns of an instruction for products, as triton writes it -> those that it is to have; see `ptx.py`.
    """

    params: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    grid: Expression = 1
    extra: list[Expression] = dataclasses.field(default_factory=list)
    zeroed: list[int] = dataclasses.field(default_factory=list)
    sites: dict[str, Any] | None = None
    devices: dict[str, Any] | None = None
    dims: list[int] = dataclasses.field(default_factory=list)
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    evict: dict[int, str] = dataclasses.field(default_factory=dict)
    columns: dict[int, int] = dataclasses.field(default_factory=dict)

    def finish(self, name: str, symbol: str, f: Features, built: Any) -> str:
        """The record as JSON text, with what compiling decided (a `stages.Built`)."""
        maps = [p for p in self.params if p["kind"] == "tensormap"]
        for p, d in zip(maps, built.descriptors, strict=True):
            p |= {"box": [*reversed(d["block_size"])], "swizzle": d["swizzle"], "dtype": _MAP_DTYPE.get(
                d["elem_type"], d["elem_type"])}  # fmt: skip
        fields = {k: getattr(self, k) for k in ("params", "grid", "zeroed", "sites", "dims", "attributes")}
        fields |= {"devices": self.devices} if self.devices else {}
        fields |= {"name": name, "symbol": symbol, "arch": f.arch, "threads": built.threads, "shared": built.shared,
                   "cluster": max(built.choice.num_ctas, built.choice.blocks)}  # fmt: skip
        fields["attributes"] |= {"programmatic": True} if built.waits else {}
        if built.waits and built.choice.blocks > 1:  # it says itself how large its clusters are, see `clusters.met`
            assert isinstance(self.grid, int)
            fields |= {"grid": built.choice.blocks * self.grid, "cluster": built.choice.num_ctas}
        fields["attributes"] |= {"node": True} if f.dependents and current().overlap else {}
        # Every kernel of triton ends in two pointers: scratch of its own, which jtile's kernels do not use.
        fields["params"] = [*self.params, {"kind": "null"}, {"kind": "null"}]
        return json.dumps(fields, sort_keys=True)


# CUtensorMapDataType where triton's number is another: it swaps f32, bf16 and f64.
_MAP_DTYPE = {8: 10, 9: 8, 10: 9}


def expression(n: ir.Size, symbols: dict[str, int]) -> Expression:
    """A size as an expression; `symbols`: the number of each symbol."""
    return n if isinstance(n, int) else _postfix(n, symbols)


def _postfix(n: Any, symbols: dict[str, int]) -> list[int | str]:
    if isinstance(n, int):
        return [n]
    out: list[int | str] = []
    for k, (atoms, factor) in enumerate(n.terms):
        out += [factor]
        for a in atoms:
            if isinstance(a, str):
                out += [f"s{symbols[a]}", "mul"]
            else:
                out += [*_postfix(a.args[0], symbols), *_postfix(a.args[1], symbols), a.fn, "mul"]
        out += ["add"] if k else []
    return out or [0]
