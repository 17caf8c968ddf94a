"""CPU code = interpreter on random kernels: the values, and which elements are read and written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native import run_native, starts
from random_kernels import Case, kernels

from jtile.interpret import Accesses, interpret
from jtile.ir import Kernel
from jtile.ir.types import DTYPES
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.passes import TILE, run_pipeline

HOST = host_isa()
RUNNABLE = {"host": HOST} | {
    name: isa for name, isa in ISAS.items() if isa.arch == HOST.arch and set(isa.features) <= set(HOST.features)
}
SUPPRESS = list(HealthCheck)


def spoiled(x: np.ndarray, read: np.ndarray) -> np.ndarray:
    """The input with other numbers wherever the interpreter did not read."""
    d = DTYPES[x.dtype.name]
    other = ~x if d.kind == "b" else np.full(x.shape, np.nan).astype(x.dtype) if d.kind == "f" else x.copy()
    if d.kind in "iu":
        other = (x.astype(np.int64) ^ 5).astype(x.dtype) if d.bits < 64 else x ^ x.dtype.type(5)
    return np.where(read, x, other)


def check(case: Case, kernel: Kernel, isa) -> None:
    want, accesses = interpret(case.kernel, case.inputs, trace_accesses=True)
    assert isinstance(accesses, Accesses)
    position = {v: k for k, v in enumerate(case.kernel.params)}
    aliased = dict(case.kernel.aliases)
    inputs = []
    for k, (v, x) in enumerate(zip(case.kernel.inputs, case.inputs)):
        read = accesses.read[position[v]]
        if k in aliased:
            read = read | accesses.read[position[case.kernel.outputs[aliased[k]]]]
        inputs.append(spoiled(x, read))
    before, got = starts(kernel, inputs), run_native(kernel, inputs, isa)
    for k, v in enumerate(case.kernel.outputs):
        written = accesses.written[position[v]]
        for i, o in case.kernel.aliases:
            written = written | (accesses.written[position[case.kernel.inputs[i]]] if o == k else False)
        raw = lambda x: x.reshape(-1).view(np.uint8)
        bytes_written = np.repeat(written.reshape(-1), got[k].dtype.itemsize)
        assert (raw(got[k])[~bytes_written] == raw(np.ascontiguousarray(before[k]))[~bytes_written]).all(), (
            f"{v!r}: unwritten elements changed"
        )
        a, b = got[k][written], want[k][written]
        if case.errors[k] == 0:
            equal = (a == b) | ((a != a) & (b != b))
        else:
            equal = np.abs(a.astype(np.float64) - b.astype(np.float64)) <= case.errors[k]
        if not equal.all():
            i = int(np.argmin(equal))
            at = np.argwhere(written)[i].tolist()
            many = f"{(~equal).sum()} differ by more than {case.errors[k]}"
            pytest.fail(f"{v!r}{at}: native {a[i]!r}, interpreter {b[i]!r}; {many}")


@settings(max_examples=300, suppress_health_check=SUPPRESS)
@given(kernels())
def test_optimised_kernels(case: Case):
    check(case, run_pipeline(case.kernel, TILE), HOST)


@settings(max_examples=200, suppress_health_check=SUPPRESS)
@given(kernels(), st.sampled_from(list(RUNNABLE)))
def test_kernels_as_they_are_on_every_instruction_set(case: Case, isa: str):
    check(case, case.kernel, RUNNABLE[isa])
