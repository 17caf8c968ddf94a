"""CPU code = interpreter on random kernels: the values, and which elements are read and written."""

from __future__ import annotations

from access_checks import check_outputs, spoiled_inputs
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from native import run_native
from random_kernels import Case, kernels

from jtile.ir import Kernel
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.passes import TILE, run_pipeline

HOST = host_isa()
RUNNABLE = {"host": HOST} | {
    name: isa for name, isa in ISAS.items() if isa.arch == HOST.arch and set(isa.features) <= set(HOST.features)
}


def check(case: Case, kernel: Kernel, isa) -> None:
    inputs, accesses, want = spoiled_inputs(case)
    check_outputs(case, inputs, accesses, run_native(kernel, inputs, isa), want)


@draws(150, quick=36)
@given(kernels())
def test_optimised_kernels(case: Case):
    check(case, run_pipeline(case.kernel, TILE), HOST)


@draws(100, quick=24)
@given(kernels(), st.sampled_from(list(RUNNABLE)))
def test_kernels_as_they_are_on_every_instruction_set(case: Case, isa: str):
    check(case, case.kernel, RUNNABLE[isa])
