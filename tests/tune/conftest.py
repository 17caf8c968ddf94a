"""A cache folder for every test of tuning: entries of one would be choices of another."""

import pytest

import jtile as jt
from jtile.tune.store import store


@pytest.fixture(autouse=True)
def folder(tmp_path):
    with jt.config(cache_dir=str(tmp_path)):
        store.forget()
        yield tmp_path / "tune"
    store.forget()
