"""What a back end may touch of a random kernel: unread inputs are spoiled, unwritten outputs must not change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from native import starts
from random_kernels import Case

from jtile.interpret import Accesses, interpret
from jtile.ir.types import DTYPES


def spoiled(x: np.ndarray, read: np.ndarray) -> np.ndarray:
    """The input with other numbers wherever the interpreter did not read."""
    d = DTYPES[x.dtype.name]
    other = ~x if d.kind == "b" else np.full(x.shape, np.nan).astype(x.dtype) if d.kind == "f" else x.copy()
    if d.kind in "iu":
        other = (x.astype(np.int64) ^ 5).astype(x.dtype) if d.bits < 64 else x ^ x.dtype.type(5)
    return np.where(read, x, other)


def spoiled_inputs(case: Case) -> tuple[list[np.ndarray], Accesses, list[np.ndarray]]:
    """Inputs for a back end, what the interpreter touched, and what it gave."""
    want, accesses = interpret(case.kernel, case.inputs, trace_accesses=True)
    assert isinstance(accesses, Accesses)
    position = {v: k for k, v in enumerate(case.kernel.params)}
    aliased = dict(case.kernel.aliases)
    inputs = []
    for k, (v, x) in enumerate(zip(case.kernel.inputs, case.inputs, strict=True)):
        read = accesses.read[position[v]]
        if k in aliased:
            read = read | accesses.read[position[case.kernel.outputs[aliased[k]]]]
        inputs.append(spoiled(x, read))
    return inputs, accesses, want


def check_outputs(
    case: Case,
    inputs: Sequence[np.ndarray],
    accesses: Accesses,
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
) -> None:
    """The outputs that a back end gave for `inputs` are the interpreter's; AssertionError says where they are not."""
    position = {v: k for k, v in enumerate(case.kernel.params)}
    before = starts(case.kernel, inputs)
    raw = lambda x: np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    for k, v in enumerate(case.kernel.outputs):
        written = accesses.written[position[v]]
        for i, o in case.kernel.aliases:
            written = written | (accesses.written[position[case.kernel.inputs[i]]] if o == k else False)
        untouched = ~np.repeat(written.reshape(-1), got[k].dtype.itemsize)
        assert (raw(got[k])[untouched] == raw(before[k])[untouched]).all(), f"{v!r}: unwritten elements changed"
        a, b = got[k][written], want[k][written]
        if case.errors[k] == 0:
            equal = (a == b) | ((a != a) & (b != b))
        else:
            equal = np.abs(a.astype(np.float64) - b.astype(np.float64)) <= case.errors[k]
        if not equal.all():
            i = int(np.argmin(equal))
            at = np.argwhere(written)[i].tolist()
            many = f"{(~equal).sum()} differ by more than {case.errors[k]}"
            raise AssertionError(f"{v!r}{at}: native {a[i]!r}, interpreter {b[i]!r}; {many}")
