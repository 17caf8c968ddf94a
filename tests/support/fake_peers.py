"""Kernels that talk to other devices, launched on several devices of the driver without GPUs (tests/ffi/fake_driver.c):
what jtile's launcher asks for, and then the programs themselves, evaluated over the memory that it has prepared."""

import concurrent.futures
import ctypes
import re

import numpy as np
from fake_driver import FakeDriver, record
from ttir.devices import Site
from ttir.launch import buffers
from ttir.memory import Memory


class Spans(Memory):
    """Memory of this process at its own addresses, and arrays like those of `Memory`."""

    def __init__(self, spans, arrays):
        super().__init__([*spans.values(), *arrays])
        self.starts = np.asarray(list(spans))
        self.bytes[: len(spans)] = spans.values()
        self.count = len(spans)

    def base(self, k):
        return int(self.starts[k]) if k < self.count else super().base(k)

    def owners(self, at):
        order = np.argsort(self.starts)
        found = order[np.clip(np.searchsorted(self.starts[order], at, "right") - 1, 0, None)]
        known = (at >= self.starts[found]) & (at < self.starts[found] + np.asarray(self.sizes)[found])
        return np.where(known, found, super().owners(at))


def view(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class FakeSite(Site):
    """A call site on devices of the fake driver, by their numbers; `groups` of as many as the kernel's mesh has."""

    def __init__(self, driver: FakeDriver, kernel, ordinals, timeout: float = 10, **changes):
        super().__init__(kernel)
        self.driver, self.ordinals = driver, list(ordinals)
        fields = {"params": self.record.params, "devices": self.facts, "grid": self.record.grid, "name": kernel.name}
        driver.lib.fake_signature(("p" * len(self.record.params)).encode())
        driver.lib.fake_devices(max(ordinals) + 1)
        self.launcher = driver.open(record(**(fields | changes))).talk(*ordinals, timeout=timeout)

    def begin(self, ordinals=None):
        """What XLA does before an execution, on a thread for each device; gives what each of them raised."""
        with concurrent.futures.ThreadPoolExecutor(len(self.ordinals)) as pool:
            calls = [pool.submit(self.launcher.initialize, k) for k in ordinals or self.ordinals]
            return [c.exception() for c in calls]

    def launched(self, arrays: int) -> list[int]:
        """Launches on all devices; gives the addresses of their blocks, as the kernels get them."""
        self.driver.lines()
        found = []
        for ordinal in self.ordinals:
            lines = self.launcher.launch(*[(4096, 1 << 20)] * arrays, device=ordinal)
            (line,) = lines  # nothing else: no copy, no wait
            found.append(int(re.search(r"args .*?(\d+)$", line)[1]))
        return found

    def on_devices(self, inputs, seed: int = 0):
        """A call of one group: launched, and evaluated."""
        parts = [buffers(self.kernel, self.record, [np.asarray(x) for x in one]) for one in inputs]
        blocks = self.launched(len(parts[0].all))
        spans = {address: view(address, self.facts["bytes"]) for address in blocks}
        for block in list(spans.values()):
            report = int(block[24:32].view(np.int64)[0])
            spans[report] = view(report, 24)
        arrays = [x for b in parts for x in b.all]
        memory = Spans(spans, arrays)
        base = [memory.base(len(spans) + k) for k in range(len(arrays))]
        return self.run(memory, parts, base, blocks, seed)
