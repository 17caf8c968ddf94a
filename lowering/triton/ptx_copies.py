"""PTX of kernels whose warps meet less often while they start copies.

Triton lets the warps of a kernel meet in front of each copy by a tensor map and behind it. A meeting is left out where
the role, since the meeting before it, has only said how many bytes are to come, and started copies. Whatever stands in
front of the earlier meeting is done for all warps since then. What the copies bring is waited for at barriers in shared
memory, which count bytes that come before they are told of them, too. The phase of such a barrier does not end before
that, since the thread that tells it is an arrival that it waits for.
"""

from __future__ import annotations

import re

_MEETING = re.compile(r"^\s*bar\.sync\s+0;")
_PLAIN = (
    "add", "sub", "mul", "mad", "and", "or", "xor", "not", "shl", "shr", "mov", "setp", "selp", "cvt", "min", "max",
    "elect\\.sync", "shfl\\.sync",
)  # fmt: skip
_NOTHING = re.compile(  # that another warp could see, but starts of copies
    rf"^\s*(?:$|//|\.loc\b|\$L__tmp\d+:|(?:{'|'.join(_PLAIN)})[.\s]"
    r"|@%p\d+ (?:mbarrier\.arrive\.expect_tx\.shared|cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global)[.:])"
)


def met(text: str) -> str:
    """PTX of a kernel in which all warps meet, without the meetings that nothing needs: see above."""
    out: list[str] = []
    again = False  # whether nothing but that stands behind the last meeting
    for line in text.split("\n"):
        if _MEETING.match(line):
            if again:
                continue
            again = True
        else:
            again = again and _NOTHING.match(line) is not None
        out.append(line)
    return "\n".join(out)
