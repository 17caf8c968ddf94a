"""The kernels of docs/ir.md are kernels, in the printer's own spelling, and compute what they say."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jtile.interpret import interpret
from jtile.ir import parse_kernel, print_kernel, stage_grammar, verify

DOCS = (Path(__file__).parents[2] / "docs" / "ir.md").read_text()
KERNELS = {"block" if "roles {" in k else "tile": k for k in re.findall(r"```\n(kernel .*?)```", DOCS, re.DOTALL)}


@pytest.mark.parametrize("level", ["tile", "block"])
def test_kernels_of_the_docs(level):
    k = parse_kernel(KERNELS[level])
    assert print_kernel(k) == KERNELS[level]
    verify(k, level)
    a, b = (
        np.random.default_rng(i).standard_normal(s).astype(ml_dtypes.bfloat16)
        for i, s in enumerate([(512, 256), (256, 512)])
    )
    (o,) = interpret(k, [a, b])
    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(o.astype(np.float32), want, rtol=1e-2, atol=1e-2)


def test_every_op_is_named():
    grammar = stage_grammar()
    missing = [op for op in (*grammar["tile"], *grammar["block"]) if f"`{op}`" not in DOCS and op != "map"]
    assert not missing
