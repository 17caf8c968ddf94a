"""The table on paper of docs/notes/devices.md, and the one of records."""

from pathlib import Path

from benchmarks import devices

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_has_the_table_on_paper():
    assert devices.paper() in (ROOT / "docs" / "notes" / "devices.md").read_text()


def test_traffic_grows_as_the_page_says():
    """A sum in two turns sends as much for any number of devices, one in one turn more and more."""
    once, twice = devices.PAPER[0].sent, devices.PAPER[1].sent
    assert once(1024) / once(8) > 100 and twice(1024) / twice(8) < 1.2


def test_a_line_of_what_did_not_run():
    records = [
        {"work": "all_reduce", "size": "8 KiB", "xla_us": 20.0, "jtile_us": 5.0, "ratio": 4.0},
        {"work": "all_gather", "size": "1 MiB", "xla_us": 9.0, "jtile_error": "UnsupportedError: no"},
    ]
    assert devices.table(records).splitlines()[2:] == [
        "| `all_reduce` | 8 KiB | XLA | 20.0 | 5.0 | 4.0 | - |",
        "| `all_gather` | 1 MiB | XLA | 9.0 | UnsupportedError: no | - | - |",
    ]
