"""Every pass keeps what random kernels compute, read and write."""

from __future__ import annotations

import numpy as np
import pytest
from draws import draws
from hypothesis import given
from random_kernels import Case, kernels

from jtile.interpret import interpret
from jtile.ir import Kernel, print_kernel, verify
from jtile.passes import TILE, bounds, canonicalise, cse, dce, hoist, ref_forwarding, run_pipeline


def check(case: Case, after: Kernel) -> None:
    verify(after)
    want, before = interpret(case.kernel, case.inputs, trace_accesses=True)
    got, later = interpret(after, case.inputs, trace_accesses=True)
    for v, a, b, error in zip(case.kernel.outputs, got, want, case.errors):
        a, b = a.astype(np.float64), b.astype(np.float64)
        equal = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= error)
        assert equal.all(), f"{v!r} differs at {np.argwhere(~equal)[0].tolist()}"
    for k, v in enumerate(case.kernel.params):
        if v.type.role == "scratch":
            continue
        np.testing.assert_array_equal(later.written[k], before.written[k], err_msg=f"elements written of {v!r}")
        assert not (later.read[k] & ~before.read[k]).any(), f"elements of {v!r} are read that were not"


@pytest.mark.parametrize("step", [canonicalise, cse, dce, hoist, ref_forwarding, bounds], ids=lambda p: p.name)
def test_each_pass(step):
    @draws(60, quick=12)
    @given(kernels())
    def run(case: Case):
        text = print_kernel(case.kernel)
        check(case, step(case.kernel))
        assert print_kernel(case.kernel) == text, "a pass changed its argument"

    run()


@draws(150, quick=36)
@given(kernels())
def test_the_pipeline(case: Case):
    after = run_pipeline(case.kernel, TILE)
    check(case, after)
    # what the pipeline is done with has nothing left to do
    assert sum(1 for _ in run_pipeline(after, TILE).body.walk()) <= sum(1 for _ in after.body.walk())
