"""Random programs that talk to other devices: the interpreter gives what they come to, and finds planted faults."""

import numpy as np
import pytest
from device_programs import FAULTS, expected, follow, inputs, script, with_fault


def check(seed: int) -> None:
    steps, (devices, programs) = script(seed), ((2, 1), (3, 2), (4, 1))[seed % 3]
    x = inputs(devices, programs, seed)
    got = follow.interpret(x, axis="x", steps=steps, mesh={"x": devices}, seed=seed)
    np.testing.assert_array_equal(got, expected(x, steps), err_msg=str(steps))


def find(fault: str, seed: int) -> None:
    steps = with_fault(seed, fault)
    with pytest.raises(FAULTS[fault][1]):
        follow.interpret(inputs(3, 1, seed), axis="x", steps=steps, mesh={"x": 3}, seed=seed)
        pytest.fail(f"{fault} is not found in {steps}")


@pytest.mark.parametrize("seed", range(6))
def test_results(seed):
    check(seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault):
    find(fault, 1)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 1000, 50))
def test_a_thousand(start):
    for seed in range(start, start + 50):
        check(seed)
    for fault in FAULTS:
        for seed in range(start, start + 6):
            find(fault, seed)
