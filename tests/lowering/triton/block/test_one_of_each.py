"""Every block-level kernel of the library as machine code: the instructions that make it one, registers that hold what
its loops need, and uniform registers of its own in every role."""

from __future__ import annotations

import pytest
import triton
from one_of_each import compiled, kernels, missing, planted
from sass import spills_of_products, unwritten
from soak_families import FAMILIES

from jtile import ir
from jtile.errors import VerificationError

LOOP = """
.L_x_0:
        /*0000*/                   STL [R1], R2 ;
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/                   {spill} ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   LDL R2, [R1] ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""
WAIT = """
.L_x_0:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/              @!P1 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   LDL R2, [R1] ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   {turn} ;
        /*0070*/              @!P1 BRA `(.L_x_2) ;
        /*0080*/                   BRA `(.L_x_1) ;
"""
COPIED = """
        /*0000*/                   ELECT P0, UR6, PT ;
        /*0010*/                   UMOV UR5, UR6 ;
        /*0020*/                   UMOV UR4, UR7 ;
        /*0030*/                   UIADD3 UR8, {read}, 0x10, URZ ;
        /*0040*/                   EXIT ;
"""
SPILLS = {"hopper_attention_backward": 8}  # instructions in its loop: as few as of the one written by hand
OF_PTXAS_13 = {"latent_gradient_of_queries": 16}  # which comes with newer tritons; that of 3.6 keeps all in registers


def test_registers_that_nothing_has_written():
    """A copy of one is no fault before somebody reads the copy."""
    assert unwritten(COPIED.format(read="UR5")) == []
    assert unwritten(COPIED.format(read="UR4")) == ["0030 UIADD3 UR8, UR4, 0x10, URZ: UR4"]


def test_spills_are_counted_in_inner_loops():
    assert spills_of_products(LOOP.format(spill="@P2 LDL.64 R4, [R1+0x8]")) == ["0020 @P2 LDL.64 R4, [R1+0x8]"]
    assert spills_of_products(LOOP.format(spill="LDS R4, [R5]")) == []


def test_what_jumps_back_out_of_line_is_no_loop_around_it():
    """The turns of a wait stand behind the code that it lets go on, which runs once."""
    assert spills_of_products(WAIT.format(turn="NOP")) == []
    looped = WAIT.format(turn="STL [R1], R2").replace("EXIT", "BRA `(.L_x_1)")
    assert spills_of_products(looped) == ["0030 LDL R2, [R1]"]


def test_a_role_is_no_round_of_the_loop_that_starts_it():
    text = LOOP.format(spill="LDL R4, [R1]").replace("@!P0 BRA `(.L_x_1)", 'BRX R4 -0x10 (*"BRANCH_TARGETS .L_x_1"*)')
    assert "BRX" in text and spills_of_products(text) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_machine_code(family):
    for _, program, piece in kernels([family]):
        artifact = compiled(program, piece)
        sass = artifact.texts["sass"]
        assert artifact.launch["level"] == "block", artifact.texts["schedule"]
        assert missing(program.name, sass) == []
        assert unwritten(sass) == []
        allowed = SPILLS | ({} if triton.__version__.startswith("3.6") else OF_PTXAS_13)
        assert len(spills_of_products(sass)) <= allowed.get(program.name, 0)


def test_the_verifier_sees_the_race_that_racecheck_is_tried_with():
    ir.verify(planted(ordered=True), "block")
    with pytest.raises(VerificationError):
        ir.verify(planted(ordered=False), "block")
