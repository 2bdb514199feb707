"""Tests that models are exported by jax2onnx, and that ONNX Runtime computes the same."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import batching

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.models import unswap
from tests.helpers import normal, over_batch

# What the two packages warn of when they are imported is theirs.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


class Residual(eqx.Module):
    """Is a ResNet's first block, with activations in and behind its norms."""

    convs: list[eqx.nn.Conv2d]
    norms: list[BatchNorm]

    def __init__(self, channels, key):
        keys = jax.random.split(key)
        self.convs = [eqx.nn.Conv2d(channels, channels, 3, padding=1, key=k) for k in keys]
        self.norms = [
            BatchNorm(channels, "batch", approach="batch", activation=act)
            for act in (jax.nn.relu, None)
        ]

    def __call__(self, x, state):
        y, state = self.norms[0](self.convs[0](x), state)
        y, state = self.norms[1](self.convs[1](y), state)
        return jax.nn.relu(x + y), state


class Attention(eqx.Module):
    """Is a ViT's block: attention and a perceptron, each behind a norm."""

    norms: list[LayerNorm]
    weights: list[eqx.nn.Linear]
    perceptron: eqx.nn.MLP

    def __init__(self, size, key):
        *keys, last = jax.random.split(key, 4)
        self.norms = [LayerNorm(size) for _ in range(2)]
        self.weights = [eqx.nn.Linear(size, size, key=k) for k in keys]
        self.perceptron = eqx.nn.MLP(size, size, 2 * size, 1, jax.nn.gelu, key=last)

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        query, key, value = (jax.vmap(linear)(y) for linear in self.weights)
        scores = jax.lax.dot_general(query, key, (((1,), (1,)), ((), ())))
        x = x + jax.nn.softmax(scores / 4) @ value
        return x + jax.vmap(lambda row: self.perceptron(self.norms[1](row)))(x)


def exported(function, x, monkeypatch):
    """Returns what ONNX Runtime computes."""
    # jax2onnx 0.13 asks for what jax 0.10.2 no longer has; its value was always None.
    monkeypatch.setattr(batching, "not_mapped", None, raising=False)
    # Imported here: without the peers this must fail, and only when it is asked for.
    onnxruntime, jax2onnx = map(importlib.import_module, ("onnxruntime", "jax2onnx"))
    model = jax2onnx.to_onnx(function, [x.shape], model_name="model")
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: np.asarray(x)})[0]


def test_a_resnet_s_inference(monkeypatch):
    blocks, state = eqx.nn.make_with_state(lambda k: [Residual(4, k), Residual(4, k)])(
        jax.random.key(0)
    )

    def forward(blocks, x, state):
        for block in blocks:
            x, state = over_batch(block)(x, state)
        return x, state

    x = normal(1, (2, 4, 8, 8))
    _, state = forward(blocks, x, state)
    blocks = eqx.nn.inference_mode(blocks)
    right = forward(blocks, x, state)[0]
    found = exported(lambda x: forward(blocks, x, state)[0], x, monkeypatch)
    np.testing.assert_allclose(found, right, atol=1e-5)


def test_a_vit_s_inference(monkeypatch):
    """Tests what `docs/models.md` says of `LayerNorm`, which has passes in inference, too."""
    ours, state = eqx.nn.make_with_state(
        lambda: [Attention(16, k) for k in jax.random.split(jax.random.key(0))]
    )()
    blocks, _ = unswap(ours, state)

    def forward(x, blocks=blocks):
        for block in blocks:
            x = jax.vmap(block)(x)
        return x

    x = normal(1, (2, 5, 16))
    right = forward(x, ours)
    np.testing.assert_allclose(exported(forward, x, monkeypatch), right, atol=1e-5)
    assert jnp.isfinite(right).all()
