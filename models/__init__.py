"""Language models on jtile kernels: `load` gives a `LanguageModel` (`logits`, `generate`, `stream`, `tokenizer`)."""

if not __name__.startswith("jtile."):
    raise ImportError("import jtile.models, not models: this folder is part of the jtile package")

from .adapters import Adapter, read_adapter, save_adapter
from .batch import run_batch
from .chat import run_chat
from .console import run_generate, run_serve
from .decoder import Decoder
from .generate import Generation, LanguageModel, Stats
from .load import load
from .quantize import quantize_folder, run_quantize
from .serving import Completion, Engine, Grammar, Token
from .speculation import NGram
from .tokenizer import Tokenizer

__all__ = [
    "Adapter", "Completion", "Decoder", "Engine", "Generation", "Grammar", "LanguageModel", "NGram", "Stats", "Token",
    "Tokenizer", "load", "quantize_folder", "read_adapter", "run_batch", "run_chat", "run_generate", "run_quantize",
    "run_serve", "save_adapter",
]  # fmt: skip
