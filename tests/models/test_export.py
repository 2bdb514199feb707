"""Tests that models are exported by jax2onnx, and that ONNX Runtime computes the same."""

import importlib
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.interpreters import batching

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.models import unswap
from tests.helpers import normal, over_batch
from tests.models.nested import KEY

# What the two packages warn of when they are imported is theirs.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


class Residual(eqx.Module):
    convs: list[Any]
    norms: list[Any]

    def __init__(self):
        self.convs = [eqx.nn.Conv2d(4, 4, 3, padding=1, key=KEY) for _ in range(2)]
        inside = {"approach": "batch", "activation": jax.nn.relu}
        self.norms = [BatchNorm(4, "batch", **inside), BatchNorm(4, "batch", approach="batch")]

    def __call__(self, x, state):
        y, state = self.norms[0](self.convs[0](x), state)
        y, state = self.norms[1](self.convs[1](y), state)
        return jax.nn.relu(x + y), state


class Attention(eqx.Module):
    norms: list[Any]
    weights: list[Any]
    perceptron: eqx.nn.MLP

    def __init__(self):
        self.norms = [LayerNorm(16) for _ in range(2)]
        self.weights = [eqx.nn.Linear(16, 16, key=k) for k in jax.random.split(KEY, 3)]
        self.perceptron = eqx.nn.MLP(16, 16, 32, 1, jax.nn.gelu, key=KEY)

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
    block, state = eqx.nn.make_with_state(Residual)()
    x = normal(1, (2, 4, 8, 8))
    _, state = over_batch(block)(x, state)
    block = eqx.nn.inference_mode(block)
    found = exported(lambda x: over_batch(block)(x, state)[0], x, monkeypatch)
    np.testing.assert_allclose(found, over_batch(block)(x, state)[0], atol=1e-5)


def test_a_vit_s_inference(monkeypatch):
    """Tests what `docs/models.md` says of `LayerNorm`, which has passes in inference, too."""
    ours, state = eqx.nn.make_with_state(Attention)()
    theirs, _ = unswap(ours, state)
    x = normal(1, (2, 5, 16))
    found = exported(jax.vmap(theirs), x, monkeypatch)
    np.testing.assert_allclose(found, jax.vmap(ours)(x), atol=1e-5)
