"""Checks that need eight devices: all `check_*` functions of a file run in one child process, each reported apart.

`names(path)` and `outcome(path, name, tmp_path_factory)` are for the tests; as a program this file is the child.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import forked

DEVICES = 8
LIMIT = 1800  # seconds for all checks of a file: it only ends a hang


def names(path: Path) -> list[str]:
    """The checks of a file, in its order."""
    found = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [name for name in found if name.startswith("check_")]


def outcome(path: Path, name: str, tmp_path_factory) -> str:
    """What went wrong in a check, or nothing. The first to ask runs all checks; other pytest workers wait for it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    result = shared / f"{path.stem}.json"
    try:
        os.close(os.open(shared / f"{path.stem}.lock", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        end = time.monotonic() + LIMIT
        while not result.exists() and time.monotonic() < end:
            time.sleep(0.05)
    else:
        _run(path, result)
    return json.loads(result.read_text())[name]


def _run(path: Path, result: Path) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    env = os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "JTILE_POISON": "1", "JTILE_VERIFY": "1"}
    part = result.with_suffix(".part")
    command = [sys.executable, __file__, str(path), str(part)]
    done = forked.run(command, env=env, timeout=LIMIT)
    if done.returncode:
        part.write_text(json.dumps(dict.fromkeys(names(path), done.stdout[-2000:] + done.stderr[-4000:])))
    os.replace(part, result)


def main(path: Path, out: Path) -> None:
    import eager_calls
    import jax
    import native_calls
    import remembered

    native_calls.install()
    remembered.install()
    gc.disable()  # as in the tests' own process: a tenth of the time otherwise
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.simplefilter("error")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    found = {}
    with eager_calls.by_numpy(kernels=False):  # what checks call on one device, outside of jit
        spec.loader.exec_module(module)
        for name in names(path):
            try:
                vars(module)[name]()
            except Exception:  # reported by the test of that name
                found[name] = traceback.format_exc()
            else:
                found[name] = ""
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
