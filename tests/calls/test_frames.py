"""Tracebacks of errors end at the user's frames."""

from __future__ import annotations

import traceback

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile._frames import shows_users_frames
from jtile.errors import CompileError, InterpreterError, KernelTypeError

x = jnp.ones((16, 8), jnp.float32)


def kernel_of(body):
    return jt.kernel(out_type=lambda x: jt.like(x), grid=2)(body)


def frames(call) -> list[str]:
    """The functions of the traceback of the error that a call raises, behind that of this one."""
    with pytest.raises(Exception) as caught:
        call()
    return [f.name for f in traceback.extract_tb(caught.value.__traceback__)][1:]


@kernel_of
def uses_a_ref(x, o):
    o[...] = 2 * x


@kernel_of
def divides(x, o):
    o[...] = x[...] * (1 // 0)


@kernel_of
def reads_beyond(x, o):
    i = jt.program_id(0)
    o[i, :] = x[i + 16, :]


CALLS = {
    "plain": lambda kernel: kernel(x),
    "jit": lambda kernel: jax.jit(kernel)(x),
    "lower": lambda kernel: kernel.lower(x),
    "interpret": lambda kernel: kernel.interpret(x),
    "grad": lambda kernel: jax.grad(lambda x: kernel(x).sum())(x),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("kernel", [uses_a_ref, divides])
def test_no_frame_of_jtile_or_jax_is_between_the_users(kernel, how):
    lambdas = 3 if how == "grad" else 2
    assert frames(lambda: CALLS[how](kernel)) == ["<lambda>"] * lambdas + [kernel.__name__]


def test_an_error_of_the_interpreter_ends_at_the_call():
    with pytest.raises(InterpreterError, match="reads_beyond"):
        reads_beyond.interpret(x)
    assert frames(lambda: reads_beyond.interpret(x)) == ["<lambda>"]


def test_an_argument_that_does_not_fit():
    assert frames(lambda: uses_a_ref(x, x)) == ["<lambda>"]


def test_all_frames_on_demand():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert len(frames(lambda: uses_a_ref(x))) > 8
    finally:
        jax.config.update("jax_traceback_filtering", before)


def inner(source: str):
    """A function of a module of jtile's."""
    scope = {"__name__": "jtile.invented", "KernelTypeError": KernelTypeError, "CompileError": CompileError}
    exec(source, scope)
    return scope["entry"]


def test_a_defect_keeps_the_frames_below_the_users_last_one():
    untyped = inner("def entry(f):\n    return f()\n")
    broken = inner("def below():\n    return {}['missing']\ndef entry():\n    return below()\n")
    assert frames(lambda: shows_users_frames(untyped)(lambda: broken())) == ["<lambda>", "<lambda>", "entry", "below"]
    typed = inner("def below():\n    raise CompileError('no code')\ndef entry():\n    return below()\n")
    assert frames(lambda: shows_users_frames(typed)()) == ["<lambda>", "entry", "entry", "below"]


def test_what_an_error_was_raised_from_is_shortened_too():
    entry = inner(
        "def entry(f):\n"
        "    try:\n"
        "        f()\n"
        "    except ZeroDivisionError as error:\n"
        "        raise KernelTypeError('no number') from error\n"
    )
    with pytest.raises(KernelTypeError) as caught:
        shows_users_frames(entry)(lambda: 1 // 0)
    assert [f.name for f in traceback.extract_tb(caught.value.__cause__.__traceback__)] == ["<lambda>"]
