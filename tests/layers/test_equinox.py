"""Tests against Equinox's layer: the same numbers where it is right, and the faults it has.

A test of a fault fails when Equinox mends its layer; then the README's table loses a row.
"""

import dataclasses
import functools
import inspect
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from tests.helpers import call as precise_call
from tests.helpers import load, make, normal, over_batch
from tests.helpers import quick_call as call
from tests.helpers import quick_call_and_grad as call_and_grad

pytestmark = pytest.mark.x32  # Equinox's layer promotes
SHAPES = [(8, 5), (8, 5, 6), (4, 5, 3, 2), (4, 5, 2, 3, 2), (3, 5, 2, 2, 3, 2)]
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def pair(mode: Literal["batch", "ema"] = "batch", channels=5, **kwargs):
    """Returns this layer and Equinox's, each with its state."""
    theirs = eqx.nn.make_with_state(eqx.nn.BatchNorm)(channels, "batch", mode=mode, **kwargs)
    return make(channels, "batch", approach=mode, **kwargs), theirs


def with_random_affine(layer):
    return eqx.tree_at(
        lambda m: (m.weight, m.bias), layer, (normal(1, (5,), 1, 0.5), normal(2, (5,)))
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_training(mode, shape):
    (ours, our_state), (theirs, their_state) = pair(mode, momentum=0.7)
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
    (ours, our_state), (theirs, their_state) = pair(channelwise_affine=False)
    x = normal(0, (8, 5))
    close(call(ours, our_state, x)[0], call(theirs, their_state, x)[0])
    assert ours.weight is None
    assert ours.bias is None


def test_statistics_of_equinox_s_layer_are_taken_over():
    (ours, our_state), (theirs, their_state) = pair("ema")
    x = normal(0, (8, 5), 3, 2)
    _, their_state = call(theirs, their_state, x)
    assert theirs.ema_state_index is not None
    our_state = load(ours, our_state, *their_state.get(theirs.ema_state_index))
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
    assert memory.mean.dtype == jnp.result_type(complex)
    assert memory.variance.dtype == jnp.result_type(float)


def test_the_first_eight_arguments_are_equinox_s():
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


def test_it_is_equinox_s_without_its_memory():
    """Models ask `isinstance`; but no dead leaf is left, nor a dead field in the repr."""
    layer, state = make(3, "batch", approach="batch")
    assert isinstance(layer, eqx.nn.BatchNorm)
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


# --- The faults of Equinox's layer, which the README says that the swap puts right.

X = normal(0, (64, 3), 2, 1)


def both(x, inference=False, **kwargs):
    """Returns (output, state) of this layer, and of Equinox's, after one training step."""
    results = []
    for layer, state in pair(channels=3, **kwargs):
        y, state = precise_call(layer, state, x)
        if inference:
            y, state = precise_call(eqx.nn.inference_mode(layer), state, x)
        results.append((y, state))
    return results


def test_the_default():
    with pytest.warns(UserWarning, match="defaults to 'ema'"):
        assert eqx.nn.BatchNorm(3, "batch").mode == "ema"


def test_inference_variance_after_one_step():
    (ours, _), (theirs, _) = both(X, inference=True)
    np.testing.assert_allclose(theirs.std(), 0.1, rtol=0.1)  # variance 100 instead of 1
    np.testing.assert_allclose(ours.std(), 1, rtol=0.1)


def test_constant_channel():
    (ours, _), (theirs, _) = both(jnp.full_like(X[:7], 0.1))
    assert abs(theirs).max() > 1e-7
    assert abs(ours).max() == 0


def test_nan_in_one_batch():
    finite = []
    for layer, state in pair(channels=3):
        for x in (X, X.at[0, 0].set(jnp.nan), X):
            _, state = precise_call(layer, state, x)
        y, _ = precise_call(eqx.nn.inference_mode(layer), state, X)
        finite.append(bool(np.isfinite(y).all()))
    assert finite == [True, False]


@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_half_precision(half):
    x = X.astype(half)
    ours, theirs = pair("ema", channels=3)
    with pytest.raises(TypeError, match="select"):  # between float32 and half precision
        precise_call(*theirs, x)
    y, _ = precise_call(*ours, x)
    assert y.dtype == half
    # The first batch is normalised by itself; half an ulp of bfloat16 is 2**-9 of a value.
    np.testing.assert_allclose(np.asarray(y, np.float32).mean(0), np.zeros(3), atol=2**-9)
    np.testing.assert_allclose(np.asarray(y, np.float32).std(0), np.ones(3), rtol=2**-8)
    assert [y.dtype for y, _ in both(x)] == [half, jnp.float32]
    memories = [
        {leaf.dtype for leaf in jax.tree.leaves(state) if eqx.is_inexact_array(leaf)}
        for _, state in both(x, dtype=half)
    ]
    assert memories == [{jnp.dtype(jnp.float32)}, {jnp.dtype(half)}]


def test_plain_jit():
    """Equinox's layer has its axis name as a leaf (issue 1074)."""
    ours, theirs = pair(channels=3)
    run = jax.jit(lambda layer, state, x: over_batch(layer)(x, state)[0])
    with pytest.raises(TypeError, match="non-array argument|not a valid JAX type"):
        run(*theirs, X)
    assert run(*ours, X).shape == X.shape
