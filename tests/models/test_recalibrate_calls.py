"""Tests how `recalibrate` is called: by which forward, on which batches, and its errors."""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import _recalibrate, recalibrate
from eqx_norm.strategies import VarianceClip
from tests.helpers import (
    Cumulative,
    make,
    member,
    over_batch,
    remembered,
    same,
)
from tests.models.pooling import SIZES, STEP, cut, data, network, of_all


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(_recalibrate, "_step", STEP)


@pytest.fixture(scope="module")
def deep():
    return eqx.nn.make_with_state(network)(jax.random.key(0))


def first_only(model, state, batch):
    def call(x, state):
        return model.layers[1](x, state)

    return over_batch(call)(batch["image"], state)


def test_a_norm_that_is_not_called_keeps_its_memory(deep):
    model, state = deep
    x = data(3, 4)
    words = r"layers\[3\] was not called in training mode and keeps what it remembered"
    with pytest.warns(UserWarning, match=words):
        after = recalibrate(model, state, [{"image": b} for b in cut(x)], first_only)
    np.testing.assert_allclose(remembered(model.layers[1], after)[0], of_all(x)[1], rtol=1e-6)
    index = model.layers[3].memory_index
    assert same(after.get(index), state.get(index))


def test_a_forward_of_one_s_own_with_masks_over_two_axes():
    layer, state = make(3, ("batch", "views"), approach="batch")
    x = data(3, 4).reshape(10, 4, 3, 4)
    length = np.arange(40).reshape(10, 4) % 5

    def forward(model, state, batch):
        def call(x, length, state):
            return model(x, state, mask=jnp.arange(4) < length)

        views: Any = jax.vmap(call, (0, 0, None), (0, None), axis_name="views")
        examples = jax.vmap(views, (0, 0, None), (0, None), axis_name="batch")
        return examples(*batch, state)[1]  # the state alone

    batches = [(x[:6], length[:6]), (x[6:], length[6:])]
    with pytest.raises(ValueError, match="several axes.*forward=lambda model, state, batch"):
        recalibrate(layer, state, batches)
    after = recalibrate(layer, state, batches, forward)
    counted = (np.arange(4) < length[..., None]).reshape(-1)
    values = np.moveaxis(x, 2, 0).reshape(3, -1)[:, counted].astype(float)
    np.testing.assert_allclose(remembered(layer, after)[0], values.mean(1), rtol=1e-6)
    np.testing.assert_allclose(remembered(layer, after)[1], values.var(1), rtol=1e-6)


def test_an_ensemble():
    @eqx.filter_vmap
    def ensemble(key):
        return eqx.nn.make_with_state(network)(key)

    models, states = ensemble(jax.random.split(jax.random.key(0), 2))
    batches = cut(data(3, 4))

    def forward(models, states, x):
        def one(model, state):
            return over_batch(model)(x, state)

        return eqx.filter_vmap(one)(models, states)

    after = recalibrate(models, states, batches, forward)
    assert jax.tree.structure(after) == jax.tree.structure(states)
    for i in range(2):
        alone = recalibrate(member(models, i), member(states, i), batches)
        for ours, theirs in zip(*map(jax.tree.leaves, (member(after, i), alone)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_batches_may_be_tuples_and_a_generator(deep):
    model, state = deep
    batches = cut(data(3, 4))
    expected = recalibrate(model, state, batches)
    after = recalibrate(model, state, ((x, "label") for x in batches))
    assert same(after, expected)
    assert same(recalibrate(model, state, [[x.tolist()] for x in batches]), expected)


# What is given instead, and the error.
WRONG = [
    ({"batches": []}, ValueError("batches is empty")),
    ({"batches": [{"x": 1}]}, ValueError("yields a dict.*forward=lambda model, state, batch")),
    ({"batches": [3.0]}, ValueError("yields a float, which is neither an array nor a tuple")),
    ({"forward": lambda model, state, x: x}, ValueError("forward.*returned .*has to return")),
    ({"model": eqx.nn.Linear(3, 3, key=jax.random.key(0))}, ValueError("is not frozen")),
    ({"state": make(3, "batch", approach="batch")[1]}, ValueError("made for another model")),
]


@pytest.mark.parametrize(
    ("given", "error"), WRONG, ids=lambda v: "" if type(v) is dict else str(v)
)
def test_errors(deep, given, error):
    model, state = deep
    before = jax.tree.leaves(state)
    arguments = {"model": model, "state": state, "batches": cut(data(3, 4))} | given
    with pytest.raises(type(error), match=str(error)):
        recalibrate(**arguments)
    assert same(jax.tree.leaves(state), before)


@pytest.mark.parametrize("approach", [Cumulative(), VarianceClip(Cumulative())])
def test_a_strategy_that_cannot_load_is_an_error_before_any_data_is_read(approach):
    norms = [BatchNorm(3, "batch", approach=a) for a in ("batch", approach)]
    model, state = eqx.nn.make_with_state(network)(jax.random.key(0), *norms)
    batches = iter(cut(data(3, 4)))
    with pytest.raises(NotImplementedError, match=r"layers\[3\]: Cumulative cannot take over"):
        recalibrate(model, state, batches)
    assert len(list(batches)) == len(SIZES)


def test_a_strategy_that_loads_another_form_is_an_error():
    class Wrong(Cumulative):
        def load(self, learnt):
            return learnt.mean

    layer, state = make(3, "batch", approach=Wrong())
    with pytest.raises(ValueError, match="Wrong.load returned a memory of another structure"):
        recalibrate(layer, state, cut(data(3, 4)))


def test_the_bar(deep, capsys, monkeypatch):
    model, state = deep
    batches = cut(data(3, 4))
    recalibrate(model, state, batches, progress=True)
    assert "recalibrate: 100%" in capsys.readouterr().err
    for progress in (False, None):  # here stderr is no terminal
        recalibrate(model, state, batches, progress=progress)
        assert not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    recalibrate(model, state, batches)
    with pytest.raises(ImportError, match="progress=True: the bar is tqdm's"):
        recalibrate(model, state, batches, progress=True)
