"""Compares `from_torch` and `to_torch` with PyTorch itself, on layers and published models."""

import functools
import importlib
import itertools
import sys
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from eqx_norm.models import from_torch, swap, to_torch
from tests.compiling import filter_jit
from tests.helpers import make, over_batch, quick_call, random_layer, y_and_gradients
from tests.models.nested import KEY

pytestmark = pytest.mark.peers


@functools.cache
def torch() -> Any:
    # Imported here: without the peers only these tests fail, and only if selected.
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # tests run in parallel
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
    """Returns a copy in float64, because NumPy has no bfloat16."""
    return tensor.detach().double().numpy().copy()


def random(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def assert_back(model: Any, state: Any, module: Any, names: Any = None) -> None:
    """Checks that PyTorch accepts the result of `to_torch`, with unchanged values."""
    before = {name: numpy(a) for name, a in module.state_dict().items()}
    arrays = {name: torch().from_numpy(a) for name, a in to_torch(model, state, names).items()}
    module.load_state_dict(arrays, strict=True)
    for name, array in module.state_dict().items():
        np.testing.assert_array_equal(numpy(array), before[name], err_msg=name)


# PyTorch's layer and its arguments, our layer, and the shape of x; `None`: x is a number.
STRIDED: dict[str, Any] = {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}
LAYERS: list[tuple[str, tuple[Any, ...], dict[str, Any], Any, Any]] = [
    (
        "Conv3d",
        (4, 6, 3),
        STRIDED,
        random_layer(eqx.nn.Conv3d, 4, 6, 3, **STRIDED),
        (4, 5, 6, 7),
    ),
    (
        "ConvTranspose2d",
        (4, 6, 3),
        {**STRIDED, "output_padding": 1},
        random_layer(eqx.nn.ConvTranspose2d, 4, 6, 3, output_padding=1, **STRIDED),
        (4, 5, 6),
    ),
    ("Linear", (4, 3), {}, random_layer(eqx.nn.Linear, 4, 3), (4,)),
    ("LayerNorm", ((4, 5),), {}, LayerNorm((4, 5)), (4, 5)),
    ("GroupNorm", (2, 4), {}, eqx.nn.GroupNorm(2, 4), (4, 5)),
    ("RMSNorm", ((4,), 1e-5), {}, eqx.nn.RMSNorm((4,), use_bias=False), (4,)),
    ("PReLU", (4,), {}, eqx.nn.PReLU(jnp.full((4, 1), 0.25)), (4, 5)),
    ("Embedding", (6, 3), {}, random_layer(eqx.nn.Embedding, 6, 3), None),
]


@pytest.mark.parametrize(("kind", "args", "settings", "layer", "shape"), LAYERS)
def test_layers_equal_pytorch(kind, args, settings, layer, shape):
    module = getattr(torch().nn, kind)(*args, **settings)
    for parameter in module.parameters():
        torch().nn.init.normal_(parameter)
    x = np.array(2) if shape is None else random(*shape)
    layer, _, _ = from_torch(layer, None, module.state_dict())
    expected = numpy(module(torch().from_numpy(x)[None]))[0]
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)
    assert_back(layer, None, module)


def test_bfloat16_batch_norm_from_and_to_torch():
    module = randomised(torch().nn.BatchNorm1d(3)).bfloat16()
    layer, state = make(3, "batch", approach="batch", dtype="bfloat16")
    layer, state, _ = from_torch(layer, state, module.state_dict())
    assert_back(layer, state, module)


def resnet18(monkeypatch: Any) -> tuple[Any, Any]:
    """Returns the ResNet-18 of jaxonmodels with Equinox's layers, swapped, and its state."""
    # The code that fetches weights needs packages that conflict with the pinned packages.
    fetching = types.SimpleNamespace(BotoClient=None, download=None)
    monkeypatch.setitem(sys.modules, "jaxonmodels.utils.boto_client", fetching)
    module = importlib.import_module("jaxonmodels.vision.resnet")
    model, state = module.resnet18(num_classes=10, key=KEY)
    return swap(model, state, "batch", momentum=0.9, unbiased=True)


def name(path: str) -> str:
    """Returns torchvision's name of a layer of jaxonmodels."""
    path = path.replace(".layers[", "[")
    return path.replace("downsample.conv", "downsample.0").replace(
        "downsample.norm", "downsample.1"
    )


@functools.cache
def torchvision_models() -> Any:
    # torchvision's operators are compiled for one build of PyTorch, and missing with another.
    # The import describes two operators, which must have been declared; none is called.
    declared = torch().library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch().ops.torchvision, operator):
            declared.define(f"{operator}(Tensor dets, Tensor scores, float over) -> Tensor")
    return importlib.import_module("torchvision.models")


# Convolutions in float64 take ten times as long without optimisation.
@eqx.filter_jit
def step(model: Any, state: Any, x: Any) -> Any:
    def loss(model):
        y, after = over_batch(model)(x, state)
        return -jax.nn.log_softmax(y)[:, 0].mean(), after

    gradient, state = eqx.filter_grad(loss, has_aux=True)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -1e-3 * g, gradient)), state


