"""Runs of many versions of a file, each in a process of its own: forks of one that has imported JAX and jtile.

As a program this module is the process that forks. It reads requests from its standard input, a JSON document a line,
and answers likewise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from typing import Any

from jtile._errors import JtileError
from jtile.debug.shrink.outcome import Outcome, of_exception

QUIET = {"JTILE_CACHE_DIR": "", "JTILE_POISON": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Runs:
    """A process that runs texts as Python runs a file.

    Args:
      path: the file that the texts stand for: tracebacks, `__file__` and imports of its neighbours go by it.
    """

    def __init__(self, path: str):
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jtile.debug.shrink.runs"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._lock = threading.Lock()

    def run(self, source: str, timeout: float, *, interpret: bool = False) -> tuple[Outcome, float]:
        """How a text ends, and the seconds that it took; `interpret`: with kernels in the reference interpreter."""
        environment = QUIET | ({"JTILE_INTERPRET": "1"} if interpret else {})
        request = {"source": source, "path": self._path, "timeout": timeout, "environment": environment}
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except BrokenPipeError:
                answer = ""
        if not answer:
            raise JtileError(f"the process that runs {self._path} has ended: {self._process.poll()}")
        outcome, seconds = json.loads(answer)
        return Outcome(**outcome), seconds

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()


# -- the process that forks, and its children --------------------------------------------------------------------------


def _serve() -> None:
    import jax
    import jax.numpy  # noqa: F401

    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.monotonic()
        reader, writer = os.pipe()
        with warnings.catch_warnings():  # JAX warns that forks and threads do not mix: there are no threads yet
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            os.close(reader)
            _child(request, writer)
        os.close(writer)
        found = _wait(pid, reader, request["timeout"])
        answers.write(json.dumps((dataclasses.asdict(found), time.monotonic() - begin)) + "\n")
        answers.flush()


def _wait(pid: int, reader: int, timeout: float) -> Outcome:
    late: list[bool] = []

    def kill() -> None:
        late.append(True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    with os.fdopen(reader) as told:
        text = told.read()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    timer.join()
    with contextlib.suppress(ProcessLookupError):  # end all processes that the child has started, if some are left
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    if text:
        return Outcome(**json.loads(text))
    if late:
        return Outcome("time")
    return Outcome("signal", signal.Signals(-code).name) if code < 0 else Outcome("exit", str(code))


def _child(request: dict[str, Any], writer: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.environ.update(request["environment"])
    gc.unfreeze()
    found = _outcome(request["path"], request["source"])
    with os.fdopen(writer, "w") as told:
        told.write(json.dumps(dataclasses.asdict(found)))
    os._exit(0)


def _outcome(path: str, source: str) -> Outcome:
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"], sys.argv = main, [path]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    # An entry without a time is kept, whatever the file itself holds.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    try:
        exec(compile(source, path, "exec"), vars(main))
    except BaseException as error:
        return of_exception(error, path, source)
    return Outcome("passes")


if __name__ == "__main__":
    _serve()
