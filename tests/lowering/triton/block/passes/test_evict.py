"""What products say to the second-level cache: the band's rows stay, columns go first, where that saves reading."""

import numpy as np
import pytest
import tile_kernels as tk
from machines import card, machine

from jtile.interpret import interpret
from jtile.ir import AsyncLoad, Load, parse_kernel, print_kernel
from jtile.lowering.triton import ptx
from jtile.lowering.triton.block import compile_block_kernel
from jtile.lowering.triton.block.passes import steps
from jtile.lowering.triton.block.passes.evict import copy_hints

SMALL = machine(processors=4, cache=96 << 10)  # a wave of 2 x 2 tiles
STAYS, GOES = "last", "first"
LARGE = (128, 256, 64)


def evicted(kernel, machine=SMALL, **options):
    """Name of an array -> what the copies of the planned kernel say of it."""
    planned = steps(kernel, machine, options)
    return {op.ref.name: op.evict for op in planned.kernel.body.walk() if isinstance(op, AsyncLoad)}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (tk.gated(4096, 14336, 4096, tile=(128, 128, 64)), {0: STAYS, 1: GOES, 2: GOES}),
        (tk.gated(4096, 14336, 4096, tile=(128, 128, 64), tb=True), {0: STAYS, 1: GOES, 2: GOES}),
        (tk.gated(4096, 14336, 4096, tile=(192, 128, 64)), {0: STAYS, 1: GOES, 2: GOES}),  # 11 rows of tiles: 16.5 MiB
        (tk.gated(4096, 14336, 8192, tile=(128, 128, 64)), {}),  # 16 rows of tiles are 32 MiB
        (tk.gated(2048, 14336, 4096, tile=(128, 128, 64)), {}),  # one band: columns are read once
        (tk.gated(4096, 2048, 1024, tile=(128, 128, 64)), {}),  # all operands fit
        (tk.matmul(4096, 4096, 4096, tile=LARGE), {}),  # a single product
        (tk.attention(1024, 1024, d=128, tile=(128, 128)), {}),
    ],
    ids=["gated", "gated transposed", "3 consumers", "many terms", "one band", "few terms", "one product", "attention"],
)
def test_what_stays_in_the_cache_of_an_h200(kernel, expected):
    assert copy_hints(kernel, 128, machine()) == expected


def test_one_array_on_both_sides_is_left_to_the_cache():
    text = print_kernel(tk.gated(1024, 1024, 1024, tile=(128, 64, 64), tb=True))
    kernel = parse_kernel(text.replace("load %gate", "load %x").replace("load %up", "load %x"))
    assert {op.ref.name for op in kernel.body.walk() if isinstance(op, Load)} == {"x"}
    assert copy_hints(kernel, 4, SMALL) == {}


def test_copies_say_it_and_results_stay():
    kernel = tk.gated(512, 512, 96)
    planned = steps(kernel, SMALL, {})
    assert str(planned.plan).endswith("; evicted first: parameter 1 parameter 2, last: parameter 0")
    assert evicted(kernel) == {"x": STAYS, "gate": GOES, "up": GOES}
    assert evicted(kernel, persistent=False) == {"x": None, "gate": None, "up": None}
    text = print_kernel(planned.kernel)
    assert 'evict="last"' in text
    assert print_kernel(parse_kernel(text)) == text
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-1, 2, r.shape).astype(r.type.info.numpy) for r in kernel.inputs]
    for want, got in zip(interpret(kernel, arrays), interpret(planned.kernel, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_instructions_say_it():
    planned = steps(tk.gated(512, 512, 96), SMALL, {})
    artifact = compile_block_kernel(planned.kernel, card("sm_90"), texts=True)
    loads = [line for line in artifact.texts["ptx"].split("\n") if "complete_tx::bytes" in line]
    of = {hint: [line for line in loads if f"%evict_{hint};" in line] for hint in (STAYS, GOES)}
    assert of[STAYS] and of[GOES] and sorted(of[STAYS] + of[GOES]) == sorted(loads)
    assert all("L2::cache_hint" in line for line in loads)
    copies = [line for line in artifact.texts["sass"].split("\n") if "UTMALDG" in line]
    assert len(copies) == len(loads) and all("desc[" in line for line in copies)


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
    ahead = ptx.evicting(text, [(3, "ahead")])  # no copy, but an instruction that brings the box to the cache
    assert f"\t{other}\n" in ahead and "createpolicy" not in ahead
    assert "\t@%p1 cp.async.bulk.prefetch.tensor.2d.L2.global [%rd1, {%r2, %r3}];\n" in ahead
    for unknown in (text.replace("[%r1], [%rd1", "[%rd9], [%rd1"), text.replace("{%r2, %r3}", "%r2")):
        with pytest.raises(ValueError, match="no copy that can be brought to a cache only"):
            ptx.evicting(unknown, [(3, "ahead")])
