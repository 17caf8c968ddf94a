"""Roles that are spread over the blocks of a cluster."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from jtile import ir
from jtile.errors import UnsupportedError
from jtile.lowering.triton import clusters
from jtile.lowering.triton.block.spread import spread
from jtile.ops.hopper_small import hopper_small
from jtile.testing import relative_error
from jtile.tune.small import Form

BLOCK = """kernel @two(%x: ref<64x256xbf16>, %y: ref<64x64xf32, out>) grid(2) {{
  %mine = alloc_shared : shared<64x64xbf16, slots 2>
  %full0 = alloc_barriers : barrier<2, arrivals 1>
  %yours = alloc_shared : shared<64x64xbf16, slots 2>
  %full1 = alloc_barriers : barrier<2, arrivals 1>
  %sums = alloc_shared : shared<64x64xf32>
  %came = alloc_barriers : barrier<1, arrivals 1>
  %c0 = full 0 : i32
  %c64 = full 64 : i32
  roles {{
    role reads warps={warps} {{
      expect %full0[%c0] bytes=8192
      %a = slot %mine[%c0] : shared<64x64xbf16>
      async_load %x[%c0:+64, %c0:+64] -> %a, %full0[%c0]
      wait %full0[%c0], %c0
      wait %came[%c0], %c0
      %t = load_shared %sums : tile<64x64xf32>
      store %y[%c0:+64, %c0:+64], %t
    }}
    role sums warps=4 {{
      expect %full1[%c0] bytes=8192
      %b = slot %{ring}[%c0] : shared<64x64xbf16>
      async_load %x[%c0:+64, %c64:+64] -> %b, %full1[%c0]
      wait %full1[%c0], %c0
      %v = load_shared %b : tile<64x64xbf16>
      %w = cast %v : tile<64x64xf32>
      store_shared %sums, %w
      arrive %came[%c0]
    }}
  }}
}}"""


def test_each_role_has_a_block_and_rings_take_the_same_place():
    kernel, found = spread(ir.parse_kernel(BLOCK.format(warps=4, ring="yours")), 2)
    allocated = [op for op in kernel.body.ops if isinstance(op, ir.AllocShared | ir.AllocBarriers)]
    assert kernel.grid == (2, 2) and len(allocated) == 4  # a ring, its barriers, sums and when they came
    assert sorted((type(op).__name__, place) for op, place in found.far.items()) == [("Arrive", 0), ("StoreShared", 0)]
    assert [op.mnemonic for op in found.awaited] == ["wait"]
    (roles,) = [op for op in kernel.body.ops if isinstance(op, ir.Roles)]
    assert len(roles.bodies) == 1 and {op for op in kernel.body.walk() if op in found.far} == set(found.far)


@pytest.mark.parametrize(
    ("options", "blocks", "why"),
    [
        (dict(warps=8, ring="yours"), 2, "2 roles of 4 warps"),
        (dict(warps=4, ring="yours"), 4, "4 roles of 4 warps"),
        (dict(warps=4, ring="mine"), 2, "one of them reads what others store"),  # both fill it by copies
    ],
)
def test_roles_that_cannot_be_spread_are_refused(options, blocks, why):
    with pytest.raises(UnsupportedError, match=why):
        spread(ir.parse_kernel(BLOCK.format(**options)), blocks)


def lowered(parts, columns=64):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    form = Form(64, columns, parts=parts)
    kernel = hopper_small.with_options(**form.options)
    return kernel.lower(of(512, 4096), of(4096, 512), None, ta=False, tb=False, form=form, target="cuda:sm_90")


def test_the_machine_code_sends_sums_to_another_block():
    pytest.importorskip("triton")
    found = lowered(2)
    ptx, record = found.texts["ptx"], json.loads(found.launch["record"])
    stores = re.findall(r"st\.shared::cluster\.v(\d)\.b32 \[%there", ptx)
    assert 128 * 4 * sum(map(int, stores)) == 64 * 64 * 4  # all sums, by 128 threads
    assert len(re.findall(r"mbarrier\.arrive\.release\.cluster\.shared::cluster\.b64 _, \[%there\]", ptx)) == 1
    assert ptx.count("try_wait.parity.acquire.cluster") == 1
    assert ".reqnctapercluster 2, 1, 1" in ptx and (record["grid"], record["cluster"]) == (128, 1)
    assert not found.launch["resources"]["spills"]


READY, FAR, NEAR, AT, AWAIT = (
    f"\tmov.b32 %r1, 0; {clusters.MARK} {what}"
    for what in ("ready", "far 1 1024", "near", "arrive at 1", clusters.AWAIT)
)
STORE = "\tst.shared.v2.b32 \t[%r4+64], {%r5, %r6};"
ARRIVAL = "\t@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];"
WAIT = "\tmbarrier.try_wait.parity.shared::cta.b64 complete, [%r7], %r8;"


def text(*lines):
    return "\n".join((".reqntid 128", "{", READY, *lines, "\tret;", "}"))


def test_what_is_marked_goes_to_the_other_block():
    found = clusters.met(text(FAR, STORE, NEAR, AT, ARRIVAL, AWAIT, WAIT), 2, 4)
    assert "\tmapa.shared::cluster.u32 %there, %r4, 1;\n\tst.shared::cluster.v2.b32 [%there+64], {%r5, %r6};" in found
    assert "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%there];" in found
    assert found.index("st.shared::cluster") < found.index("fence.acq_rel.cluster") < found.index("arrive.release")
    assert "try_wait.parity.acquire.cluster.shared::cta" in found


@pytest.mark.parametrize(
    "lines",
    [
        (FAR, NEAR, AT, ARRIVAL),  # a store is missing
        (FAR, STORE, STORE, NEAR, AT, ARRIVAL),
        (FAR, STORE.replace("%r4+64", "global_smem+64"), NEAR),
        (FAR, STORE, NEAR, AT),
        (FAR, STORE, NEAR, AT, WAIT, ARRIVAL),
        (FAR, STORE, NEAR, AWAIT),
    ],
)
def test_what_is_not_understood_is_refused(lines):
    with pytest.raises(ValueError, match="cluster"):
        clusters.met(text(*lines), 2, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "k", "fits"),
    [
        (Form(64, 64, parts=2), 520, True),
        (Form(64, 64, parts=4), 520, True),
        (Form(64, 64, parts=2), 2056, False),
        (Form(64, 128, parts=2), 2056, False),
    ],
)
def test_on_the_gpu(form, k, fits):
    """`fits`: the rings of all roles fit one block, too, which then gives the same bits."""
    a, b = (jax.random.normal(jax.random.key(seed), s, jnp.bfloat16) for seed, s in enumerate(((200, k), (k, 328))))
    run = lambda kernel: jax.jit(lambda a, b: kernel(a, b, None, ta=False, tb=False, form=form))
    spread_out = run(hopper_small.with_options(**form.options))
    found = spread_out(a, b)
    assert all(jnp.array_equal(spread_out(a, b), found) for _ in range(50))
    if fits:
        assert jnp.array_equal(run(hopper_small)(a, b), found)
    wide = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    assert relative_error(found, wide) < 4e-3
