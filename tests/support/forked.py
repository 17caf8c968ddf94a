"""Child processes of the tests, without the three seconds that each takes to import JAX and what kernels are made by:
forks of one that has done so.

`run([sys.executable, ...], env=...)` is `subprocess.run(..., capture_output=True, text=True)`: the child has that
environment, its own `__main__`, and neither a back end of JAX nor options of jtile that anybody has looked at. What
only a Python that starts from nothing shows (what is imported, how long that takes, hashes of texts) is run by
`subprocess`; so is here what is to be `fresh`, and what asks by its environment for options of Python or JAX that this
process has not.

As a program this file is the process that forks. It gets requests through a socket, with the files for the child's
standard output and errors, and answers with its exit status and CPU seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

# What a process imports that makes kernels for CPUs, but for LLVM.
READY = (
    "jtile.calls.custom_vjp", "jtile.language._derivatives", "jtile.language._guards", "jtile.lowering.artifact",
    "jtile.lowering.ascend.platform", "jtile.lowering.cpu.cost", "jtile.lowering.cpu.platform", "jtile.ops",
    "jtile.primitive.lowering", "jtile.primitive.partition", "jtile.testing.evaluate", "jtile.trace.lower",
    "jtile.trace.rewrite", "jtile.transforms.batch", "jtile.transforms.vjp", "jtile.tune.auto", "jtile.tune.choose",
    "jtile.tune.resolve", "pytest",
)  # fmt: skip
PLAIN = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # what may differ from what the server started with
_spent = [0.0]  # CPU seconds of children that have ended


def without_audits() -> None:
    """Import filelock, as JAX does for its cache on disk, without its audit hook: Python would call it for every `id`,
    `compile` and `open`, a hundredth of the time of the tests."""
    added = sys.addaudithook
    sys.addaudithook = lambda hook: None
    with contextlib.suppress(ImportError):
        import filelock  # noqa: F401
    sys.addaudithook = added


without_audits()


def seconds() -> float:
    """CPU seconds of all children so far: they are none of this process's."""
    return _spent[0]


def run(
    command: Sequence[Any], *, env: Mapping[str, str] | None = None, cwd: Any = None, input: str = "",
    timeout: float = 1800, check: bool = False, fresh: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A Python program as `subprocess.run` runs it, with its output as text. The time-out only ends a hang."""
    argv, env = [str(c) for c in command[1:]], dict(os.environ if env is None else env)
    if fresh or not _alike(env):
        return subprocess.run(
            [str(c) for c in command], env=env, cwd=cwd, input=input, capture_output=True, text=True, timeout=timeout,
            check=check,
        )  # fmt: skip
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(input)
        given.seek(0)
        request = {"argv": argv, "env": env, "cwd": str(cwd or os.getcwd()), "timeout": timeout}
        status, spent = _server().ask(request, [f.fileno() for f in (given, out, err)])
        _spent[0] += spent
        texts = [(f.seek(0), f.read())[1] for f in (out, err)]
    if status is None:
        raise subprocess.TimeoutExpired(list(command), timeout, *texts)
    done = subprocess.CompletedProcess(list(command), status, *texts)
    if check:
        done.check_returncode()
    return done


def _early(env: Mapping[str, str]) -> dict[str, str]:
    """What Python and JAX read of an environment when they start, or are imported."""
    return {k: v for k, v in env.items() if k.startswith(("PYTHON", "JAX_")) and k not in PLAIN}


def _base() -> dict[str, str]:
    """The environment of the server: JAX without a GPU, and nothing of jtile."""
    hidden = ("JTILE_", "XLA_FLAGS", "PYTEST_", "PYTHONPATH")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {"JAX_PLATFORMS": "cpu"}


def _alike(env: Mapping[str, str]) -> bool:
    return hasattr(os, "fork") and sys.platform == "linux" and _early(env) == _early(_base())


class _Server:
    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=_base(), pass_fds=[theirs.fileno()])
        theirs.close()
        self.lock = threading.Lock()
        self.answers = self.socket.makefile("r")
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], files: list[int]) -> tuple[int | None, float]:
        text = json.dumps(request).encode()
        with self.lock:
            socket.send_fds(self.socket, [len(text).to_bytes(8, "little")], files)
            self.socket.sendall(text)
            return tuple(json.loads(self.answers.readline()))

    def close(self) -> None:
        self.answers.close()
        self.socket.close()
        self.process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


# -- the process that forks, and the child -----------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    import jax
    import jax.numpy  # noqa: F401

    for name in READY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        head, files, _, _ = socket.recv_fds(connection, 8, 3)
        if not head:
            return
        text = b""
        while len(text) < int.from_bytes(head, "little"):
            text += connection.recv(1 << 20)
        request = json.loads(text)
        with warnings.catch_warnings():  # of JAX's, that forks and threads do not mix: there are none yet
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            connection.close()
            _child(request, files)
        for f in files:
            os.close(f)
        connection.sendall(json.dumps(_wait(pid, request["timeout"])).encode() + b"\n")


def _wait(pid: int, timeout: float) -> tuple[int | None, float]:
    """(exit status, as `subprocess` gives it, or None where it took too long; CPU seconds)."""
    late = []
    timer = threading.Timer(timeout, lambda: (late.append(True), os.killpg(pid, signal.SIGKILL)))
    timer.start()
    _, status, usage = os.wait4(pid, 0)
    timer.cancel()
    return None if late else os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _child(request: dict[str, Any], files: list[int]) -> None:
    os.setsid()
    for number, f in enumerate(files):
        os.dup2(f, number)
        os.close(f)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    gc.unfreeze()
    status = 1
    try:
        from jtile._stack import roomy  # JAX, which this comes with, is there

        roomy(_main)(request["argv"])
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)


def _main(argv: list[str]) -> None:
    """What Python does with `[-W FILTER] [-P] -c CODE | -m MODULE | FILE` and arguments."""
    safe = False
    while argv[0] in ("-W", "-P"):
        if argv[0] == "-W":
            warnings._processoptions([argv.pop(1)])  # type: ignore[attr-defined]
        safe |= argv[0] == "-P"
        argv.pop(0)
    first = {"-c": "", "-m": os.getcwd()}.get(argv[0], os.path.dirname(os.path.abspath(argv[0])))
    sys.path[:1] = [] if safe else [first]
    sys.path[1 - safe : 1 - safe] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = argv[1:] if argv[0] != "-c" else ["-c", *argv[2:]]
    if argv[0] == "-c":
        code = compile(argv[1], "<string>", "exec")
    else:
        sys.argv, main.__file__ = argv, argv[0]
        with open(argv[0], "rb") as file:
            code = compile(file.read(), argv[0], "exec")
    exec(code, vars(main))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
