"""Types: every operand is defined, and every spelled type is what triton's verifier would demand."""

from __future__ import annotations

from . import ops_arith, ops_combine, ops_control, ops_math, ops_memory, ops_shape  # noqa: F401  ops register
from .parse import Function, Region, Stmt
from .table import OPS
from .types import TtirError, Type


def check(functions: dict[str, Function]) -> None:
    """Raise TtirError unless every op of the module is known and well typed; fills `arg_types` and `types`."""
    checker = _Checker()
    for f in functions.values():
        checker.body(f.body, dict(f.params))
        last = f.body[-1] if f.body else None
        if last is None or last.name != "tt.return" or list(last.arg_types) != f.results:
            raise TtirError(f"function {f.name} does not end in a return of its results")


class _Checker:
    def __init__(self) -> None:
        self.count = 0
        self.names: set[str] = set()

    def body(self, body: list[Stmt], scope: dict[str, Type]) -> None:
        for s in body:
            self.count += 1
            s.number = self.count
            self.statement(s, scope)

    def region(self, region: Region, scope: dict[str, Type]) -> None:
        self.body(region.body, scope | dict(region.params))

    def statement(self, s: Stmt, scope: dict[str, Type]) -> None:
        if s.name not in OPS:
            raise s.error(f"the evaluator knows no op {s.name}")
        if s.name in ("scf.for", "scf.while"):
            ops_control.control_head(s)
        missing = [a for a in s.args if a not in scope]
        if missing:
            raise s.error(f"{missing[0]} is not defined here")
        s.arg_types = [scope[a] for a in s.args]
        outer = {} if s.name in ("tt.reduce", "tt.scan") and not s.generic else scope
        for region in s.regions:
            self.region(region, outer)
        op = OPS[s.name]
        try:
            results = list(op.rule(s, s.arg_types))
        except (KeyError, IndexError) as e:
            raise s.error(f"cannot read this op ({type(e).__name__}: {e})") from e
        ins, outs = (s.arg_types, results) if s.generic else map(list, op.form(s.arg_types, results))
        if (list(s.ins), list(s.outs)) != (ins, outs):
            show = lambda a, b: f"{', '.join(map(str, a))} -> {', '.join(map(str, b))}"
            raise s.error(f"spelled {show(s.ins, s.outs)}, but the types are {show(ins, outs)}")
        if len(results) != len(s.results):
            raise s.error(f"{len(s.results)} names for {len(results)} results")
        s.types = results
        for name, t in zip(s.results, results, strict=True):
            root = name.partition("#")[0]
            if name in scope or (root in self.names and name.endswith("#0")):
                raise s.error(f"{name} is defined twice")
            self.names.add(root)
            scope[name] = t
