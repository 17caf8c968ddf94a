"""Which values stay right, and which become partial sums, when one shard sees a part of a factor only.

A value is replicated (the same on every shard), varying (right for the elements or loop rounds of this shard), or
partial: the sum over the shards is the value that the whole kernel computes. Partial values come from contracting a cut
axis and from loops whose carry is a sum; only linear ops may follow, until they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jtile import ir
from jtile.ir.memory import ref
from jtile.passes.axes import Classes, Node, contraction

REPLICATED, VARYING, PARTIAL, ZERO = "replicated", "varying", "partial", "zero"
CARRY = "carry "  # with its number behind: the state of the running sum itself, of which each round must leave its own
PLAIN = {REPLICATED, VARYING, ZERO}
FIXED = {REPLICATED, ZERO}
MOVES = ir.Broadcast | ir.Reshape | ir.Transpose | ir.Slice | ir.Reverse


class NotLinearError(Exception):
    """The kernel cannot be cut along this factor; the text says where."""


class Sums:
    """Evaluates a kernel for one factor; raises NotLinearError.

    Args:
      cut: roots of the axis classes that a shard has a part of.
      refs: Refs with a dimension in the factor.
      loops: loops that walk along the factor: a shard runs some of their rounds.
      programs: a shard runs some of the programs along a grid axis.
      lanes: tiles may be cut to another size, so that not even the number of rounds or programs may count.
    Attributes:
      partial: outputs whose shards must be summed.
      contracted: a cut axis was summed over.
    """

    def __init__(
        self,
        kernel: ir.Kernel,
        classes: Classes,
        cut: Collection[Node],
        refs: Collection[ir.Value],
        loops: Collection[ir.For],
        *,
        programs: bool,
        lanes: bool,
    ):
        self.kernel, self.classes, self.cut, self.refs, self.loops = kernel, classes, cut, refs, loops
        self.programs, self.lanes = programs, lanes
        self.partial: set[ir.Value] = set()
        self.contracted = False
        self._same: set[ir.Value] = set()  # outputs that hold replicated values
        self._state: dict[ir.Value, str] = {}
        self._memory: dict[ir.Value, str] = {}
        self._within = False
        self._branch = REPLICATED  # VARYING inside of a branch that not every shard takes
        self._fresh: set[ir.Value] = set()  # scratch of one round of a cut loop
        self._used = {v for op in kernel.body.walk() for v in op.operands()}
        self._used |= {v for op in kernel.body.walk() for b in op.blocks() for v in b.yields}
        for _ in range(2):  # a loop may read what its later ops have stored
            self._block(kernel.body)
        check_partial(kernel, self.partial)
        if self.partial & self._same:
            raise NotLinearError("an output holds a sum over shards and something else")

    # -- states -----------------------------------------------------------------------------------------------------
    def _of(self, v: ir.Value) -> str:
        return self._state.get(v, REPLICATED)

    def _fail(self, op: ir.Op, why: str) -> NotLinearError:
        return NotLinearError(f"{why} ({op.mnemonic} at {op.loc})")

    def _join(self, op: ir.Op, a: str, b: str) -> str:
        """The state of a value that is either of two."""
        if a == b:
            return a
        pair = {a, b}
        if pair <= PLAIN:
            return VARYING if VARYING in pair else REPLICATED
        if pair == {ZERO, PARTIAL}:
            return PARTIAL
        raise self._fail(op, "a sum over shards is combined with a value that is none")

    def _add(self, op: ir.Op, a: str, b: str) -> str:
        """The state of a + b."""
        if is_carry(a) or is_carry(b):
            carry, term = (a, b) if is_carry(a) else (b, a)
            allowed = {PARTIAL, ZERO} if self.lanes else {PARTIAL, *PLAIN}
            if term not in allowed:
                raise self._fail(op, "what a loop sums up counts its rounds")
            return carry
        return self._join(op, a, b)

    def _times(self, op: ir.Op, a: str, b: str) -> str:
        if {a, b} <= PLAIN:
            return VARYING if VARYING in (a, b) else REPLICATED
        if {a, b} <= {PARTIAL, REPLICATED, ZERO} and a != b:
            return PARTIAL
        raise self._fail(op, "a product of a sum over shards with what differs between them")

    # -- the walk ---------------------------------------------------------------------------------------------------
    def _block(self, b: ir.Block) -> list[str]:
        for op in b.ops:
            self._op(op)
        return [self._of(v) for v in b.yields]

    def _op(self, op: ir.Op) -> None:
        match op:
            case ir.For() | ir.While() | ir.If():
                return self._region(op)
            case ir.Load():
                out = self._load(op)
            case ir.Store() | ir.Atomic():
                out = self._store(op)
            case _:
                out = self._pure(op)
        for r in op.results:
            self._state[r] = out

    def _pure(self, op: ir.Op) -> str:
        match op:
            case ir.Full(value=value):
                return ZERO if value == 0 else REPLICATED
            case ir.Alloc() if self._within:
                self._fresh.add(op.result)
            case ir.Map(fn=fn, args=args):
                return self._map(op, fn, [self._of(a) for a in args])
            case ir.Select():
                return self._select(op)
            case ir.Cast(x=x):
                return self._cast(op, self._of(x))
            case ir.Dot():
                return self._dot(op)
            case ir.Reduce(x=x, axes=axes, fn="sum"):
                return self._sum(op, self._of(x), self._is_cut(x, axes))
        states = {self._of(v) for v in op.operands()}
        if isinstance(op, MOVES) and len(states) == 1 and not any(map(is_carry, states)):
            return states.pop()
        return self._plain(op, states)

    def _plain(self, op: ir.Op, states: Collection[str]) -> str:
        """The state of the results of an op that is not linear."""
        if not set(states) <= PLAIN:
            raise self._fail(op, "a sum over shards goes through an op that is not linear")
        return VARYING if VARYING in states else REPLICATED

    def _is_cut(self, v: ir.Value, axes) -> bool:
        return any(self.classes.find((v, a)) in self.cut for a in axes)

    def _map(self, op: ir.Op, fn: str, states: list[str]) -> str:
        if set(states) <= PLAIN:
            return self._plain(op, states)
        match fn, states:
            case "neg", [a]:
                if a == PARTIAL:
                    return PARTIAL
            case "add", [a, b]:
                return self._add(op, a, b)
            case "sub", [a, b] if not is_carry(b):
                return self._add(op, a, b)
            case "mul", [a, b]:
                return self._times(op, a, b)
            case "div", [a, b] if a == PARTIAL:
                return self._times(op, a, b)
        return self._plain(op, states)

    def _select(self, op: ir.Select) -> str:
        cond, a, b = self._of(op.cond), self._of(op.a), self._of(op.b)
        if cond in FIXED:
            return self._join(op, a, b)
        return self._plain(op, (cond, a, b))

    def _cast(self, op: ir.Cast, state: str) -> str:
        if state == PARTIAL or is_carry(state):
            old, new = op.x.type.info, op.result.type.info
            if old.kind != new.kind or (new.kind != "f" and new.bits < old.bits):
                raise self._fail(op, "a sum over shards is converted to another kind of number")
        return state

    def _sum(self, op: ir.Op, state: str, cut: bool) -> str:
        if not cut:
            return PARTIAL if state == PARTIAL else self._plain(op, [state])
        self.contracted = True
        self._plain(op, [state])
        return PARTIAL

    def _dot(self, op: ir.Dot) -> str:
        (_, k), _ = contraction(op)
        a, b = self._of(op.a), self._of(op.b)
        if self._is_cut(op.a, [k]):
            self._plain(op, (a, b))
            self.contracted, product = True, PARTIAL
        else:
            product = self._times(op, a, b)
        acc = ZERO if op.acc is None else self._of(op.acc)
        return product if acc == ZERO else self._add(op, product, acc)

    # -- Refs -------------------------------------------------------------------------------------------------------
    def _place(self, op: ir.Load | ir.Store | ir.Atomic) -> str:
        """The state of the index and the mask of an access."""
        values = [ir.dim_value(d) for d in op.index] + ([op.mask] if op.mask is not None else [])
        return self._plain(op, [self._branch, *[self._of(v) for v in values]])

    def _load(self, op: ir.Load) -> str:
        place = self._place(op)
        state = VARYING if op.ref in self.refs else self._memory.get(op.ref, REPLICATED)
        if op.ref in self.partial:
            raise self._fail(op, "a sum over shards is read before it is complete")
        return state if place in FIXED else self._plain(op, [place, state])

    def _store(self, op: ir.Store | ir.Atomic) -> str:
        place, state = self._place(op), self._of(op.value)
        if is_carry(state):
            raise self._fail(op, "a running sum is stored in every round")
        if op.ref in self.refs:
            return self._plain(op, [state, VARYING])
        scratch = ref(op.ref).role == "scratch"
        if isinstance(op, ir.Atomic) and not scratch:
            return self._accumulate(op, place, state)
        if self._within and (op.ref not in self._fresh if scratch else state == PARTIAL):
            raise self._fail(op, "a round of the loop leaves something behind")
        if place not in FIXED or (state == VARYING and not scratch) or (self.programs and not scratch):
            raise self._fail(op, "shards would write different values to one element")
        if scratch:
            self._memory[op.ref] = self._join(op, self._memory.get(op.ref, ZERO), state)
        elif state == PARTIAL:
            self.partial.add(op.ref)
        elif state == REPLICATED:
            self._same.add(op.ref)
        return REPLICATED

    def _accumulate(self, op: ir.Atomic, place: str, state: str) -> str:
        counted = self._within or self.programs  # each round, or program, runs, and adds, on one shard only
        linear = op.fn == "add" and op.result not in self._used and ref(op.ref).role == "out"
        once = counted and not self.lanes and state in PLAIN
        if linear and (once or (place in FIXED and state in (PARTIAL, ZERO))):
            self.partial.add(op.ref)
        elif not counted and place in FIXED and state in FIXED:
            self._same.add(op.ref)
        else:
            raise self._fail(op, "shards would combine their values in one element")
        return REPLICATED

    # -- regions ----------------------------------------------------------------------------------------------------
    def _region(self, op: ir.For | ir.While | ir.If) -> None:
        match op:
            case ir.For():
                if not {self._of(v) for v in (op.lo, op.hi, op.step)} <= FIXED:
                    raise self._fail(op, "the bounds of a loop differ between shards")
                if op in self.loops:
                    out = self._own_loop(op)
                else:
                    out = self._loop(op, op.inits, [op.body.params[1:]], lambda: self._block(op.body))
            case ir.While():
                out = self._loop(op, op.inits, [op.cond.params, op.body.params], lambda: self._while(op))
            case _:
                if self._of(op.cond) not in PLAIN:
                    raise self._fail(op, "a branch depends on a sum over shards")
                out = self._either(op)
        self._state.update(zip(op.results, out, strict=True))

    def _either(self, op: ir.If) -> list[str]:
        outer, cond = self._branch, self._of(op.cond)
        self._branch = VARYING if VARYING in (outer, cond) else REPLICATED
        both = zip(self._block(op.then), self._block(op.orelse), strict=True)
        self._branch = outer
        out = [self._join(op, a, b) for a, b in both]
        return [self._plain(op, [VARYING, s]) for s in out] if cond == VARYING else out

    def _while(self, op: ir.While) -> list[str]:
        if not set(self._block(op.cond)) <= FIXED:
            raise self._fail(op, "the number of rounds differs between shards")
        return self._block(op.body)

    def _loop(self, op: ir.Op, inits, params, body: Callable[[], list[str]]) -> list[str]:
        """A loop that every shard runs in full: the states of its carry, until they stay."""
        start = [self._of(v) for v in inits]
        states = start
        for _ in range(3):
            for block_params in params:
                self._state.update(zip(block_params, states, strict=True))
            new = [self._join(op, a, b) for a, b in zip(states, body(), strict=True)]
            if new == states:
                break
            states = new
        return states

    def _own_loop(self, op: ir.For) -> list[str]:
        """A loop of which each shard runs some rounds: its carries must be sums."""
        k, *params = op.body.params
        self._state[k] = VARYING
        kept = [p is y for p, y in zip(params, op.body.yields, strict=True)]
        for j, (p, init, same) in enumerate(zip(params, op.inits, kept, strict=True)):
            state = self._of(init)
            if not same and state not in (ZERO, PARTIAL):
                raise self._fail(op, "a carry of the loop does not start from zero")
            self._state[p] = state if same else f"{CARRY}{j}"
        self._within = True
        yields = self._block(op.body)
        self._within = False
        for j, (state, same) in enumerate(zip(yields, kept, strict=True)):
            if not same and state not in (f"{CARRY}{j}", ZERO):
                raise self._fail(op, "a carry of the loop is no sum")
        return [PARTIAL if is_carry(state) else state for state in yields]


def is_carry(state: str) -> bool:
    return state.startswith(CARRY)


def check_partial(kernel: ir.Kernel, partial: Collection[ir.Value]) -> None:
    """Check that sums over shards start from zero, since they start on each shard."""
    aliased = {kernel.outputs[o] for _, o in kernel.aliases}
    for out, init in zip(kernel.outputs, kernel.inits or (None,) * len(kernel.outputs), strict=True):
        if out in partial and (init not in (None, 0) or out in aliased):
            raise NotLinearError(f"output {out.name} is a sum over shards, and does not start from zero")
