"""Tile IR kernel -> LLVM text -> relocatable object."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

from jtile import ir
from jtile._collector import paused
from jtile._config import current
from jtile.passes.spans import spans

from ..artifact import Artifact
from ..emitting import Marks
from . import (  # noqa: F401  their emitters register themselves
    emit_arrivals,
    emit_atomic,
    emit_control,
    emit_debug,
    emit_devices,
    emit_dot,
    emit_memory,
    emit_reduce,
    emit_scan,
    emit_shape,
    emit_sort,
    sizes,
)
from .cost import program_cost_ns
from .emitter import Emitter
from .isa import Isa, host_isa
from .llvm import Code, Module, Val, i64
from .values import Buffer, dense_strides

ENTRY = "jtile_entry"
AT_RUN_TIME = -1  # the number of programs of a kernel whose grid is not known yet


def emit_kernel(kernel: ir.Kernel, isa: Isa, marks: Marks | None = None) -> tuple[str, dict[str, int | str]]:
    """LLVM text of a kernel, and its launch attributes. Equal kernels give equal text. `marks`: behind each line stands
    where in the source it comes from."""
    kernel = spans(kernel)
    module = Module(isa.triple)
    module.attributes = f'nounwind "no-builtins" "prefer-vector-width"="{isa.vector_bits}"'
    refs = [*kernel.inputs, *kernel.outputs]
    shared = {r for i, o in kernel.aliases for r in (kernel.inputs[i], kernel.outputs[o])}
    shared |= emit_arrivals.shared_refs(kernel)
    params = [Val("ptr" if r in shared else "ptr noalias", f"%r{k}") for k, r in enumerate(refs)]
    names = [Val("i64", f"%p{k}") for k in range(len(kernel.grid))]
    ws = Val("ptr noalias", "%ws")
    symbols = {n: Val("i64", f"%d{k}") for k, n in enumerate(ir.launch_symbols(kernel))}
    code = Code(module, "jtile_program", [*params, *names, *symbols.values(), ws, Val("ptr", "%host")])
    em = Emitter(kernel, isa, module, code, marks)
    em.program = {k: i64(0) if n == 1 else v for k, (n, v) in enumerate(zip(kernel.grid, names, strict=True))}
    em.sizes = {n: sizes.emit_size(code, n, symbols) for n in sizes.sizes_of(kernel)}
    for k, r in enumerate(refs):
        em.env[r] = Buffer(Val("ptr", f"%r{k}"), r.shape, _strides(em, r.shape), r.dtype, None, owned=False)
    for r in kernel.scratch:
        em.env[r] = dataclasses.replace(em.new_buffer(r.shape, r.dtype), owned=False)
    if kernel.devices:
        em.devices = emit_devices.Devices(em)
    em.block(kernel.body)
    em.leave()
    em.arena.tick()
    for r in kernel.scratch:
        em.arena.touch(em.env[r].alloc)
    code.finish()
    workspace = em.arena.assign()
    _entry(module, kernel, len(refs))
    emit_arrivals.emit_number(module, kernel)
    launch = {
        "name": kernel.name,
        "programs": AT_RUN_TIME if symbols else math.prod(kernel.grid),
        "workspace": workspace,
        "cost": program_cost_ns(kernel),
        "isa": f"{isa.arch}:{','.join(sorted(isa.features))}",
        "sites": json.dumps(em.sites, sort_keys=True),
    }
    if kernel.devices:
        launch |= emit_devices.layout(kernel)[1]
    if symbols:
        sizes.emit_grid(module, kernel)
        launch["dims"] = sizes.dims_attribute(kernel)
    return em.arena.patch(module.text()), launch


def _strides(em: Emitter, shape: tuple[ir.Size, ...]) -> tuple[int | Val, ...]:
    """Row-major strides of a Ref in elements."""
    sides = [em.size(n) for n in shape]
    if all(isinstance(n, int) for n in sides):
        return dense_strides(shape)
    out, acc = [], 1
    for n in reversed(sides):
        out.append(acc)
        acc = acc * n if isinstance(acc, int) and isinstance(n, int) else em.code.mul(acc, n)
    return tuple(reversed(out))


def _entry(module: Module, kernel: ir.Kernel, refs: int) -> None:
    """`jtile_entry`: decode each linear program id (last axis fastest) and run the program."""
    names = ["bufs", "dims", "begin", "end", "ws", "host"]
    types = ["ptr", "ptr", "i64", "i64", "ptr", "ptr"]
    bufs, dims, begin, end, ws, host = params = [Val(t, f"%{n}") for t, n in zip(types, names, strict=True)]
    code = Code(module, ENTRY, params, ret="i32", linkage="dso_local")
    ptrs = [code.load("ptr", code.gep("ptr", bufs, k), align=8) for k in range(refs)]
    symbols = sizes.load_symbols(code, kernel, dims)
    grid = [sizes.emit_size(code, n, symbols) if isinstance(n, ir.Extent) else i64(max(n, 1)) for n in kernel.grid]
    with code.loop(begin, end) as p:
        ids: list[Val] = []
        rest = p
        for n in reversed(grid):
            ids.append(code.let("i64", f"urem {rest}, {n.name}"))
            rest = code.let("i64", f"udiv {rest}, {n.name}")
        args = [*ptrs, *reversed(ids), *symbols.values(), ws, host]
        code.do(f"call void @jtile_program({', '.join(map(str, args))})")
    code.finish(Val("i32", "0"))


def initialize(isa: Isa) -> None:
    """Prepare LLVM for the host, or for all targets when another one is asked for. Idempotent."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if isa.arch != host_isa().arch:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()


