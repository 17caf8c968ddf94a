"""When which core runs which band: the predicted timeline, and the order and the places that follow from it."""

from __future__ import annotations

import dataclasses
import heapq

from .tasks import TaskGraph
from .timeline import Entry, GraphTimeline

AWAY_NS = 5_000.0  # what passes until a device knows what all others have done: other work comes in between
BAND_NS = 300.0  # what a band costs beside its programs: its counters, and the call of its code


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A predicted timeline of a graph.

    Attributes:
      order: the bands by their predicted start: each stands behind those that it waits for.
      core: the core of each band, by the number of the band.
    """

    graph: TaskGraph
    order: tuple[int, ...]
    core: tuple[int, ...]
    timeline: GraphTimeline


def simulate(graph: TaskGraph) -> Schedule:
    """Runs a graph on paper: whenever a core is free, it takes the band with the longest way to the end of all bands
    that can start by then."""
    whole, graph = graph, graph.alone
    n = len(graph.bands)
    cost = [b.cost + BAND_NS for b in graph.bands]
    number = {needs: e for e, needs in enumerate(graph.events)}
    signals: list[list[int]] = [[] for _ in range(n)]  # for each band the events that it is part of
    behind: list[list[int]] = [[] for _ in graph.events]  # for each event the bands that wait for it
    for needs, e in number.items():
        for early in needs:
            signals[early].append(e)
    for k, band in enumerate(graph.bands):
        if band.needs:
            behind[number[band.needs]].append(k)
    rank = [0.0] * n  # nanoseconds from the start of a band to the end of all, with as many cores as needed
    of_event = [0.0] * len(graph.events)
    for k in reversed(range(n)):
        away = AWAY_NS if whole.bands[k].everywhere else 0.0
        rank[k] = away + cost[k] + max((of_event[e] for e in signals[k]), default=0.0)
        if graph.bands[k].needs:
            e = number[graph.bands[k].needs]
            of_event[e] = max(of_event[e], rank[k])
    missing = [len(needs) for needs in graph.events]
    ready = [(-rank[k], k) for k, b in enumerate(graph.bands) if not b.needs]
    heapq.heapify(ready)
    free = [(0.0, c) for c in range(graph.cores)]
    running: list[tuple[float, int]] = []  # (end, band), and ~band for one that may begin then
    start, core = [0.0] * n, [0] * n
    now, begun = 0.0, 0
    while begun < n or running:
        while ready and free[0][0] <= now:
            _, c = heapq.heappop(free)
            _, k = heapq.heappop(ready)
            start[k], core[k] = now, c
            heapq.heappush(running, (now + cost[k], k))
            heapq.heappush(free, (now + cost[k], c))
            begun += 1
        now, done = heapq.heappop(running)
        if done < 0:  # a band that has waited for other devices
            heapq.heappush(ready, (-rank[~done], ~done))
            continue
        for e in signals[done]:
            missing[e] -= 1
            if not missing[e]:
                for late in behind[e]:
                    if whole.bands[late].everywhere:
                        heapq.heappush(running, (now + AWAY_NS, ~late))
                    else:
                        heapq.heappush(ready, (-rank[late], late))
    order = tuple(sorted(range(n), key=lambda k: (start[k], k)))
    entries = [Entry(k, core[k], start[k], start[k] + cost[k]) for k in order]
    return Schedule(whole, order, tuple(core), GraphTimeline(graph, tuple(entries), measured=False))
