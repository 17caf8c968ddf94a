"""What the tests of the library call of `jnp` around its ops is run by NumPy."""

import pytest


@pytest.fixture(autouse=True)
def _eager_calls_by_numpy(by_numpy):
    """In all files of this folder: see `tests/support/eager_calls.py`."""
