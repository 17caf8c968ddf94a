"""The roles of a block: the first runs in the warps that the kernel started with, the others in partitions of a
`ttg.warp_specialize`, which see of the function what they capture."""

from __future__ import annotations

from jtile import ir

from .. import clusters
from ..ttir import Val
from . import emit_posts
from .analysis import COLUMNS, product_layout
from .code import FENCE, LaidCode
from .emit_shared import slot
from .emitter import BLOCK, BlockEmitter

REGISTERS = 65536  # registers of a block on sm_90
SHARE = 49152  # registers of a block that names what it takes, beside which there is room for another
LEAST, MOST = 24, 240  # registers that a thread may ask for
AROUND = 26  # registers that an instruction for products takes besides those of its sums
ROLES = 13  # triton has barriers for 14 partitions besides the first role, and 3.6 fills warpgroups up with some


def roles_of(kernel: ir.Kernel) -> ir.Roles:
    """The roles of a kernel; for a kernel without roles, one role of 4 warps that does everything."""
    found = [op for op in kernel.body.ops if isinstance(op, ir.Roles)]
    if found:
        return found[0]
    ops = [op for op in kernel.body.ops if not isinstance(op, ir.AllocShared | ir.AllocBarriers)]
    return ir.build(ir.Roles(("all",), (4,), (0,), (ir.Block((), ops),)), kernel.loc)  # type: ignore[return-value]


def emit_body(em: BlockEmitter) -> int:
    """Emit the body of the kernel's function; returns the number of warps that it starts with."""
    roles = roles_of(em.kernel)
    if len(roles.bodies) > ROLES:
        em.refuse(roles, f"blocks of at most {ROLES} roles, got {len(roles.bodies)}: give one the work of several")
    barriers, em.widest = False, columns_of_products(roles)
    for op in em.kernel.body.ops:
        if isinstance(op, ir.AllocShared | ir.AllocBarriers):
            em.check_sides(op)
            em.env[op.result] = BLOCK[type(op)](em, op)
            barriers |= isinstance(op, ir.AllocBarriers)
    if barriers:  # asynchronous copies count on the barriers
        em.code.do(FENCE)
    if em.cluster is not None:
        em.say_cluster(clusters.READY)
    parts = [_role(em, roles, k) for k in range(len(roles.bodies))]
    if len(parts) == 1:
        em.code.do("gpu.barrier")
        em.code.lines += parts[0][0].text().split("\n")
    else:
        _specialise(em, roles, parts)
    return roles.warps[0]


def _role(em: BlockEmitter, roles: ir.Roles, k: int) -> tuple[LaidCode, dict]:
    asks: tuple[str, ...] = ()
    if any(roles.early):
        late = any(isinstance(op, ir.KernelsWait) for op in roles.bodies[k].walk())
        held = any(isinstance(op, ir.KernelsWait) and op.hold for body in roles.bodies for op in body.walk())
        at_once = late and all(roles.early) and not held
        asks = ("launch_dependents",) * at_once if roles.early[k] else ("wait", "launch_dependents")
    devices = em.memo.get("devices")
    with em.role(roles.bodies[k], roles.warps[k], isolated=k > 0, asks=asks) as code:
        if devices and "wait" in asks:
            devices.renew()
        clears = ir.posts(em.kernel) and k == emit_posts.clearing_role(roles)
        wait = next((op for op in roles.bodies[k].ops if isinstance(op, ir.Receive)), None) if clears else None
        em.memo["clear in front of"] = wait  # while nothing has come
        em.block(roles.bodies[k])
        _wait_for_cluster(em, roles.bodies[k])
        if devices:
            if clears and wait is None:
                emit_posts.clear(em, devices)
            devices.leave()
        return code, em.captures or {}


def _wait_for_cluster(em: BlockEmitter, body: ir.Block) -> None:
    """Wait, in the role that fills the slots of a ring, until all blocks of a cluster have said that they have read the
    last of each: a block must not end while another may still reach its barriers."""
    for ring, fills in em.cluster.rings.items() if em.cluster is not None else ():
        if not any(isinstance(op, ir.Wait) and op.barrier is ring for op in body.walk()):
            continue
        found = em.env[ring]
        for k in range(ring.type.count):  # type: ignore[union-attr]
            last = len(range(k, fills, ring.type.count)) - 1  # type: ignore[union-attr]
            one = slot(em, found, em.code.i32(k))
            em.code.do(f"ttng.wait_barrier {one.name}, {em.code.i32(last % 2).name} : {one.type}")


