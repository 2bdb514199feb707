"""Tests that a reconfigured model equals a model made with these settings, and its outputs."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from eqx_norm.models import freeze, reconfigure, trainable
from eqx_norm.models._layers import entries
from eqx_norm.strategies import (
    Accumulated,
    Batch,
    Cumulative,
    Ema,
    Frozen,
    Moments,
    SmoothStart,
    VarianceClip,
)
from tests.documents import run
from tests.helpers import APPROACHES, Loading, normal, same
from tests.helpers import Cumulative as Unloaded
from tests.models.nested import OURS, C, call, donatable, made, shapes

UNOPTIMISED = True  # compares values: tests/compiling.py


def trained(approach: Any = "batch", members=0, steps=2) -> Any:
    def build(nn, key):
        return [nn.BatchNorm(C, "batch", approach=approach), {"row": LayerNorm(C)}]

    model, state = made(build, OURS, members=members)
    for step in range(steps):
        _, state = call(model, state, normal(step, (members, 8, C)[not members :], 3, 2))
    return model, state


def memory(model, state) -> Any:
    return state.get(model[0].memory_index).statistics


RUNNING: list[Any] = [*APPROACHES, VarianceClip(SmoothStart(0.9)), Frozen(Batch(0.9))]
ALL = [*RUNNING, Accumulated(Batch(0.9), 2), Cumulative(), Loading()]
PAIRS = [*zip(ALL, ALL[4:] + ALL[:4], strict=True)]
# Each pair in a trained ensemble; one also in one model, and one before any step.
CASES = [(*pair, 3, 2) for pair in PAIRS]
CASES += [(*PAIRS[2], 0, 2), (*PAIRS[5], 3, 0)]


@pytest.mark.parametrize(("old", "new", "members", "steps"), CASES, ids=str)
def test_reconfigured_model_equals_a_new_model_and_infers_as_before(old, new, members, steps):
    model, state = trained(old, members, steps)
    other, other_state = reconfigure(model, state, approach=new, eps=1e-3, values=64)
    expected: Any = trained(new, members, 0)
    if isinstance(new, str) and model[0].momentum is not None:  # kept
        expected = reconfigure(*expected, momentum=model[0].momentum)
    if isinstance(old, Frozen):  # stays frozen
        expected = freeze(expected[0]), expected[1]
    x = normal(9, (members, 8, C)[not members :], 3, 2)
    before, after = (
        call(eqx.nn.inference_mode(reconfigure(m, s, eps=1e-5)[0]), s, x)[0]
        for m, s in ((model, state), (other, other_state))
    )
    assert same(before, after)
    if old in RUNNING and new in RUNNING:
        assert same(memory(model, state).averages, memory(other, other_state).averages)
        if model[0].momentum == other[0].momentum:
            assert same(state, other_state)
    assert shapes((other, other_state)) == shapes(reconfigure(*expected, eps=1e-3))
    assert donatable((other, other_state))
    if not steps:
        assert same(entries(other_state), entries(expected[1]))


@pytest.mark.parametrize(
    ("approach", "momenta"),
    [("batch", (0.5, 0.999)), ("adam", (0.999, 0.5)), ("smooth_start", (0.9, 0.1, 0.99))],
)
def test_averages_follow_the_momentum_of_each_step(approach, momenta):
    """Tests PointNet's schedule: https://github.com/keras-team/keras/issues/12230"""
    layer, state = eqx.nn.make_with_state(BatchNorm)(C, "batch", approach=approach)
    h, w, x = np.zeros(C), 0.0, np.asarray(normal(0, (3, 4, 8, C), 3, 2), np.float64)
    for m, stage in zip(momenta, x, strict=False):
        layer, state = reconfigure(layer, state, momentum=m)
        for batch in stage:
            h, w = m * h + (1 - m) * batch.mean(0), m * w + (1 - m)
            _, state = call(layer, state, jnp.asarray(batch, jnp.float32))
            running = state.get(layer.memory_index).statistics
            np.testing.assert_allclose(running.mean, h / w, rtol=2e-6)
            np.testing.assert_allclose(running.weight(m), w, rtol=2e-6)


