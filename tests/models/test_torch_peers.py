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
from tests.models.nested import KEY

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
        if getattr(part, "weight", None) is not None and part.weight.ndim == 1:
            torch().nn.init.uniform_(part.weight, 0.5, 1.5)
            torch().nn.init.normal_(part.bias, 0, 0.1)
    return module


def numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def assert_back(model: Any, state: Any, module: Any) -> None:
    """Checks that PyTorch takes what `to_torch` gives, and that it is what it had."""
    before = {name: numpy(a).copy() for name, a in module.state_dict().items()}
    given = {name: torch().from_numpy(a) for name, a in to_torch(model, state).items()}
    module.load_state_dict(given, strict=True)
    for name, array in module.state_dict().items():
        np.testing.assert_array_equal(numpy(array), before[name], err_msg=name)


def check(module: Any, layer: Any, x: np.ndarray) -> None:
    layer, _, _ = from_torch(layer, None, module.state_dict())
    right = numpy(module(torch().from_numpy(x)[None]))[0]
    np.testing.assert_allclose(layer(jnp.asarray(x)), right, rtol=1e-5, atol=1e-5)
    assert_back(layer, None, module)


CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "groups": 2},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims, transposed, kind):
    settings, bias = CONVOLUTIONS[kind], kind == "plain"
    if transposed and not bias:
        settings = {**settings, "output_padding": 1}
    name = f"Conv{'Transpose' * transposed}{dims}d"
    module = getattr(torch().nn, name)(4, 6, **settings, bias=bias)
    layer = getattr(eqx.nn, name)(4, 6, **settings, use_bias=bias, key=KEY)
    check(module, layer, random(4, *range(5, 5 + dims)))


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_tensors_of_another_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        module = randomised(torch().nn.BatchNorm1d(3)).to(getattr(torch(), dtype))
        make = eqx.nn.make_with_state(BatchNorm)
        layer, state = make(3, "batch", approach="batch", dtype=dtype)
        layer, state, _ = from_torch(layer, state, module.state_dict())
        back = to_torch(layer, state)
        module.load_state_dict({name: torch().from_numpy(a) for name, a in back.items()})
        for name, array in module.state_dict().items():
            wide = array if dtype == "float64" else array.float()  # NumPy has no bfloat16
            np.testing.assert_array_equal(numpy(wide), back[name], err_msg=name)


@filter_jit
def forward(model: Any, state: eqx.nn.State, x: Any) -> Any:
    return over_batch(model)(x, state)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_trains_on(momentum):
    """The number of batches is where PyTorch's cumulative average goes on from."""
    module = torch().nn.BatchNorm2d(3, momentum=momentum)
    approach = Average() if momentum is None else Batch(1 - momentum)
    layer, state = eqx.nn.make_with_state(BatchNorm)(
        3, "batch", unbiased=True, approach=approach
    )
    for k in range(12):
        if k in (0, 5):  # untrained, and then after 5 steps of PyTorch's
            layer, state, _ = from_torch(layer, state, module.state_dict())
        x = random(4, 3, 2, 2, seed=k) * 2 + 1
        module.train()(torch().from_numpy(x))
        _, state = forward(layer, state, jnp.asarray(x))
        ours = to_torch(layer, state)
        for name, theirs in module.state_dict().items():
            np.testing.assert_allclose(ours[name], numpy(theirs), rtol=1e-5, atol=1e-5)


# --- ResNet-18 as torchvision has it, with the same names (He et al., arXiv:1512.03385)


