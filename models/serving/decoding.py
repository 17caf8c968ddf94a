"""Sequences that all decode, as columns of numbers: most launches differ from the one before in a few of these, so that
they are planned by a few operations on arrays, and not in Python for each sequence. Pure NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .scheduler import Segment, Sequence

# The rows of `Decoding.columns`: slot and adapter of each sequence, how many of its tokens are computed, how many its
# answer has and may have, how many fit its pages, and behind how many the prefix tree knows one page more.
SLOT, ADAPTER, START, MADE, MOST, ROOM, FULL = range(7)


class Rows(NamedTuple):
    """What a launch computes of sequences that all decode: columns, int32 [k], as in `Segment`, and bool `pending`.
    changed: the sequences whose pages may be others than in the launch before."""

    sequences: list[Sequence]
    slots: np.ndarray
    adapters: np.ndarray
    start: np.ndarray
    made: np.ndarray
    chosen: np.ndarray
    pending: np.ndarray
    changed: list[Sequence]
    group: Decoding

    def segments(self, segment: type[Segment]) -> list[Segment]:
        numbers = zip(
            *(x.tolist() for x in (self.slots, self.start, self.made, self.pending, self.chosen)), strict=True
        )
        return [
            segment(sequence, slot, start, 1, True, made, pending, chosen)
            for sequence, (slot, start, made, pending, chosen) in zip(self.sequences, numbers, strict=True)
        ]


class Decoding:
    """Sequences that decode, in the order in which they came.

    Attributes:
      sequences: a list that is replaced, and never changed. columns: int32 [7, k]. changed: see `Rows`. needs: what the
        core has found out about them, None where it has to look again.
    """

    def __init__(self, sequences: list[Sequence], page: int):
        self.sequences, self.page, self.needs = sequences, page, None
        numbers = [
            (s.slot, s.adapter, s.computed, s.made, s.max_tokens, len(s.pages) * page, (s.inserted + 1) * page)
            for s in sequences
        ]
        self.columns = np.array(numbers, np.int32).reshape(-1, 7).T.copy()
        self.changed = list(sequences)

    @property
    def left(self) -> np.ndarray:
        """How many tokens each may still make, int32 [k]."""
        return self.columns[MOST] - self.columns[MADE]

    def keep(self, which: np.ndarray) -> None:
        """Leaves out the sequences where `which`, bool [k], is False."""
        self.sequences = [s for s, stays in zip(self.sequences, which.tolist(), strict=True) if stays]
        self.columns, self.needs = self.columns[:, which], None

    def remove(self, sequence: Sequence) -> None:
        """Leaves out a sequence, if it is one of these."""
        if sequence in self.sequences:
            self.keep(np.arange(len(self.sequences)) != self.sequences.index(sequence))

    def page_added(self, i: int) -> None:
        """Notes the pages of sequence number i."""
        sequence = self.sequences[i]
        self.columns[ROOM, i] = len(sequence.pages) * self.page
        self.changed.append(sequence)

    def advance(self, chosen: np.ndarray) -> Rows:
        """The next launch, of `chosen` tokens of each, int32 [k], which count as computed from now on."""
        columns = self.columns
        start, made = columns[START].copy(), columns[MADE].copy()
        columns[START] += chosen
        columns[MADE] += chosen
        pending = np.array([s.pending for s in self.sequences], np.int32) > 0
        for sequence, count in zip(self.sequences, chosen.tolist(), strict=True):
            sequence.computed += count
            sequence.pending += count
        changed, self.changed = self.changed, []
        numbers = columns[SLOT], columns[ADAPTER], start, made, chosen, pending
        return Rows(self.sequences, *numbers, changed, self)
