"""CPU code = interpreter on random kernels: the values, and which elements are read and written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_kernels import Case, kernels

from jtile.ffi import run_image
from jtile.interpret import Accesses, interpret, poison
from jtile.ir import Kernel
from jtile.ir.shapes import full_array
from jtile.ir.types import DTYPES
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.passes import TILE, run_pipeline

HOST = host_isa()
RUNNABLE = {"host": HOST} | {
    name: isa for name, isa in ISAS.items() if isa.arch == HOST.arch and set(isa.features) <= set(HOST.features)
}
SUPPRESS = list(HealthCheck)


def packed(x: np.ndarray) -> np.ndarray:
    """An array as it lies in memory: 4-bit elements two a byte, the first in the low half."""
    if DTYPES[x.dtype.name].bits != 4:
        return np.ascontiguousarray(x)
    nibbles = np.append(x.reshape(-1).view(np.uint8) & 15, np.zeros(x.size % 2, np.uint8))
    return nibbles[0::2] | (nibbles[1::2] << 4)


def unpacked(raw: np.ndarray, like: np.ndarray) -> np.ndarray:
    if DTYPES[like.dtype.name].bits != 4:
        return raw
    nibbles = np.stack([raw & 15, raw >> 4], -1).reshape(-1)[: like.size]
    if like.dtype.name == "int4":
        nibbles = np.where(nibbles > 7, nibbles.astype(np.int8) - 16, nibbles.astype(np.int8))
    return nibbles.astype(like.dtype).reshape(like.shape)


def spoiled(x: np.ndarray, read: np.ndarray) -> np.ndarray:
    """The input with other numbers wherever the interpreter did not read."""
    d = DTYPES[x.dtype.name]
    other = ~x if d.kind == "b" else np.full(x.shape, np.nan).astype(x.dtype) if d.kind == "f" else x.copy()
    if d.kind in "iu":
        other = (x.astype(np.int64) ^ 5).astype(x.dtype) if d.bits < 64 else x ^ x.dtype.type(5)
    return np.where(read, x, other)


def run_native(kernel: Kernel, inputs: list[np.ndarray], isa) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the outputs held before and after the compiled kernel ran."""
    artifact = compile_kernel(kernel, isa)
    operands = [packed(x) for x in inputs]
    starts: list[np.ndarray] = []
    for k, v in enumerate(kernel.outputs):
        shared = [inputs[i] for i, o in kernel.aliases if o == k]
        init = kernel.inits[k] if kernel.inits else None
        start = poison(v.shape, v.dtype) if init is None else full_array(init, v.shape, v.dtype)
        starts.append(shared[0] if shared else start)
    results = [packed(x).copy() for x in starts]
    for i, o in kernel.aliases:
        operands[i] = results[o]
    launch = artifact.launch
    options = {n: launch[n] for n in ("programs", "workspace", "isa", "sites", "name")}
    run_image(artifact.image, [*operands, *results], **options)
    return starts, [unpacked(r, s) for r, s in zip(results, starts)]


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
    starts, got = run_native(kernel, inputs, isa)
    for k, v in enumerate(case.kernel.outputs):
        written = accesses.written[position[v]]
        for i, o in case.kernel.aliases:
            written = written | (accesses.written[position[case.kernel.inputs[i]]] if o == k else False)
        raw = lambda x: x.reshape(-1).view(np.uint8)
        bytes_written = np.repeat(written.reshape(-1), got[k].dtype.itemsize)
        assert (raw(got[k])[~bytes_written] == raw(np.ascontiguousarray(starts[k]))[~bytes_written]).all(), (
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
