"""Tests the contract of all strategies, and how the layer uses and checks a user's strategy."""

import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import strategies
from eqx_norm.strategies import (
    NAMED,
    AbstractStrategy,
    Accumulated,
    Average,
    Batch,
    Frozen,
    Moments,
    Ramp,
    Renorm,
    Running,
    VarianceClip,
)
from tests.helpers import Cumulative, at_step, copy, f32, floats, make, normal, over_batch
from tests.helpers import quick_call as call

UNOPTIMISED = True  # compares values: tests/compiling.py

C = 3
X = normal(0, (6, C, 4), 1, 2)
ALL = [*(made(0.9) for made in NAMED.values()), Average(), strategies.Cumulative()]
ALL += [Accumulated(Batch(), 2), Frozen(Batch()), Cumulative()]
each_strategy = pytest.mark.parametrize("strategy", ALL, ids=repr)
LEARNT = Moments.of(floats([3, 0, -1]), floats([4, 1, 0]), 1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def update(strategy, batch, memory):
    """Fails for a memory with one array in two leaves, which a user cannot donate:
    https://github.com/liesel-devs/liesel/issues/272"""
    return strategy.update(at_step(0, batch), memory)


@each_strategy
def test_strategy_contract(strategy):
    """Checks, too, that loaded statistics are not debiased, and stay after an equal batch."""
    memory = strategy.init(C, float)
    identity = strategy.infer(memory)
    assert (identity.mean.tolist(), identity.variance.tolist()) == ([0] * C, [1] * C)
    used, after = update(strategy, LEARNT, strategy.init(C, float))
    assert isinstance(used, Moments)
    assert jax.eval_shape(lambda: after) == jax.eval_shape(lambda: memory)
    update(strategy, LEARNT, after)
    if isinstance(strategy, Cumulative):
        with pytest.raises(NotImplementedError, match="Cumulative cannot take over.*`load"):
            strategy.load(LEARNT)
        return
    loaded = strategy.load(LEARNT)
    for memory in (loaded, update(strategy, LEARNT, jax.tree.map(jnp.copy, loaded))[1]):
        inferred = strategy.infer(memory)
        np.testing.assert_array_equal(inferred.mean, LEARNT.mean)
        np.testing.assert_array_equal(inferred.variance, LEARNT.variance)
        # Averages of states may multiply a leaf by 0, so all leaves are finite.
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(memory))


@each_strategy
def test_untrained_memory_counts_as_mean_0_and_variance_1_in_averages(strategy):
    """Averages states from the first step on, or of clients, which starts from variance 1:
    https://github.com/pytorch/ignite/issues/2590, https://github.com/TsingZ0/PFLlib/issues/260
    """
    empty = strategy.init(C, float)
    _, memory = update(strategy, LEARNT, strategy.init(C, float))
    averaged = jax.tree.map(
        lambda a, b: 0.999 * a + 0.001 * b if eqx.is_inexact_array(a) else a, empty, memory
    )
    inferred, trained = strategy.infer(averaged), strategy.infer(memory)
    np.testing.assert_allclose(inferred.mean, 0.001 * trained.mean, rtol=1e-6)
    running = 0.999 + 0.001 * trained.variance  # as in PyTorch
    if isinstance(strategy, strategies.Cumulative | Cumulative):  # counts are weights
        running = trained.variance
    np.testing.assert_allclose(inferred.variance, running, rtol=1e-6)


@each_strategy
def test_infer_takes_the_memory_of_an_ensemble(strategy):
    """Uses as many members as channels."""
    memories = [strategy.init(C, float)]
    for scale in (1, 2):
        batch = Moments(floats(7), floats([3, 0, scale]), floats([scale, 1, 0]))
        memories.append(update(strategy, batch, strategy.init(C, float))[1])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    for infer in (strategy.infer, jax.vmap(strategy.infer)):
        inferred = infer(stacked)
        for i, memory in enumerate(memories):
            expected = strategy.infer(memory)
            np.testing.assert_array_equal(inferred.mean[i], expected.mean)
            np.testing.assert_array_equal(inferred.variance[i], expected.variance)


def half(step):
    return 0.5


# The function, its argument, values that are refused, and the reason.
NUMBERS: list[Any] = [
    (
        Batch,
        "momentum",
        (0.0, 1.0, -0.5, 99.0, float("nan"), None, "0.9", True),
        "the weight of the past .* strictly between 0 and 1",
    ),
    (VarianceClip, "ratio", (1.0, None), "must be a number greater than 1"),
    (VarianceClip, "start", (0, 1.5, True), "after 1 batch at the earliest; give an int"),
    (Accumulated, "every", (0, 2.5, True), "number of micro-batches .* int of 1 or more"),
    (Renorm, "r_max", (0.5, jnp.nan, "3", Ramp(0, 3, 1, 9)), "it bounds .* 1 or more"),
    (Renorm, "r_max", (half,), "it bounds .* or a function .* It gives 0.5"),
    (Renorm, "d_max", (-1.0, True, Ramp(5, -5, 1, 9)), "it bounds .* 0 or more"),
    (Accumulated, "strategy", ("batch", Batch), r"Accumulated wraps .* with the parentheses"),
    (VarianceClip, "strategy", (Frozen(Batch()),), "Only the outermost may be Frozen"),
    (Frozen, "strategy", ("batch", Frozen(Batch())), "Only the outermost may be Frozen"),
]


