"""The options of a kernel that a user may give, and their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jtile._config import current
from jtile._errors import KernelValueError
from jtile.calls.signature import nearest
from jtile.primitive.options import Options

CHOICES: dict[str, tuple[Any, ...]] = {
    "interpret": (True, False),
    "fallback": ("raise", "interpret"),
    "num_warps": (1, 2, 4, 8, 16, 32),
    "num_stages": tuple(range(1, 17)),
    "num_ctas": (1, 2, 4, 8, 16),
    "consumers": (1, 2, 3, 4),
    "persistent": (True, False),
    "specialize": (True, False),
    "multicast": (1, 2, 4),
    "spread": (1, 2, 4),
}


def checked_options(old: Options, given: Mapping[str, Any], where: Any) -> Options:
    """The old options, replaced by those that are given; KernelValueError for what is no option, or no value of one."""
    for name, value in given.items():
        if name not in CHOICES:
            raise KernelValueError(f"a kernel has no option {name!r}{nearest(name, CHOICES)}", where)
        known = CHOICES[name]
        if value is not None and not any(type(value) is type(v) and value == v for v in known):
            numbers = isinstance(known[0], int) and not isinstance(known[0], bool)
            these = f"from {known[0]} to {known[-1]}" if name == "num_stages" else " or ".join(map(repr, known))
            raise KernelValueError(
                f"{name}={value!r}: this option of a kernel is {'a Python int, ' * numbers}{these}; leave it out, and "
                f"{'jtile chooses' if numbers else 'the configuration decides'}",
                where,
            )
    return dataclasses.replace(old, **given)


def in_force(options: Options) -> Options:
    """The options of a kernel that is called here, with what is promised here of kernels that overlap."""
    return dataclasses.replace(options, overlap=True) if current().overlap else options
