"""The speeds of README and docs come from records."""

import json

import pytest

from benchmarks import readme

RECORD = {
    "workload": "softmax", "config": "4096x1024", "dtype": "float32", "device": "d", "ours_us": 456.0,
    "peers": {"xla": 791.2}, "ratio": 1.75, "bound_us": 400.0, "bound_frac": 0.87, "error": 5.6e-8,
}  # fmt: skip


def test_the_table_replaces_what_stood_there():
    text = f"a\n{readme.BEGIN}old\n{readme.END}z\n"
    once = readme.update(text, readme.table([RECORD, RECORD | {"workload": "unknown"}]))
    assert "| softmax 4096x1024, float32 | 456 | xla 791 | 1.75 | 6e-08 |" in once
    assert "old" not in once
    assert "unknown" not in once
    assert once.startswith("a\n")
    assert once.endswith("z\n")
    assert readme.update(once, readme.table([RECORD])) == once


def test_each_device_has_a_table_of_its_own():
    text = readme.table([RECORD, RECORD | {"device": "h200", "config": "8192x4096", "dtype": "bfloat16"}])
    assert text.count("| work |") == 2
    assert "## NVIDIA H200\n" in text


def test_the_pages_hold_what_the_records_say():
    files = sorted(readme.RECORDS.glob("*/records.json"), reverse=True)
    records = [row for file in files for row in json.loads(file.read_text())]
    few = readme.few(records)
    assert few.count("\n") == 2 + len(readme.FEW)  # every one of them has a record
    for page, text in (("README.md", few), ("docs/speeds.md", readme.table(records))):
        page = (readme.ROOT / page).read_text()
        assert page.count(readme.BEGIN) == page.count(readme.END) == 1
        assert readme.update(page, text) == page, "run python -m benchmarks.readme"
    for file, text in readme.drawings(records).items():
        assert file.read_text() == text, "run python -m benchmarks.readme"
        assert text.count("<circle") > 20


def test_a_missing_file_is_said():
    with pytest.raises(SystemExit, match=r"usage: .* \(there is no file --help\)"):
        readme.main(["--help"])
