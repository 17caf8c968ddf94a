"""jtile's custom calls in the text of a lowered or compiled program, on any platform."""

from __future__ import annotations

import re

_CALL = re.compile(r'(?:@|custom_call_target=")jtile_(?:cpu|cuda|rocm)(?:_io)?\b')


def calls(text: str) -> int:
    """How many there are."""
    return len(_CALL.findall(text))
