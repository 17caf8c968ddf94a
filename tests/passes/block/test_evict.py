"""What products say to the second-level cache: the band's rows stay, columns go first, where that saves reading."""

import numpy as np
import pytest
import tile_kernels as tk

from jtile.interpret import interpret
from jtile.ir import AsyncLoad, Load, parse_kernel, print_kernel
from jtile.lowering.triton import ptx
from jtile.lowering.triton.block import compile_block_kernel
from jtile.passes.block import Machine, steps
from jtile.passes.block.evict import evictions

SMALL = Machine(processors=4, cache=96 << 10)  # a wave of 2 x 2 tiles
STAYS, GOES = "last", "first"
LARGE = (128, 256, 64)


def evicted(kernel, machine=SMALL, **options):
    """Name of an array -> what the copies of the planned kernel say of it."""
    planned = steps(kernel, machine, options)
    return {op.ref.name: op.evict for op in planned.kernel.body.walk() if isinstance(op, AsyncLoad)}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (tk.matmul(4096, 4096, 4096, tile=LARGE), {0: STAYS, 1: GOES}),
        (tk.matmul(4096, 4096, 4096, tile=LARGE, ta=True, tb=True), {0: STAYS, 1: GOES}),
        (tk.matmul(8192, 8192, 8192, tile=LARGE), {}),  # 16 rows of tiles are 32 MiB
        (tk.matmul(2048, 2048, 2048, tile=LARGE), {}),  # a tile each
        (tk.matmul(4096, 4096, 1024, tile=LARGE), {}),  # both operands fit
        (tk.matmul(1024, 4096, 4096, tile=LARGE, batch=4), {0: STAYS, 1: GOES}),  # one product after the other
        (tk.gated(4096, 14336, 4096, tile=(128, 128, 64)), {0: STAYS, 1: GOES, 2: GOES}),
        (tk.attention(1024, 1024, d=128, tile=(128, 128)), {}),
    ],
    ids=["4096", "4096 transposed", "8192", "2048", "few terms", "several", "gated", "attention"],
)
def test_what_stays_in_the_cache_of_an_h200(kernel, expected):
    assert evictions(kernel, 128, Machine()) == expected


def test_one_array_on_both_sides_is_left_to_the_cache():
    kernel = parse_kernel(
        print_kernel(tk.matmul(1024, 1024, 1024, tile=(128, 128, 64), tb=True)).replace("load %b", "load %a")
    )
    assert {op.ref.name for op in kernel.body.walk() if isinstance(op, Load)} == {"a"}
    assert evictions(kernel, 4, SMALL) == {}


def test_copies_say_it_and_results_stay():
    kernel = tk.matmul(512, 512, 96, tile=(128, 128, 32))
    planned = steps(kernel, SMALL, {})
    assert str(planned.plan).endswith("; evicted first: parameter 1, last: parameter 0")
    assert evicted(kernel) == {"a": STAYS, "b": GOES}
    assert evicted(kernel, persistent=False) == {"a": None, "b": None}
    text = print_kernel(planned.kernel)
    assert 'evict="last"' in text
    assert print_kernel(parse_kernel(text)) == text
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1, 2, s).astype(kernel.inputs[0].type.info.numpy) for s in ((1, 512, 96), (1, 96, 512)))
    (found,) = interpret(planned.kernel, [a, b])
    np.testing.assert_array_equal(found.astype(np.float32), np.matmul(a.astype(np.float32), b.astype(np.float32)))


def test_instructions_say_it():
    planned = steps(tk.matmul(512, 512, 96, tile=(128, 128, 32)), SMALL, {})
    artifact = compile_block_kernel(planned.kernel, "sm_90", texts=True)
    loads = [line for line in artifact.texts["ptx"].split("\n") if "complete_tx::bytes" in line]
    of = {hint: [line for line in loads if f"%evict_{hint};" in line] for hint in (STAYS, GOES)}
    copies = {op.ref.name for op in planned.kernel.body.walk() if isinstance(op, AsyncLoad)}
    assert copies == {"a", "b"}
    assert of[STAYS] and of[GOES] and sorted(of[STAYS] + of[GOES]) == sorted(loads)
    assert all("L2::cache_hint" in line for line in loads)
    sass = artifact.texts["sass"]
    assert (
        sass.count("UTMALDG") == sum("UTMALDG" in line and "desc[" in line for line in sass.split("\n")) == len(loads)
    )


def test_only_copies_by_the_maps_that_are_named():
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    other = f"@%p1 {copy} [%r1], [%rd2, {{%r2, %r3}}], [%r4];"
    text = (
        "{\n\tmov.b64 \t%rd5, f_param_3;\n\tmov.b64 \t%rd6, f_param_30;\n"
        f"\tcvta.param.u64 \t%rd1, %rd5;\n\tcvta.param.u64 \t%rd2, %rd6;\n\t{other}\n"
        f"\t{other.replace('%rd2', '%rd1')}\n"
    )
    assert ptx.evicting(text, ()) == ptx.evicting(text, [(4, "last")]) == text
    found = ptx.evicting(text, [(3, "last")])
    assert f"\t{other}\n" in found
    assert "bytes.L2::cache_hint [%r1], [%rd1, {%r2, %r3}], [%r4], %evict_last;" in found
    assert found.count("createpolicy.fractional.L2::evict_last.b64 %evict_last, 1.0;") == 1
