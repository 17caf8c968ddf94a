"""A small writer of LLVM IR text: modules, functions, structured loops.

Mutable variables are `alloca`s in the entry block (`Code.var`); LLVM's SROA turns them into registers and phis,
so that the emitters above this file never build a phi by hand.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from . import invariant


class Val(NamedTuple):
    """A typed LLVM operand: `ty` is its type's text, `name` an SSA name (`%v3`) or a constant (`42`, `splat (float
    1.0)`)."""

    ty: str
    name: str

    def __str__(self) -> str:
        return f"{self.ty} {self.name}"


_remembered = functools.lru_cache(maxsize=4096)  # kernels have some dozens of types, and ask for them all the time


@_remembered
def vec(lanes: int, scalar: str) -> str:
    """The vector type of `lanes` `scalar`s; one lane is the scalar type itself."""
    return scalar if lanes == 1 else f"<{lanes} x {scalar}>"


@_remembered
def lanes_of(ty: str) -> int:
    return int(ty[1:].split(" ", 1)[0]) if ty.startswith("<") else 1


@_remembered
def scalar_of(ty: str) -> str:
    return ty[:-1].split(" x ", 1)[1] if ty.startswith("<") else ty


def like(ty: str, scalar: str) -> str:
    """The type with the lanes of `ty` and the element type `scalar`."""
    return vec(lanes_of(ty), scalar)


@_remembered
def i64(n: int) -> Val:
    return Val("i64", str(n))


def const(ty: str, literal: str) -> Val:
    """A constant of type `ty`, splatted over its lanes; `literal` is LLVM's spelling of the scalar."""
    return Val(ty, literal if lanes_of(ty) == 1 else f"splat ({scalar_of(ty)} {literal})")


_CALLED = re.compile(r" call [^@\n]*@([\w.]+)\(")  # begins with a plain text, which is found faster than a boundary
_READS = ("load i", "load f", "load d", "load h", "load b", "load p", "load <")  # not: atomic
_SHORT = 12  # lines of a function that costs less than its call


@dataclasses.dataclass
class Module:
    """An LLVM module under construction: declarations and functions, each emitted once, in a deterministic order."""

    triple: str
    declarations: dict[str, str] = dataclasses.field(default_factory=dict)
    globals: dict[str, str] = dataclasses.field(default_factory=dict)
    functions: dict[str, str] = dataclasses.field(default_factory=dict)
    attributes: str = ""

    def declare(self, name: str, signature: str) -> None:
        """`declare("llvm.fma.v16f32", "<16 x float> @{}(<16 x float>, ...)")`: `{}` stands for the name."""
        self.declarations.setdefault(name, "declare " + signature.format(name))

    def constant(self, data: bytes) -> str:
        """The name of a global with these bytes, aligned for vectors; one for all who ask for the same."""
        text = "".join(f"\\{b:02X}" for b in data)
        body = f'private unnamed_addr constant [{len(data)} x i8] c"{text}", align 64'
        same = next((name for name, line in self.globals.items() if line == f"{name} = {body}"), None)
        name = same or f"@dense{len(self.globals)}"
        self.globals[name] = f"{name} = {body}"
        return name

    def text(self) -> str:
        parts = [f'target triple = "{self.triple}"', *self.globals.values(), *self._functions()]
        parts += [self.declarations[k] for k in sorted(self.declarations)]
        parts.append(f"attributes #0 = {{ {self.attributes} }}")
        return "\n".join(parts) + "\n"

    def _functions(self) -> Iterator[str]:
        """The functions; those that are called in one place, or are short, are to be inlined there."""
        texts = list(self.functions.values())
        calls = collections.Counter(name for text in texts for name in _CALLED.findall(text))
        for name, text in self.functions.items():
            mine = text.startswith("define internal") and " noinline " not in text.partition("\n")[0]
            inline = mine and (calls[name] == 1 or text.count("\n") <= _SHORT)
            yield text.replace(" #0 ", " #0 alwaysinline ", 1) if inline else text


@_remembered
def intrinsic_suffix(ty: str) -> str:
    """`<16 x float>` -> `v16f32`: how intrinsic names spell a type."""
    short = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}
    scalar = scalar_of(ty)
    n = lanes_of(ty)
    return ("" if n == 1 else f"v{n}") + short.get(scalar, scalar)


class Code:
    """One LLVM function under construction. Every method appends to the current block and returns the typed result."""

    def __init__(
        self,
        module: Module,
        name: str,
        params: list[Val],
        ret: str = "void",
        linkage: str = "internal",
        attributes: str = "",
    ):
        self.module, self.name, self.params, self.ret, self.linkage = module, name, params, ret, linkage
        self.attributes = attributes  # attributes of this function, beside the module's
        self._entry: list[str] = []
        self._body: list[str] = []
        self.mark = ""  # a comment behind each line: see `emitting.Marks`
        self._count = 0
        self._memory = invariant.Memory([p.name for p in params if "noalias" in p.ty])
        self._known: dict[str, Val] = {}  # pure expressions whose values are there at this place
        self._sums: dict[str, tuple[Val, int]] = {}  # values that a constant was added to
        self.widened: dict[tuple[str, str], Val] = {}  # what integers, by name and dtype, are as an i64
        self._read: dict[str, dict[str, Val]] = {}  # by root, what this block has loaded, and nobody has written since
        self._writes: list[set[str] | None] = [set()]  # the memory that each loop around this place writes; None: any
        self._scopes: list[list[str]] = [[]]  # the keys of `_known` that each block around this place has added

    # -- instructions -------------------------------------------------------------------------------------------
    def ssa(self, hint: str = "v") -> str:
        self._count += 1
        return f"%{hint}{self._count}"

    def let(self, ty: str, expr: str, hint: str = "v") -> Val:
        """Append `%x = expr` and return `%x` with type `ty`; where an equal expression is known, return its value."""
        known = self._known.get(expr)
        if known is not None:
            return known
        self._count += 1
        name = f"%{hint}{self._count}"
        self._body.append(f"  {name} = {expr}{self.mark}")
        value = Val(ty, name)
        if "ptr" in ty:
            self._memory.note(name, expr)
        if invariant.is_pure(expr):
            self._known[expr] = value
            self._scopes[-1].append(expr)
        elif not expr.startswith(_READS):
            self._wrote(f"{name} = {expr}")
        return value

    def do(self, line: str) -> None:
        self._body.append(f"  {line}{self.mark}")
        self._wrote(line)

    def _wrote(self, line: str) -> None:
        """Note what an instruction may write: what is known of that memory is no longer known."""
        written = self._memory.written(line)
        if written is None:
            self._read.clear()
            self._writes[-1] = None
        elif written:
            mine = self._writes[-1]
            self._writes[-1] = None if mine is None else mine | written
            for root in [*self._read]:
                if not all(self._memory.apart(root, w) for w in written):
                    del self._read[root]

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        """What becomes known in here is forgotten behind."""
        self._scopes.append([])
        self._read.clear()
        yield
        self._leave()
        self._scopes.pop()

    def _leave(self) -> None:
        for key in self._scopes[-1]:
            self._known.pop(key, None)
        self._scopes[-1].clear()
        self._read.clear()

    def binary(self, op: str, a: Val, b: Val) -> Val:
        """`op` with its flags: `"fadd"`, `"mul nsw"`, `"fmul reassoc"`."""
        return self.let(a.ty, f"{op} {a.ty} {a.name}, {b.name}")

    def cmp(self, kind: str, predicate: str, a: Val, b: Val) -> Val:
        """`cmp("icmp", "slt", a, b)`: i1 or a vector of i1."""
        return self.let(like(a.ty, "i1"), f"{kind} {predicate} {a.ty} {a.name}, {b.name}")

    def select(self, c: Val, a: Val, b: Val) -> Val:
        return self.let(a.ty, f"select {c}, {a}, {b}")

    def cast(self, op: str, x: Val, ty: str) -> Val:
        return x if x.ty == ty else self.let(ty, f"{op} {x} to {ty}")

    def intrinsic(self, name: str, ret: str, *args: Val, suffix: str | None = None, flags: str = "") -> Val:
        """Call `@llvm.<name>.<suffix>`; the suffix is that of the first argument's type unless given ("" for none)."""
        suffix = intrinsic_suffix(args[0].ty) if suffix is None else suffix
        full = f"llvm.{name}" + (f".{suffix}" if suffix else "")
        self.module.declare(full, f"{ret} @{{}}({', '.join(a.ty for a in args)})")
        call = f"call {flags + ' ' if flags else ''}{ret} @{full}({', '.join(map(str, args))})"
        if ret == "void":
            self.do(call)
            return Val("void", "")
        return self.read(ret, call, args[0]) if name == "masked.load" else self.let(ret, call)

    def splat(self, x: Val, lanes: int) -> Val:
        """Broadcast a scalar to `lanes` lanes."""
        if lanes == 1:
            return x
        ty = vec(lanes, x.ty)
        if not x.name.startswith("%"):
            return Val(ty, f"splat ({x.ty} {x.name})")
        one = self.let(ty, f"insertelement {ty} poison, {x}, i64 0")
        return self.let(ty, f"shufflevector {one}, {ty} poison, <{lanes} x i32> zeroinitializer")

    # -- memory -------------------------------------------------------------------------------------------------
    def var(self, ty: str, init: Val | None = None, count: int = 1, align: int | None = None) -> Val:
        """A stack variable (entry block); promoted to registers by SROA when it is only loaded and stored."""
        name = self.ssa("a")
        tail = (f", i64 {count}" if count != 1 else "") + (f", align {align}" if align else "")
        self._entry.append(f"  {name} = alloca {ty}{tail}")
        slot = Val("ptr", name)
        if count == 1:  # elements of others are reached through pointers that are counted from them
            self._memory.slots.add(name)
        if init is not None:
            self.store(init, slot)
        return slot

    def load(self, ty: str, ptr: Val, align: int | None = None, meta: str = "") -> Val:
        return self.read(ty, f"load {ty}, {ptr}" + (f", align {align}" if align else "") + meta, ptr)

    def read(self, ty: str, expr: str, ptr: Val) -> Val:
        """Append an expression that only reads memory, unless this block has read the same and nobody wrote since."""
        if ptr.name in self._memory.slots:
            return self.let(ty, expr)
        known = self._read.setdefault(self._memory.root(ptr.name), {})
        if expr not in known:
            known[expr] = self.let(ty, expr)
        return known[expr]

    def own(self, ptr: Val) -> None:
        """Say that the memory of a pointer is reached through no other pointer."""
        self._memory.own.add(ptr.name)
        self._memory.roots.pop(ptr.name, None)

    def store(self, value: Val, ptr: Val, align: int | None = None, meta: str = "") -> None:
        line = f"store {value}, {ptr}" + (f", align {align}" if align else "") + meta
        if ptr.name in self._memory.slots:
            self._body.append(f"  {line}{self.mark}")
        else:
            self.do(line)

    def gep(self, elem: str, ptr: Val, index: Val | int) -> Val:
        """The address of an element. What is constant of the index comes last: an instruction adds it for nothing, and
        neighbours share the rest."""
        base, rest = self._parts(index)
        if base is not None:
            ptr = self.let("ptr", f"getelementptr {elem}, {ptr}, {base}")
        return self.let("ptr", f"getelementptr {elem}, {ptr}, i64 {rest}") if rest else ptr

    # -- integer arithmetic on i64 with constant folding (addresses, trip counts) ---------------------------------
    def add(self, a: Val | int, b: Val | int) -> Val:
        (x, c), (y, d) = self._parts(a), self._parts(b)
        return self._plus(x or y if x is None or y is None else self.binary("add nsw", x, y), c + d)

    def mul(self, a: Val | int, b: Val | int) -> Val:
        (x, c), (y, d) = self._parts(a), self._parts(b)
        if x is not None and y is not None:
            return self.binary("mul nsw", _i64(a), _i64(b))
        if x is None:
            x, c, d = y, d, c
        if x is None or d == 0:
            return i64(c * d)
        return self._plus(x if d == 1 else self.binary("mul nsw", x, i64(d)), c * d)

    def sub(self, a: Val | int, b: Val | int) -> Val:
        a, b = _i64(a), _i64(b)
        if _literal(a) is not None and _literal(b) is not None:
            return i64(_literal(a) - _literal(b))
        return a if b.name == "0" else self.binary("sub nsw", a, b)

    def _parts(self, x: Val | int) -> tuple[Val | None, int]:
        """A value and the constant that was added to it; None: nothing but a constant."""
        if type(x) is int:
            return None, x
        name = x.name
        if name[0] == "%":  # as most are
            return self._sums.get(name) or (x, 0)
        literal = _literal(x)
        return (x, 0) if literal is None else (None, literal)

    def _plus(self, x: Val | None, n: int) -> Val:
        if x is None or n == 0:
            return i64(n) if x is None else x
        out = self.binary("add nsw", x, i64(n))
        self._sums[out.name] = x, n
        return out

    # -- control flow -------------------------------------------------------------------------------------------
    def label(self, hint: str = "b") -> str:
        self._count += 1
        return f"{hint}{self._count}"

    def place(self, label: str) -> None:
        """Begin a block that other blocks lead to; what was known since the structure around it began is forgotten."""
        self._leave()
        self._body.append(f"{label}:")

    def br(self, label: str) -> None:
        self._body.append(f"  br label %{label}{self.mark}")

    def cond_br(self, cond: Val, then: str, other: str) -> None:
        self._body.append(f"  br {cond}, label %{then}, label %{other}{self.mark}")

    @contextlib.contextmanager
    def loop(self, lo: Val | int, hi: Val | int, step: Val | int = 1, hint: str = "i", meta: str = "") -> Iterator[Val]:
        """`for i in range(lo, hi, step)` over i64, step > 0; yields i. A loop that must run once is emitted without a
        branch."""
        lo, hi, step = _i64(lo), _i64(hi), _i64(step)
        literals = [_literal(v) for v in (lo, hi, step)]
        if None not in literals and len(range(*literals)) == 1:
            yield lo
            return
        some = None not in literals and len(range(*literals)) > 0
        slot, body, done = self.var("i64"), self.label("body"), self.label("done")
        outside, self._body = self._body, []
        self._writes.append(set())
        with self._scope():
            i = self.load("i64", slot)
            yield i
            after = self.let("i64", f"add nsw {i}, {step.name}")
            self.store(after, slot)
            again = self.cmp("icmp", "slt", after, hi)
        lines, self._body = self._body, outside
        writes = self._writes.pop()
        if None not in literals and not some:
            return
        mine = self._writes[-1]
        self._writes[-1] = None if writes is None or mine is None else mine | writes
        before, rest = invariant.split(lines, self._memory, writes if some else None)
        self._body += before
        self.store(lo, slot)
        if some:
            self.br(body)
        else:
            self.cond_br(self.cmp("icmp", "slt", lo, hi), body, done)
        rest.append(f"  br {again}, label %{body}, label %{done}{meta}{self.mark}")
        self._body.append("\n".join([f"{body}:", *rest, f"{done}:"]))  # one entry: no loop around looks into it

    @contextlib.contextmanager
    def when(self, cond: Val) -> Iterator[None]:
        """`if cond:` without an else."""
        then, done = self.label("then"), self.label("done")
        self.cond_br(cond, then, done)
        self._body.append(f"{then}:")
        with self._scope():
            yield
        self.br(done)
        self._body.append(f"{done}:")

    # -- code that must dominate everything -----------------------------------------------------------------------
    def detour(self) -> list[str]:
        """From here to `rejoin`, instructions go to the entry block: constants and addresses that every block may
        use."""
        body, self._body = self._body, self._entry
        self._aside, self._known, self._read = (self._known, self._read), {}, {}
        return body

    def rejoin(self, body: list[str]) -> None:
        self._body = body
        self._known, self._read = self._aside

    def finish(self, value: Val | None = None) -> str:
        """Return from the function, add it to the module and give its text."""
        self.do(f"ret {value}" if value is not None else "ret void")
        params = ", ".join(str(p) for p in self.params)
        head = f"define {self.linkage} {self.ret} @{self.name}({params}) #0 {self.attributes} {{\nentry:\n".replace(
            "  ", " "
        )
        text = head + "\n".join([*self._entry, *self._body]) + "\n}\n"
        self.module.functions[self.name] = text
        return text


def _i64(x: Val | int) -> Val:
    return i64(x) if isinstance(x, int) else x


def _literal(x: Val) -> int | None:
    name = x.name
    if name[:1] == "%":  # as most do
        return None
    return int(name) if name.lstrip("-").isdigit() else None


def shuffle(c: Code, a: Val, b: Val, lanes: list[int]) -> Val:
    """A vector of the given lanes of a and b, where b's are numbered behind a's; -1: the lane may hold anything."""
    mask = ", ".join("i32 poison" if i < 0 else f"i32 {i}" for i in lanes)
    return c.let(vec(len(lanes), scalar_of(a.ty)), f"shufflevector {a}, {b}, <{len(lanes)} x i32> <{mask}>")
