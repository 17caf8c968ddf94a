"""The README's table of speeds comes from records."""

from pathlib import Path

import pytest

from benchmarks import readme

RECORD = {
    "workload": "softmax", "config": "4096x1024", "dtype": "float32", "device": "d", "ours_us": 456.0,
    "peers": {"xla": 791.2}, "ratio": 1.75, "bound_us": 400.0, "bound_frac": 0.87, "error": 5.6e-8,
}  # fmt: skip


def test_the_table_replaces_what_stood_there():
    text = f"a\n{readme.BEGIN}old\n{readme.END}z\n"
    once = readme.update(text, [RECORD, RECORD | {"workload": "unknown"}])
    assert "| softmax 4096x1024, float32 | 456 | xla 791 | 1.75 | 6e-08 |" in once
    assert "old" not in once
    assert "unknown" not in once
    assert once.startswith("a\n")
    assert once.endswith("z\n")
    assert readme.update(once, [RECORD]) == once


def test_the_readme_has_the_marks():
    text = (Path(readme.ROOT) / "README.md").read_text()
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1


def test_a_missing_file_is_said():
    with pytest.raises(SystemExit, match=r"usage: .* \(there is no file --help\)"):
        readme.main(["--help"])
