"""Forms of products whose tiles have any multiple of 8 columns (`jtile.ops.hopper_columns`), and the model of time that
chooses among them, fitted as `jtile.tune.warpgroups` is."""

from __future__ import annotations

import dataclasses

from jtile.tune.warpgroups import Product, cdiv

ROWS, TERMS = 64, 64  # rows of an instruction; terms of a round
LEAVING = 32  # columns of results that leave at a time
ROOM, RESERVE = 227 << 10, 3 << 10  # bytes of shared memory of a block; for barriers
LEAST, MOST = 3, 8  # slots of a ring
# Consumers -> columns of a tile at most, by the registers that threads start with; and registers of a consumer.
WIDEST = {1: 256, 2: 256, 3: 200, 4: 152}
REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}


@dataclasses.dataclass(frozen=True)
class Form:
    """Tiles of `consumers` times 64 rows and of `columns`, a multiple of 8; `turned`: rows of W are the rows."""

    turned: bool
    consumers: int
    columns: int

    @property
    def registers(self) -> int:
        """Registers of a thread of a consumer."""
        return REGISTERS[self.consumers]

    def slots(self, itemsize: int = 2) -> int:
        """Slots that rings have room for."""
        wide = 1 << (self.columns - 1).bit_length()
        leaving = 2 * LEAVING if self.columns % LEAVING else LEAVING  # and smaller pieces, which are fewer together
        room = ROOM - RESERVE - self.consumers * ROWS * leaving * itemsize
        return min(MOST, room // ((ROWS * self.consumers + wide) * TERMS * itemsize))

    def tiles(self, p: Product) -> int:
        """How many tiles a product has."""
        rows, columns = (p.n, p.m) if self.turned else (p.m, p.n)
        return cdiv(rows, ROWS * self.consumers) * cdiv(columns, self.columns)
