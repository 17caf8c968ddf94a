"""Every op of the library under every transform, against its reference; docs/composition.json says the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import composition
import forked
import pytest
import zoo_cases
from library_cases import CASES

from jtile.testing import Report, check_kernel

pytestmark = pytest.mark.usefixtures("by_numpy")

SUPPORT = Path(composition.__file__).parent
# Values, dtypes and the interpreter have tests of their own for each op, in more shapes.
HERE = (
    "jvp", "vjp", "numeric", "checkpoint", "vmap", "grad of vmap", "vmap of grad", "second order", "export",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_transform(name, request):
    case = CASES[name]
    report = check_kernel(case.op, case.reference, case.args(), name=name, only=HERE, **case.options)
    composition.agree(request.config, "ops", list(CASES), report)


ZOO = [pytest.param(name, marks=pytest.mark.slow) if name in zoo_cases.LONG else name for name in zoo_cases.NEWER]


@pytest.mark.parametrize("name", ZOO)
def test_gradients_of_maps_of_the_zoo(name):
    """Rules that save anything but arrays get these wrong."""
    case = zoo_cases.CASES[name]
    check_kernel(case.op, case.reference, case.args(), name=name, only=("grad of vmap",), **case.options)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo_cases.CASES)
def test_every_transform_of_the_zoo(name):
    case = zoo_cases.CASES[name]
    check_kernel(case.op, case.reference, case.args(), name=name, **case.options)


@pytest.mark.long
def test_over_eight_devices(request, subprocess_env):
    env = subprocess_env | {"PYTHONPATH": str(SUPPORT), "JTILE_OPTIMIZE": "0"}
    run = [sys.executable, str(SUPPORT / "device_checks.py"), "library_cases", *CASES]
    done = forked.run(run, env=env)
    assert done.returncode == 0, done.stderr
    reports = [Report.from_dict(r) for r in json.loads(done.stdout)]
    composition.agree(request.config, "ops", list(CASES), *reports)
