"""Tests that with approach="batch" BatchNorm equals PyTorch's and Flax's over 100 steps.

`make test` compares with the golden files in `tests/golden`; `make test-peers`, where torch
and flax are installed, those with the peers themselves, and the other norms with torch's.
"""

import importlib
from typing import Any

import equinox as eqx
import numpy as np
import pytest

from tests.exact import EPS
from tests.golden import cases
from tests.helpers import copy, load, make, quick_call, quick_call_and_grad, remembered
from tests.layers.accuracy import make_batch, train
from tests.layers.norms import each_example_norm, with_parameters

each_peer = pytest.mark.parametrize("peer", cases.SEEDS)


def run(peer: str) -> cases.Arrays:
    """Returns what this package's layer gives, from a mean of 0 and a variance of 1."""
    channels = cases.SHAPE[1]
    options: dict[str, Any] = {"eps": cases.EPS, "momentum": cases.MOMENTUM}
    options |= {"approach": "batch", "unbiased": peer == "torch"}
    layer, state = make(channels, "batch", **options)
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


def assert_same(actual: cases.Arrays, desired: cases.Arrays) -> None:
    assert actual.keys() == desired.keys()
    for name in actual:
        np.testing.assert_allclose(
            actual[name], desired[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


@each_peer
def test_golden(peer: str):
    assert_same(run(peer), cases.golden(peer))


@pytest.mark.peers
@each_peer
def test_golden_is_what_the_peer_gives(peer: str):
    # Imported here: without the peers this must fail, and only when it is asked for.
    peers = importlib.import_module("tests.golden.peers")
    assert_same(cases.golden(peer), peers.RUN[peer]())


@pytest.mark.peers
@each_example_norm
def test_norms_of_one_example_as_torch(name: str):
    functional = importlib.import_module("torch.nn.functional")
    random = np.random.default_rng(0)
    batch = make_batch(random, 3 + 2 * random.standard_normal((5, 6, 7), np.float32), norm=name)
    if name.startswith("RMSNorm"):  # PyTorch's has no bias
        batch = batch._replace(bias=np.zeros_like(batch.bias))
    from_numpy = importlib.import_module("torch").from_numpy
    x, dy, weight, bias = (from_numpy(values).requires_grad_() for values in batch)
    # PyTorch has these along the last axes only.
    kind, _, axis = name.partition(", ")
    given = x.transpose(1, 2) if axis else x
    shape = given.shape[-1:] if axis else x.shape[1:]
    expected = {
        "LayerNorm": lambda: functional.layer_norm(given, shape, weight, bias, EPS),
        "RMSNorm": lambda: functional.rms_norm(given, shape, weight, EPS),
        "GroupNorm": lambda: functional.group_norm(x, 3, weight, bias, EPS),
        "InstanceNorm": lambda: functional.instance_norm(x, None, None, weight, bias, eps=EPS),
    }[kind]()
    expected = expected.transpose(1, 2) if axis else expected
    expected.backward(dy)
    y, _, *gradients = train(batch, norm=name)[0]
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    for gradient, leaf in zip(gradients, (x, weight, bias), strict=True):
        if leaf.grad is not None:
            np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-4, atol=5e-5)
