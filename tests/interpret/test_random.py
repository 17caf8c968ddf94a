"""Random kernels are legal: they verify, print and parse, and run in every order to one result."""

from __future__ import annotations

import numpy as np
from draws import draws
from hypothesis import given
from random_kernels import Case, kernels

from jtile.interpret import interpret
from jtile.ir import parse_kernel, print_kernel, verify


@draws(120, quick=30)
@given(kernels())
def test_random_kernels_are_legal(case: Case):
    verify(case.kernel)
    text = print_kernel(case.kernel)
    again = parse_kernel(text)
    assert print_kernel(again) == text
    first, accesses = interpret(case.kernel, case.inputs, trace_accesses=True)
    for out, ref in zip(first, case.kernel.outputs):
        assert (out.shape, out.dtype.name) == (ref.shape, ref.dtype)
    # Programs run in any order, so nothing but the last bits of a float sum may depend on it; here sums are exact.
    second, others = interpret(again, case.inputs, seed=1, trace_accesses=True)
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
    for a, b in zip((*accesses.read, *accesses.written), (*others.read, *others.written)):
        np.testing.assert_array_equal(a, b)