class Deviations(Batch):
    """Stores standard deviations in `Running`, as a user's strategy may."""

    def infer(self, memory):
        used = super().infer(memory)
        return Moments.of(used.mean_pair, used.variance**2)

    def load(self, learnt):
        return super().load(Moments.of(learnt.mean_pair, learnt.memory_variance**0.5))


@pytest.mark.parametrize("settings", [("batch", Deviations()), (Deviations(), "adam")], ids=str)
def test_memory_of_the_same_structure_and_another_meaning_is_loaded(settings):
    model, state = trained(settings[0])
    other, other_state = reconfigure(model, state, approach=settings[1])
    before, after = (
        m[0].approach.infer(memory(m, s)) for m, s in ((model, state), (other, other_state))
    )
    np.testing.assert_allclose(after.variance, before.variance, rtol=1e-6)
    np.testing.assert_array_equal(after.mean, before.mean)


def test_wrapped_strategy_keeps_its_memory_to_the_bit():
    """Fails if the memory of an unchanged strategy is loaded, which would lose counts."""
    for approach in (Cumulative(), Loading(), Unloaded()):
        model, state = trained(approach)
        wrapped = reconfigure(model, state, approach=lambda s: Accumulated(s, every=2))
        assert same(memory(*wrapped).remembered, memory(model, state))
        assert donatable(wrapped)
        back = reconfigure(*wrapped, approach=approach)
        assert eqx.tree_equal(back, (model, state))
        new = reconfigure(*trained(steps=0), approach=approach)  # needs no `load`
        assert same(memory(*new), memory(*trained(approach, steps=0)))


@pytest.mark.parametrize("new", [Batch(), Accumulated(Batch(), every=2)], ids=str)
def test_reconfiguring_accumulated_drops_pending_micro_batches(new):
    model, state = trained(Accumulated(Batch(), every=3), steps=5)
    other, other_state = reconfigure(model, state, approach=new)
    assert other_state.get(other[0].memory_index).accepted == 1
    learnt = memory(other, other_state)
    running = getattr(learnt, "remembered", learnt)
    assert same(running, memory(model, state).remembered)
    assert running is learnt or learnt.batches == 0


def test_momentum_of_a_reconfigured_layer_is_that_of_its_strategy():
    model, state = trained("variance_clip")
    slow, _ = reconfigure(model, state, momentum=0.9)
    assert (slow[0].momentum, slow[0].approach) == (0.9, VarianceClip(Batch(0.9)))
    cases: list[Any] = [
        ({"approach": "ema", "momentum": 0.5}, Ema(0.5)),
        ({"approach": Loading(), "values": 9}, Loading()),
        ({"approach": lambda s: Accumulated(s.strategy, 2)}, Accumulated(Batch(0.9), 2)),
        ({"approach": Frozen(Batch(0.5)), "momentum": 0.8}, Frozen(Batch(0.8))),
    ]
    for settings, expected in cases:
        other, _ = reconfigure(slow, state, **settings)
        assert other[0].approach == expected
        assert other[0].momentum == getattr(expected, "momentum", None)
        frozen, _ = reconfigure(freeze(slow), state, **settings)  # stays frozen
        assert eqx.tree_equal(frozen, freeze(other))


def test_reconfigure_other_settings_of_layers_chosen_by_where():
    model, state = trained()
    settings = {"unbiased": True, "axis_name": ["batch", "devices"]}
    other, after = reconfigure(model, state, activation=jax.nn.relu, **settings)
    batch, row = other[0], other[1]["row"]
    assert (batch.unbiased, batch.axis_name) == (True, ("batch", "devices"))
    assert row.activation(-1.0) == batch.activation(-1.0) == 0
    assert (batch.weight is model[0].weight) & (row.bias is model[1]["row"].bias)
    assert same(state, after)
    other, _ = reconfigure(model, state, lambda path, n: isinstance(n, LayerNorm), eps=0.1)
    assert (other[0], other[1]["row"].eps) == (model[0], 0.1)
    others, _ = reconfigure([RMSNorm(C), GroupNorm(1, C)], state, implementation="xla", eps=0.1)
    assert [(layer.implementation, layer.eps) for layer in others] == [("xla", 0.1)] * 2


