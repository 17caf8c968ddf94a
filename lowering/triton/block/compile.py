"""Block-level kernels: TTGIR text and launch record, and the compiled image."""

from __future__ import annotations

import math

from jtile import ir
from jtile._collector import paused
from jtile._errors import UnsupportedError

from ...artifact import Artifact
from ...emitting import Marks
from ...targets import Target
from .. import ptxas, stages
from ..compile import MAX_BLOCKS, parameters, symbol
from ..features import Features
from ..heuristics import Choice
from ..record import Record
from ..targets import features_of
from . import (  # noqa: F401  their emitters register themselves
    emit_control,
    emit_copies,
    emit_devices,
    emit_dots,
    emit_moves,
    emit_pairs,
    emit_roles,
    emit_shared,
)
from .alike import Shared, shared
from .emit_roles import registers_at_start, roles_of
from .emitter import BlockEmitter
from .layouts import aliased
from .spread import spread


def emit_block_kernel(
    kernel: ir.Kernel, f: Features, marks: Marks | None = None, cluster: Shared | None = None
) -> tuple[str, Record, str]:
    """TTGIR text of a kernel at the block level, its launch record, and the kernel's own text with the layout of every
    value. Equal kernels give equal text.

    Raises:
      UnsupportedError: an op of the kernel has no form in a role; the message says which and what to do.
    """
    record = Record()
    em = BlockEmitter(kernel, f, record, marks=marks)
    em.cluster = cluster
    parameters(em)
    if kernel.devices:
        em.memo["devices"] = emit_devices.BlockDevices(em)
    programs = math.prod(kernel.grid) if all(isinstance(n, int) for n in kernel.grid) else None
    if programs is None or programs > MAX_BLOCKS:
        em.refuse(kernel.body.ops[0], f"grids of at most {MAX_BLOCKS} blocks, known when it is compiled")
    record.grid = programs // (cluster.blocks if cluster else 1)
    with paused():
        warps = emit_roles.emit_body(em)
    if kernel.devices:
        emit_devices.devices(em).end()
        record.devices = emit_devices.devices(em).facts()
    params = ", ".join(f"{p.name}: {p.elem}{p_attrs}" for p, p_attrs in em.params)
    text = ir.print_kernel(kernel, note=lambda op: ", ".join(em.layouts[r] for r in op.results if r in em.layouts))
    body, names = aliased(f"  tt.func public @{symbol(kernel)}({params}) {{\n{em.code.text()}\n    tt.return\n  }}\n")
    head = "".join(f"{name} = {layout}\n" for name, layout in names.items())
    numbers = {"num-ctas": 1, "num-warps": warps, "threads-per-warp": f.lanes}
    registers = registers_at_start(roles_of(kernel))
    numbers |= {"maxnreg": registers} if registers else {}
    attributes = ", ".join(f'"ttg.{k}" = {v} : i32' for k, v in numbers.items())
    target = f'ttg.target = "cuda:{f.processor}"'
    module = f"{head}module attributes {{{attributes}, {target}}} {{\n{body}}}\n"
    for name, layout in names.items():
        text = text.replace(layout, name)
    return module, record, "".join(f"// {line}\n" for line in head.split("\n") if line) + text


def compile_block_kernel(
    kernel: ir.Kernel, target: Target, *, texts: bool = False, multicast: int = 1, apart: int = 1
) -> Artifact:
    """Compile a kernel at the block level for a target with warpgroup products.

    Args:
      kernel: Tile IR at the block level.
      texts: keep the text of every level: `block`, `ttgir`, `llir`, `ptx`, `sass`.

    Raises:
      UnsupportedError: another target, an op without a form in a role, or more shared memory than a block has.
    """
    f = features_of(target)
    if not f.warpgroup_products:
        raise UnsupportedError(
            f"kernel {kernel.name}: it is at the block level, whose ops are those of sm_90, not of {f.arch}: write it "
            "at tile level",
            (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
        )
    cluster = shared(kernel, multicast)
    if apart > 1:
        kernel, cluster = spread(kernel, apart)
    text, record, block = emit_block_kernel(kernel, f, cluster=cluster)
    roles = roles_of(kernel)
    narrow = tuple((n, columns) for n, columns in sorted(record.columns.items()) if n != columns)
    evict = tuple(sorted(record.evict.items()))
    choice = Choice(roles.warps[0], 1, 1, ("num_stages",), evict=evict, columns=narrow,
                    blocks=cluster.blocks if cluster else 1)  # fmt: skip
    others = [body for body in roles.bodies[1:] if any(isinstance(op, ir.DotAsync) for op in body.walk())]
    tool = ptxas.mended() if len(others) > 1 else None
    built = stages.build(text, f, choice, where=kernel, texts=texts, level="ttgir", tool=tool)
    launch = {
        "name": kernel.name,
        "record": record.finish(kernel.name, symbol(kernel), f, built),
        "extra": record.extra,
        "resources": built.resources,
        "level": "block",
    }
    levels = {"block": block} | built.texts if texts else {}
    return Artifact(target.name, built.image, levels, launch)
