"""The scheduler on a fake device, whose cache holds tokens: invariants under random requests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtile.models.serving.pages import PagePool
from jtile.models.serving.prefix import Match, PrefixTree
from jtile.models.serving.scheduler import Plan, Scheduler, Segment, Sequence, tiled

VOCAB = 5


def next_token(tokens: list[int]) -> int:
    """What the fake model says behind some tokens."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) + len(tokens)) % VOCAB


def answer(prompt, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Device:
    """Runs plans in their order. A slot of a page holds the prefix that its key and value would depend on; attention
    reads all of them and finds out whether they are those of the sequence."""

    def __init__(self, scheduler: Scheduler):
        self.page, self.slots = scheduler.page, {}
        self.last: dict[int, int] = {}
        self.table: dict[int, list[int]] = {}
        self.computed = 0

    def run(self, plan: Plan) -> list[list[int]]:
        """The tokens of each step of the launch, of those that take no more part, too."""
        for sequence in (s.sequence for s in plan.segments) if plan.rows is None else plan.rows.changed:
            self.table[sequence.slot] = sequence.pages[:]
        found = [self.step(plan, plan.segments)]
        for step in range(1, plan.steps):
            assert all(segment.count == 1 and segment.samples for segment in plan.segments)
            more = [s._replace(start=s.start + step, pending=True) for s in plan.segments if s.chosen > step]
            chosen = iter(self.step(dataclasses.replace(plan, copies=[]), more))
            found.append([next(chosen) if s.chosen > step else -1 for s in plan.segments])
        return found

    def step(self, plan: Plan, segments: list[Segment]) -> list[int]:
        read = {source: [self.slots.get((source, i)) for i in range(self.page)] for source, _ in plan.copies}
        for source, target in plan.copies:
            self.slots |= {(target, i): held for i, held in enumerate(read[source])}
        chunks = []
        for segment in segments:
            tokens, pages = segment.sequence.tokens, self.table[segment.slot]
            assert pages == segment.sequence.pages
            new = tokens[segment.start : segment.start + segment.count]
            assert not (segment.pending and segment.sequence.stepwise)
            new = [*new, self.last[segment.slot]][: segment.count] if segment.pending else new
            assert len(new) == segment.count
            for at, token in enumerate(new, segment.start):
                before = () if at == 0 else self.slots[pages[(at - 1) // self.page], (at - 1) % self.page]
                self.slots[pages[at // self.page], at % self.page] = prefix = (*before, token)
            assert list(prefix[: len(tokens)]) == tokens[: len(prefix)]
            chunks.append((segment, pages[:], prefix))
            self.computed += segment.count
        chosen = []
        for segment, pages, prefix in chunks:  # behind all writes, as in a layer
            for at in range(len(prefix)):
                assert self.slots[pages[at // self.page], at % self.page] == prefix[: at + 1]
            if segment.samples:
                self.last[segment.slot] = next_token(list(prefix))
                chosen.append(self.last[segment.slot])
        return chosen


@dataclasses.dataclass
class Client:
    """What is asked for: from which step on, and when the client goes, if it does."""

    prompt: list[int]
    max_tokens: int
    arrives: int
    leaves: int | None
    stepwise: bool = False


class Run:
    """The loop of an engine: one step is dispatched before the one before it is read."""

    def __init__(self, scheduler: Scheduler, clients: list[Client]):
        self.scheduler, self.clients, self.device = scheduler, clients, Device(scheduler)
        self.sequences: dict[int, Sequence] = {}
        self.results: dict[int, list[int]] = {}
        self.flying: list[tuple[Plan, list[list[int]]]] = []

    def run(self) -> dict[int, list[int]]:
        scheduler = self.scheduler
        for step in range(2000):
            self.arrivals(step)
            plan = scheduler.plan()
            assert bool(plan.segments) >= bool(plan.seats or plan.copies)
            assert plan.tokens <= scheduler.budget and len(scheduler.running) <= scheduler.rows
            behind = sum(tiled(segment.count, scheduler.tile) for segment in plan.segments if segment.count > 1)
            assert scheduler.tile == 1 or behind + scheduler.singles <= scheduler.budget
            assert len({s.slot for s in scheduler.running}) == len(scheduler.running)
            if plan.segments:
                self.flying.append((plan, self.device.run(plan)))
            if self.flying and (len(self.flying) > 1 or not plan.segments):
                self.read(*self.flying.pop(0))
            late = any(client.arrives > step for client in self.clients)
            if not (late or plan.segments or self.flying or scheduler.waiting or scheduler.running):
                return self.results
        raise AssertionError("some sequence starves")

    def arrivals(self, step: int) -> None:
        for i, client in enumerate(self.clients):
            if client.arrives == step:
                self.sequences[i] = self.scheduler.add(
                    np.array(client.prompt, np.int32), client.max_tokens, client.stepwise
                )
            if client.leaves == step and i in self.sequences:
                self.scheduler.finish(self.sequences[i])

    def read(self, plan: Plan, found: list[list[int]]) -> None:
        for step, tokens in enumerate(found):
            for segment in self.scheduler.commit(plan, tokens, step):
                sequence = segment.sequence
                if len(sequence.tokens) == len(sequence.prompt) + sequence.max_tokens:
                    self.scheduler.finish(sequence)
                    i = next(i for i, other in self.sequences.items() if other is sequence)
                    self.results[i] = sequence.tokens[len(sequence.prompt) :]


clients = st.builds(
    Client,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
    max_tokens=st.integers(1, 8),
    arrives=st.integers(0, 10),
    leaves=st.none() | st.integers(0, 20),
    stepwise=st.booleans(),
)


@given(
    st.lists(clients, min_size=1, max_size=8), st.integers(6, 22), st.integers(1, 4), st.integers(1, 3), st.booleans(),
    st.booleans(), st.sampled_from([1, 2, 3]), st.integers(1, 3),
)  # fmt: skip
def test_everyone_gets_the_tokens_of_being_alone(clients, pages, page, rows, prefixes, mixed, tile, steps):
    """With preemptions, shared pages, copies, launches of several steps, and clients that go: and every page comes
    back."""
    pages = max(pages, -(-22 // page))
    options = {"tile": tile, "singles": rows if tile > 1 else 0, "steps": steps}
    scheduler = Scheduler(pages, page, rows, budget=rows + 4, chunk=4, prefixes=prefixes, mixed=mixed, **options)
    results = Run(scheduler, clients).run()
    for i, client in enumerate(clients):
        if client.leaves is None or client.leaves < client.arrives:
            assert i in results
        if i in results:
            assert results[i] == answer(client.prompt, client.max_tokens)
    assert scheduler.pool.available == pages
    assert scheduler.pool.idle == len(scheduler.tree)
    assert prefixes or len(scheduler.tree) == 0
    scheduler.reset()
    assert scheduler.pool.free == pages


def alone(prompt, count: int = 2, arrives: int = 0) -> Client:
    return Client(list(prompt), count, arrives, None)


def test_a_shared_prefix_is_computed_once():
    """By requests that come at the same time, too."""
    prefix = [i % 3 for i in range(40)]
    clients = [alone([*prefix, i, 4], arrives=i // 3) for i in range(5)]
    scheduler = Scheduler(pages=100, page=8, rows=5, budget=16)
    run = Run(scheduler, clients)
    results = run.run()
    assert results == {i: answer(c.prompt, 2) for i, c in enumerate(clients)}
    assert scheduler.counts.prefilled == 40 + 5 * 2
    assert scheduler.counts.cached == 4 * 40


def test_a_page_that_is_shared_in_part_is_copied():
    """Equal prompts: all but the newest token comes from the first one's last page, which stays the first one's."""
    prompt = [1, 2, 0, 1, 2, 2]
    scheduler = Scheduler(pages=20, page=4, rows=4, budget=16)
    clients = [alone(prompt, 5), *(alone(prompt, 5, 1) for _ in range(2)), alone([*prompt[:5], 4], 1, 1)]
    results = Run(scheduler, clients).run()
    assert results == {i: answer(c.prompt, c.max_tokens) for i, c in enumerate(clients)}
    assert scheduler.counts.prefilled == 6 + 3


def test_preemption_when_pages_run_out():
    """The youngest gives its pages back, and ends as if it had kept them."""
    clients = [alone([i, 1, 0, i], 12) for i in range(3)]
    scheduler = Scheduler(pages=6, page=4, rows=3, budget=12)
    results = Run(scheduler, clients).run()
    assert scheduler.counts.preemptions > 0
    assert results == {i: answer(c.prompt, 12) for i, c in enumerate(clients)}
    assert list(results) == [0, 1, 2]  # first come, first served


def test_prompts_come_in_chunks_beside_tokens():
    """No step waits for a long prompt: a row that decodes is in every one."""
    scheduler = Scheduler(pages=40, page=4, rows=2, budget=8, chunk=5)
    scheduler.add(np.zeros(3, np.int32), 20)
    device = Device(scheduler)
    first = scheduler.plan()
    scheduler.commit(first, *device.run(first))
    scheduler.add(np.ones(23, np.int32), 1)
    chunks = []
    for _ in range(5):
        plan = scheduler.plan()
        scheduler.commit(plan, *device.run(plan))
        assert plan.segments[0].count == 1
        chunks.append(plan.segments[1].count)
    assert chunks == [5, 5, 5, 5, 3]


def steps_to(scheduler: Scheduler, arrivals: dict[int, list[tuple[int, int]]], most: int = 200) -> dict[int, int]:
    """In which step each request has its first token, by its order; arrivals: {step: [(prompt, answer), ...]}."""
    device, first = Device(scheduler), {}
    for step in range(most):
        for length, count in arrivals.get(step, ()):
            scheduler.add(np.full(length, len(scheduler.waiting) % 2, np.int32), count)
        plan = scheduler.plan()
        for segment in scheduler.commit(plan, *device.run(plan)):
            first.setdefault(segment.sequence.order, step)
            if segment.made + 1 == segment.sequence.max_tokens:
                scheduler.finish(segment.sequence)
    return first


def test_a_long_prompt_holds_up_no_short_one_and_goes_on():
    """Short ones that come one after the other get their first tokens at once; half of each step is the long one's."""
    make = lambda **options: Scheduler(pages=400, page=4, rows=6, budget=16, prefixes=False, **options)
    arrivals = {0: [(160, 1)], 1: [(5, 2)]} | {i: [(5, 2)] for i in range(2, 30)}
    first = steps_to(make(), arrivals)
    assert max(first[i] - i for i in range(1, 30)) <= 1
    assert first[0] <= 160 // 7
    equal = steps_to(make(), {0: [(32, 1)] * 4})
    assert list(equal) == [0, 1, 2, 3] and equal[3] == 7  # equal ones: one after the other, not all at the end


def test_many_long_prompts_are_not_begun_at_once():
    """No step is held up by what it takes to begin; short ones come in as a step holds them."""
    for length, begun in ((9, 16), (3, 22), (1, 40)):
        scheduler = Scheduler(pages=400, page=4, rows=50, budget=64, prefixes=False)
        for i in range(40):
            scheduler.add(np.full(length, i % 5, np.int32), 2)
        assert len(scheduler.plan().seats) == begun


def test_prompts_that_are_not_mixed_with_answers():
    """Whole prompts, as many as a step holds; a longer one in parts; answers wait."""
    scheduler = Scheduler(pages=40, page=4, rows=3, budget=8, prefixes=False, mixed=False)
    device, counts = Device(scheduler), []
    for step in range(8):
        for length in {0: [3], 1: [4, 3, 9]}.get(step, ()):
            scheduler.add(np.zeros(length, np.int32), 9)
        plan = scheduler.plan()
        scheduler.commit(plan, *device.run(plan))
        counts.append([segment.count for segment in plan.segments])
        if step == 4:
            scheduler.finish(scheduler.running[0])
    assert counts == [[3], [4, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], [8], [1, 1, 1], [1, 1, 1]]


def test_the_order_in_which_prefixes_are_forgotten():
    """The least recently used first, leaves before what they hang on, and nothing that a sequence uses."""
    pool = PagePool(6)
    tree = PrefixTree(pool, 2)

    def insert(*tokens):
        pages = [pool.take() for _ in range(len(tokens) // 2)]
        tree.insert(tokens, pages, 0)
        for page in pages:
            pool.release(page)

    insert(1, 1, 2, 2)
    insert(1, 1, 3, 3)
    insert(5, 5)
    assert len(tree) == 4 == pool.idle
    tree.match([1, 1, 2, 2])
    held = tree.match([5, 5]).pages[0]
    pool.share(held)
    assert tree.evict(1) == 1
    assert tree.match([1, 1, 3, 3]).pages == tree.match([1, 1]).pages
    assert tree.evict(9) == 2
    assert tree.match([1, 1, 2, 2]) == Match(())
    assert tree.match([5, 5, 6]).pages == (held,)
    assert tree.match([5, 7]) == Match((), held, 1)


def test_a_match_that_ends_in_a_page_leaves_leaves_the_first_to_go():
    """The page that is used in part is not more recent than the one before it, which goes later."""
    pool = PagePool(3)
    tree, pages = PrefixTree(pool, 2), [pool.take(), pool.take()]
    tree.insert([1, 2, 3, 4], pages, 0)
    for page in pages:
        pool.release(page)
    assert tree.match([1, 2, 3, 9]) == Match((pages[0],), pages[1], 1)
    assert tree.evict(2) == 2 and pool.free == 3


def test_a_page_without_an_owner_cannot_be_released():
    pool = PagePool(1)
    pool.release(pool.take())
    with pytest.raises(RuntimeError, match="no owner"):
        pool.release(0)
    with pytest.raises(ValueError, match="no room for a prompt"):
        Scheduler(4, 4, rows=4, budget=4)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_prefix_of_four_hundred_tokens_is_computed_once(at_once):
    """Of sixteen prompts, of which each has twenty tokens of its own behind it; 16 of the 400 are in no full page."""
    scheduler, common = Scheduler(pages=200, page=64, rows=16, budget=256), np.arange(400)

    def step():
        plan = scheduler.plan()
        scheduler.commit(plan, [1] * len(plan.samples))
        for sequence in [sequence for sequence in scheduler.running if sequence.made == 8]:
            scheduler.finish(sequence)

    for i in range(16):
        scheduler.add(np.concatenate([common, np.full(20, i)]), 8)
        if not at_once:
            step()
    while scheduler.running or scheduler.waiting:
        step()
    assert scheduler.counts.prefilled == 400 + 16 * 20
    assert scheduler.counts.cached == 15 * 400


def test_pages_of_equal_answers_are_exchanged(engine):
    """Of two sequences with equal tokens the second one takes the pages of the first one, and says so; the device
    writes them into its table, though no page is added."""
    scheduler = Scheduler(16, 2, 2, 8)
    first, second = (scheduler.add(np.arange(3), 9) for _ in range(2))
    told = 0
    for _ in range(10):
        before = second.exchanged
        plan = scheduler.plan()
        if plan.rows is not None and second.exchanged != before:
            assert second in plan.rows.changed
            told += 1
        scheduler.commit(plan, [7] * len(plan.samples))
    assert told > 1 and second.exchanged > 0 and second.pages[:4] == first.pages[:4]
    device = engine._core.device
    kept = device._table[0].copy()
    device._written[0] = (-1, 0)  # as if no request had been here, whatever tests ran before
    for pages, exchanged in (([1, 2], 0), ([1, 3], 1)):
        device._write_pages(0, pages, exchanged)
        assert device._table[0, :3].tolist() == [*pages, -1]
    device._table[0], device._written[0] = kept, (-1, 0)
