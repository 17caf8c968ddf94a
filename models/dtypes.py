"""The dtypes that a model computes with: of its activations, of its cache, and of dense weights beside them."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

import jtile as jt
from jtile._errors import ModelError
from jtile.ops import QuantizedTensor, rounded_rows

from .cache import SCALED
from .config import WeightSource
from .host import on_host

DTYPES = ("float32", "bfloat16", "float16")
CACHE_DTYPES = (*DTYPES, *SCALED)


def dtype_of(value, name: str, dtypes: tuple[str, ...] = DTYPES) -> str:
    """The name of one of `dtypes`, which is given as a name, a NumPy dtype or a scalar type; `name`: the argument that
    it is given by.

    Raises:
      ModelError: it is none of them, or the target at hand lacks it.
    """
    try:
        found = jnp.dtype(value).name
    except TypeError:
        found = str(value)
    there = [dtype for dtype in dtypes if dtype in jt.target().dtypes]
    if found in dtypes and found not in there:
        raise ModelError(f"{name}: the target {jt.target().name} has no {found}; it has {', '.join(there)}")
    if found not in dtypes:
        raise ModelError(f"{name} is one of {', '.join(dtypes)}, or None for the default; got {found}")
    return found


def default_dtype(stored) -> str:
    """The dtype that a model computes with if its matrices are stored as `stored`, an array or a `QuantizedTensor`:
    float32 on CPUs, whose kernels are fastest with it; on other devices the dtype of 16-bit floats, and bfloat16 beside
    quantised weights."""
    if on_host():
        return "float32"
    return "bfloat16" if isinstance(stored, QuantizedTensor) else stored.dtype.name


# endings of the names of matrices that are small and take part in float32 arithmetic
SMALL = (".gate.weight", ".router.weight", ".indexer.weights_proj.weight", "_bias")


def rounding(weight: WeightSource, dtype: str) -> WeightSource:
    """The tensors of `weight` as a model that computes in `dtype` holds them.

    Beside 16-bit activations dense matrices have their dtype. Norms, biases, routers and the weights of an indexer's
    heads, which are small and take part in float32 arithmetic, stay as they are, quantised weights too, and all weights
    of a model that computes in float32.
    """
    if dtype == "float32":
        return weight

    def read(name: str, shape: tuple[int, ...]):
        tensor = weight(name, shape)
        small = len(shape) < 2 or name.endswith(SMALL)
        return tensor if small or tensor is None or isinstance(tensor, QuantizedTensor) else tensor.astype(dtype)

    return read


def in_integers(weight: WeightSource) -> WeightSource:
    """The tensors of `weight`; products with quantised ones may round their rows to integers of 16 bits where the
    machine multiplies such fastest. This is what `default_dtype` stands for there: float32 does not round."""
    if "int16 products" not in jt.target().features:
        return weight

    def read(name: str, shape: tuple[int, ...]):
        tensor = weight(name, shape)
        fits = isinstance(tensor, QuantizedTensor) and tensor.kind in rounded_rows.KINDS and tensor.ndim == 2
        return dataclasses.replace(tensor, activations=rounded_rows.INTEGERS) if fits else tensor

    return read


def packing(weight: WeightSource, dtype: str = "float32") -> WeightSource:
    """The quantised tensors of `weight` in the form in which the device at hand multiplies them fastest with
    activations of this dtype.

    They are changed once, as they are read: inside a program this would be a pass over the weights in each run. Where
    `ops.grouped_matmul` has no kernel for words, weights of experts stay as they are.
    """
    if "warpgroup products" in jt.target().features:
        fits, packed = functools.partial(_fits_words, dtype=dtype), QuantizedTensor.packed
    elif "int16 products" in jt.target().features:
        fits, packed = _fits_panels, QuantizedTensor.in_panels
    else:
        return weight

    def read(name: str, shape: tuple[int, ...]):
        tensor = weight(name, shape)
        return packed(tensor) if isinstance(tensor, QuantizedTensor) and fits(tensor, ".experts." in name) else tensor

    return read


def _fits_words(tensor: QuantizedTensor, expert: bool, dtype: str) -> bool:
    """Whether products on GPUs take this weight, perhaps one of an expert, packed; stacks of all experts stay as they
    are."""
    if not expert:
        return tensor.shape[1] % 32 == 0
    if tensor.ndim != 2:
        return False
    kinds = tensor.kind in ("int8", "fp8", "q8_0", "q4_0", "q4_1")
    return kinds and dtype != "float32" and tensor.shape[0] % 128 == 0 and tensor.shape[1] % 256 == 0


def _fits_panels(tensor: QuantizedTensor, expert: bool) -> bool:
    """Whether each product on CPUs takes this weight in panels, which none with experts' weights does: rows may be
    rounded, and where they are to have the same bits in any company, too."""
    in_integers = tensor.activations == rounded_rows.INTEGERS and tensor.shape[0] % 16 == 0
    return not expert and in_integers and (tensor.kind == "q8_0" or tensor.group == rounded_rows.BLOCK)
