"""Passes and pipelines: named values, run in order, dumped and verified on request."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from jtile._collector import paused
from jtile._config import current
from jtile._errors import JtileError, KernelValueError, VerificationError
from jtile.ir import Kernel, print_kernel, verify
from jtile.ir.block import level_of


@dataclasses.dataclass(frozen=True)
class Pass:
    """A transformation of kernels.

    Attributes:
      name: one word, the name of its dump.
      ensures: one sentence: what holds of every kernel afterwards.
      run: kernel in, kernel out; the argument is not changed, and comes back where there is nothing to do.
      settles: whether it has nothing to do for what it has made.
    """

    name: str
    ensures: str
    run: Callable[[Kernel], Kernel]
    settles: bool = False

    def __call__(self, kernel: Kernel) -> Kernel:
        return self.run(kernel)


Pipeline = tuple[Pass, ...]


@paused()
def run_pipeline(kernel: Kernel, pipeline: Iterable[Pass], level: str | None = None) -> Kernel:
    """The kernel after every pass of `pipeline`, in order; `level` is checked (None: that of the kernel).

    With the option `dump`, the text before the first and after every pass goes to numbered files in a folder of this
    kernel. With the option `verify`, the kernel is checked before the first pass and after the last, and if it breaks a
    rule then, the passes run once more with a check after each, so that the message names the one that broke it.

    Raises:
      VerificationError: a pass (named in the message) broke a rule of the IR at `level`.
    """
    options = current()
    level = level or level_of(kernel)
    if options.verify:
        verify(kernel, level)
        pipeline = tuple(pipeline)
        if not options.dump and (after := _verified(kernel, pipeline, level)) is not None:
            return after
    folder = dump_folder(kernel) if options.dump else None
    if folder:
        dump(folder, 0, "traced.tile", print_kernel(kernel))
    made: dict[str, Kernel] = {}
    for number, step in enumerate(pipeline, 1):
        before, kernel = kernel, _run(step, kernel, made)
        if folder:
            dump(folder, number, f"{step.name}.tile", print_kernel(kernel))
        if options.verify and kernel is not before:
            _verify_after(step, kernel, level)
    return kernel


def _run(step: Pass, kernel: Kernel, made: dict[str, Kernel]) -> Kernel:
    """The kernel after a pass; `made`: what each pass that settles has made last."""
    if made.get(step.name) is not kernel:
        kernel = step.run(kernel)
        if step.settles:
            made[step.name] = kernel
    return kernel


def _verified(kernel: Kernel, pipeline: Pipeline, level: str) -> Kernel | None:
    """The kernel after all passes, checked once: half of the time of many passes is to check what they made. None where
    a pass fails or the kernel breaks a rule, of which the one that is to blame may be an earlier pass."""
    after, made = kernel, {}
    try:
        for step in pipeline:
            after = _run(step, after, made)
        if after is not kernel:
            verify(after, level)
    except Exception:  # it is raised again where the passes run one by one
        return None
    return after


def _verify_after(step: Pass, kernel: Kernel, level: str) -> None:
    try:
        verify(kernel, level)
    except JtileError as e:
        raise VerificationError(f"after pass {step.name}: {e.message}", e.where) from e


def dump_folder(kernel: Kernel) -> Path | None:
    """The folder for the texts of this kernel under the option `dump` (None: no dumps); the same in every process."""
    root = current().dump
    if not root:
        return None
    digest = hashlib.sha256(print_kernel(kernel).encode()).hexdigest()[:8]
    folder = Path(root) / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', kernel.name)}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _no_dump(e) from e
    return folder


def dump(folder: Path, number: int, name: str, text: str) -> None:
    """Write one numbered level to a file such as `02_cse.tile`."""
    try:
        (folder / f"{number:02d}_{name}").write_text(text)
    except OSError as e:
        raise _no_dump(e) from e


def _no_dump(e: OSError) -> KernelValueError:
    return KernelValueError(f"option dump={current().dump!r}: cannot be written: {e}; give a folder that can")
