"""Tests that frozen layers normalise by their statistics, and change in no bit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import freeze, trainable, unfreeze
from eqx_norm.strategies import Batch, Ema, Frozen
from tests.compiling import filter_jit
from tests.helpers import copy, floats, normal, over_batch, same
from tests.models.nested import donatable

X = floats(normal(0, (8, 3, 5), 2, 3))


def build(key):
    conv, last = (eqx.nn.Conv1d(3, 3, 3, key=key) for key in jax.random.split(key))
    first = BatchNorm(3, "batch", approach="batch", activation=eqx.nn.PReLU(0.25))
    return eqx.nn.Sequential([conv, first, BatchNorm(3, "batch", approach="ema"), last])


OPTIMISER = optax.adamw(1e-2, weight_decay=0.1, mask=trainable)


def start(model):
    return OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))


@filter_jit
def step(model, state, memory, x):
    def loss(model):
        y, after = over_batch(model)(x, state)
        return jnp.mean(jnp.square(y - 1)), after

    gradients, state = eqx.filter_grad(loss, has_aux=True)(model)
    weights = eqx.filter(model, eqx.is_inexact_array)
    updates, memory = OPTIMISER.update(gradients, memory, weights)
    return eqx.apply_updates(model, updates), state, memory, gradients


@pytest.fixture(scope="module")
def trained():
    """Returns model, state and optimiser state after a step, so that no value is 0 or 1."""
    model, state = eqx.nn.make_with_state(build)(jax.random.key(0))
    return step(model, state, start(model), X)[:3]


def test_training_steps_change_no_bit_of_frozen_layers(trained):
    model, state, _ = trained
    frozen, after = freeze(model), copy(state)
    memory = start(frozen)
    for inference in (True, False):  # frozen in either mode
        frozen = eqx.nn.inference_mode(frozen, inference)
        frozen, after, memory, gradients = step(frozen, after, memory, X)
        assert all(not np.any(g) for g in jax.tree.leaves(gradients.layers[1:3]))
    assert same((frozen.layers[1:3], after), (model.layers[1:3], state))
    assert not np.array_equal(model.layers[0].weight, frozen.layers[0].weight)


@pytest.mark.parametrize("case", ["training", "traced", "mask", "nan"])
def test_frozen_layer_equals_inference_to_the_bit(trained, case):
    model, state, _ = trained
    layer, frozen = model.layers[1], eqx.nn.inference_mode(freeze(model), False).layers[1]
    mask = np.arange(5) < 3 if case == "mask" else None
    inference = {"training": False, "traced": jnp.array(False)}.get(case)
    x = X.at[0].set(jnp.nan) if case == "nan" else X

    def run(layer, inference):
        # No axis is named: a frozen layer needs none.
        call = jax.vmap(lambda x: layer(x, copy(state), inference=inference, mask=mask)[0])
        y, back = jax.vjp(call, x)
        return y, back(y)

    run = filter_jit(run)
    assert same(run(frozen, inference), run(layer, True))
    _, after = frozen(x[0], state, inference=inference, mask=mask)
    assert after is state


def test_freeze_some_layers_and_unfreeze(trained):
    model, state, memory = trained
    some = freeze(model, lambda path, layer: isinstance(layer.approach, Ema))
    assert [n.approach for n in some.layers[1:3]] == [Batch(), Frozen(Ema())]
    both = freeze(some)  # nothing is frozen twice
    assert [n.approach for n in both.layers[1:3]] == [Frozen(Batch()), Frozen(Ema())]
    assert eqx.tree_equal(unfreeze(both, lambda path, layer: path == "layers[1]"), some)
    assert eqx.tree_equal(unfreeze(both), model)
    assert donatable((both, state))
    assert same(both, model)  # a checkpoint consists of these leaves
    assert unfreeze(eqx.nn.inference_mode(both)).layers[1].inference
    _, _, memory_after, _ = step(both, copy(state), freeze(memory), X)
    assert jax.tree.structure(unfreeze(memory_after)) == jax.tree.structure(memory)
