"""Strict once, for every test: JAX's promotions, warnings, poisoned outputs, a cache of its own."""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import importlib
import importlib.util
import os
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

# Before jax is imported. The suite must not read what an earlier version left in the user's cache; a folder for all
# workers of one run keeps the sharing of a cache between processes under test.
if "JTILE_CACHE_DIR" not in os.environ:
    os.environ["JTILE_CACHE_DIR"] = tempfile.mkdtemp(prefix="jtile-test-cache-")
os.environ.setdefault("JTILE_POISON", "1")
os.environ.setdefault("JTILE_VERIFY", "1")
os.environ.setdefault(
    "JAX_PLATFORMS",
    "cuda,cpu"
    if shutil.which("nvidia-smi") and any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))
    else "cpu",
)
# What kernels are compared with rounds where it says so: XLA's GPU code leaves casts to bfloat16 out.
if "cuda" in os.environ["JAX_PLATFORMS"] and "xla_allow_excess_precision" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
# It runs once, so that optimising it would be half of the time to compile it.
if "cuda" not in os.environ["JAX_PLATFORMS"] and "xla_backend_optimization" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
# So do kernels. The tests of the back end for CPUs have LLVM optimise theirs.
os.environ.setdefault("JTILE_OPTIMIZE", "0")
# Threads of NumPy's products wait busily for their next one: with a worker on every core, they take it from the others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share one GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # A worker has told all when it ends. Python would free its objects one by one, for seconds of the run; registered
    # before JAX is imported, this comes behind what JAX and others do at the end.
    atexit.register(os._exit, 0)

import forked  # before JAX
import hypothesis
import jax
import pytest
import remembered
from _pytest import runner
from hypothesis.internal.conjecture import providers
from jax.experimental.compilation_cache import compilation_cache

from jtile import _stack

gc.disable()  # a quarter of the time to import the tests; from `pytest_collection_finish` on it says why
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")  # of what kernels are compared with: a GPU would take tf32

# `ci` draws the same examples on every run, `slow` (--runslow) four times as many; `explore` (--explore) new ones.
_SETTINGS = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", max_examples=50, derandomize=True, database=None, **_SETTINGS)
hypothesis.settings.register_profile("slow", max_examples=200, derandomize=True, database=None, **_SETTINGS)
hypothesis.settings.register_profile("explore", max_examples=1000, **_SETTINGS)


def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--gpu", action="store_true", help="fail where there is no GPU, instead of testing on the CPU")
    parser.addoption("--composition", action="store_true", help="rewrite docs/composition.json from the tests that run")
    parser.addoption("--explore", action="store_true", help="hypothesis draws new examples instead of the stored order")


def pytest_configure(config):
    # The numbers in local sources, which hypothesis draws now and then, depend on what a process has imported: examples
    # would differ between workers. To read them took each worker 4 s.
    providers.is_local_module_file = lambda path: False
    if "cuda" not in os.environ["JAX_PLATFORMS"]:
        import native_calls

        native_calls.install()
        if config.getoption("--runslow"):  # all is compiled anew, in child processes, too
            os.environ["SUITE_CACHE"] = ""
        remembered.install()
    if config.getoption("--gpu") and gpu_missing():
        raise pytest.UsageError(gpu_missing())
    jax.monitoring.register_event_duration_secs_listener(_count)
    runner.runtestprotocol = _stack.roomy(runner.runtestprotocol)  # a test, with its fixtures
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_OneReport())
    profile = "explore" if config.getoption("--explore") else "slow" if config.getoption("--runslow") else "ci"
    hypothesis.settings.load_profile(profile)


@hypothesis.given(hypothesis.strategies.none())
def _first_example(_):
    """For its first example hypothesis collects garbage, in each process: seconds, behind ten thousand tests."""


