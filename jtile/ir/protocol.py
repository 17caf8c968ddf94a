"""The protocol of the roles of a block: who fills, who waits, who arrives; kernels that would hang are refused.

Some rules need no run: somebody arrives where somebody waits, somebody fills what somebody reads, copies bring as many
bytes as were announced. What a role has under way is followed by `in_flight.py`; the rest is played through for the
first and the last program (`play.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from .block import Arrive, AsyncLoad, Expect, Roles, Wait, nbytes
from .control import For, While
from .core import Block, Kernel, Op, Value
from .dynamic import used_symbols
from .extents import evaluate
from .in_flight import check_in_flight
from .memory import Load
from .placement import blocks_of, named, refuse, roles_of
from .places import fills, reads, root
from .play import ORDERS, Play
from .scalars import Scalars
from .shapes import Full
from .skeleton import Skeleton
from .way import Way

SIZE = 1024  # what a symbol counts for while the roles are played through
LOADED = (3, 20)  # numbers below these: few rounds and branches of both kinds, and more rounds than rings have slots


def check_protocol(kernel: Kernel) -> None:
    """Refuse a block-level kernel whose roles would wait for ever or use what is not there.

    Raises:
      VerificationError: names role, barrier, source line, and what would help.
    """
    roles = roles_of(kernel)
    _check_waits(kernel, roles)
    _check_fills(kernel, roles)
    _check_bytes(kernel, roles)
    sizes = dict.fromkeys(used_symbols(kernel), SIZE)
    sides = [evaluate(n, sizes) for n in kernel.grid]
    if not all(sides):
        return
    skeletons = [Skeleton(name, body) for name, body in zip(roles.names, roles.bodies, strict=True)]
    first, last = (0,) * len(sides), tuple(n - 1 for n in sides)
    for pid, orders in ((first, ORDERS), (last, ORDERS[-1:] if last != first else ())):
        for name, body in zip(roles.names, roles.bodies, strict=True):
            check_in_flight(kernel, name, body, pid)
        ways = [Way(kernel, s, pid, sizes) for s in skeletons]
        for order in orders:
            Play(kernel, ways, order).run()


def check_loaded(kernel: Kernel) -> None:
    """Refuse a kernel whose roles would wait for ever for some numbers that decide rounds and branches and are loaded.

    For roles that were made of one program: those go the same way, whatever the numbers are. Roles by hand may rely on
    more than the kernel says.

    Raises:
      VerificationError: see `check_protocol`.
    """
    roles = roles_of(kernel)
    skeletons = [Skeleton(name, body) for name, body in zip(roles.names, roles.bodies, strict=True)]
    if any(isinstance(v.op, Load) for s in skeletons for v in s.needed):
        for loaded in LOADED:
            ways = [Way(kernel, s, (0,) * len(kernel.grid), {}, loaded) for s in skeletons]
            Play(kernel, ways, ORDERS[0]).run()


def _each(roles: Roles) -> Iterator[tuple[str, Op]]:
    """Every op of every role, with the role's name, in program order."""
    for name, body in zip(roles.names, roles.bodies, strict=True):
        for op in body.walk():
            yield name, op


# -- rules that need no run -------------------------------------------------------------------------------------------


