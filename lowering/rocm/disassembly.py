"""Facts of a kernel for an AMD GPU, read from the assembly that triton gives (`amdgcn`)."""

from __future__ import annotations

import dataclasses
import re

_MATRIX = re.compile(r"^\s*(v_(?:s?mfmac?|s?wmmac?)_\w+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Registers of a lane (vector and accumulation), bytes that it spills, and bytes of LDS that are fixed."""

    registers: int
    spills: int
    lds: int


def facts(amdgcn: str) -> Facts:
    """The numbers of the metadata at the end of the text; 0 for what is missing."""
    number = lambda name: int(found[1]) if (found := re.search(rf"\.{name}:\s*(\d+)", amdgcn)) else 0
    spills = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
    # CDNA's accumulation registers are counted in vgpr_count, too: the file is one.
    return Facts(max(number("vgpr_count"), number("agpr_count")), spills, number("group_segment_fixed_size"))


def matrix_instructions(amdgcn: str) -> list[str]:
    """The mnemonics of the matrix instructions (MFMA, WMMA) in the order of the text."""
    return _MATRIX.findall(amdgcn)
