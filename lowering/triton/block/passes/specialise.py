"""Warp specialisation: a producer that copies operands into rings, and consumers that multiply what waits there."""

from __future__ import annotations

from jtile.ir import AllocShared, Block, Builder, Kernel, Load, Roles, Store, TileType, Value
from jtile.passes.products import untransposed

from . import epilogue
from .consumer import consumer
from .feeds import Feeds, feeds
from .plan import NoPlan, Plan, Refusal
from .producer import producer
from .rings import Held, Place, allocate
from .split_rows import split

WITH_TILES = 40  # registers of a thread of a producer that computes with tiles


def specialise(kernel: Kernel, plan: Plan) -> Kernel:
    """A tile-level kernel of one grid axis as a block-level kernel of the roles of a plan.

    Raises:
      Refusal: the kernel's operands cannot be brought by a role of their own.
    """
    shares = split(kernel, plan.consumers)
    if isinstance(shares, NoPlan):
        raise Refusal(shares)
    found = feeds(kernel)
    bodies = [shares.body(w) for w in range(plan.consumers)]
    b = Builder()
    b.loc = kernel.loc
    rings = allocate(b, found, plan, bodies[0][1])
    place = _places(rings)
    roles = [
        consumer(
            kernel,
            body,
            {loads[x]: p for x, p in place.items()},
            w,
            epilogue.allocate(b, _stores(kernel, plan, body), str(w)),
            _scratch(b, found, w),
        )
        for w, (body, loads) in enumerate(bodies)
    ]
    evict = {kernel.params[k]: hint for k, hint in plan.evict.items()}
    roles.append(producer(kernel, place, plan.consumers, evict))
    many, few = _registers(plan, roles[-1])
    b.loc = kernel.loc
    names = (*(f"consumer{w}" for w in range(plan.consumers)), "producer")
    warps = (*(plan.warps for _ in bodies), 1)
    b.add(Roles(names, warps, (*(many for _ in bodies), few), tuple(roles)))
    return kernel.with_body(b.block)


def _registers(plan: Plan, producer: Block) -> tuple[int, int]:
    """Registers of a thread of a consumer, and of the producer, which needs more where it computes with tiles."""
    many, few = plan.registers
    tiles = any(isinstance(r.type, TileType) and r.shape for op in producer.walk() for r in op.results)
    if not tiles or few >= WITH_TILES:
        return many, few
    return max(many - (WITH_TILES - few) // 2, 0), WITH_TILES


def _places(rings: list[Held]) -> dict[Load, Place]:
    return {op: (held, site, k) for held in rings for site in held.ring.sites for k, op in enumerate(site.loads)}


def _stores(kernel: Kernel, plan: Plan, body) -> list[tuple[Store, epilogue.Output]]:
    """The stores of a share that leave through shared memory."""
    refs = {kernel.params[k]: out for k, out in plan.outputs.items()}
    return [(op, refs[op.ref]) for op in body.walk() if isinstance(op, Store) and op.ref in refs]


def _scratch(b: Builder, found: Feeds, w: int) -> dict[object, Value]:
    """The buffers of computed right operands: every share has all columns of a product."""
    out: dict[object, Value] = {}
    for dot, n in found.computed.items():
        v, _ = untransposed(dot.b)
        if (v.shape, v.dtype, n) not in out:
            b.loc = dot.loc
            out[v.shape, v.dtype, n] = b.value(AllocShared(v.shape, v.dtype), f"right{w}")
    return out
