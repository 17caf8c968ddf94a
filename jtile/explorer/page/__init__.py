"""The page: a template, its style and its scripts, put together into one file."""

from .document import document

__all__ = ["document"]
