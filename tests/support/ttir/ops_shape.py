"""Shapes: ranges, splats, reshapes, joins, gathers; none of them computes."""

from __future__ import annotations

import math

import numpy as np

from .parse import Stmt
from .table import Types, arity, arrow, demand, first_arrow, one, op, result
from .types import Type, garbage


def _range_rule(stmt: Stmt, args: list[Type]) -> Types:
    t = stmt.ins[0]
    n = stmt.attrs["end"] - stmt.attrs["start"]
    demand(stmt, t == Type((n,), "i32") and n > 0, f"a range of {n} as {t}")
    return [t]


@op("tt.make_range", rule=_range_rule, form=result)
def _range(m, s: Stmt):
    return np.arange(s.attrs["start"], s.attrs["end"], dtype=np.int32)


def _to(stmt: Stmt, args: list[Type], holds, what: str = "") -> Types:
    """The one spelled result, where `holds(operand, result)`."""
    arity(stmt, args, 1)
    demand(stmt, len(stmt.outs) == 1, "one result is spelled")
    a, r = args[0], stmt.outs[0]
    demand(stmt, a.elem == r.elem and holds(a.shape, r.shape), f"{stmt.name} from {a} to {r}")
    return [r]


@op("tt.splat", rule=lambda s, a: _to(s, a, lambda x, y: not x and y), form=arrow)
def _splat(m, s: Stmt, a):
    return np.full(s.types[0].shape, a)


def _unsplat_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 1)
    demand(stmt, args[0].shape and math.prod(args[0].shape) == 1, f"unsplat of {args[0]}")
    return [args[0].shaped(())]


@op("tt.unsplat", rule=_unsplat_rule, form=one)
def _unsplat(m, s: Stmt, a):
    return a.reshape(())


def _expand_rule(stmt: Stmt, args: list[Type]) -> Types:
    axis = stmt.attrs["axis"]
    return _to(stmt, args, lambda x, y: x and 0 <= axis <= len(x) and y == (*x[:axis], 1, *x[axis:]))


@op("tt.expand_dims", rule=_expand_rule, form=arrow)
def _expand(m, s: Stmt, a):
    return a.reshape(s.types[0].shape)


def _broadcasts(x, y) -> bool:
    return len(x) == len(y) > 0 and all(p in (q, 1) for p, q in zip(x, y, strict=True))


@op("tt.broadcast", rule=lambda s, a: _to(s, a, _broadcasts), form=arrow)
def _broadcast(m, s: Stmt, a):
    return np.broadcast_to(a, s.types[0].shape)


@op("tt.reshape", rule=lambda s, a: _to(s, a, lambda x, y: x and y and math.prod(x) == math.prod(y)), form=arrow)
def _reshape(m, s: Stmt, a):
    out = a.reshape(s.types[0].shape)
    return m.mixed(out) if s.attrs.get("allow_reorder") or "allow_reorder" in s.words else out


def _trans_rule(stmt: Stmt, args: list[Type]) -> Types:
    order = stmt.attrs["order"]
    demand(stmt, sorted(order) == list(range(len(args[0].shape))), f"transpose of {args[0]} by {order}")
    return _to(stmt, args, lambda x, y: y == tuple(x[k] for k in order))


@op("tt.trans", rule=_trans_rule, form=arrow)
def _trans(m, s: Stmt, a):
    return np.transpose(a, s.attrs["order"])


def _join_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 2)
    demand(stmt, args[0] == args[1] and args[0].shape, f"join of {args[0]} and {args[1]}")
    return [args[0].shaped((*args[0].shape, 2))]


@op("tt.join", rule=_join_rule, form=first_arrow)
def _join(m, s: Stmt, a, b):
    return np.stack([a, b], -1)


def _split_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 1)
    demand(stmt, len(args[0].shape) > 1 and args[0].shape[-1] == 2, f"split of {args[0]}")
    return [args[0].shaped(args[0].shape[:-1])] * 2


@op("tt.split", rule=_split_rule, form=lambda a, r: (a, r[:1]))
def _split(m, s: Stmt, a):
    return np.ascontiguousarray(a[..., 0]), np.ascontiguousarray(a[..., 1])


def _cat_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 2)
    demand(stmt, args[0] == args[1] and len(args[0].shape) == 1, f"cat of {args[0]} and {args[1]}")
    return [args[0].shaped((2 * args[0].shape[0],))]


@op("tt.cat", rule=_cat_rule, form=first_arrow)
def _cat(m, s: Stmt, a, b):
    return m.mixed(np.concatenate([a, b]))  # tt.cat may reorder


def _gather_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 2)
    (x, i), axis = args, stmt.attrs["axis"]
    others = lambda t: (*t.shape[:axis], *t.shape[axis + 1 :])
    demand(stmt, len(x.shape) == len(i.shape) > axis >= 0, f"gather from {x} by {i} along {axis}")
    demand(stmt, others(x) == others(i), f"gather from {x} by {i}: the other axes differ")
    demand(stmt, i.is_int and i.elem != "i1", f"gather by {i}")
    return [i.of(x.elem)]


@op("tt.gather", rule=_gather_rule, form=arrow)
def _gather(m, s: Stmt, x, i):
    axis = s.attrs["axis"]
    bad = (i < 0) | (i >= x.shape[axis])
    out = np.take_along_axis(x, np.where(bad, 0, i).astype(np.int64), axis)
    return np.where(bad, garbage(s.types[0].shaped(())), out)


def _histogram_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 1, 2)
    r = stmt.outs[0]
    demand(stmt, len(args[0].shape) == 1 == len(r.shape) and r.elem in ("i32", "i64"), f"histogram of {args[0]} as {r}")
    demand(stmt, len(args) == 1 or args[1] == args[0].of("i1"), "the mask of a histogram")
    return [r]


@op("tt.histogram", rule=_histogram_rule, form=first_arrow)
def _histogram(m, s: Stmt, x, mask=None):
    kept = x if mask is None else x[mask]
    n = s.types[0].shape[0]
    demand(s, ((kept >= 0) & (kept < n)).all(), f"histogram of {n} bins meets {kept.min()}..{kept.max()}")
    return np.bincount(kept, minlength=n).astype(s.types[0].numpy)
