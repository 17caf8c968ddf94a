"""Language models on jtile kernels: `load` gives a `LanguageModel` (`logits`, `generate`, `stream`, `tokenizer`)."""

if not __name__.startswith("jtile."):
    raise ImportError("import jtile.models, not models: this folder is part of the jtile package")

from jtile.models.console import run_generate
from jtile.models.decoder import Decoder
from jtile.models.generate import Generation, LanguageModel, Stats
from jtile.models.load import load
from jtile.models.tokenizer import Tokenizer

__all__ = ["Decoder", "Generation", "LanguageModel", "Stats", "Tokenizer", "load", "run_generate"]