OPTIMISERS = {
    "adam": optax.adam(0.1),
    "accumulated": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
    "masked": optax.masked(optax.adam(0.1), trainable),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("wrap", [None, freeze], ids=["plain", "frozen"])
def test_optimiser_memory_and_gradient_follow_a_reconfigured_model(name, wrap):
    """Tests that a step after `reconfigure` has the numbers of a step without it."""
    optimiser, (model, state) = OPTIMISERS[name], trained()
    model = model if wrap is None else wrap(model)
    weights = eqx.filter(model, eqx.is_inexact_array)
    gradient = jax.tree.map(jnp.ones_like, weights)
    _, memory = optimiser.update(gradient, optimiser.init(weights), weights)
    settings: Any = {
        "approach": lambda old: Accumulated(old, every=2),
        "axis_name": ("batch", "devices"),
        "activation": jax.nn.relu,
        "momentum": 0.5,
        "unbiased": True,
        "eps": 1e-3,
    }
    other, other_state = reconfigure(model, state, **settings)
    (changed, none), (other_gradient, _) = (
        reconfigure(tree, **settings) for tree in (memory, gradient)
    )
    other_weights = eqx.filter(other, eqx.is_inexact_array)
    assert none is None
    assert same(changed, memory)
    assert jax.tree.structure(changed) == jax.tree.structure(optimiser.init(other_weights))
    expected, _ = optimiser.update(gradient, memory, weights)
    updates, changed = optimiser.update(other_gradient, changed, other_weights)
    assert same(updates, expected)
    assert shapes(eqx.apply_updates(other, updates)) == shapes(other)
    # With the state, the memory's layers are changed likewise, and the model needs its state.
    again, again_state = reconfigure(memory, state, **settings)
    assert jax.tree.structure(again) == jax.tree.structure(reconfigure(memory, **settings)[0])
    assert same(again_state, other_state)
    with pytest.raises(ValueError, match=r"^The state is missing, .* of \[0\]\. Pass it after"):
        reconfigure(model, **settings)


def test_optimiser_memory_follows_a_new_weight_offset_by_its_structure(tmp_path):
    """Runs the fix in the error: moments of a weight do not change with its offset."""
    optimiser, (model, state) = optax.adam(0.1), trained()
    weights = eqx.filter(model, eqx.is_inexact_array)
    _, memory = optimiser.update(weights, optimiser.init(weights))
    with pytest.raises(ValueError, match="^weight_offset=, and an activation=") as raised:
        reconfigure(memory, weight_offset=1.0)
    model, state = reconfigure(model, state, weight_offset=1.0)
    like, fix = re.findall(r"like = (.*), after .* old one: (.*)\.$", str(raised.value))[0]
    names = {"jax": jax, "eqx": eqx, "optimiser": optimiser, "model": model, "memory": memory}
    after = run(f"like = {like}\nmemory = {fix}", tmp_path, **names)["memory"]
    assert same(after, memory)
    optimiser.update(eqx.filter(model, eqx.is_inexact_array), after)


def test_layers_without_statistics_are_reconfigured_without_the_state_of_others():
    model, _ = trained()
    other, state = reconfigure(model, None, lambda path, n: isinstance(n, LayerNorm), eps=0.1)
    assert (other[0], other[1]["row"].eps, state) == (model[0], 0.1, None)


class Doubled(BatchNorm):
    factor: int = 2


def test_reconfigured_and_frozen_subclass_keeps_its_class():
    make: Any = eqx.nn.make_with_state(Doubled)
    layer, _ = reconfigure(*make(C, "batch", mode="batch"), approach="ema", eps=1e-3)
    assert (type(freeze(layer)), layer.factor, layer.eps) == (Doubled, 2, 1e-3)
