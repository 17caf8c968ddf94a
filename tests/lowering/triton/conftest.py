"""What tests of the Triton back end share."""

from __future__ import annotations

import pytest

from jtile import ir
from jtile.lowering.triton.emitter import EMITTERS


@pytest.fixture
def garbage(monkeypatch):
    """Loads leave garbage beyond their tiles: NaN, True, and numbers that no op expects."""
    load = EMITTERS[ir.Load]

    def with_garbage(em, op):
        v, mask = load(em, op), em.valid(op.result.shape)
        if mask is None:
            return v
        number = float("nan") if v.is_float else 1 if v.elem == "i1" else 7 if op.result.dtype == "uint4" else -7
        return em.code.select(mask, v, em.code.const(number, v.elem, v.shape))

    monkeypatch.setitem(EMITTERS, ir.Load, with_garbage)
