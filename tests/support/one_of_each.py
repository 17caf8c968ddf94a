"""One small shape of every block-level kernel of the library.

python tests/support/one_of_each.py run [FAMILY ...]       calls each once, on the GPU: for compute-sanitizer
python tests/support/one_of_each.py planted                a kernel with a race between two roles, for racecheck
python tests/support/one_of_each.py compile [FAMILY ...]   seconds, registers and spills of each, for Hopper, and
                                                           the instructions that are missing; needs no GPU

compute-sanitizer --tool memcheck --kernel-regex kns=jtile_ python tests/support/one_of_each.py run
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from machines import card
from sass import spills_of_products
from soak import Draw, watched
from soak_families import FAMILIES

import jtile as jt
from jtile import ir, passes
from jtile.lowering.artifact import Artifact
from jtile.lowering.triton.block import compile_block_kernel
from jtile.lowering.triton.compile import compile_kernel
from jtile.primitive.lowering import pieces_of

PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")  # of 16-bit floats, of 8-bit ones, of int8
OTHERS = ("UTMALDG", "SYNCS", "USETMAXREG")
# One or two rows: plain multiplications, as many as memory brings numbers for.
WITHOUT_PRODUCTS = ("hopper_gemv", "hopper_norm_gemv")

# Role `reads` does not wait for what role `writes` stores, or does.
PLANTED = """
kernel @planted(%x: ref<64x64xf32>, %o: ref<64x64xf32, out>) grid(1) {{
  %c0 = full 0 : i32
  %C = alloc_shared : shared<64x64xf32>
  %full = alloc_barriers : barrier<1, arrivals 1>
  roles {{
    role writes warps=4 {{
      %v = load %x[tile(%c0, 64), tile(%c0, 64)] : tile<64x64xf32>
      store_shared %C, %v
      {arrive}
    }}
    role reads warps=4 {{
      {wait}
      %w = load_shared %C : tile<64x64xf32>
      store %o[tile(%c0, 64), tile(%c0, 64)], %w
    }}
  }}
}}
"""


def kernels(families: Sequence[str]) -> Iterator[tuple[str, Any, int]]:
    """(family, program, number of the piece) of each kernel, as they are called on Hopper."""
    with jt.config(arch="sm_90"):
        for name in families:
            case = FAMILIES[name](Draw(0, small=True))
            for program, piece in watched(case, case.arrays()):
                yield name, program, piece


def compiled(program: Any, piece: int, *, texts: bool = True) -> Artifact:
    """A kernel, from Tile IR to its image; `texts`: with that of every level."""
    options = {k: v for k, v in program.options.compiler.items() if v is not None}
    kernel = passes.run_pipeline(pieces_of(program).kernels[piece], passes.TILE)
    return compile_kernel(kernel, card("sm_90"), options, texts=texts)


def missing(name: str, sass: str) -> list[str]:
    """The instructions that the code of a kernel does not have."""
    found = [op for op in OTHERS if op not in sass]
    products = name in WITHOUT_PRODUCTS or any(op in sass for op in PRODUCTS)
    return found if products else [*found, "/".join(PRODUCTS)]


def run(families: Sequence[str]) -> None:
    for name in families:
        case = FAMILIES[name](Draw(0, small=True))
        jax.block_until_ready(jax.jit(case.run)(*case.arrays()))
        print(f"ran {case.text}", flush=True)


def planted(ordered: bool) -> ir.Kernel:
    arrive, wait = ("arrive %full[%c0]", "wait %full[%c0], %c0") if ordered else ("", "")
    return ir.parse_kernel(PLANTED.format(arrive=arrive, wait=wait))


def run_planted(ordered: bool) -> None:
    from device import run_artifact

    kernel = planted(ordered)
    run_artifact(compile_block_kernel(kernel, card("sm_90")), kernel, [np.ones((64, 64), np.float32)])
    print("ran two roles,", "in order" if ordered else "with a race", flush=True)


def report(families: Sequence[str]) -> None:
    """Each is compiled twice, and timed the second time: the first kernel loads the compiler. CPU seconds have those of
    ptxas in them, and change less where the machine is busy."""
    for name, program, piece in [*kernels(families)]:
        artifact = compiled(program, piece)
        start, used = time.perf_counter(), _cpu_seconds()
        compiled(program, piece, texts=False)
        seconds, cpu = time.perf_counter() - start, _cpu_seconds() - used
        found, sass = artifact.launch["resources"], artifact.texts["sass"]
        print(
            f"{name:20} {program.name:28} {seconds:5.2f} s {cpu:5.2f} s CPU  {found['registers']:3} registers  "
            f"{found['spills']:4} bytes spilled  {len(spills_of_products(sass)):2} in loops of products  "
            f"{artifact.launch['level']}  missing: {', '.join(missing(program.name, sass)) or 'nothing'}",
            flush=True,
        )


def _cpu_seconds() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


if __name__ == "__main__":
    verb, *names = sys.argv[1:]
    if verb == "planted":
        run_planted(names == ["ordered"])
    else:
        {"run": run, "compile": report}[verb](names or list(FAMILIES))