def pytest_collection_modifyitems(config, items):
    # Early ones cost most where much has run before. Begun last, a long one would leave the other workers without work.
    items.sort(key=lambda item: ("early" not in item.keywords, "long" not in item.keywords))
    if any("gpu" in item.keywords for item in items):
        reason = gpu_missing()
        for item in items:
            if "gpu" in item.keywords and reason:
                item.add_marker(pytest.mark.skip(reason=reason))
    if "cuda" in os.environ["JAX_PLATFORMS"]:
        for item in items:
            if item.get_closest_marker("cpu"):  # no keyword: a folder has that name, too
                item.add_marker(pytest.mark.skip(reason="cpu: JAX's default device here is a GPU"))
    if not config.getoption("--runslow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: give --runslow to run it"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    _first_example()
    with _by_numpy():  # operands of modules: seventy programs of XLA in every worker
        _stack.roomy(_import_in_turn)(session.config)
        return (yield)


def _import_in_turn(config):
    """Each worker begins with other test modules than the others. In a fresh checkout all modules are compiled, with
    pytest's texts for their assertions; so each worker compiles its share, and finds what the others have written."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    root = config.rootpath
    if workers == 1 or [root / arg for arg in config.args] != [root / "tests"]:
        return
    paths = sorted(root.glob("tests/**/test_*.py"))
    start = len(paths) * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) // workers
    for path in paths[start:] + paths[:start]:
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and says what is wrong
            importlib.import_module(name)


def pytest_collection_finish():
    # Ten thousand tests and the modules of JAX, which every later collection would walk through. To walk through what
    # JAX keeps of every program, and to take apart what it leaves in cycles, would be a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Collect after all, where that takes too much memory: half of the machine's in all processes together; but only
    what comes from then on, since to walk through all that there is takes 20 s. And let XLA keep no more programs on
    disk, where a test, or a command that it called, has asked for that."""
    if jax.config.jax_compilation_cache_dir != KEPT:
        jax.config.update("jax_compilation_cache_dir", KEPT)
        compilation_cache.reset_cache()
    if not gc.isenabled() and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MEMORY:
        gc.freeze()
        gc.enable()


def gpu_missing() -> str:
    """Why no test marked `gpu` can run here; empty where they can."""
    if shutil.which("nvidia-smi") is None:
        return "gpu: this machine has no NVIDIA driver (nvidia-smi is missing)"
    if subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode:
        return "gpu: nvidia-smi finds no GPU"
    if jax.default_backend() != "gpu":
        return "gpu: JAX has no CUDA plugin here (pip install 'jtile[cuda13]')"
    return ""


_workers = max(2, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * _workers)
LONG = 20.0  # seconds
KEPT = jax.config.jax_compilation_cache_dir  # where XLA keeps programs: nowhere, unless the user has said so
ENOUGH = 900.0  # CPU seconds of the tests of one run without GPU: eight minutes on two cores, collecting included
_programs = [0]  # that XLA compiled in this process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Note what a test costs: a wall clock says little of a shared machine, and nothing of children."""
    seconds = lambda: sum(os.times()[:4]) + forked.seconds()
    before, compiled = seconds(), _programs[0]
    item.user_properties.append(("cost", lambda: (seconds() - before, _programs[0] - compiled)))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    costs = [cost() for name, cost in item.user_properties if name == "cost" and callable(cost)]
    report.user_properties = [p for p in report.user_properties if p[0] != "cost"]
    if report.when == "teardown":  # the last of a test
        report.user_properties += [("cost", cost) for cost in costs]
    return report


class _OneReport:
    """A worker sends one report of a test that passes, not three and a start: with ten thousand tests, half of what
    pytest-xdist costs."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        reports = runner.runtestprotocol(item, log=False, nextitem=nextitem)
        told = [r for r in reports if r.when == "call" or not r.passed]
        if told and told[-1] is not reports[-1]:
            told[-1].user_properties += reports[-1].user_properties  # its cost
        for report in told or reports[-1:]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _count(event: str, seconds: float, **_) -> None:
    _programs[0] += event == "/jax/core/compile/backend_compile_duration"


def _costs(terminalreporter):
    """Where the time of the suite goes, by file and by test, so that it is seen before it is too much."""
    files, tests = collections.defaultdict(lambda: [0.0, 0]), collections.Counter()
    for report in (r for kind in ("", "passed") for r in terminalreporter.stats.get(kind, ())):
        for _, (seconds, programs) in (p for p in report.user_properties if p[0] == "cost"):
            files[report.nodeid.split("::")[0]][0] += seconds
            files[report.nodeid.split("::")[0]][1] += programs
            tests[report.nodeid] += seconds
    total = sum(seconds for seconds, _ in files.values())
    if len(files) < 50:  # a part of the suite, which its author looks at by --durations
        return
    terminalreporter.write_line(f"{total:.0f} CPU seconds; the most, with the programs that XLA compiled, are in")
    for name, (seconds, programs) in sorted(files.items(), key=lambda f: -f[1][0])[:15]:
        terminalreporter.write_line(f"  {seconds:6.1f} s {programs:5} {name}")
    terminalreporter.write_line("and, for each test, in")
    for name, seconds in tests.most_common(20):
        terminalreporter.write_line(f"  {seconds:6.1f} s {name}")
    if _through_a_table():
        terminalreporter.write_line("this Python is slow: .ci/setup links one without a library")
    if total > ENOUGH and not terminalreporter.config.getoption("--runslow"):
        terminalreporter.write_line(f"more than {ENOUGH:.0f} s: docs/suite.md says how tests are kept cheap")


def _through_a_table() -> bool:
    """Whether Python's functions are in a library of their own, from which `.ci/setup` links a program of its own."""
    maps = Path("/proc/self/maps")
    return maps.exists() and "/libpython3" in maps.read_text()


def pytest_terminal_summary(terminalreporter):
    """Name the tests that took long and are not begun first: a list by hand would go stale unseen."""
    _costs(terminalreporter)
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    late = [r for r in reports if r.duration > LONG and not {"long", "slow"} & set(r.keywords)]
    for r in sorted(late, key=lambda r: -r.duration):
        terminalreporter.write_line(f"{r.nodeid} took {r.duration:.0f} s: mark it long, so that it is begun first")


def pytest_unconfigure(config):
    # Pytest now collects five times, and Python once, what a whole run has left: to hear what finalizers raise in it.
    if not config.getoption("--runslow"):
        gc.freeze()
    path = os.environ["JTILE_CACHE_DIR"]
    if not hasattr(config, "workerinput"):
        remembered.prune()
    if not hasattr(config, "workerinput") and os.path.basename(path).startswith("jtile-test-cache-"):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def optimized():
    """LLVM optimises the kernels of a test that runs them long, or that is about their code."""
    import jtile as jt

    with jt.config(optimize=True):
        yield


@pytest.fixture
def compiled_anew():
    """Compilers make all that a test asks them for: what it is about is that they do, or what they leave behind."""
    with remembered.compiled_anew():
        yield


@pytest.fixture
def on_the_cpu():
    """The CPU is JAX's default device, also beside a GPU: for tests that are about what is chosen for CPUs."""
    before = jax.config.jax_default_device
    jax.config.update("jax_default_device", jax.devices("cpu")[0])  # not a context: tests start threads
    yield
    jax.config.update("jax_default_device", before)


@pytest.fixture
def by_numpy(request):
    """NumPy runs what a test calls of JAX's own functions outside of jit, and kernels run without XLA there, but where
    a kernel's call is the subject; see `tests/support/eager_calls.py`."""
    with _by_numpy(kernels=not {"calls", "primitive"} & set(request.path.parts)):
        yield


def _by_numpy(kernels=True):
    import eager_calls

    return contextlib.nullcontext() if "cuda" in os.environ["JAX_PLATFORMS"] else eager_calls.by_numpy(kernels)


@pytest.fixture
def subprocess_env(tmp_path):
    """The environment for a child Python: CPU only, a fresh jtile cache, no options of ours."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JTILE_")}
    return env | {"JAX_PLATFORMS": "cpu", "JTILE_CACHE_DIR": str(tmp_path / "jtile-cache")}


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """The kernels that were compiled so far; nothing is found in a cache from before."""
    import jtile as jt
    from jtile.lowering import registry

    monkeypatch.setattr(jt.config, "cache_dir", str(tmp_path), raising=False)
    registry.forget()
    names, compile_ = [], registry._compile

    def counted(kernel, target, options, texts):
        names.append(kernel.name)
        return compile_(kernel, target, options, texts)

    monkeypatch.setattr(registry, "_compile", counted)
    monkeypatch.setattr(registry, "_stored", lambda key, target: None)
    return names
