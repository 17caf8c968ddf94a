"""The execution graph as an IR: footprints, edges, memory, interpreter, predicted timeline. Nothing compiles."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
from random_graphs import kernel, random_graph

from jtile import ir
from jtile.errors import KernelValueError, RaceError
from jtile.execution.boxes import Box, Region, footprint, parts, region
from jtile.execution.encode import ALIGNMENT, arena
from jtile.execution.interpret import run_graph
from jtile.execution.schedule import simulate
from jtile.execution.tasks import Memory, Task, cut, make_graph

PRODUCT = """
kernel @k(%a: ref<64x32xf32>, %b: ref<32x48xf32>, %at: ref<64xi32>, %n: ref<16xi4>, %o: ref<64x48xf32, out>) grid(4, 3)
{
  %i = program_id 0
  %j = program_id 1
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c4 = full 4 : i32
  %z = full 0.0 : tile<16x16xf32>
  %row = load %at[%i:+4]
  %free = load %a[take(%row), %c0:+8]
  %bits = load %n[%c0:+2]
  %r = for %k in %c0..%c4 step %c1 carry (%acc = %z) {
    %x = load %a[tile(%i, 16), tile(%k, 8)]
    %y = load %b[tile(%k, 8), tile(%j, 16)]
    %p = dot %x, %y
    %d = add %acc, %p
    yield %d
  }
  store %o[tile(%i, 16), tile(%j, 16)], %r
}"""


def boxes(r: Region) -> list[str]:
    return [str(b) for b in r.boxes]


def test_footprints_are_exact_where_indices_are_affine():
    k = ir.parse_kernel(PRODUCT)
    reads = footprint(k, 3, 6).reads  # the three programs of the second row
    assert boxes(reads[0]) == ["[0:64, 0:8]", "[16:32, 0:32]"]  # rows that come from memory may be any
    assert boxes(reads[1]) == ["[0:32, 0:48]"]
    assert boxes(reads[2]) == ["[1:5]"]
    assert boxes(reads[3]) == ["[0:16]"]  # elements that share a byte
    assert boxes(footprint(k, 4, 5).writes[4]) == ["[16:32, 16:32]"]
    assert boxes(footprint(k, 4, 7).writes[4]) == ["[16:48, 0:48]"]  # from one row into the next
    assert not footprint(k, 0, 1).writes[0].boxes


def test_regions_in_two_shapes_meet_by_their_elements():
    whole = lambda *shape: region(shape, [Box((0,) * len(shape), shape)])
    row = region((1, 8, 4), [Box((0, 2, 0), (1, 3, 4))])
    assert row.shape == (8, 4)
    assert row.meets(region((8, 4), [Box((2, 3), (4, 4))]))
    assert not row.meets(region((8, 4), [Box((3, 0), (8, 4))]))
    assert row.meets(region((32,), [Box((11,), (12,))])) and not row.meets(region((32,), [Box((12,), (32,))]))
    assert not row.meets(region((32,), [Box((4,), (4,))]))  # nothing
    assert len(region((99,), [Box((k,), (k + 1,)) for k in range(0, 99, 5)]).boxes) == 1
    assert parts(whole(8, 4), 4, 9) == [(0, 128)] and parts(whole(), 4, 9) == [(0, 4)]
    assert parts(region((8, 4), [Box((2, 1), (4, 3))]), 2, 9) == [(18, 4), (26, 4)]
    assert parts(region((8, 4), [Box((2, 1), (4, 3))]), 2, 1) == []


def test_bands_are_as_many_as_the_work_is_worth():
    assert cut(10, 100.0, 2) == [(0, 10)]
    assert cut(10, 1000.0, 2) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert cut(6, 1000.0, 2) == [(0, 3), (3, 6)]  # a band for each core, not three for two
    assert cut(3, 9000.0, 4) == [(0, 1), (1, 2), (2, 3)]


def test_a_graph_prints():
    """The second task reads the elements of the next program too; the third updates in place what both read."""
    names = ["rows", "beside", "update"]
    tasks = [Task(kernel(n), m, 3000.0) for n, m in zip(names, [(0, 1, 2), (2, 3), (2, 2)], strict=True)]
    memories = [Memory((12,), "float32", k if k < 2 else None, 0 if k == 2 else None, "") for k in range(4)]
    split = lambda programs, cost, cores: [(k, k + 1) for k in range(programs)]
    g = make_graph(tasks, memories, 2, split=split)
    assert str(g) == GRAPH.strip()
    assert arena(g) == ({3: 0}, ALIGNMENT)


GRAPH = """
graph of 3 tasks, 12 bands, 14 edges, 8 events, for 2 cores
  %0 = float32[12] operand 0
  %1 = float32[12] operand 1
  %2 = float32[12] result 0
  %3 = float32[12] inner
  task 0: rows(4,) on %0, %1, %2
    band 0: programs 0:1, 3.0 us
    band 1: programs 1:2, 3.0 us
    band 2: programs 2:3, 3.0 us
    band 3: programs 3:4, 3.0 us
  task 1: beside(4,) on %2, %3
    band 4: programs 0:1, 3.0 us behind 0, 1
    band 5: programs 1:2, 3.0 us behind 1, 2
    band 6: programs 2:3, 3.0 us behind 2, 3
    band 7: programs 3:4, 3.0 us behind 3
  task 2: update(4,) on %2, %2
    band 8: programs 0:1, 3.0 us behind 4
    band 9: programs 1:2, 3.0 us behind 4, 5
    band 10: programs 2:3, 3.0 us behind 5, 6
    band 11: programs 3:4, 3.0 us behind 6, 7
