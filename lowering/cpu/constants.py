"""Constant tiles in the object's read-only data."""

from __future__ import annotations

import numpy as np

from jtile import ir

from .access import elem_bytes
from .convert import is_narrow, is_signed
from .llvm import Module, Val
from .values import Buffer, dense_strides


def dense_global(module: Module, op: ir.Dense) -> Buffer:
    """A `Dense` literal as bytes of a private global, in the memory form of its dtype: each element has whole bytes."""
    array = np.ascontiguousarray(op.reference())
    data = (
        array.astype(np.int8 if is_signed(op.dtype) else np.uint8).tobytes() if is_narrow(op.dtype) else array.tobytes()
    )
    assert len(data) == array.size * elem_bytes(op.dtype)
    name = module.constant(data)
    return Buffer(Val("ptr", name), op.shape, dense_strides(op.shape), op.dtype, None, owned=False)
