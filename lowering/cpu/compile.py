"""Tile IR kernel -> LLVM text -> relocatable object."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jtile import ir
from jtile._collector import paused
from jtile._config import current
from jtile.passes.patches import patches
from jtile.passes.spans import spans

from ..artifact import Artifact
from ..emitting import Marks
from . import (  # noqa: F401  their emitters register themselves
    alike,
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
from .gemm import ANY_ORDER, Order
from .grids import coarse_grid, is_small
from .isa import Isa, host_isa
from .llvm import Code, Module, Val, i64
from .multiply_add import multiply_adds
from .values import Buffer, dense_strides

ENTRY = "jtile_entry"
KEEPING = "jtile_entry_keeping"  # of a kernel whose first word of the workspace is to be zero before a call
SHORT = 250  # lines of a kernel that needs LLVM's shorter list of passes alone
AT_RUN_TIME = -1  # the number of programs of a kernel whose grid is not known yet


Emitted = tuple[str, dict[str, int | str]]


def emit_programs(kernel: ir.Kernel, isa: Isa, marks: Marks | None = None) -> Emitted:
    """`emit_kernel` of a kernel, of whose small programs some may run as one, where that changes no bit of what they
    compute."""
    small = is_small(kernel)
    kernel = multiply_adds(kernel) if small else kernel
    coarse, terms = coarse_grid(kernel, isa)
    if coarse is kernel or not any(isinstance(op, ir.Dot) for op in kernel.body.walk()):
        return _emit(coarse, isa, marks, contracts=not small)[:2]
    # The orders of the sums of products are the emitter's business.
    text, launch, orders = _emit(kernel, isa, marks, contracts=not small)
    if None not in orders and len({order.banks for order in orders if order}) == 1:
        (banks,) = {order.banks for order in orders if order}
        *one, found = _emit(coarse, isa, marks, Order(banks, terms if banks else 0), contracts=not small)
        if found == orders:
            text, launch = one
    return text, launch


def emit_kernel(kernel: ir.Kernel, isa: Isa, marks: Marks | None = None) -> Emitted:
    """LLVM text of a kernel, and its launch attributes. Equal kernels give equal text. `marks`: behind each line stands
    where in the source it comes from."""
    small = is_small(kernel)
    return _emit(multiply_adds(kernel) if small else kernel, isa, marks, contracts=not small)[:2]


def _emit(
    kernel: ir.Kernel, isa: Isa, marks: Marks | None = None, order: Order = ANY_ORDER, *, contracts: bool
) -> tuple[str, dict[str, int | str], set[Order | None]]:
    """`emit_kernel`, and the orders of the sums of its products; `order`: that they shall have; `contracts`: whether
    LLVM may round a product and what is added to it once (small tiles have `multiply_adds`)."""
    kernel = patches(spans(kernel))
    module = Module(isa.triple)
    module.attributes = f'nounwind "no-builtins" "prefer-vector-width"="{isa.vector_bits}"'
    names = ["bufs", "dims", "begin", "end", "ws", "host"]
    types = ["ptr", "ptr", "i64", "i64", "ptr", "ptr"]
    bufs, dims, begin, end, ws, _ = params = [Val(t, f"%{n}") for t, n in zip(types, names, strict=True)]
    common = alike.alike(kernel)
    code = Code(module, KEEPING if common else ENTRY, params, ret="i32", linkage="dso_local")
    em = Emitter(kernel, isa, module, code, marks)
    em.order, em.contracts = order, contracts
    symbols = sizes.load_symbols(code, kernel, dims)
    grid = [sizes.emit_size(code, n, symbols) if isinstance(n, ir.Extent) else i64(max(n, 1)) for n in kernel.grid]
    em.sizes = {n: sizes.emit_size(code, n, symbols) for n in sizes.sizes_of(kernel)}
    shared = {r for i, o in kernel.aliases for r in (kernel.inputs[i], kernel.outputs[o])}
    shared |= emit_arrivals.shared_refs(kernel)
    if common:
        body = code.detour()
        em.workspace = code.gep("i8", ws, alike.HEADER)
        code.rejoin(body)
    code.own(ws)
    for k, r in enumerate([*kernel.inputs, *kernel.outputs]):
        pointer = code.load("ptr", code.gep("ptr", bufs, k), align=8)
        em.env[r] = Buffer(pointer, r.shape, _strides(em, r.shape), r.dtype, None, owned=False)
        if r not in shared:
            code.own(pointer)
    for r in kernel.scratch:
        em.env[r] = dataclasses.replace(em.new_buffer(r.shape, r.dtype), owned=False)
    if kernel.devices:
        em.devices = emit_devices.Devices(em)
    if not kernel.devices and any(isinstance(op, ir.Atomic) for op in kernel.body.walk()):
        em.alone = code.cmp("icmp", "eq", code.sub(end, begin), functools.reduce(code.mul, grid, i64(1)))
    slots = alike.slots_of(em, common) if common else []
    with code.loop(begin, end) as p:
        em.program, em.range = dict(enumerate(_place(code, p, grid))), (p, begin)
        if common:
            alike.emit(em, common, slots, ws, p, grid)
        em.block(kernel.body)
        em.leave()
        em.arena.tick()
        for buf in (*slots, *(em.env[r] for r in kernel.scratch)):
            em.arena.touch(buf.alloc)
    code.finish(Val("i32", "0"))
    workspace = em.arena.assign() + (alike.HEADER if common else 0)
    emit_arrivals.emit_number(module, kernel)
    if symbols:
        sizes.emit_grid(module, kernel)
    return em.arena.patch(module.text()), _launch(em, kernel, isa, workspace, dynamic=bool(symbols)), em.orders


def _launch(em: Emitter, kernel: ir.Kernel, isa: Isa, workspace: int, *, dynamic: bool) -> dict[str, Any]:
    """The launch attributes of emitted code that needs so many bytes of a worker's memory."""
    found: dict[str, Any] = {
        "name": kernel.name,
        "programs": AT_RUN_TIME if dynamic else math.prod(kernel.grid),
        "workspace": workspace,
        "cost": program_cost_ns(kernel, isa),
        "isa": f"{isa.arch}:{','.join(sorted(isa.features))}",
        "sites": json.dumps(em.sites, sort_keys=True),
    }
    if kernel.devices:
        found |= emit_devices.layout(kernel)[1]
    return found | ({"dims": sizes.dims_attribute(kernel)} if dynamic else {})


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


