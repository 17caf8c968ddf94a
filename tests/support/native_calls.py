"""Kernels in `evaluated` functions, called without XLA: their CPU code runs on the arrays themselves.

A program of XLA around one call takes 20 ms to make, more than many a kernel takes to compile. How kernels stand in
XLA's programs is what other tests are about: those of `jit`, of eager calls, of the handlers in `ffi`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from native import run_artifact

from jtile.ir import is_dynamic
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
    return call(forward_program(linear), [*primals, *moving])[: len(active(linear.program, linear.perturbed))]


def call(program: Program, operands: Sequence[np.ndarray]) -> Sequence[Any]:
    """The results of a kernel: by its code alone, where it is `plain`."""
    if not plain(program):
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
    results = []
    for r, o in zip(pieces.results, program.out_avals, strict=True):
        x = found[r.piece][r.output]
        x = x.sum(tuple(range(r.partials))) if r.partials else x  # a sum over no axis makes 0 of -0
        results.append(x.astype(o.dtype))
    return results


def plain(program: Program) -> bool:
    """Whether a program is no more than its compiled kernels: no prints and asserts, no interpreter, complex numbers,
    sizes that are not known yet, nor an empty grid."""
    complexes = any(program.spec.complex_inputs()) or any(program.spec.complex_outputs())
    unusual = program.io or program.block or program.choice is not None or interpreted(program)
    static = not is_dynamic(program.kernel) and all(isinstance(n, int) and n > 0 for n in program.kernel.grid)
    return static and not unusual and not complexes


CALLS = {
    "jtile_call": lambda eqn, *operands: call(eqn.params["program"], operands),
    "jtile_tangent": lambda eqn, *operands: _tangents(eqn.params["linear"], operands),
}
