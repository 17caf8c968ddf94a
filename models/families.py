"""The architectures that `jtile.models` runs, by the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jtile._errors import ModelError

from . import mistral, qwen2
from .config import DecoderConfig
from .deepseek import DeepseekConfig
from .entries import items, table
from .gemma import GemmaConfig
from .gpt_oss import GptOssConfig
from .llama import LlamaConfig
from .llama4 import Llama4Config
from .mixtral import MixtralConfig
from .qwen3 import Qwen3Config
from .qwen3_next import Qwen3NextConfig

# `model_type` of a config.json -> (the class of transformers, the function that reads its configuration)
FAMILIES: dict[str, tuple[str, Callable[[Mapping], DecoderConfig]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", DeepseekConfig.from_hf),
    "deepseek_v32": ("DeepseekV32ForCausalLM", DeepseekConfig.from_hf),
    "gemma2": ("Gemma2ForCausalLM", GemmaConfig.from_hf),
    "gemma3_text": ("Gemma3ForCausalLM", GemmaConfig.from_hf),
    "gpt_oss": ("GptOssForCausalLM", GptOssConfig.from_hf),
    "llama": ("LlamaForCausalLM", LlamaConfig.from_hf),
    "llama4_text": ("Llama4ForCausalLM", Llama4Config.from_hf),
    "mistral": ("MistralForCausalLM", mistral.from_hf),
    "mixtral": ("MixtralForCausalLM", MixtralConfig.from_hf),
    "qwen2": ("Qwen2ForCausalLM", qwen2.from_hf),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config.from_hf),
    "qwen3_moe": ("Qwen3MoeForCausalLM", Qwen3Config.from_hf),
    "qwen3_next": ("Qwen3NextForCausalLM", Qwen3NextConfig.from_hf),
}

# `model_type` of models of text and images, of which jtile runs the text part -> the `model_type` of that part, and
# the prefix of its tensors
TEXTS = {"llama4": ("llama4_text", "language_model.")}
BEYOND = ("model_type", "architectures", "text_config", "vision_config")


def text_of(config: Mapping) -> tuple[Mapping, str]:
    """(the configuration of the text part of a model, the prefix of the names of its tensors).

    Raises:
      ModelError: a model of text and images without `text_config`.
    """
    if config.get("model_type") not in list(TEXTS):
        return config, ""
    kind, prefix = TEXTS[config["model_type"]]
    text = table(config, "text_config")
    if not text:
        raise ModelError(f"a configuration of the type {config['model_type']!r} lacks 'text_config'; it is damaged")
    return {**{k: v for k, v in config.items() if k not in BEYOND}, **text, "model_type": kind}, prefix


def read_config(config: Mapping, source: str) -> DecoderConfig:
    """The configuration of the model that a `config.json` describes.

    Raises:
      ModelError: neither its `model_type` nor its `architectures` are known, or they ask for another head than that of
        a language model, or an entry is wrong.
    """
    config, _ = text_of(config)
    kind, classes = config.get("model_type"), items(config, "architectures", str)
    by_class = {name: kind for kind, (name, _) in FAMILIES.items()}
    kind = kind or next((by_class[name] for name in classes if name in by_class), None)
    if kind not in list(FAMILIES):  # a list, since the entry comes from a file and may be unhashable
        raise ModelError(
            f"{source} holds a model of the type {kind!r} ({', '.join(classes) or 'no architectures'}); "
            f"jtile runs {', '.join(map(repr, FAMILIES))}"
        )
    name, read = FAMILIES[kind]
    if classes and name not in classes:
        raise ModelError(f"{source} holds a {', '.join(classes)}; of the type {kind!r} jtile runs {name}")
    return read({**config, "model_type": kind})
