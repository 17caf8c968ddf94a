"""How many random examples a test takes: as written, twice as many with `--runslow`, ten times with `--explore`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def draws(count: int) -> settings:
    """Settings of a test that draws `count` examples, or the multiple that the command line asks for; slow ones too."""
    return settings(max_examples=count * settings.default.max_examples // 100, suppress_health_check=list(HealthCheck))
