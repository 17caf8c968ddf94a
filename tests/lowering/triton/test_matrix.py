"""Op by dtype matrix: the emitted TTIR, evaluated, against the interpreter; and on a GPU where there is one."""

from __future__ import annotations

import op_matrix
import pytest
from device import run_device
from ttir import run_ttir

from jtile.passes import TILE, run_pipeline

RUNNERS = [pytest.param(run_ttir, id="ttir"), pytest.param(run_device, id="device", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("name", op_matrix.CASES)
def test_matrix(name, run):
    op_matrix.check(op_matrix.CASES[name](), lambda kernel, inputs: run(run_pipeline(kernel, TILE), inputs))