def _check_waits(kernel: Kernel, roles: Roles) -> None:
    """Check that somebody arrives at every barrier with a wait, often enough for one phase, and not later only."""
    arrivals: dict[Value, list[tuple[str, Op]]] = {}
    for name, op in _each(roles):
        if isinstance(op, Arrive | Expect):
            arrivals.setdefault(op.barrier, []).append((name, op))
    loops = [op for _, op in _each(roles) if isinstance(op, For | While)]
    looped = {id(op) for x in loops for b in x.blocks() for op in b.walk()}
    for name, body in zip(roles.names, roles.bodies, strict=True):
        order = {id(op): k for k, op in enumerate(body.walk())}
        for op in body.walk():
            passes = isinstance(op, Wait) and isinstance(op.parity.op, Full) and op.parity.op.value == 1
            if not isinstance(op, Wait) or passes:
                continue
            brings, needs = arrivals.get(op.barrier, []), op.barrier.type.arrivals  # type: ignore[union-attr]
            count = sum(getattr(a, "count", 1) for _, a in brings)
            if not brings:
                why = "nobody ever arrives at it: an arrive or an expect of another role is missing"
                refuse(kernel, op, f"waits for {named(op.barrier)}, but {why}", name)
            if count < needs and not any(id(a) in looped for _, a in brings):
                why = f"a phase takes {needs} arrivals, and all roles together arrive {count} times"
                way = f"allocate it with arrivals={count}, or let more roles arrive"
                refuse(kernel, op, f"waits for {named(op.barrier)}, but {why}: {way}", name)
            if _first_parity(kernel, body, op) == 0 and all(order.get(id(a), -1) > order[id(op)] for _, a in brings):
                why = "only this role arrives there, and only later: it would wait for itself"
                refuse(kernel, op, f"waits for {named(op.barrier)}, but {why}; arrive or expect first", name)


def _first_parity(kernel: Kernel, body: Block, op: Wait) -> int | None:
    """The parity of a wait when it first runs; None for one that a branch may leave out."""
    scalars = Scalars.in_roles(kernel)
    for x in _first_path(body):
        if x is op:
            return scalars.known(op.parity) if scalars.known(op.when) else None
        if isinstance(x, For):
            scalars.bind(x.body.params, [scalars.of(v) for v in (x.lo, *x.inits)])
        scalars.run(x)
    return None


def _check_fills(kernel: Kernel, roles: Roles) -> None:
    """Check that what is read has been filled: by another role, or by the same one before."""
    filled: dict[Value, list[tuple[str, int]]] = {}
    for at, (name, op) in enumerate(_each(roles)):
        for v in fills(op):
            filled.setdefault(root(v), []).append((name, at))
    sure = {id(op) for b in roles.bodies for op in _first_path(b)}
    for at, (name, op) in enumerate(_each(roles)):
        for v in reads(op):
            who = filled.get(root(v), [])
            if not who:
                message = f"reads {named(root(v))}, which no role ever fills"
                refuse(kernel, op, f"{message}: async_load or store_shared to it is missing", name)
            if id(op) in sure and all(n == name and k > at for n, k in who):
                message = f"reads {named(root(v))} before this role, the only one that fills it, has done so"
                refuse(kernel, op, f"{message}: move the read behind the fill", name)


def _first_path(b: Block) -> Iterator[Op]:
    """Ops that no branch leads around: when one first runs, all that stands before it in the text has run at most."""
    for op in b.ops:
        yield op
        if isinstance(op, For):
            yield from _first_path(op.body)


def _check_bytes(kernel: Kernel, roles: Roles) -> None:
    """Check that copies bring what was announced, where each stands behind its expect in one block."""
    blocks = [(name, b) for name, body in zip(roles.names, roles.bodies, strict=True) for b in blocks_of(body)]
    brought: dict[int, int] = {}
    found: dict[Value, list[tuple[str, Expect]]] = {}
    unclear: set[Value] = set()
    for name, b in blocks:
        scalars, pending = Scalars.in_roles(kernel), {}
        for op in b.ops:
            scalars.run(op)
            if isinstance(op, Expect):
                found.setdefault(op.barrier, []).append((name, op))
                brought[id(op)] = 0
                pending[op.barrier, scalars.of(op.at)] = op
            elif isinstance(op, AsyncLoad):
                e = pending.get((op.barrier, scalars.of(op.at)))
                if e is None or e.when is not op.when:
                    unclear.add(op.barrier)
                else:
                    brought[id(e)] += nbytes(op.buffer.type)  # type: ignore[arg-type]
    for barrier, expects in found.items():
        for name, e in expects:
            if barrier not in unclear and brought[id(e)] != e.bytes:
                why = f"the copies onto {named(barrier)} that follow bring {brought[id(e)]}"
                way = "the phase would never end" if brought[id(e)] < e.bytes else "the phase would end too early"
                refuse(kernel, e, f"announces {e.bytes} bytes, {why}: {way}", name)
