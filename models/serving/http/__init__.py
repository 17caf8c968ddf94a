"""OpenAI's HTTP interface to an engine, as a Starlette application. It needs the packages of the extra `serve`."""

from .app import make_app

__all__ = ["make_app"]
