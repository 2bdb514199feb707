"""Tests strategies of the user's own: what they are given, and the errors for wrong answers."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import AbstractStrategy, Moments, Running, VarianceClip
from tests.helpers import Cumulative, copy, f32, make, normal, over_batch
from tests.helpers import quick_call as call

C = 3
X = normal(0, (6, C, 4), 1, 2)


def test_the_example_of_the_contract():
    layer, state = make(C, "batch", approach=Cumulative())
    batches = [normal(seed, (n, C, 2), seed, 2) for seed, n in enumerate((6, 4, 9))]
    inference = eqx.nn.inference_mode(layer)
    np.testing.assert_allclose(call(inference, copy(state), X)[0], X, rtol=1e-5)
    for x in batches:
        _, state = call(layer, state, x)
    values = np.concatenate(batches)
    mean, std = (f(values, axis=(0, 2))[:, None] for f in (np.mean, np.std))
    np.testing.assert_allclose(call(inference, state, X)[0], (X - mean) / std, atol=1e-4)


class Told(Cumulative):
    """Normalises by what it is told."""

    def update(self, batch, memory):
        assert batch.eps == 0.25
        assert type(batch.merge(memory)) is type(batch.towards(memory, 0.5)) is Moments
        assert type(batch.astype(jnp.float32)) is Moments
        again = dataclasses.replace(batch, m2=0 * batch.m2)
        step = again.step.astype(batch.m2.dtype) * jnp.ones_like(batch.m2)
        return Moments.of(step, jnp.ones_like(step)), memory


def test_a_strategy_is_told_eps_and_the_step():
    layer, state = make(C, "batch", eps=0.25, approach=Told())
    steps = []
    for x in (X, X, X.at[0].set(jnp.nan), X):  # a batch that is not remembered does not count
        y, state = call(layer, state, x)
        steps.append(np.nanmax(np.round(np.asarray(x - y * f32(1.25**0.5)), 3)))
    np.testing.assert_array_equal(steps, [0, 1, 2, 2])
    assert state.get(layer.memory_index).accepted == 3
    _, after = call(eqx.nn.inference_mode(layer), copy(state), X)
    assert after.get(layer.memory_index).accepted == 3


class Last(Told):
    """Remembers the batch itself."""

    def update(self, batch, memory):
        return batch, batch


@pytest.mark.parametrize("approach", [Last(), VarianceClip(Last(), start=1)], ids=repr)
def test_the_batch_itself_can_be_remembered(approach):
    layer, state = make(C, "batch", approach=approach)
    for scale in (1, 2):
        y, state = call(layer, state, scale * X)
    assert type(state.get(layer.memory_index).statistics) is Moments
    inferred, _ = call(eqx.nn.inference_mode(layer), state, 2 * X)
    np.testing.assert_allclose(inferred, y, rtol=1e-6, atol=1e-6)


class Answers(AbstractStrategy[Running]):
    """Answers with what it was made with."""

    training: str = eqx.field(default="(batch, memory)", static=True)
    inference_: str = eqx.field(default="memory.moments", static=True)

    def init(self, channels, dtype):
        return Running.empty(channels, dtype)

    def update(self, batch, memory):
        return eval(self.training)

    def infer(self, memory):
        return eval(self.inference_)


NO_MOMENTS = "before the memory, {}, but the layer normalises by Moments"
HALVES = "jax.tree.map(lambda a: a.astype(jnp.float16), memory)"
TRAINING = {
    "None": r"Answers\.update returned nothing \(None\), but a training step needs two things"
    r".*return used, memory",
    "batch": r"update returned TrainingBatch.*needs two things",
    "(batch, memory, 3)": r"update returned a tuple of 3, \(TrainingBatch.*needs two things",
    "(None, memory)": NO_MOMENTS.format(r"nothing \(None\)")
    + r".*Moments\.of\(mean, variance\)",
    "(memory, batch)": r"before the memory, Running\(.*Return the \.moments of this",
    "(batch.mean, memory)": NO_MOMENTS.format(r"an array, f\d\d\[3\]"),
    "(Moments.of(batch.mean[:2], batch.variance[:2]), memory)": r"mean of shape \(2,\).*"
    r"m2 of shape \(2,\), but this layer has 3 channels",
    "(batch, None)": r"Answers\.update returned a memory of another structure"
    r".*averages=Pair\(parts=f\d\d\[2,2,3\]",
    f"(batch, {HALVES})": r"returned a memory of another structure, shape or dtype"
    r".*averages=Pair\(parts=f16\[2,2,3\].*it was given.*averages=Pair\(parts=f\d\d\[2,2,3\]",
}
INFERENCE = {
    "memory": r"Answers\.infer returned Running\(.*Return the \.moments of this",
    "None": r"infer returned nothing \(None\), but the layer normalises by Moments",
    "(memory.mean, memory.variance)": r"infer returned a tuple of 2",
}
WRONG = [(Answers(answer), False, words) for answer, words in TRAINING.items()]
WRONG += [(Answers(inference_=answer), True, words) for answer, words in INFERENCE.items()]


@pytest.mark.parametrize(("approach", "inference", "words"), WRONG, ids=str)
def test_a_wrong_answer(approach, inference, words):
    wrong, state = make(C, "batch", approach=approach, inference=inference)
    batch, _ = make(C, "batch", approach="batch")

    def fail_then_succeed(x, state):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            wrong(x, state)
        return batch(x, state)  # the state is not used up

    jax.eval_shape(over_batch(fail_then_succeed), X, state)
