"""Tests `from_torch` and `to_torch` beside PyTorch itself, layer by layer, and on ResNet-18."""

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
from eqx_norm.strategies import Average
from tests.helpers import make, over_batch, quick_call
from tests.models.nested import KEY, descended

pytestmark = pytest.mark.peers


@functools.cache
def torch() -> Any:
    # Imported here: without the peers this must fail, and only when it is asked for.
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # tests run side by side
    return torch


def randomised(module: Any) -> Any:
    """Returns the module with random statistics and affine weights in its norms."""
    for part in module.modules():
        if isinstance(part, torch().nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 2)
            part.num_batches_tracked.fill_(7)
            torch().nn.init.uniform_(part.weight, 0.5, 1.5)
    return module


def numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def assert_back(model: Any, state: Any, module: Any, names: Any = None) -> None:
    """Checks that PyTorch accepts the result of `to_torch`, and that it is unchanged."""
    before = {name: numpy(a).copy() for name, a in module.state_dict().items()}
    given = {name: torch().from_numpy(a) for name, a in to_torch(model, state, names).items()}
    module.load_state_dict(given, strict=True)
    for name, array in module.state_dict().items():
        np.testing.assert_array_equal(numpy(array), before[name], err_msg=name)


def check(module: Any, layer: Any, x: np.ndarray) -> None:
    layer, _, _ = from_torch(layer, None, module.state_dict())
    right = numpy(module(torch().from_numpy(x)[None]))[0]
    np.testing.assert_allclose(layer(jnp.asarray(x)), right, rtol=1e-5, atol=1e-5)
    assert_back(layer, None, module)


STRIDED = {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False}
CONVOLUTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Conv2d", STRIDED),
    ("Conv3d", {}),
    ("ConvTranspose1d", {}),
    ("ConvTranspose2d", {**STRIDED, "output_padding": 1}),
]


@pytest.mark.parametrize(("name", "settings"), CONVOLUTIONS, ids=str)
def test_convolutions(name, settings):
    module = getattr(torch().nn, name)(4, 6, 3, **settings)
    theirs = {"use_bias" if k == "bias" else k: value for k, value in settings.items()}
    layer = getattr(eqx.nn, name)(4, 6, 3, **theirs, key=KEY)
    check(module, layer, random(4, *range(5, 5 + layer.num_spatial_dims)))


# PyTorch's layer, ours, and the shape of x; `None` is a number.
LAYERS: dict[str, Any] = {
    "Linear": ((4, 3), eqx.nn.Linear(4, 3, key=KEY), (4,)),
    "LayerNorm": (((4, 5),), LayerNorm((4, 5)), (4, 5)),
    "GroupNorm": ((2, 4), eqx.nn.GroupNorm(2, 4), (4, 5)),
    "RMSNorm": (((4,), 1e-5), eqx.nn.RMSNorm((4,), use_bias=False), (4,)),
    "PReLU": ((4,), eqx.nn.PReLU(jnp.full((4, 1), 0.25)), (4, 5)),
    "Embedding": ((6, 3), eqx.nn.Embedding(6, 3, key=KEY), None),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind):
    arguments, layer, shape = LAYERS[kind]
    module = getattr(torch().nn, kind)(*arguments)
    for parameter in module.parameters():
        torch().nn.init.normal_(parameter)
    check(module, layer, np.array(2) if shape is None else random(*shape))


def test_bfloat16():
    module = randomised(torch().nn.BatchNorm1d(3)).bfloat16()
    layer, state = make(3, "batch", approach="batch", dtype="bfloat16")
    layer, state, _ = from_torch(layer, state, module.state_dict())
    back = to_torch(layer, state)
    module.load_state_dict({name: torch().from_numpy(a) for name, a in back.items()})
    for name, array in module.state_dict().items():  # NumPy has no bfloat16
        np.testing.assert_array_equal(numpy(array.float()), back[name], err_msg=name)


def test_the_cumulative_average_goes_on_from_the_number_of_batches():
    module = torch().nn.BatchNorm2d(3, momentum=None)
    layer, state = make(3, "batch", unbiased=True, approach=Average())
    for k in range(6):
        if k in (0, 3):  # untrained, and then after 3 steps of PyTorch's
            layer, state, _ = from_torch(layer, state, module.state_dict())
        x = random(4, 3, 2, 2, seed=k) * 2 + 1
        module.train()(torch().from_numpy(x))
        _, state = quick_call(layer, state, jnp.asarray(x))
    for name, theirs in module.state_dict().items():
        np.testing.assert_allclose(to_torch(layer, state)[name], numpy(theirs), rtol=1e-5)


