"""How many random examples a test takes: half of what is written, twice as many with `--runslow`, ten times with
`--explore`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FEWEST = 8


def draws(count: int, quick: int | None = None) -> settings:
    """Settings of a test that draws `count` examples, or the multiple that the command line asks for; slow ones too.
    At least eight, as the first of hypothesis's are the simplest. `quick`: of `make test`, where half is dear."""
    asked = quick if quick and not thorough() else count * settings.default.max_examples // 100
    return settings(max_examples=max(asked, min(count, FEWEST)), suppress_health_check=list(HealthCheck))


def thorough() -> bool:
    """Whether the command line asks for more than `make test` does: combinations of what is tested alone as well."""
    return settings.default.max_examples > settings.get_profile("ci").max_examples
