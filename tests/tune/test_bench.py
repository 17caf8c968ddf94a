"""`jt.bench`: times of a function and its peers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tunable as kernels

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError

double, X = kernels.double_kernel(), jnp.ones(2048)


def test_a_function_beside_its_peers():
    found = jt.bench(double, X, peers={"jnp": lambda x: 2 * x, "off": lambda x: 2.5 * x}, rounds=4)
    ours, same, off = found.timings
    assert [t.name for t in found.timings] == ["double", "jnp", "off"]
    assert (ours.error, same.error, off.error) == (None, 0, pytest.approx(0.25))
    assert all(len(t.samples_us) == 4 and 0 < t.min_us <= t.median_us and t.spread >= 0 for t in found.timings)
    assert found.work.bytes == 2 * 4 * X.size
    assert found.ratio == min(same.median_us, off.median_us) / ours.median_us
    assert found.bytes_per_second == pytest.approx(found.work.bytes / ours.median_us * 1e6)
    assert found.flops_per_second == pytest.approx(2 * X.size / ours.median_us * 1e6)
    lines = str(found).splitlines()
    assert len(lines) == 5 and lines[1].split() == [
        "function", "median", "min", "spread", "GB/s", "GFLOP/s", "speed", "error"
    ]  # fmt: skip
    assert lines[-1].startswith("off") and lines[-1].endswith("2.5e-01")


def test_trees_numbers_and_types_are_arguments():
    """And results may be trees, with random keys in them."""

    def split(tree, n):
        return {"keys": jax.random.split(tree["key"], 2), "sum": tree["x"].sum() + n}

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    (ours, again) = jt.bench(split, {"key": jax.random.key(0), "x": x}, 3, peers={"split": split}, rounds=1).timings
    assert (ours.name, again.name, again.error) == ("split (given)", "split", 0)
    assert ours.spread == 0
    assert jt.bench(lambda x: x + 1, np.float32(3), rounds=1).ratio is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jt.bench(3, X), KernelTypeError, "int is 3; expected a function"),
        (lambda: jt.bench(double, X, peers={"no": None}), KernelTypeError, "no is None; expected a function"),
        (lambda: jt.bench(double, X, peers=[jnp.sum]), KernelTypeError, "expected a mapping from names to functions"),
        (lambda: jt.bench(double, X, peers={3: jnp.sum}), KernelTypeError, "expected a mapping from names"),
        (
            lambda: jt.bench(double, {"a": ["no"]}),
            KernelTypeError,
            r"argument 0\['a'\]\[0\] is 'no'; expected an array",
        ),
        (lambda: jt.bench(double, X, peers={"sum": jnp.sum}), KernelValueError, r"sum gives results of shapes \(\)"),
        (lambda: jt.bench(double, X, rounds=0), KernelValueError, "rounds is 0"),
        (lambda: jax.jit(lambda x: jt.bench(double, x))(X), KernelTypeError, "from outside"),
    ],
)
def test_bad_arguments_are_typed_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
