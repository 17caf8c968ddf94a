"""Cutting: which nodes of a program become one tile kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from .chains import Chain, chain_of
from .costs import (
    not_worth,
    picks_well,
    reads_parts,
    scatter_worth,
    takes_large_products,
    windows_not_worth,
)
from .cuts import MODELS, Cut, cut_of
from .gathers import JOINS, is_gather, tiles_of, with_flat_indices
from .inner import functions_of
from .laying import laid_out, laid_out_by_windows, settled_of
from .layout import Layout, Sayings
from .loops import loop_of
from .multiplied import take_products
from .one_hot import with_one_hot_rows
from .orders import sorted_order
from .row_scatters import take_rows
from .scatters import scatter_of
from .steps import ELEMENTWISE, MOVES, Node, Program, Step, Value, program_of, size_of
from .turned import with_turned_products
from .units import Group, Plan, Unit
from .vector_products import with_sums
from .windows import has_windows, traffic, with_windows

BY_TUNER = "jt.tune found that XLA's code is quicker"
LARGE = 65536  # elements from which on an array is worth reading only once for several results


def plan_of(program: Program, *, everything: bool = False, cut: Cut | None = None) -> Plan:
    """Cuts a program greedily: a node joins the group of what it reads, where all values have axes in common.
    `everything`: groups that compute something are kernels, worth it or not; `cut`: what is decided otherwise, by
    default what `jt.tune` has found."""
    if everything:
        return Cutter(program, everything).plan()
    cut = cut_of(program) if cut is None else cut
    nodes = with_one_hot_rows(with_flat_indices(program.nodes, program.outputs))
    nodes = with_sums(nodes, takes_large_products())
    program = dataclasses.replace(program, nodes=with_turned_products(nodes, program.outputs))
    nodes = with_windows(program.nodes, program.outputs)
    plain = lambda: Cutter(program, cut=cut).plan()
    if cut.windows is False or not any(has_windows(node.steps) for node in nodes):
        return plain()
    other = Cutter(dataclasses.replace(program, nodes=nodes), cut=cut, windows=True).plan()
    if cut.windows:
        return other
    return other if _moved(other) <= _moved(plan := plain()) else plan


def _moved(plan: Plan) -> tuple[int, int]:
    """How many elements the parts of a plan read and write, and how many kernels it has."""
    found = 0
    for unit in plan.order:
        if not isinstance(unit, int):
            found += traffic((*unit.inputs, *unit.outputs))
        elif not (node := plan.program.nodes[unit]).free:
            found += traffic(dict.fromkeys((*node.ins, *node.outs)))
    return found, len(plan.units)


def _inside(node: Node) -> dict[str, tuple[Plan, ...]]:
    """The plans of the functions in an equation's parameters; {} if none of them has a kernel."""
    plans = {name: tuple(plan_of(program_of(f)) for f in parts) for name, parts in functions_of(node).items()}
    return plans if any(plan.has_kernels for those in plans.values() for plan in those) else {}


