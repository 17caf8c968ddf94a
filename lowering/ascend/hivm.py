"""What HIVM text, the last open form of a kernel, says about how it is launched and what memory it takes."""

from __future__ import annotations

import dataclasses
import re

_RETURNED = re.compile(r"arith\.constant (-?\d+) : (?:i8|index)")
_CONSTANT = re.compile(r"(%[\w$.-]+) = arith\.constant (-?\d+) : i64")
_BUFFER = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)(?: \[[^\]]*\])? : memref<((?:\d+x)*)(\w+), [^>]*?#hivm\.address_space<(\w+)>>"
)
_SPEC = re.compile(r'#dlti\.dl_entry<"([A-Z0-9_]+)", (\d+) : i32>')
SPACES = {"ub": "ub", "cbuf": "l1", "ca": "l0a", "cb": "l0b", "cc": "l0c"}  # HIVM's names -> those of targets
KINDS = {1: "aiv", 2: "aic", 3: "mix", 4: "mix"}  # the first digit of a task type


@dataclasses.dataclass(frozen=True)
class Facts:
    """How a kernel is launched.

    Attributes:
      task: the compiler's number of the kind of task: 10 on vector cores, 20 on cube cores, 32 on two and one of them.
      workspace: bytes of memory of each block, for what cube and vector cores hand each other.
      lock: bytes of memory for locks between blocks.
      used: memory -> bytes of the memory that buffers reach up to.
    """

    task: int
    workspace: int
    lock: int
    used: dict[str, int]

    @property
    def kind(self) -> str:
        """`"aiv"`, `"aic"` or `"mix"`."""
        return KINDS.get(self.task // 10, "mix")

    @property
    def of_launch(self) -> dict[str, str | int]:
        """The fields that these facts have in a launch record."""
        return {"task": self.task, "kind": self.kind, "workspace": self.workspace, "lock": self.lock}


def facts(text: str, symbol: str) -> Facts:
    """Read the launch facts of the function `symbol`."""
    task = _returned(text, f"{symbol}_infer_task_type_function")
    return Facts(
        task=10 if task is None else task,
        workspace=_returned(text, f"{symbol}_infer_workspace_shape_function") or 0,
        lock=_returned(text, f"{symbol}_infer_sync_block_lock_num_function") or 0,
        used=used(text),
    )


def _returned(text: str, name: str) -> int | None:
    """The constant that a function of the host returns."""
    at = text.find(f"func.func @{name}(")
    found = _RETURNED.search(text, at) if at >= 0 else None
    return int(found[1]) if found else None


def used(text: str) -> dict[str, int]:
    """For each memory the bytes that buffers reach up to, by their planned addresses."""
    out: dict[str, int] = {}
    constants: dict[str, int] = {}
    for line in text.splitlines():
        if "func.func" in line:
            constants = {}
        if found := _CONSTANT.search(line):
            constants[found[1]] = int(found[2])
        if found := _BUFFER.search(line):
            space = SPACES.get(found[4])
            size = _bytes(found[2], found[3])
            ends = [constants[a] + size for a in re.findall(r"%[\w$.-]+", found[1]) if a in constants]
            if space and ends:
                out[space] = max(out.get(space, 0), *ends)
    return out


def _bytes(shape: str, elem: str) -> int:
    count = 1
    for side in shape.split("x")[:-1]:
        count *= int(side)
    return -(-count * int(re.sub(r"\D", "", elem)) // 8)


def machine(text: str) -> dict[str, int]:
    """The numbers of the NPU that the compiler wrote into the text: `CUBE_CORE_COUNT`, `UB_SIZE` (bits), and so on."""
    return {name: int(value) for name, value in _SPEC.findall(text.partition("\n")[0])}
