"""Tests that with approach="batch" BatchNorm equals PyTorch's and Flax's over 100 steps.

`make test` compares with the golden files in `tests/golden`; `make test-peers`, where torch
and flax are installed, those with the peers themselves, and the other norms with torch's.
"""

import functools
import importlib
from typing import Any

import chex
import equinox as eqx
import numpy as np
import pytest

from experiments.common.exact import EPS
from tests.golden import cases
from tests.helpers import copy, load, make, quick_call, quick_call_and_grad, remembered
from tests.layers.accuracy import Case
from tests.layers.norms import with_parameters

same = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)
each_peer = pytest.mark.parametrize("peer", cases.SEEDS)


def run(peer: str) -> cases.Arrays:
    """Returns what this package's layer gives, from a mean of 0 and a variance of 1."""
    channels = cases.SHAPE[1]
    options: dict[str, Any] = {"approach": "batch", "unbiased": peer == "torch"}
    layer, state = make(channels, "batch", cases.EPS, momentum=cases.MOMENTUM, **options)
    state = load(layer, state, np.zeros(channels), np.ones(channels))

    def step(affine: cases.Arrays, x: Any, dy: Any, probe: Any) -> dict[str, Any]:
        nonlocal state
        model = with_parameters(layer, **affine)
        y, state, (gradients, dx) = quick_call_and_grad(model, state, x, dy)
        inference, _ = quick_call(eqx.nn.inference_mode(model), copy(state), probe)
        outputs = {f"d{name}": getattr(gradients, name) for name in affine}
        mean, variance = remembered(layer, state)
        outputs |= {"y": y, "inference": inference, "dx": dx}
        return {**outputs, "running_mean": mean, "running_var": variance}

    return cases.record(peer, step)


@each_peer
def test_golden(peer: str):
    same(run(peer), cases.golden(peer))


@pytest.mark.peers
@each_peer
def test_golden_is_what_the_peer_gives(peer: str):
    # Imported here: without the peers this must fail, and only when it is asked for.
    peers = importlib.import_module("tests.golden.peers")
    same(cases.golden(peer), peers.RUN[peer]())


@pytest.mark.peers
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_norms_of_one_example_as_torch(name: str):
    functional = importlib.import_module("torch.nn.functional")
    random = np.random.default_rng(0)
    case = Case(name, (5, 6, 7))
    batch = case.batch(random, lambda random, shape: 3 + 2 * random.standard_normal(shape, "f"))
    if name == "RMSNorm":  # PyTorch's has no bias
        batch = batch._replace(bias=np.zeros_like(batch.bias))
    from_numpy = importlib.import_module("torch").from_numpy
    x, dy, weight, bias = (from_numpy(values).requires_grad_() for values in batch)
    expected = {
        "LayerNorm": lambda: functional.layer_norm(x, x.shape[1:], weight, bias, EPS),
        "RMSNorm": lambda: functional.rms_norm(x, x.shape[1:], weight, EPS),
        "GroupNorm": lambda: functional.group_norm(x, 3, weight, bias, EPS),
        "InstanceNorm": lambda: functional.instance_norm(x, None, None, weight, bias, eps=EPS),
    }[name]()
    expected.backward(dy)
    y, _, *gradients = case.train(batch)[0]
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    for gradient, leaf in zip(gradients, (x, weight, bias), strict=True):
        if leaf.grad is not None:
            np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-4, atol=5e-5)
