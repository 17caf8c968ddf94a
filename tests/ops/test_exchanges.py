"""Exchanges beside kernels: the checks of exchange_checks.py on eight host devices, in one child process."""

from pathlib import Path

import devices
import pytest

CHECKS = Path(__file__).with_name("exchange_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_exchanges(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed
