"""Compares layers with those of PyTorch and Flax, which `make test-peers` installs."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import jax
import numpy as np
import pytest

from experiments.common.exact import EPS
from tests.helpers import copy, load, make, quick_call, quick_call_and_grad, remembered
from tests.layers.accuracy import Case
from tests.layers.norms import with_parameters

pytestmark = pytest.mark.peers
same = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)

MOMENTUM = 0.9  # the weight of the past, which PyTorch counts as 0.1
SHAPE = (4, 3, 6, 5)  # of all arrays, also Flax's: channels are axis 1
# So small that weight and bias, which walk at random for 100 steps, stay of order 1.
LEARNING_RATE = 0.01

Arrays = dict[str, np.ndarray]
# Maps weight and bias by name, a batch, the cotangent of its output and an x for inference to
# what the layer returns for them, by name.
Step = Callable[[Arrays, np.ndarray, np.ndarray, np.ndarray], dict[str, Any]]


def trained(step: Step) -> list[Arrays]:
    """Returns the results of `step` in 100 steps of gradient descent.

    The batches differ in mean and scale. Not `step` but this function moves weight and bias, so
    that every layer is trained in the same way.
    """
    random, channels, results = np.random.RandomState(0), SHAPE[1], list[Arrays]()

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return random.uniform(low, high, shape).astype(np.float32)

    def batch() -> np.ndarray:
        mean, std = uniform(-2, 2, channels, 1, 1), uniform(0.5, 2, channels, 1, 1)
        return mean + std * random.standard_normal(SHAPE).astype(np.float32)

    affine = {"weight": uniform(0.5, 1.5, channels), "bias": uniform(-1, 1, channels)}
    for _ in range(100):
        x, dy, probe = batch(), random.standard_normal(SHAPE).astype(np.float32), batch()
        # Copies, because some of these may be views of what the next step overwrites.
        outputs = {name: np.array(v) for name, v in step(affine, x, dy, probe).items()}
        affine = {k: value - LEARNING_RATE * outputs[f"d{k}"] for k, value in affine.items()}
        results.append(outputs)
    return results


def ours(unbiased: bool) -> Step:
    """Returns a step of this package's layer, from a mean of 0 and a variance of 1."""
    options: dict[str, Any] = {"approach": "batch", "momentum": MOMENTUM, "unbiased": unbiased}
    layer, state = make(SHAPE[1], "batch", EPS, **options)
    state = load(layer, state, np.zeros(SHAPE[1]), np.ones(SHAPE[1]))

    def step(affine: Arrays, x: Any, dy: Any, probe: Any) -> dict[str, Any]:
        nonlocal state
        model = with_parameters(layer, **affine)
        y, state, (gradients, dx) = quick_call_and_grad(model, state, x, dy)
        inference, _ = quick_call(eqx.nn.inference_mode(model), copy(state), probe)
        mean, variance = remembered(layer, state)
        outputs = {"y": y, "inference": inference, "dx": dx}
        outputs |= {"dweight": gradients.weight, "dbias": gradients.bias}
        return {**outputs, "running_mean": mean, "running_var": variance}

    return step


def in_torch() -> Step:
    torch: Any = importlib.import_module("torch")
    layer = torch.nn.BatchNorm2d(SHAPE[1], eps=EPS, momentum=1 - MOMENTUM)

    def step(affine: Arrays, *arrays: Any) -> dict[str, Any]:
        x, dy, probe = map(torch.from_numpy, arrays)
        for name, value in affine.items():
            setattr(layer, name, torch.nn.Parameter(torch.from_numpy(value)))
        y = layer.train()(x.requires_grad_())
        y.backward(dy)
        outputs = {f"d{name}": getattr(layer, name).grad for name in affine}
        outputs |= {"y": y, "inference": layer.eval()(probe), "dx": x.grad}
        outputs |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
        return {name: tensor.numpy(force=True) for name, tensor in outputs.items()}

    return step


def in_flax() -> Step:
    linen: Any = importlib.import_module("flax.linen")
    names = {"weight": "scale", "bias": "bias"}
    layer = linen.BatchNorm(momentum=MOMENTUM, epsilon=EPS, use_fast_variance=False, axis=1)
    variables: Any = layer.init(jax.random.key(0), jax.numpy.zeros(SHAPE), True)

    @jax.jit
    def call(variables: Any, x: Any, dy: Any, probe: Any) -> Any:
        def train(params: Any, x: Any) -> Any:
            inputs = {**variables, "params": params}
            return layer.apply(inputs, x, False, mutable=["batch_stats"])

        y, pull_back, after = jax.vjp(train, variables["params"], x, has_aux=True)
        inference = layer.apply({**variables, **after}, probe, True)
        return after, {"y": y, "inference": inference}, pull_back(dy)

    def step(affine: Arrays, *arrays: Any) -> dict[str, Any]:
        variables["params"] = {names[name]: value for name, value in affine.items()}
        after, outputs, (gradients, dx) = call(variables, *arrays)
        variables.update(after)
        outputs |= {f"d{name}": gradients[names[name]] for name in affine}
        statistics = variables["batch_stats"]
        outputs |= {"running_mean": statistics["mean"], "running_var": statistics["var"]}
        return {**outputs, "dx": dx}

    return step


@pytest.mark.parametrize(("peer", "unbiased"), [(in_torch, True), (in_flax, False)])
def test_batch_norm_equals_that_of_a_peer_over_100_steps(peer: Any, unbiased: bool):
    same(trained(ours(unbiased)), trained(peer()))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_norms_of_one_example_equal_pytorch(name: str):
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
