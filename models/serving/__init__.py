"""Serving: many requests at a time on one model, with a paged cache whose prefixes are shared."""

from .engine import Engine, Stream
from .grammar import Grammar
from .request import Completion, Token

__all__ = ["Completion", "Engine", "Grammar", "Stream", "Token"]
