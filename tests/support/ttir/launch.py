"""What the launcher does with a record: arrays to memory, parameters, the grid, the extra results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from native import packed, starts, unpacked

from jtile.ir import Kernel, bind_sizes, concrete, is_dynamic
from jtile.lowering.triton.compile import emit_kernel
from jtile.lowering.triton.features import features
from jtile.lowering.triton.record import Record

from .check import check
from .machine import Machine
from .memory import Memory
from .padding import spoiled_padding
from .parse import Function, parse
from .types import TtirError, block_of

_OPERATORS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": lambda a, b: a // b,
    "cdiv": lambda a, b: -(-a // b), "mod": lambda a, b: a % b, "max": max, "min": min,
}  # fmt: skip


@dataclasses.dataclass
class Launch:
    """The outputs of a kernel, its extra results as bytes, and the text that ran."""

    outputs: list[np.ndarray]
    extra: list[np.ndarray]
    text: str
    record: Record
    printed: list[tuple]


def value_of(expression: Any, symbols: Sequence[int] = ()) -> int:
    """The number that an expression of a launch record says."""
    if isinstance(expression, int):
        return expression
    stack: list[int] = []
    for item in expression:
        if isinstance(item, int):
            stack.append(item)
        elif item in _OPERATORS:
            b, a = stack.pop(), stack.pop()
            stack.append(_OPERATORS[item](a, b))
        else:
            stack.append(symbols[int(item[1:])])
    (out,) = stack
    return out


def symbol_values(record: Record, inputs: Sequence[np.ndarray]) -> list[int]:
    """The symbols of dynamic sizes, from the shapes of operands; an error where they disagree."""
    found: dict[int, int] = {}
    dims = record.dims
    for operand, axis, symbol, multiple in zip(dims[0::4], dims[1::4], dims[2::4], dims[3::4], strict=True):
        size, rest = divmod(inputs[operand].shape[axis], multiple)
        if rest or found.setdefault(symbol, size) != size:
            raise TtirError(f"operand {operand}: axis {axis} of {inputs[operand].shape} does not fit the record")
    return [found[k] for k in range(len(found))]


@dataclasses.dataclass
class Buffers:
    """Arrays of one launch as they lie in memory: operands, results, extra results."""

    operands: list[np.ndarray]
    results: list[np.ndarray]
    extra: list[np.ndarray]
    before: list[np.ndarray]
    symbols: list[int]

    @property
    def all(self) -> list[np.ndarray]:
        return [*self.operands, *self.results, *self.extra]

    def outputs(self) -> list[np.ndarray]:
        return [unpacked(r, s).reshape(s.shape) for r, s in zip(self.results, self.before, strict=True)]


def buffers(kernel: Kernel, record: Record, inputs: Sequence[np.ndarray]) -> Buffers:
    """Operands packed, results poisoned or started, extra results full of 0xAA but for those that are zeroed."""
    symbols = symbol_values(record, inputs)
    static = concrete(kernel, bind_sizes(kernel, [x.shape for x in inputs])) if is_dynamic(kernel) else kernel
    before = starts(static, inputs)
    operands = [packed(x).copy() for x in inputs]
    results = [packed(x).copy() for x in before]
    for i, o in kernel.aliases:
        operands[i] = results[o]
    extra = [np.full(value_of(n, symbols), 0xAA, np.uint8) for n in record.extra]
    out = Buffers(operands, results, extra, before, symbols)
    for k in record.zeroed:
        out.all[k].reshape(-1).view(np.uint8)[:] = 0
    return out


@functools.lru_cache(256)
def read(text: str) -> dict[str, Function]:
    """The checked functions of a module."""
    functions = parse(text)
    check(functions)
    return functions


def evaluate(text: str, record: Record, kernel: Kernel, inputs: Sequence[np.ndarray], seed: int = 0) -> Launch:
    """Run the text of a kernel on arrays.

    Raises:
      TtirError: it does not type, or does what a GPU must not do.
    """
    functions = read(text)
    b = buffers(kernel, record, inputs)
    arrays, unique = b.all, {}
    for x in arrays:  # aliased operands and results are one buffer
        unique.setdefault(id(x), (len(unique), x))
    counters = np.zeros(sum(p.get("count", 0) for p in record.params), np.int32)
    memory = Memory([*(x for _, x in unique.values()), counters])
    base = [memory.base(unique[id(x)][0]) for x in arrays]
    (function,) = (f for f in functions.values() if re.search(rf"public @{re.escape(f.name)}\b", text))
    descriptors: list[Any] = []
    base.append(memory.base(len(unique)))
    args = [_argument(p, base, b.symbols, descriptors) for p in record.params]
    _check_params(function, record)
    machine = Machine(functions, memory, value_of(record.grid, b.symbols), descriptors, seed)
    machine.launch(function, args)
    memory.finish()
    if counters.any():
        raise TtirError(f"counters that are not at zero again: {np.flatnonzero(counters).tolist()}")
    return Launch(b.outputs(), b.extra, text, record, machine.printed)


def _argument(p: dict[str, Any], base: Sequence[int], symbols: Sequence[int], descriptors: list[Any]) -> int:
    if p["kind"] == "buffer":
        return base[p["buffer"]]
    if p["kind"] == "counters":
        return base[-1]
    if p["kind"] == "tensormap":
        dims = [value_of(d, symbols) for d in reversed(p["dims"])]
        strides = [value_of(d, symbols) for d in reversed(p["strides"])]
        if any(n % 16 for n in strides):
            raise TtirError(f"a tensor map with strides of {strides} bytes: they must be multiples of 16")
        descriptors.append((base[p["buffer"]] + p.get("offset", 0), dims, strides, p.get("fill", "zero")))
        return len(descriptors) - 1
    return value_of(p["value"], symbols) if p["kind"] != "null" else 0


def _check_params(function: Function, record: Record) -> None:
    """The record's parameters must be those that the function declares."""
    kinds = {"buffer": "!tt.ptr<", "tensormap": "!tt.tensordesc<", "i32": "i32", "i64": "i64", "null": "!tt.ptr<"}
    kinds |= {"counters": "!tt.ptr<i32", "devices": "!tt.ptr<i8"}
    if len(function.params) != len(record.params):
        raise TtirError(f"{len(record.params)} parameters in the record, {len(function.params)} of the function")
    for p, (name, t) in zip(record.params, function.params, strict=True):
        if not t.elem.startswith(kinds[p["kind"]]):
            raise TtirError(f"parameter {name}: {t}, but the record says {p}")
        if p["kind"] == "tensormap":
            box = block_of(t)
            if len(box.shape) != len(p["dims"]) or len(p["strides"]) != len(p["dims"]) - 1:
                raise TtirError(f"parameter {name}: {t}, but the record says {p}")


def run_ttir(kernel: Kernel, inputs: Sequence[np.ndarray], arch: str = "sm_90", seed: int = 0) -> list[np.ndarray]:
    """Emit a kernel (after the passes) for an architecture and evaluate the text; gives the outputs."""
    return launch_ttir(kernel, inputs, arch, seed).outputs


def launch_ttir(
    kernel: Kernel, inputs: Sequence[np.ndarray], arch: str = "sm_90", seed: int = 0, *, spoil: bool = True
) -> Launch:
    """As `run_ttir`, with the extra results; `spoil`: garbage in all lanes beyond tiles, see `padding`."""
    with spoiled_padding(seed) if spoil else contextlib.nullcontext():
        text, record = emit_kernel(kernel, features(arch))
    return evaluate(text, record, kernel, inputs, seed)
