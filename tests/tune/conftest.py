"""A cache folder for every test of tuning: entries of one would be choices of another."""

import contextlib

import jax
import pytest

import jtile as jt
from jtile.tune.store import store


@pytest.fixture(autouse=True)
def folder(tmp_path, request, by_numpy):
    """Where this test's entries are kept. It runs on the CPU, but for tests marked `gpu`; what it calls of `jnp` around
    its kernels, by NumPy."""
    on_gpu = request.node.get_closest_marker("gpu")
    where = contextlib.nullcontext() if on_gpu else jax.default_device(jax.devices("cpu")[0])
    with jt.config(cache_dir=str(tmp_path)), where:
        store.forget()
        yield tmp_path / "tune"
    store.forget()
