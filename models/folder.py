"""Folders with `config.json` and safetensors, as transformers saves them and the hub serves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jtile._errors import ModelError

from .checkpoint import Checkpoint
from .entries import table, token_ids
from .families import read_config, text_of
from .formats import readers
from .mapped import Stored, TensorFile
from .tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"


def open_folder(path: Path, config_file: str = "config.json") -> Checkpoint:
    """Opens a folder with a configuration and one or more safetensors files; tensors are read when they are asked for.

    Raises:
      ModelError: a file is missing or damaged, the architecture is not one of `families`, or the weights are quantised
        in a way that jtile does not read.
    """
    config, prefix = text_of(read_json(path / config_file))
    parsed = read_config(config, str(path))
    tensors = readers(_of_text(stored_tensors(path), prefix), config, str(path))
    if parsed.tied if config.get("tie_word_embeddings") is None else config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    elif "lm_head.weight" not in tensors:
        raise ModelError(
            f"{path} lacks the tensor lm_head.weight, and its embeddings are not tied; "
            "the folder is incomplete, download it again"
        )
    extra = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else None
    eos = extra.get("eos_token_id", config.get("eos_token_id"))
    return Checkpoint(str(path), parsed, tensors, tokenizer, token_ids(eos, str(path)))


def _of_text(tensors: Mapping[str, Stored], prefix: str) -> Mapping[str, Stored]:
    """The tensors whose names begin with a prefix, by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def read_json(path: Path) -> dict:
    """The object that a JSON file of a folder holds.

    Raises:
      ModelError: it is missing or damaged, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} has no {path.name}; a model folder holds config.json and safetensors files"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, not an object; download it again")
    return content


def stored_tensors(path: Path) -> Mapping[str, Stored]:
    """The tensors of the safetensors files of a folder, in the order of their names; none is read.

    Raises:
      ModelError: there is no file, or one is damaged.
    """
    if (path / INDEX).exists():
        files = table(read_json(path / INDEX), "weight_map")
        if not all(isinstance(file, str) for file in files.values()):
            raise ModelError(f"the weight_map of {path / INDEX} names no files; download it again")
        opened = {file: TensorFile(path / file) for file in set(files.values())}
        return {name: Stored(opened[file], name) for name, file in sorted(files.items())}
    files = [TensorFile(file) for file in sorted(path.glob("*.safetensors"))]
    if not files:
        raise ModelError(f"{path} has no .safetensors file; a model folder holds config.json and safetensors files")
    return {name: Stored(file, name) for file in files for name in sorted(file.entries)}
