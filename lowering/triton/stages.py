"""TTIR text through the stages of the triton package to an image, without a GPU and without triton's own cache."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jtile import ir
from jtile._errors import UnsupportedError

from ..artifact import Texts
from . import clusters, contraction, layouts, ptx, ptxas, resources, sparse, versions
from .features import Features
from .heuristics import Choice

_LOOP_STAGES = re.compile(r"tt\.num_stages = (\d+) :")  # stages of a loop; without this, the option's number


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled function.

    Attributes:
      image: cubin or hsaco.
      texts: level -> text; empty unless asked for.
      threads: threads of a block, with those of worker warps.
      shared: bytes of dynamic shared memory.
      choice: the options that it was built with.
      descriptors: what the compiler decided on each tensor map parameter, in order.
      resources: numbers for people: registers, spills, and the like.
      waits: whether the function itself waits for the kernels in front of it, where that is needed.
    """

    image: bytes
    texts: Mapping[str, str]
    threads: int
    shared: int
    choice: Choice
    descriptors: list[dict[str, Any]]
    resources: dict[str, Any]
    waits: bool = False


def build(
    text: str, f: Features, choice: Choice, *, where: ir.Kernel, texts: bool = False, level: str = "ttir",
    tool: Any = None,
) -> Built:  # fmt: skip
    """Compile TTIR text, or that of another `level`. `tool`: the ptxas for it, None for triton's choice.

    Fewer pipeline stages are tried where so many take too much shared memory, unless the user gave their number.

    Raises:
      UnsupportedError: triton is missing, or one block needs more shared memory than it may have.
      ScatteredLanesError: a reduction would be wrong; see `layouts.py`.
    """
    versions.version()
    given = "num_stages" in choice.fixed
    asked = max(map(int, _LOOP_STAGES.findall(text)), default=1)
    while True:
        with ptxas.assembled_by(tool) if f.ptx else contextlib.nullcontext():
            built = _build(text, f, choice, texts, level)
        if isinstance(built, Built):
            return built
        if built <= f.shared:
            choice = dataclasses.replace(choice, registers=0)
            continue
        most = max(asked, choice.num_stages)
        if given or most <= 1:
            fewer = f" or fewer stages (num_stages={choice.num_stages})" if choice.num_stages > 1 else ""
            raise UnsupportedError(
                f"kernel {where.name}: one block needs {built} bytes of shared memory, but {f.arch} has "
                f"{f.shared}; use smaller tiles{fewer}",
                (where.loc.file, where.loc.line) if where.loc.file else None,
            )
        # Each stage but one takes as much memory, so that no number that fits is skipped; each attempt compiles anew.
        asked = max(1, min(most - 1, 1 + (most - 1) * f.shared // built))
        text = _LOOP_STAGES.sub(lambda n, most=asked: f"tt.num_stages = {min(int(n[1]), most)} :", text)
        choice = dataclasses.replace(choice, num_stages=min(choice.num_stages, asked))


def _fits(shared: int, f: Features, choice: Choice) -> bool:
    """Whether a block has so much shared memory; two of them where registers were limited to make room for a second."""
    return shared <= f.shared and not (choice.registers and 2 * (shared + 1024) > f.multiprocessor_shared)


def _build(text: str, f: Features, choice: Choice, texts: bool, level: str) -> Built | int:
    """The compiled function; or the bytes of shared memory that it would need, where so many do not fit. That is known
    before the assembler sees the text, which may take minutes over tiles that are much too large."""
    backend, module, context, path = _parse(text, f)
    body = module.get_function(module.get_entry_func_name()).get_operation().get_block()
    levels = {"ttgir": text} if texts and level == "ttgir" else {}
    built = _staged(backend, module, path, f, choice, levels, texts, level)
    body.erase()  # triton's modules own nothing: all of the kernel's ops would stay, as long as the process lives
    del context
    return built


def _staged(
    backend: Any, module: Any, path: str, f: Features, choice: Choice, levels: dict[str, str], texts: bool, level: str
) -> Built | int:
    """The compiled function of a parsed module, or bytes as `_build` gives them. `path`: the file that the text was in;
    `levels`: texts that there are already."""
    options = backend.parse_options(_options(f, choice))
    metadata: dict[str, Any] = {"target": backend.target, **options.__dict__}
    if level == "ttgir":  # the stage that is left out would have set this
        metadata["tensordesc_meta"] = module.get_tensordesc_metadata()
    value: Any = module
    waits = cached = False
    with _quiet():
        for name, stage in _stages(backend, options, level).items():
            value = stage(value, metadata)
            if name == "ttgir" and not versions.reduces_any_layout():
                layouts.check(str(value))
            if name == "ttgir" and versions.forgets_modifiers():
                cached = "cacheModifier = ca" in str(value)
            if name == "ptx":
                value = ptx.narrowed(sparse.products(ptx.evicting(ptx.mended(value), choice.evict)), choice.columns)
                value = clusters.met(value, choice.blocks, choice.num_warps) if choice.blocks > 1 else value
                value = ptx.letting(value) if f.dependents else value
                value = ptx.through_first_cache(value) if cached else value
                waits = ptx.WAITS in value
            if name == "llir" and not _fits(shared := int(metadata.get("shared") or 0), f, choice):
                return shared
            if name == "llir":  # equal kernels are equal bytes: the image must not name the file that the text was in
                value = contraction.wide_masks(contraction.rounded_products(_unplaced(value, path)))
            if texts and not isinstance(value, bytes):
                levels[name] = str(value)
    threads = f.lanes * int(metadata["num_warps"])
    shared = int(metadata.get("shared") or 0)
    found = resources.resources(value, levels, f, threads, shared) if texts else {}
    later = {"sass": functools.partial(resources.sass, value)} if texts and f.ptx else {}
    return Built(
        value, Texts(levels, later), threads, shared, choice, list(metadata.get("tensordesc_meta") or []), found, waits
    )


class _Silence(threading.local):
    """Whether this thread compiles for jtile."""

    on = False


_silence = _Silence()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep triton from printing, in this thread, all of the PTX when ptxas fails, beside the error that it raises.

    `redirect_stdout` would take the output of other threads with it, and kernels are compiled by several.
    """
    import triton.backends.nvidia.compiler as module

    if "print" not in vars(module):
        vars(module)["print"] = lambda *args, **kwargs: None if _silence.on else builtins.print(*args, **kwargs)
    _silence.on = True
    try:
        yield
    finally:
        _silence.on = False


def _options(f: Features, choice: Choice) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": choice.num_warps, "num_stages": choice.num_stages, "enable_fp_fusion": True}
    if f.ptx:
        options["enable_reflect_ftz"] = False  # the functions of libdevice keep subnormal numbers, as arithmetic does
        options |= _without_lines()
    options |= {"maxnreg": choice.registers} if choice.registers else {}
    return options | ({"num_ctas": choice.num_ctas} if choice.num_ctas != 1 else {})


def _without_lines() -> dict[str, Any]:
    """The assembler's options of the user, and one that leaves line numbers out of images, since nobody has the text
    that they count: with them and the PTX, which the assembler copies too, an image is three or four times as large."""
    from triton import knobs

    if knobs.compilation.disable_line_info or knobs.nvidia.disable_ptxas_opt:
        return {}
    return {"ptx_options": " ".join(filter(None, (knobs.nvidia.ptxas_options, "-suppress-debug-info")))}


def _unplaced(llir: str, path: str) -> str:
    """LLVM IR whose debug information names no temporary file."""
    folder, name = os.path.split(path)
    return llir.replace(name, "kernel.ttir").replace(f'directory: "{folder}"', 'directory: ""')


def _parse(text: str, f: Features) -> tuple[Any, Any, Any, str]:
    """The back end of triton for an architecture, the parsed module, its context, and the path it was read from."""
    from triton._C.libtriton import ir as mlir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget({"nvidia": "cuda", "amd": "hip"}[f.backend], f.processor, f.lanes)
    backend = make_backend(target)
    context = mlir.context()
    mlir.load_dialects(context)
    backend.load_dialects(context)
    handle, path = tempfile.mkstemp(suffix=".ttir")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        module = mlir.parse_mlir_module(path, context)
    finally:
        os.unlink(path)
    module.context = context
    return backend, module, context, path


def _stages(backend: Any, options: Any, level: str) -> dict[str, Any]:
    """The stages that text of a level goes through: TTIR goes through all, other levels through those behind them."""
    from triton.backends.compiler import Language

    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    names = list(stages)
    return {n: stages[n] for n in names[names.index(level) + (level != "ttir") :]}
