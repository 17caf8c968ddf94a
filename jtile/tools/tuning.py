"""`jtile tune` (search, show what was found, merge files), `jtile bench`, `jtile explain` and `jtile profile`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jtile._errors import CacheError, KernelValueError
from jtile.tools import levels
from jtile.tune import device
from jtile.tune.api import tune
from jtile.tune.roofline import explain
from jtile.tune.store import RECORDS, Entries, merge, read, store, user_path, write
from jtile.tune.timings import bench
from jtile.tune.watch import profile
from jtile.tune.whole import profile_program


def run(what: str, rest: list[str], *, args: str, meta: list[str], time_limit: float | None, out: str | None) -> int:
    """`show`, `merge FILE...`, or a search for "module:function"."""
    if what == "show":
        return _show(rest)
    if what == "merge":
        return _merge(rest, out)
    if rest:
        raise KernelValueError(f"jtile tune takes one function, got {what!r} and {rest[0]!r}")
    return _tune(what, args, meta, time_limit, out)


def show_bench(what: str, *, args: str, meta: list[str], peers: list[str], rounds: int) -> None:
    """Print `jt.bench` of "module:function" for arguments of these types, beside other functions of them."""
    types = levels.parse_types(args)
    with levels.as_wide_as(types):
        functions = {name: _function(name, types, []) for name in peers}
        found = bench(_function(what, types, meta), *types, peers=functions, rounds=rounds)
    sys.stdout.write(f"{found}\n")


def show_explanation(what: str, *, args: str, meta: list[str], compare: str | None, picture: str | None) -> None:
    """Print `jt.explain` of "module:function" for arguments of these types, and what ops of the library came to; or
    beside that of a variant: meta-parameters, such as "bm=64 bn=128", or another "module:function". Of a function of
    `jt.fuse` first what becomes a kernel, and why the rest stays XLA's; of one of `jt.graph` the tasks of each launch,
    and their bands and edges."""
    from jtile.ops import choices

    types = levels.parse_types(args)
    if picture and not Path(picture).parent.is_dir():
        raise KernelValueError(f"{picture} cannot be written: there is no folder {Path(picture).parent}")
    with levels.as_wide_as(types):
        function = _function(what, types, meta)
        found, decided = explain(function, *types), _decided(levels.find(what), types, levels.parse_meta(meta))
        if not found.kernels and not decided:
            raise levels.no_kernel(what, levels.find(what), types)
        lines, drawn = [*decided, str(found), *dict.fromkeys(map(str, choices(function, *types)))], found
        if compare is not None:
            drawn = found.compare(*_variant(what, types, meta, compare))
            lines = [str(drawn)]
    sys.stdout.write("\n".join(lines) + "\n")
    if picture:
        drawn.picture(picture)


def _decided(function: Any, types: list[Any], meta: dict[str, Any]) -> list[str]:
    """What `jt.fuse` or `jt.graph` made of a function of theirs, in sentences; of a graph, its text too."""
    from jtile.execution import Graphed
    from jtile.fusion import Fused

    if not isinstance(function, Fused | Graphed):
        return []
    found = function.explain(*types, **meta)
    graphs = found.graphs if isinstance(function, Graphed) else ()
    return [f"{text}\n" for text in (found, *graphs)]


def _variant(what: str, types: list[Any], meta: list[str], compare: str) -> tuple[Any, tuple[str, str]]:
    """The explanation of a variant, and what the two are called."""
    other = ":" in compare and "=" not in compare
    function = _function(compare, types, []) if other else _function(what, types, [*meta, *compare.split()])
    found = explain(function, *types)
    if not found.kernels:
        raise levels.no_kernel(compare, function, types)
    return found, (what if other else " ".join(meta) or "default", compare)


def show_profile(
    what: str, *, args: str, meta: list[str], trace: str | None, picture: str | None, interpret: bool
) -> None:
    """Print `jt.profile` of "module:function"; its first kernel with roles goes to the files."""
    types = levels.parse_types(args)
    for path in filter(None, (trace, picture)):
        if not Path(path).parent.is_dir():
            raise KernelValueError(f"{path} cannot be written: there is no folder {Path(path).parent}")
    with levels.as_wide_as(types):
        found = profile(_function(what, types, meta), *types, interpret=interpret)
    sys.stdout.write(f"{found}\n")
    if (trace or picture) and not found.timelines:
        raise KernelValueError(f"{what} has no kernel with roles: there is nothing to write")
    if trace:
        found.timelines[0].save(trace)
    if picture:
        found.timelines[0].picture(picture)


def show_program(what: str, *, args: str, meta: list[str], trace: str | None, calls: int) -> None:
    """Print `jt.profile_program` of "module:function" on random data; the trace goes to a file."""
    types = levels.parse_types(args)
    with levels.as_wide_as(types):
        found = profile_program(_function(what, types, meta), *types, calls=calls)
    sys.stdout.write(f"{found}\n")
    if trace:
        found.save(trace)


def _tune(what: str, args: str, meta: list[str], time_limit: float | None, out: str | None) -> int:
    before, types = dict(store.entries(device.kind())), levels.parse_types(args)
    function = _function(what, types, meta)
    if out:
        _add(Path(out), device.kind(), {})  # a file that cannot be written is an error before the search
    try:
        with levels.as_wide_as(types):
            report = tune(function, *types, time_limit=time_limit)
        if not (report.kernels or report.fixed or report.skipped):
            raise levels.no_kernel(what, levels.find(what), types)
    except KeyboardInterrupt:
        now = store.entries(device.kind())
        found = sum(before.get(k) is not v for k, v in now.items())
        kept = f"{found} entries are kept in {user_path(device.kind())}" if found else "nothing was found yet"
        sys.stderr.write(f"jtile: interrupted; {kept}\n")
        return 130
    finally:
        if out:
            now = store.entries(device.kind())
            _add(Path(out), device.kind(), {k: v for k, v in now.items() if before.get(k) is not v})
    sys.stdout.write(f"{report}\n")
    return 0


def _function(what: str, types: list[Any], meta: list[str]) -> Any:
    found, options = levels.checked(what, types, levels.parse_meta(meta))

    def call(*args: Any) -> Any:
        return found(*args, **options)

    call.__name__, call.__doc__ = what, found.__doc__
    return call


def _add(path: Path, kind: str, entries: Entries) -> None:
    """Add entries to a file, which need not be there."""
    _write(path, kind, (_checked([path], kind)[1] if path.exists() else {}) | entries)


def _show(paths: list[str]) -> int:
    own = user_path(device.kind())
    files = [Path(p) for p in paths] or [p for p in (RECORDS / f"{device.kind()}.json", own) if p and p.exists()]
    if not files:
        sys.stdout.write(f"nothing is kept for {device.kind()}\n")
    for path in files:
        kind, entries = _read(path)
        sys.stdout.write(f"{path}: {len(entries)} entries for {kind}\n")
        for name, e in sorted(entries.items()):
            choice = " ".join(f"{k}={v}" for k, v in e.config.items())
            gain = e.default_us / e.time_us if e.time_us else 1.0
            sys.stdout.write(f"  {name}\n    {choice}: {e.time_us:.1f} us, {gain:.2f} of the default, {e.date}\n")
    return 0


def _merge(paths: list[str], out: str | None) -> int:
    if not paths or not out:
        raise KernelValueError(
            "jtile tune merge takes files, and where to write: jtile tune merge a.json b.json -o c.json"
        )
    kind, entries = _checked([Path(p) for p in paths])
    _write(Path(out), kind, entries)
    sys.stdout.write(f"{out}: {len(entries)} entries for {kind}\n")
    return 0


def _checked(paths: list[Path], kind: str | None = None) -> tuple[str, Entries]:
    """The merged entries of files that are all for one device kind."""
    found = [_read(p) for p in paths]
    kinds = {k for k, _ in found} | ({kind} if kind else set())
    if len(kinds) != 1:
        raise KernelValueError(f"these files are for different devices ({', '.join(sorted(kinds))}): merge one kind")
    return kinds.pop(), merge(*(e for _, e in found))


def _write(path: Path, kind: str, entries: Entries) -> None:
    try:
        write(path, kind, entries)
    except OSError as e:
        raise CacheError(f"the tuning file {path} cannot be written: {e.strerror}") from e


def _read(path: Path) -> tuple[str, Entries]:
    try:
        return read(path)
    except OSError as e:
        raise CacheError(f"the tuning file {path} cannot be read: {e.strerror}") from e
