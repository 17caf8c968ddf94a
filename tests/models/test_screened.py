"""Greedy tokens by a head in 8 bits: those of the head as it is stored."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ops
from jtile.models import LanguageModel, head_rows, next_tokens, screened
from jtile.ops import QuantizedTensor, gpu_tiles, hopper_gemv
from jtile.ops.operands import Norm, Weight

HIDDEN, VOCAB, EPS = 128, 700, 1e-5


def _head(rng, kind: str, hidden: int = HIDDEN, vocab: int = VOCAB) -> np.ndarray:
    head = rng.normal(size=(vocab, hidden))
    if kind == "of several sizes":
        head *= np.exp(2 * rng.normal(size=(vocab, 1)))
    if kind == "with large columns":
        head[:, :3] *= 30
    if kind == "alike":  # whose largest logits are within the bound of each other
        head = head[:1] + 1e-3 * head
    if kind == "twice":
        head[vocab // 2 :] = head[: vocab // 2]
    if kind == "half of zeros":
        head[::2] = 0
    if kind == "small":  # whole numbers, whose sums are exact in any order
        head = np.round(head)
    return head.astype(jnp.bfloat16)


@contextlib.contextmanager
def _hopper(monkeypatch):
    """The kernels of an H200, in the interpreter."""
    with jt.config(arch="sm_90", interpret=True), monkeypatch.context() as now:
        now.setattr(gpu_tiles, "processors", lambda: 2)
        yield


def _rows(rng, kind: str, rows: int, hidden: int = HIDDEN) -> tuple[np.ndarray, np.ndarray]:
    """x and what is added to it, bfloat16 [rows, hidden]; in the rounded sum little of the latter would be left."""
    x, delta = rng.normal(size=(2, rows, hidden)) * np.exp(rng.normal(size=(rows, 1)))
    if kind == "small":
        return np.round(4 * x).astype(jnp.bfloat16), np.round(delta).astype(jnp.bfloat16)
    return x.astype(jnp.bfloat16), (0.01 * delta).astype(jnp.bfloat16)


def _logits(x, delta, norm, weight):
    """What Hopper's kernel for a row gives for each row; without delta of x alone."""
    stored = Weight(weight.codes, weight.scale) if isinstance(weight, QuantizedTensor) else Weight(weight)
    kind = weight.kind if isinstance(weight, QuantizedTensor) else weight.dtype.name
    one = lambda of, residual: hopper_gemv.normed_product(of, (stored,), Norm(norm, residual), kind=kind, eps=EPS)[0]
    pairs = [(row[None], None) for row in x] if delta is None else [(d[None], row[None]) for row, d in zip(x, delta)]
    return np.concatenate([np.asarray(one(*pair)) for pair in pairs])


def _screen(head):
    with jt.config(arch="sm_90"):
        return screened.screen_of(head)


def _tokens(head, screen, x, delta, norm, monkeypatch):
    """(tokens [rows], those of the head itself, what the last of the kernels gave, by row) of rows x + delta."""
    zero, made = jnp.zeros((1,), jnp.int32), []
    entering = jnp.pad(head, ((0, 1), (0, 0)))  # the token VOCAB says that a logit is no number
    with _hopper(monkeypatch):
        own = _logits(x, delta, norm, head)
        logits = _logits(x, delta, norm, screen.codes)
        for i in range(len(x)):
            found = screened.largest_in_parts(logits[i : i + 1], parts=4, bn=64)
            same = zero, zero > 0, jnp.zeros((1, 9), jnp.int32), zero, zero - 1, jnp.int32(0), Weight(entering)
            made.append(
                screened.next_screened(
                    logits[i : i + 1],
                    *found,
                    x[i : i + 1],
                    Norm(norm, delta[i : i + 1]),
                    head,
                    screen.lost,
                    *same,
                    (jnp.ones((8,)),),
                    hidden=head.shape[1],
                    dtype="bfloat16",
                    parts=4,
                    bn=64,
                    lanes=2,
                    eps=EPS,
                    scale=1.0,
                    factors=(1.0,),
                )
            )
    return np.array([int(one[0][0]) for one in made]), own, made


