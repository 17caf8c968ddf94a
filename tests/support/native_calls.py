"""Kernels in `evaluated` functions, called without XLA: their CPU code runs on the arrays themselves.

A program of XLA around one call takes 20 ms to make, more than many a kernel takes to compile. How kernels stand in
XLA's programs is what other tests are about: those of `jit`, of eager calls, of the handlers in `ffi`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from native import run_artifact

from jtile.lowering import platforms
from jtile.primitive.jtile_call import bind
from jtile.primitive.lowering import compile_piece, complete, interpreted, pieces_of
from jtile.primitive.program import Program
from jtile.primitive.tangent import Linear, active, forward_program
from jtile.testing import evaluate


def install() -> None:
    """From now on kernels are called so in `evaluated`, in this process."""
    evaluate.RULES.update(CALLS)


def _tangents(linear: Linear, operands: Sequence[np.ndarray]) -> Sequence[Any]:
    """As `jtile_tangent` is lowered: by the kernel of its map."""
    primals, moving, _ = linear.split(operands)
    return _call(forward_program(linear), [*primals, *moving])[: len(active(linear.program, linear.perturbed))]


def _call(program: Program, operands: Sequence[np.ndarray]) -> Sequence[Any]:
    if _needs_xla(program):
        return bind(program, operands)
    cpu = platforms.named("cpu")
    pieces = pieces_of(program, cpu.here())
    found, given = [], [*operands]
    for k, (kernel, inputs) in enumerate(zip(pieces.kernels, pieces.inputs, strict=True)):
        whole = complete(kernel, cpu)
        started = [np.full(s.shape, s.value, s.dtype) for s in whole.starts]
        artifact = compile_piece(program, k, cpu.here())
        found.append(run_artifact(artifact, whole.kernel, [*(given[i] for i in inputs), *started, *whole.tables]))
        given += [found[r.piece][r.output] for r in pieces.between if r.piece == k]
    outs = zip(pieces.results, program.out_avals, strict=True)
    return [found[r.piece][r.output].sum(tuple(range(r.partials))).astype(o.dtype) for r, o in outs]


def _needs_xla(program: Program) -> bool:
    """Whether a program is more than its compiled kernels: prints and asserts, the interpreter, complex numbers, sizes
    that are not known yet, an empty grid."""
    complexes = any(program.spec.complex_inputs()) or any(program.spec.complex_outputs())
    sides = program.kernel.grid
    unusual = program.io or program.block or program.choice is not None or interpreted(program)
    return bool(unusual or complexes or not all(isinstance(n, int) and n > 0 for n in sides))


CALLS = {
    "jtile_call": lambda eqn, *operands: _call(eqn.params["program"], operands),
    "jtile_tangent": lambda eqn, *operands: _tangents(eqn.params["linear"], operands),
}
