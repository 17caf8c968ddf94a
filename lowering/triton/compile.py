"""Tile IR kernel -> TTIR text and launch record -> cubin or hsaco."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jtile import ir
from jtile._errors import UnsupportedError
from jtile.ir.block import level_of
from jtile.ir.extents import call

from ..artifact import Artifact
from ..emitting import Marks
from ..targets import Target
from . import (  # noqa: F401  their emitters register themselves
    emit_arrivals,
    emit_atomic,
    emit_basics,
    emit_control,
    emit_debug,
    emit_devices,
    emit_dot,
    emit_dot_scaled,
    emit_elementwise,
    emit_memory,
    emit_reduce,
    emit_scan,
    emit_scatter,
    emit_shape,
    emit_sort,
    heuristics,
    layouts,
    stages,
)
from .emit_basics import emit_size, start_program, static_programs
from .emitter import Buffer, Emitter, memory_elem
from .features import MAX_BLOCKS, Features
from .hazards import in_order
from .record import Record, expression
from .targets import features_of
from .ttir import Val, bits

RESIDENT = 2048  # blocks of a kernel with private memory: each runs many programs, so that the memory is bounded
WORKSPACE = 256 << 20  # bytes of private memory of all blocks, where one block does not need more
MAX_PARAMETERS = 512  # parameters of a launch, as ffi/csrc/record.h has it; two of them are triton's own


def emit_kernel(
    kernel: ir.Kernel,
    f: Features,
    *,
    isolate: bool = False,
    num_stages: int | None = None,
    emitter: type[Emitter] = Emitter,
    marks: Marks | None = None,
) -> tuple[str, Record]:
    """TTIR text of a kernel, and its launch record. Equal kernels give equal text.

    Args:
      isolate: see `layouts.py`.
      num_stages: stages of every loop, whatever it asks for itself; None leaves that to the loops.
      emitter: a class of emitters for processors that are no GPUs.
      marks: adds to each line a comment with the place in the source that it comes from.
    """
    record = Record()
    em = emitter(kernel, f, record, isolate=isolate, num_stages=num_stages, marks=marks)
    parameters(em)
    devices = em.memo["devices"] = _devices(em)
    scratch = _scratch(em)
    blocks = _blocks(kernel, sum(map(buffer_bytes, scratch)), f)
    record.grid = blocks if isinstance(blocks, int) else expression(blocks, _numbers(kernel))
    _workspace(em, scratch, blocks)
    code = em.code
    block = code.let("tt.get_program_id x : i32", (), "i32")
    if scratch or not isinstance(blocks, int) or blocks != static_programs(kernel):
        _program_loop(em, block, scratch)
    else:
        start_program(em, block)
        em.block(kernel.body)
    if devices is not None:
        devices.end()
        record.devices = devices.facts()
    code.do("tt.return")
    if len(em.params) > MAX_PARAMETERS - 2:
        raise UnsupportedError(
            f"kernel {kernel.name} has {len(em.params)} parameters (arrays, tensor maps and dynamic sizes); a launch "
            f"on a GPU takes {MAX_PARAMETERS - 2}: stack arrays of equal shapes, or split the kernel"
        )
    params = ", ".join(f"{p.name}: {p.elem}{p_attrs}" for p, p_attrs in em.params)
    text = f"module {{\n  tt.func public @{symbol(kernel)}({params}) {{\n{code.text()}\n  }}\n}}\n"
    return text, record


def symbol(kernel: ir.Kernel) -> str:
    """The name of a kernel's function: an identifier."""
    return "jtile_" + "".join(c if c.isalnum() and c.isascii() else "_" for c in kernel.name)


