"""Fetches the programs that compile for Ascend from PyPI: `make ascend-tools`.

`python -m jtile.lowering.ascend.install [FOLDER]`.

Two wheels are downloaded (not installed: one of them holds a package named triton, which would hide the real one), and
the three programs that jtile runs are taken out of them. Wheels and programs are checked against the hashes below. The
programs keep their licences: triton-ascend MIT, ascendnpu-ir Apache-2.0. Nothing else of the wheels is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from . import tools


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel of PyPI: name, version, SHA-256, and its members that are kept with the SHA-256 of each."""

    name: str
    version: str
    digest: str
    members: tuple[tuple[str, str], ...]


WHEELS = (
    Wheel(
        "triton-ascend",
        "3.2.0",
        "17c8d7161eed1e96a286281963fe04d3113ee85affaa5d82c7dd0c35803962f0",
        (
            (
                "triton/backends/ascend/triton-adapter-opt",
                "c7f72b8a8a55887b925b59631669c4321acc4d942d6d655cb52a7b07cfbb0f3b",
            ),
        ),
    ),
    Wheel(
        "ascendnpu-ir",
        "1.2.0",
        "d4e5bfab877ee4ba7b312885f4f5bf646072fd47c88d5aa96f6a11f67d3e8522",
        (
            ("ascendnpuir/bin/bishengir-compile", "938abeed665faca28ed1278b40ad0775c24068be5414e6282c0d63cec7c54606"),
            ("ascendnpuir/bin/bishengir-opt", "caf28a19f454d0c57d6c0d305e008a5fed4c3be567dd19592b8a040e3e9d9614"),
        ),
    ),
)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")


def main(argv: list[str]) -> int:
    """Fill a folder (default: the one that jtile looks in) with the programs; those that are there already stay."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        print("jtile: the hashes are those of Linux on x86-64; on other machines build the tools from source "
              "(docs/ascend.md)", file=sys.stderr)  # fmt: skip
        return 1
    where = Path(argv[0]) if argv else tools.folder()
    where.mkdir(parents=True, exist_ok=True)
    for wheel in WHEELS:
        missing = [m for m in wheel.members if not _is_there(where / Path(m[0]).name, m[1])]
        if missing and (problem := _fetch(wheel, where)):
            print(f"jtile: {problem}", file=sys.stderr)
            return 1
    print(f"jtile: {', '.join(Path(m).name for w in WHEELS for m, _ in w.members)} are in {where}")
    if argv:
        for name, variable in tools.VARIABLES.items():
            print(f"export {variable}={where.resolve() / name}")
    return 0


def _is_there(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _fetch(wheel: Wheel, where: Path) -> str | None:
    """Download a wheel and keep its programs; returns a text that says what went wrong, or None."""
    with tempfile.TemporaryDirectory(prefix="jtile-ascend-") as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.digest}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary=:all:", "--python-version=3.11", "--require-hashes", "--requirement", str(wanted),
                   "--dest", folder, *(f"--platform={p}" for p in _PLATFORMS)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        (found,) = Path(folder).glob("*.whl") if not done.returncode else (None,)
        if found is None:
            return f"pip could not download {wheel.name} {wheel.version}: {done.stderr.strip()[-400:]}"
        return unpack(found, wheel, where)


def unpack(path: Path, wheel: Wheel, where: Path) -> str | None:
    """Keep the programs of a downloaded wheel; returns a text that says what is wrong with one, which is not kept."""
    with zipfile.ZipFile(path) as archive:
        for member, digest in wheel.members:
            data = archive.read(member)
            if hashlib.sha256(data).hexdigest() != digest:
                return f"{member} of {wheel.name} {wheel.version} is not the file that jtile knows"
            target = where / Path(member).name
            target.write_bytes(data)
            target.chmod(0o755)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
