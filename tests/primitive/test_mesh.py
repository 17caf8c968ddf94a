"""Kernels that talk to other devices: the checks of mesh_checks.py on eight host devices, in one child process."""

from pathlib import Path

import devices
import pytest

CHECKS = Path(__file__).with_name("mesh_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_mesh(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed
