"""Products whose left operand has two of every four numbers: what the machine code has, and texts that are refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError, UnsupportedError
from jtile.lowering.triton import sparse

BF16 = jnp.bfloat16


@jt.function
def product(a, places, b, o, *, rows=64, warps=4, in_registers=False, rounds=1):
    """o [rows, n] of a [rows, k / 2], places [rows, k / 8] and b [n, k]."""
    A, P, B = (jt.alloc(x.shape, x.dtype) for x in (a, places, b))
    come = jt.barrier()
    with jt.role("all", warps=warps):
        come[0].expect(A.nbytes + P.nbytes + B.nbytes)
        for x, buffer in ((a, A), (places, P), (b, B)):
            jt.async_copy(x.at[:, :], buffer, come[0])
        come[0].wait(0)
        left = A.load() if in_registers else A
        if rounds == 1:
            o[:, :] = jt.dot_wait(jt.dot_async(left, B.T, places=P.load()))
            return
        total = jt.zeros(o.shape, o.dtype)
        for _ in jt.range(rounds):
            total = jt.dot_wait(jt.dot_async(left, B.T, total, places=P.load()), pending=1)
        o[:, :] = jt.dot_wait(total)


def kernel(**options):
    out_type = lambda a, places, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), jnp.float32)
    return jt.call(lambda *refs: product(*refs, **options), out_type=out_type, grid=(1,))


def types(k=128, rows=64, n=64, dtype=BF16):
    return [jax.ShapeDtypeStruct(*t) for t in (((rows, k // 2), dtype), ((rows, k // 8), jnp.uint8), ((n, k), dtype))]


def operands(k=128, n=64):
    draw = np.random.default_rng(0)
    a, b = (draw.integers(-4, 5, shape).astype(BF16) for shape in ((64, k // 2), (n, k)))
    pairs = np.asarray([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.uint8)
    places = pairs[draw.integers(0, 6, (64, k // 4))]
    dense = np.zeros((64, k // 4, 4), np.float32)
    np.put_along_axis(dense, places.astype(int), a.reshape(places.shape).astype(np.float32), 2)
    codes = (places.reshape(64, k // 8, 4) << np.arange(0, 8, 2, dtype=np.uint8)).sum(2, dtype=np.uint8)
    return a, codes, b, dense.reshape(64, k) @ b.astype(np.float32).T


def test_meaning():
    *given, wanted = operands()
    np.testing.assert_array_equal(kernel().interpret(*given), wanted)
    with pytest.raises(jt.errors.ProtocolError, match="do not ascend"):
        kernel().interpret(given[0], np.zeros_like(given[1]), given[2])


@pytest.mark.gpu
def test_on_the_device():
    *given, wanted = operands(256, 128)
    np.testing.assert_array_equal(kernel()(*given), wanted)


def test_instructions():
    """Of each 64 terms two threads of four have the places for the first 32, two those for the others."""
    texts = kernel().lower(*types(), target="cuda:sm_90").texts
    found = re.findall(
        r"wgmma\.mma_async\.sp\.sync\.aligned\.m64n64k32\.f32\.bf16\.bf16 .*, (%r\d+), ([01]), ", texts["ptx"]
    )
    assert [selector for _, selector in found] == ["0", "1", "0", "1"]
    assert len({register for register, _ in found}) == texts["ptx"].count("nanosleep") == 2
    assert texts["ptx"].count("wgmma.mma_async") == 4
    assert texts["ptx"].count("wgmma.commit_group") == texts["ptx"].count("wgmma.fence.sync") == 1
    assert len(re.findall(r"HGMMA\.SP\.64x64x32\.F32\.BF16", texts["sass"])) == 4


def test_a_wait_within_a_branch_holds_nothing():
    """The places stay in their registers until the wait behind the branch, which is there in any case."""

    @jt.kernel(out_type=lambda a, places, b: jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=2)
    def branches(a, places, b, o):
        A, P, B = (jt.alloc(x.shape, x.dtype) for x in (a, places, b))
        come = jt.barrier()
        with jt.role("all", warps=4):
            come[0].expect(A.nbytes + P.nbytes + B.nbytes)
            for x, buffer in ((a, A), (places, P), (b, B)):
                jt.async_copy(x.at[:, :], buffer, come[0])
            come[0].wait(0)
            flying = jt.dot_async(A, B.T, places=P.load())
            if jt.program_id(0) == 1:
                o[:, :] = jt.dot_wait(flying)
            o[:, :] = jt.dot_wait(flying)

    text = branches.lower(*types(), target="cuda:sm_90").texts["ptx"]
    assert text.count("nanosleep") == 2 and text.index("nanosleep") > text.rindex("wgmma.wait_group.sync.aligned 0;")


@pytest.mark.parametrize(
    ("options", "sizes", "match"),
    [
        ({}, {"dtype": jnp.float8_e4m3fn}, "16-bit floats"),
        ({"in_registers": True}, {}, "a buffer, got a tile"),
        ({}, {"rows": 128}, "64 rows"),
        ({"warps": 8}, {"rows": 128}, "4 warps"),
        ({}, {"n": 512}, "of one instruction"),
        ({"rounds": 3}, {}, "waited for, all of them"),
    ],
)
def test_refusals(options, sizes, match):
    with pytest.raises(UnsupportedError, match=match):
        _ = kernel(**options).lower(*types(**sizes), target="cuda:sm_90").image


def test_types():
    a, _, b = types()
    wrong = jax.ShapeDtypeStruct((64, 32), jnp.uint8)
    with pytest.raises(KernelTypeError, match="the places of"):
        kernel().lower(a, wrong, b)


def _text(*between: str) -> str:
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %p1, 1, 1, 0, 0;"
    commit, fence = "wgmma.commit_group.sync.aligned;", "wgmma.fence.sync.aligned;"
    first, second = sparse.mark("%r7", 0, 0, 2), sparse.mark("%r7", 1, 1, 2)
    end = [commit, "wgmma.wait_group.sync.aligned 0;", sparse.held("%r7"), "ret;"]
    return "\n".join([first, *between, product, commit, second, fence, product, *end])


def test_texts():
    made = sparse.products(_text("add.s32 %r70, %r7, 1;")).split("\n")
    assert (
        "mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %r7, 0, %p1, 1, 1, 0, 0;"
        in made[2]
    )
    assert [line for line in made if "commit" in line or "fence" in line] == ["wgmma.commit_group.sync.aligned;"]
    for between, match in [
        ("add.s32 %r7, %r7, 1;", "overwritten"),
        ("mov.b32 {%r6, %r7}, %rd9;", "overwritten"),
        ("$L__BB0_1:", "not in one piece"),
        ("@%p3 bra $L__BB0_1;", "not in one piece"),
        (sparse.mark("%r8", 0, 0, 2), "not in order"),
        ("// jtile.sparse r8", "without its register"),
    ]:
        with pytest.raises(ValueError, match=match):
            sparse.products(_text(between))
    whole = _text()
    for old, new, match in [
        ("k16", "k8", "can be a sparse one"),
        ("1, 1, 0, 0", "1, 1, 0, 1", "can be a sparse one"),
        (sparse.mark("%r7", 1, 1, 2), sparse.mark("%r7", 1, 0, 2), "not in order"),
        (sparse.mark("%r7", 1, 1, 2) + "\n", "", "not in one piece|can be a sparse one"),
    ]:
        with pytest.raises(ValueError, match=match):
            sparse.products(whole.replace(old, new))
    with pytest.raises(ValueError, match="last one of the text"):
        sparse.products(whole[: whole.index("wgmma.wait_group")].rsplit("\n", 2)[0])
    for old, new in ((sparse.held("%r7"), sparse.held("%r8")), ("aligned 0;", "aligned 1;")):
        with pytest.raises(ValueError, match="nothing holds the places"):
            sparse.products(whole.replace(old, new))
