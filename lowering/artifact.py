"""What a back end gives back for one kernel."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Attributes:
      target: name of the target that it was compiled for.
      image: the bytes that the custom call carries (ELF object, cubin, hsaco).
      texts: level name -> text of the levels below Tile IR (`"llvm"`, `"asm"`); empty when it came out of a cache.
      launch: what the custom call needs besides the image; only numbers and texts, so that it can be stored as JSON.
        CPU: `name`, `workspace` (bytes a worker), `cost` (nanoseconds a program), `isa`, `sites` (JSON text).
        GPU: `name`, `record` (JSON text), `extra` (bytes of further results), `resources`, and the `level` whose form
        was compiled, "tile" or "block".
    """

    target: str
    image: bytes
    texts: dict[str, str]
    launch: dict[str, Any]
