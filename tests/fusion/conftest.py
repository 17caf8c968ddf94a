"""What most tests of fusion change about the costs of kernels: small arrays would be left to XLA."""

import jax
import pytest

from jtile.fusion import costs


@pytest.fixture
def any_size(monkeypatch):
    """Small arrays are worth kernels, too; and JAX as it comes, which promotes."""
    monkeypatch.setattr(costs, "LEAST", 0)
    monkeypatch.setattr(costs, "CHAINS_ON_GPUS", True)
    monkeypatch.setattr(costs, "LARGE_PRODUCTS_ON_GPUS", True)
    monkeypatch.setattr(costs, "SHORT", 0)
    monkeypatch.setattr(costs, "PRODUCTS_ANYWHERE", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def any_size_and_rows(any_size, monkeypatch):
    """`any_size`, and whole rows are picked in kernels on CPUs, too."""
    monkeypatch.setattr(costs, "ROWS_ON_CPUS", True)