def conv(channels: int, out: int, size: int, stride: int, key: Any) -> eqx.nn.Conv2d:
    return eqx.nn.Conv2d(channels, out, size, stride, size // 2, use_bias=False, key=key)


def norm(channels: int) -> BatchNorm:
    return BatchNorm(channels, "batch", approach="batch", momentum=0.9, unbiased=True)


class BasicBlock(eqx.Module):
    conv1: eqx.nn.Conv2d
    bn1: BatchNorm
    conv2: eqx.nn.Conv2d
    bn2: BatchNorm
    downsample: list[Any] | None

    def __init__(self, channels, out, stride, key):
        self.conv1, self.bn1 = conv(channels, out, 3, stride, key), norm(out)
        self.conv2, self.bn2 = conv(out, out, 3, 1, key), norm(out)
        other = stride != 1 or channels != out
        self.downsample = [conv(channels, out, 1, stride, key), norm(out)] if other else None

    def __call__(self, x, state):
        y, state = self.bn1(self.conv1(x), state)
        y, state = self.bn2(self.conv2(jax.nn.relu(y)), state)
        if self.downsample is not None:
            x, state = self.downsample[1](self.downsample[0](x), state)
        return jax.nn.relu(x + y), state


class ResNet18(eqx.Module):
    conv1: eqx.nn.Conv2d
    bn1: BatchNorm
    layer1: list[BasicBlock]
    layer2: list[BasicBlock]
    layer3: list[BasicBlock]
    layer4: list[BasicBlock]
    fc: eqx.nn.Linear

    def __init__(self):
        def two(channels, out, stride):
            return [BasicBlock(channels, out, stride, KEY), BasicBlock(out, out, 1, KEY)]

        self.conv1, self.bn1 = conv(3, 64, 7, 2, KEY), norm(64)
        self.layer1, self.layer2 = two(64, 64, 1), two(64, 128, 2)
        self.layer3, self.layer4 = two(128, 256, 2), two(256, 512, 2)
        self.fc = eqx.nn.Linear(512, 10, key=KEY)

    def __call__(self, x, state):
        x, state = self.bn1(self.conv1(x), state)
        x = eqx.nn.MaxPool2d(3, 2, 1)(jax.nn.relu(x))
        for block in [*self.layer1, *self.layer2, *self.layer3, *self.layer4]:
            x, state = block(x, state)
        return self.fc(jnp.mean(x, (1, 2))), state


@functools.cache
def resnet18() -> Any:
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
    return randomised(models.resnet18(num_classes=10)), declared


def test_resnet18_inference():
    module = copy.deepcopy(resnet18()[0])
    model, state = eqx.nn.make_with_state(ResNet18)()
    model, state, report = from_torch(model, state, module.state_dict())
    assert report.matched["layer2[0].downsample[1]"] == "layer2.0.downsample.1"
    assert len(report.matched) == 41
    x = random(4, 3, 32, 32)
    right = numpy(module.eval()(torch().from_numpy(x)))
    y, _ = forward(eqx.nn.inference_mode(model), state, jnp.asarray(x))
    np.testing.assert_allclose(y, right, rtol=0, atol=1e-4 * np.abs(right).max())
    assert_back(model, state, module)


def loss(model: Any, state: eqx.nn.State, x: Any, labels: Any) -> Any:
    y, state = over_batch(model)(x, state)
    return -jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], 1).mean(), state


@eqx.filter_jit  # convolutions in float64 take ten times as long without optimisation
def step(model: Any, state: eqx.nn.State, x: Any, labels: Any) -> Any:
    by, state = eqx.filter_grad(loss, has_aux=True)(model, state, x, labels)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -1e-3 * g, by)), state


def test_resnet18_trains_as_torchvision_s():
    """20 steps of gradient descent: weights and running statistics stay the same.

    In float64: to 1e-13, measured. In float32 two programs part by 1e-2 after a few steps,
    whatever they are: sooner or later a value near 0 is cut off by a ReLU in one of them alone.
    """
    module = copy.deepcopy(resnet18()[0]).double().train()
    before = {name: numpy(a).copy() for name, a in module.state_dict().items()}
    optimiser = torch().optim.SGD(module.parameters(), lr=1e-3)
    with jax.enable_x64(True):
        model, state = eqx.nn.make_with_state(ResNet18)()
        model, state, _ = from_torch(model, state, module.state_dict())
        for k in range(20):
            x = random(8, 3, 32, 32, seed=k).astype(np.float64)
            labels = np.random.RandomState(k).randint(10, size=8)
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
        # An error of 1e-16 grows by less than a factor of 2 in each step.
        assert np.abs(ours[name] - right).max() / np.abs(right).max() < 1e-9, name