@pytest.mark.parametrize(("function", "argument", "values", "reason"), NUMBERS)
def test_strategies_refuse_wrong_arguments(unchecked, function, argument, values, reason):
    others = {"strategy": Batch(), "every": 2} if function is Accumulated else {}
    for value in values:
        words = f"^{re.escape(f'{argument}={value!r}')}: .*{reason}"
        with pytest.raises(ValueError, match=words):
            function(**{**others, argument: value})


@pytest.mark.parametrize(
    "wrong", [(1, 3, 10, 5), (1, "3", 1, 9), (1, np.inf, 1, 9), (1, 3, None, 9), (1, 3, 0.5, 9)]
)
def test_ramp_refuses_wrong_values_and_steps(wrong, unchecked):
    arguments = re.escape(f"begin={wrong[2]!r}, finish={wrong[3]!r}")
    with pytest.raises(ValueError, match=f"{arguments}.*begin= the smaller one"):
        Ramp(*wrong)


def test_strategies_accept_numpy_numbers():
    three: Any = np.float32(3)
    assert Renorm(r_max=three) == Renorm(r_max=3)


class Told(Cumulative):
    """Normalises by the step as the mean, and checks the batch that `update` is given."""

    def update(self, batch, memory):
        assert batch.eps == 0.25
        assert type(batch.merge(memory)) is type(batch.towards(memory, 0.5)) is Moments
        assert type(batch.astype(jnp.float32)) is Moments
        again = dataclasses.replace(batch, m2=0 * batch.m2)
        step = again.step.astype(batch.m2.dtype) * jnp.ones_like(batch.m2)
        return Moments.of(step, jnp.ones_like(step)), memory


@pytest.mark.nans
def test_strategy_receives_eps_and_the_step():
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


class Moved(Last):
    """Remembers moments without a count, where `init` makes one."""

    def update(self, batch, memory):
        return batch, memory.towards(Moments.of(batch.mean_pair, batch.memory_variance), 1.0)


class Begun(Last):
    """Remembers moments with a count, where `init` makes none."""

    def init(self, channels, dtype):
        return Moments.of(jnp.zeros(channels, dtype), 1)


LASTS = [Last(), VarianceClip(Last(), start=1), Moved(), Begun()]


@pytest.mark.parametrize("approach", LASTS, ids=repr)
def test_strategy_can_remember_the_batch_itself(approach):
    layer, state = make(C, "batch", approach=approach, unbiased=True)
    for scale in (1, 2):
        _, state = call(layer, state, scale * X)
    assert type(state.get(layer.memory_index).statistics) is Moments
    used = layer.running(state)
    np.testing.assert_allclose(used.mean, 2 * X.mean((0, 2)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(used.variance, np.var(2 * X, (0, 2), ddof=1), rtol=1e-6)


class Answers(AbstractStrategy[Running]):
    """Returns the results of its fields."""

    training: Any = eqx.field(default=lambda batch, memory: (batch, memory), static=True)
    inference_: Any = eqx.field(default=lambda memory: memory.moments, static=True)

    def init(self, channels, dtype):
        return Running.empty(channels, dtype)

    def update(self, batch, memory):
        return self.training(batch, memory)

    def infer(self, memory):
        return self.inference_(memory)


def halved(memory):
    return jax.tree.map(lambda a: a.astype(jnp.float16), memory)


def of_two(batch):
    return Moments.of(batch.mean[:2], batch.variance[:2])


WRONG_UPDATES = {
    r"Answers\.update returned nothing \(None\), but a training step needs two things"
    r".*return used, memory": lambda batch, memory: None,
    r"update returned TrainingBatch.*needs two things": lambda batch, memory: batch,
    r"before the memory, nothing \(None\), but the layer normalises by"
    r" Moments.*Moments\.of\(mean, variance\)": lambda batch, memory: (None, memory),
    r"before the memory, Running\(.*Return the \.moments of this": lambda batch, memory: (
        memory,
        batch,
    ),
    r"mean of shape \(2,\).*m2 of shape \(2,\), but this layer has 3 channels": (
        lambda batch, memory: (of_two(batch), memory)
    ),
    r"another structure, shape or dtype.*f\d\d\[\]\s+where `init` has made": (
        lambda batch, memory: (batch, 0.5)
    ),
    r"returned a memory of another structure, shape or dtype"
    r".*averages=Pair\(parts=f16\[2,2,3\].*has made.*averages=Pair\(parts=f\d\d\[2,2,3\]": (
        lambda batch, memory: (batch, halved(memory))
    ),
}
WRONG = [(Answers(update), False, words) for words, update in WRONG_UPDATES.items()]
PAIR = Answers(inference_=lambda memory: (memory.mean, memory.variance))
WRONG += [(PAIR, True, "infer returned a tuple of 2, .* but the layer normalises by Moments")]


@pytest.mark.parametrize(
    ("approach", "inference", "words"), WRONG, ids=[words[:40] for *_, words in WRONG]
)
def test_wrong_return_values_of_a_strategy_are_errors(approach, inference, words):
    wrong, state = make(C, "batch", approach=approach, inference=inference)
    batch, _ = make(C, "batch", approach="batch")

    def fail_then_succeed(x, state):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            wrong(x, state)
        return batch(x, state)  # the state is still valid

    jax.eval_shape(over_batch(fail_then_succeed), X, state)