def _specialise(em: BlockEmitter, roles: ir.Roles, parts: list[tuple[LaidCode, dict]]) -> None:
    code = em.code
    outside = ", ".join(v.name for v in em.captured)
    asked = ", ".join(map(str, worker_registers(roles)))
    attributes = f" attributes {{requestedRegisters = array<i32: {asked}>}}" if asked else ""
    code.do(f"ttg.warp_specialize({outside}){attributes}")
    _region(code, f"default {{  // {roles.names[0]}", parts[0][0], "ttg.warp_yield")
    for k, (part, captures) in enumerate(parts[1:]):
        args = []
        for v in em.captured:
            inside = captures.get(v)
            name = part.name() if inside is None else inside.name
            args.append(f"{name}: {_type(v)}")
        head = f"partition{k}({', '.join(args)}) num_warps({roles.warps[k + 1]}) {{  // {roles.names[k + 1]}"
        _region(code, head, part, "ttg.warp_return")
    code.do(f": ({', '.join(map(_type, em.captured))}) -> ()")


def worker_registers(roles: ir.Roles) -> tuple[int, ...]:
    """The registers of a thread that each role behind the first asks for. Where some roles name a number, those that
    name none share the rest with the first. Where no role does, the result is empty: all threads have the same."""
    if not any(roles.registers[1:]):
        return ()
    whole = [-(-w // 4) * 128 for w in roles.warps]  # threads of the warpgroups that a role takes part in
    pool = REGISTERS // sum(whole) // 8 * 8 * sum(whole)  # a kernel starts with the same number for every thread
    left = pool - sum(n * r for n, r in zip(whole, roles.registers, strict=True))
    sharing = sum(n for n, r in zip(whole, roles.registers, strict=True) if not r)
    share = max(LEAST, min(MOST, left // max(sharing, 1) // 8 * 8))
    return tuple(r or share for r in roles.registers[1:])


def registers_at_start(roles: ir.Roles) -> int:
    """The registers of a thread when a kernel starts, at most; 0: no bound. Where all roles name what they take, and it
    is no more than `SHARE`, the kernel takes that, so that the block of another finds room beside it; but for products
    so wide that ptxas would refuse them then."""
    if not all(roles.registers):
        return 0
    large = [(w, r) for w, r in zip(roles.warps, roles.registers, strict=True) if w >= 4]
    small = [(w, r) for w, r in zip(roles.warps, roles.registers, strict=True) if w < 4]  # these share warpgroups
    groups = -(-sum(w for w, _ in small) // 4)
    whole = sum(w * r for w, r in large) + groups * 4 * max((r for _, r in small), default=0)
    if 32 * whole > SHARE:
        return 0
    start = whole // (sum(w for w, _ in large) + 4 * groups) // 8 * 8
    return start if _widest_product(roles) // 2 + AROUND <= start else 0


def _widest_product(roles: ir.Roles) -> int:
    """Columns of the widest instruction for products; 0 where no role has any."""
    most = columns_of_products(roles)
    products = [
        (op, warps)
        for warps, body in zip(roles.warps, roles.bodies, strict=True)
        for op in body.walk()
        if isinstance(op, ir.DotAsync)
    ]
    layouts = [product_layout(op, warps, most) for op, warps in products]
    return max((x.n for x in layouts if x is not None), default=0)


def columns_of_products(roles: ir.Roles) -> int:
    """Columns of an instruction for products, at most: ptxas wants its registers to be there when the kernel starts,
    whatever a role asks for later. Their number was found by trying: half of the columns and `AROUND` more, which is
    154, 90, 58 for 256, 128, 64 columns."""
    first, *others = roles.warps
    threads = 32 * (first + -(-sum(others) // 4) * 4)  # roles behind the first share warpgroups
    products = [op for body in roles.bodies for op in body.walk() if isinstance(op, ir.DotAsync)]
    most = max((op.b.shape[1] for op in products), default=COLUMNS)  # an instruction has no more, if it is narrow
    columns = COLUMNS
    while columns > 8 and min(columns, most) // 2 + AROUND > REGISTERS // threads // 8 * 8:
        columns //= 2
    return columns


def _region(code: LaidCode, head: str, part: LaidCode, last: str) -> None:
    code.do(head)
    code.lines += [line for line in part.text().split("\n") if line]
    with code.region():
        code.do(last)
    code.do("}")


def _type(v) -> str:
    return v.type if not isinstance(v, Val) else v.elem
