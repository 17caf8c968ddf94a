"""Which products of a program become kernels, and with which nodes before and behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .products import product_of
from .steps import Value
from .units import Group, Product, Unit

if TYPE_CHECKING:
    from .groups import Cutter

Left = list[tuple[int, list[int], str]]  # see `Plan.left`


def take_products(cutter: Cutter, units: list[Unit], taken: list[list[int]], alone: list[Group], left: Left) -> None:
    """Makes one kernel of products, of the group of elementwise nodes that reads them, and of the nodes that compute
    their operands; of these two either may be missing. alone: the groups that are `left` since they are not worth a
    kernel by themselves."""
    groups = [*zip(units, taken, strict=True), *((group, of[1]) for group, of in zip(alone, left, strict=True))]
    for unit, members in [*groups, *((None, [k]) for k, node in enumerate(cutter.nodes) if node.name == "dot_general")]:
        busy = {k for those in taken for k in those if those is not members}
        if not busy.isdisjoint(members) or (unit is not None and not _is_there(members, taken, left)):
            continue
        if unit is not None and not isinstance(unit, Group):
            continue
        for normed, computed in ((True, True), (True, False), (False, True), (False, False)):
            found = _product(cutter, unit, members, taken, normed, computed)
            if found is not None and _take(cutter, *found, units, taken, left):
                break


def _is_there(members: list[int], taken: list[list[int]], left: Left) -> bool:
    return any(those is members for those in (*taken, *(of[1] for of in left)))


def _take(
    cutter: Cutter, product: Product, together: list[int], units: list[Unit], taken: list[list[int]], left: Left
) -> bool:
    """Puts a product in the place of the groups that it consists of, if the kernels can run one after another then."""
    own = {*together}
    kept = [u for u, those in enumerate(taken) if own.isdisjoint(those)]
    if cutter.sorted_order([together, *(taken[u] for u in kept)]) is None:
        return False
    units[:] = [*(units[u] for u in kept), product]
    taken[:] = [*(taken[u] for u in kept), together]
    left[:] = [entry for entry in left if not own.issuperset(entry[1])]
    return True


def _product(
    cutter: Cutter, group: Group | None, members: list[int], taken: list[list[int]], normed: bool, computed: bool
) -> tuple[Product, list[int]] | None:
    """(the products that a group of elementwise nodes reads, or the one product of `members`; the numbers of all
    nodes). computed: with the nodes that compute operands; normed: with the group that computes rows of the left one,
    and sums along them. It is None where there are none."""
    nodes, maker = cutter.nodes, cutter.maker
    if group and (group.windowed or group.gathers or group.layout.whole or group.layout.late):
        return None
    busy = {k for those in taken for k in those if those is not members}
    free = lambda v, name: (k := maker.get(v, -1)) >= 0 and k not in busy and nodes[k].name == name
    makers = sorted({maker[v] for v in group.inputs if free(v, "dot_general")}) if group else members
    if not makers:
        return None
    norm = _norm(cutter, makers) if normed else []
    if normed and not norm:
        return None
    before = _computed(cutter, makers, taken, norm) if computed else []
    if computed and not before:
        return None
    before = sorted({*before, *norm})
    lefts = {maker.get(nodes[k].ins[0]) for k in makers} - {*before}  # type: ignore[arg-type]
    if any(m is not None and nodes[m].name == "transpose" for m in lefts):
        return None  # XLA's products read a transposed array where it lies
    rights = [nodes[k].ins[1] for k in makers]
    turned = list(dict.fromkeys(maker[v] for v in rights if free(v, "transpose") and maker[v] not in before))  # type: ignore[index]
    alone = [m for m in turned if {*makers} >= {*cutter.users[nodes[m].outs[0]]}]
    together = sorted({*alone, *before, *makers, *(members if group else ())})
    own = set(together)
    if not cutter.is_convex(together):
        return None
    used = lambda v: v in cutter.results or not own.issuperset(cutter.users.get(v, ()))
    written = [*(v for k in makers for v in nodes[k].outs if used(v)), *(group.outputs if group else ())]
    of = lambda numbers: [nodes[k] for k in numbers]
    rows = cutter.group_at(norm) if norm else None
    product = product_of(of(makers), group, written, of(turned), of(before), cutter.constants_of(before), rows)
    return product and (product, together)


def _norm(cutter: Cutter, makers: list[int]) -> list[int]:
    """The nodes of the group that makes nothing but the left operand of these products, and sums along its rows."""
    (x, *others) = {cutter.nodes[k].ins[0] for k in makers}
    first = cutter.group_of.get(cutter.maker.get(x, -1))  # type: ignore[arg-type]
    alone = x not in cutter.results and {*cutter.users.get(x, ())} <= {*makers}  # type: ignore[arg-type]
    alone = alone and all(cutter.nodes[k].ins[1] is not x for k in makers)  # a right operand is read from memory
    if others or first is None or not alone:
        return []
    members = cutter.members[first]
    group = cutter.group_at(members)
    return members if group is not None and group.outputs == [x] and group.layout.whole else []


def _computed(cutter: Cutter, makers: list[int], taken: list[list[int]], norm: list[int]) -> list[int]:
    """The nodes that make nothing but operands of products: elementwise ones and moves, and a reshape in front of a
    product. Those of a kernel all together, or none; without those of `norm`."""
    nodes, results = cutter.nodes, cutter.results
    operands = [x for k in makers for x in nodes[k].ins if isinstance(x, Value)]
    tops = sorted({k for x in operands if (k := cutter.maker.get(x, -1)) >= 0 and x not in results})
    tops = [k for k in tops if nodes[k].name == "reshape" and not nodes[k].steps]
    tops = [k for k in tops if {*makers} >= {*cutter.users[nodes[k].outs[0]]}]
    start = sorted([*makers, *tops])
    found = {*tops, *cutter.needed_for(start)[len(start) :]} - {*norm}
    whole = all(found.isdisjoint(those) or found.issuperset(those) for those in taken)
    return sorted(found) if whole and found > {*tops} else []
