"""How kernels with roles begin and end in PTX: barriers without meetings in between, and roles that return."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile.lowering.triton.ptx_roles import sooner

# What triton 3.6 writes for two roles, the second with a tensor map, and a partition of warps without one.
TEXT = """.visible .entry both(
\t.param .u64 .ptr .global .align 1 both_param_0,
\t.param .align 64 .b8 both_param_1[128]
)
.reqntid 256
.maxnreg 96
{
\t.reg .pred \t%p<4>;
\tmov.u32 \t%r1, %tid.x;
\tsetp.lt.u32 \t%p1, %r1, 128;
\t@%p1 bra \t$L__BB0_9;
\tbra.uni \t$L__BB0_1;
$L__BB0_9:
\tsetmaxnreg.inc.sync.aligned.u32 \t256;
\tsetp.eq.b32 \t%p2, %r1, 0;
\tadd.s32 \t%r2, %r3, 1024;
\t// begin inline asm
\t@%p2 mbarrier.init.shared::cta.b64 [%r2], 1;
\t// end inline asm
\t.loc\t1 95 5
\tbar.sync \t0, 128;
\tadd.s32 \t%r4, %r3, 1032;
\t@%p2 mbarrier.init.shared::cta.b64 [%r4], 1;
\tbar.sync \t0, 128;
\tfence.proxy.async.shared::cta;
\tst.shared.v2.b32 \t[global_smem+1040], {0, 16843009};
\tbarrier.sync \t1;
\tsetmaxnreg.dec.sync.aligned.u32 \t72;
\tbarrier.sync \t1;
\tst.global.b32 \t[%rd1], %r1;
$L__BB0_8:
\tbarrier.sync \t1;
\tsetmaxnreg.inc.sync.aligned.u32 \t256;
\t.loc\t1 99 5
\tst.shared.v2.b32 \t[global_smem+1040], {33686018, 33686018};
\tbarrier.sync \t1;
$L__BB0_7:                             // %common.ret
\t.loc\t1 0 0
\tret;
$L__BB0_6:
\tbarrier.sync \t1;
\tsetmaxnreg.dec.sync.aligned.u32 \t24;
$L__BB0_1:
\t.loc\t1 24 3
\tsetmaxnreg.dec.sync.aligned.u32 \t24;
\tbarrier.sync \t1;
\tld.shared.b8 \t%r5, [%r6+1036];
\tsetp.gt.u32 \t%p3, %r5, 2;
\t@%p3 bra \t$L__BB0_5;
\t$L_brx_0: .branchtargets
\t\t$L__BB0_2,
\t\t$L__BB0_3,
\t\t$L__BB0_7;
\tbrx.idx \t%r5, $L_brx_0;
$L__BB0_2:
\tsetmaxnreg.inc.sync.aligned.u32 \t40;
\tbarrier.sync \t1;
\tcp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%rd2, {%r8, %r9}], [%r2];
\tbra.uni \t$L__BB0_6;
$L__BB0_3:
\tsetmaxnreg.inc.sync.aligned.u32 \t40;
\tbarrier.sync \t1;
\tbarrier.sync \t1;
\tsetmaxnreg.dec.sync.aligned.u32 \t24;
\tbra.uni \t$L__BB0_1;
$L__BB0_5:
\tbarrier.sync \t1;
\tbarrier.sync \t1;
\tbra.uni \t$L__BB0_1;
}
"""


def test_barriers_are_made_without_meetings_and_maps_are_asked_for_first():
    found = sooner(TEXT)
    assert found.index("@%p2 prefetch.param.tensormap [both_param_1];") < found.index("mbarrier.init")
    assert found.count("prefetch") == 1 and found.count("mbarrier.init") == 2
    assert TEXT.count("\tbar.sync \t0, 128;") == 2 and found.count("\tbar.sync \t0, 128;") == 1
    assert found.rindex("mbarrier.init") < found.index("\tbar.sync \t0, 128;") < found.index("fence.proxy.async")


def test_another_warp_asks_for_maps_where_there_is_one_role():
    end = TEXT.index("\tfence.proxy")
    text = (
        re.sub(r"\tsetmaxnreg[^\n]*\n", "", TEXT[:end]).replace("bar.sync \t0, 128;", "bar.sync \t0;") + "\tret;\n}\n"
    )
    found = sooner(text)
    assert text.count("\tbar.sync \t0;") == 2 and found.count("\tbar.sync \t0;") == 1
    assert found.rindex("mbarrier.init") < found.index("\tbar.sync \t0;")
    who = re.search(r"setp\.eq\.u32 (%\w+), %\w+, 96;\n\t@\1 prefetch\.param\.tensormap \[both_param_1\];", found)
    assert who is not None and who.end() < found.index("mbarrier.init") and found.count("prefetch") == 1


def test_roles_return_and_the_first_one_keeps_its_registers():
    found = sooner(TEXT)
    assert found.count("\tret;") == 4  # one stood there; two partitions and the first role
    assert "st.shared.v2.b32 \t[global_smem+1040], {33686018" not in found and "u32 \t256;" not in found
    assert found.count("barrier.sync \t1;") == TEXT.count("barrier.sync \t1;") - 4
    assert re.search(r"barrier\.sync \t1;\n\tsetmaxnreg\.dec\.sync\.aligned\.u32 \t72;\n\tbarrier\.sync \t1;", found)
    more = sooner(TEXT.replace(".maxnreg 96", ".maxnreg 64"))
    assert "barrier.sync \t1;\n\tsetmaxnreg.inc.sync.aligned.u32 \t72;\n\tbarrier.sync \t1;" in more
    same = sooner(TEXT.replace(".maxnreg 96", ".maxnreg 72"))
    assert "u32 \t72;" not in same and same.count("setmaxnreg") == found.count("setmaxnreg") - 1


def test_registers_of_a_role_in_front_of_the_first_one_stay():
    first, end = TEXT.index("$L__BB0_9:\n"), TEXT.index("$L__BB0_6:\n")
    found = sooner(TEXT[:first] + TEXT[end:-2] + TEXT[first:end] + "}\n")
    assert found.count("\tret;") == 4  # the roles return all the same
    top = found[found.index("$L__BB0_1:\n") :]
    assert top.index("setmaxnreg.dec.sync.aligned.u32 \t24;") < top.index("barrier.sync")
    assert found.count("setmaxnreg.inc.sync.aligned.u32 \t256;") == 1 and found.count("u32 \t72;") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\tadd.s32 \t%r2, %r3, 1024;\n", "\tld.shared.b32 \t%r9, [%r3];\n"),  # the barrier's place may be in use
        ("\tbra.uni \t$L__BB0_6;", "\tbra.uni \t$L__BB0_9;"),  # barriers are made again
        ("\tadd.s32 \t%r4, %r3, 1032;", "\tst.shared.b32 \t[%r3], %r1;"),  # others see it behind the meeting
    ],
)
def test_meetings_stay_where_something_else_may_depend_on_them(old, new):
    assert TEXT.count(old) == 1
    assert sooner(TEXT.replace(old, new)).count("\tbar.sync \t0, 128;") == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\tbra.uni \t$L__BB0_6;", "\tbarrier.sync \t1;\n\tmov.b32 \t%r9, 0;\n\tbra.uni \t$L__BB0_1;"),  # another end
        ("$L__BB0_7:                             // %common.ret\n", "$L__BB0_7:\n\tst.global.b32 \t[%rd1], %r2;\n"),
        ("\tld.shared.b8 \t%r5, [%r6+1036];\n", "\tld.shared.b32 \t%r5, [%r6+1036];\n"),
        ("\tst.global.b32 \t[%rd1], %r1;\n", "\tbar.sync \t0;\n"),  # waits for roles that have returned
        ("\tbar.sync \t0, 128;\n\tfence", "\t// jtile.cluster ready\n\tbar.sync \t0, 128;\n\tfence"),
    ],
)
def test_roles_that_end_in_another_way_stay(old, new):
    assert TEXT.count(old) == 1
    text = TEXT.replace(old, new)
    found = sooner(text)
    assert found.count("\tret;") == 1 and found.count("barrier.sync \t1;") == text.count("barrier.sync \t1;")
    assert found.count("u32 \t256;") == 2


def test_text_without_roles_stays():
    text = TEXT[: TEXT.index("\tsetmaxnreg")] + "\tret;\n}\n"
    assert sooner(text) == text


def test_the_roles_of_a_kernel_return():
    """What the triton that is installed writes is understood: each role returns, and no word says that all is done."""

    def body(x, o):
        X, full = jt.alloc((64, 64), x.dtype), jt.barrier(1)
        with jt.role("main", registers=104):
            full.at(0).wait()
            o[...] = X.load()
        with jt.role("copies", warps=1, registers=24):
            full.at(0).expect(X.nbytes)
            jt.async_copy(x.tiles(64, 64).at[0, 0], X, full.at(0))

    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    found = jt.call(body, out_type=x, grid=(1,)).lower(x, target="cuda:sm_90")
    ptx = found.texts["ptx"]
    assert ptx.count("prefetch.param.tensormap") == 1 and ptx.count("ret;") >= 3
    assert (
        len(re.findall(r"setmaxnreg\.inc\.sync\.aligned\.u32 \s*104;", ptx)) == 1
    )  # not for its barriers, nor its end
    assert found.texts["sass"].count("EXIT") >= 3 and "UTMACCTL.PF" in found.texts["sass"]
