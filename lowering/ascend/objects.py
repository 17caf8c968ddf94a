"""The last step, from an artifact to an object: by the user's own `bishengir-compile` with the `hivmc` of CANN."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

from jtile._errors import CompileError

from . import hivm, tools
from .compile import arguments, saved, unpack

ELF = b"\x7fELF"


def for_launch(image: bytes, record: str) -> tuple[bytes, str]:
    """The object of an artifact's image and its launch record, where `hivmc` is on the PATH; else both as they are: an
    image without an object holds texts.

    Raises:
      CompileError: see `build`.
    """
    if not shutil.which("hivmc"):
        return image, record
    made, facts = build(image)
    return made, json.dumps(json.loads(record) | facts.of_launch, sort_keys=True)


@functools.lru_cache(maxsize=64)
def build(image: bytes) -> tuple[bytes, hivm.Facts]:
    """Compile the linalg text of an image to an object, with as many buffers as its HIVM has. Returns the object, and
    the launch facts of its own HIVM, which may be that of another compiler than the image's.

    Raises:
      CompileError: `bishengir-compile` or `hivmc` failed, or did not end; the message has what it said.
    """
    content = unpack(image)
    with tempfile.TemporaryDirectory(prefix="jtile-ascend-") as name:
        folder = Path(name)
        (folder / "kernel.mlir").write_text(content["texts"]["linalg"])
        how = arguments("kernel.mlir", "saved", content["target"], content["buffers"])
        done = tools.run(tools.COMPILER, how, folder, alone=False)
        made, text = folder / "kernel.o", saved(folder / "saved")
        found = made.read_bytes() if done.returncode == 0 and made.is_file() else b""
        if found.startswith(ELF) and text is not None:
            return found, hivm.facts(text, content["symbol"])
        said = done.stderr.strip()
    raise CompileError(
        f"{content['symbol']}: bishengir-compile with the hivmc of this machine made no object for "
        f"{content['target']}: {said[-400:] or 'it said nothing'}"
    )
