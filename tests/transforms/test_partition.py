"""Automatic partitioning on eight forced host devices: the checks of partition_checks.py, in one child process; and
the errors of sharding rules given by hand."""

from pathlib import Path

import devices
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError

CHECKS = Path(__file__).with_name("partition_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_partition(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed


def add(rule):
    @jt.kernel(out_type=lambda x, w: jt.like(x), sharding=rule)
    def add_row(x, w, o):
        o[...] = x[...] + w[...][None, :]

    return add_row


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("r n, n", "needs one '->'"),
        ("r n -> n -> r", "needs one '->'"),
        ("r n, n -> r q", "axis 'q' of an output is an axis of no input"),
        ("r r, n -> r n", "an array has one axis twice in 'r r'"),
        ("r 2n, n -> r n", "'2n' is no name of an axis"),
        ("r n, ... -> r n", "'...' is no name of an axis"),
    ],
)
def test_text_that_is_no_rule(rule, message):
    with pytest.raises(KernelValueError) as e:
        add(rule)
    assert message in str(e.value) and "kernel add_row" in str(e.value) and "test_partition.py:" in str(e.value)


def test_a_rule_is_text():
    with pytest.raises(KernelTypeError, match="give text"):
        add(("r n", "n"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("r n, n -> r", "it gives o the axes 'r', but o has 2: shape (4, 3)"),
        ("r n, r n -> r n", "it gives w the axes 'r n', but w has 1: shape (3,)"),
        ("r n -> r n", "it names 1 inputs, this call has 2"),
        ("r n, n -> r n, r n", "it names 2 outputs, this call has 1"),
    ],
)
def test_rules_are_checked_against_the_arrays(rule, message):
    with pytest.raises(KernelValueError) as e:
        add(rule)(jnp.ones((4, 3)), jnp.ones(3))
    assert message in str(e.value) and "test_partition.py:" in str(e.value)


def test_a_rule_changes_no_result():
    x, w = jnp.arange(12.0).reshape(4, 3), jnp.arange(3.0)
    for rule in (None, "r n, n -> r n", "r _, _ -> r _", "_ _, _ -> _ _"):
        np.testing.assert_array_equal(add(rule)(x, w), x + w[None])
        np.testing.assert_array_equal(add(rule).with_options(interpret=True)(x, w), x + w[None])
    scalar = jt.call(lambda s, o: o.__setitem__((), s[()] * 2), out_type=lambda s: jt.like(s), sharding="-> ()")
    with pytest.raises(KernelValueError, match="it names 0 inputs, this call has 1"):
        scalar(jnp.float32(1))


def test_rules_follow_pytrees():
    @jt.kernel(out_type=lambda p, **_: (jt.like(p["a"]), jt.like(p["b"])), sharding="n, m -> n, m")
    def copies(p, x, y):
        x[...], y[...] = p["a"][...], p["b"][...]

    a, b = copies({"b": jnp.ones(2), "a": jnp.zeros(3)})
    assert a.shape == (3,) and b.shape == (2,)
    assert copies.lower({"b": jnp.ones(2), "a": jnp.zeros(3)}).texts["sharding"] == "n, m -> n, m; sum over m, n\n"


def identity(x):
    return x


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("r n", "needs one '->'"),
        ("r k -> r _", "axis 'k' is an axis of no output, and shards are not summed here; write _ for it"),
        ("r -> r", "it gives argument 0 the axes 'r', but argument 0 has 2: shape (4, 3)"),
        ("r _ -> r", "it gives result 0 the axes 'r', but result 0 has 2: shape (4, 3)"),
        ("r _, _ -> r _", "it names 2 inputs, this call has 1"),
    ],
)
def test_rules_of_functions_that_do_not_fit(rule, message):
    with pytest.raises(KernelValueError) as e:
        jt.partitioned(identity, rule)(jnp.ones((4, 3)))
    assert message in str(e.value) and "identity" in str(e.value) and "test_partition.py:" in str(e.value)


def test_the_rule_of_a_function_is_text():
    with pytest.raises(KernelTypeError, match="give text"):
        jt.partitioned(identity, ("r _",))
    with pytest.raises(KernelTypeError, match="takes a function and a rule, got 'r _ -> r _'"):
        jt.partitioned("r _ -> r _", identity)  # type: ignore[arg-type]


def test_functions_that_print():
    @jt.kernel(out_type=lambda x: jt.like(x))
    def talk(x, o):
        jt.print("{}", x[0, 0])
        o[...] = x[...]

    with pytest.raises(KernelValueError, match="talk prints, asserts or has other effects"):
        jt.partitioned(talk, "r _ -> r _")(jnp.ones((4, 3)))


def test_results_of_any_tree():
    """Also one that depends on the shapes, called in turns."""
    parts = jt.partitioned(lambda x: {str(k): x[k] for k in range(x.shape[0])}, "_ r -> r, r")
    pair = parts(jnp.ones((2, 4)))
    assert sorted(pair) == ["0", "1"] and pair["0"].shape == (4,)
    with pytest.raises(KernelValueError, match="it names 2 outputs, this call has 3"):
        parts(jnp.ones((3, 4)))
    assert sorted(parts(jnp.zeros((2, 4)))) == ["0", "1"]
