"""What a back end gives back for one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Texts(Mapping[str, str]):
    """Texts by the names of their levels, the last of which are made when they are first read: a disassembler takes
    longer than the compiler does for a small kernel, and hardly anybody reads what it says.

    Args:
      ready: level -> text.
      later: level -> what makes its text.
    """

    def __init__(self, ready: Mapping[str, str], later: Mapping[str, Callable[[], str]]):
        self._ready, self._later, self._levels = dict(ready), later, (*ready, *later)

    def __getitem__(self, level: str) -> str:
        if level in self._later and level not in self._ready:
            self._ready[level] = self._later[level]()
        return self._ready[level]

    def __contains__(self, level: object) -> bool:
        return level in self._levels

    def __iter__(self) -> Iterator[str]:
        return iter(self._levels)

    def __len__(self) -> int:
        return len(self._levels)

    def __ror__(self, first: Mapping[str, str]) -> Texts:
        """These behind others, still to be made."""
        return Texts({**first, **{k: v for k, v in self._ready.items() if k not in self._later}}, self._later)


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
    texts: Mapping[str, str]
    launch: dict[str, Any]
