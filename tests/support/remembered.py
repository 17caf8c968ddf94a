"""What other people's compilers made in earlier runs: LLVM for CPUs, triton with its assembler, and XLA.

A third of the suite's time was theirs, and what one of them makes depends on what it is given alone. So it is kept in a
folder of the user's, by a hash of all that: the text, the options, the versions, and the sources of jtile that drive
the compiler. What jtile traces, rewrites and emits is made anew in every run; where that comes to another text, it is
compiled. Nothing is found, or kept, where a test has put something else in the place of a part of these modules, or
asks for the fixture `compiled_anew`; failures are never kept.

`SUITE_CACHE` names another folder than `~/.cache/jtile-suite`; where it is empty, and in `make test-all`, there is
none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

MOST = 1 << 30  # bytes that are kept
VARIABLES = ("TRITON_", "LLVM_", "MLIR_", "PTXAS", "DISABLE_", "NVPTX")  # that compilers read
CPU = ("lowering.cpu.compile",)
GPU = tuple(f"lowering.triton.{name}" for name in (
    "stages", "clusters", "contraction", "features", "heuristics", "layouts", "ptx", "ptx_copies", "ptx_roles", "ptxas",
    "resources", "sparse", "versions",
))  # fmt: skip

_off = [False]  # whether everything is compiled anew for now


def folder() -> Path | None:
    """Where it is kept; None: nowhere."""
    asked = os.environ.get("SUITE_CACHE")
    if asked is None:
        home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        return Path(home, "jtile-suite") if os.path.isabs(home) else None  # nobody's home
    return Path(asked) if asked else None


class Files:
    """Bytes by their key, for several processes at once: each file comes whole into its place."""

    def __init__(self, path: Path):
        self.path = self._path = path  # the second for JAX
        path.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        try:
            found = (self.path / key).read_bytes()
            os.utime(self.path / key)  # what is used stays
        except OSError:
            return None
        digest, value = found[:32], found[32:]
        return value if hashlib.sha256(value).digest() == digest else None  # a disk that was full, or is broken

    def put(self, key: str, value: bytes) -> None:
        with contextlib.suppress(OSError):
            handle, part = tempfile.mkstemp(dir=self.path, prefix=".part-")
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(value).digest() + value)
            os.replace(part, self.path / key)


def install() -> str | None:
    """From now on compilers are asked for what they have not made yet, in this process. Gives the folder of what XLA
    makes, or None."""
    path = folder()
    if path is None:
        return None
    try:
        files = Files(path / "images")
        of_xla = _xla(path / f"xla-{_machine()}")
    except OSError:  # a home that nobody can write to
        return None
    _remember("lowering.cpu.compile", "assemble", CPU, "llvmlite", files, _llvm)
    _remember("lowering.triton.stages", "_build", GPU, "triton", files, _triton)
    return of_xla


def prune() -> None:
    """What was used last stays."""
    path = folder()
    if path is None or not path.exists():
        return
    found = []
    for p in path.glob("*/*"):
        with contextlib.suppress(OSError):  # another run has put it in its place meanwhile, or has pruned, too
            s = p.stat()
            found.append((s.st_mtime, s.st_size, p))
    if sum(size for _, size, _ in found) <= MOST:
        return
    kept = 0
    for _, size, p in sorted(found, reverse=True):
        kept += size
        if kept > MOST // 2:
            p.unlink(missing_ok=True)


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Compilers make everything inside, as if there was nothing."""
    import jax

    before, _off[0] = _off[0], True
    enabled = jax.config.jax_enable_compilation_cache
    _xla_asks(False)
    try:
        yield
    finally:
        _off[0] = before
        _xla_asks(enabled)


# -- LLVM and triton ---------------------------------------------------------------------------------------------------


def _remember(
    module: str, name: str, driven_by: tuple[str, ...], package: str, files: Files, key_of: Callable[..., Any]
) -> None:
    """Have a function of jtile's, which drives a compiler, give what it gave before."""
    at = importlib.import_module(f"jtile.{module}")
    compiled = vars(at)[name]
    parts: list[tuple[ModuleType, dict[str, Any]]] = []

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module(package)  # it fails as ever where that is missing
        if _off[0] or not all(vars(m).get(k) is v for m, known in parts for k, v in known.items()):
            return compiled(*args, **kwargs)
        key = _hash(name, _common(driven_by, package), key_of(*args, **kwargs))
        kept = files.get(key)
        if kept is not None:
            return pickle.loads(kept)
        made = compiled(*args, **kwargs)
        files.put(key, pickle.dumps(made))
        return made

    setattr(at, name, call)
    for other in driven_by:
        m = importlib.import_module(f"jtile.{other}")
        parts.append((m, {k: v for k, v in vars(m).items() if not k.startswith("__")}))


@functools.cache
def _common(driven_by: tuple[str, ...], package: str) -> str:
    """What all texts of a compiler have in common: its version, and the sources that drive it."""
    modules = [importlib.import_module(f"jtile.{name}") for name in (*driven_by, "lowering.artifact")]
    sources = [Path(m.__file__).read_bytes() for m in modules]  # type: ignore[arg-type]
    return _hash(importlib.metadata.version(package), *sources)


def _llvm(text: str, isa: Any, texts: bool = False, *, lines: int | None = None) -> Any:
    from jtile._config import current

    return text, _plain(isa), texts, lines, current().optimize


def _triton(text: str, f: Any, choice: Any, texts: bool, level: str) -> Any:
    from triton import knobs

    ptxas = importlib.import_module("jtile.lowering.triton.ptxas")
    tool = ptxas._wanted.tool
    given = [(k, v) for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES) and k != "TRITON_CACHE_DIR"]
    set_ = [_plain(vars(part)) for part in (knobs.nvidia, knobs.amd, knobs.compilation)]
    return text, _plain(f), _plain(choice), texts, level, tool and (tool.path, tool.version), given, set_


def _plain(x: Any) -> Any:
    """Something whose text is the same in every process: sets are in order."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {v.name: _plain(getattr(x, v.name)) for v in dataclasses.fields(x)}
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in sorted(x.items(), key=lambda kv: str(kv[0]))}
    if isinstance(x, set | frozenset):
        return sorted(map(repr, x))
    return [_plain(v) for v in x] if isinstance(x, tuple | list) else x


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


# -- XLA ---------------------------------------------------------------------------------------------------------------


def _machine() -> str:
    """What XLA's code for CPUs depends on, and the key that JAX makes does not have."""
    isa = importlib.import_module("jtile.lowering.cpu.isa")
    return _hash(_plain(isa.processor_isa()))[:16]


def _xla(path: Path) -> str | None:
    """JAX's own cache of programs, in files of ours: it writes its own in place, where another process may read half.
    A user's own stays as it is."""
    import jax

    if jax.config.jax_compilation_cache_dir:
        return None
    compilers = importlib.import_module("jax._" + "src.compilation_cache")
    own, ours = compilers.get_file_cache, Files(path)
    compilers.get_file_cache = lambda at: (ours, at) if at == str(path) else own(at)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return str(path)


def _xla_asks(enabled: bool) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()