@pytest.mark.parametrize(
    "kind", ["plain", "of several sizes", "with large columns", "alike", "twice", "half of zeros", "small"]
)
def test_the_tokens_are_those_of_the_head(kind, monkeypatch):
    """Of the kernel that Hopper has for the head: the first of the largest of its logits."""
    rng = np.random.default_rng(3)
    head, norm = jnp.asarray(_head(rng, kind)), jnp.asarray(rng.uniform(0.5, 2, HIDDEN), jnp.float32)
    if kind == "small":
        norm = jnp.ones((HIDDEN,), jnp.float32)
    x, delta = _rows(rng, kind, 3)
    found, own, made = _tokens(head, _screen(head), x, delta, norm, monkeypatch)
    assert np.array_equal(found, own.argmax(1))
    assert (np.sort(own, 1)[:, -1] == np.sort(own, 1)[:, -2]).all() == (kind == "twice")
    for one, token in zip(made, found, strict=True):
        assert int(one[3][0]) == 1 and np.array_equal(one[4][0], np.asarray(head)[token])


def test_the_sum_in_front_of_the_norm_is_not_rounded(monkeypatch):
    """Two rows of the head that differ by what rounding to 16 bits would take, in either order."""
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    head[:, 0] = 1.0
    head[[40, 90], 0], head[40, 2], head[90, 3] = 4.0, 1.0, 1.0
    x, delta = np.ones((2, HIDDEN), jnp.bfloat16), np.zeros((2, HIDDEN), jnp.bfloat16)
    delta[0, 3] = delta[1, 2] = 2.0**-10
    assert np.array_equal(x + delta, x)
    head, norm = jnp.asarray(head, jnp.bfloat16), jnp.ones((HIDDEN,), jnp.float32)
    found, own, _ = _tokens(head, _screen(head), x, delta, norm, monkeypatch)
    assert list(found) == list(own.argmax(1)) == [90, 40]


def _read(rows, x, norm: Norm, table, lanes: int):
    """Rows int32 [n, `AT_ONCE`] of a table, times the row x."""
    out = lambda rows, *_: jax.ShapeDtypeStruct(rows.shape, jnp.float32)

    @jt.kernel(out_type=out, grid=lambda rows, *_: rows.shape[0])
    def read(rows, x, norm, table, y):
        i = jt.program_id(0)
        y[i, :] = head_rows.products(table, rows[i, :], head_rows.row_of(x, norm, 0, EPS), lanes)

    return read.with_options(num_warps=head_rows.WARPS)(rows, x, norm, table)


@pytest.mark.parametrize("hidden", [128, 1152, 4096, 5120])
@pytest.mark.parametrize("kind", ["small", "plain"])
def test_products_of_single_rows(kind, hidden, monkeypatch):
    """They are those of the head's kernel, of which the interpreter adds up lanes in another order than GPUs do."""
    rng, vocab = np.random.default_rng(hidden), 24
    head, norm = jnp.asarray(_head(rng, kind, hidden, vocab)), jnp.ones((hidden,), jnp.float32)
    x, delta = _rows(rng, kind, 1, hidden)
    with _hopper(monkeypatch):
        want = _logits(x, delta, norm, head)[0]
        found = _read(jnp.arange(vocab, dtype=jnp.int32).reshape(-1, 4), x, Norm(norm, delta), head, lanes=2)
        alone = _read(jnp.full((1, 4), 3, jnp.int32), x, Norm(norm, None), head, lanes=4)
        own = _logits(x, None, norm, head)
    found = np.asarray(found).reshape(-1)
    if kind == "small":
        assert np.array_equal(found, want) and np.array_equal(alone[0], np.repeat(own[0, 3], 4))
    size = np.linalg.norm(np.asarray(head, np.float64), axis=1) * np.sqrt(hidden)
    assert np.abs(found - want).max() < 3e-7 * size.max() and np.abs(want).max() > 0.01 * size.max()