@pytest.mark.filterwarnings("ignore:When `eqx.nn.BatchNorm:UserWarning")
def test_swapped_published_resnet18_infers_and_trains_as_torchvision(monkeypatch):
    """Compares weights and running statistics after 10 steps of gradient descent in float64.

    The measured difference is 1e-13. In float32, any two programs differ by 1e-2 after a few
    steps, because a ReLU then cuts off a value near 0 in one program only.
    """
    module = randomised(torchvision_models().resnet18(num_classes=10)).double()
    optimiser = torch().optim.SGD(module.parameters(), lr=1e-3)
    with jax.enable_x64(True):
        model, state = resnet18(monkeypatch)
        model, state, report = from_torch(model, state, module.state_dict(), name)
        assert len(report.matched) == 41
        assert_back(model, state, module, name)
        x = random(8, 3, 32, 32).astype(np.float64)
        y, _ = quick_call(eqx.nn.inference_mode(model), state, jnp.asarray(x))
        np.testing.assert_allclose(y, numpy(module.eval()(torch().from_numpy(x))), rtol=1e-9)
        for _ in range(10):
            model, state = step(model, state, jnp.asarray(x))
            y = module.train()(torch().from_numpy(x))
            optimiser.zero_grad()
            (-y.log_softmax(1)[:, 0].mean()).backward()
            optimiser.step()
        ours = to_torch(model, state, name)
    for key, theirs in module.state_dict().items():
        expected = numpy(theirs)
        # An error of 1e-16 grows by less than a factor of 2 in each step.
        assert np.abs(ours[key] - expected).max() / np.abs(expected).max() < 1e-9, key


class Block(eqx.Module):
    """Implements ConvNeXt's block."""

    layers: list[Any]
    layer_scale: Any

    def __init__(self, channels: int):
        conv = eqx.nn.Conv2d(channels, channels, 7, padding=3, groups=channels, key=KEY)
        sizes = (channels, 4 * channels), (4 * channels, channels)
        linear = [eqx.nn.Linear(*size, key=KEY) for size in sizes]
        self.layers = [conv, LayerNorm(channels, axis=0, eps=1e-6), *linear]
        self.layer_scale = jnp.ones((channels, 1, 1))

    def __call__(self, x: Any) -> Any:
        conv, norm, up, down = self.layers
        mlp = jax.vmap(jax.vmap(lambda x: down(jax.nn.gelu(up(x), False)), 1, 1), 1, 1)
        return x + self.layer_scale * mlp(norm(conv(x)))


def convnext() -> dict[str, Any]:
    """Returns the layers of a ConvNeXt-T."""
    channels, features = 3, []
    for out, depth, size in ((96, 3, 4), (192, 3, 2), (384, 9, 2), (768, 3, 2)):
        conv = eqx.nn.Conv2d(channels, out, size, stride=size, key=KEY)
        norm = LayerNorm(channels if features else out, axis=0, eps=1e-6)
        features += [[norm, conv] if features else [conv, norm], [Block(out)] * depth]
        channels = out
    head = eqx.nn.Linear(channels, 10, key=KEY)
    return {"features": features, "norm": LayerNorm(channels, axis=0, eps=1e-6), "head": head}


def convnext_name(path: str) -> str:
    """Returns torchvision's name of a layer of `convnext`."""
    for ours, theirs in enumerate((0, 2, 3, 5)):
        path = path.replace(f".layers[{ours}]", f".block[{theirs}]")
    return path.replace("['norm']", "classifier[0]").replace("['head']", "classifier[2]")


@filter_jit
def outputs_and_gradient(model: dict[str, Any], x: Any, dy: Any) -> tuple[Any, Any]:
    def logits(x: Any) -> Any:
        for layer in itertools.chain(*model["features"]):
            x = layer(x)
        return model["head"](model["norm"](x.mean((1, 2), keepdims=True))[:, 0, 0])

    return y_and_gradients(jax.vmap(logits), dy, x)


def test_convnext_infers_as_torchvision():
    torch().manual_seed(0)
    module = torchvision_models().convnext_tiny(num_classes=10).eval()
    for key, parameter in module.named_parameters():
        if "layer_scale" in key or (parameter.ndim == 1 and key.endswith("weight")):
            torch().nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.ndim == 1:
            torch().nn.init.normal_(parameter, 0, 0.1)
    state_dict = module.state_dict()
    model, _, _ = from_torch(filter_jit(convnext)(), None, state_dict, convnext_name)
    assert_back(model, None, module, convnext_name)
    x, dy = random(2, 3, 64, 64), random(2, 10)
    y, dx = outputs_and_gradient(model, jnp.asarray(x), jnp.asarray(dy))
    images = torch().from_numpy(x).requires_grad_()
    logits = module(images)
    logits.backward(torch().from_numpy(dy))
    for actual, tensor, tolerance in ((y, logits, 1e-5), (dx, images.grad, 1e-4)):
        expected = numpy(tensor)
        assert np.abs(actual - expected).max() < tolerance * np.abs(expected).max()