# --- ResNet-18 as torchvision has it (He et al., arXiv:1512.03385)


def conv(channels: int, out: int, size: int, stride: int) -> eqx.nn.Conv2d:
    return eqx.nn.Conv2d(channels, out, size, stride, size // 2, use_bias=False, key=KEY)


def norm(channels: int) -> BatchNorm:
    return BatchNorm(channels, "batch", approach="batch", momentum=0.9, unbiased=True)


class BasicBlock(eqx.Module):
    conv1: Any
    bn1: BatchNorm
    conv2: Any
    bn2: BatchNorm
    downsample: list[Any]

    def __init__(self, channels, out, stride):
        self.conv1, self.bn1 = conv(channels, out, 3, stride), norm(out)
        self.conv2, self.bn2 = conv(out, out, 3, 1), norm(out)
        shortcut = conv(channels, out, 1, stride), norm(out)
        self.downsample = [*shortcut] if stride > 1 else []

    def __call__(self, x, state):
        y, state = self.bn1(self.conv1(x), state)
        y, state = self.bn2(self.conv2(jax.nn.relu(y)), state)
        if self.downsample:
            x, state = self.downsample[1](self.downsample[0](x), state)
        return jax.nn.relu(x + y), state


class ResNet18(eqx.Module):
    conv1: Any
    bn1: BatchNorm
    layers: list[list[BasicBlock]]
    fc: eqx.nn.Linear

    def __init__(self):
        self.conv1, self.bn1 = conv(3, 64, 7, 2), norm(64)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.layers = [[BasicBlock(*w), BasicBlock(w[1], w[1], 1)] for w in widths]
        self.fc = eqx.nn.Linear(512, 10, key=KEY)

    def __call__(self, x, state):
        x, state = self.bn1(self.conv1(x), state)
        x = eqx.nn.MaxPool2d(3, 2, 1)(jax.nn.relu(x))
        for block in [block for stage in self.layers for block in stage]:
            x, state = block(x, state)
        return self.fc(jnp.mean(x, (1, 2))), state


NAMES = {f"layers[{i}]": f"layer{i + 1}" for i in range(4)}


# Convolutions in float64 take ten times as long without optimisation.
step = eqx.filter_jit(functools.partial(descended, lambda m, s, x: over_batch(m)(x, s), 1e-3))


def test_resnet18_infers_and_trains_as_torchvision_s():
    """10 steps of gradient descent: weights and running statistics stay the same.

    In float64: to 1e-13, measured. In float32 two programs part by 1e-2 after a few steps,
    whatever they are: sooner or later a value near 0 is cut off by a ReLU in one of them alone.
    """
    # torchvision's operators are compiled for one build of PyTorch, and are not there beside
    # another. Importing it describes two, which must have been declared; none is called.
    declared = torch().library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch().ops.torchvision, operator):
            declared.define(f"{operator}(Tensor dets, Tensor scores, float over) -> Tensor")
    models = importlib.import_module("torchvision.models")
    module = randomised(models.resnet18(num_classes=10)).double()
    optimiser = torch().optim.SGD(module.parameters(), lr=1e-3)
    with jax.enable_x64(True):
        model, state = eqx.nn.make_with_state(ResNet18)()
        model, state, report = from_torch(model, state, module.state_dict(), NAMES)
        assert len(report.matched) == 41
        assert_back(model, state, module, NAMES)
        x = random(8, 3, 32, 32).astype(np.float64)
        y, _ = quick_call(eqx.nn.inference_mode(model), state, jnp.asarray(x))
        np.testing.assert_allclose(y, numpy(module.eval()(torch().from_numpy(x))), rtol=1e-9)
        for _ in range(10):
            model, state, _ = step(model, state, jnp.asarray(x))
            y = module.train()(torch().from_numpy(x))
            optimiser.zero_grad()
            (-y.log_softmax(1)[:, 0].mean()).backward()
            optimiser.step()
        ours = to_torch(model, state, NAMES)
    for name, theirs in module.state_dict().items():
        right = numpy(theirs)
        # An error of 1e-16 grows by less than a factor of 2 in each step.
        assert np.abs(ours[name] - right).max() / np.abs(right).max() < 1e-9, name
