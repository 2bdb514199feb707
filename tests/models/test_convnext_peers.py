"""Tests `LayerNorm(axis=0)` and `from_torch` in a ConvNeXt-T, beside torchvision's."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from eqx_norm import LayerNorm
from eqx_norm.models import from_torch
from tests.compiling import filter_jit
from tests.models.nested import KEY
from tests.models.test_torch_peers import assert_back, numpy, random, torch, torchvision_models

pytestmark = pytest.mark.peers


def norm(channels: int) -> LayerNorm:
    return LayerNorm(channels, axis=0, eps=1e-6)


class Block(eqx.Module):
    depthwise: eqx.nn.Conv2d
    norm: LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    layer_scale: Array

    def __init__(self, channels: int):
        self.depthwise = eqx.nn.Conv2d(
            channels, channels, 7, padding=3, groups=channels, key=KEY
        )
        self.norm = norm(channels)
        self.up = eqx.nn.Linear(channels, 4 * channels, key=KEY)
        self.down = eqx.nn.Linear(4 * channels, channels, key=KEY)
        self.layer_scale = jnp.full((channels, 1, 1), 1e-6)

    def __call__(self, x: Array) -> Array:
        def at_position(channels: Array) -> Array:
            return self.down(jax.nn.gelu(self.up(channels), approximate=False))

        over_positions = jax.vmap(jax.vmap(at_position, 1, 1), 1, 1)
        return x + self.layer_scale * over_positions(self.norm(self.depthwise(x)))


class ConvNeXt(eqx.Module):
    features: list[list[Any]]
    norm: LayerNorm
    head: eqx.nn.Linear

    def __init__(self):
        self.features = [[eqx.nn.Conv2d(3, 96, 4, stride=4, key=KEY), norm(96)]]
        for channels, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
            if channels > 96:
                conv = eqx.nn.Conv2d(channels // 2, channels, 2, stride=2, key=KEY)
                self.features.append([norm(channels // 2), conv])
            self.features.append([Block(channels) for _ in range(depth)])
        self.norm, self.head = norm(768), eqx.nn.Linear(768, 10, key=KEY)

    def __call__(self, x: Array) -> Array:
        for part in self.features:
            for layer in part:
                x = layer(x)
        return self.head(self.norm(x.mean((1, 2), keepdims=True))[:, 0, 0])


@filter_jit
def outputs_and_gradient(model: Any, x: Array, dy: Array) -> tuple[Array, Array]:
    y, pull = jax.vjp(jax.vmap(model), x)
    return y, pull(dy)[0]


def test_a_convnext_infers_as_torchvision_s():
    torch().manual_seed(0)
    module = torchvision_models().convnext_tiny(num_classes=10).eval()
    for key, parameter in module.named_parameters():
        if "layer_scale" in key or (parameter.ndim == 1 and key.endswith("weight")):
            torch().nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.ndim == 1:
            torch().nn.init.normal_(parameter, 0, 0.1)
    # Equal names match the stages and layer scales; order matches the layers in the blocks, and
    # the last two.
    model, _, report = from_torch(filter_jit(ConvNeXt)(), None, module.state_dict(), "order")
    assert (report.matched["norm"], report.matched["head"]) == ("classifier.0", "classifier.2")
    assert_back(model, None, module, report.matched)

    x, dy = random(2, 3, 64, 64), random(2, 10)
    y, dx = outputs_and_gradient(model, jnp.asarray(x), jnp.asarray(dy))
    images = torch().from_numpy(x).requires_grad_()
    logits = module(images)
    logits.backward(torch().from_numpy(dy))
    for actual, tensor, tolerance in ((y, logits, 1e-5), (dx, images.grad, 1e-4)):
        expected = numpy(tensor)
        assert np.abs(actual - expected).max() < tolerance * np.abs(expected).max()
