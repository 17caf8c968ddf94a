"""The last step, from an artifact to an object: by the user's own `bishengir-compile` with the `hivmc` of CANN."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from jtile._errors import CompileError

from . import tools
from .compile import TO_HIVM, unpack

ELF = b"\x7fELF"


def image_for_launch(image: bytes) -> bytes:
    """The object of an artifact's image, where `hivmc` is on the PATH; else the image as it is, which holds texts."""
    return build(image) if shutil.which("hivmc") else image


@functools.lru_cache(maxsize=64)
def build(image: bytes) -> bytes:
    """Compile the linalg text of an image to an object.

    Raises:
      CompileError: `bishengir-compile` or `hivmc` failed; the message has what it said.
    """
    content = unpack(image)
    said = ""
    with tempfile.TemporaryDirectory(prefix="jtile-ascend-") as name:
        folder = Path(name)
        (folder / "kernel.mlir").write_text(content["texts"]["linalg"])
        for buffers in (True, False):  # as in `compile.to_hivm`
            how = [f"--enable-auto-multi-buffer={buffers}", f"--target={content['target']}", "-o", "kernel.o"]
            command = [str(tools.needed(tools.COMPILER)), "kernel.mlir", *TO_HIVM, *how]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False,
                                  timeout=tools.SECONDS)  # fmt: skip
            made = folder / "kernel.o"
            found = made.read_bytes() if done.returncode == 0 and made.is_file() else b""
            if found.startswith(ELF):
                return found
            said = done.stderr.strip()
    raise CompileError(
        f"{content['symbol']}: bishengir-compile with the hivmc of this machine made no object for "
        f"{content['target']}: {said[-400:] or 'it said nothing'}"
    )
