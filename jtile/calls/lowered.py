"""`Kernel.lower(...)`: a kernel, or a derivative of one, compiled for a target without running it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import dtypes

from jtile._config import config, current
from jtile._errors import KernelValueError

if TYPE_CHECKING:
    from jtile import ir
    from jtile.lowering.targets import Target
    from jtile.primitive.program import Program


class Lowered:
    """A kernel compiled for one target; the work is done when a property is first read, by the options of `jt.config`
    that were in force when this object was made: image, record and texts belong together.

    Attributes:
      program: the kernel with everything fixed.
      piece: which of the kernels that run for it `image`, `launch` and `texts` are of: more than one run for a kernel
        that accumulates into outputs which are best computed apart, as reverse mode makes them.
    """

    def __init__(self, program: Program, target: Any, piece: int = 0):
        from jtile.lowering import targets
        from jtile.primitive.program import for_target

        self._target, self._options = targets.resolve(target), current().code_options
        self.program, self.piece = for_target(program, self._target), piece

    @property
    def target(self) -> Target:
        """What it is compiled for."""
        return self._target

    @property
    def options(self) -> dict[str, Any]:
        """The options of `jt.config` that it is compiled by."""
        return dict(self._options)

    @property
    def artifact(self) -> Any:
        """What the back end gives, with the texts of its levels: a `jtile.lowering.artifact.Artifact`."""
        return self._with_texts

    def __repr__(self) -> str:
        return f"<jtile.Lowered {self.program.name} for {self._target.name}>"

    def _repr_html_(self) -> str:
        from jtile.calls.notebook import lowered_html

        return lowered_html(self.program.name, self._target.name, self.texts)

    @property
    def pieces(self) -> tuple[Lowered, ...]:
        """All kernels that run for the program."""
        from jtile.primitive.lowering import pieces_of

        return tuple(self._made(self.program, k) for k in range(len(pieces_of(self.program).kernels)))

    def _made(self, program: Program, piece: int = 0) -> Lowered:
        """Another kernel or piece, lowered for the same target and by the same options."""
        with config(**self._options):
            return Lowered(program, self._target, piece)

    def jvp(self, wrt: int | Sequence[int] | None = None) -> Lowered:
        """The kernel of forward mode: `(inputs, their tangents) -> tangents of the outputs`.

        Args:
          wrt: the flat inputs that are differentiated; default: all of floats.
        Returns:
          A `Lowered` of that kernel for the same target.
        """
        from jtile.primitive import tangent

        return self._made(tangent.forward_program(self._linear(wrt)))

    def vjp(self, wrt: int | Sequence[int] | None = None) -> Lowered:
        """The automatic kernel of reverse mode: `(inputs, cotangents of the outputs) -> cotangents of the inputs`; a
        rule given by `defvjp` is not asked.

        Args:
          wrt: the flat inputs that are differentiated; default: all of floats.
        Returns:
          A `Lowered` of that kernel for the same target.
        """
        from jtile.primitive import tangent

        given = (True,) * self.program.spec.n_out
        return self._made(tangent.reverse_program(self._linear(wrt), given)[0])

    def _linear(self, wrt: int | Sequence[int] | None) -> Any:
        from jtile.primitive import tangent

        inputs = self.program.base.inputs
        floats = [bool(dtypes.issubdtype(v.type.info.numpy, np.inexact)) for v in inputs]
        given = [wrt] if isinstance(wrt, int | str) else wrt
        chosen = [k for k, f in enumerate(floats) if f] if given is None else [*given]
        bad = [k for k in chosen if not isinstance(k, int) or not 0 <= k < len(inputs) or not floats[k]]
        if bad or not chosen:
            kinds = ", ".join(f"{v.name}: {v.dtype}" for v in inputs)
            what = f"with respect to {', '.join(map(repr, bad))} (wrt= takes places of inputs of floats)" if bad else ""
            raise KernelValueError(
                f"kernel {self.program.name} cannot be differentiated {what or ', since no input is of floats'}: "
                f"its inputs are {kinds}".replace(" ,", ","),
                self.program.where,
            )
        lin = tangent.linear(self.program, [k in chosen for k in range(len(inputs))], 0)
        if not tangent.active(self.program, lin.perturbed):
            outs = ", ".join(f"{v.name}: {v.dtype}" for v in self.program.base.outputs)
            raise KernelValueError(
                f"kernel {self.program.name} has no derivative: none of its outputs ({outs}) is of floats and depends "
                f"on {', '.join(inputs[k].name for k in chosen)}",
                self.program.where,
            )
        return lin

    @functools.cached_property
    def _with_texts(self) -> Any:
        return self._compile(texts=True)

    @functools.cached_property
    def _as_called(self) -> Any:
        """The artifact, from the caches where they have it: to disassemble an image takes longer than to compile it."""
        return self.__dict__.get("_with_texts") or self._compile(texts=False)

    def _compile(self, *, texts: bool) -> Any:
        from jtile.primitive.lowering import compile_piece

        with config(**self._options):
            return compile_piece(self.program, self.piece, self._target, texts=texts)

    @functools.cached_property
    def kernel(self) -> ir.Kernel:
        """This piece in Tile IR, after the target-independent passes."""
        from jtile import passes
        from jtile.primitive.lowering import pieces_of

        return passes.run_pipeline(pieces_of(self.program, self._target).kernels[self.piece], passes.TILE)

    @property
    def image(self) -> bytes:
        """The compiled code, which the custom call embeds. On a CPU it is an ELF object, on a GPU a cubin or hsaco."""
        return self._as_called.image

    @property
    def launch(self) -> dict[str, Any]:
        """The numbers that the custom call needs besides the image.

        Among them are the workspace, the cost, the instruction set, the places of prints and asserts, and, for a GPU,
        the `resources` that the kernel takes."""
        return self._with_texts.launch

    @functools.cached_property
    def texts(self) -> Mapping[str, str]:
        """The text of every level, by the name of the level, in this order; `sass` is made when it is read.

        `choice` has the values of meta-parameters that are `jt.auto`, and of the tiles of a derivative, with the
        reason. `jaxpr` and `tile_ir` are the kernel as traced, `tile_ir_opt` is this piece after the passes.
        `sharding` says along what automatic partitioning cuts the program, and why not along the rest. `resources` has
        the grid, and the scratch memory of one program, in which a reverse kernel saves the carries of its loops; on a
        GPU also registers, spills, shared memory and occupancy. Then come the levels of the back end: `llvm` and `asm`
        for CPUs, `ttir`, `ttgir`, `llir`, `ptx` and `sass` for NVIDIA, `amdgcn` instead of the last two for AMD."""
        from jtile import ir
        from jtile.primitive import partition

        levels, why = self._with_texts.texts, self._why()
        own = {"choice": why} if why else {}
        own |= {
            "jaxpr": str(self.program.jaxpr),
            "tile_ir": ir.print_kernel(self.program.kernel),
            "tile_ir_opt": ir.print_kernel(self.kernel),
            "sharding": partition.describe(self.program),
            "resources": "\n".join(_resources(self.kernel, self.launch)) + "\n",
        }
        return own | levels

    def _why(self) -> str:
        """How the tiles were chosen, a sentence a line; "" where the call and the kernel say them."""
        from jtile.primitive.lowering import pieces_of

        choice, pieces = self.program.choice, pieces_of(self.program, self._target)
        found = [choice.why] if choice else []
        found += [pieces.why[self.piece]] if pieces.why else []
        return "".join(f"{why}\n" for why in found if why)


def _resources(kernel: ir.Kernel, launch: dict[str, Any]) -> Iterator[str]:
    from jtile import ir

    yield f"grid: {' x '.join(map(str, kernel.grid)) or 1}"
    refs = [(p, kernel.loc) for p in kernel.scratch]
    refs += [(op.results[0], op.loc) for op in kernel.body.walk() if isinstance(op, ir.Alloc)]
    for v, loc in refs:
        yield f"scratch: {v.dtype}{list(v.shape)}, {_bytes(v)} bytes a program, {loc}"
    yield f"scratch in all: {sum(_bytes(v) for v, _ in refs)} bytes a program"
    if "workspace" in launch:
        yield f"workspace: {launch['workspace']} bytes a thread"
    found = launch.get("resources") or {}
    if "registers" in found:
        from jtile.lowering.triton import resources

        yield resources.line(found)
    elif found:  # the target is an NPU: the entries say how far the buffers of each memory reach
        yield ", ".join(f"{bytes_} bytes of {memory}" for memory, bytes_ in found.items())


def _bytes(ref: ir.Value) -> int:
    return -(-math.prod(ref.shape) * ref.type.info.bits // 8)