def test_all_rows_are_read_where_no_bound_is_known(monkeypatch):
    """As many as there are: the first of the largest is found all the same."""
    rng = np.random.default_rng(8)
    head, norm = jnp.asarray(_head(rng, "small")), jnp.ones((HIDDEN,), jnp.float32)
    screen = _screen(head)
    unknown = dataclasses.replace(screen, lost=screen.lost.at[:].set(jnp.inf))
    x, delta = _rows(rng, "small", 2)
    found, own, _ = _tokens(head, unknown, x, delta, norm, monkeypatch)
    assert np.array_equal(found, own.argmax(1))


def _unit(h, norm):
    wide = np.asarray(h, np.float64)
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * np.asarray(norm, np.float64)


@pytest.mark.parametrize("kind", ["plain", "of several sizes", "with large columns", "alike", "half of zeros"])
def test_no_logit_is_off_by_more_than_its_bound(kind, monkeypatch):
    """From what the head's kernel gives."""
    rng = np.random.default_rng(4)
    head = jnp.asarray(_head(rng, kind))
    screen, norm = _screen(head), jnp.ones((HIDDEN,), jnp.float32)
    assert screen.codes.shape == head.shape and screen.codes.codes.nbytes == head.size
    x, delta = _rows(rng, kind, 8)
    x[:4] = (np.asarray(x[:4], np.float32) * np.where(np.arange(HIDDEN) % 32 == 0, 100.0, 0.01)).astype(x.dtype)
    with _hopper(monkeypatch):
        own, logits = (_logits(x, delta, norm, weight) for weight in (head, screen.codes))
    total = np.asarray(x, np.float32) + np.asarray(delta, np.float32)
    reach = np.linalg.norm(_unit(total, norm), axis=1, keepdims=True)
    share = np.abs(logits - own) / (reach * np.asarray(screen.lost))
    assert 0.01 < share.max() < 1
    norms = np.linalg.norm(np.asarray(head, np.float64), axis=1)
    back = np.linalg.norm(
        np.asarray(screened.screen_of(head).codes.dequantize(), np.float64) - np.asarray(head, np.float64), axis=1
    )
    assert back == pytest.approx(np.asarray(screen.lost) - 2e-4 * norms, rel=0.05, abs=1e-20)


def test_rows_that_are_no_numbers_say_so(monkeypatch):
    rng = np.random.default_rng(5)
    head, norm = jnp.asarray(_head(rng, "plain")), jnp.ones((HIDDEN,), jnp.float32)
    x, delta = _rows(rng, "plain", 2)
    x[1, 5] = np.nan
    found, _, _ = _tokens(head, _screen(head), x, delta, norm, monkeypatch)
    assert found[0] < VOCAB == found[1]
    wrong = head.at[17, 3].set(jnp.nan)
    found, _, _ = _tokens(wrong, _screen(wrong), x, delta, norm, monkeypatch)
    assert (found == VOCAB).all()


def test_a_stream_by_a_screen(short, outputs, monkeypatch):
    """Its tokens are those without one; one screen is made of a head, and another one of other weights."""
    lm, ids = short("llama", 2, noise=0.2), outputs("llama")["input_ids"].astype(np.int32)[:1]
    tokens = lambda of, **options: list(np.concatenate(list(of.stream(ids, 12, eos=None, **options))))
    want, made = tokens(lm), []
    monkeypatch.setattr(screened, "fits", lambda model: True)
    of = screened.screen_of
    monkeypatch.setattr(screened, "screen_of", lambda table: made.append(table) or of(table))
    other = LanguageModel(lm.model)
    assert tokens(other) == want and len(made) == 1
    assert tokens(other) == want and len(made) == 1
    names = [key[0] for key in other._executables]
    assert names.count("decode") == 1
    tokens(other, temperature=1.0), tokens(other, repetition_penalty=1.5), list(other.stream(np.tile(ids, (2, 1)), 2))
    assert len(made) == 1 and other._screens(2, None) == ()
    other._weights = [x * 1.5 if x is made[0] else x for x in other._weights]
    assert tokens(other) == want and len(made) == 2
    monkeypatch.setattr(screened, "has_room", lambda table: False)
    other._weights = [x * 2 if x is made[1] else x for x in other._weights]
    assert tokens(other) == want and len(made) == 2


