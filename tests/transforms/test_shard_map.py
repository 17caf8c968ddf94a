"""Kernels under `shard_map` on eight forced host devices: the checks of shard_map_checks.py, in one child process."""

from pathlib import Path

import devices
import pytest

CHECKS = Path(__file__).with_name("shard_map_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_shard_map(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed
