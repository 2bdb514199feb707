"""Where Equinox's layer is right, this one gives the same outputs and gradients."""

import dataclasses
import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, strategies

from .helpers import APPROACHES, make, normal
from .helpers import quick_call as call
from .helpers import quick_call_and_grad as call_and_grad

SHAPES = [(8, 5), (8, 5, 6), (4, 5, 3, 2), (4, 5, 2, 3, 2), (3, 5, 2, 2, 3, 2)]
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def pair(mode, **kwargs):
    ours = make(5, "batch", approach=mode, **kwargs)
    theirs = eqx.nn.make_with_state(eqx.nn.BatchNorm)(5, "batch", mode=mode, **kwargs)
    return ours, theirs


def with_random_affine(layer):
    return eqx.tree_at(
        lambda m: (m.weight, m.bias), layer, (normal(1, (5,), 1, 0.5), normal(2, (5,)))
    )


@pytest.mark.parametrize("momentum", [0.5, 0.99])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_training(mode, shape, momentum):
    (ours, our_state), (theirs, their_state) = pair(mode, momentum=momentum)
    ours, theirs = with_random_affine(ours), with_random_affine(theirs)
    for step in range(3):
        x, dy = normal(10 + step, shape, step, 2), normal(20 + step, shape)
        y, our_state, (grads, dx) = call_and_grad(ours, our_state, x, dy)
        their_y, their_state, (their_grads, their_dx) = call_and_grad(
            theirs, their_state, x, dy
        )
        close(y, their_y)
        close(dx, their_dx)
        close(grads.weight, their_grads.weight)
        close(grads.bias, their_grads.bias)
        if mode == "ema":
            inference = eqx.nn.inference_mode((ours, theirs))
            close(call(inference[0], our_state, x)[0], call(inference[1], their_state, x)[0])


def test_without_affine():
    (ours, our_state), (theirs, their_state) = pair("batch", channelwise_affine=False)
    x = normal(0, (8, 5))
    close(call(ours, our_state, x)[0], call(theirs, their_state, x)[0])
    assert ours.weight is None
    assert ours.bias is None


def test_statistics_of_equinox_s_layer_are_taken_over():
    (ours, our_state), (theirs, their_state) = pair("ema")
    x = normal(0, (8, 5), 3, 2)
    _, their_state = call(theirs, their_state, x)
    assert theirs.ema_state_index is not None
    mean, variance = their_state.get(theirs.ema_state_index)
    our_state = our_state.set(ours.memory_index, strategies.Running.loaded(mean, variance))
    ours, theirs = eqx.nn.inference_mode((ours, theirs))
    close(call(ours, our_state, x)[0], call(theirs, their_state, x)[0])


def test_complex():
    (ours, our_state), (theirs, their_state) = pair("ema", dtype=jnp.complex64)
    for step in range(2):
        x = jax.lax.complex(normal(step, (8, 5, 4), 1), normal(9 + step, (8, 5, 4), 2, 3))
        y, our_state = call(ours, our_state, x)
        their_y, their_state = call(theirs, their_state, x)
        close(y, their_y)
        assert y.dtype == jnp.complex64
    memory = our_state.get(ours.memory_index)
    assert memory.mean.dtype == jnp.complex64
    assert memory.variance.dtype == jnp.float32


def test_the_first_seven_arguments_are_equinox_s():
    ours = list(inspect.signature(BatchNorm.__init__).parameters.values())
    theirs = list(inspect.signature(eqx.nn.BatchNorm.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[:8]] == [(p.name, p.default) for p in theirs[:8]]
    assert [p.name for p in ours[8:]] == [
        "approach",
        "mode",
        "activation",
        "unbiased",
        "implementation",
    ]


class Issue659(eqx.Module):
    """Written as the script in the issue is: the forward pass asks for the layer's type."""

    layers: list

    def __init__(self, norm, key):
        keys = jax.random.split(key, 2)
        self.layers = [
            eqx.nn.Linear(4, 6, key=keys[0]),
            norm,
            jax.nn.relu,
            eqx.nn.Linear(6, 2, key=keys[1]),
        ]

    def __call__(self, x, state):
        for layer in self.layers:
            if isinstance(layer, eqx.nn.BatchNorm):
                x, state = layer(x, state)
            else:
                x = layer(x)
        return x, state


@pytest.mark.parametrize("approach", APPROACHES)
def test_a_model_that_asks_isinstance_needs_no_change(approach):
    def build():
        return Issue659(BatchNorm(6, "batch", approach=approach), jax.random.key(0))

    model, state = eqx.nn.make_with_state(build)()
    y, _ = call(model, state, normal(0, (8, 4)))
    assert y.shape == (8, 2)


def test_nothing_of_the_parent_s_memory_is_left():
    """The subclass drops the fields it replaces: no dead leaf, no dead field in the repr."""
    layer, state = make(3, "batch", approach="batch")
    assert [type(leaf) for leaf in jax.tree.leaves(layer)][2:] == [bool]
    assert "ema" not in str(layer)
    assert "counter" not in str(layer)
    dropped = {field.name for field in dataclasses.fields(eqx.nn.BatchNorm)} - set(vars(layer))
    assert dropped == {
        "mode",
        "ema_first_time_index",
        "ema_state_index",
        "batch_counter",
        "batch_state_index",
    }
    assert not dropped & set(dir(layer))
    assert not any(hasattr(layer, name) for name in dropped)
    # Mean, variance and weight, a rest of each, and two counts of batches.
    assert len(jax.tree.leaves(state)) == 8


def test_normalises():
    layer, state = make(5, "batch", approach="batch")
    for shape in SHAPES:
        y, _ = call(layer, state, normal(0, shape, 3, 2))
        axes = (0, *range(2, len(shape)))
        close(y.mean(axes), np.zeros(5))
        close(y.std(axes), np.ones(5))