def _place(code: Code, p: Val, grid: Sequence[Val]) -> list[Val]:
    """The place in the grid of a program, by its number: the last axis is the fastest. The first one's remainder, too,
    says to LLVM how large the place may be."""
    ids: list[Val] = []
    for n in reversed(grid):
        one = n.name == "1"
        ids.append(i64(0) if one else code.binary("urem", p, n))
        p = p if one else code.binary("udiv", p, n)
    return ids[::-1]


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


@paused()
def compile_kernel(kernel: ir.Kernel, isa: Isa | None = None, *, texts: bool = False, coarse: bool = True) -> Artifact:
    """Compile a kernel for an instruction set (default: this machine). `coarse`: small programs may run as one.

    The artifact's `launch` holds the attributes of the custom call: name, programs, workspace (bytes a worker), cost
    (nanoseconds a program), isa, sites. With `texts` it keeps `"llvm"` (as emitted), `"llvm_opt"` and `"asm"`.
    """
    isa = isa or host_isa()
    text, launch = emit_programs(kernel, isa) if coarse else emit_kernel(kernel, isa)
    image, levels = assemble(text, isa, texts)
    return Artifact("cpu", image, {"llvm": text, **levels} if texts else {}, launch)


def assemble(text: str, isa: Isa, texts: bool = False, *, lines: int | None = None) -> tuple[bytes, dict[str, str]]:
    """LLVM text to an object; with `texts`, the optimised LLVM text and the assembly too. `lines`: of the kernel, where
    the text says more than it, since kernels are optimised by their length.

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
        _optimise(module, tm, short=(text.count("\n") if lines is None else lines) <= SHORT)
    with _loops_as_they_are():
        levels = {"llvm_opt": str(module), "asm": tm.emit_assembly(module)} if texts else {}
        return tm.emit_object(module), levels


def _optimise(module: Any, tm: Any, *, short: bool = False) -> None:
    """Inline first the functions that the text marks so, then simplify every function once. LLVM's own order simplifies
    a function before and after it is inlined into its caller: twice the time for the same machine code.

    The text is vectorised and unrolled, its loops test at their end, and what is the same in all turns of one, or was
    computed before, is written once (`invariant`). In a `short` kernel LLVM's list of passes, which takes four times as
    long, gains nothing that was measured; in a long one it unrolls loops of few turns, which is 3 % of the time of
    windows.
    """
    import llvmlite.binding as llvm

    # Each module gets its own builder, though 2 to 3 KiB of it stay when llvmlite frees it: a run leaves callbacks in
    # its builder, which all later runs of that builder would call.
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = options.loop_unrolling = False
    builder = llvm.create_pass_builder(tm, options)
    functions = [function for function in module.functions if not function.is_declaration]
    with _freed(llvm.create_new_module_pass_manager()) as passes:
        if len(functions) > 1:
            passes.add_always_inliner_pass()
            passes.add_ipsccp_pass()  # arguments that are the same in all calls of a function become constants in it
        if short:
            passes.add_sroa_pass()
            passes.add_instruction_combine_pass()
            passes.add_simplify_cfg_pass()
        passes.run(module, builder)
    if short:
        return
    with _freed(builder.getFunctionPassManager()) as simplifier:
        for function in module.functions:
            if not function.is_declaration:
                simplifier.run(function, builder)


_SWITCH = threading.Lock()
_SWITCHED = range(20, 23)  # LLVM's versions that were tried: it ends the process at an option that it does not know


@contextlib.contextmanager
def _loops_as_they_are() -> Iterator[None]:
    """Code generation without LLVM's strength reduction of loops, which gives each address of a loop a variable of its
    own: a third to a half of the time of the code generator, for code that is as quick without (docs/notes/compiling.md
    has the exceptions). The option is one for all of LLVM in the process (which Numba shares), so that it is taken back
    at once."""
    import llvmlite.binding as llvm

    if llvm.llvm_version_info[0] not in _SWITCHED:
        yield
        return
    with _SWITCH:
        try:
            llvm.set_option("jtile", "-disable-lsr=true")  # within: an interrupt may come as soon as it has returned
            yield
        finally:
            llvm.set_option("jtile", "-disable-lsr=false")


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


__all__ = ["ENTRY", "compile_kernel", "emit_kernel", "emit_programs"]
