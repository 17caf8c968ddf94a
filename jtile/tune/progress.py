"""A progress bar on a terminal; nothing elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

Show = Callable[[str, str, int, int], None]


@contextlib.contextmanager
def bar(*, enabled: bool) -> Iterator[Show]:
    """Give a function `show(label, what, done, total)` that draws the bar; without a terminal it does nothing."""
    if not (enabled and sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda label, what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("tune")

        def show(label: str, what: str, done: int, total: int) -> None:
            shown.update(task, description=f"{label}: {what}", completed=done, total=total)

        yield show
