"""Runs the pieces of an accumulation as a caller of them does, beside the kernel they come from."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from jtile.interpret import interpret
from jtile.ir import DTYPES, Atomic, For, Kernel, parse_kernel, print_kernel, verify
from jtile.passes.accumulate import Pieces, accumulate


def combine(pieces: Pieces, inputs: Sequence[np.ndarray], narrow: Sequence[str | None], run=interpret) -> list:
    """The outputs of the whole: partial sums added, and everything in its final dtype."""
    done, given = [], [*inputs]
    for number, (k, at) in enumerate(zip(pieces.kernels, pieces.inputs, strict=True)):
        done.append(run(k, [given[i] for i in at]))
        given += [done[number][r.output] for r in pieces.between if r.piece == number]
    out = []
    for r, dtype in zip(pieces.results, narrow, strict=True):
        x = done[r.piece][r.output]
        x = x.astype(np.float64).sum(0).astype(x.dtype) if r.partials else x
        out.append(x if dtype is None else x.astype(DTYPES[dtype].numpy))
    return out


def random_inputs(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    """Small whole numbers: their sums and products are exact in any order."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(-4 if DTYPES[v.dtype].kind == "f" else 0, 5, v.shape).astype(DTYPES[v.dtype].numpy)
        for v in kernel.inputs
    ]


def check(
    kernel: Kernel | str, narrow: Sequence[str | None] = (), inputs: Sequence[np.ndarray] | None = None, run=interpret
) -> Pieces:
    """Accumulate, verify the pieces, and compare with the kernel bit for bit; gives the pieces."""
    kernel = parse_kernel(kernel) if isinstance(kernel, str) else kernel
    verify(kernel)
    narrow = tuple(narrow) or (None,) * len(kernel.outputs)
    text = print_kernel(kernel)
    pieces = accumulate(kernel, narrow)
    assert print_kernel(kernel) == text, "the pass changed its argument"
    for piece in pieces.kernels:
        verify(piece)
        assert print_kernel(parse_kernel(print_kernel(piece))) == print_kernel(piece)
    inputs = random_inputs(kernel) if inputs is None else inputs
    want = interpret(kernel, inputs)
    got = combine(pieces, inputs, narrow, run)
    for v, a, b, dtype in zip(kernel.outputs, want, got, narrow, strict=True):
        a = a if dtype is None else a.astype(DTYPES[dtype].numpy)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64), err_msg=f"output {v.name}")
    return pieces


def atomics(pieces: Pieces) -> int:
    return sum(isinstance(op, Atomic) for k in pieces.kernels for op in k.body.walk())


def carries(kernel: Kernel) -> int:
    """Values that loops carry."""
    return sum(len(op.inits) for op in kernel.body.walk() if isinstance(op, For))


def expect(pieces: Pieces, *texts: str) -> None:
    got = "\n".join(print_kernel(k) for k in pieces.kernels)
    want = "\n".join(textwrap.dedent(t).strip("\n") + "\n" for t in texts)
    assert got.splitlines() == want.splitlines(), f"\n{got}"


def ops(pieces: Pieces, card) -> int:
    return sum(isinstance(op, card) for k in pieces.kernels for op in k.body.walk())


def kernel(body: str, refs: str, grid: str, inits: str = "%o = 0") -> str:
    constants = "\n".join(f"  %c{n} = full {n} : i32" for n in (0, 1, 2, 3, 4, 5, 8, 16))
    return f"kernel @k({refs}) grid({grid}) init({inits}) {{\n{constants}\n{textwrap.dedent(body)}\n}}"


NORM = """
  %i = program_id 0
  %v = load %x[tile(%i, 2), %c0:+4]
  %w = load %s[%c0:+4]
  %b = broadcast %w dims=(1) : tile<2x4xf32>
  %p = mul %v, %b
  %0 = atomic add %dx[tile(%i, 2), %c0:+4], %p
  %q = reduce sum %v axes=(0)
  %1 = atomic add %ds[%c0:+4], %q
"""
NORM_REFS = "%x: ref<{n}x4xf32>, %s: ref<4xf32>, %dx: ref<{n}x4xf32, out>, %ds: ref<4xf32, out>"


def norm(rows: int) -> str:
    return kernel(NORM, NORM_REFS.format(n=rows), str(max(-(-rows // 2), 0)), "%dx = 0, %ds = 0")
