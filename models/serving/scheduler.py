"""The scheduler: which tokens of which sequences the next step computes, and in which pages. Pure Python.

A step computes up to `budget` tokens: one of every sequence that is decoding, and chunks of prompts with what is left
of the budget. Half of that goes to the prompt that came first, the rest to those with the fewest tokens left, so that a
long prompt goes on whatever comes, and holds up no short one. Sequences get pages as they grow. Where there are none
left the one that came last is preempted: it gives its pages back, waits at its old place in the queue, and is computed
again from its tokens. So the oldest sequence always goes on, and every one of them becomes the oldest.

Steps are planned before the tokens of the last one are known: a sequence may have a `pending` token, which only the
device knows.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence as Tokens
from typing import NamedTuple

import numpy as np

from .decoding import FULL, ROOM, START, Decoding, Rows
from .pages import PagePool
from .prefix import Match, PrefixTree, common_length

# The most new sequences of a step that has enough to do: each is compared with those that run, and brought to the
# device.
SEATS = 16


@dataclasses.dataclass(eq=False)
class Sequence:
    """One row of text under way.

    order: its place in the queue. tokens: the tokens of prompt and answer that the host knows; pending: how many more
    tokens of the answer only the device knows. computed: how many tokens the cache holds after all planned steps;
    pages: the pages that hold them. slot: the row of the device's state, while the sequence runs. cached: how many
    tokens of the prompt were found in the cache when the sequence first started; None before. stepwise: the host has to
    know each token before it can say how the next one is chosen. adapter: the number of its adapter, 0 for none.
    single: no launch that it takes part in has more than one step.
    """

    order: int
    prompt: np.ndarray
    max_tokens: int
    stepwise: bool = False
    adapter: int = 0
    single: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    pending: int = 0
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    cached: int | None = None
    finished: bool = False
    inserted: int = 0  # how many of its pages the prefix tree knows
    exchanged: int = 0  # how often pages became those of the prefix tree that hold the same tokens

    def __post_init__(self):
        self.tokens = self.prompt.tolist()

    @property
    def length(self) -> int:
        """The number of tokens so far, with the pending ones."""
        return len(self.tokens) + self.pending

    @property
    def made(self) -> int:
        """The number of tokens of the answer so far, with the pending ones."""
        return self.length - len(self.prompt)

    @property
    def ready(self) -> bool:
        """Whether something can be computed: the sequence may have more tokens, and does not wait for one of them."""
        return self.made < self.max_tokens and not (self.stepwise and self.pending)


class Segment(NamedTuple):
    """Tokens `start` to `start + count` of a sequence, which a step computes. samples: the last one is the newest, so
    that the step chooses the next token; it is number `made` of the answer. pending: that newest token is known to the
    device only. chosen: how many tokens it chooses in a launch of several steps, each from the one before."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    samples: bool
    made: int
    pending: bool
    chosen: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """A launch of one step, or of several, of which the first one is that of the segments. copies: pages (from, to) to
    be copied before it; seats: sequences that begin to run, whose state is to be brought to their slots before it.
    rows: the segments as columns, where all of their sequences decode; `listed` is empty then."""

    listed: list[Segment]
    copies: list[tuple[int, int]]
    seats: list[Sequence]
    steps: int = 1
    rows: Rows | None = None

    @functools.cached_property
    def segments(self) -> list[Segment]:
        return self.listed if self.rows is None else self.rows.segments(Segment)

    @property
    def empty(self) -> bool:
        return not (self.listed if self.rows is None else self.rows.sequences)

    @property
    def tokens(self) -> int:
        """How many tokens its first step computes."""
        return sum(segment.count for segment in self.segments)

    @functools.cached_property
    def samples(self) -> list[Segment]:
        """The segments that choose a token, in the order of the step's results."""
        return [segment for segment in self.segments if segment.samples]


@dataclasses.dataclass
class Counts:
    """Totals since the start: tokens computed of prompts (again after preemption, too), tokens of prompts that were
    found in the cache, and preemptions."""

    prefilled: int = 0
    cached: int = 0
    preemptions: int = 0


