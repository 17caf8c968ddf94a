"""Requests a minute: so many for each key, or for each address where there are no keys."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable

KNOWN = 10_000  # clients that are remembered; the one that came longest ago is forgotten first


@dataclasses.dataclass
class _Bucket:
    """How many requests a client may make at once, as of a time."""

    left: float
    at: float


class Rates:
    """Each client may make `limit` requests at once, and each request becomes free again within a minute, evenly."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic):
        self.limit, self._clock = limit, clock
        self._buckets: collections.OrderedDict[str, _Bucket] = collections.OrderedDict()

    def take(self, client: str) -> float:
        """Counts a request. Returns 0, or how many seconds the client has to wait before it may make one."""
        now = self._clock()
        bucket = self._buckets.setdefault(client, _Bucket(self.limit, now))
        self._buckets.move_to_end(client)
        if len(self._buckets) > KNOWN:
            self._buckets.popitem(last=False)
        bucket.left = min(self.limit, bucket.left + (now - bucket.at) * self.limit / 60)
        bucket.at = now
        if bucket.left < 1:
            return (1 - bucket.left) * 60 / self.limit
        bucket.left -= 1
        return 0.0

    def headers(self, client: str) -> dict[str, str]:
        """The headers about the limit that OpenAI's servers send with each answer."""
        bucket = self._buckets.get(client, _Bucket(self.limit, 0))
        full = (self.limit - bucket.left) * 60 / self.limit
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(int(bucket.left)),
            "x-ratelimit-reset-requests": f"{math.ceil(full)}s",
        }
