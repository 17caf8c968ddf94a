"""What `quantization_config` of a config.json says of the tensors of a folder, and readers of them by plain names.

A layer is quantised if its tensors say so: what a configuration leaves out by name lies in the file as plain floats.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from . import int4_formats
from .entries import count, number, table
from .float4_formats import mxfp4
from .float8_formats import float8, float8_method
from .mapped import SCALES, Stored, expect

Readers = dict[str, Callable[[], "jax.Array | QuantizedTensor"]]
CONFIGURATIONS = ("quantization_config", "compression_config")  # the keys of a config.json, the newer one first
WAY_OUT = "take one of these, or a checkpoint in bfloat16"


def readers(tensors: Mapping[str, Stored], config: Mapping, source: str) -> Readers:
    """The functions that read the weights of a folder, quantised or not, by the names that unquantised weights have.

    Raises:
      ModelError: the weights are quantised in a way that jtile does not read.
    """
    entries = table(config, *CONFIGURATIONS)
    found: Readers = {name: Plain(tensor) for name, tensor in tensors.items()}
    if not entries:
        return found
    method = entries.get("quant_method")
    if method not in list(METHODS):  # a list, since the entry comes from a file and may be unhashable
        raise ModelError(
            f"the weights of {source} are quantised by {method!r}; jtile reads {', '.join(METHODS)}: {WAY_OUT}"
        )
    return found | METHODS[method](tensors, entries, source)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Reads a tensor of floats, or a part of it."""

    tensor: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def __call__(self) -> jax.Array:
        return self._checked()()

    def part(self, cuts: Mapping[int, np.ndarray]) -> jax.Array:
        """See `Stored.part`."""
        return self._checked().part(cuts)

    def _checked(self) -> Stored:
        if self.tensor.dtype.itemsize == 1:
            raise ModelError(f"the tensor {self.tensor.name} is {self.tensor.dtype.name}, and nothing gives its scales")
        return self.tensor


def _layers(tensors: Mapping[str, Stored], ending: str) -> list[str]:
    return [name.removesuffix(ending) for name in tensors if name.endswith(ending)]


def _awq(tensors: Mapping[str, Stored], entries: Mapping, source: str) -> Readers:
    version = "gemm" if entries.get("version") is None else entries["version"]
    version = version.lower() if isinstance(version, str) else version
    _refuse(source, "AWQ", bits=(number(entries, "bits"), 4), version=(version, "gemm"))
    group = _group(entries, "group_size")
    read = lambda base: functools.partial(int4_formats.awq, tensors, base, group)
    return {f"{base}.weight": read(base) for base in _layers(tensors, ".qweight")}


def _gptq(tensors: Mapping[str, Stored], entries: Mapping, source: str) -> Readers:
    version = entries.get("checkpoint_format") or "gptq"
    wanted = version if version in ("gptq", "gptq_v2") else "gptq or gptq_v2"
    _refuse(source, "GPTQ", bits=(number(entries, "bits"), 4), checkpoint_format=(version, wanted))
    group = _group(entries, "group_size")
    read = lambda base: functools.partial(int4_formats.gptq, tensors, base, group, version == "gptq")
    return {f"{base}.weight": read(base) for base in _layers(tensors, ".qweight")}


def _compressed(tensors: Mapping[str, Stored], entries: Mapping, source: str) -> Readers:
    """The readers for compressed-tensors: the names of its tensors tell the format of a layer, and its group in the
    configuration the numbers of that format."""
    groups = [g for g in table(entries, "config_groups").values() if isinstance(g, Mapping)]
    schemes = [table(g, "weights") for g in groups]
    integers = [s for s in schemes if s.get("type") == "int"]
    known = ("tensor", "channel", "group", "block")
    for scheme in schemes:
        bits, kind, strategy = scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)) or strategy not in known:
            raise ModelError(
                f"the weights of {source} are {kind!r} of {bits!r} bits, a scale for each {strategy!r}; of "
                f"compressed-tensors jtile reads int of 4 or 8 bits and float of 8 bits: {WAY_OUT}"
            )
    if len({(s.get("num_bits"), _group(s, "group_size")) for s in integers}) > 1:
        raise ModelError(f"{source} mixes several sizes of integers or groups, which jtile does not read: {WAY_OUT}")
    symmetric = all(_symmetric(s, source) for s in integers)
    found: Readers = dict(float8(tensors, float8_method(entries, schemes, groups, source)))
    for base in _layers(tensors, ".weight_packed"):
        if not integers:
            raise ModelError(f"{source} has the packed tensor {base}.weight_packed, but no scheme of integers")
        bits, group = number(integers[0], "num_bits"), _group(integers[0], "group_size")
        found[f"{base}.weight"] = functools.partial(int4_formats.packed, tensors, base, group, bits, symmetric)
    for base in _layers(tensors, ".weight_scale"):
        if f"{base}.weight" in tensors and tensors[f"{base}.weight"].dtype.name == "int8":
            found[f"{base}.weight"] = functools.partial(_int8, tensors, base, symmetric)
    return found


def _symmetric(scheme: Mapping, source: str) -> bool:
    value = scheme.get("symmetric")
    if value not in (None, True, False):
        raise ModelError(f"the weights of {source} have 'symmetric' = {value!r}; expected true or false")
    return value is None or bool(value)


def _int8(tensors: Mapping[str, Stored], base: str, symmetric: bool) -> QuantizedTensor:
    """The int8 matrix [out, in] with one scale for each row or for all rows."""
    name = f"{base}.weight"
    stored, scale = tensors[name], tensors[f"{base}.weight_scale"]
    rows = stored.shape[0] if stored.shape else 0
    if len(stored.shape) != 2 or 0 in stored.shape or scale.shape not in ((rows, 1), (rows,), (1,), ()):
        raise ModelError(f"the tensor {name} {stored.shape} has scales {scale.shape}; expected one a row, or one")
    expect(scale, name, SCALES)
    int4_formats.refuse_zeros(tensors, base, name, symmetric)
    return QuantizedTensor.from_int8(stored(), scale().reshape(-1, 1))


def _float8(tensors: Mapping[str, Stored], entries: Mapping, source: str) -> Readers:
    return dict(float8(tensors, float8_method(entries, [], [], source)))


def _float4(tensors: Mapping[str, Stored], entries: Mapping, source: str) -> Readers:
    return dict(mxfp4(tensors))


METHODS: dict[str, Callable[[Mapping[str, Stored], Mapping, str], Readers]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _float8,
    "fp8": _float8,
    "gptq": _gptq,
    "mxfp4": _float4,
}


def _group(entries: Mapping, key: str) -> int | None:
    """The size of groups that the entry `key` gives; None, 0 and -1 mean the whole row."""
    value = entries.get(key)
    return None if value in (None, -1) else count(entries, key, 0) or None


def _refuse(source: str, method: str, **wanted: tuple[Any, Any]) -> None:
    for key, (value, expected) in wanted.items():
        if value != expected:
            raise ModelError(
                f"the weights of {source} are quantised by {method} with {key} {value!r}; jtile reads {expected!r}: "
                f"{WAY_OUT}"
            )
