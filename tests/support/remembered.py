"""What other people's compilers made in earlier runs: LLVM for CPUs, and triton with its assembler.

A fifth of the suite's time was theirs, and what one of them makes depends on what it is given alone. So it is kept in a
folder of the user's, by a hash of all that: the text, the options, the versions, and the sources of jtile that drive
the compiler. What jtile traces, rewrites and emits is made anew in every run; where that comes to another text, it is
compiled. Nothing is found, or kept, where a test has put something else in the place of a part of these modules, or
asks for the fixture `compiled_anew`; failures are never kept. A file is a line of JSON and the bytes of the image, and
nothing in it is executed to read it; one that is damaged, or of somebody else, is not found.

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
import json
import os
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
        with contextlib.suppress(OSError):  # a full disk, or one that nobody may write to
            handle, part = tempfile.mkstemp(dir=self.path, prefix=".part-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(value).digest() + value)
                os.replace(part, self.path / key)
            except OSError:
                os.unlink(part)


def install() -> None:
    """From now on compilers are asked for what they have not made yet, in this process."""
    path = folder()
    if path is None:
        return
    try:
        files = Files(path / "images")
    except OSError:  # a home that nobody can write to
        return
    _remember(LLVM, files)
    _remember(TRITON, files)


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
            with contextlib.suppress(OSError):
                p.unlink()


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Compilers make everything inside, as if there was nothing."""
    before, _off[0] = _off[0], True
    try:
        yield
    finally:
        _off[0] = before


# -- LLVM and triton ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A function of jtile's that drives a compiler.

    Attributes:
      module, name: of the function; driven_by: the modules whose sources it depends on, in jtile.
      package: that of the compiler.
      key: (arguments) -> all that the compiler is given.
      write: (what it made) -> what JSON says of it, and its image; None: more than that.
      read: (that, the image, arguments) -> what it made.
    """

    module: str
    name: str
    driven_by: tuple[str, ...]
    package: str
    key: Callable[..., Any]
    write: Callable[[Any], tuple[Any, bytes] | None]
    read: Callable[..., Any]


def _remember(compiler: Compiler, files: Files) -> None:
    """Have the function give what it gave before."""
    at = importlib.import_module(f"jtile.{compiler.module}")
    compiled = vars(at)[compiler.name]
    parts: list[tuple[ModuleType, dict[str, Any]]] = []

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module(compiler.package)  # it fails as ever where that is missing
        if _off[0] or not all(vars(m).get(k) is v for m, known in parts for k, v in known.items()):
            return compiled(*args, **kwargs)
        common = _common(compiler.driven_by, compiler.package)
        key = _hash(compiler.name, common, compiler.key(*args, **kwargs))
        if (kept := files.get(key)) is not None:
            said, _, image = kept.partition(b"\n")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return compiler.read(json.loads(said), image, *args, **kwargs)
        made = compiled(*args, **kwargs)
        if (parted := compiler.write(made)) is not None:
            said, image = parted
            with contextlib.suppress(ValueError, TypeError):  # JSON does not know it
                if json.loads(text := json.dumps(said)) == said:
                    files.put(key, text.encode() + b"\n" + image)
        return made

    setattr(at, compiler.name, call)
    for other in compiler.driven_by:
        m = importlib.import_module(f"jtile.{other}")
        parts.append((m, {k: v for k, v in vars(m).items() if not k.startswith("__")}))


@functools.cache
def _common(driven_by: tuple[str, ...], package: str) -> str:
    """What all texts of a compiler have in common: its version, and the sources that drive it."""
    modules = [importlib.import_module(f"jtile.{name}") for name in (*driven_by, "lowering.artifact")]
    sources = [Path(m.__file__).read_bytes() for m in modules]  # type: ignore[arg-type]
    return _hash(importlib.metadata.version(package), *sources)


def _key_of_llvm(text: str, isa: Any, texts: bool = False, *, lines: int | None = None) -> Any:
    from jtile._config import current

    return text, _plain(isa), texts, lines, current().optimize


def _key_of_triton(text: str, f: Any, choice: Any, texts: bool, level: str) -> Any:
    from triton import knobs

    ptxas = importlib.import_module("jtile.lowering.triton.ptxas")
    tool = ptxas._wanted.tool
    given = [(k, v) for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES) and k != "TRITON_CACHE_DIR"]
    set_ = [_plain(vars(part)) for part in (knobs.nvidia, knobs.amd, knobs.compilation)]
    return text, _plain(f), _plain(choice), texts, level, tool and (tool.path, tool.version), given, set_


LLVM = Compiler(
    "lowering.cpu.compile", "assemble", CPU, "llvmlite", _key_of_llvm,
    write=lambda made: (made[1], made[0]),
    read=lambda texts, image, *_, **__: (image, dict(texts)),
)  # fmt: skip


def _write_built(made: Any) -> tuple[Any, bytes] | None:
    """The fields of what triton built by name, without the choice, which is an argument: or the bytes that it needs."""
    if isinstance(made, int):
        return made, b""
    later = made.texts._later
    said = {k: getattr(made, k) for k in ("threads", "shared", "descriptors", "resources", "waits")}
    said |= {"texts": {k: v for k, v in made.texts._ready.items() if k not in later}, "later": list(later)}
    return (said, made.image) if later.keys() <= {"sass"} else None


def _read_built(said: Any, image: bytes, text: str, f: Any, choice: Any, *_: Any) -> Any:
    if isinstance(said, int):
        return said
    artifact, resources, stages = (
        importlib.import_module(f"jtile.lowering.{name}") for name in ("artifact", "triton.resources", "triton.stages")
    )
    later = {"sass": functools.partial(resources.sass, image)} if said.pop("later") else {}
    texts = artifact.Texts(said.pop("texts"), later)
    return stages.Built(image=image, texts=texts, choice=choice, **said)


TRITON = Compiler(
    "lowering.triton.stages", "_build", GPU, "triton", _key_of_triton, write=_write_built, read=_read_built
)


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
