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

each_case = pytest.mark.parametrize("case", cases.CASES, ids=str)


def run(case: cases.Case) -> cases.Arrays:
    """Returns what this package's layer gives, from a mean of 0 and a variance of 1."""
    is_torch = case.peer == "torch"
    layer, state = make(
        case.channels,
        "batch",
        momentum=1 - case.momentum if is_torch else case.momentum,
        eps=cases.EPS,
        channelwise_affine=case.affine,
        approach="batch",
        unbiased=is_torch,
    )
    state = load(layer, state, np.zeros(case.channels), np.ones(case.channels))

    def step(affine: cases.Arrays, x: Any, dy: Any, probe: Any) -> dict[str, Any]:
        nonlocal state
        model = with_parameters(layer, **affine) if affine else layer
        y, state, (gradients, dx) = quick_call_and_grad(model, state, x, dy)
        inference, _ = quick_call(eqx.nn.inference_mode(model), copy(state), probe)
        outputs = {f"d{name}": getattr(gradients, name) for name in affine}
        mean, variance = remembered(layer, state)
        outputs |= {"y": y, "inference": inference, "dx": dx}
        return {**outputs, "running_mean": mean, "running_var": variance}

    return cases.record(case, step)


def assert_same(actual: cases.Arrays, desired: cases.Arrays) -> None:
    assert actual.keys() == desired.keys()
    for name in actual:
        np.testing.assert_allclose(
            actual[name], desired[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


@each_case
def test_golden(case: cases.Case):
    assert_same(run(case), cases.golden(case))


@pytest.mark.peers
@each_case
def test_golden_is_what_the_peer_gives(case: cases.Case):
    # Imported here: without the peers this must fail, and only when it is asked for.
    peers = importlib.import_module("tests.golden.peers")
    assert_same(cases.golden(case), peers.run(case))


@pytest.mark.peers
@each_example_norm
def test_norms_of_one_example_as_torch(name: str):
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    random = np.random.default_rng(0)
    batch = make_batch(random, 3 + 2 * random.standard_normal((5, 6, 7), np.float32), norm=name)
    if name.startswith("RMSNorm"):  # PyTorch's has no bias
        batch = batch._replace(bias=np.zeros_like(batch.bias))
    x, dy, weight, bias = (torch.from_numpy(values).requires_grad_() for values in batch)
    shape, last = x.shape[1:], x.transpose(1, 2)
    channels = shape[:1]
    expected = {
        "LayerNorm": lambda: functional.layer_norm(x, shape, weight, bias, EPS),
        "RMSNorm": lambda: functional.rms_norm(x, shape, weight, EPS),
        "LayerNorm, axis=0": lambda: functional.layer_norm(
            last, channels, weight, bias, EPS
        ).transpose(1, 2),
        "RMSNorm, axis=0": lambda: functional.rms_norm(last, channels, weight, EPS).transpose(
            1, 2
        ),
        "GroupNorm": lambda: functional.group_norm(x, 3, weight, bias, EPS),
        "InstanceNorm": lambda: functional.instance_norm(x, None, None, weight, bias, eps=EPS),
    }[name]()
    expected.backward(dy)
    y, _, *gradients = train(batch, norm=name)[0]
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    for gradient, leaf in zip(gradients, (x, weight, bias), strict=True):
        if leaf.grad is not None:
            np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-4, atol=5e-5)
