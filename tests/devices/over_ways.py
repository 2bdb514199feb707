"""Tests a training step in each of the ways to take it over eight devices.

Run by test_devices.py, in a process with eight devices.
"""

import functools

import pytest

from .ways import CASES, DEVICES, WAYS, C, Way, error, forward, step_of, taken

QUANTITIES = ("y", "memory", "parameters", "dx")


@functools.cache
def on_one(case, implementation="auto"):
    way = Way(forward, step_of(forward), "batch")
    return taken(CASES[case], way, implementation=implementation)[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_that_of_one_device_and_sends_vectors_alone(case, way):
    # Whatever the case, forward sends moments: counted once with a mask, and once without.
    counts = case in ("ema, relu", "renorm, relu, mask")
    results, sent = taken(CASES[case], WAYS[way](), counts_forward=counts)
    for quantity, ours, right in zip(QUANTITIES, results, on_one(case), strict=True):
        assert error(ours, right) < 1e-5, quantity
    # Over a mesh, all moments at once, and one sum of gradients. Where XLA splits the program,
    # as many sums as Equinox's layer.
    partitioned = way in ("jit", "explicit axes", "filter_shard")
    expected = 3 if partitioned else 1
    if counts:
        assert len(sent["forward"]) == expected, sent
    assert len(sent["step"]) == expected + 1, sent
    most = C * (2 if partitioned else 4 * DEVICES)
    assert all(elements <= most + 1 for _, elements in sent["step"]), sent
