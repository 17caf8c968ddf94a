"""Runs the checks that need several devices, in a process of its own: prints a JSON list of reports.

`python device_checks.py library_cases NAME...` or `kernel_kinds NAME...`; with `--turns` in front of the names each has
one of the checks, by turns.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

DEVICES = ("shard_map", "partitioned jit")


def run(module: str, names: list[str]) -> None:
    turns, names = names[:1] == ["--turns"], [name for name in names if name != "--turns"]
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    import native_calls

    from jtile.testing import check_kernel

    native_calls.install()
    gc.disable()  # as in the tests' own process: a tenth of the time otherwise

    cases = importlib.import_module(module).CASES
    reports = []
    for k, name in enumerate(names):
        case, only = cases[name], DEVICES[k % 2 : k % 2 + 1] if turns else DEVICES
        found = check_kernel(case.op, case.reference, case.args(), name=name, only=only, **case.options)
        reports.append(found.as_dict())
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
