"""Runs the checks that need several devices, in a process of its own: prints a JSON list of reports.

`python device_checks.py library_cases NAME...` or `kernel_kinds NAME...`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

DEVICES = ("shard_map", "partitioned jit")


def run(module: str, names: list[str]) -> None:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    import native_calls

    from jtile.testing import check_kernel

    native_calls.install()
    gc.disable()  # as in the tests' own process: a tenth of the time otherwise

    cases = importlib.import_module(module).CASES
    reports = []
    for name in names:
        case = cases[name]
        found = check_kernel(case.op, case.reference, case.args(), name=name, only=DEVICES, **case.options)
        reports.append(found.as_dict())
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
