"""Tuning: what can be chosen for a kernel, a cost model, a measured search, and a cache of winners; `jt.auto`,
`jt.explain`, `jt.cost`, `jt.bench` and `jt.profile`.

`warpgroups.py` (the model of time of products), `products.py` (rules where there is none), `nature.py` (what a traced
kernel computes), `guesses.py`, `auto.py` and `resolve.py` (`jt.auto`), `space.py` (a search space, one call),
`choose.py` (what a call gets), `search.py` (pruned by `prune.py`, timed by `measure.py`), `store.py` (the files),
`cost.py` (bytes and operations of a kernel), `roofline.py` and `advice.py` (`jt.explain`), `totals.py` (`jt.cost`),
`timings.py` (`jt.bench`), `watch.py` and `timeline.py` (`jt.profile`), `api.py`.

The module can be called: `jt.tune(f, *args)` is `jtile.tune.api.tune`.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtile.tune.api import Report as Report
    from jtile.tune.api import Tuned as Tuned
    from jtile.tune.api import autotune as autotune
    from jtile.tune.api import tune as tune
    from jtile.tune.roofline import Explanation as Explanation
    from jtile.tune.roofline import explain as explain
    from jtile.tune.timings import Bench as Bench
    from jtile.tune.timings import bench as bench
    from jtile.tune.watch import Profile as Profile
    from jtile.tune.watch import profile as profile

_NAMES = {"Report": "api", "Tuned": "api", "autotune": "api", "tune": "api"}
_NAMES |= {
    "Bench": "timings",
    "bench": "timings",
    "Explanation": "roofline",
    "explain": "roofline",
    "Profile": "watch",
    "profile": "watch",
}


class _Room(types.ModuleType):
    """Python sets `jtile.tune` to this module when a part of it is imported: so that `jt.tune(...)` works then too."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.tune(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module 'jtile.tune' has no attribute {name!r}")
        return getattr(importlib.import_module(f"jtile.tune.{_NAMES[name]}"), name)


sys.modules[__name__].__class__ = _Room
