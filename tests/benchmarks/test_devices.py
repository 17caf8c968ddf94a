"""The table on paper of docs/notes/devices.md, and the one of records."""

from pathlib import Path

import pytest

from benchmarks import device_models, devices
from benchmarks.device_parts import made
from benchmarks.gpu.models import LARGE, SHAPES, TINY, Work

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


@pytest.mark.parametrize(("name", "touched"), [("tiny", 0.0), ("tiny mixture", 4 * (1 - 0.5**3))])
def test_bytes_of_a_step_are_those_of_one_gpu(name, touched):
    """Three rows of a mixture that choose two of four experts at random go through so many together."""
    lm = made(TINY[name], None, "tensor")
    work = Work(lm, 3, device_models.CONTEXT, 0, touched=touched)
    assert device_models.bytes_read(lm, 3) == work.step_bytes()


def test_a_record_of_a_model():
    work, found = device_models.WORKS[0], {"one_step": 4000.0, "jtile": 2500.0, "alone": 2000.0, "bytes": 8e9}
    record = device_models.record(work, 64, found, 4e12, 2, False)
    assert (record["ratio"], record["of_bound"], record["communication"]) == (1.6, 0.8, 0.2)
    assert record["tokens_per_second"] == 25600


def test_a_model_runs_where_it_has_room(monkeypatch):
    large = next(work for work in device_models.WORKS if work.model == "Llama-3.1-70B")
    config = (SHAPES | LARGE)[large.model]
    for gigabytes, count, sides in ((80, 1, []), (80, 2, ["jtile"]), (200, 4, ["one_step", "jtile", "plain"])):
        monkeypatch.setattr(device_models, "room", lambda gigabytes=gigabytes: gigabytes * 1e9)
        assert [side for side in device_models.sides_of(large, config, count) if side in sides] == sides
    assert "plain" not in device_models.sides_of(large, config, 3), "three devices cannot share eight heads of keys"
