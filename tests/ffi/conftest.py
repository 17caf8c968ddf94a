"""Small kernels in LLVM IR, compiled to the objects that the FFI library loads."""

import os
import sys
import textwrap
from pathlib import Path

import forked
import jax
import llvmlite.binding as llvm
import pytest

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
_SIGNATURE = "i32 @jtile_entry(ptr %bufs, ptr %dims, i64 %begin, i64 %end, ptr %workspace, ptr %host)"


def emit(text: str, arch: str = "x86_64", opt: int = 2, reloc: str = "pic") -> bytes:
    """LLVM IR text to a relocatable object; `arch` need not be the host's."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(f'target triple = "{TRIPLES[arch]}"\n' + text)
    target = llvm.Target.from_triple(TRIPLES[arch])
    machine = target.create_target_machine(opt=opt, reloc=reloc, codemodel="small")
    return machine.emit_object(module)


def entry(body: str, extra: str = "") -> str:
    """A module whose entry runs `body` for every program `%p`; `body` falls through to its end."""
    return f"""
{extra}
define {_SIGNATURE} {{
entry:
  %pids = alloca [3 x i64]
  br label %head
head:
  %p = phi i64 [ %begin, %entry ], [ %p.next, %next ]
  %more = icmp slt i64 %p, %end
  br i1 %more, label %program, label %done
program:
{textwrap.indent(textwrap.dedent(body), "  ")}
  br label %next
next:
  %p.next = add i64 %p, 1
  br label %head
done:
  ret i32 0
}}
"""


# c[i] = a[i] + b[i] over 256 floats a program.
VADD = entry(
    """
    br label %loop
  loop:
    %i = phi i64 [ 0, %program ], [ %i.next, %loop ]
    %base = mul i64 %p, 256
    %at = add i64 %base, %i
    %a = load ptr, ptr %bufs
    %b.slot = getelementptr ptr, ptr %bufs, i64 1
    %b = load ptr, ptr %b.slot
    %c.slot = getelementptr ptr, ptr %bufs, i64 2
    %c = load ptr, ptr %c.slot
    %a.at = getelementptr float, ptr %a, i64 %at
    %b.at = getelementptr float, ptr %b, i64 %at
    %c.at = getelementptr float, ptr %c, i64 %at
    %x = load float, ptr %a.at
    %y = load float, ptr %b.at
    %z = fadd float %x, %y
    store float %z, ptr %c.at
    %i.next = add i64 %i, 1
    %again = icmp slt i64 %i.next, 256
    br i1 %again, label %loop, label %exit
  exit:
    """
)

_PID = """
store i64 %p, ptr %pids
%pid1 = getelementptr i64, ptr %pids, i64 1
store i64 0, ptr %pid1
%pid2 = getelementptr i64, ptr %pids, i64 2
store i64 7, ptr %pid2
"""

# Fails site 0 in every program whose flag, bufs[0][p] (i32), is zero, and site 1 where it is negative; out[p] = p + 1.
ASSERT = entry(
    _PID
    + """
    %flags = load ptr, ptr %bufs
    %flag.at = getelementptr i32, ptr %flags, i64 %p
    %flag = load i32, ptr %flag.at
    %out.slot = getelementptr ptr, ptr %bufs, i64 1
    %out = load ptr, ptr %out.slot
    %out.at = getelementptr i64, ptr %out, i64 %p
    %value = add i64 %p, 1
    store i64 %value, ptr %out.at
    %bad = icmp sle i32 %flag, 0
    br i1 %bad, label %fail, label %good
  fail:
    %negative = icmp slt i32 %flag, 0
    %site = zext i1 %negative to i64
    %fn.slot = getelementptr ptr, ptr %host, i64 1
    %fn = load ptr, ptr %fn.slot
    call void %fn(ptr %host, i64 %site, ptr %pids)
    br label %good
  good:
    """
)

# Program p prints site p; the printed arguments are the buffers themselves.
PRINT = entry(
    _PID
    + """
    %fn = load ptr, ptr %host
    call void %fn(ptr %host, i64 %p, ptr %pids, ptr %bufs)
    """
)

# out[p] = table[p % 4] through a constant table, an exported one (reached through the GOT), zeroed data and a call.
LINKED = entry(
    """
    %k = and i64 %p, 3
    %x = call i64 @pick(i64 %k)
    %z.at = getelementptr [4 x i64], ptr @zeros, i64 0, i64 %k
    %z = load volatile i64, ptr %z.at
    %g.at = getelementptr [4 x i64], ptr @exported, i64 0, i64 %k
    %g = load volatile i64, ptr %g.at
    %sum = add i64 %x, %z
    %total = add i64 %sum, %g
    %out = load ptr, ptr %bufs
    %out.at = getelementptr i64, ptr %out, i64 %p
    store i64 %total, ptr %out.at
    """,
    extra="""
