"""Tests `from_torch` and `to_torch` beside PyTorch itself, layer by layer, and on ResNet-18."""

import copy
import functools
import importlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.models import from_torch, to_torch
from eqx_norm.strategies import Average, Batch
from tests.compiling import filter_jit
from tests.helpers import over_batch
from tests.models.resnet import ResNet18

pytestmark = pytest.mark.peers

KEY = jax.random.key(0)
CONVOLUTIONS = {
    "plain": ({"kernel_size": 3}, {}),
    "strided": ({"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "groups": 2}, {}),
    "without bias": ({"kernel_size": 2, "padding": 1}, {"bias": False}),
}


@functools.cache
def torch() -> Any:
    # Imported here: without the peers this must fail, and only when it is asked for.
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # tests run side by side
    return torch


@functools.cache
def resnet18(classes: int) -> Any:
    """Returns torchvision's, with random weights and statistics.

    torchvision's operators are compiled for one build of PyTorch, and are not there beside
    another (CPU beside CUDA). Importing it describes two of them, which must have been declared
    by then; a ResNet calls neither.
    """
    declared = torch().library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch().ops.torchvision, operator):
            form = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            declared.define(operator + form)
    models = importlib.import_module("torchvision.models")
    torch().manual_seed(0)
    return randomised(models.resnet18(num_classes=classes)), declared


def randomised(module: Any) -> Any:
    """Returns the module with random statistics and affine weights in its norms."""
    for part in module.modules():
        if isinstance(part, torch().nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 2)
            part.num_batches_tracked.fill_(7)
        if hasattr(part, "weight") and part.weight is not None and part.weight.ndim == 1:
            torch().nn.init.uniform_(part.weight, 0.5, 1.5)
            if part.bias is not None:
                torch().nn.init.normal_(part.bias, 0, 0.1)
    return module


def numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def assert_back(model: Any, state: Any, module: Any, names: Any = None) -> None:
    """Checks that PyTorch takes what `to_torch` gives, and that it is what it had."""
    before = {name: numpy(a).copy() for name, a in module.state_dict().items()}
    given = {name: torch().from_numpy(a) for name, a in to_torch(model, state, names).items()}
    module.load_state_dict(given, strict=True)
    for name, array in module.state_dict().items():
        np.testing.assert_array_equal(numpy(array), before[name], err_msg=name)


@filter_jit
def forward(model: Any, state: eqx.nn.State, x: Any) -> Any:
    return over_batch(model)(x, state)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims, transposed, kind):
    settings, of_bias = CONVOLUTIONS[kind]
    if transposed and settings.get("stride", 1) > 1:
        settings = {**settings, "output_padding": 1}
    name = f"Conv{'Transpose' * transposed}{dims}d"
    module = getattr(torch().nn, name)(4, 6, **settings, **of_bias)
    layer = getattr(eqx.nn, name)(4, 6, **settings, use_bias=of_bias.get("bias", True), key=KEY)
    layer, _, _ = from_torch(layer, None, module.state_dict())
    x = random(4, *range(5, 5 + dims))
    right = numpy(module(torch().from_numpy(x)[None]))[0]
    np.testing.assert_allclose(layer(jnp.asarray(x)), right, rtol=1e-5, atol=1e-5)
    assert_back(layer, None, module)


LAYERS = {
    "linear": (lambda nn: nn.Linear(4, 3), lambda: eqx.nn.Linear(4, 3, key=KEY)),
    "layer norm": (lambda nn: nn.LayerNorm((4, 5)), lambda: LayerNorm((4, 5))),
    "group norm": (lambda nn: nn.GroupNorm(2, 4), lambda: eqx.nn.GroupNorm(2, 4)),
    "rms norm": (
        lambda nn: nn.RMSNorm((4,), eps=1e-5),
        lambda: eqx.nn.RMSNorm((4,), use_bias=False),
    ),
    "PReLU": (lambda nn: nn.PReLU(), lambda: eqx.nn.PReLU()),
    "PReLU per channel": (
        lambda nn: nn.PReLU(4),
        lambda: eqx.nn.PReLU(jnp.full((4, 1), 0.25)),
    ),
    "embedding": (lambda nn: nn.Embedding(6, 3), lambda: eqx.nn.Embedding(6, 3, key=KEY)),
}
SHAPES = {"linear": (4,), "rms norm": (4,), "PReLU": (7,)}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind):
    theirs, ours = LAYERS[kind]
    torch().manual_seed(0)
    module = theirs(torch().nn)
    for parameter in module.parameters():
        torch().nn.init.normal_(parameter)
    layer, _, _ = from_torch(ours(), None, module.state_dict())
    x = np.array(2) if kind == "embedding" else random(*SHAPES.get(kind, (4, 5)))
    right = numpy(module(torch().from_numpy(x)[None]))[0]
    np.testing.assert_allclose(layer(jnp.asarray(x)), right, rtol=1e-5, atol=1e-5)
    assert_back(layer, None, module)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_tensors_of_another_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        check_dtype(dtype)


