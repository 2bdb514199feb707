"""`monitor_module`: every layer is in the record, and the model stays what it was."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.determinism import monitor_module, recorded
from eqx_norm.determinism._record import places
from tests.helpers import bits, normal, over_batch, same

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
        keys = jax.random.split(key, 3)
        norm = BatchNorm(3, "batch", approach="batch", activation=eqx.nn.PReLU())
        linear = eqx.nn.Linear(3, 3, key=keys[0])
        self.encoder = eqx.nn.Sequential([linear, norm, eqx.nn.Lambda(jnp.tanh)])
        norm = eqx.nn.BatchNorm(3, "batch", mode="ema")
        self.blocks = [Block(norm, eqx.nn.Linear(3, 3, key=keys[1]))]
        self.heads = {"mean": eqx.nn.Linear(3, 1, key=keys[2]), "norm": LayerNorm(3)}

    def __call__(self, x, state):
        x, state = self.encoder(x, state)
        x, state = self.blocks[0](x, state)
        return {"mean": self.heads["mean"](self.heads["norm"](x)), "x": x}, state


FORWARD = [
    *("encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "encoder"),
    *("blocks.0.norm", "blocks.0.linear", "blocks.0"),
    *("heads.norm", "heads.mean"),
]


@pytest.fixture(scope="module")
def made():
    return eqx.nn.make_with_state(Network)(jax.random.key(0))


def step(model, state, x, wrap):
    def loss(model):
        y, new_state = over_batch(wrap(model))(x, state)
        return jnp.sum(y["mean"] ** 2), new_state

    return eqx.filter_value_and_grad(loss, has_aux=True)(model)


def rows(record):
    return [(place.probe.name, place.probe.kind) for place in places(record.plan)]


def test_every_layer_is_recorded_by_its_path_and_nothing_changes(made):
    model, state = made
    ours, record = eqx.filter_jit(recorded(step))(model, state, X, monitor_module)
    theirs = eqx.filter_jit(step)(model, state, X, lambda model: model)
    assert eqx.tree_equal(ours, theirs)
    assert rows(record)[: len(FORWARD)] == [(name, "forward") for name in FORWARD]
    backward = rows(record)[len(FORWARD) :]
    assert sorted(backward) == sorted((name, "cotangent") for name in FORWARD)
    assert backward[0] == ("heads.mean", "cotangent")
    assert backward[-1] == ("encoder.layers.0", "cotangent")


def test_a_name_is_put_in_front_and_given_to_the_whole(made):
    model, state = made
    forward = eqx.filter_jit(recorded(lambda model: over_batch(model)(X, state)))
    _, record = forward(monitor_module(model, "net"))
    assert rows(record) == [(f"net.{name}", "forward") for name in [*FORWARD, "mean", "x"]]


def test_it_stays_what_it_was(made, tmp_path):
    model, _ = made
    monitored = monitor_module(model)
    assert same(*(eqx.filter(m, eqx.is_array) for m in (model, monitored)))
    # Made twice, it is of the same kind: nothing is compiled anew. So is what was monitored.
    structure = jax.tree.structure(monitored)
    assert jax.tree.structure(monitor_module(model)) == structure
    assert jax.tree.structure(monitor_module(monitored)) == structure
    layer = monitored.encoder.layers[0]
    assert isinstance(layer, eqx.nn.Linear)
    assert layer.in_features == 3
    zeros = eqx.tree_at(lambda m: m.encoder.layers[0].weight, monitored, jnp.zeros((3, 3)))
    assert type(zeros.encoder.layers[0]) is type(layer)
    inference = eqx.nn.inference_mode(monitored)
    assert inference.blocks[0].norm.inference
    eqx.tree_serialise_leaves(tmp_path / "weights", zeros)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "weights", model)
    assert type(loaded.encoder.layers[0]) is eqx.nn.Linear
    assert not loaded.encoder.layers[0].weight.any()


def test_layers_stacked_and_scanned():
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))
    layers = monitor_module(make(jax.random.split(jax.random.key(0), 3)), "layers")
    arrays, rest = eqx.partition(layers, eqx.is_array)

    @jax.jit
    @recorded
    def forward(arrays, x):
        return jax.lax.scan(lambda h, a: (eqx.combine(a, rest)(h), None), x, arrays)[0]

    _, record = forward(arrays, X[0])
    assert [place.iteration for place in places(record.plan)] == [(0,), (1,), (2,)]
    assert len({bits(pair) for pair in record.fingerprints}) == 3


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (eqx.nn.Identity(), "Identity"),
        (eqx.nn.Lambda(jnp.tanh), "Lambda"),
        (LayerNorm(3, activation=eqx.nn.PReLU()), "LayerNorm"),
    ],
    ids=["without leaves", "of a function", "with a layer inside that is a part of it"],
)
def test_a_model_that_is_one_layer_goes_by_the_name_of_its_class(model, name):
    monitored = monitor_module(model)
    _, record = eqx.filter_jit(recorded(jax.vmap(monitored)))(X)
    assert rows(record) == [(name, "forward")]
    # Monitoring what is monitored changes nothing.
    assert jax.tree.structure(monitor_module(monitored)) == jax.tree.structure(monitored)


class Weights(eqx.Module):
    """Has no `__call__`."""

    weight: Any


def test_layers_in_any_tree():
    layers = {"a": eqx.nn.Identity(), "b": [Weights(eqx.nn.Identity())]}
    called = monitor_module(layers)
    _, record = jax.jit(recorded(lambda x: called["b"][0].weight(called["a"](x))))(X)
    assert rows(record) == [("a", "forward"), ("b.0.weight", "forward")]
    np.testing.assert_array_equal(*record.fingerprints)


@pytest.mark.parametrize(
    "model",
    [jax.nn.relu, {"a": X}, [], Weights(X)],
    ids=["function", "arrays", "empty", "no layer"],
)
@pytest.mark.parametrize("name", ["", "net"])
def test_a_model_without_layers_is_an_error(model, name):
    kind = type(model).__name__
    with pytest.raises(ValueError, match=f"no layer in this {kind}, .*monitor\\(value, name"):
        monitor_module(model, name)