@table = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40], align 64
@pointers = internal constant [2 x ptr] [ptr @table, ptr getelementptr (i64, ptr @table, i64 1)]
@zeros = internal global [4 x i64] zeroinitializer, align 32
@exported = global [4 x i64] [i64 1, i64 2, i64 3, i64 4]
define internal i64 @pick(i64 %k) noinline {
  %slot = getelementptr [2 x ptr], ptr @pointers, i64 0, i64 0
  %base = load volatile ptr, ptr %slot
  %at = getelementptr i64, ptr %base, i64 %k
  %x = load i64, ptr %at
  ret i64 %x
}
""",
)

# out[p] = address of the worker's scratch, after writing all of its first MiB: some microseconds of work.
SCRATCH = entry(
    """
    br label %loop
  loop:
    %i = phi i64 [ 0, %program ], [ %i.next, %loop ]
    %at = getelementptr i8, ptr %workspace, i64 %i
    store volatile i8 1, ptr %at
    %i.next = add i64 %i, 64
    %again = icmp slt i64 %i.next, 1048576
    br i1 %again, label %loop, label %exit
  exit:
    %address = ptrtoint ptr %workspace to i64
    %out = load ptr, ptr %bufs
    %out.at = getelementptr i64, ptr %out, i64 %p
    store i64 %address, ptr %out.at
    """
)

# out[p] += 1, atomically.
COUNT = entry(
    """
    %out = load ptr, ptr %bufs
    %out.at = getelementptr i64, ptr %out, i64 %p
    %before = atomicrmw add ptr %out.at, i64 1 monotonic
    """
)

SOURCES = {"count": COUNT, "vadd": VADD, "assert": ASSERT, "print": PRINT, "linked": LINKED, "scratch": SCRATCH}


@pytest.fixture(autouse=True)
def on_the_cpu(request):
    """The FFI library is called as XLA's CPU runtime calls it, but where the test says `gpu`."""
    if "gpu" in request.keywords:
        yield
        return
    before = jax.config.jax_default_device
    jax.config.update("jax_default_device", jax.devices("cpu")[0])  # not a context: tests start threads
    yield
    jax.config.update("jax_default_device", before)


@pytest.fixture(scope="session")
def emit_object():
    return emit


@pytest.fixture(scope="session")
def entry_module():
    return entry


@pytest.fixture(scope="session")
def sources() -> dict[str, str]:
    return SOURCES


@pytest.fixture(scope="session")
def images() -> dict[str, bytes]:
    """The objects of all the kernels above, for this machine."""
    from jtile.ffi._run import host_arch

    return {name: emit(text, arch=host_arch()) for name, text in SOURCES.items()}


@pytest.fixture
def run_python(images, tmp_path):
    """Run a script in a fresh process, in a folder that holds NAME.o for every image; gives its standard output."""
    for name, image in images.items():
        (tmp_path / f"{name}.o").write_bytes(image)

    def run(script: str, **env: str) -> str:
        paths = [p for p in sys.path if p and Path(p).is_dir()]
        full = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", **env}
        command = [sys.executable, "-c", textwrap.dedent(script)]
        done = forked.run(command, cwd=tmp_path, env=full)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def fake_driver_file(tmp_path_factory):
    import fake_driver

    return fake_driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(fake_driver_file):
    """A driver without a GPU, its log empty and nothing failing."""
    import fake_driver

    found = fake_driver.FakeDriver(fake_driver_file)
    found.lib.fake_reset()
    yield found
    assert found.lib.fake_depth() == 0  # every context that was pushed is popped
