"""Every op of the library under every transform, against its reference; docs/composition.json says the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import composition
import forked
import pytest
import zoo_cases
from draws import thorough
from library_cases import CASES

from jtile.testing import Report, check_kernel

pytestmark = pytest.mark.usefixtures("by_numpy")

SUPPORT = Path(composition.__file__).parent
# Values, dtypes and the interpreter have tests of their own for each op, in more shapes.
HERE = (
    "jvp", "vjp", "numeric", "checkpoint", "vmap", "grad of vmap", "vmap of grad", "second order", "export",
)  # fmt: skip
# Which of these take turns in `make test`, an op after the other: each is made of rules that the others use too.
TURNS = ("second order", "export", "checkpoint")


def checks(name, request):
    """All of them for the page, and in `make test-all`; in `make test` one of those that take turns."""
    if thorough() or request.config.getoption("--composition"):
        return HERE
    k = list(CASES).index(name)
    return tuple(c for c in HERE if c not in TURNS or c == TURNS[k % len(TURNS)])


@pytest.mark.parametrize("name", CASES)
def test_every_transform(name, request):
    case = CASES[name]
    report = check_kernel(case.op, case.reference, case.args(), name=name, only=checks(name, request), **case.options)
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
    """Each kind of kernel has both checks in tests/transforms/test_kinds.py; the ops take turns in `make test`."""
    env = subprocess_env | {"PYTHONPATH": str(SUPPORT), "JTILE_OPTIMIZE": "0"}
    turns = [] if thorough() or request.config.getoption("--composition") else ["--turns"]
    run = [sys.executable, str(SUPPORT / "device_checks.py"), "library_cases", *turns, *CASES]
    done = forked.run(run, env=env)
    assert done.returncode == 0, done.stderr
    reports = [Report.from_dict(r) for r in json.loads(done.stdout)]
    composition.agree(request.config, "ops", list(CASES), *reports)