def buffer_bytes(ref: ir.Value) -> int:
    """Bytes of the array of a Ref, rounded up to 16."""
    return -(-math.prod(ref.shape) * ref.type.info.bits // 128) * 16


def _numbers(kernel: ir.Kernel) -> dict[str, int]:
    """The number of each symbol of a kernel with dynamic sizes."""
    return {name: k for k, name in enumerate(ir.launch_symbols(kernel))}


def parameters(em: Emitter) -> None:
    """Add the parameters of the function: arrays, then the symbols of dynamic sizes, then the counters."""
    kernel = em.kernel
    refs = [*kernel.inputs, *kernel.outputs]
    pointers = [em.pointer_param(k, memory_elem(r.dtype)) for k, r in enumerate(refs)]
    numbers, sources = _numbers(kernel), ir.sources(kernel)
    for name, k in numbers.items():
        em.symbols[name] = em.param({"kind": "i32", "value": [f"s{k}"]}, "i32")
        em.record.dims += [x for s in sources[name] for x in (s.operand, s.axis, k, s.multiple)]
    for k, r in enumerate(refs):
        shape = tuple(n if isinstance(n, int) else emit_size(em, n) for n in r.shape)
        em.refs[r] = Buffer(pointers[k], shape, _strides(em, shape), r.dtype, k)
    counters = sum(size for _, size in ir.counters_of(kernel).values())
    if counters:
        em.counters = em.param({"kind": "counters", "count": counters}, "!tt.ptr<i32>", " {tt.divisibility = 16 : i32}")


def _strides(em: Emitter, shape: tuple[int | Val, ...]) -> tuple[int | Val, ...]:
    """Row-major strides in elements; i64 scalars where a size is not known."""
    out: list[int | Val] = []
    acc: int | Val = 1
    for n in reversed(shape):
        out.append(acc)
        if isinstance(acc, int) and isinstance(n, int):
            acc *= n
        else:
            a, b = (em.code.const(x, "i64") if isinstance(x, int) else em.code.to_int(x, "i64") for x in (acc, n))
            acc = em.code.mul(a, b)
    return tuple(reversed(out))


def _devices(em: Emitter) -> emit_devices.Devices | None:
    """The state and the first code of a kernel that talks to other devices; None for other kernels."""
    kernel = em.kernel
    if not kernel.devices:
        return None
    if not all(isinstance(n, int) for n in (*kernel.grid, *(n for v in kernel.shared for n in v.shape))):
        raise UnsupportedError(
            f"kernel {kernel.name}: target {em.features.arch!r} has no kernels of dynamic grids or memory that talk to "
            "other devices; mark fewer dimensions dynamic",
            (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
        )
    return emit_devices.Devices(em)


def _scratch(em: Emitter) -> list[ir.Value]:
    """The private Refs of a program, which its scratch memory holds."""
    kernel = em.kernel
    refs = [*kernel.scratch, *(op.results[0] for op in kernel.body.walk() if isinstance(op, ir.Alloc))]
    for r in refs:
        if not all(isinstance(n, int) for n in r.shape):
            raise UnsupportedError(
                f"kernel {kernel.name}: target {em.features.arch!r} has no memory of dynamic size for a program "
                f"({r.type}); give its dimensions a static bound, or mark fewer dimensions dynamic",
                (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
            )
    return refs


def _blocks(kernel: ir.Kernel, private: int, f: Features) -> ir.Size:
    """How many blocks run the grid; fewer than programs where each block has private memory."""
    limit = max(1, min(RESIDENT, WORKSPACE // max(private, 1))) if private else MAX_BLOCKS
    limit = min(limit, f.blocks)
    if kernel.devices and ir.waits(kernel):
        limit = MAX_BLOCKS  # all of them run at once, and no block runs a second one
    programs = math.prod(kernel.grid)
    return min(programs, limit) if isinstance(programs, int) else call("min", programs, limit)


def _workspace(em: Emitter, scratch: list[ir.Value], blocks: ir.Size) -> None:
    """Add memory for private Refs: a further result of the call; on an NPU one result for each Ref, so that pointers
    keep their type."""
    if not scratch:
        return
    if em.features.npu:
        for r in scratch:
            size = expression(buffer_bytes(r) * blocks, _numbers(em.kernel))
            em.refs[r] = Buffer(em.extra_result(size, memory_elem(r.dtype)), r.shape, _strides(em, r.shape), r.dtype)
        return
    size = sum(map(buffer_bytes, scratch)) * blocks
    em.workspace = em.extra_result(expression(size, _numbers(em.kernel)), "i8")


def _program_loop(em: Emitter, block: Val, scratch: list[ir.Value]) -> None:
    """Emit the loop in which a block runs the programs `block, block + blocks, ...`."""
    code, programs = em.code, static_programs(em.kernel)
    # The counter goes beyond the last program by up to the number of blocks.
    wide = "i32" if scratch and programs is not None and programs <= MAX_BLOCKS - RESIDENT else "i64"
    blocks = code.to_int(code.let("tt.get_num_programs x : i32", (), "i32"), wide)
    if programs is None:
        count = functools.reduce(code.mul, [code.to_int(emit_size(em, n), wide) for n in em.kernel.grid])
    else:
        count = code.const(programs, wide)
    _private(em, scratch, block)
    p, first = Val(code.name(), (), wide), code.to_int(block, wide)
    code.do(f"scf.for {p.name} = {first.name} to {count.name} step {blocks.name} : {wide} {{")
    with code.region():
        start_program(em, p)
        em.block(em.kernel.body)
        if scratch:
            em.barrier()
    code.do("} {tt.num_stages = 1 : i32}" if in_order(em, em.kernel.body) else "}")


def _private(em: Emitter, scratch: list[ir.Value], block: Val) -> None:
    """Give each private Ref its part of the block's part of the workspace."""
    if not scratch:
        return
    code, at = em.code, 0
    if em.features.npu:
        for r in scratch:
            buf = em.refs[r]
            first = code.scale(code.to_int(block, "i64"), 8 * buffer_bytes(r) // bits(memory_elem(r.dtype)))
            kind = f"{buf.pointer.elem}, i64"
            pointer = code.let(f"tt.addptr {buf.pointer.name}, {first.name} : {kind}", (), buf.pointer.elem)
            em.refs[r] = dataclasses.replace(buf, pointer=pointer)
        return
    size = code.const(sum(map(buffer_bytes, scratch)), "i64")
    base = code.mul(code.to_int(block, "i64"), size)
    for r in scratch:
        offset = code.shift(base, at)
        kind = f"{em.workspace.elem}, i64"
        pointer = code.let(f"tt.addptr {em.workspace.name}, {offset.name} : {kind}", (), em.workspace.elem)
        pointer = code.bitcast(pointer, f"!tt.ptr<{memory_elem(r.dtype)}>")
        em.refs[r] = Buffer(pointer, r.shape, _strides(em, r.shape), r.dtype)
        at += buffer_bytes(r)


def compile_kernel(
    kernel: ir.Kernel, target: Target, options: Mapping[str, Any] | None = None, *, texts: bool = False
) -> Artifact:
    """Compile a kernel (after the passes) for a GPU: on Hopper at the block level where it has a plan there.

    Args:
      kernel: Tile IR at tile level, or at the block level where the target has warpgroup products.
      options: `num_warps`, `num_stages`, `num_ctas`; what is missing or None is chosen by `heuristics`; those of
        `lowering.triton.block.passes.block_level`.
      texts: keep the text of every level: `ttir`, `ttgir`, `llir`, `ptx` and `sass`, or `amdgcn`; on Hopper `schedule`,
        the plan at the block level or why there is none, and `block`, the kernel at that level.

    Raises:
      UnsupportedError: triton is missing, or the kernel needs more shared memory than a block may have.
    """
    f = features_of(target)
    schedule: dict[str, str] = {}
    defect: dict[str, bool] = {}
    if f.warpgroup_products and (not kernel.devices or level_of(kernel) == "block"):
        from .block import Defect, specialised

        found = specialised(kernel, target, options or {}, texts=texts)
        if isinstance(found, Artifact):
            return found
        schedule = {"schedule": found} if texts else {}
        defect = {"defect": True} if isinstance(found, Defect) else {}
    choice = heuristics.choose(kernel, f, options or {})
    depth = choice.num_stages if "num_stages" in choice.fixed else None
    text, record = emit_kernel(kernel, f, num_stages=depth)
    heuristics.check_gathers(kernel, text, choice)
    heuristics.check_clusters(kernel, text, choice)
    try:
        built = stages.build(text, f, choice, where=kernel, texts=texts)
    except layouts.ScatteredLanesError:
        text, record = emit_kernel(kernel, f, isolate=True, num_stages=depth)
        built = stages.build(text, f, choice, where=kernel, texts=texts)
    launch = {
        "name": kernel.name,
        "record": record.finish(kernel.name, symbol(kernel), f, built),
        "extra": record.extra,
        "resources": built.resources,
        "level": "tile",
    } | defect
    return Artifact(target.name, built.image, schedule | built.texts, launch)
