"""Kernels that talk to other devices: the checks of mesh_checks.py on eight host devices, in one child process."""

import os
import subprocess
import sys
from pathlib import Path

import devices
import pytest

CHECKS = Path(__file__).with_name("mesh_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_mesh(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed


@pytest.mark.slow
def test_two_hundred_random_programs(subprocess_env):
    env = subprocess_env | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    script = Path(devices.__file__).with_name("device_programs.py")
    run = [sys.executable, str(script), "0", "200"]
    done = subprocess.run(run, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
