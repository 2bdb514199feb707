"""Tests that frozen layers normalise by what they remember and change in no bit."""

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from eqx_norm import BatchNorm
from eqx_norm.models import freeze, trainable, unfreeze
from eqx_norm.models._layers import each, found
from eqx_norm.strategies import Batch, Ema, Frozen
from tests.compiling import filter_jit
from tests.helpers import copy, example, floats, normal, over_batch, quick_call, same
from tests.models.nested import OURS, C, call, descriptions, made

X = floats(normal(0, (8, 3, 5), 2, 3))


def build(key):
    conv, last = (eqx.nn.Conv1d(3, 3, 3, key=key) for key in jax.random.split(key))
    first = BatchNorm(3, "batch", approach="batch", activation=eqx.nn.PReLU(0.25))
    return eqx.nn.Sequential([conv, first, BatchNorm(3, "batch", approach="ema"), last])


def frozen_norms(model):
    return [path for path, n in found(model, BatchNorm).items() if not n.approach.learns]


PLAIN = optax.adamw(1e-2, weight_decay=0.0)


def start(optimiser, model):
    return optimiser.init(eqx.filter(model, eqx.is_inexact_array))


def one_step(optimiser, model, state, memory, x):
    def loss(model):
        y, after = over_batch(model)(x, state)
        return jnp.mean(jnp.square(y - 1)), after

    gradients, state = eqx.filter_grad(loss, has_aux=True)(model)
    updates, memory = optimiser.update(
        gradients, memory, eqx.filter(model, eqx.is_inexact_array)
    )
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


def test_30_steps_change_no_bit(trained):
    model, state, _ = trained
    new, after, gradients = freeze(model), copy(state), model
    memory = start(PLAIN, new)
    for i in range(30):
        new = eqx.nn.inference_mode(new, False)  # it is frozen whatever this says
        new, after, memory, gradients = step_as_users_do(PLAIN, new, after, memory, X + 0.1 * i)
    assert same((new.layers[1:3], after), (model.layers[1:3], state))
    assert all(not np.any(g) for g in jax.tree.leaves(gradients.layers[1:3]))
    for i in (0, 3):
        assert not np.array_equal(model.layers[i].weight, new.layers[i].weight)
    # And this is not because nothing ever changes.
    thawed, later, *_ = step(PLAIN, unfreeze(new), copy(after), unfreeze(memory), X)
    assert not same(thawed.layers[1], new.layers[1])
    assert not same(later, after)


