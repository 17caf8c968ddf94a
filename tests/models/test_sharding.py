"""Decoders on eight devices, in a process of their own."""

from pathlib import Path

import devices
import pytest

CHECKS = Path(__file__).with_name("sharded_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_on_eight_devices(name, tmp_path_factory):
    assert devices.outcome(CHECKS, name, tmp_path_factory) == ""
