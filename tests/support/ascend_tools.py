"""Whether the programs that compile for Ascend are there, for tests to skip without them."""

from __future__ import annotations

import pytest

from jtile.lowering.ascend import tools

MISSING = [name for name in (tools.ADAPTER, tools.COMPILER, tools.OPT) if tools.find(name) is None]
needs_tools = pytest.mark.skipif(
    bool(MISSING), reason=f"Ascend: {', '.join(MISSING)} is missing; `make ascend-tools` fetches it"
)