def test_which_models_have_a_screen(short, monkeypatch):
    lm = short("llama", 1)
    model = lm.model
    table = lambda dtype: lambda: jnp.zeros((VOCAB, HIDDEN), dtype)
    monkeypatch.setattr(screened, "LARGE", 2 * VOCAB * HIDDEN)
    monkeypatch.setattr(model, "dtype", "bfloat16")
    monkeypatch.setattr(model, "head_table", table(jnp.bfloat16))
    assert screened.fits(model) == (jax.default_backend() == "gpu")
    with jt.config(arch="sm_80"):
        assert not screened.fits(model)
    with jt.config(arch="sm_90"):
        assert screened.fits(model)
        capped, large = dataclasses.replace(model.config, softcap=9.0), 2 * VOCAB * HIDDEN + 1
        for of, name, value in [
            (screened, "TAKEN", False), (screened, "LARGE", large), (model, "dtype", "float32"),
            (model, "head_table", table(jnp.float32)), (model, "config", capped),
        ]:  # fmt: skip
            with monkeypatch.context() as now:
                now.setattr(of, name, value)
                assert not screened.fits(model)
    assert next_tokens.fits(model, 1, next_tokens.Steps(), False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_the_gpu(dtype):
    """A head as large as published ones: logits that are read again have the bits of the head's kernel, its logits are
    within the bound of the screen's, and so the tokens are the same."""
    vocab, hidden = 32000, 2048
    head = 0.02 * jax.random.normal(jax.random.key(0), (vocab, hidden), dtype)
    screen, norm = screened.screen_of(head), jax.random.uniform(jax.random.key(1), (hidden,), minval=0.5, maxval=2.0)
    options = {"hidden": hidden, "dtype": dtype, "scale": 1.0, "factors": (1.0,), "eps": EPS}

    @jax.jit
    def found(x, delta):
        with jt.config(overlap=True):
            own, logits = (
                ops.rms_norm_matmul(delta, norm, of, residual=x, eps=EPS, out_dtype=jnp.float32)[0]
                for of in (head, screen.codes)
            )
            lanes = hopper_gemv.lanes_of_sum(x, Weight(head), dtype)
            zero = jnp.zeros((1,), jnp.int32)
            same = zero, zero > 0, jnp.zeros((1, 9), jnp.int32), zero, zero - 1, jnp.int32(0), Weight(head)
            tops = screened.largest_in_parts(logits, parts=32, bn=1024)
            given = logits, *tops, x, Norm(norm, delta), head, screen.lost, *same, (jnp.ones((64,)),)
            token = screened.next_screened.with_options(num_warps=4)(*given, parts=64, bn=512, lanes=lanes, **options)[
                0
            ]
            again = _read(jnp.arange(vocab, dtype=jnp.int32).reshape(-1, 4), x, Norm(norm, delta), head, lanes)
            return own[0], logits[0], again.reshape(-1), token[0]

    for i in range(20):
        x, delta = jax.random.normal(jax.random.key(i), (2, 1, hidden), dtype)
        own, logits, again, token = (np.asarray(one) for one in found(x, delta))
        assert np.array_equal(own, again) and token == own.argmax()
        reach = np.linalg.norm(_unit(np.asarray(x, np.float32) + np.asarray(delta, np.float32), norm))
        assert (np.abs(own - logits) < reach * np.asarray(screen.lost)).all()
