"""What the probes cost is counted exactly, and timed one step beside the other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from experiments import determinism_overhead
from experiments.lab.networks import NETWORKS, normalised


class Tiny(eqx.Module):
    """Compiles quickly."""

    linear1: eqx.nn.Linear
    norm: eqx.Module
    linear2: eqx.nn.Linear

    def __init__(self, make_norm, key):
        self.linear1 = eqx.nn.Linear(784, 16, key=key)
        self.norm = make_norm(16)
        self.linear2 = eqx.nn.Linear(16, 10, key=key)

    def __call__(self, x, state):
        normed, state = normalised(self.norm, self.linear1(jnp.ravel(x)), state)
        return jax.nn.log_softmax(self.linear2(jax.nn.relu(normed))), normed, state


@pytest.fixture(scope="module")
def measured():
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "tiny", Tiny)
        found = determinism_overhead.measure(3, "tiny", after=lambda: calls.append(1))
    assert len(calls) == determinism_overhead.timings(3)
    return {overhead.transport: overhead for overhead in found}


def test_a_step_of_six_probes_is_48_bytes_and_one_callback_at_most(measured):
    assert len(measured) == 5
    for transport, overhead in measured.items():
        # Three layers, forward and backward.
        assert overhead.probes == 6
        assert overhead.bytes == 8 * 6
        assert overhead.callbacks == transport.startswith("callbacks")


def test_the_step_gives_the_same_bits(measured):
    assert all(overhead.unchanged for overhead in measured.values())


def test_ratios_are_of_one_round(measured):
    for overhead in measured.values():
        assert 0 < overhead.low <= overhead.median <= overhead.high
        assert overhead.step > 0
