"""Where warps that start copies meet in PTX."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jtile.lowering.triton.ptx_copies import met
from jtile.ops.hopper_small import hopper_small
from jtile.tune.small import Form

# What triton 3.6 writes for a round of a ring that one role fills and empties.
TEXT = """$L__BB0_4:
\twgmma.wait_group.sync.aligned 1;
\tbar.sync \t0;
\t// begin inline asm
\t@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 24576;
\t// end inline asm
\t.loc\t1 41 5
\tbar.sync \t0;
\telect.sync \t%r49|%p21, -1;
\tand.pred \t%p2, %p19, %p21;
\t@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r14], [%rd1, {%r9, %r8}], [%r5];
\tbar.sync \t0;
\tshfl.sync.idx.b32 \t%r50, %r4, 0, 31, -1;
\t@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r15], [%rd2, {%r7, %r9}], [%r5];
\tbar.sync \t0;
\tmbarrier.try_wait.parity.shared.b64 %p4, [%r6], 1;
"""
BARS = "\tbar.sync \t0;"


def test_copies_start_without_meetings_behind_the_one_that_they_wait_for():
    found = met(TEXT)
    assert found.count(BARS) == 1
    assert found.index("wgmma.wait_group") < found.index(BARS) < found.index("expect_tx")
    assert found.replace(BARS + "\n", "") == TEXT.replace(BARS + "\n", "")


@pytest.mark.parametrize(
    "line",
    [
        "\tst.shared.b32 \t[%r14], %r1;",
        "\tld.shared.b32 \t%r1, [%r14];",
        "\t@%p1 mbarrier.arrive.shared::cta.b64 _, [%r5];",
        "\t@%p1 mbarrier.init.shared::cta.b64 [%r5], 1;",
        "\t@%p2 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r9, %r8}], [%r14];",
        "\t@%p2 bra \t$L__BB0_4;",
        "$L__BB0_5:",
        "\tfence.proxy.async.shared::cta;",
    ],
)
def test_a_meeting_behind_anything_else_stays(line):
    at = "\tshfl.sync.idx.b32"
    assert met(TEXT.replace(at, f"{line}\n{at}")).count(BARS) == 2


@pytest.mark.parametrize("form", [Form(64, 128, terms=64), Form(64, 64), Form(64, 128, 2), Form(64, 64, parts=2)])
def test_small_products_start_the_copies_of_a_round_at_once(form):
    """In what the triton that is installed writes, no meeting stands between two copies of a round."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 2048), (2048, 1016)))
    kernel = hopper_small.with_options(**form.options)
    text = kernel.lower(x, w, None, ta=False, tb=False, form=form, target="cuda:sm_90").texts["ptx"]
    kinds = {
        "copy": r"cp\.async\.bulk\.tensor\.2d\.shared",
        "meeting": r"bar\.sync\s+0;",
        "wait": r"try_wait|wait_group",
    }
    events = [name for line in text.split("\n") for name, kind in kinds.items() if re.search(kind, line)]
    assert events.count("copy") >= 4 and "copy meeting copy" not in " ".join(events)
