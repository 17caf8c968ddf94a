"""Golden text of passes."""

from __future__ import annotations

import textwrap

from jtile.ir import parse_kernel, print_kernel, verify
from jtile.ir.block import level_of
from jtile.passes import Pass, run_pipeline


def check(passes: Pass | tuple[Pass, ...], before: str, after: str) -> None:
    """Run passes over a kernel written as text and compare with the expected text, line by line."""
    kernel = parse_kernel(before)
    verify(kernel, level_of(kernel))
    kept = print_kernel(kernel)
    result = run_pipeline(kernel, passes if isinstance(passes, tuple) else (passes,))
    verify(result, level_of(result))
    got = print_kernel(result)
    assert got.splitlines() == textwrap.dedent(after).strip("\n").splitlines(), f"\n{got}"
    assert print_kernel(kernel) == kept, "a pass changed its argument"
