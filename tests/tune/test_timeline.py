"""Timelines: stamps become spans, shares, a Perfetto trace and a picture."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jtile._errors import KernelValueError
from jtile.ir import Loc
from jtile.lowering.triton.block.passes.stamps import BEGIN, END, INSTANT, PHASES, SLOT, Site
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
        for k, (at, site, phase, *slot) in enumerate(events):
            out[0, number, k] = at, sum(slot) * SLOT + site * PHASES + phase
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


def test_all_roles_end_where_one_has_no_more_room_for_stamps():
    """What is not known of one role is not shown of the others, as if this one did nothing."""
    line = timeline("gemm", stamps(CONSUMER, PRODUCER, capacity=4), SITES, "ns")
    assert line.dropped and "dropped" in str(line)
    assert [r.total for r in line.roles()] == [40, 40]  # from 100 to the last stamp of the consumer
    assert line.length(0) == 40 and all(s.end <= 140 for s in line.spans)


def test_times_of_roles_are_those_of_one_block():
    twice = np.concatenate([stamps(CONSUMER, PRODUCER)] * 2)
    line = timeline("gemm", twice, SITES, "ns")
    assert line.programs == (0, 1) and line.roles()[0].total == 200
    assert "consumer: 100 ns a block" in str(line) and "producer: 60 ns a block" in str(line)


def test_trace_is_perfetto_json(tmp_path):
    line = timeline("gemm", stamps(CONSUMER, PRODUCER), SITES, "ns")
    line.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    wait = next(e for e in events if e["name"] == "wait full")
    assert (wait["ph"], wait["ts"], wait["dur"]) == ("X", pytest.approx(0.01), pytest.approx(0.02))
    assert wait["args"]["source"] == "k.py:3"
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"consumer", "producer", "products under way"}
    (product,) = (e for e in events if e["name"] == "products")
    assert (product["ts"], product["dur"]) == (pytest.approx(0.04), pytest.approx(0.05))
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


RING = (
    Site(0, "consumer", "role", "consumer", 0, Loc()),
    Site(0, "consumer", "wait", "full", 0, Loc(), 2),
    Site(0, "consumer", "product", "64x8x16", 64 * 8 * 16, Loc()),
    Site(0, "consumer", "wait for products", "", 0, Loc(), 1),  # leaves one running
    Site(0, "consumer", "arrive", "empty", 0, Loc(), 2),
    Site(0, "consumer", "wait for products", "", 0, Loc()),
    Site(1, "producer", "role", "producer", 0, Loc()),
    Site(1, "producer", "wait", "empty", 0, Loc(), 2),
    Site(1, "producer", "expect", "full", 2048, Loc(), 2),
)
READS = [
    (100, 0, BEGIN),
    (100, 1, BEGIN, 0), (120, 1, END, 0), (120, 2, INSTANT), (120, 3, BEGIN), (120, 3, END),
    (130, 1, BEGIN, 1), (135, 1, END, 1), (140, 2, INSTANT), (140, 3, BEGIN), (160, 3, END), (165, 4, INSTANT, 0),
    (170, 5, BEGIN), (180, 5, END), (185, 4, INSTANT, 1),
    (195, 1, BEGIN, 0), (195, 1, END, 0), (200, 0, END),
]  # fmt: skip
FILLS = [
    (100, 6, BEGIN),
    (101, 7, BEGIN, 0), (101, 7, END, 0), (102, 8, INSTANT, 0), (104, 7, BEGIN, 1), (104, 7, END, 1),
    (105, 8, INSTANT, 1), (110, 7, BEGIN, 0), (170, 7, END, 0), (171, 8, INSTANT, 0), (172, 6, END),
]  # fmt: skip


def test_a_wait_may_leave_products_running():
    """The clock cannot tell the start of the first product from the wait behind it, which leaves it running."""
    line = timeline("gemm", stamps(READS, FILLS, capacity=32), RING, "ns")
    assert line.products(0) == [(120, 180)]
    assert line.roles()[0].products == pytest.approx(0.6)
    assert line.busy() == pytest.approx(0.6) and line.length(0) == 100
    assert line.rate() == pytest.approx(2 * 2 * 64 * 8 * 16 / 100)
    assert "TFLOP/s a block" in str(line)


def test_slots_of_rings():
    line = timeline("gemm", stamps(READS, FILLS, capacity=32), RING, "ns")
    stages = [(s.barrier, s.slot, s.asked, s.read, s.freed) for s in line.stages(0)]
    assert stages == [("full", 0, 102, 120, 165), ("full", 1, 105, 135, 185), ("full", 0, 171, 195, 200)]
    lanes = [e for e in line.trace_events() if e.get("cat") == "stage" and e["name"] != "products"]
    assert [e["dur"] for e in lanes] == pytest.approx([0.018, 0.024, 0.045, 0.005, 0.03, 0.05])


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    line = timeline("gemm", stamps(READS, FILLS, capacity=32), RING, "ns")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # words as words
        line.picture(tmp_path / "line.svg", window=(10, 90))
    drawn = (tmp_path / "line.svg").read_text()
    for words in ("consumer", "producer", "full[1]", "wait empty", "products under way 60%", "starts a product"):
        assert words in drawn
    with pytest.raises(KernelValueError, match="no program 3"):
        line.picture(tmp_path / "other.svg", program=3)
    with pytest.raises(KernelValueError, match="a window is"):
        line.picture(tmp_path / "other.svg", window=(5, 5))
    with pytest.raises(KernelValueError, match="a picture is written as one of"):
        line.picture(tmp_path / "other.words")
    assert not (tmp_path / "other.svg").exists()
