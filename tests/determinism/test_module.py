"""`monitor_module`: every layer is in the record, and the model stays what it was."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.determinism import monitor_module, recorded
from tests.helpers import normal, over_batch, same

X = normal(0, (4, 3))


class Block(eqx.Module):
    norm: Any
    linear: eqx.nn.Linear

    def __call__(self, x, state):
        h, state = self.norm(x, state)
        return x + self.linear(h), state


class Network(eqx.Module):
    encoder: eqx.nn.Sequential
    blocks: list[Block]
    heads: dict[str, Any]

    def __init__(self, key):
        linear, norm = eqx.nn.Linear(3, 3, key=key), eqx.nn.BatchNorm(3, "batch", mode="ema")
        ours = BatchNorm(3, "batch", approach="batch", activation=eqx.nn.PReLU())
        self.encoder = eqx.nn.Sequential([linear, ours, eqx.nn.Lambda(jnp.tanh)])
        self.blocks = [Block(norm, linear)]
        self.heads = {"mean": eqx.nn.Linear(3, 1, key=key), "norm": LayerNorm(3)}

    def __call__(self, x, state):
        x, state = self.encoder(x, state)
        x, state = self.blocks[0](x, state)
        return {"mean": self.heads["mean"](self.heads["norm"](x)), "x": x}, state


FORWARD = [
    *("encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "encoder"),
    *("blocks.0.norm", "blocks.0.linear", "blocks.0"),
    *("heads.norm", "heads.mean"),
]
MODEL, STATE = eqx.nn.make_with_state(Network)(jax.random.key(0))


def step(model, wrap):
    def loss(model):
        y, new_state = over_batch(wrap(model))(X, STATE)
        return jnp.sum(y["mean"] ** 2), new_state

    return eqx.filter_value_and_grad(loss, has_aux=True)(model)


def rows(record):
    return [(probe.name, probe.kind) for probe in record.plan]


def test_every_layer_is_recorded_by_its_path_and_nothing_changes():
    ours, record = eqx.filter_jit(recorded(step))(MODEL, monitor_module)
    assert eqx.tree_equal(ours, eqx.filter_jit(step)(MODEL, lambda model: model))
    assert rows(record)[: len(FORWARD)] == [(name, "forward") for name in FORWARD]
    backward = rows(record)[len(FORWARD) :]
    assert sorted(backward) == sorted((name, "cotangent") for name in FORWARD)
    assert backward[0] == ("heads.mean", "cotangent")
    assert backward[-1] == ("encoder.layers.0", "cotangent")


def test_a_name_is_put_in_front_and_given_to_the_whole():
    forward = eqx.filter_jit(recorded(lambda model: over_batch(model)(X, STATE)))
    _, record = forward(monitor_module(MODEL, "net"))
    assert rows(record) == [(f"net.{name}", "forward") for name in [*FORWARD, "mean", "x"]]


def test_it_stays_what_it_was(tmp_path):
    monitored = monitor_module(MODEL)
    assert same(*(eqx.filter(m, eqx.is_array) for m in (MODEL, monitored)))
    # Made twice, it is of the same kind: nothing is compiled anew. So is what was monitored.
    structure = jax.tree.structure(monitored)
    assert jax.tree.structure(monitor_module(MODEL)) == structure
    assert jax.tree.structure(monitor_module(monitored)) == structure
    layer = monitored.encoder.layers[0]
    assert isinstance(layer, eqx.nn.Linear)
    zeros = eqx.tree_at(lambda m: m.encoder.layers[0].weight, monitored, jnp.zeros((3, 3)))
    assert type(zeros.encoder.layers[0]) is type(layer)
    assert eqx.nn.inference_mode(monitored).blocks[0].norm.inference
    eqx.tree_serialise_leaves(tmp_path / "weights", zeros)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "weights", MODEL)
    assert not loaded.encoder.layers[0].weight.any()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (eqx.nn.Lambda(jnp.tanh), "Lambda"),
        (eqx.nn.Linear(3, 3, key=jax.random.key(0)), "Linear"),
        (LayerNorm(3, activation=eqx.nn.PReLU()), "LayerNorm"),
    ],
    ids=["of a function", "with arrays", "with a layer inside that is a part of it"],
)
def test_a_model_that_is_one_layer_goes_by_the_name_of_its_class(model, name):
    _, record = eqx.filter_jit(recorded(jax.vmap(monitor_module(model))))(X)
    assert rows(record) == [(name, "forward")]


class Weights(eqx.Module):
    """Has no `__call__`."""

    weight: Any


@pytest.mark.parametrize("model", [jax.nn.relu, {"a": X}, Weights(X)])
@pytest.mark.parametrize("name", ["", "net"])
def test_a_model_without_layers_is_an_error(model, name):
    kind = type(model).__name__
    with pytest.raises(ValueError, match=f"no layer in this {kind}, .*monitor\\(value, name"):
        monitor_module(model, name)
