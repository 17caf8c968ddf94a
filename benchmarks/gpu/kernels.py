"""Where the time of a run goes, by kernel: from the trace of XLA's profiler."""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping

import jax


def by_kernel(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """(how often, microseconds in all) of every kernel that `run()` starts on a GPU, the longest first; empty where the
    profiler sees no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        planes = [plane for file in files for plane in jax.profiler.ProfileData.from_file(str(file)).planes]
        counts: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        for plane in planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                for event in line.events if line.name.startswith("Stream") else ():
                    entry = counts[re.sub(r"(\.|_)\d+$", "", event.name)]
                    entry[0] += 1
                    entry[1] += event.duration_ns / 1e3
    return {name: (int(n), us) for name, (n, us) in sorted(counts.items(), key=lambda item: -item[1][1])}


def difference(
    whole: dict[str, tuple[int, float]], part: dict[str, tuple[int, float]], parts: int
) -> dict[str, tuple[float, float]]:
    """The kernels that `whole` has beside those of `part`, counts and times divided by `parts`, as `by_kernel` gives
    them."""
    found = {}
    for name, (n, us) in whole.items():
        before, earlier = part.get(name, (0, 0.0))
        if n > before:
            found[name] = (n - before) / parts, (us - earlier) / parts
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def rows(found: Mapping[str, tuple[float, float]], most: int = 40) -> dict[str, list[float]]:
    """The longest kernels as a record keeps them: [how often, microseconds in all], of four digits."""
    return {name: [float(f"{n:.4g}"), float(f"{us:.4g}")] for name, (n, us) in [*found.items()][:most]}


def table(found: Mapping[str, tuple[float, float]], most: int = 14) -> str:
    """A line for each of the longest kernels: share, microseconds in all, how often, microseconds of one, name."""
    if not found:
        return "    the profiler saw no kernel on a GPU"
    whole = sum(us for _, us in found.values())
    line = lambda name, n, us: f"    {100 * us / whole:5.1f} % {us:10.0f} us {n:6.5g} x {us / n:8.1f} us  {name[:90]}"
    lines = [line(name, n, us) for name, (n, us) in [*found.items()][:most]]
    return "\n".join([f"    {sum(n for n, _ in found.values()):.5g} kernels take {whole:.0f} us", *lines])
