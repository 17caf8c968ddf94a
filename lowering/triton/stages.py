"""TTIR text through the stages of the triton package to an image, without a GPU and without triton's own cache."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import tempfile
from typing import Any

from jtile import ir
from jtile._errors import UnsupportedError
from jtile.lowering.triton import resources, versions
from jtile.lowering.triton.features import Features
from jtile.lowering.triton.heuristics import Choice


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled function.

    Attributes:
      image: cubin or hsaco.
      texts: level -> text; empty unless asked for.
      threads: of a block, with those of worker warps.
      shared: bytes of dynamic shared memory.
      choice: the options that it was built with.
      descriptors: what the compiler decided on each tensor map parameter, in order.
      resources: numbers for people: registers, spills, and the like.
    """

    image: bytes
    texts: dict[str, str]
    threads: int
    shared: int
    choice: Choice
    descriptors: list[dict[str, Any]]
    resources: dict[str, Any]


def build(text: str, f: Features, choice: Choice, *, where: ir.Kernel, texts: bool = False) -> Built:
    """Compile TTIR text; fewer pipeline stages are tried where the chosen number takes too much shared memory.

    Raises:
      UnsupportedError: triton is missing, or one block needs more shared memory than it may have.
    """
    versions.version()
    while True:
        built = _build(text, f, choice, texts)
        if built.shared <= f.shared:
            return built
        if choice.num_stages <= 1 or "num_stages" in choice.fixed:
            raise UnsupportedError(
                f"kernel {where.name}: one block needs {built.shared} bytes of shared memory, but {f.arch} has "
                f"{f.shared}; use smaller tiles or fewer stages (num_stages={choice.num_stages})",
                (where.loc.file, where.loc.line) if where.loc.file else None,
            )
        choice = dataclasses.replace(choice, num_stages=choice.num_stages - 1)


def _build(text: str, f: Features, choice: Choice, texts: bool) -> Built:
    backend, module, context = _parse(_pipelined(text, choice), f)
    options = backend.parse_options(_options(f, choice))
    metadata: dict[str, Any] = {"target": backend.target, **options.__dict__}
    levels: dict[str, str] = {}
    value: Any = module
    with contextlib.redirect_stdout(io.StringIO()) as said:  # on a failure of ptxas, triton prints the PTX
        try:
            for name, stage in _stages(backend, options).items():
                value = stage(value, metadata)
                if texts and not isinstance(value, bytes):
                    levels[name] = str(value)
        except Exception as e:
            raise RuntimeError(f"{e}\n{said.getvalue()[:4000]}") from e
    del context
    threads = f.lanes * int(metadata["num_warps"])
    shared = int(metadata.get("shared") or 0)
    found: dict[str, Any] = {}
    if texts:
        found = resources.resources(value, levels, f, threads, shared)
        levels |= {"sass": resources.sass(value)} if f.cuda else {}
    return Built(value, levels, threads, shared, choice, list(metadata.get("tensordesc_meta") or []), found)


def _pipelined(text: str, choice: Choice) -> str:
    """The stages that loops ask for, at most those of the choice; what the user gave holds for all of them."""

    def stages(asked: re.Match[str]) -> str:
        n = int(asked[1])
        n = n if n == 1 else choice.num_stages if "num_stages" in choice.fixed else min(n, choice.num_stages)
        return f"tt.num_stages = {n} :"

    return re.sub(r"tt\.num_stages = (\d+) :", stages, text)


def _options(f: Features, choice: Choice) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": choice.num_warps, "num_stages": choice.num_stages, "enable_fp_fusion": True}
    if f.cuda:
        options["enable_reflect_ftz"] = False  # the functions of libdevice keep subnormal numbers, as arithmetic does
    return options | ({"num_ctas": choice.num_ctas} if choice.num_ctas != 1 else {})


def _parse(text: str, f: Features) -> tuple[Any, Any, Any]:
    """The back end of triton for an architecture, and the parsed module with its context."""
    from triton._C.libtriton import ir as mlir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", f.capability, 32) if f.cuda else GPUTarget("hip", f.arch, f.lanes)
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
    return backend, module, context


def _stages(backend: Any, options: Any) -> dict[str, Any]:
    from triton.backends.compiler import Language

    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    return stages
