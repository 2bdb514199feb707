"""Tests that frozen layers normalise by what they remember and change in no bit."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqx_norm import BatchNorm
from eqx_norm.models import FrozenBatchNorm, freeze, trainable, unfreeze
from eqx_norm.models._layers import found
from tests.compiling import filter_jit
from tests.helpers import (
    copy,
    example,
    floats,
    make,
    member,
    normal,
    over_batch,
    quick_call,
    same,
)

X = floats(normal(0, (8, 3, 5), 2, 3))


def build(key):
    conv, last = (eqx.nn.Conv1d(3, 3, 3, key=k) for k in jax.random.split(key))
    prelu = eqx.nn.PReLU(0.25)
    first = BatchNorm(3, "batch", approach="batch", activation=prelu)
    return eqx.nn.Sequential([conv, first, BatchNorm(3, "batch", approach="ema"), last])


PLAIN = optax.adamw(1e-2, weight_decay=0.0)
DECAYING = optax.adamw(1e-2, weight_decay=0.1)
MASKED_DECAY = optax.adamw(1e-2, weight_decay=0.1, mask=trainable)


def start(optimiser, model):
    return optimiser.init(eqx.filter(model, eqx.is_inexact_array))


def one_step(optimiser, model, state, memory, x):
    def loss(model):
        y, after = over_batch(model)(x, state)
        return jnp.mean(jnp.square(y - 1)), after

    gradients, state = eqx.filter_grad(loss, has_aux=True)(model)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes dtypes
        updates, memory = optimiser.update(gradients, memory, parameters)
    return eqx.apply_updates(model, updates), state, memory, gradients


step, step_as_users_do = filter_jit(one_step), eqx.filter_jit(one_step)


@pytest.fixture(scope="module")
def trained():
    """A model after three steps, so that nothing in it is 0 or 1, with its state."""
    model, state = eqx.nn.make_with_state(build)(jax.random.key(0))
    memory = start(PLAIN, model)
    for _ in range(3):
        model, state, memory, _ = step(PLAIN, model, state, memory, X)
    return model, state, memory


def test_100_steps_change_no_bit(trained):
    model, state, _ = trained
    frozen = freeze(model)
    memory = start(PLAIN, frozen)
    new, after, gradients = frozen, copy(state), model
    for i in range(100):
        new = eqx.nn.inference_mode(new, False)  # it is frozen whatever this says
        new, after, memory, gradients = step_as_users_do(PLAIN, new, after, memory, X + 0.1 * i)
    assert same(new.layers[1:3], frozen.layers[1:3])
    assert same(after, state)
    assert all(not np.any(g) for g in jax.tree.leaves(gradients.layers[1:3]))
    for before, now in zip(model.layers[::3], new.layers[::3], strict=True):
        assert not np.array_equal(before.weight, now.weight)
    # And this is not because nothing ever changes.
    thawed, after, *_ = step(PLAIN, unfreeze(new), after, unfreeze(memory), X)
    assert not same(thawed.layers[1], new.layers[1])
    assert not same(after, state)


@pytest.mark.parametrize(("optimiser", "stays"), [(MASKED_DECAY, True), (DECAYING, False)])
def test_trainable_keeps_weight_decay_off(trained, optimiser, stays):
    """Without it weight decay moves what is frozen, as the docstring says."""
    frozen = freeze(trained[0])
    new, *_ = step(optimiser, frozen, copy(trained[1]), start(optimiser, frozen), X)
    assert same(new.layers[1:3], frozen.layers[1:3]) == stays


def test_trainable_keeps_the_momentum_of_earlier_steps_off(trained):
    """What the optimiser remembers has the model's structure, and is frozen with it."""
    model, state, memory = trained
    frozen = freeze(model)
    moved, *_ = step(PLAIN, frozen, copy(state), freeze(memory), X)
    assert not same(moved.layers[1], frozen.layers[1])
    masked = optax.masked(PLAIN, trainable)
    kept, *_ = step(masked, frozen, copy(state), start(masked, frozen), X)
    assert same(kept.layers[1:3], frozen.layers[1:3])
    assert not same(kept.layers[0], frozen.layers[0])


def test_a_partition_by_what_is_trainable(trained):
    frozen = freeze(trained[0])
    differentiated, rest = eqx.partition(frozen, trainable(frozen))
    assert not jax.tree.leaves(differentiated.layers[1:3])
    assert len(jax.tree.leaves(differentiated)) == 4
    assert same(eqx.combine(differentiated, rest), frozen)


def test_what_is_trainable(trained):
    frozen = freeze(trained[0], lambda path, layer: path == "layers[1]")
    is_trained = trainable(frozen)
    assert jax.tree.structure(is_trained) == jax.tree.structure(frozen)
    assert not any(jax.tree.leaves(is_trained.layers[1]))
    assert is_trained.layers[2].weight is is_trained.layers[0].bias is True
    assert is_trained.layers[2].inference is False
    arrays = eqx.filter(frozen, eqx.is_inexact_array)
    assert jax.tree.structure(trainable(arrays)) == jax.tree.structure(arrays)