class Cutter:
    def __init__(self, program: Program, everything: bool = False, cut: Cut = MODELS, windows: bool = False):
        self.program, self.nodes, self.everything = program, program.nodes, everything
        self.cut, self.windows = cut, windows
        self.maker = {v: k for k, node in enumerate(self.nodes) for v in node.outs}
        self.users: dict[Value, list[int]] = {}
        for k, node in enumerate(self.nodes):
            for v in dict.fromkeys(x for x in node.ins if isinstance(x, Value)):
                self.users.setdefault(v, []).append(k)
        self.results = {v for v in program.outputs if isinstance(v, Value)}
        self._made_by = [self._makers(node) for node in self.nodes]
        self.above = self._ancestors()
        self._free = [k for k, node in enumerate(self.nodes) if node.free]
        self.group_of: dict[int, int] = {}  # the first node of the group of each node
        self.members: dict[int, list[int]] = {}
        # the layouts of groups to which elementwise steps on their values can be added without a change of the layout
        self.settled: dict[int, Layout] = {}
        self.picked: set[int] = set()  # gathers that are steps of a group
        self.scattered: dict[int, Step] = {}  # scatters that are: the step of each
        self._known: dict[Any, Group | None] = {}
        self._sayings = Sayings()

    def _ancestors(self) -> list[int]:
        """For each node the set of nodes that it depends on, as the bits of an int."""
        above: list[int] = []
        for makers in self._made_by:
            bits = 0
            for k in makers:
                bits |= above[k] | 1 << k
            above.append(bits)
        return above

    def _makers(self, node: Node) -> list[int]:
        return [self.maker[x] for x in dict.fromkeys(node.ins) if isinstance(x, Value) and x in self.maker]

    def _makers_of_tiles(self, k: int) -> list[int]:
        """The nodes that make what a kernel reads for a node: not the table that a scatter adds to."""
        made = self._made_by[k]
        if k not in self.scattered:
            return made
        into = self.scattered[k].ins[0]
        return [m for m in made if into not in self.nodes[m].outs]

    def plan(self) -> Plan:
        for k, node in enumerate(self.nodes):
            if node.steps and not node.free:
                self._join(k)
        if not self.everything:
            for first in [*self.members]:
                self._take_gathers(first)
            for first in [*self.members]:
                self._take_makers(first)
            for first in [*self.members]:
                self._take_sums(first)
            self._take_scatters()
        groups, taken, alone, left = [], [], [], []
        made_by = {v: node.name for node in self.nodes for v in node.outs}
        for first, members in self.members.items():
            group = self.group_at(members)
            assert group is not None
            why = self._why_not(group, made_by, first in self.cut.kernels)
            if why is None:
                groups.append(group)
                taken.append(members)
            else:
                alone.append(group)
                left.append((first, members, why))
        units: list[Unit] = [*groups]
        for u, group in enumerate(groups):
            found = self._chain(group, taken[u])
            if found is not None:
                units[u], more = found
                taken[u] = sorted([*taken[u], *more])
        if not self.everything:
            take_products(self, units, taken, alone, left)
            take_rows(self, units, taken, left)
        for k, node in enumerate(self.nodes):
            used = {v for v in node.outs if v in self.results or v in self.users}
            loop = loop_of(node, used, everything=self.everything)
            if loop is not None:
                units.append(loop)
                taken.append([k])
        left += [(those[0], those, BY_TUNER) for those in taken if those[0] in self.cut.xla]
        kept = [u for u, those in enumerate(taken) if those[0] not in self.cut.xla]
        units, taken = [units[u] for u in kept], [taken[u] for u in kept]
        order = self.sorted_order(taken)
        assert order is not None
        run = [units[u] if u >= 0 else -1 - u for u in order]
        inside = {k: plans for k in run if isinstance(k, int) and (plans := _inside(self.nodes[k]))}
        return Plan(self.program, run, left, inside, [those[0] for those in taken], self.windows, self.cut.origin)

    def _why_not(self, group: Group, made_by: dict[Value, str], forced: bool) -> str | None:
        """Why a group is not worth a kernel, or None. forced: one that can be a kernel is one."""
        read = [*group.loaded, *(step.outs[0] for step in group.gathers)]
        if self.everything or forced:
            return not_worth(group.steps, read, group.outputs, group.layout, everything=True)
        if group.windowed:
            return windows_not_worth(group.steps, read, group.outputs, group.layout)
        why = not_worth(group.steps, read, group.outputs, group.layout)
        return why or reads_parts(group.steps, group.loaded, made_by, group.layout)

    def _chain(self, group: Group, members: Sequence[int]) -> tuple[Chain, list[int]] | None:
        """The attention that a group is the middle of, and the numbers of its two products."""
        if len(group.outputs) != 1 or group.outputs[0] in self.results:
            return None
        (end,), own = group.outputs, set(members)
        after = self.users.get(end, [])
        before = [
            self.maker[v]
            for v in group.inputs
            if v in self.maker and v not in self.results and self.nodes[self.maker[v]].name == "dot_general"
            if own.issuperset(self.users[v])
        ]
        if len(after) != 1 or len(before) != 1 or self.nodes[after[0]].name != "dot_general":
            return None
        first, second = self.nodes[before[0]], self.nodes[after[0]]
        chain = chain_of(first, group.nodes, second, first.outs[0], end)
        return chain and (chain, [before[0], after[0]])

    def _join(self, k: int) -> None:
        """Puts a node into the groups of what it reads, all of them together if that goes; or into one that reads the
        same array; or into one of its own."""
        near = dict.fromkeys(self.group_of[m] for m in self._made_by[k] if m in self.group_of)
        near = sorted(near, key=lambda first: -max(self.members[first]))
        together = [[*near]] if len(near) > 1 else []
        beside = [[first] for first in self._beside(k) if first not in near]
        for firsts in [*together, *([first] for first in near), *beside]:
            members = sorted([k, *(m for first in firsts for m in self.members[first])])
            if not self.is_convex(members):
                continue
            settled = self.settled.get(firsts[0]) if len(firsts) == 1 else None
            layout = settled and self._with(settled, self.nodes[k])
            group = None if layout else self.group_at(members)
            if (layout or group) and self._runs(members, firsts):
                for first in firsts:
                    del self.members[first]
                self._put(members, layout or settled_of(group))
                return
        group = self.group_at([k])
        if group is not None:
            self._put([k], settled_of(group))

    def _take_gathers(self, first: int) -> None:
        """Puts into a group the gathers that nothing else reads, and with them what makes their indices: all together
        if that goes, or those that do."""
        if first not in self.members:
            return
        members = self.members[first]
        group, own = self.group_at(members), set(members)
        assert group is not None
        makers = {v: self.maker[v] for v in group.inputs if v in self.maker and v not in self.results}
        alone = [self.nodes[k].eqn for v, k in makers.items() if own.issuperset(self.users[v])]
        found = [self.maker[eqn.outs[0]] for eqn in alone if is_gather(eqn) and picks_well(eqn)]
        if not found or self._chain(group, members) is not None:
            return
        if self._takes_in(members, found) is None and len(found) > 1:
            for k in found:
                members = self._takes_in(members, [k]) or members

    def _takes_in(self, members: list[int], gathers: list[int]) -> list[int] | None:
        """The nodes of a group with these gathers in it, which it now is; None if they cannot be."""
        for index in (self._index_of(gathers), self._makers_of_index(gathers), []):
            more = {*gathers, *index}
            gone = {self.group_of[k] for k in index if k in self.group_of}
            if any(not more.issuperset(self.members[other]) for other in gone):
                continue
            together = sorted({*members, *more})
            self.picked.update(gathers)
            if self.is_convex(together) and self.group_at(together) and self._runs(together, [members[0], *gone]):
                for other in (members[0], *gone):
                    del self.members[other]
                self._put(together, None)
                return together
            self.picked.difference_update(gathers)
        return None

    def _take_scatters(self) -> None:
        """Puts scatters into the groups that compute their updates or their indices: all of these groups together if
        that goes, or one."""
        made = {v: node for node in self.nodes for v in node.outs}
        for k, node in enumerate(self.nodes):
            found = scatter_of(node, made) if not node.steps else None
            if found is None or not scatter_worth(found[0]):
                continue
            step, before = found
            more = {k, *(self.maker[v] for one in before for v in one.outs)}
            makers = [self.maker[x] for x in reversed(step.ins[1:]) if isinstance(x, Value) and x in self.maker]
            firsts = [*dict.fromkeys(self.group_of[m] for m in makers if m in self.group_of)]
            self.scattered[k] = step
            if not any(
                self._takes(more, some) for some in ([firsts] if len(firsts) > 1 else []) + [[f] for f in firsts]
            ):
                del self.scattered[k]

    def _takes(self, more: set[int], firsts: Sequence[int]) -> bool:
        """Makes one group of groups and of these nodes besides, if that goes."""
        together = sorted({*more, *(m for first in firsts for m in self.members[first])})
        if not self.is_convex(together) or not self.group_at(together) or not self._runs(together, firsts):
            return False
        for first in firsts:
            del self.members[first]
        self._put(together, None)
        return True

    def _take_makers(self, first: int) -> None:
        """Puts into a group with windows those groups whose values nothing else reads, as long as it computes little
        anew: no array has to lie between them; or at least single nodes of these groups."""
        tried: set[int] = set()
        while (members := self.members.get(first)) is not None:
            group = self.group_at(members)
            assert group is not None
            makers = {self.group_of[m] for v in group.inputs if (m := self.maker.get(v, -1)) in self.group_of} - tried
            if not group.windowed or not makers:
                return
            maker = max(makers)
            tried.add(maker)
            if self._together(first, maker):
                first = min(first, maker)
            else:
                first, _ = self._move_down(first, maker)

    def _take_sums(self, first: int) -> None:
        """Puts into a group whose programs take an axis whole those groups that nothing else reads. They came before
        what shows that it can be done, or repays it: the maximum of columns before the exponentials of a softmax, a
        softmax and the ones of labels before their difference, the gradient of a cross entropy. The softmax of an
        attention takes none: its kernel reads a mask or a bias that is a sum along an axis of its own."""
        tried: set[int] = set()
        while (members := self.members.get(first)) is not None:
            group = self.group_at(members)
            assert group is not None
            makers = {self.group_of[m] for v in group.inputs if (m := self.maker.get(v, -1)) in self.group_of} - tried
            if group.windowed or not group.layout.whole or not makers or self._chain(group, members) is not None:
                return
            maker = max(makers)
            tried.add(maker)
            if self._together(first, maker):
                first = min(first, maker)

    def _together(self, first: int, maker: int) -> bool:
        """Makes one group of a group and of one that it reads, if nothing else reads that."""
        members, theirs = self.members[first], self.members[maker]
        made = [v for k in theirs for v in self.nodes[k].outs]
        used = {user for v in made for user in self.users.get(v, ())}
        together = sorted({*members, *theirs})
        if not used <= {*together} or not self.results.isdisjoint(made) or not self.is_convex(together):
            return False
        if not self.group_at(together) or not self._runs(together, [first, maker]):
            return False
        del self.members[first], self.members[maker]
        self._put(together, None)
        return True

    def _move_down(self, first: int, maker: int) -> tuple[int, int]:
        """Moves elementwise nodes of a group into one that alone reads what they make, and can compute it from as many
        arrays: one array less lies between the two. Gives the first nodes of both."""
        for k in reversed(self.members[maker]):
            members, theirs = self.members[first], self.group_at(self.members[maker])
            if k not in self.members[maker] or any({*self.users.get(v, ())} - {*members} for v in self.nodes[k].outs):
                continue
            moved = self.needed_for([k])
            rest, together = sorted({*self.members[maker]} - {*moved}), sorted({*members, *moved})
            group, now = self.group_at(members), self.group_at(together)
            plain = all(step.name in MOVES | ELEMENTWISE for m in moved for step in self.nodes[m].steps)
            plain = plain and {*moved} <= {*self.members[maker]}
            if not rest or not plain or now is None or group is None or theirs is None or not self.is_convex(together):
                continue
            more = {*now.inputs} - {*group.inputs}
            if len(more) > 1 or not more <= {*theirs.inputs, *theirs.outputs}:
                continue
            if self.group_at(rest) and self._runs(together, [first, maker]):
                for gone in (first, maker):
                    del self.members[gone]
                self._put(rest, None)
                self._put(together, None)
                first, maker = together[0], rest[0]
        return first, maker

    def _index_of(self, gathers: Sequence[int]) -> list[int]:
        """The elementwise nodes and moves that make nothing but indices of these gathers."""
        return self.needed_for(gathers, 1)[len(gathers) :]

    def _makers_of_index(self, gathers: Sequence[int]) -> list[int]:
        """The nodes of the groups that make indices of these gathers, with what else they make."""
        index = [self.maker.get(self.nodes[k].ins[1]) for k in gathers]  # type: ignore[arg-type]
        firsts = {self.group_of[k] for k in index if k in self.group_of}
        return sorted(k for first in firsts for k in self.members[first])

    def needed_for(self, nodes: Sequence[int], operand: int = 0) -> list[int]:
        """These nodes, and the elementwise nodes and moves that make nothing but operands of them, from number
        `operand` on."""
        found = set(nodes)
        todo = {
            self.maker[x]
            for k in nodes
            for x in self.nodes[k].ins[operand:]
            if isinstance(x, Value) and x in self.maker
        }
        while todo:
            k = max(todo)
            todo.remove(k)
            node = self.nodes[k]
            plain = node.steps and not node.free and all(s.name in MOVES | ELEMENTWISE for s in node.steps)
            used = {user for v in node.outs for user in self.users.get(v, ())}
            if plain and found >= used and self.results.isdisjoint(node.outs):
                found.add(k)
                todo.update(m for m in self._made_by[k] if m not in found)
        return [*nodes, *sorted(found - set(nodes))]

    def _with(self, layout: Layout, node: Node) -> Layout | None:
        """The layout with one more node, of elementwise steps on values of one shape, whose axes they get: a long chain
        is not laid out anew for each of its steps. None where it has to be."""
        axes = dict(layout.axes)
        for step in node.steps:
            full = [x for x in step.ins if isinstance(x, Value) and x.shape]
            new = [x for x in full if x not in axes]
            if step.name not in ELEMENTWISE or any(x.shape != step.outs[0].shape for x in full):
                return None
            if any(x in self.maker and self.nodes[self.maker[x]].free for x in new):
                return None
            known = {axes[x] for x in full if x in axes}
            if len(known) != 1:
                return None
            axes.update(dict.fromkeys([*new, *step.outs], *known))
        more = dataclasses.replace(layout, axes=axes)
        return more if all(map(more.covers, node.outs)) else None

    def _beside(self, k: int) -> list[int]:
        """The groups that read one of the large arrays which a node reads, from none of which it gets it."""
        shared = [x for x in self.nodes[k].ins if isinstance(x, Value) and size_of(x) >= LARGE]
        users = [m for x in shared for m in self.users[x] if m < k and m in self.group_of]
        return list(dict.fromkeys(self.group_of[m] for m in users))

    def _put(self, members: list[int], settled: Layout | None) -> None:
        self.members[members[0]] = members
        self.settled.pop(members[0], None)
        if settled is not None:
            self.settled[members[0]] = settled
        self.group_of.update(dict.fromkeys(members, members[0]))

    def is_convex(self, members: Sequence[int]) -> bool:
        """Whether no node outside of `members` depends on one of them while another of them depends on it."""
        own = before = 0
        for k in members:
            own |= 1 << k
            before |= self.above[k]
        between = before & ~own & (1 << members[-1]) - (1 << members[0])
        while between:
            lowest = between & -between
            if self.above[lowest.bit_length() - 1] & own:
                return False
            between ^= lowest
        return True

    def _runs(self, members: Sequence[int], firsts: Iterable[int]) -> bool:
        """Whether these nodes and the other groups can run one after another."""
        rest = [nodes for first, nodes in self.members.items() if first not in firsts and len(nodes) > 1]
        return not rest or self.sorted_order([list(members), *rest]) is not None

    def sorted_order(self, groups: Sequence[Sequence[int]]) -> list[int] | None:
        """An order of the groups, by number, and of the nodes in none, by -1 - number; None if there is none."""
        return sorted_order(self._made_by, groups)

    def group_at(self, members: Sequence[int]) -> Group | None:
        """The group of these nodes; None if no kernel takes them together. It is asked for several times, and laid out
        once."""
        marked = self.picked or self.scattered
        marks = [k for k in members if k in self.picked or k in self.scattered] if marked else ()
        key = (*members, -1, *marks)
        if key not in self._known:
            self._known[key] = self._made(members, not marks)
        return self._known[key]

    def _made(self, members: Sequence[int], plain: bool) -> Group | None:
        """plain: the nodes have the steps that they have in the program."""
        constants, own = self.constants_of(members), set(members)
        new = [self.nodes[k] if plain else self._node(k) for k in members]
        nodes = [*constants, *new]
        steps = [step for node in nodes for step in node.steps]
        made = {v for step in steps for v in step.outs}
        given = (x for step in steps for x in tiles_of(step) if x not in made)
        read = dict.fromkeys([x for x in given if isinstance(x, Value)])
        tabled = [step for step in steps if step.name == "gather" or step.name in JOINS]
        tables = [x for step in tabled if step.name not in JOINS and isinstance(x := step.ins[0], Value)]
        into = [x for step in tabled if step.name in JOINS and isinstance(x := step.ins[0], Value)]
        if tabled and not made.isdisjoint([*tables, *into]):
            return None
        written = [
            v
            for k in members
            for v in self.nodes[k].outs
            if v in self.results or not own.issuperset(self.users.get(v, ()))
        ]
        if has_windows(steps):
            layout, last = laid_out_by_windows(steps, written)
        else:
            said = self._sayings.of(tuple(members) if plain else (), constants, new)
            layout, last = laid_out(steps, [*read], written, said)
        return None if layout is None or not written else Group(nodes, [*read, *tables, *into], written, layout, last)

    def _node(self, k: int) -> Node:
        node = self.nodes[k]
        if k in self.scattered:
            return dataclasses.replace(node, steps=(self.scattered[k],))
        return dataclasses.replace(node, steps=(node.eqn,)) if k in self.picked else node

    def constants_of(self, members: Sequence[int]) -> list[Node]:
        """The nodes that make those operands of `members` that depend on no input of the program."""
        found: set[int] = set()
        todo = list(members) if self._free else []
        while todo:
            new = {m for m in self._makers_of_tiles(todo.pop()) if self.nodes[m].free} - found
            found |= new
            todo += new
        return [self.nodes[m] for m in sorted(found)]