# Whether what the optimiser remembers is of before, and whether what is frozen stays.
CASES = {
    "masked weight decay": (optax.adamw(1e-2, weight_decay=0.1, mask=trainable), False, True),
    "weight decay moves it": (optax.adamw(1e-2, weight_decay=0.1), False, False),
    "so does what is remembered": (PLAIN, True, False),
    "masked": (optax.masked(PLAIN, trainable), False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_trainable_keeps_the_optimiser_off(trained, case):
    model, state, memory = trained
    optimiser, goes_on, stays = CASES[case]
    frozen = freeze(model)
    memory = freeze(memory) if goes_on else start(optimiser, frozen)
    new, *_ = step(optimiser, frozen, copy(state), memory, X)
    assert same(new.layers[1:3], frozen.layers[1:3]) == stays
    assert not same(new.layers[0], frozen.layers[0])


def test_what_is_trainable(trained):
    frozen = freeze(trained[0], lambda path, layer: path == "layers[1]")
    is_trained = trainable(frozen)
    assert jax.tree.structure(is_trained) == jax.tree.structure(frozen)
    assert not any(jax.tree.leaves(is_trained.layers[1]))
    assert is_trained.layers[2].weight is is_trained.layers[0].bias is True
    arrays = eqx.filter(frozen, eqx.is_inexact_array)
    assert jax.tree.structure(trainable(arrays)) == jax.tree.structure(arrays)
    differentiated, rest = eqx.partition(frozen, is_trained)
    assert not jax.tree.leaves(differentiated.layers[1])
    assert len(jax.tree.leaves(differentiated)) == 6
    assert eqx.tree_equal(eqx.combine(differentiated, rest), frozen)


@pytest.mark.parametrize("how", ["plain", "training", "traced", "mask", "nan", "op by op"])
def test_it_is_inference_to_the_bit(trained, how):
    model, state, _ = trained
    layer, frozen = model.layers[1], eqx.nn.inference_mode(freeze(model), False).layers[1]
    mask = np.arange(5) < 3 if how == "mask" else None
    given = {"training": False, "traced": jnp.array(False)}.get(how)
    x = X.at[0].set(jnp.nan) if how == "nan" else X

    def run(layer, inference):
        # No axis is named: a frozen layer needs none.
        call = jax.vmap(lambda x: layer(x, copy(state), inference=inference, mask=mask)[0])
        y, back = jax.vjp(call, x)
        return y, back(y)

    run = {"op by op": lambda f: f, "plain": eqx.filter_jit}.get(how, filter_jit)(run)
    assert same(run(frozen, given), run(layer, True))
    _, after = frozen(x[0], state, inference=given, mask=mask)
    assert after is state


def test_only_some_and_the_way_back(trained):
    model = trained[0]
    some = freeze(model, lambda path, layer: isinstance(layer.approach, Ema))
    assert [n.approach for n in some.layers[1:3]] == [Batch(), Frozen(Ema())]
    both = freeze(some)  # nothing is frozen twice
    assert [n.approach for n in both.layers[1:3]] == [Frozen(Batch()), Frozen(Ema())]
    assert eqx.tree_equal(unfreeze(both, lambda path, layer: path == "layers[1]"), some)
    assert eqx.tree_equal(unfreeze(both), model)
    assert unfreeze(eqx.nn.inference_mode(both)).layers[1].inference


def test_checkpoints_are_read_into_each_other(trained, tmp_path):
    model, state, _ = trained
    for saved, other in ((freeze(model), model), (model, freeze(model))):
        eqx.tree_serialise_leaves(tmp_path / "model.eqx", (saved, state))
        blank = jax.tree.map(lambda a: a * 0 if eqx.is_array(a) else a, (other, state))
        loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", blank)
        assert eqx.tree_equal(loaded, (other, state))


@hypothesis.given(descriptions, st.sampled_from([0, 2]))
@hypothesis.settings(max_examples=10)
def test_however_nested(description, members):
    model, state = made(description, OURS, members)
    paths = list(found(model, BatchNorm))
    hypothesis.assume(paths)
    model = eqx.nn.inference_mode(model, False)
    frozen = freeze(model)
    assert frozen_norms(frozen) == paths
    assert jax.tree.structure(unfreeze(frozen)) == jax.tree.structure(model)
    assert frozen_norms(freeze(model, lambda path, _: path == paths[0])) == paths[:1]
    x = normal(0, (members, 8, C) if members else (8, C))
    y, after = call(frozen, copy(state), x)
    inferring = each(model, BatchNorm, lambda _, norm: eqx.nn.inference_mode(norm))
    assert same((y, after), call(inferring, state, x))


class Shifted(BatchNorm):
    """Is a user's subclass, with a field, a signature and a call of its own."""

    by: float

    def __init__(self, by):
        super().__init__(3, "batch", approach="batch")
        self.by = by

    def __call__(self, x, state, **kwargs):
        return super().__call__(x + self.by, state, **kwargs)


def test_a_subclass_keeps_its_methods():
    layer, state = eqx.nn.make_with_state(Shifted)(2.0)
    _, state = quick_call(layer, state, X)
    y, after = quick_call(freeze(layer), copy(state), X)
    assert same((y, after), (quick_call(eqx.nn.inference_mode(layer), state, X)[0], state))
    assert not same(y, quick_call(freeze(layer), state, X - 2)[0])


def test_errors_and_the_example_in_the_docstring(trained):
    model = trained[0]
    with pytest.raises(ValueError, match=r"where= took none of layers\[1\], layers\[2\]"):
        freeze(model, lambda path, layer: False)
    with pytest.raises(ValueError, match="nothing to unfreeze: .*holds no frozen BatchNorm"):
        unfreeze(model)
    with pytest.raises(ValueError, match="nothing to freeze: .*holds no eqx_norm.BatchNorm"):
        freeze(model.layers[0])
    assert frozen_norms(example(freeze, **globals(), model=model)["model"]) == ["layers[1]"]