def check_dtype(dtype: str) -> None:
    module = randomised(torch().nn.BatchNorm1d(3)).to(getattr(torch(), dtype))
    layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch", dtype=dtype)
    layer, state, _ = from_torch(layer, state, module.state_dict())
    assert layer.weight is not None
    assert layer.weight.dtype == jnp.zeros(0, dtype).dtype
    back = to_torch(layer, state)
    module.load_state_dict({name: torch().from_numpy(a) for name, a in back.items()})
    for name, array in module.state_dict().items():
        wide = array if dtype == "float64" else array.float()  # NumPy has no bfloat16
        np.testing.assert_array_equal(numpy(wide), back[name], err_msg=name)


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_batch_norm_trains_on(momentum):
    """The number of batches is where PyTorch's cumulative average goes on from."""
    module = torch().nn.BatchNorm2d(3, momentum=momentum)
    approach = Average() if momentum is None else Batch(1 - momentum)
    make = eqx.nn.make_with_state(BatchNorm)
    layer, state = make(3, "batch", unbiased=True, approach=approach)
    for k in range(12):
        if k in (0, 5):  # untrained, and then after 5 steps of PyTorch's
            layer, state, _ = from_torch(layer, state, module.state_dict())
        x = random(4, 3, 2, 2, seed=k) * 2 + 1
        module.train()(torch().from_numpy(x))
        _, state = forward(layer, state, jnp.asarray(x))
        ours, theirs = to_torch(layer, state), module.state_dict()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            np.testing.assert_allclose(
                ours[name], numpy(theirs[name]), rtol=1e-5, atol=1e-5, err_msg=f"{k}, {name}"
            )


# --- ResNet-18


@pytest.mark.parametrize("names", [None, {}], ids=["by order", "by name"])
def test_resnet18_inference(names):
    module = copy.deepcopy(resnet18(10)[0])
    model, state = eqx.nn.make_with_state(ResNet18)(10, KEY)
    model, state, report = from_torch(model, state, module.state_dict(), names)
    assert report.matched["layer2[0].downsample[1]"] == "layer2.0.downsample.1"
    assert len(report.matched) == 41
    x = random(4, 3, 32, 32)
    right = numpy(module.eval()(torch().from_numpy(x)))
    y, _ = forward(eqx.nn.inference_mode(model), state, jnp.asarray(x))
    scale = np.abs(right).max()
    np.testing.assert_allclose(y / scale, right / scale, atol=1e-4)
    assert_back(model, state, module)


def test_resnet18_trains_as_torchvision_s():
    """20 steps of gradient descent: weights and running statistics stay the same.

    In float64: to 1e-13, measured. In float32 two programs part by 1e-2 after a few steps,
    whatever they are: sooner or later a value near 0 is cut off by a ReLU in one of them alone.
    """
    with jax.enable_x64(True):
        check_training(steps=20, rate=1e-3, batch=8)


def check_training(steps: int, rate: float, batch: int) -> None:
    module = copy.deepcopy(resnet18(10)[0]).double().train()
    before = {name: numpy(a).copy() for name, a in module.state_dict().items()}
    model, state = eqx.nn.make_with_state(ResNet18)(10, jax.random.key(0))
    model, state, _ = from_torch(model, state, module.state_dict())

    def loss(model: Any, state: eqx.nn.State, x: Any, labels: Any) -> Any:
        y, state = over_batch(model)(x, state)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], 1)
        return -chosen.mean(), state

    @eqx.filter_jit  # convolutions in float64 take ten times as long without optimisation
    def step(model: Any, state: eqx.nn.State, x: Any, labels: Any) -> Any:
        by, state = eqx.filter_grad(loss, has_aux=True)(model, state, x, labels)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, by)), state

    optimiser = torch().optim.SGD(module.parameters(), lr=rate)
    for k in range(steps):
        x = random(batch, 3, 32, 32, seed=k).astype(np.float64)
        labels = np.random.RandomState(k).randint(10, size=batch)
        model, state = step(model, state, jnp.asarray(x), jnp.asarray(labels))
        y = module(torch().from_numpy(x))
        optimiser.zero_grad()
        torch().nn.functional.cross_entropy(y, torch().from_numpy(labels)).backward()
        optimiser.step()
    ours = to_torch(model, state)
    assert ours.keys() == before.keys()
    for name, theirs in module.state_dict().items():
        right = numpy(theirs)
        assert np.abs(right - before[name]).max() > 0, name
        error = np.abs(ours[name] - right).max() / np.abs(right).max()
        # An error of 1e-16 grows by less than a factor of 2 in each step.
        assert error < 1e-9, (name, error)
