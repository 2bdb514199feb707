"""Tests that frozen layers normalise by their statistics, and change in no bit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import fold_pairs, freeze, recalibrate, reconfigure, trainable, unfreeze
from eqx_norm.strategies import Batch, Ema, Frozen
from tests.compiling import filter_jit
from tests.helpers import (
    call_and_grad,
    copy,
    floats,
    make,
    normal,
    over_batch,
    same,
    y_and_gradients,
)
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
        return y_and_gradients(call, x, x)

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


def test_layer_with_fixed_statistics_trains_its_weights_as_in_inference(trained):
    model, state, memory = trained
    fixed = eqx.nn.inference_mode(freeze(model, weights=False), False)
    dy = floats(normal(1, (8, 3, 1)))
    of_fixed = call_and_grad(fixed, copy(state), X, dy)
    assert same(of_fixed, call_and_grad(eqx.nn.inference_mode(model), copy(state), X, dy))
    assert same(of_fixed[1], state)
    after, new_state, memory, _ = step(fixed, copy(state), freeze(memory, weights=False), X)
    assert same(new_state, state)
    weights = [jax.tree.leaves(eqx.filter(m[1:3], eqx.is_array)) for m in (fixed, after)]
    assert all(not np.array_equal(old, new) for old, new in zip(*weights, strict=True))
    assert jax.tree.structure(unfreeze(memory)) == jax.tree.structure(trained[2])


class Scaled(Batch):
    """Has an array, as a user's strategy may."""

    scale: jax.Array = eqx.field(default_factory=lambda: jnp.ones(3))


def test_trainable_knows_which_arrays_of_a_frozen_layer_are_trained(trained):
    model, _, _ = trained
    fixed, frozen = (trainable(freeze(model, weights=weights)) for weights in (False, True))
    assert jax.tree.leaves(fixed) == jax.tree.leaves(trainable(model))
    assert not any(jax.tree.leaves(frozen[1:3]))
    layer, _ = make(3, "batch", approach=Scaled())
    fixed = trainable(freeze(layer, weights=False))
    assert (fixed.weight, fixed.bias, fixed.approach.strategy.scale) == (True, True, False)


def test_every_function_keeps_which_weights_are_frozen(trained):
    model, state, _ = trained
    fixed, frozen = freeze(model, weights=False), freeze(model)
    assert fixed[1].approach == Frozen(Batch(), weights=False) != frozen[1].approach
    assert same(fixed, model)  # a checkpoint consists of these leaves
    assert eqx.tree_equal(freeze(fixed), frozen)
    assert eqx.tree_equal(freeze(frozen, weights=False), fixed)
    assert eqx.tree_equal(unfreeze(fixed), model)
    for weights, layers in ((False, fixed), (True, frozen)):
        changed, _ = reconfigure(layers, state, momentum=0.5)
        assert changed[1].approach == Frozen(Batch(0.5), weights)
        changed, _ = reconfigure(layers, state, approach=Frozen(Ema(), not weights))
        assert changed[1].approach == Frozen(Ema(), not weights)
    fold_pairs(fixed, state, {"layers[0]": "layers[1]"})
    with pytest.raises(ValueError, match="holds no eqx_norm.BatchNorm that is not frozen"):
        recalibrate(fixed, state, [X])