def new_machine(isa: Isa, level: int):
    """LLVM's target machine for position-independent small-model code; `level`: how much it optimises, from 0."""
    import llvmlite.binding as llvm

    target = llvm.Target.from_triple(isa.triple)
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.feature_string, opt=level, reloc="pic", codemodel="small"
    )


_kept = functools.cache(new_machine)  # a new one works out what the instruction set allows: 0.7 ms a kernel


def machine(isa: Isa):
    """The target machine of kernels, which all of them share: llvmlite calls LLVM from one thread at a time."""
    return _kept(isa, 2 if current().optimize else 0)


def _tuning():
    """The text is vectorised and unrolled already: LLVM's own attempts double the code and the compile time for
    nothing."""
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = options.loop_unrolling = False
    return options


@paused()
def compile_kernel(kernel: ir.Kernel, isa: Isa | None = None, *, texts: bool = False) -> Artifact:
    """Compile a kernel for an instruction set (default: this machine).

    The artifact's `launch` holds the attributes of the custom call: name, programs, workspace (bytes a worker), cost
    (nanoseconds a program), isa, sites. With `texts` it keeps `"llvm"` (as emitted), `"llvm_opt"` and `"asm"`.
    """
    isa = isa or host_isa()
    text, launch = emit_kernel(kernel, isa)
    image, levels = assemble(text, isa, texts)
    return Artifact("cpu", image, {"llvm": text, **levels} if texts else {}, launch)


def assemble(text: str, isa: Isa, texts: bool = False) -> tuple[bytes, dict[str, str]]:
    """LLVM text to an object; with `texts`, the optimised LLVM text and the assembly too.

    Where the option `optimize` is off, LLVM does nothing but choose instructions: to inline functions and to make
    registers of variables would be a third of the time to compile, for code that runs once.
    """
    import llvmlite.binding as llvm

    initialize(isa)
    module = llvm.parse_assembly(text, llvm.create_context())  # the global context would keep all that is parsed in it
    tm = machine(isa)
    module.triple = isa.triple
    module.data_layout = str(tm.target_data)
    if current().optimize:
        # Each module gets its own builder, though 2 to 3 KiB of it stay when llvmlite frees it: a run leaves
        # callbacks in its builder, which all later runs of that builder would call.
        _optimise(module, llvm.create_pass_builder(tm, _tuning()))
    levels = {"llvm_opt": str(module), "asm": tm.emit_assembly(module)} if texts else {}
    return tm.emit_object(module), levels


def _optimise(module: Any, builder: Any) -> None:
    """Inline first the functions that the text marks so, then simplify every function once. LLVM's own order simplifies
    a function before and after it is inlined into its caller: twice the time for the same machine code."""
    import llvmlite.binding as llvm

    with _freed(llvm.create_new_module_pass_manager()) as inliner:
        inliner.add_always_inliner_pass()
        inliner.add_ipsccp_pass()  # arguments that are the same in all calls of a function become constants in it
        inliner.run(module, builder)
    with _freed(builder.getFunctionPassManager()) as simplifier:
        for function in module.functions:
            if not function.is_declaration:
                simplifier.run(function, builder)


@contextlib.contextmanager
def _freed(manager: Any) -> Iterator[Any]:
    """A pass manager of llvmlite's, freed at the end: its class inherits a `_dispose` that does nothing before the one
    that frees, and 60 KiB of every compilation would stay."""
    from llvmlite.binding.newpassmanagers import NewPassManager

    try:
        yield manager
    finally:
        NewPassManager._dispose(manager)
        manager.detach()


__all__ = ["ENTRY", "compile_kernel", "emit_kernel"]
