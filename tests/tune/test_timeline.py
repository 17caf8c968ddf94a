"""Timelines: stamps become spans, shares, a Perfetto trace and a picture."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jtile._errors import KernelValueError
from jtile.ir import Loc
from jtile.passes.block.stamps import BEGIN, END, INSTANT, PHASES, Site
from jtile.tune.timeline import timeline

SITES = (
    Site(0, "consumer", "role", "consumer", 0, Loc()),
    Site(0, "consumer", "wait", "full", 0, Loc("k.py", 3)),
    Site(0, "consumer", "product", "64x8x16", 64 * 8 * 16, Loc("k.py", 4)),
    Site(0, "consumer", "wait for products", "", 0, Loc("k.py", 5)),
    Site(1, "producer", "role", "producer", 0, Loc()),
    Site(1, "producer", "load", "a", 2048, Loc("k.py", 9)),
)
CONSUMER = [
    (100, 0, BEGIN), (110, 1, BEGIN), (130, 1, END), (140, 2, INSTANT), (150, 3, BEGIN), (190, 3, END), (200, 0, END)
]  # fmt: skip
PRODUCER = [(100, 4, BEGIN), (120, 5, INSTANT), (160, 4, END)]


def stamps(*roles, capacity=16):
    out = np.full((1, len(roles), capacity, 2), -7, np.int64)  # what nobody wrote is never read
    for number, events in enumerate(roles):
        events = events[:capacity]
        for k, (at, site, phase) in enumerate(events):
            out[0, number, k] = at, site * PHASES + phase
        if len(events) < capacity:
            out[0, number, len(events), 0] = 0
    return out


def test_spans_and_shares():
    line = timeline("gemm", stamps(CONSUMER, PRODUCER), SITES, "ns")
    assert not line.dropped
    consumer, producer = line.roles()
    assert (consumer.name, consumer.total) == ("consumer", 100)
    assert consumer.waits == pytest.approx({"wait full": 0.2, "wait for products": 0.4})
    assert consumer.products == pytest.approx(0.5)  # from 140 to 190
    assert consumer.multiplied == 64 * 8 * 16
    assert (producer.total, producer.copied) == (60, 2048)
    assert line.busy() == pytest.approx(0.5)
    assert "wait full 20%" in str(line)


def test_a_role_with_too_many_stamps_ends_at_its_last():
    line = timeline("gemm", stamps(CONSUMER, PRODUCER, capacity=4), SITES, "ns")
    assert line.dropped and "dropped" in str(line)
    assert line.roles()[0].total == 40  # from 100 to the last stamp


def test_trace_is_perfetto_json(tmp_path):
    line = timeline("gemm", stamps(CONSUMER, PRODUCER), SITES, "ns")
    line.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    wait = next(e for e in events if e["name"] == "wait full")
    assert (wait["ph"], wait["ts"], wait["dur"]) == ("X", pytest.approx(0.01), pytest.approx(0.02))
    assert wait["args"]["source"] == "k.py:3"
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"consumer", "producer"}
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    line = timeline("gemm", stamps(CONSUMER, PRODUCER), SITES, "ns")
    line.picture(tmp_path / "line.svg")
    assert "consumer" in (tmp_path / "line.svg").read_text() or (tmp_path / "line.svg").stat().st_size > 1000
    with pytest.raises(KernelValueError, match="no program 3"):
        line.picture(tmp_path / "other.svg", program=3)
