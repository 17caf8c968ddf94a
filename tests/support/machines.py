"""Machines that plans of the block level are made for."""

from __future__ import annotations

import dataclasses
from typing import Any

from jtile.lowering import platforms, targets
from jtile.lowering.triton.block.passes import Machine


def machine(**facts: Any) -> Machine:
    """That of sm_90's common card, an H200, with other facts where they are given."""
    return dataclasses.replace(Machine.of(targets.resolve("cuda:sm_90")), **facts)


def card(arch: str) -> targets.Target:
    """The target of an architecture of GPUs, with the numbers of its common card."""
    return platforms.claiming(arch).resolve(f":{arch}")
