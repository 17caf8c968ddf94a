"""Serving: many requests at a time on one model, with a paged cache whose prefixes are shared."""

from .engine import Engine, Stream
from .request import Completion, Token

__all__ = ["Completion", "Engine", "Stream", "Token"]