class Scheduler:
    """The scheduler of up to `rows` sequences at a time, over `pages` pages of `page` slots; a step has up to `budget`
    tokens, more than rows. `chunk`: the most tokens of one prompt that a step computes. `prefixes`: whether pages are
    shared. `mixed`: a step may have tokens of answers and chunks of prompts; otherwise prompts are computed whole, as
    far as a step holds them, and answers wait meanwhile. `tile`: if it is more than 1, chunks of prompts take whole
    tiles of a step, behind `singles` places of tokens that stand alone. `steps`: how many steps one launch has while
    all sequences decode and none waits for pages."""

    def __init__(
        self,
        pages: int,
        page: int,
        rows: int,
        budget: int,
        chunk: int | None = None,
        prefixes: bool = True,
        mixed: bool = True,
        tile: int = 1,
        singles: int = 0,
        steps: int = 1,
    ):
        if budget <= rows:
            raise ValueError(f"a step of {budget} tokens has no room for a prompt beside {rows} rows")
        self.pool = PagePool(pages)
        self.tree = PrefixTree(self.pool, page, prefixes)
        self.page, self.rows, self.budget, self.chunk = page, rows, budget, chunk or budget
        self.prefixes, self.mixed = prefixes, mixed
        self.tile, self.singles, self.steps = tile, singles, steps
        self.waiting: list[Sequence] = []  # `waiting` and `running` are in the order in which sequences came
        self.running: list[Sequence] = []
        self._slots = list(range(rows - 1, -1, -1))
        self._order = 0
        # The sequences that decode, if no other one can go on: all that run, but for those whose last token is planned.
        self._decoding: Decoding | None = None
        self.counts = Counts()

    @property
    def capacity(self) -> int:
        """The number of tokens of the longest sequence that can run alone."""
        return self.pool.count * self.page

    def add(
        self, prompt: np.ndarray, max_tokens: int, stepwise: bool = False, adapter: int = 0, single: bool = False
    ) -> Sequence:
        """A new sequence at the end of the queue. Prompt and answer together have at most `capacity` tokens."""
        sequence = Sequence(self._order, prompt, max_tokens, stepwise, adapter, single or stepwise)
        self._order += 1
        self.waiting.append(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is; what it has in the cache may serve others."""
        if sequence.finished:
            return
        sequence.finished = True
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._remember(sequence)
            self._leave(sequence)

    def reset(self) -> None:
        """Forgets the whole cache: sequences that run are computed again."""
        for sequence in reversed(self.running[:]):
            self._preempt(sequence)
        self.tree.clear()

    def commit(self, plan: Plan, tokens: Tokens[int], step: int = 0) -> list[Segment]:
        """Notes the tokens that a step of a launch chose, ints in the order of `plan.samples`. Returns the segments
        whose tokens belong to an answer, which are not those of finished sequences."""
        taken = []
        for segment, token in zip(plan.samples, tokens, strict=True):
            sequence = segment.sequence
            if not sequence.finished and step < segment.chosen:
                sequence.tokens.append(token)
                sequence.pending -= 1
                taken.append(segment)
        return taken

    def drop(self, sequence: Sequence) -> None:
        """Drops the newest token of a `stepwise` sequence, which no step has computed. The token before it is computed
        once more, to the same numbers, so that the next step chooses a token behind it."""
        sequence.tokens.pop()
        if sequence.slot is not None:
            sequence.computed = len(sequence.tokens) - 1

    def plan(self) -> Plan:
        """The next step; it has no segments if there is nothing to do. What it computes counts as computed from now on:
        it must be run before any later plan."""
        copies: list[tuple[int, int]] = []
        seats = self._admit(copies)
        if self._decoding is None:
            listed = self._continue()
            if listed is not None:
                return Plan(listed, copies, seats)
        planned = self._advance()
        if planned is None:  # some sequence has to give up its pages
            group, self._decoding = self._decoding, None
            assert group is not None
            return Plan(self._segments(dict.fromkeys(group.sequences, 1)), copies, seats)
        rows, steps = planned
        return Plan([], copies, seats, steps, rows)

    # -- sequences that run --------------------------------------------------------------------------------------------

    def _continue(self) -> list[Segment] | None:
        """The segments of a step: one token of each sequence that decodes, and chunks of prompts in the rest of the
        budget. None if all decode, which are `_decoding` from now on."""
        todo, prompts, simple = [], [], True
        for sequence in self.running:  # `Sequence.ready` and `_remaining`, inlined for speed
            pending = sequence.pending
            simple &= not sequence.stepwise
            length = len(sequence.tokens) + pending
            if length - len(sequence.prompt) < sequence.max_tokens and not (pending and sequence.stepwise):
                todo.append(sequence)
                if length - sequence.computed > 1:
                    prompts.append(sequence)
        if self.mixed or not prompts:
            counts = dict.fromkeys(todo, 1)
            if prompts:
                counts |= self._chunks(prompts, self._room(len(todo) - len(prompts)))
            elif simple and all(sequence.computed >= len(sequence.prompt) for sequence in todo):
                self._decoding = Decoding(todo, self.page)
                return None
            return self._segments(counts)
        return self._segments(self._whole(prompts)) or self._segments(
            {sequence: 1 for sequence in todo if _remaining(sequence) == 1}
        )

    def _advance(self) -> tuple[Rows, int] | None:
        """The next launch of `_decoding`, and how many steps it has; None if there are not enough pages for one."""
        group = self._decoding
        assert group is not None
        left = group.left
        if len(left) and left.min() < 1:
            group.keep(left > 0)
            left = group.left
        for steps in (self._steps_of(group, left), 1):
            chosen = np.minimum(left, steps)
            end = group.columns[START] + chosen
            short = np.flatnonzero(end > group.columns[ROOM]).tolist()
            missing = [-(-int(end[i]) // self.page) - len(group.sequences[i].pages) for i in short]
            if sum(missing) <= self.pool.available:
                break
        else:
            return None
        for i in short:
            if not self._grow(group.sequences[i], int(end[i])):
                raise RuntimeError("the pages that were counted for a launch are not there")
            group.page_added(i)
        rows = group.advance(chosen)
        for i in np.flatnonzero(end >= group.columns[FULL]).tolist():
            sequence = group.sequences[i]
            before = sequence.exchanged
            self._remember(sequence)
            group.columns[FULL, i] = (sequence.inserted + 1) * self.page
            if sequence.exchanged != before:
                rows.changed.append(sequence)
        return rows, steps

    def _steps_of(self, group: Decoding, left: np.ndarray) -> int:
        """How many steps the next launch of sequences that decode may have, where there are pages: one if all end
        sooner, or while others wait, unless they wait for a row and none is known to become free meanwhile."""
        if self.steps == 1 or not len(left) or left.max() < self.steps or any(s.single for s in group.sequences):
            return 1
        known = left.min() < self.steps or len(left) < len(self.running)
        return 1 if self.waiting and (self._slots or known) else self.steps

    def _room(self, decoding: int) -> int:
        """Places that a step has for chunks of prompts beside so many sequences that decode."""
        left = self.budget - (decoding if self.tile == 1 else self.singles)
        return left // self.tile * self.tile

    def _chunks(self, prompts: list[Sequence], left: int) -> dict[Sequence, int]:
        """How many tokens of each prompt a step computes, at most `left` together."""
        counts = dict.fromkeys(prompts, 0)
        shares = [(sequence, left) for sequence in sorted(prompts, key=_remaining)]
        for sequence, most in [*((sequence, left - left // 2) for sequence in prompts[:1]), *shares]:
            count = counts[sequence]
            places = tiled(count, self.tile)
            room = left + places - count  # with the places left in its last tile
            counts[sequence] += min(_remaining(sequence) - count, self.chunk - count, most, room)
            left -= tiled(counts[sequence], self.tile) - places
        return counts

    def _whole(self, prompts: list[Sequence]) -> dict[Sequence, int]:
        """How many tokens of each prompt a step computes without chunks: whole prompts, first come, first served, and
        of the first one as much as a step holds."""
        counts, left = {}, self._room(0)
        for sequence in prompts:
            if counts and tiled(_remaining(sequence), self.tile) > left:
                break
            counts[sequence] = min(_remaining(sequence), left)
            left -= tiled(counts[sequence], self.tile)
        return counts

    def _segments(self, counts: dict[Sequence, int]) -> list[Segment]:
        """Segments of so many tokens of each sequence, in the order in which sequences came, where there are pages for
        them. They count as computed from now on."""
        segments, page = [], self.page
        for sequence, count in counts.items():
            slot, start = sequence.slot, sequence.computed
            if slot is None or not count:  # a sequence before it has preempted it
                continue
            end, unknown = start + count, sequence.pending
            if end > len(sequence.pages) * page and not self._grow_or_preempt(sequence, end):
                continue
            length, prompt = len(sequence.tokens) + unknown, len(sequence.prompt)
            last = end == length
            segments.append(Segment(sequence, slot, start, count, last, length - prompt, last and unknown > 0))
            sequence.computed = end
            if last:
                sequence.pending = unknown + 1
            if start < prompt:
                self.counts.prefilled += count
            if (sequence.inserted + 1) * page <= end:
                self._remember(sequence)
        return segments

    def _grow_or_preempt(self, sequence: Sequence, length: int) -> bool:
        """Gives a sequence pages for so many tokens, if need be pages of sequences that came later. Returns False if it
        must wait for sequences that came before it."""
        if length <= len(sequence.pages) * self.page:
            return True
        while not self._grow(sequence, length):
            last = self.running[-1]
            if last is sequence:
                return False
            self._preempt(last)
            self.counts.preemptions += 1
        return True

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Gives a sequence all pages that so many tokens need, or none; returns whether it did."""
        missing = -(-length // self.page) - len(sequence.pages)
        if not self._reserve(missing):
            return False
        sequence.pages += [self.pool.take() for _ in range(missing)]
        return True

    def _reserve(self, count: int) -> bool:
        """Whether so many pages are free, after the tree has let go of pages if need be."""
        if count > self.pool.available:
            return False
        self.tree.evict(count - self.pool.free)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.computed = sequence.inserted = 0
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        for page in sequence.pages:
            self.pool.release(page)
        sequence.pages = []
        self._slots.append(sequence.slot)
        sequence.slot = None
        if self._decoding is not None:
            self._decoding.remove(sequence)
        self.running.remove(sequence)

    def _remember(self, sequence: Sequence) -> None:
        """Adds the pages to the tree that are full and whose tokens the host knows."""
        full = min(sequence.computed, len(sequence.tokens)) // self.page
        if full > sequence.inserted:
            before = sequence.pages[:full]
            self.tree.insert(sequence.tokens[: full * self.page], sequence.pages, sequence.inserted, sequence.adapter)
            sequence.inserted, sequence.exchanged = full, sequence.exchanged + (sequence.pages[:full] != before)

    # -- sequences that wait -------------------------------------------------------------------------------------------

    def _admit(self, copies: list[tuple[int, int]]) -> list[Sequence]:
        """Lets sequences run, in the order in which they came, while there are rows, tokens of the budget, and pages
        for all tokens of running sequences. So none of them is preempted in the same step."""
        seats: list[Sequence] = []
        if not self.waiting or not self._slots:
            return seats
        left = self._room(sum(sequence.ready and _remaining(sequence) == 1 for sequence in self.running))
        left //= self.tile
        promised = sum(self._missing(sequence) for sequence in self.running)
        todo = sum(_remaining(sequence) for sequence in self.running)
        for sequence in self.waiting[:]:
            enough = todo > self.budget and len(seats) >= SEATS
            if not self._slots or left == 0 or enough:
                break
            if sequence.pending:
                continue  # it was preempted, and its newest token is still on the device
            found = self._found(sequence)
            if found is None:
                continue
            whole = self._missing(sequence) - len(found.pages)
            idle = sum(self.pool.owners(page) == 1 for page in found.pages)
            if self.running and whole + promised > self.pool.available - idle:
                break  # first come, first served: shorter requests behind it wait too
            self._seat(sequence, found, copies)
            seats.append(sequence)
            left -= 1
            todo += _remaining(sequence)
            promised += self._missing(sequence)
        return seats

    def _missing(self, sequence: Sequence) -> int:
        """How many pages a sequence needs for its tokens and the next one."""
        return max(-(-(sequence.length + 1) // self.page) - len(sequence.pages), 0)

    def _found(self, sequence: Sequence) -> Match | None:
        """What the cache has of a sequence; None if another one is about to compute more of it."""
        if not self.prefixes:
            return Match(())
        tokens = sequence.tokens[:-1]  # the newest one is computed in any case, for its logits
        found = self.tree.match(tokens, sequence.adapter)
        have, full = len(found.pages) * self.page + found.count, len(tokens) // self.page * self.page
        for other in (running for running in self.running if running.adapter == sequence.adapter):
            most = min(len(other.prompt), len(sequence.prompt), len(tokens))
            if have >= most or other.tokens[have] != tokens[have]:
                continue  # it shares no more than what was found; most others differ in the first token that matters
            same = min(common_length(other.prompt, sequence.prompt), len(tokens))
            if other.computed < len(other.prompt):
                if min(same, full) // self.page * self.page > max(have, other.computed):
                    return None
            elif same > have:  # they share more, in a page that the tree does not know yet
                at = len(found.pages)
                count = min(same - at * self.page, self.page)
                if at < len(other.pages) and count > found.count:
                    found, have = Match(found.pages, other.pages[at], count), at * self.page + count
        return found

    def _seat(self, sequence: Sequence, found: Match, copies: list[tuple[int, int]]) -> None:
        """Gives a sequence a row and what the cache has of it."""
        for page in found.pages:
            self.pool.share(page)
        sequence.pages, sequence.computed = list(found.pages), len(found.pages) * self.page
        sequence.inserted = len(found.pages)
        if found.partial is not None and found.partial not in {target for _, target in copies}:
            self.pool.share(found.partial)  # so that the page is not taken as the place of the copy
            if self._reserve(1):
                sequence.pages.append(self.pool.take())
                sequence.computed += found.count
                copies.append((found.partial, sequence.pages[-1]))
            self.pool.release(found.partial)
        sequence.slot, self._decoding = self._slots.pop(), None
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, len(sequence.prompt))
            self.counts.cached += sequence.cached
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda running: running.order)


def tiled(count: int, tile: int) -> int:
    """How many places so many tokens take in whole tiles."""
    return -(-count // tile) * tile


def _remaining(sequence: Sequence) -> int:
    """How many tokens of a sequence are not in the cache yet."""
    return sequence.length - sequence.computed
