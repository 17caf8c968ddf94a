"""What `jtile.testing.check_kernel` found: one line a check, as a table, plain data, and a row of a wider table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Status = Literal["passed", "skipped", "failed"]

# The columns of "what composes with what": first words of the names of checks.
TRANSFORMS = (
    "value", "jit", "interpreter", "poison", "dtype", "jvp", "vjp", "numeric", "checkpoint", "vmap", "grad of vmap",
    "vmap of grad", "second order", "shard_map", "partitioned jit", "export",
)  # fmt: skip


INTEGERS = "of integers"  # the subject of the check of float0 cotangents


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
      transform: one of `TRANSFORMS`.
      subject: what it was about: an argument's name, a dtype, or nothing.
      status: `"passed"`, `"skipped"` or `"failed"`.
      error: largest relative error of a leaf; None where nothing was compared.
      limit: what that error may be.
      detail: why it was skipped, or how it failed.
    """

    transform: str
    subject: str = ""
    status: Status = "passed"
    error: float | None = None
    limit: float | None = None
    detail: str = ""

    @property
    def name(self) -> str:
        return f"{self.transform} {self.subject}".strip()

    def __str__(self) -> str:
        numbers = "" if self.error is None else f"{self.error:.1e} of {self.limit:.1e}"
        return f"{self.name:<24} {self.status:<8} {numbers:<19} {self.detail}".rstrip()


@dataclasses.dataclass(frozen=True)
class Report:
    """The checks of one kernel; prints as a table.

    Attributes:
      kernel: the name of the kernel.
      checks: the checks in the order in which they ran.
    """

    kernel: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if c.status == "failed")

    def __getitem__(self, name: str) -> Check:
        """The check of this name, such as `"vmap x"`."""
        return next(c for c in self.checks if c.name == name)

    def __str__(self) -> str:
        return "\n".join([f"check_kernel {self.kernel}", *[f"  {c}" for c in self.checks]])

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON.

        Returns:
          A dict that `from_dict` reads.
        """
        return {"kernel": self.kernel, "checks": [dataclasses.asdict(c) for c in self.checks]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """The report that `as_dict` made plain data of.

        Args:
          data: what `as_dict` gave.
        Returns:
          An equal report.
        """
        return Report(data["kernel"], tuple(Check(**c) for c in data["checks"]))

    def row(self) -> dict[str, str]:
        """What can be said of each transform; those that no check was about are left out.

        Returns:
          By the name of a transform `"yes"`, `"no: why"`, `"failed"`, or what passed and what did not, and why.
        """
        out = {}
        for transform in TRANSFORMS:
            mine = [c for c in self.checks if c.transform == transform]
            if mine:
                out[transform] = _summary(transform, mine)
        return out


def _summary(transform: str, checks: list[Check]) -> str:
    if any(c.status == "failed" for c in checks):
        return "failed"
    passed = [c.subject for c in checks if c.status == "passed"]
    skipped = [c for c in checks if c.status == "skipped"]
    if not passed:
        return "no: " + "; ".join(dict.fromkeys(c.detail for c in skipped))
    if transform == "dtype":
        return ", ".join(passed)
    if not skipped:
        return "yes"
    parts = ", ".join(p for p in passed if p != INTEGERS) or "yes"
    return "; ".join([parts, *[f"not {c.subject}: {c.detail}" for c in skipped]])
