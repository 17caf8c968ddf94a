"""Random kernels as TTIR, evaluated and on a GPU: the values, and which elements are read and written."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import device
import pytest
from access_checks import check_outputs, spoiled_inputs
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from machines import card
from random_kernels import Case, kernel, kernels
from ttir import run_ttir

from jtile.lowering.triton.compile import compile_kernel
from jtile.passes import TILE, run_pipeline

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100")  # where emission takes other ways
CHUNKS, CHUNK = 50, 10  # of kernels for a GPU: a chunk compiles in threads, chunks spread over pytest's workers


@draws(150, quick=36)
@given(kernels(), st.sampled_from(ARCHS), st.integers(0, 9))
def test_evaluated(case: Case, arch: str, seed: int):
    inputs, accesses, want = spoiled_inputs(case)
    got = run_ttir(run_pipeline(case.kernel, TILE), inputs, arch, seed)
    check_outputs(case, inputs, accesses, got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_on_the_device(chunk: int):
    """500 kernels; more are drawn with `--explore`, in the test above."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    cases = [kernel(random.Random(seed).randbytes(300)) for seed in seeds]
    lowered = [run_pipeline(case.kernel, TILE) for case in cases]
    arch = device.driver().arch
    with ThreadPoolExecutor() as pool:
        artifacts = list(pool.map(lambda k: compile_kernel(k, card(arch)), lowered))
    failures = []
    for seed, case, k, artifact in zip(seeds, cases, lowered, artifacts, strict=True):
        inputs, accesses, want = spoiled_inputs(case)
        try:
            check_outputs(case, inputs, accesses, device.run_artifact(artifact, k, inputs).outputs(), want)
        except (AssertionError, device.DriverError) as e:
            failures.append(f"seed {seed}: {e}")
    assert not failures, "\n".join(failures)
