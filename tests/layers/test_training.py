"""Tests that a training step costs little to trace, to lower and to compile."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_norm import BatchNorm
from eqx_norm.strategies import Batch, Moments
from tests.helpers import same


def step(make, depth, shape):
    """Returns a lowered step of `depth` norms, each followed by a ReLU."""
    norms, state = eqx.nn.make_with_state(lambda: [make() for _ in range(depth)])()
    learnt, rest = eqx.partition(norms, eqx.is_inexact_array)

    def loss(learnt, x, state):
        def one(x, state):
            for norm in eqx.combine(learnt, rest):
                x, state = norm(x, state)
                x = jax.nn.relu(x)
            return x, state

        y, state = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )
        return jnp.vdot(y, jnp.cos(x)), state

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    return grad.lower(learnt, jnp.ones(shape), state)


def ours():
    return BatchNorm(64, "batch", approach="batch")


def equinox():
    return eqx.nn.BatchNorm(64, "batch", mode="batch")


@pytest.mark.x32
def test_a_step_is_fewer_loops_to_compile_than_equinox_s():
    def loops(make):
        text: str = step(make, 1, (32, 64, 14, 14)).compile().as_text()  # pyright: ignore
        entry = text[text.index("\nENTRY") :]
        return len(re.findall(r"= .* fusion\(.*kind=kLoop", entry))

    assert loops(ours) < loops(equinox)


def test_layers_that_are_alike_are_one_function():
    one, eight = (step(ours, n, (4, 64, 3)).as_text().count("\n") for n in (1, 8))
    assert eight < 1.5 * one


def test_what_a_layer_is_made_with_tells_them_apart():
    class Wider(Batch):
        def update(self, batch, memory):
            return Moments.of(batch.mean, 4 * batch.variance), memory

    x = jnp.linspace(-1.0, 2, 24).reshape(4, 3, 2)

    def used(**arguments):
        layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", **arguments)
        call = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = call(x, state)
        return y, state.get(layer.memory_index).statistics.variance

    plain, learnt = used(approach="batch")
    assert not same(used(approach="batch", eps=0.5)[0], plain)
    assert not same(used(approach="batch", activation=jax.nn.relu)[0], plain)
    assert not same(used(approach="batch", unbiased=True)[1], learnt)
    assert not same(used(approach=Wider())[0], plain)
    assert same(used(approach=Batch())[0], plain)


def test_a_strategy_that_has_no_hash_is_traced_each_time():
    class Noted(Batch):
        notes: list[str] = eqx.field(default_factory=list, static=True)

    x = jnp.linspace(-1.0, 2, 24).reshape(4, 3, 2)
    results = []
    for approach in (Batch(0.9), Noted(0.9)):
        layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach=approach)
        call = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = eqx.filter_jit(call)(x, state)
        results.append((y, state.get(layer.memory_index).statistics.mean))
    assert same(*results)
