"""Random kernels that accumulate: grids, nests of loops and branches, and index maps that meet or do not."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass
class _Var:
    """An index: its name, how many values it takes, and where it stops (exclusive)."""

    name: str
    count: int


class _Kernel:
    """Writes one kernel as text. `r` decides everything."""

    def __init__(self, r: random.Random):
        self.r = r
        self.lines: list[str] = []
        self.names = 0
        self.depth = 1
        self.constants: dict[int, str] = {}
        self.grid = [r.choice((1, 2, 3, 4, 6)) for _ in range(r.randint(1, 3))]
        self.sizes = [self.shape() for _ in range(r.randint(1, 3))]
        self.needs = [[0] * len(s) for s in self.sizes]

    def shape(self) -> list[tuple[str, int]]:
        """Kinds of index, and their sizes, of the dimensions of an output."""
        kinds = ("at", "tile", "tile", "span", "strided", "overlap", "whole", "take")
        weights = (4, 6, 6, 4, 1, 1, 2, 2)
        n = self.r.randint(1, 3)
        return [(k, self.r.choice((1, 2, 3, 4))) for k in self.r.choices(kinds, weights, k=n)]

    def new(self) -> str:
        self.names += 1
        return f"%v{self.names}"

    def add(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def value(self, op: str) -> str:
        v = self.new()
        self.add(f"{v} = {op}")
        return v

    def const(self, n: int) -> str:
        return self.constants.setdefault(n, f"%c{n}")

    # -- structure ------------------------------------------------------------------------------------------------
    def body(self, visible: list[_Var], level: int) -> None:
        for _ in range(self.r.choice((1, 1, 1, 2))):
            kind = self.r.random()
            if level < 3 and kind < 0.45:
                self.loop(visible, level)
            elif level < 3 and kind < 0.55:
                self.branch(visible, level)
            else:
                self.statement(visible)

    def loop(self, visible: list[_Var], level: int) -> None:
        count, k = self.r.choice((1, 2, 3, 4)), self.new()
        lo, hi, step = self.const(0), self.const(count), 1
        kind = self.r.random()
        if kind < 0.15 and visible:  # causal: as far as the program is
            v = self.r.choice(visible)
            count = v.count
            hi = self.value(f"add {v.name}, {self.const(1)}")
        elif kind < 0.25 and visible:  # from there on
            v = self.r.choice(visible)
            lo, count = v.name, v.count
            hi = self.const(count)
        elif kind < 0.35:  # as data say; maybe never
            hi = self.value(f"load %n[{self.const(self.r.randint(0, 3))}]")
            count = 4
        elif kind < 0.45:
            lo, step, count = self.const(1), 2, count + 1
            hi = self.const(count)
        stages = " stages=2" if self.r.random() < 0.3 else ""
        carried = self.r.random() < 0.15
        if carried:
            start, s = self.const(0), self.new()
            self.add(f"{self.new()} = for {k} in {lo}..{hi} step {self.const(step)}{stages} carry ({s} = {start}) {{")
        else:
            self.add(f"for {k} in {lo}..{hi} step {self.const(step)}{stages} {{")
        self.depth += 1
        inner = [*visible, _Var(k, count)]
        before = len(self.lines)
        self.body(inner, level + 1)
        if carried:
            self.lines[before:before] = ["  " * self.depth + f"%w{before} = add {s}, {k}"]
            self.add(f"yield %w{before}")
        self.depth -= 1
        self.add("}")

    def branch(self, visible: list[_Var], level: int) -> None:
        a = self.r.choice(visible)
        b = self.r.choice(visible).name if self.r.random() < 0.5 else self.const(1)
        c = self.value(f"{self.r.choice(('le', 'lt', 'eq', 'ne'))} {a.name}, {b}")
        self.add(f"if {c} {{")
        self.depth += 1
        self.body(visible, level + 1)
        if self.r.random() < 0.5:
            self.depth -= 1
            self.add("} else {")
            self.depth += 1
            self.body(visible, level + 1)
        self.depth -= 1
        self.add("}")

    # -- one accumulation -----------------------------------------------------------------------------------------
    def statement(self, visible: list[_Var]) -> None:
        out = self.r.randrange(len(self.sizes))
        spare = [v for v in visible if self.r.random() < 0.8]
        self.r.shuffle(spare)
        index, shape, took = [], [], False
        for dim, (kind, size) in enumerate(self.sizes[out]):
            chosen = [] if kind == "whole" or not spare else [spare.pop()]
            chosen += [spare.pop()] if chosen and spare and self.r.random() < 0.25 else []
            text, need, lanes = self.dim(kind, size, chosen, took)
            took |= kind == "take"
            self.needs[out][dim] = max(self.needs[out][dim], need)
            index.append(text)
            shape += lanes
        value = self.tile(visible, shape)
        mask = f" mask={self.mask(visible, shape)}" if self.r.random() < 0.15 else ""
        self.add(f"{self.new()} = atomic add %o{out}[{', '.join(index)}], {value}{mask}")

    def dim(self, kind: str, size: int, chosen: list[_Var], took: bool) -> tuple[str, int, list[int]]:
        """Text of one dimension, how long the array must be, and the axes it gives."""
        step = {"at": 1, "tile": 1, "span": size, "strided": 1, "overlap": max(size - 1, 1)}.get(kind, 1)
        start, top = self.start(chosen, step)
        match kind:
            case "at":
                return start, top + 1, []
            case "tile":
                ragged = self.r.choice((0, 0, 1)) if size > 1 else 0
                return f"tile({start}, {size})", (top + 1) * size - ragged, [size]
            case "take" if not took:
                iota = self.value(f"iota 0 : tile<{size}xi32>")
                at = self.value(f"broadcast {start} dims=() : tile<{size}xi32>")
                return f"take({self.value(f'add {iota}, {at}')})", top + size, [size]
            case "strided":
                count = chosen[0].count if chosen else 2
                return f"{start}:+{size}:{count}", top + (size - 1) * count + 1, [size]
            case "whole":
                return f"{start}:+{size}", size, [size]
        ragged = self.r.choice((0, 0, 1)) if size > 1 else 0
        return f"{start}:+{size}", top + size - ragged, [size]

    def start(self, chosen: list[_Var], step: int) -> tuple[str, int]:
        """A scalar of these variables, row-major, and its largest value."""
        if not chosen:
            return self.const(0), 0
        v, top = chosen[0].name, chosen[0].count - 1
        if len(chosen) == 1 and step == 1 and chosen[0].count % 2 == 0 and self.r.random() < 0.2:
            fn = self.r.choice(("div", "rem"))
            return self.value(f"{fn} {v}, {self.const(2)}"), max(top // 2, 1)
        for more in chosen[1:]:
            v = self.value(f"mul {v}, {self.const(more.count)}")
            v = self.value(f"add {v}, {more.name}")
            top = top * more.count + more.count - 1
        if self.r.random() < 0.1:  # downwards
            v = self.value(f"sub {self.const(top)}, {v}")
        if step > 1:
            v = self.value(f"mul {v}, {self.const(step)}")
        offset = self.r.choice((0, 0, 0, 0, 1))
        if offset:
            v = self.value(f"add {v}, {self.const(offset)}")
        return v, top * step + offset

    def tile(self, visible: list[_Var], shape: list[int]) -> str:
        """A tile of data of this place."""
        at = self.const(0)
        for v in visible:
            at = self.value(f"mul {at}, {self.const(v.count)}")
            at = self.value(f"add {at}, {v.name}")
        at = self.value(f"rem {at}, {self.const(97)}")
        x = self.value(f"load %x[{at}:+{max(self.product(shape), 1)}]")
        wide = f"tile<{'x'.join(map(str, shape))}xf32>" if shape else "f32"
        return self.value(f"reshape {x} : {wide}")

    def mask(self, visible: list[_Var], shape: list[int]) -> str:
        v = self.value(f"le {self.r.choice(visible).name}, {self.const(1)}")
        wide = f"tile<{'x'.join(map(str, shape))}xbool>" if shape else ""
        return self.value(f"broadcast {v} dims=() : {wide}") if shape else v

    @staticmethod
    def product(shape: list[int]) -> int:
        out = 1
        for n in shape:
            out *= n
        return out

    def text(self) -> str:
        pids = [_Var(f"%p{k}", n) for k, n in enumerate(self.grid)]
        self.body(pids, 0)
        outs = [f"%o{k}: ref<{'x'.join(str(max(n, 1)) for n in needs)}xf32, out>" for k, needs in enumerate(self.needs)]
        inits = ", ".join(f"%o{k}=0" for k in range(len(outs)))
        head = f"kernel @k(%x: ref<200xf32>, %n: ref<4xi32>, {', '.join(outs)}) "
        head += f"grid({', '.join(map(str, self.grid))}) init({inits}) {{"
        first = [f"  {v.name} = program_id {k} : i32" for k, v in enumerate(pids)]
        first += [f"  {name} = full {n} : i32" for n, name in self.constants.items()]
        return "\n".join([head, *first, *self.lines, "}"])


def text(r: random.Random) -> str:
    """A kernel whose accumulations keep the rules of the language, with inputs `x` [200] and `n` [4] in 0..4."""
    return _Kernel(r).text()