"""


def test_the_interpreter_finds_every_missing_edge():
    """100 random graphs, an edge taken out of each: found in the order of whatever seed."""
    for seed in range(100, 200):
        g, operands, expected = random_graph(seed)
        if seed % 3 == 0:
            for got, want in zip(run_graph(g, operands, seed), expected, strict=True):
                np.testing.assert_array_equal(got, want)
        late, early = random.Random(seed).choice([(k, n) for k, b in enumerate(g.bands) for n in b.needs])
        with pytest.raises(RaceError, match="an edge is missing: task") as found:
            run_graph(g.without((late, early)), operands, seed)
        assert found.value.message.endswith("and no edge orders the two")


def test_what_was_never_written_is_a_missing_edge_too():
    """The reader comes first, or it reads what is there by then: both are the same missing edge."""
    memories = [Memory((12,), "float32", k or None, k or None, "") for k in range(3)]
    g = make_graph([Task(kernel("whole"), (1, 0), 9e3), Task(kernel("whole"), (0, 2), 9e3)], memories, 2)
    wrong = dataclasses.replace(g, bands=tuple(dataclasses.replace(b, needs=()) for b in g.bands))
    texts = set()
    for seed in range(8):
        with pytest.raises(RaceError) as found:
            run_graph(wrong, [np.zeros(12, np.float32)] * 3, seed)
        texts.add("writes, and" in found.value.message)
    assert texts == {False, True}
    with pytest.raises(KernelValueError, match="band 4 does not wait for band 5"):
        g.without((4, 5))


def test_schedules_keep_the_edges_and_memory_is_shared_by_what_is_ordered():
    shared = 0
    for seed in range(0, 100, 4):
        g, _, _ = random_graph(seed)
        line = simulate(g)
        entry = {e.band: e for e in line.timeline.entries}
        assert sorted(line.order) == list(range(len(g.bands)))
        place = {b: k for k, b in enumerate(line.order)}
        for k, band in enumerate(g.bands):
            assert all(entry[n].end <= entry[k].start and place[n] < place[k] for n in band.needs)
        for core in range(g.cores):
            own = sorted((e.start, e.end) for e in entry.values() if e.core == core)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
        hidden = [dataclasses.replace(m, operand=None, result=None) for m in g.memories]
        g = dataclasses.replace(g, memories=tuple(hidden))
        offsets, size = arena(g)
        users = {m: [k for k, b in enumerate(g.bands) if m in g.tasks[b.task].memories] for m in offsets}
        assert all(n % ALIGNMENT == 0 and n + 48 <= size for n in offsets.values())
        for m in offsets:
            for other in offsets:
                if other <= m or offsets[m] != offsets[other]:
                    continue
                shared += 1
                assert all(g.above[late] >> early & 1 for late in users[other] for early in users[m])
    assert shared > 5


def test_a_timeline_is_saved_as_picture_and_as_trace(tmp_path):
    line = simulate(random_graph(0)[0]).timeline
    assert str(line).startswith(f"predicted: {line.length / 1e3:.1f} us, busy: core 0 ")
    line.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().count("<rect") >= len(line.entries)
    line.save(tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert len([e for e in events if e["ph"] == "X"]) == len(line.entries)
    with pytest.raises(KernelValueError, match=r"saved as \.svg or \.json"):
        line.save(tmp_path / "a.png")