@pytest.mark.parametrize("call", ["plain", "training", "traced", "mask", "nan", "op by op"])
def test_it_is_inference_to_the_bit(trained, call):
    model, state, _ = trained
    layer, frozen = model.layers[1], eqx.nn.inference_mode(freeze(model), False).layers[1]
    mask = np.arange(5) < 3 if call == "mask" else None
    given = {"training": False, "traced": jnp.array(False)}.get(call)
    x = X.at[0].set(jnp.nan) if call == "nan" else X

    def run(layer, inference):
        # No axis is named: a frozen layer needs none.
        call = jax.vmap(lambda x: layer(x, copy(state), inference=inference, mask=mask)[0])
        y, back = jax.vjp(call, x)
        return y, back(y)

    compiled = {"op by op": lambda f: f, "plain": eqx.filter_jit}.get(call, filter_jit)
    run = compiled(run)
    assert same(run(frozen, given), run(layer, True))
    _, after = frozen(x[0], state, inference=given, mask=mask)
    assert after is state
    assert same(after, trained[1])


def test_only_some_and_the_way_back(trained):
    model = trained[0]
    some = freeze(model, lambda path, layer: type(layer.approach).__name__ == "Ema")
    assert [type(layer) for layer in some.layers[1:3]] == [BatchNorm, FrozenBatchNorm]
    both = freeze(some)
    assert list(found(both, FrozenBatchNorm)) == ["layers[1]", "layers[2]"]
    assert isinstance(both.layers[1], eqx.nn.BatchNorm)
    first = unfreeze(both, lambda path, layer: path == "layers[1]")
    assert jax.tree.structure(first) == jax.tree.structure(some)
    back = unfreeze(both)
    assert jax.tree.structure(back) == jax.tree.structure(model)
    assert same(back, model)
    assert unfreeze(eqx.nn.inference_mode(both)).layers[1].inference


@pytest.mark.parametrize("frozen_first", [True, False])
def test_checkpoints_are_read_into_each_other(trained, frozen_first, tmp_path):
    model, state, _ = trained
    saved, other = (freeze(model), model) if frozen_first else (model, freeze(model))
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", (saved, state))
    blank = jax.tree.map(lambda a: jnp.zeros_like(a) if eqx.is_array(a) else a, (other, state))
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", blank)
    assert same(loaded, (other, state))
    assert jax.tree.structure(loaded) == jax.tree.structure((other, state))


def test_an_ensemble():
    keys = jax.random.split(jax.random.key(1), 2)
    models, states = eqx.filter_vmap(eqx.nn.make_with_state(build))(keys)

    states = jax.tree.map(lambda a: a + 0.5 if eqx.is_inexact_array(a) else a, states)

    @filter_jit
    def all_of(models, states):
        return eqx.filter_vmap(lambda model, state: over_batch(model)(X, state))(models, states)

    y, after = all_of(freeze(models), copy(states))
    assert same(after, states)
    for i in range(2):
        one = eqx.nn.inference_mode(member(models, i))
        expected, _ = quick_call(one, member(states, i), X)
        np.testing.assert_allclose(member(y, i), expected, rtol=1e-5, atol=1e-5)


leaf = st.sampled_from(["norm", "ema", "linear", "number"])
nested = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(st.just(eqx.nn.Sequential), st.lists(inner, max_size=3)),
    ),
    max_leaves=8,
)


def model_of(node) -> Any:
    if node in ("norm", "ema"):
        return BatchNorm(2, "batch", approach="ema" if node == "ema" else "batch")
    if node == "linear":
        return eqx.nn.Linear(2, 2, key=jax.random.key(0))
    if isinstance(node, tuple) and node and node[0] is eqx.nn.Sequential:
        return eqx.nn.Sequential([model_of(inner) for inner in node[1]])
    if isinstance(node, list | tuple):
        return type(node)(model_of(inner) for inner in node)
    if isinstance(node, dict):
        return {name: model_of(inner) for name, inner in node.items()}
    return 3.0


@settings(max_examples=20)
@given(nested)
def test_however_nested(node):
    model, state = eqx.nn.make_with_state(model_of)(node)
    norms = found(model, BatchNorm)
    if not norms:
        with pytest.raises(ValueError, match="holds no eqx_norm BatchNorm"):
            freeze(model)
        return
    frozen = freeze(model)
    assert list(found(frozen, FrozenBatchNorm)) == list(norms)
    assert same(jax.tree.leaves(frozen), jax.tree.leaves(model))
    assert jax.tree.structure(unfreeze(frozen)) == jax.tree.structure(model)
    first = next(iter(norms))
    assert list(found(freeze(model, lambda p, layer: p == first), FrozenBatchNorm)) == [first]
    for layer in found(frozen, FrozenBatchNorm).values():
        _, after = layer(jnp.ones(2), state)
        assert after is state


class Noisy(BatchNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def __call__(self, x, state, **kwargs):
        return super().__call__(x + 1, state, **kwargs)


def test_errors(trained):
    model = trained[0]
    with pytest.raises(ValueError, match=r"where= took none of layers\[1\], layers\[2\]"):
        freeze(model, lambda path, layer: False)
    with pytest.raises(ValueError, match="nothing to unfreeze: .*holds no eqx_norm Frozen"):
        unfreeze(model)
    with pytest.raises(ValueError, match="nothing to freeze: .*holds no eqx_norm BatchNorm"):
        freeze(model.layers[0])
    noisy, _ = eqx.nn.make_with_state(lambda: [Noisy(3, "batch", approach="batch")])()
    with pytest.raises(ValueError, match=r"\[0\] is a Noisy, .*methods of its own"):
        freeze(noisy)


def test_a_layer_by_itself():
    layer, state = make(3, "batch", approach="batch")
    frozen = freeze(layer)
    assert type(frozen) is FrozenBatchNorm
    y, _ = frozen(X[0], state)
    np.testing.assert_allclose(y, X[0], rtol=1e-5)  # untrained: the identity but for eps


def test_example():
    names = example(freeze)
    assert found(names["some"], FrozenBatchNorm)
